"""Sizes of the parallel axes, validated, and the frozen `Mesh` of process groups made from them.

Ranks are laid out as megatron-core does (order tp-cp-ep-dp-pp): the tensor index changes fastest, the pipeline index
slowest.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from parallel.launch import World
from parallel.options import option
from parallel.qwen import QwenShape

WRITER_TIMEOUT = timedelta(hours=2)
"""Longest wait of ranks that have written their part of a checkpoint for those that have not."""


@dataclass(frozen=True)
class Layout:
    """Sizes of the parallel axes, in ranks (virtual pipeline: in model chunks per rank)."""

    tensor_model_parallel_size: int = option(1, "ranks that split each layer's matrices")
    pipeline_model_parallel_size: int = option(1, "ranks that split the layers into stages")
    virtual_pipeline_model_parallel_size: int | None = option(None, "stages per pipeline rank (interleaved schedule)")
    context_parallel_size: int = option(1, "ranks that split each sequence (only 1 is implemented)")
    sequence_parallel: bool = option(False, "split activations between layers over the tensor ranks")
    num_layers_in_first_pipeline_stage: int | None = option(None, "layers of the first pipeline rank, if not its share")
    num_layers_in_last_pipeline_stage: int | None = option(None, "layers of the last pipeline rank, if not its share")

    @property
    def model_parallel_size(self) -> int:
        """Ranks that share one copy of the model."""
        return self.tensor_model_parallel_size * self.pipeline_model_parallel_size * self.context_parallel_size

    @property
    def num_chunks(self) -> int:
        """Model chunks held by each rank (virtual pipeline stages)."""
        return self.virtual_pipeline_model_parallel_size or 1

    @property
    def num_stages(self) -> int:
        """Pipeline stages of the whole model, virtual ones counted."""
        return self.pipeline_model_parallel_size * self.num_chunks

    def local_kv_heads(self, shape: QwenShape) -> int:
        """Return the key/value heads of each tensor rank.

        Where there are more ranks than heads, tensor rank r has head r // (ranks / heads): neighbours share one.
        """
        return max(1, shape.num_query_groups // self.tensor_model_parallel_size)

    def data_parallel_size(self, world_size: int) -> int:
        """Return the number of model copies in `world_size` ranks.

        Raises:
            ValueError: the world is no multiple of one copy's ranks.
        """
        if world_size % self.model_parallel_size:
            raise ValueError(
                f"world size: got {world_size}, allowed: multiples of tensor {self.tensor_model_parallel_size} x "
                f"pipeline {self.pipeline_model_parallel_size} x context {self.context_parallel_size} = "
                f"{self.model_parallel_size}"
            )
        return world_size // self.model_parallel_size

    def check(self, shape: QwenShape, world_size: int) -> None:
        """Check the sizes against the model and the world, before any process group exists.

        Raises:
            ValueError: names the field, its value and the values allowed.
        """
        self._check_sizes()
        self.data_parallel_size(world_size)
        self._check_tensor(shape)
        self._check_pipeline(shape)

    def _check_sizes(self) -> None:
        for name in ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: got {getattr(self, name)}, allowed: integers from 1")
        if self.context_parallel_size != 1:
            raise ValueError(
                f"context_parallel_size: got {self.context_parallel_size}, allowed: 1 "
                "(attention over packs split between ranks is not implemented)"
            )
        if self.sequence_parallel and self.tensor_model_parallel_size == 1:
            raise ValueError("sequence_parallel: got True, allowed: False when tensor_model_parallel_size is 1")

    def _check_tensor(self, shape: QwenShape) -> None:
        size = self.tensor_model_parallel_size
        problem = _tensor_problem(shape, size)
        if problem is not None:
            sizes = range(1, shape.num_attention_heads + 1)
            allowed = [other for other in sizes if _tensor_problem(shape, other) is None]
            raise ValueError(
                f"tensor_model_parallel_size: got {size}, but {problem} of it; allowed for this model: {allowed}"
            )

    def _check_pipeline(self, shape: QwenShape) -> None:
        chunks = self.virtual_pipeline_model_parallel_size
        if chunks is not None and (chunks < 2 or self.pipeline_model_parallel_size < 2):
            raise ValueError(
                f"virtual_pipeline_model_parallel_size: got {chunks} with pipeline_model_parallel_size "
                f"{self.pipeline_model_parallel_size}; allowed: none, or at least 2 with at least 2 pipeline stages"
            )
        first, last = self.num_layers_in_first_pipeline_stage, self.num_layers_in_last_pipeline_stage
        if first is not None or last is not None:
            self._check_uneven(shape.num_layers, first, last)
        elif not self._fits(shape.num_layers, None, None):
            raise ValueError(
                f"pipeline_model_parallel_size x virtual_pipeline_model_parallel_size: got {self.num_stages} stages, "
                f"but num_layers = {shape.num_layers} is no multiple of it; allowed: divisors of num_layers"
            )

    def _check_uneven(self, num_layers: int, first: int | None, last: int | None) -> None:
        counts = range(1, num_layers)
        given = f"num_layers {num_layers}, pipeline_model_parallel_size {self.pipeline_model_parallel_size}"
        if self.num_chunks > 1:
            given += f", virtual_pipeline_model_parallel_size {self.num_chunks}"
        if last is None:
            name, value = "num_layers_in_first_pipeline_stage", first
            allowed = [count for count in counts if self._fits(num_layers, count, None)]
        else:
            name, value = "num_layers_in_last_pipeline_stage", last
            allowed = [count for count in counts if self._fits(num_layers, first, count)]
            given += "" if first is None else f", num_layers_in_first_pipeline_stage {first}"
        if value not in allowed:
            raise ValueError(f"{name}: got {value}, allowed with {given}: {allowed or 'none'}")

    def _fits(self, num_layers: int, first: int | None, last: int | None) -> bool:
        """Whether each pipeline rank gets at least one layer, and as many in each of its chunks.

        Ranks without a number of their own get equal shares, as in megatron-core's `get_num_layers_to_build`.
        """
        ends = [count for count in (first, last) if count is not None]
        num_others = self.pipeline_model_parallel_size - len(ends)
        if num_others < 0:
            return False
        share = (num_layers - sum(ends)) // max(1, num_others)
        counts = [*ends, *[share] * num_others]
        return sum(counts) == num_layers and all(n > 0 and n % self.num_chunks == 0 for n in counts)


def _tensor_problem(shape: QwenShape, size: int) -> str | None:
    """Return why the model can't be split over `size` tensor ranks, ready to be followed by "of it"."""
    for name in ("num_attention_heads", "ffn_hidden_size", "hidden_size"):
        if getattr(shape, name) % size:
            return f"{name} = {getattr(shape, name)} is no multiple"
    groups = shape.num_query_groups
    if groups % size and size % groups:
        return f"num_query_groups = {groups} is neither a multiple nor a divisor"
    rows = (shape.num_attention_heads + 2 * groups) * shape.head_dim
    return f"the number of query, key and value rows = {rows} is no multiple" if rows % size else None


@dataclass(frozen=True)
class Mesh:
    """The process groups this rank belongs to. Groups are always taken from here, never from global state."""

    layout: Layout
    rank: int
    world_size: int
    device: torch.device
    tensor_group: Any
    pipeline_group: Any
    data_group: Any
    model_group: Any
    pipeline_cpu_group: Any
    """The pipeline group for small messages that start and end on the CPU."""
    pg_collection: Any = None
    """What megatron-core's modules take their groups from; None stands for its global ones."""
    writer_group: Any = None
    """All ranks, for messages between the threads that write checkpoints, over the CPU; none in a mesh of rollout."""

    @property
    def tensor_rank(self) -> int:
        return self.rank % self.tensor_size

    @property
    def tensor_size(self) -> int:
        return self.layout.tensor_model_parallel_size

    @property
    def data_rank(self) -> int:
        return self.rank // self.tensor_size % self.data_size

    @property
    def data_size(self) -> int:
        return self.layout.data_parallel_size(self.world_size)

    @property
    def pipeline_rank(self) -> int:
        return self.rank // (self.tensor_size * self.data_size)

    @property
    def pipeline_size(self) -> int:
        return self.layout.pipeline_model_parallel_size

    @property
    def is_first_stage(self) -> bool:
        return self.pipeline_rank == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank holds the last layers, hence the output head and the loss."""
        return self.pipeline_rank == self.pipeline_size - 1

    @property
    def is_first_model_rank(self) -> bool:
        """Whether this rank speaks for its model replica: tensor rank 0 of the first stage."""
        return self.tensor_rank == 0 and self.is_first_stage

    def rank_of(self, *, tensor_rank: int, pipeline_rank: int, data_rank: int) -> int:
        """Return the global rank at these coordinates."""
        return tensor_rank + self.tensor_size * (data_rank + self.data_size * pipeline_rank)

    def object_from_last_stage(self, item: Any) -> Any:
        """Return `item` of the last pipeline stage on all stages (pickled: for small objects)."""
        if self.pipeline_size > 1:
            last = self.rank_of(
                tensor_rank=self.tensor_rank, pipeline_rank=self.pipeline_size - 1, data_rank=self.data_rank
            )
            box = [item]
            dist.broadcast_object_list(box, src=last, group=self.pipeline_group)
            return box[0]
        return item

    def from_first_rank(self, item: Any) -> Any:
        """Return `item` of rank 0 on all ranks of the job (pickled: for small objects)."""
        box = [item]
        dist.broadcast_object_list(box, src=0, device=self.device)
        return box[0]

    def sum_over_data(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum `tensor` over the data-parallel group, in place; every rank of the group must call it."""
        dist.all_reduce(tensor, group=self.data_group)
        return tensor

    def from_last_stage(self, tensor: torch.Tensor) -> torch.Tensor:
        """Broadcast `tensor` from the last pipeline stage over the pipeline group, in place."""
        if self.pipeline_size > 1:
            last = self.rank_of(
                tensor_rank=self.tensor_rank, pipeline_rank=self.pipeline_size - 1, data_rank=self.data_rank
            )
            dist.broadcast(tensor, src=last, group=self.pipeline_group)
        return tensor

    def max_over_data(self, tensor: torch.Tensor) -> torch.Tensor:
        """Largest value over the data-parallel group, in place; every rank of the group must call it."""
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self.data_group)
        return tensor

    def from_first_model_rank(self, item: Any) -> Any:
        """Return `item` of the first rank of this model replica (tensor rank 0, first stage) on all its ranks."""
        if self.tensor_size * self.pipeline_size > 1:
            first = self.rank_of(tensor_rank=0, pipeline_rank=0, data_rank=self.data_rank)
            box = [item]
            dist.broadcast_object_list(box, src=first, group=self.model_group)
            return box[0]
        return item

    def gather_over_data(self, item: Any) -> list[Any]:
        """Return `item` of every data-parallel rank, in rank order (pickled: for small or CPU objects)."""
        items: list[Any] = [None] * self.data_size
        dist.all_gather_object(items, item, group=self.data_group)
        return items


def build_mesh(layout: Layout, world: World, timeout_seconds: float = 600.0) -> Mesh:
    """Make the process groups of `layout`; the default process group must be running (`parallel.launch.start`).

    Args:
        timeout_seconds: longest wait of one collective; megatron-core takes whole minutes, so it is rounded up.

    Raises:
        ValueError: the world is no multiple of the layout.
    """
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    layout.data_parallel_size(world.world_size)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tensor_model_parallel_size,
        pipeline_model_parallel_size=layout.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=layout.virtual_pipeline_model_parallel_size,
        context_parallel_size=layout.context_parallel_size,
        distributed_timeout_minutes=math.ceil(timeout_seconds / 60),
    )
    # megatron-core forks named random streams around sequence-parallel layers; with dropout 0 nothing draws from them.
    model_parallel_cuda_manual_seed(0)
    return Mesh(
        layout=layout,
        rank=world.rank,
        world_size=world.world_size,
        device=world.device,
        tensor_group=parallel_state.get_tensor_model_parallel_group(),
        pipeline_group=parallel_state.get_pipeline_model_parallel_group(),
        data_group=parallel_state.get_data_parallel_group(),
        model_group=parallel_state.get_model_parallel_group(),
        pipeline_cpu_group=_pipeline_cpu_group(layout, world),
        writer_group=dist.new_group(backend="gloo", timeout=WRITER_TIMEOUT),
    )


def _pipeline_cpu_group(layout: Layout, world: World) -> Any:
    from megatron.core import parallel_state

    own = parallel_state.get_pipeline_model_parallel_group()
    if world.device.type == "cpu" or layout.pipeline_model_parallel_size == 1:
        return own
    # Every rank takes part in making every group, its own or not.
    stride = world.world_size // layout.pipeline_model_parallel_size
    groups = [dist.new_group(range(first, world.world_size, stride), backend="gloo") for first in range(stride)]
    return groups[world.rank % stride]
