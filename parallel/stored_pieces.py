"""Tensors on disk, cut into boxes: the format of `torch.distributed.checkpoint`, megatron-core's `torch_dist`.

A piece is a box of a tensor. Any rank may write any pieces, as long as together they fill the tensor; whoever reads
takes the boxes it needs out of those that were written, so the layout that reads is free.

The files' `.metadata` is a pickle: it is read by an unpickler that knows its classes and no others. Tensors are loaded
with `weights_only=True`.
"""

from __future__ import annotations

import errno
import io
import json
import math
import pickle
import threading
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemWriter, SavePlan, SavePlanner, save
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.serialization import get_crc32_options, set_crc32_options

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
BROKEN = (
    AttributeError,
    EOFError,
    IndexError,
    KeyError,
    OverflowError,
    RuntimeError,
    TypeError,
    pickle.UnpicklingError,
)
"""What comes of reading content that isn't what it should be."""
WRITE_FAILED = ("PytorchStreamWriter failed writing", "inline_container.cc")
"""What torch says when it can't write; the reason it keeps to itself."""
HELD_BYTES = 2**29
"""Of pieces read that are held for what is still to be taken from them."""


@dataclass(frozen=True)
class Piece:
    """A box of a stored tensor, to be written.

    Attributes:
        key: name of the tensor.
        size: of the whole tensor.
        offsets, shape: of the box in it.
        make: returns its values, of this shape, on the CPU; called when its turn to be written comes.
    """

    key: str
    size: tuple[int, ...]
    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    make: Callable[[], Tensor]

    @property
    def index(self) -> MetadataIndex:
        """What the files call it."""
        return MetadataIndex(self.key, torch.Size(self.offsets))

    @property
    def num_bytes(self) -> int:
        """Of its values."""
        return math.prod(self.shape) * self.dtype.itemsize


def write_pieces(folder: Path, pieces: Sequence[Piece], group: Any = None, num_threads: int = 1) -> None:
    """Write this rank's pieces into a folder; every rank of `group` must call it with its own.

    Args:
        group: of all ranks that write, whose messages travel on the CPU; None: this process writes everything.
        num_threads: each writes a file.

    Raises:
        OSError: there is no room. The others of the group get a CheckpointException that tells of it.
    """
    with warnings.catch_warnings(), _errors_as_they_are(), _without_crc32():
        warnings.simplefilter("ignore")  # that there is no process group, which may be meant
        writer = FileSystemWriter(str(folder), thread_count=num_threads, sync_files=group is not None)
        save({}, storage_writer=writer, planner=_Planner(pieces), process_group=group, no_dist=group is None)


def finish_checkpoint(folder: Path) -> None:
    """Write what megatron-core expects beside the pieces; the last thing to do."""
    torch.save({}, folder / "common.pt")
    (folder / "metadata.json").write_text(json.dumps(BACKEND), encoding="utf-8")


class _Planner(SavePlanner):
    """Tells torch's writer what to write, and makes each piece when its turn comes."""

    def __init__(self, pieces: Sequence[Piece]):
        self.pieces = {piece.index: piece for piece in pieces}

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        pass

    def create_local_plan(self) -> SavePlan:
        return SavePlan([_item(piece) for piece in self.pieces.values()])

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        tensors: dict[str, TensorStorageMetadata] = {}
        for item in (item for plan in all_plans for item in plan.items):
            data = item.tensor_data
            assert data is not None
            empty = TensorStorageMetadata(data.properties, data.size, [])
            tensors.setdefault(item.index.fqn, empty).chunks.append(data.chunk)
        return all_plans, Metadata(tensors)  # type: ignore[arg-type]

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        return self.pieces[write_item.index].make()


def _item(piece: Piece) -> WriteItem:
    chunk = ChunkStorageMetadata(torch.Size(piece.offsets), torch.Size(piece.shape))
    data = TensorWriteData(chunk, TensorProperties(dtype=piece.dtype), torch.Size(piece.size))
    return WriteItem(piece.index, WriteItemType.SHARD, tensor_data=data)


@contextmanager
def _without_crc32() -> Iterator[None]:
    """Let torch leave out the sums of its archives, which nothing compares: they take as long as writing does."""
    before = get_crc32_options()
    set_crc32_options(False)
    try:
        yield
    finally:
        set_crc32_options(before)


@contextmanager
def _errors_as_they_are() -> Iterator[None]:
    """Raise the first error of torch's writer: it wraps those of this thread, and takes no notice of other threads'."""
    errors: list[BaseException] = []
    ordinary = threading.excepthook
    threading.excepthook = lambda args: errors.append(args.exc_value or args.exc_type())
    try:
        yield
    except CheckpointException as error:
        errors += [failure for failure, _ in error.failures.values()]
    finally:
        threading.excepthook = ordinary
    if errors and any(text in str(errors[0]) for text in WRITE_FAILED):
        raise OSError(errno.EIO, f"a file could not be written, most often as the disk is full ({errors[0]})")
    if errors:
        raise errors[0]


class StoredPieces:
    """The tensors of a checkpoint on disk, and how to take boxes out of them. Threads may read at once.

    Raises:
        ValueError: the folder is no checkpoint in this format, or its parts are broken or missing.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        try:
            backend = json.loads((folder / "metadata.json").read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            inside = ", ".join(sorted(path.parent.name for path in folder.glob("*/metadata.json")))
            hint = f"; of a run's checkpoint name one model: {inside}" if inside else ""
            raise ValueError(f"{str(folder)!r} is no checkpoint: {error}{hint}") from error
        format_name = backend.get("sharded_backend") if isinstance(backend, dict) else None
        if format_name != "torch_dist":
            raise ValueError(f"sharded_backend of {str(folder)!r}: got {format_name!r}, allowed: 'torch_dist'")
        self._metadata = _read_metadata(folder / ".metadata")
        self._local = threading.local()
        try:
            self._check_files()
            self._chunks = self._written()
        except BROKEN as error:
            raise ValueError(f"{folder / '.metadata'} is broken: {error}") from error

    @property
    def keys(self) -> set[str]:
        """Names of the tensors."""
        return set(self._chunks)

    def size(self, key: str) -> tuple[int, ...]:
        """Return a whole tensor's size.

        Raises:
            ValueError: there is no such tensor.
        """
        return tuple(self._found(key).size)

    def dtype(self, key: str) -> torch.dtype:
        """Return a tensor's dtype; raises as `size`."""
        return self._found(key).properties.dtype

    def check_whole(self, key: str) -> None:
        """Raise ValueError unless the pieces fill the tensor."""
        held, full = sum(math.prod(chunk.sizes) for chunk in self._chunks.get(key, [])), math.prod(self.size(key))
        if held != full:
            raise ValueError(f"tensor {key}: its chunks hold {held} of {full} values")

    def fill(self, key: str, offsets: Sequence[int], out: Tensor, keep: bool = True) -> None:
        """Copy a box, which begins at `offsets` and has the size of `out`, out of the pieces that hold it. What lies
        beyond the stored tensor is left as it is.

        Args:
            keep: hold pieces that may have more for a later call; not needed where the last rows of a piece are read
                last.

        Raises:
            ValueError: a piece is broken, or pieces overlap or leave a hole.
        """
        filled = 0
        for chunk in self._chunks[key]:
            low = [max(one, other) for one, other in zip(chunk.offsets, offsets, strict=True)]
            high = [
                min(start + size, begin + length)
                for start, size, begin, length in zip(chunk.offsets, chunk.sizes, offsets, out.shape, strict=True)
            ]
            if any(start >= end for start, end in zip(low, high, strict=True)):
                continue
            inside = _slices(low, high, chunk.offsets)
            values = self._piece(key, chunk).reshape(chunk.sizes)
            out[_slices(low, high, offsets)] = values[inside]
            filled += values[inside].numel()
            last = [start + size for start, size in zip(chunk.offsets, chunk.sizes, strict=True)]
            if not keep and high == last:
                self._held.pop(MetadataIndex(key, chunk.offsets), None)
        stored = zip(self.size(key), offsets, out.shape, strict=True)
        if filled != math.prod(max(0, min(size - start, length)) for size, start, length in stored):
            raise ValueError(f"tensor {key} of {str(self.folder)!r}: its pieces overlap or leave a hole")

    @property
    def _held(self) -> dict[MetadataIndex, Tensor]:
        """Pieces that this thread may still need."""
        held: dict[MetadataIndex, Tensor] = self._local.__dict__.setdefault("held", {})
        return held

    def _found(self, key: str) -> TensorStorageMetadata:
        found = self._metadata.state_dict_metadata.get(key)
        if not isinstance(found, TensorStorageMetadata):
            raise ValueError(f"tensor {key} is missing in {str(self.folder)!r}")
        return found

    def _check_files(self) -> None:
        """Check that every file is there, and long enough."""
        ends: dict[str, int] = {}
        for info in self._metadata.storage_data.values():
            ends[info.relative_path] = max(ends.get(info.relative_path, 0), info.offset + info.length)
        for name, end in ends.items():
            if Path(name).name != name:
                raise ValueError(f"it names the file {name!a}, allowed: files of its own folder")
            path = self.folder / name
            if not path.is_file() or path.stat().st_size < end:
                raise ValueError(f"{path} is missing or cut off; expected {end} bytes")

    def _written(self) -> dict[str, list[ChunkStorageMetadata]]:
        """Return the pieces of each tensor that were written."""
        written: dict[str, list[ChunkStorageMetadata]] = defaultdict(list)
        for key, found in self._metadata.state_dict_metadata.items():
            if isinstance(found, TensorStorageMetadata):
                written[key] = [
                    chunk for chunk in found.chunks if MetadataIndex(key, chunk.offsets) in self._metadata.storage_data
                ]
        return dict(written)

    def _piece(self, key: str, chunk: ChunkStorageMetadata) -> Tensor:
        index = MetadataIndex(key, chunk.offsets)
        if index not in self._held:
            info = self._metadata.storage_data[index]
            while self._held and info.length + sum(held.nbytes for held in self._held.values()) > HELD_BYTES:
                del self._held[next(iter(self._held))]
            with (self.folder / info.relative_path).open("rb") as file:
                file.seek(info.offset)
                data = io.BytesIO(file.read(info.length))
            self._held[index] = self._loaded(key, chunk, data, info.relative_path)
        return self._held[index]

    def _loaded(self, key: str, chunk: ChunkStorageMetadata, data: io.BytesIO, file: str) -> Tensor:
        """Return a piece, which must be what the metadata says."""
        try:
            values = torch.load(data, map_location="cpu", weights_only=True)
        except (ValueError, *BROKEN) as error:
            raise ValueError(f"{self.folder / file}: a piece of {key} can't be read; the file is broken") from error
        expected = math.prod(chunk.sizes), self.dtype(key)
        if not isinstance(values, Tensor) or (values.numel(), values.dtype) != expected:
            raise ValueError(f"{self.folder / file}: a piece of {key} is not what the metadata states")
        return values


def _slices(low: Sequence[int], high: Sequence[int], origin: Sequence[int]) -> tuple[slice, ...]:
    """Return where a box lies in another one that begins at `origin`."""
    return tuple(slice(start - at, end - at) for start, end, at in zip(low, high, origin, strict=True))


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
    except (OSError, ValueError, MemoryError, *BROKEN) as error:
        raise ValueError(f"{path} can't be read: {error}") from error
    if not isinstance(metadata, Metadata):
        raise ValueError(f"{path} can't be read: it is no metadata of a checkpoint")
    return metadata
