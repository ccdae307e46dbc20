"""A model's weights as a checkpoint in megatron-core's `torch_dist` format, by one process, one tensor at a time.

Every layout loads it (`megatron.core.dist_checkpointing`), whatever layout wrote it; megatron-core gives a parameter
the same key with either layer spec. The files are those of `torch.distributed.checkpoint`. Their `.metadata` is a
pickle: it is read by an unpickler that knows its classes and no others. Tensors are loaded with `weights_only=True`.

In such a checkpoint all layers of a parameter are one tensor, whose first dimension is the layer.
"""

from __future__ import annotations

import io
import json
import pickle
import shutil
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemWriter, SavePlan, SavePlanner, save
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from parallel.hf_folder import Source, appears_whole, copy_companions
from parallel.hf_tensors import Rule, assemble, fuse, tensor_rules
from parallel.qwen import QwenShape, padded_vocab_size, read_shape

HF_PART = "huggingface"
"""Subfolder with config.json, the tokenizer and the other companion files."""
BACKEND = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
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
Progress = Callable[[int], None]
"""Told how many bytes more are done."""


@dataclass(frozen=True)
class StoredTensor:
    """One layer's parameter, or one of the whole model, in a checkpoint."""

    key: str
    rule: Rule
    layer: int | None
    shape: tuple[int, ...]
    num_layers: int

    @property
    def size(self) -> tuple[int, ...]:
        """Of the stored tensor, all layers together."""
        return self.shape if self.layer is None else (self.num_layers, *self.shape)

    @property
    def chunk_shape(self) -> tuple[int, ...]:
        """Of the whole parameter as a chunk of the stored tensor."""
        return self.shape if self.layer is None else (1, *self.shape)


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


class _Planner(SavePlanner):
    """Tells torch's writer what to write, and makes each tensor when its turn comes."""

    def __init__(self, stored: list[StoredTensor], source: Source, progress: Progress):
        self.stored = {(item.key, item.layer): item for item in stored}
        self.source = source
        self.items = [self._item(item) for item in stored]
        self.progress = progress

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        pass

    def create_local_plan(self) -> SavePlan:
        return SavePlan(self.items)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        tensors: dict[str, TensorStorageMetadata] = {}
        for item in all_plans[0].items:
            data = item.tensor_data
            assert data is not None
            empty = TensorStorageMetadata(data.properties, data.size, [])
            tensors.setdefault(item.index.fqn, empty).chunks.append(data.chunk)
        return all_plans, Metadata(tensors)  # type: ignore[arg-type]

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        offset = write_item.index.offset
        assert offset is not None
        item = self.stored.get((write_item.index.fqn, None)) or self.stored[write_item.index.fqn, offset[0]]
        like = torch.empty(item.shape, device="meta")
        tensor = fuse(item.rule, self.source.read, 0, 1, like).reshape(item.chunk_shape).contiguous()
        self.progress(tensor.nbytes)
        return tensor

    def _item(self, item: StoredTensor) -> WriteItem:
        offsets = torch.Size([item.layer or 0, *([0] * (len(item.chunk_shape) - 1))])
        return WriteItem(
            index=MetadataIndex(item.key, offsets),
            type=WriteItemType.SHARD,
            tensor_data=TensorWriteData(
                chunk=ChunkStorageMetadata(offsets, torch.Size(item.chunk_shape)),
                properties=TensorProperties(dtype=self.source.dtype_of(item.rule.tensors)),
                size=torch.Size(item.size),
            ),
        )


def write_checkpoint(
    target: Path, source_folder: Path, source: Source, shape: QwenShape, head: str, progress: Progress
) -> None:
    """Write a checkpoint of a folder's weights, in their dtype; it appears at `target` when it is whole and on disk.

    Args:
        source: the opened weights of `source_folder`, checked against `shape`.

    Raises:
        ValueError: the tensors of one parameter differ in dtype.
    """
    planner = _Planner(stored_tensors(shape, head), source, progress)
    with appears_whole(target) as folder:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that there is no process group, which is meant
            save({}, storage_writer=FileSystemWriter(str(folder)), planner=planner, no_dist=True)
        torch.save({}, folder / "common.pt")
        (folder / HF_PART).mkdir()
        shutil.copyfile(source_folder / "config.json", folder / HF_PART / "config.json")
        copy_companions(source_folder, folder / HF_PART)
        (folder / "metadata.json").write_text(json.dumps(BACKEND), encoding="utf-8")


class StoredWeights:
    """The weights of a checkpoint on disk.

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
        output = self._metadata.state_dict_metadata.get("output_layer.weight")
        is_scalar = isinstance(output, TensorStorageMetadata) and tuple(output.size) == (1, self.shape.hidden_size)
        self.head = "scalar" if is_scalar else "lm"
        self._check()

    def tensors(self, stored: StoredTensor) -> dict[str, Tensor]:
        """Return the Hugging Face tensors of a parameter, read from disk now."""
        return assemble(stored.rule, [self._read(stored)])

    def dtype(self, stored: StoredTensor) -> torch.dtype:
        return self._metadata.state_dict_metadata[stored.key].properties.dtype  # type: ignore[union-attr]

    def _check(self) -> None:
        """Check that every parameter is there, whole, in files that are long enough."""
        ends: dict[str, int] = {}
        for info in self._metadata.storage_data.values():
            ends[info.relative_path] = max(ends.get(info.relative_path, 0), info.offset + info.length)
        for name, end in ends.items():
            path = self.folder / name
            if not path.is_file() or path.stat().st_size < end:
                raise ValueError(f"{path} is missing or cut off; expected {end} bytes")
        for stored in stored_tensors(self.shape, self.head):
            found = self._metadata.state_dict_metadata.get(stored.key)
            if not isinstance(found, TensorStorageMetadata):
                raise ValueError(f"tensor {stored.key} is missing in {str(self.folder)!r}")
            size, expected = list(found.size), list(stored.size)
            if stored.rule.padded:  # by how many rows depends on the layout that wrote it
                del size[0], expected[0]
            if size != expected:
                raise ValueError(f"tensor {stored.key} has shape {list(found.size)}; expected {list(stored.size)}")

    def _read(self, stored: StoredTensor) -> Tensor:
        """Return the whole parameter, put together from its chunks."""
        found = self._metadata.state_dict_metadata[stored.key]
        assert isinstance(found, TensorStorageMetadata)
        skip = len(stored.size) - len(stored.shape)
        chunks = [chunk for chunk in found.chunks if stored.layer is None or chunk.offsets[0] == stored.layer]
        if len(chunks) == 1:
            return self._chunk(stored, chunks[0]).reshape(chunks[0].sizes[skip:])
        whole = torch.empty(found.size[skip:], dtype=found.properties.dtype)
        for chunk in chunks:
            spans = zip(chunk.offsets[skip:], chunk.sizes[skip:], strict=True)
            place = tuple(slice(start, start + size) for start, size in spans)
            whole[place] = self._chunk(stored, chunk).reshape(chunk.sizes[skip:])
        return whole

    def _chunk(self, stored: StoredTensor, chunk: ChunkStorageMetadata) -> Tensor:
        info = self._metadata.storage_data[MetadataIndex(stored.key, chunk.offsets)]
        with (self.folder / info.relative_path).open("rb") as file:
            file.seek(info.offset)
            return torch.load(io.BytesIO(file.read(info.length)), map_location="cpu", weights_only=True)


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
