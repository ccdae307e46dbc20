"""CUDA graphs of decoding steps: one launch in place of a kernel launch per operation. Not yet run on a GPU.

A graph replays recorded kernels on recorded addresses. So a step is padded to sizes that were recorded (powers of two)
and copied into tensors that stay: rows that are only padding read and write the cache's scratch block. A size is
recorded when it is first met. Steps with chunks of prompts run without graphs: their sizes hardly ever repeat.

A graph also holds the parameters' addresses: training must update them in place, as the optimizer does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from parallel.inference import Stage
from parallel.mesh import Mesh
from rollout.block_attention import BlockAttention
from rollout.paged_cache import Decode, PagedCache, plan_decode
from rollout.steps import Step

Recorded = tuple[Callable[[], object], Tensor]
"""What runs a recorded call again, and the tensor that it leaves its result in."""


@dataclass(frozen=True)
class _Graph:
    """Inputs of a size, what replays it, and its output `[n, H]`."""

    tokens: Tensor
    positions: Tensor
    plan: Decode
    replay: Callable[[], object]
    output: Tensor

    def load(self, tokens: Tensor, positions: Tensor, plan: Decode) -> None:
        for target, source in zip((self.tokens, self.positions, *self.plan), (tokens, positions, *plan), strict=True):
            target.copy_(source, non_blocking=True)


class DecodeGraphs:
    """Decoding steps of a whole model on one GPU.

    Args:
        most_rows: most rows of a step.
        most_blocks: most blocks of a sequence.
        record: gives what runs a call again; None: a CUDA graph of it.
    """

    def __init__(
        self,
        stage: Stage,
        cache: PagedCache,
        most_rows: int,
        most_blocks: int,
        record: Callable[[Callable[[], Tensor]], Recorded] | None = None,
    ):
        self.stage = stage
        self.cache = cache
        self.most_rows = most_rows
        self.most_blocks = most_blocks
        self.record = record or partial(record_cuda_graph, pool=torch.cuda.graph_pool_handle())
        self._graphs: dict[tuple[int, int, int], _Graph] = {}

    @property
    def sizes(self) -> list[tuple[int, int, int]]:
        """Rows, prefix tiles and rows of a tile, of each graph."""
        return list(self._graphs)

    def run(self, step: Step) -> Tensor:
        """Return the hidden states `[n, H]` of a step without chunks; they stay until the next run."""
        plan, num = plan_decode(step, self.cache.block_size), len(step.tokens)
        rows, tiles, width = (bucket(n, self.most_rows) for n in (num, len(plan.prefix_lengths), plan.width))
        size = rows, tiles, width
        padded = pad(plan, size, self.most_blocks, self.cache.scratch, self.cache.block_size)
        tokens, positions = F.pad(torch.tensor([step.tokens, step.positions]), (0, rows - num))
        graph = self._graphs.get(size)
        if graph is None:
            graph = self._graphs[size] = self._record(tokens, positions, padded)
        graph.load(tokens, positions, padded)
        graph.replay()
        return graph.output[:num]

    def _record(self, tokens: Tensor, positions: Tensor, plan: Decode) -> _Graph:
        device = self.cache.pool.device
        tokens, positions, plan = tokens.to(device), positions.to(device), plan.map(lambda x: x.to(device))

        def call() -> Tensor:
            self.cache.use(plan)
            return self.stage(tokens, positions, None, self.cache)

        return _Graph(tokens, positions, plan, *self.record(call))


def bucket(number: int, most: int) -> int:
    """Return the next power of two, at most `most`."""
    return min(1 << (number - 1).bit_length(), most)


def pad(plan: Decode, size: tuple[int, int, int], most_blocks: int, scratch: int, block_size: int) -> Decode:
    """Pad to `size` (rows, tiles, rows of a tile): what is added has one token, in the scratch block."""
    rows, tiles, width = size
    num, new_rows, new_tiles = len(plan.slots), rows - len(plan.slots), tiles - len(plan.prefix_lengths)

    def pad_tables(tables: Tensor, number: int) -> Tensor:
        return F.pad(F.pad(tables, (0, most_blocks - tables.shape[1])), (0, 0, 0, number), value=scratch)

    unfold = F.pad(plan.unfold // plan.width * width + plan.unfold % plan.width, (0, new_rows))
    fold = torch.zeros(tiles * width, dtype=torch.int64)
    fold[unfold[:num]] = torch.arange(num)
    return Decode(
        slots=F.pad(plan.slots, (0, new_rows), value=scratch * block_size),
        suffix_tables=pad_tables(plan.suffix_tables, new_rows),
        suffix_lengths=F.pad(plan.suffix_lengths, (0, new_rows), value=1),
        prefix_tables=pad_tables(plan.prefix_tables, new_tiles),
        prefix_lengths=F.pad(plan.prefix_lengths, (0, new_tiles), value=1),
        fold=fold,
        unfold=unfold,
    )


def record_cuda_graph(call: Callable[[], Tensor], pool: Any) -> Recorded:
    """Record a call, after running it: first calls compile kernels and get workspaces, which can't be recorded.

    Args:
        pool: memory for what is between inputs and outputs; graphs that never run at the same time may share it.
    """
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        output = call()
    return graph.replay, output


def check_graphs(mesh: Mesh, attention: BlockAttention | None) -> None:
    """Raise ValueError where graphs can't be recorded; collectives and messages between ranks might be, untried."""
    if mesh.layout.model_parallel_size > 1:
        raise ValueError("cuda_graphs: got True, allowed with tensor or pipeline parallelism: False")
    if attention is None or not attention.capturable:
        raise ValueError("cuda_graphs: got True, allowed only with flash-attn from 2.6 to before 2.8.4 on CUDA")
