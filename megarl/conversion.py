"""Conversion of weights between Hugging Face folders and checkpoints, their comparison and description.

One process; pieces of some rows are in memory, never the model.
"""

from __future__ import annotations

import math
import shutil
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from megarl.progress import Progress
from parallel.hf_checks import check_hf, has_scalar_head
from parallel.hf_folder import (
    ShardWriter,
    Source,
    TensorInfo,
    copy_companions,
    open_source,
    plan_shards,
    shown,
)
from parallel.hf_tensors import SCORE, Head, all_rules
from parallel.mesh import Layout
from parallel.qwen import QwenShape, read_shape
from parallel.stored_weights import HF_PART, StoredWeights, stored_tensors
from parallel.stored_writer import NUM_THREADS, write_checkpoint
from parallel.whole_folder import appears_whole

MEGABYTE = 10**6
EMBEDDING, OUTPUT = "model.embed_tokens.weight", "lm_head.weight"
SPARE = 1.01
"""Free space asked for, in multiples of the tensors' bytes: headers and companion files take some."""


def to_megatron(source: Path, target: Path, layout: Layout) -> None:
    """Convert a Hugging Face folder to a checkpoint, which appears at `target` when it is whole.

    Args:
        layout: checked to fit the model; a checkpoint is the same for all layouts.

    Raises:
        ValueError: names the field, its value and the values allowed; nothing was written.
    """
    _check_target(target)
    shape, head = check_folder(source)
    layout.check(shape, layout.tensor_model_parallel_size * layout.pipeline_model_parallel_size)
    with open_source(source) as opened:
        _check_nothing_is_left_out(opened, shape, head)
        size = _num_bytes(shape, head, opened)
        _check_space(target, size)
        with _progress("to-megatron", size) as report:
            write_checkpoint(target, source, opened, shape, head, report)


def to_hf(source: Path, target: Path, max_shard_bytes: int) -> None:
    """Convert a checkpoint, of whatever layout, to a Hugging Face folder, which appears at `target` when it is whole.

    Raises:
        ValueError: names the field, its value and the values allowed; nothing was written.
    """
    _check_target(target)
    if max_shard_bytes < 1:
        raise ValueError(f"max_shard_size: got {max_shard_bytes}, allowed: from 1 byte")
    weights = StoredWeights(source)
    infos = [weights.info(name) for name in weights.names]
    size = sum(info.num_bytes for info in infos)
    _check_space(target, size)
    with appears_whole(target) as folder, _progress("to-hf", size) as report:
        with (
            ShardWriter(folder, plan_shards(infos, max_shard_bytes)) as writer,
            ThreadPoolExecutor(NUM_THREADS) as pool,
        ):

            def convert(names: Sequence[str]) -> None:
                for name in names:
                    for start, stop in weights.info(name).pieces():
                        rows = weights.rows(name, start, stop)
                        writer.write(name, start, rows)
                        report(rows.nbytes)

            for _ in pool.map(convert, weights.parameters):
                pass  # raises the first error
        shutil.copyfile(source / HF_PART / "config.json", folder / "config.json")
        copy_companions(source / HF_PART, folder)


class Weights(Protocol):
    """The tensors of a folder or a checkpoint under their Hugging Face names."""

    @property
    def names(self) -> Collection[str]: ...
    def info(self, name: str) -> TensorInfo: ...
    def rows(self, name: str, start: int, stop: int) -> Tensor: ...


@contextmanager
def open_weights(path: Path) -> Iterator[tuple[QwenShape, Weights]]:
    """Open a Hugging Face folder or a checkpoint.

    Raises:
        ValueError: it is neither, or broken.
    """
    if (path / "metadata.json").is_file():
        stored = StoredWeights(path)
        yield stored.shape, stored
        return
    shape, _ = check_folder(path)
    with open_source(path) as source:
        yield shape, source


@dataclass(frozen=True)
class Difference:
    """A tensor that isn't the same on both sides, and in what."""

    name: str
    what: str


def differences(left: Path, right: Path) -> Iterator[Difference]:
    """Compare two models tensor by tensor; yields what isn't equal bit for bit, as it is found."""
    with open_weights(left) as (_, one), open_weights(right) as (_, other):
        for name in sorted(set(one.names) ^ set(other.names)):
            yield Difference(shown([name]), f"only in {left if name in one.names else right}")
        both = sorted(name for name in one.names if name in other.names)
        with Progress("verify", len(both), rank=0) as progress:
            for number, name in enumerate(both, 1):
                what = compare(name, one, other)
                if what:
                    yield Difference(shown([name]), what)
                progress.update(number, {})


def compare(name: str, one: Weights, other: Weights) -> str:
    """Say how a tensor differs on two sides; nothing if it is equal bit for bit."""
    left, right = one.info(name), other.info(name)
    if left.shape != right.shape:
        return f"shape {list(left.shape)} against {list(right.shape)}"
    if left.dtype != right.dtype:
        return f"dtype {left.dtype} against {right.dtype}"
    number, largest = 0, 0.0
    for start, stop in left.pieces():
        rows, others = one.rows(name, start, stop), other.rows(name, start, stop)
        bits = [each.view(torch.int16 if left.dtype.itemsize == 2 else torch.int32) for each in (rows, others)]
        if not torch.equal(*bits):
            number += int((bits[0] != bits[1]).sum())
            largest = max(largest, (rows.float() - others.float()).abs().nan_to_num(math.inf).max().item())
    return f"{number} of {math.prod(left.shape)} values, by up to {largest:.3g}" if number else ""


def describe(path: Path) -> list[tuple[str, str]]:
    """Say what a folder or checkpoint holds, and which layouts fit: (what, value) in order."""
    with open_weights(path) as (shape, weights):
        names = weights.names
        dtype = weights.info("model.norm.weight").dtype
        kind = "checkpoint" if isinstance(weights, StoredWeights) else "Hugging Face folder"
    stated = all_rules(shape, "scalar" if SCORE in names else "lm").values()
    parameters = {name: size for rule in stated for name, size in rule.tensors.items()}
    num_parameters = sum(math.prod(size) for size in parameters.values())
    return [
        ("kind", kind),
        ("family", shape.family),
        (
            "head",
            "scalar" if SCORE in names else "tied output matrix" if shape.tie_word_embeddings else "output matrix",
        ),
        ("parameters", f"{num_parameters:,}"),
        ("dtype", str(dtype).removeprefix("torch.")),
        ("layers", str(shape.num_layers)),
        ("hidden size", str(shape.hidden_size)),
        ("feed-forward size", str(shape.ffn_hidden_size)),
        ("heads", f"{shape.num_attention_heads} query, {shape.num_query_groups} key and value, size {shape.head_dim}"),
        ("vocabulary", str(shape.vocab_size)),
        ("longest sequence", str(shape.max_position_embeddings)),
        ("tensor parallel sizes", _fitting(shape, "tensor_model_parallel_size")),
        ("pipeline sizes, even", _fitting(shape, "pipeline_model_parallel_size")),
    ]


def _fitting(shape: QwenShape, field: str) -> str:
    """Return the sizes of one axis that fit the model, up to 64."""
    sizes = []
    for size in range(1, 65):
        try:
            replace(Layout(), **{field: size}).check(shape, size)  # type: ignore[arg-type]
        except ValueError:
            continue
        sizes.append(str(size))
    return ", ".join(sizes)


def check_folder(folder: Path) -> tuple[QwenShape, Head]:
    """Check a Hugging Face folder by its config and the headers of its files; returns its shape and head.

    Raises:
        ValueError: names what is missing, broken or unknown.
    """
    if not (folder / "config.json").is_file():
        raise ValueError(f"model: got {str(folder)!r}, allowed: a folder with a config.json, or a checkpoint")
    shape = read_shape(folder)
    head: Head = "scalar" if has_scalar_head(folder) else "lm"
    check_hf(folder, shape, head)
    return shape, head


def _num_bytes(shape: QwenShape, head: Head, source: Source) -> int:
    return sum(
        math.prod(stored.shape) * source.dtype_of(stored.rule.tensors).itemsize
        for stored in stored_tensors(shape, head)
    )


def _check_nothing_is_left_out(source: Source, shape: QwenShape, head: Head) -> None:
    """Raise ValueError for tensors that the model has no place for, but for a tied output matrix that is the embedding
    once more, and tables of rotary angles, which older folders hold."""
    known = {name for rule in all_rules(shape, head).values() for name in rule.tensors}
    unknown = {name for name in source.names - known if not name.endswith("rotary_emb.inv_freq")}
    if head == "lm" and shape.tie_word_embeddings and OUTPUT in unknown:
        pairs = (
            (source.read(name, (slice(*span),)) for name in (OUTPUT, EMBEDDING))
            for span in source.info(EMBEDDING).pieces()
        )
        if source.info(OUTPUT) == replace(source.info(EMBEDDING), name=OUTPUT) and all(
            torch.equal(one, other) for one, other in pairs
        ):
            unknown.discard(OUTPUT)
    if unknown:
        raise ValueError(
            f"model: its weights hold {len(unknown)} tensors that its config.json has no place for, allowed: none "
            f"({shown(sorted(unknown))})"
        )


def _check_target(target: Path) -> None:
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ValueError(f"output: got {str(target)!r}, which exists; allowed: a new folder")


def _check_space(target: Path, num_bytes: int) -> None:
    """Refuse a disk that hasn't room, before anything is written."""
    parent = next(folder for folder in target.absolute().parents if folder.exists())
    free = shutil.disk_usage(parent).free
    if free < num_bytes * SPARE:
        raise ValueError(
            f"output: {num_bytes / MEGABYTE:.0f} MB are needed at {str(parent)!r}, {free / MEGABYTE:.0f} MB are free"
        )


class Report:
    """Counts bytes and shows them in MB, with the rate and the time left. Threads may call it."""

    def __init__(self, name: str, num_bytes: int):
        self.total = max(num_bytes // MEGABYTE, 1)
        self.progress = Progress(f"{name}, MB", self.total, rank=0)
        self.num_bytes = num_bytes
        self.done = 0
        self.started = time.monotonic()
        self.lock = threading.Lock()

    def __call__(self, num_bytes: int) -> None:
        with self.lock:
            self.done += num_bytes
            step = self.total if self.done == self.num_bytes else min(self.done // MEGABYTE, self.total - 1)
            seconds = max(time.monotonic() - self.started, 1e-6)
            self.progress.update(step, {"GB/s": self.done / seconds / 1e9})


@contextmanager
def _progress(name: str, num_bytes: int) -> Iterator[Report]:
    report = Report(name, num_bytes)
    with report.progress:
        yield report
