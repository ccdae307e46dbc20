"""Checkpoints of a run: saved by all ranks at once, in the background or not, loaded by any layout.

The format is megatron-core's `torch_dist`, which it loads. Its writer is left aside: it gathers the optimizer's state
over data ranks, starts processes for each checkpoint and, with torch's Adam, needs changes inside the optimizer. Here
each rank writes its own boxes (`parallel.sharded_state`) in a thread.
"""

from __future__ import annotations

import io
import json
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from parallel.checkpoint_folder import INFO, STATE, SUMS, CheckpointFolder, CheckpointSettings, checksum, files_of
from parallel.hf_folder import copy_companions
from parallel.mesh import Mesh
from parallel.optimizer import Trainable
from parallel.sharded_state import Box, optimizer_boxes, prepare_state, set_step, weight_boxes
from parallel.stored_pieces import Piece, StoredPieces, finish_checkpoint, write_pieces
from parallel.stored_weights import HF_PART
from parallel.whole_folder import appears_whole, partial_of

logger = logging.getLogger(__name__)

Result = TypeVar("Result")
NUM_THREADS = min(4, os.cpu_count() or 1)
"""Each writes a file, of every rank."""


@dataclass(frozen=True)
class Saved:
    """A model of a run, and the Hugging Face folder whose config and tokenizer go with its weights."""

    trainable: Trainable
    source: Path


@dataclass(frozen=True)
class Loaded:
    """Name, state and information of the checkpoint a run goes on from."""

    name: str
    state: Any
    info: dict[str, Any]


class Checkpoints:
    """Saves and loads the models of a run together with its state. Every rank must make the same calls.

    Args:
        root: the folder of the checkpoints.
        models: by name, which is the name of their folder.
    """

    def __init__(self, root: Path, mesh: Mesh, models: Mapping[str, Saved], settings: CheckpointSettings):
        self.folder = CheckpointFolder(root)
        self.mesh = mesh
        self.models = models
        self.settings = settings
        self._under_way: Future[None] | None = None

    def save(self, name: str, state: Any, info: Mapping[str, Any], at_once: bool = False) -> None:
        """Save models and state as checkpoint `name`; names must ascend. Returns when what is to be written has been
        copied, and a former checkpoint is written to its end.

        Args:
            state: plain values and tensors; that of rank 0 is saved.
            info: JSON values, with the step's "metrics", by which the best are kept.
            at_once: return only when all is on the disk; so it is too without `save_async`.

        Raises:
            OSError: no room; RuntimeError: another rank failed. Also of the former checkpoint.
        """
        self.wait()
        in_background = self.settings.save_async and not at_once
        pieces = {name: _pieces(saved.trainable, copy=in_background) for name, saved in self.models.items()}
        content = _to_bytes(state) if self.mesh.rank == 0 else b""
        steps = {model: saved.trainable.num_steps for model, saved in self.models.items()}
        sources = {model: saved.source for model, saved in self.models.items()}
        information = {**info, "optimizer_steps": steps}
        write = _Write(self.folder, self.settings, self.mesh, name, pieces, sources, content, information)
        if in_background:
            self._under_way = _in_background(write.run)
        else:
            write.run()

    @property
    def idle(self) -> bool:
        """Whether no checkpoint is being written."""
        return self._under_way is None or self._under_way.done()

    def wait(self) -> None:
        """Wait until the checkpoint under way is on the disk. Raises as `save`."""
        under_way, self._under_way = self._under_way, None
        if under_way is not None:
            under_way.result()

    def close(self, seconds: float | None = None) -> None:
        """`wait`, but after an error only for so many seconds: other ranks may never write their part."""
        under_way, self._under_way = self._under_way, None
        if under_way is not None and (seconds is None or wait([under_way], seconds).done):
            under_way.result()

    def load_latest(self) -> Loaded | None:
        """Load the newest checkpoint that is whole into the models; None if there is none.

        Raises:
            ValueError: it is of other models, on every rank alike.
        """
        names = self.mesh.from_first_rank((self.folder.names()[::-1], self.folder.unfinished()))
        for unfinished in names[1]:
            self._warn("%s was not written to its end and is ignored", self.folder.path(unfinished))
        for name in names[0]:
            found = self.folder.problem(name, self.mesh.rank, self.mesh.world_size)
            problem = next((one for one in everywhere(self.mesh, found) if one is not None), None)
            if problem is None:
                return self._load(name)
            if self.mesh.rank == 0:
                aside = self.folder.set_aside(name)
                logger.warning("checkpoint %s is ignored, and now called %s: %s", name, aside.name, problem)
            everywhere(self.mesh, None)  # renamed before anyone goes on
        return None

    def _load(self, name: str) -> Loaded:
        folder, info = self.folder.path(name), self.folder.info(name)

        def load() -> Any:
            for model, saved in self.models.items():
                load_boxes(folder / model, saved.trainable, info["optimizer_steps"][model])
            return torch.load(folder / STATE, map_location="cpu", weights_only=True)

        state = together(self.mesh, load)
        logger.info("went on from checkpoint %s", folder)
        return Loaded(name, state, info)

    def _warn(self, message: str, *values: object) -> None:
        if self.mesh.rank == 0:
            logger.warning(message, *values)


@torch.no_grad()
def load_boxes(folder: Path, trainable: Trainable, num_steps: int) -> None:
    """Fill this rank's weights and optimizer from a model's folder in a checkpoint, whatever layout wrote it.

    Raises:
        ValueError: it is of another model, or has no optimizer.
    """
    stored = StoredPieces(folder)
    prepare_state(trainable)
    boxes = [*weight_boxes(trainable), *optimizer_boxes(trainable)]
    for key in sorted({box.key for box in boxes}):
        stored.check_whole(key)
    for box in boxes:
        size, expected = list(stored.size(box.key)), list(box.size)
        if box.pads:  # by how many rows the layout decides; they are zeros
            box.values.zero_()
            del size[0], expected[0]
        if size != expected:
            raise ValueError(f"{folder}: tensor {box.key} has shape {list(stored.size(box.key))}; expected {expected}")
        stored.fill(box.key, box.offsets, box.values)
    set_step(trainable, num_steps)


def _pieces(trainable: Trainable, copy: bool) -> list[Piece]:
    """Return what this rank writes of a model: copies, if training is to go on meanwhile."""
    prepare_state(trainable)
    boxes = [box for box in (*weight_boxes(trainable), *optimizer_boxes(trainable)) if box.writes]
    return [_piece(box, box.values.detach().to("cpu", copy=copy)) for box in boxes]


def _piece(box: Box, values: torch.Tensor) -> Piece:
    return Piece(box.key, box.size, box.offsets, tuple(values.shape), values.dtype, values.contiguous)


@dataclass(frozen=True)
class _Write:
    """One rank's part in writing a checkpoint; runs in the main thread or in the background."""

    folder: CheckpointFolder
    settings: CheckpointSettings
    mesh: Mesh
    name: str
    pieces: Mapping[str, Sequence[Piece]]
    sources: Mapping[str, Path]
    state: bytes
    info: Mapping[str, Any]

    def run(self) -> None:
        """Write, rename, let `latest` follow, and remove what need not be kept."""
        started = time.perf_counter()
        partial = partial_of(self.folder.path(self.name))
        with ExitStack() as renaming:
            sizes = everywhere(self.mesh, sum(piece.num_bytes for pieces in self.pieces.values() for piece in pieces))
            needed = sum(sizes) + len(self.state)
            self._on_first_rank(lambda: self._begin(needed, renaming))
            for model, pieces in self.pieces.items():
                write_pieces(partial / model, pieces, self.mesh.writer_group, NUM_THREADS)
            sums = everywhere(self.mesh, together(self.mesh, lambda: self._sums(partial)))
            self._on_first_rank(lambda: self._finish(partial, sums))
            self._on_first_rank(renaming.close)
        self._on_first_rank(self._publish)
        seconds = time.perf_counter() - started
        logger.info("checkpoint %s: %.3f GiB in %.2f s", self.name, needed / 2**30, seconds)

    def _on_first_rank(self, action: Callable[[], None]) -> None:
        together(self.mesh, action if self.mesh.rank == 0 else _nothing)

    def _begin(self, needed: int, renaming: ExitStack) -> None:
        self.folder.root.mkdir(parents=True, exist_ok=True)
        self.folder.check_room(needed, self.settings)
        shutil.rmtree(self.folder.path(self.name), ignore_errors=True)
        partial = renaming.enter_context(appears_whole(self.folder.path(self.name)))
        for model in self.pieces:
            (partial / model).mkdir()

    def _sums(self, partial: Path) -> dict[str, str]:
        """Return the checksums of the files that this rank has written."""
        files = sorted(partial.glob(f"*/__{self.mesh.rank}_*"))
        with ThreadPoolExecutor(NUM_THREADS) as pool:
            return {
                str(file.relative_to(partial)): one for file, one in zip(files, pool.map(checksum, files), strict=True)
            }

    def _finish(self, partial: Path, sums: Sequence[Mapping[str, str]]) -> None:
        """Write what only rank 0 writes."""
        known = {file: one for part in sums for file, one in part.items()}
        for model, source in self.sources.items():
            hf_part = partial / model / HF_PART
            hf_part.mkdir()
            shutil.copyfile(source / "config.json", hf_part / "config.json")
            copy_companions(source, hf_part)
            finish_checkpoint(partial / model)
        (partial / STATE).write_bytes(self.state)
        (partial / INFO).write_text(json.dumps(self.info, indent=2) + "\n", encoding="utf-8")
        lines = [f"{known.get(file) or checksum(partial / file)}  {file}\n" for file in sorted(files_of(partial))]
        (partial / SUMS).write_text("".join(lines), encoding="utf-8")

    def _publish(self) -> None:
        self.folder.move_latest(self.name)
        for removed in self.folder.retain(self.settings):
            logger.info("checkpoint %s removed", removed)


def together(mesh: Mesh, action: Callable[[], Result]) -> Result:
    """Run an action on all ranks; an error on one of them ends it on all.

    Raises:
        Exception: its own error; RuntimeError on the other ranks.
    """
    error: Exception | None = None
    try:
        result = action()
    except Exception as caught:
        error = caught
    problems = everywhere(mesh, None if error is None else f"{type(error).__name__}: {error}")
    if error is not None:
        raise error
    for rank, problem in enumerate(problems):
        if problem is not None:
            raise RuntimeError(f"rank {rank}: {problem}")
    return result


def everywhere(mesh: Mesh, item: Any) -> list[Any]:
    """Return the item of every rank of the job, in order."""
    items: list[Any] = [None] * mesh.world_size
    dist.all_gather_object(items, item, group=mesh.writer_group)
    return items


def _in_background(action: Callable[[], None]) -> Future[None]:
    """Run an action in a thread that doesn't keep a failing process from ending."""
    future: Future[None] = Future()

    def run() -> None:
        try:
            action()
            future.set_result(None)
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="checkpoint", daemon=True).start()
    return future


def _nothing() -> None:
    """What most ranks do while rank 0 writes the files of all."""


def _to_bytes(state: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()
