"""Writes a Hugging Face folder's weights as a checkpoint (`stored_weights.py`): one process, pieces of a few rows."""

from __future__ import annotations

import json
import os
import shutil
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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

from parallel.hf_folder import Source, TensorInfo, copy_companions
from parallel.hf_tensors import Head, cut_runs
from parallel.qwen import QwenShape
from parallel.stored_weights import HF_PART, StoredTensor, stored_tensors
from parallel.whole_folder import appears_whole

BACKEND = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
NUM_THREADS = min(4, os.cpu_count() or 1)
"""Each writes a file."""
Progress = Callable[[int], None]
"""Told how many bytes more are done, by several threads."""


class _Planner(SavePlanner):
    """Tells torch's writer what to write, and makes each piece when its turn comes."""

    def __init__(self, stored: list[StoredTensor], source: Source, progress: Progress):
        self.source = source
        self.progress = progress
        self.pieces: dict[MetadataIndex, tuple[StoredTensor, TensorInfo, int, int]] = {}
        self.items = [item for parameter in stored for item in self._items(parameter)]

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
        parameter, info, start, stop = self.pieces[write_item.index]
        piece = torch.empty(stop - start, *info.shape[1:], dtype=info.dtype)
        for run in cut_runs(parameter.runs, start, stop):
            rows = piece[run.start - start : run.stop - start]
            if run.name is None:
                rows.zero_()
            else:
                self.source.fill(run.name, run.first, rows)
        self.progress(piece.nbytes)
        return piece if parameter.layer is None else piece.unsqueeze(0)

    def _items(self, parameter: StoredTensor) -> list[WriteItem]:
        """Return one item per piece of a parameter."""
        dtype = self.source.dtype_of(parameter.rule.tensors)
        info = TensorInfo(parameter.key, parameter.shape, dtype)
        layer = [] if parameter.layer is None else [parameter.layer]
        items = []
        for start, stop in info.pieces():
            offsets = torch.Size([*layer, start, *(0 for _ in info.shape[1:])])
            sizes = torch.Size([*(1 for _ in layer), stop - start, *info.shape[1:]])
            index = MetadataIndex(parameter.key, offsets)
            self.pieces[index] = parameter, info, start, stop
            data = TensorWriteData(
                ChunkStorageMetadata(offsets, sizes), TensorProperties(dtype=dtype), torch.Size(parameter.size)
            )
            items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
        return items


def write_checkpoint(
    target: Path, source_folder: Path, source: Source, shape: QwenShape, head: Head, progress: Progress
) -> None:
    """Write a checkpoint of a folder's weights, in their dtype; it appears at `target` when it is whole and on disk.

    Args:
        source: the opened weights of `source_folder`, checked against `shape`.

    Raises:
        ValueError: the tensors of one parameter differ in dtype.
        OSError: there is no room.
    """
    planner = _Planner(stored_tensors(shape, head), source, progress)
    with appears_whole(target) as folder:
        with warnings.catch_warnings(), _errors_as_they_are():
            warnings.simplefilter("ignore")  # that there is no process group, which is meant
            writer = FileSystemWriter(str(folder), thread_count=NUM_THREADS, sync_files=False)
            save({}, storage_writer=writer, planner=planner, no_dist=True)
        torch.save({}, folder / "common.pt")
        (folder / HF_PART).mkdir()
        shutil.copyfile(source_folder / "config.json", folder / HF_PART / "config.json")
        copy_companions(source_folder, folder / HF_PART)
        (folder / "metadata.json").write_text(json.dumps(BACKEND), encoding="utf-8")


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
    if errors:
        raise errors[0]
