"""Hugging Face model folders on disk: read slices of safetensors, write shards with an index and companion files."""

from __future__ import annotations

import fnmatch
import json
import math
import os
import shutil
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
DTYPE_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}
WEIGHT_FILES = ("*.safetensors", "*.bin", "*.index.json")
COMPANION_FOLDERS = ("additional_chat_templates",)
PIECE_BYTES = 2**24
"""Of rows that are read or written at once. The C library uses memory again from one piece to the next up to 32 MiB;
larger ones get fresh pages from the system each time, which takes longer than copying."""


def shown(names: Sequence[str], most: int = 5) -> str:
    """Return names for a message: the first few, whatever they hold made harmless."""
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(ascii(name)[1:-1] for name in names[:most]) + rest


@dataclass(frozen=True)
class TensorInfo:
    """A tensor in a file, or one that is going to be written."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def pieces(self) -> Iterator[tuple[int, int]]:
        """Yield the first row and the row after the last of pieces of at most `PIECE_BYTES`, or of one row."""
        if not self.shape:
            raise ValueError(f"tensor {self.name!a} is one number, allowed: tensors with rows")
        rows = self.shape[0]
        step = max(1, PIECE_BYTES * rows // max(self.num_bytes, 1))
        for start in range(0, rows, step):
            yield start, min(start + step, rows)


class Source:
    """The tensors of a folder's safetensors files, as the files themselves list them (an index may be wrong).

    The library reads slices through mapped memory, whose pages stay with the process; `fill` reads rows without.
    """

    def __init__(self, files: dict[Path, tuple[Any, BinaryIO]]):
        """`files` holds files opened by the safetensors library, and plainly, by path."""
        self._files: dict[str, Any] = {}
        self._places: dict[str, tuple[int, int]] = {}  # file descriptor and first byte
        for path, (file, plain) in files.items():
            length = int.from_bytes(plain.read(8), "little")
            header = json.loads(plain.read(length))
            for name in file.keys():  # noqa: SIM118 (not a dict)
                if name in self._files:
                    raise ValueError(f"tensor {name} is in two files, {path.name} and another; allowed: one")
                self._files[name] = file
                self._places[name] = plain.fileno(), 8 + length + header[name]["data_offsets"][0]

    @property
    def names(self) -> set[str]:
        """Names of all tensors."""
        return set(self._files)

    def check(self, expected: dict[str, tuple[int, ...]]) -> None:
        """Check that all these tensors are present with these shapes, reading headers only.

        Raises:
            ValueError: names the tensor, its expected and its found shape (or dtype).
        """
        for name, shape in expected.items():
            if name not in self._files:
                raise ValueError(f"tensor {name} is missing; expected shape {list(shape)}")
            found = self._files[name].get_slice(name)
            if tuple(found.get_shape()) != shape:
                raise ValueError(f"tensor {name} has shape {list(found.get_shape())}; expected {list(shape)}")
            if found.get_dtype() not in DTYPES:
                raise ValueError(_wrong_dtype(name, found.get_dtype()))

    def read(self, name: str, bounds: tuple[slice, ...]) -> Tensor:
        """Return one part of a tensor, on the CPU in the file's dtype; reads no more than that part."""
        return self._files[name].get_slice(name)[bounds]

    def info(self, name: str) -> TensorInfo:
        """Return shape and dtype of a tensor.

        Raises:
            ValueError: it isn't of floating point.
        """
        found = self._files[name].get_slice(name)
        dtype = DTYPES.get(found.get_dtype())
        if dtype is None:
            raise ValueError(_wrong_dtype(name, found.get_dtype()))
        return TensorInfo(name, tuple(found.get_shape()), dtype)

    def fill(self, name: str, start: int, out: Tensor) -> None:
        """Read rows of a tensor, from `start` on, into a contiguous one of its dtype. Threads may call it."""
        descriptor, offset = self._places[name]
        left = memoryview(out.view(torch.uint8).flatten().numpy().data)
        offset += start * (len(left) // len(out))
        while left:
            read = os.preadv(descriptor, [left], offset)
            if read == 0:
                raise ValueError(f"tensor {name} is cut off")
            offset, left = offset + read, left[read:]

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """Return rows of a tensor, on the CPU in the file's dtype."""
        info = self.info(name)
        out = torch.empty(stop - start, *info.shape[1:], dtype=info.dtype)
        self.fill(name, start, out)
        return out

    def dtype_of(self, names: Iterable[str]) -> torch.dtype:
        """Return the one dtype of some tensors.

        Raises:
            ValueError: they have several.
        """
        found = {self._files[name].get_slice(name).get_dtype(): name for name in names}
        if len(found) > 1:
            stated = ", ".join(f"{name} {dtype}" for dtype, name in found.items())
            raise ValueError(f"tensors {stated}: they differ in dtype, allowed: one, as they become one parameter")
        return DTYPES[next(iter(found))]


@contextmanager
def open_source(folder: str | Path) -> Iterator[Source]:
    """Open a folder's tensors: the files its index names, else `model.safetensors`, else every safetensors file.

    Raises:
        ValueError: there is no such file, the index names a missing file, or two files hold the same tensor.
    """
    with ExitStack() as stack:
        files: dict[Path, tuple[Any, BinaryIO]] = {}
        for path in weight_files(Path(folder)):
            files[path] = stack.enter_context(_open(path)), stack.enter_context(path.open("rb"))
        yield Source(files)


def _wrong_dtype(name: str, dtype: str) -> str:
    return f"tensor {name} has dtype {dtype}; allowed: {', '.join(DTYPES)}"


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except SafetensorError as error:
        raise ValueError(f"{path} is broken: {error}") from error


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files of a model folder, see `open_source`."""
    index = folder / INDEX_FILE
    if index.is_file():
        try:
            names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{index} is broken, its weight_map can't be read: {error!r}") from error
        missing = sorted(name for name in names if not (folder / name).is_file())
        if missing:
            raise ValueError(f"{index} names {', '.join(missing)}, but there is no such file")
        return sorted(folder / name for name in names)
    if (folder / SINGLE_FILE).is_file():
        return [folder / SINGLE_FILE]
    found = sorted(folder.glob("*.safetensors"))
    if not found:
        raise ValueError(f"model folder is {str(folder)!r}: it holds no *.safetensors file")
    return found


def plan_shards(tensors: Iterable[TensorInfo], max_shard_bytes: int) -> list[list[TensorInfo]]:
    """Cut tensors in order into files of at most `max_shard_bytes`, or of one larger tensor."""
    shards: list[list[TensorInfo]] = []
    filled = 0
    for info in tensors:
        if not shards or filled + info.num_bytes > max_shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(info)
        filled += info.num_bytes
    return shards


class ShardWriter:
    """Writes tensors into the files of a plan, rows in any order, by several threads; a context manager.

    At the end all must be there. Several files get an index. The library itself writes only what is whole in memory.
    """

    def __init__(self, folder: Path, plan: Sequence[Sequence[TensorInfo]]):
        self._places: dict[str, tuple[TensorInfo, BinaryIO, int]] = {}  # its file and its first byte there
        self._lock = threading.Lock()
        with ExitStack() as stack:
            weight_map: dict[str, str] = {}
            for number, infos in enumerate(plan, 1):
                name = SINGLE_FILE if len(plan) == 1 else f"model-{number:05d}-of-{len(plan):05d}.safetensors"
                self._begin(stack.enter_context((folder / name).open("wb", buffering=0)), infos)
                weight_map |= {info.name: name for info in infos}
            if len(plan) > 1:
                total_size = sum(info.num_bytes for infos in plan for info in infos)
                write_json(folder / INDEX_FILE, {"metadata": {"total_size": total_size}, "weight_map": weight_map})
            self._files = stack.pop_all()
        self._missing = {name: math.prod(info.shape) for name, (info, *_) in self._places.items()}

    def _begin(self, file: BinaryIO, infos: Sequence[TensorInfo]) -> None:
        """Write the head of a file: its length, names and places as JSON (the format's own README)."""
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        end = 0
        for info in infos:
            start, end = end, end + info.num_bytes
            header[info.name] = {"dtype": DTYPE_NAMES[info.dtype], "shape": info.shape, "data_offsets": [start, end]}
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)  # the data begin at a multiple of 8
        file.write(len(text).to_bytes(8, "little") + text)
        for info in infos:
            self._places[info.name] = info, file, 8 + len(text) + header[info.name]["data_offsets"][0]

    def write(self, name: str, start: int, rows: Tensor) -> None:
        """Write rows of a tensor, from row `start` on; a tensor without dimensions is one row."""
        info, file, offset = self._places[name]
        assert (rows.dtype, rows.shape[1:]) == (info.dtype, info.shape[1:]), f"not as planned: {name}"
        with self._lock:
            self._missing[name] -= rows.numel()
        assert self._missing[name] >= 0, f"not as planned: too many rows of {name}"
        offset += start * math.prod(info.shape[1:]) * info.dtype.itemsize
        left = memoryview(rows.contiguous().flatten().view(torch.uint8).numpy().data)
        while left:
            written = os.pwrite(file.fileno(), left, offset)
            offset, left = offset + written, left[written:]

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._files.close()
        missing = [name for name, number in self._missing.items() if number]
        assert kind is not None or not missing, f"not as planned: rows of {', '.join(missing)} are missing"


def write_shards(folder: Path, tensors: Iterable[tuple[str, Tensor]], plan: Sequence[Sequence[TensorInfo]]) -> None:
    """Write whole tensors as they come: one is held at a time."""
    with ShardWriter(folder, plan) as writer:
        for name, tensor in tensors:
            writer.write(name, 0, tensor)


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write JSON as transformers does (indented, with a final newline)."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def copy_companions(source: Path, target: Path) -> None:
    """Copy, byte for byte, all files that are neither weights nor config.json: tokenizer, chat templates, generation
    settings and whatever else lies there. Of subfolders only `COMPANION_FOLDERS` are copied."""
    for path in source.iterdir():
        if path.is_file() and path.name != "config.json" and not _is_weight_file(path.name):
            shutil.copyfile(path, target / path.name)
    for name in COMPANION_FOLDERS:
        if (source / name).is_dir():
            shutil.copytree(source / name, target / name)


def _is_weight_file(name: str) -> bool:
    return any(fnmatch.fnmatch(name, pattern) for pattern in WEIGHT_FILES)
