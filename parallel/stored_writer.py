"""Writes a Hugging Face folder's weights as a checkpoint (`stored_weights.py`): one process, pieces of a few rows."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from parallel.hf_folder import Source, TensorInfo, copy_companions
from parallel.hf_tensors import Head, cut_runs
from parallel.qwen import QwenShape
from parallel.stored_pieces import Piece, finish_checkpoint, write_pieces
from parallel.stored_weights import HF_PART, StoredTensor, stored_tensors
from parallel.whole_folder import appears_whole

NUM_THREADS = min(4, os.cpu_count() or 1)
"""Each writes a file."""
Progress = Callable[[int], None]
"""Told how many bytes more are done, by several threads."""


def write_checkpoint(
    target: Path, source_folder: Path, source: Source, shape: QwenShape, head: Head, progress: Progress
) -> None:
    """Write a checkpoint of a folder's weights, in their dtype; it appears at `target` when it is whole and on disk.

    Args:
        source: the opened weights of `source_folder`, checked against `shape`.

    Raises:
        ValueError: the tensors of one parameter, in all layers, differ in dtype.
        OSError: there is no room.
    """
    parameters = stored_tensors(shape, head)
    for key in {stored.key for stored in parameters}:  # all layers of one lie in one tensor
        source.dtype_of(name for stored in parameters if stored.key == key for name in stored.rule.tensors)
    pieces = [piece for stored in parameters for piece in _pieces(stored, source, progress)]
    with appears_whole(target) as folder:
        write_pieces(folder, pieces, num_threads=NUM_THREADS)
        (folder / HF_PART).mkdir()
        shutil.copyfile(source_folder / "config.json", folder / HF_PART / "config.json")
        copy_companions(source_folder, folder / HF_PART)
        finish_checkpoint(folder)


def _pieces(stored: StoredTensor, source: Source, progress: Progress) -> Iterator[Piece]:
    """Yield a parameter in pieces of a few rows, each read when its turn comes."""
    dtype = source.dtype_of(stored.rule.tensors)
    layer = () if stored.layer is None else (stored.layer,)
    info = TensorInfo(stored.key, stored.shape, dtype)
    for start, stop in info.pieces():

        def make(start: int = start, stop: int = stop) -> Tensor:
            rows = torch.empty(stop - start, *info.shape[1:], dtype=dtype)
            for run in cut_runs(stored.runs, start, stop):
                part = rows[run.start - start : run.stop - start]
                if run.name is None:
                    part.zero_()
                else:
                    source.fill(run.name, run.first, part)
            progress(rows.nbytes)
            return rows[(None,) * len(layer)]

        shape = (*(1 for _ in layer), stop - start, *info.shape[1:])
        yield Piece(stored.key, stored.size, (*layer, start, *(0 for _ in info.shape[1:])), shape, dtype, make)
