"""A model's weights as a checkpoint in megatron-core's `torch_dist` format: what is in it, and reading by one process.

Every layout loads it (`megatron.core.dist_checkpointing`), whatever layout wrote it; megatron-core gives a parameter
the same key with either layer spec. The files are those of `torch.distributed.checkpoint`. Their `.metadata` is a
pickle: it is read by an unpickler that knows its classes and no others. Tensors are loaded with `weights_only=True`.

In such a checkpoint all layers of a parameter are one tensor, whose first dimension is the layer.
"""

from __future__ import annotations

import io
import json
import math
import pickle
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from parallel.hf_folder import TensorInfo
from parallel.hf_tensors import Head, Rule, Run, row_runs, tensor_rules
from parallel.qwen import QwenShape, padded_vocab_size, read_shape

HF_PART = "huggingface"
"""Subfolder with config.json, the tokenizer and the other companion files."""
SAFE_CLASSES = {
    "builtins": {"set"},
    "collections": {"OrderedDict"},
    "pathlib": {"Path", "PosixPath"},
    "torch": {"Size", "device"},
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.metadata": {
        *("BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta"),
        *("TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING"),
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo", "_StoragePrefix"},
    "torch.distributed.checkpoint.planner": {
        *("BytesIOWriteData", "SavePlan", "TensorWriteData", "WriteItem", "WriteItemType"),
    },
    "megatron.core.dist_checkpointing.strategies.torch": {"MCoreMetadata", "MCoreSavePlan"},
}
"""What a `.metadata` may be made of, by module; and any dtype of torch."""
HELD_BYTES = 2**29
"""Of a checkpoint's chunks that are held for the rows still to be read from them."""


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


def stored_tensors(shape: QwenShape, head: str = "lm") -> list[StoredTensor]:
    """Return everything that a checkpoint of the model holds, in a fixed order."""
    rules = tensor_rules(shape, head)
    if shape.tie_word_embeddings and head == "lm":
        del rules["output_layer.weight"]  # stored as the embedding
    fused_into_linear = ("decoder.layers.input_layernorm.weight", "decoder.layers.pre_mlp_layernorm.weight")
    stored = []
    for key, rule in rules.items():
        if key in fused_into_linear:
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
    """The weights of a checkpoint on disk. Threads may read at once.

    Raises:
        ValueError: the folder is no checkpoint in this format, or its parts are broken or missing.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        try:
            backend = json.loads((folder / "metadata.json").read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ValueError(f"{str(folder)!r} is no checkpoint: {error}") from error
        if backend.get("sharded_backend") != "torch_dist":
            raise ValueError(
                f"sharded_backend of {str(folder)!r}: got {backend.get('sharded_backend')!r}, allowed: 'torch_dist'"
            )
        self._metadata = _read_metadata(folder / ".metadata")
        self.shape = read_shape(folder / HF_PART)
        self._local = threading.local()
        output = self._metadata.state_dict_metadata.get("output_layer.weight")
        is_scalar = isinstance(output, TensorStorageMetadata) and tuple(output.size) == (1, self.shape.hidden_size)
        self.head: Head = "scalar" if is_scalar else "lm"
        self._owners = {name: item for item in stored_tensors(self.shape, self.head) for name in item.rule.tensors}
        self._check()

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
        return TensorInfo(name, stored.rule.tensors[name], self._found(stored.key).properties.dtype)

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """Return rows of a Hugging Face tensor, read from disk now."""
        info, stored = self.info(name), self._owners[name]
        out = torch.empty(stop - start, *info.shape[1:], dtype=info.dtype)
        for run in stored.runs:
            low, high = max(run.first, start), min(run.first + run.stop - run.start, stop)
            if run.name == name and low < high:
                self._copy(stored, run.start + low - run.first, out[low - start : high - start])
        return out

    @property
    def _held(self) -> dict[MetadataIndex, Tensor]:
        """Chunks that this thread still needs."""
        held: dict[MetadataIndex, Tensor] = self._local.__dict__.setdefault("held", {})
        return held

    def _found(self, key: str) -> TensorStorageMetadata:
        found = self._metadata.state_dict_metadata.get(key)
        if not isinstance(found, TensorStorageMetadata):
            raise ValueError(f"tensor {key} is missing in {str(self.folder)!r}")
        return found

    def _check(self) -> None:
        """Check that every parameter is there, whole, in files that are long enough."""
        ends: dict[str, int] = {}
        for info in self._metadata.storage_data.values():
            ends[info.relative_path] = max(ends.get(info.relative_path, 0), info.offset + info.length)
        for name, end in ends.items():
            path = self.folder / name
            if not path.is_file() or path.stat().st_size < end:
                raise ValueError(f"{path} is missing or cut off; expected {end} bytes")
        for stored in {item.key: item for item in self._owners.values()}.values():
            found = self._found(stored.key)
            size, expected = list(found.size), list(stored.size)
            if stored.rule.padded:  # by how many rows depends on the layout that wrote it
                del size[0], expected[0]
            if size != expected:
                raise ValueError(f"tensor {stored.key} has shape {list(found.size)}; expected {list(stored.size)}")
            written = [
                chunk
                for chunk in found.chunks
                if MetadataIndex(stored.key, chunk.offsets) in self._metadata.storage_data
            ]
            held = sum(math.prod(chunk.sizes) for chunk in written)
            if held != math.prod(found.size):
                raise ValueError(f"tensor {stored.key}: its chunks hold {held} of {math.prod(found.size)} values")

    def _copy(self, stored: StoredTensor, start: int, out: Tensor) -> None:
        """Copy rows of a parameter, from `start` on, out of the chunks that hold them."""
        skip = len(stored.size) - len(stored.shape)
        for chunk in self._found(stored.key).chunks:
            if skip and chunk.offsets[0] != stored.layer:
                continue
            first, *offsets = chunk.offsets[skip:]
            num_rows, *widths = chunk.sizes[skip:]
            low, high = max(first, start), min(first + num_rows, start + len(out))
            if low >= high:
                continue
            columns = [slice(begin, begin + width) for begin, width in zip(offsets, widths, strict=True)]
            rows = self._chunk(stored.key, chunk).reshape(num_rows, *widths)[low - first : high - first]
            out[(slice(low - start, high - start), *columns)] = rows
            if high == first + num_rows and not stored.rule.groups and widths == list(stored.shape[1:]):
                del self._held[MetadataIndex(stored.key, chunk.offsets)]  # whoever reads in order is done with it

    def _chunk(self, key: str, chunk: ChunkStorageMetadata) -> Tensor:
        index = MetadataIndex(key, chunk.offsets)
        if index not in self._held:
            info = self._metadata.storage_data[index]
            while self._held and info.length + sum(held.nbytes for held in self._held.values()) > HELD_BYTES:
                del self._held[next(iter(self._held))]
            with (self.folder / info.relative_path).open("rb") as file:
                file.seek(info.offset)
                data = io.BytesIO(file.read(info.length))
            self._held[index] = torch.load(data, map_location="cpu", weights_only=True)
        return self._held[index]


class _Unpickler(pickle.Unpickler):
    """Makes the classes of a `.metadata` and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or name in SAFE_CLASSES.get(module, ()):
            return super().find_class(module, name)
        raise ValueError(f"it holds {module}.{name}, which no checkpoint needs")


def _read_metadata(path: Path) -> Metadata:
    try:
        with path.open("rb") as file:
            metadata = _Unpickler(file).load()
    except (OSError, EOFError, pickle.UnpicklingError, ValueError, AttributeError) as error:
        raise ValueError(f"{path} can't be read: {error}") from error
    if not isinstance(metadata, Metadata):
        raise ValueError(f"{path} can't be read: it is no metadata of a checkpoint")
    return metadata
