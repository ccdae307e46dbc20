"""A model's weights in a checkpoint (`stored_pieces.py`): what is in it under which key, and reading by one process.

Every layout loads it, whatever layout wrote it, and megatron-core too (`megatron.core.dist_checkpointing`), which gives
a parameter the same key with either layer spec. In such a checkpoint all layers of a parameter are one tensor, whose
first dimension is the layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from parallel.hf_folder import TensorInfo, shown
from parallel.hf_tensors import Head, Rule, Run, row_runs, tensor_rules
from parallel.qwen import QwenShape, padded_vocab_size, read_shape
from parallel.stored_pieces import StoredPieces

HF_PART = "huggingface"
"""Subfolder with config.json, the tokenizer and the other companion files."""
FUSED_INTO_LINEAR = {
    "decoder.layers.input_layernorm.weight": "decoder.layers.self_attention.linear_qkv.layer_norm_weight",
    "decoder.layers.pre_mlp_layernorm.weight": "decoder.layers.mlp.linear_fc1.layer_norm_weight",
}
"""Parameters of the torch spec that are stored by the name of Transformer Engine's."""


OTHER_KEYS = ("optimizer.", "chained_", "rng_state", "rerun_state")
"""How keys begin that are no weights: optimizers and random states, ours and megatron-core's."""


@dataclass(frozen=True)
class StoredTensor:
    """One layer's parameter, or one of the whole model, in a checkpoint."""

    key: str
    rule: Rule
    layer: int | None
    shape: tuple[int, ...]
    num_layers: int

    @property
    def runs(self) -> list[Run]:
        """Where its rows come from."""
        return row_runs(self.rule, self.shape[0])

    @property
    def size(self) -> tuple[int, ...]:
        """Of the stored tensor, all layers together."""
        return self.shape if self.layer is None else (self.num_layers, *self.shape)


def stored_tensors(shape: QwenShape, head: Head = "lm") -> list[StoredTensor]:
    """Return everything that a checkpoint of the model holds, in a fixed order."""
    rules = tensor_rules(shape, head)
    if shape.tie_word_embeddings and head == "lm":
        del rules["output_layer.weight"]  # stored as the embedding
    stored = []
    for key, rule in rules.items():
        if key in FUSED_INTO_LINEAR:
            continue
        sizes = list(rule.tensors.values())
        rows = padded_vocab_size(shape.vocab_size, 1) if rule.padded else sum(size[0] for size in sizes)
        whole = (rows, *sizes[0][1:])
        if key.startswith("decoder.layers."):
            stored += [
                StoredTensor(key, rule.at(layer), layer, whole, shape.num_layers) for layer in range(shape.num_layers)
            ]
        else:
            stored.append(StoredTensor(key, rule, None, whole, shape.num_layers))
    return stored


class StoredWeights:
    """The weights of a checkpoint on disk, as Hugging Face tensors. Threads may read at once.

    Raises:
        ValueError: the folder is no checkpoint in this format, or its parts are broken or missing.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self._pieces = StoredPieces(folder)
        self.shape = read_shape(folder / HF_PART)
        scalar = "output_layer.weight" in self._pieces.keys and self._pieces.size("output_layer.weight")[0] == 1
        self.head: Head = "scalar" if scalar else "lm"
        self._owners = {name: item for item in stored_tensors(self.shape, self.head) for name in item.rule.tensors}
        parameters = {item.key: item for item in self._owners.values()}
        for stored in parameters.values():
            self._check(stored)
        unknown = sorted(key for key in self._pieces.keys - set(parameters) if not key.startswith(OTHER_KEYS))
        if unknown:
            raise ValueError(f"{str(folder)!r} holds tensors that its config.json has no place for: {shown(unknown)}")

    @property
    def names(self) -> list[str]:
        """Hugging Face names of the tensors, in the order of the checkpoint."""
        return list(self._owners)

    @property
    def parameters(self) -> list[tuple[str, ...]]:
        """The same, those of one parameter together: they are best read by one thread."""
        return list(dict.fromkeys(tuple(stored.rule.tensors) for stored in self._owners.values()))

    def info(self, name: str) -> TensorInfo:
        """Return a Hugging Face tensor's shape and dtype."""
        stored = self._owners[name]
        return TensorInfo(name, stored.rule.tensors[name], self._pieces.dtype(stored.key))

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """Return rows of a Hugging Face tensor, read from disk now."""
        info, stored = self.info(name), self._owners[name]
        out = torch.empty(stop - start, *info.shape[1:], dtype=info.dtype)
        for run in stored.runs:
            low, high = max(run.first, start), min(run.first + run.stop - run.start, stop)
            if run.name == name and low < high:
                self._fill(stored, run.start + low - run.first, out[low - start : high - start])
        return out

    def _fill(self, stored: StoredTensor, row: int, out: Tensor) -> None:
        """Copy rows of a parameter from `row` on."""
        offsets = [row, *(0 for _ in stored.shape[1:])]
        keep = bool(stored.rule.groups)  # elsewhere whoever reads in order is done with a piece at its last row
        if stored.layer is None:
            self._pieces.fill(stored.key, offsets, out, keep)
        else:
            self._pieces.fill(stored.key, [stored.layer, *offsets], out.unsqueeze(0), keep)

    def _check(self, stored: StoredTensor) -> None:
        """Check that a parameter is there, whole."""
        size, expected = list(self._pieces.size(stored.key)), list(stored.size)
        if stored.rule.padded:  # by how many rows depends on the layout that wrote it
            least = next(iter(stored.rule.tensors.values()))[0]
            if size and size[0] < least:
                raise ValueError(f"tensor {stored.key} has {size[0]} rows; expected vocab_size {least} and more")
            del size[:1], expected[0]
        if size != expected:
            found = list(self._pieces.size(stored.key))
            raise ValueError(f"tensor {stored.key} has shape {found}; expected {list(stored.size)}")
        self._pieces.check_whole(stored.key)
