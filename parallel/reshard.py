"""A second layout on the same ranks, for models that only infer, and the way of weights into it.

A rollout gains from another layout than training's: without pipeline stages a token passes no other rank, and with
fewer tensor ranks there are more copies of the model, each for a part of the responses. The price is a second copy of
the weights. They travel as whole Hugging Face tensors, one at a time, by the table of names that import and export use:
so both layouts may cut, pad and fuse as they like.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from parallel.hf_tensors import all_rules, assemble, fuse
from parallel.mesh import Layout, Mesh
from parallel.model import QwenModel
from parallel.qwen import QwenShape
from parallel.weights import Key, gather_shards, local_parameters, parameter_owners


def check_inference_layout(layout: Layout, training: Layout, shape: QwenShape, world_size: int) -> None:
    """Check a layout for `build_inference_mesh`, before any process group exists.

    Raises:
        ValueError: it doesn't fit the model or the world, or needs what megatron-core takes from the groups of the
            training layout: pipeline stages, sequence parallelism, key/value heads shared by tensor ranks.
    """
    layout.check(shape, world_size)
    for name, allowed in (("pipeline_model_parallel_size", 1), ("sequence_parallel", False)):
        if getattr(layout, name) != allowed:
            raise ValueError(f"{name} of the inference layout: got {getattr(layout, name)}, allowed: {allowed}")
    size, groups = layout.tensor_model_parallel_size, shape.num_query_groups
    if size > groups and size != training.tensor_model_parallel_size:
        raise ValueError(
            f"tensor_model_parallel_size of the inference layout: got {size}, allowed: up to num_query_groups = "
            f"{groups}, or training's size {training.tensor_model_parallel_size}"
        )


def build_inference_mesh(layout: Layout, training: Mesh, shape: QwenShape, timeout_seconds: float = 600.0) -> Mesh:
    """Make the process groups of another layout beside those of `training`, on the same ranks.

    Models built on it (`parallel.model.build_model`) have no optimizer and no schedule: `parallel.inference` runs them.
    Every rank must call it.

    Raises:
        ValueError: see `check_inference_layout`.
    """
    from megatron.core.process_groups_config import ProcessGroupCollection

    size, world_size = layout.tensor_model_parallel_size, training.world_size
    check_inference_layout(layout, training.layout, shape, world_size)
    timeout = timedelta(seconds=timeout_seconds)
    tensor_ranks = [list(range(first, first + size)) for first in range(0, world_size, size)]
    data_ranks = [list(range(first, world_size, size)) for first in range(size)]
    tensor_group, _ = dist.new_subgroups_by_enumeration(tensor_ranks, timeout)
    data_group, _ = dist.new_subgroups_by_enumeration(data_ranks, timeout)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    alone = groups.cp  # context parallelism is refused, so that this is a group of one rank in every layout
    groups.tp = groups.mp = tensor_group
    groups.dp = groups.dp_cp = data_group
    groups.pp = alone
    groups.embd = groups.pos_embd = None
    return replace(
        training,
        layout=layout,
        tensor_group=tensor_group,
        pipeline_group=alone,
        data_group=data_group,
        model_group=tensor_group,
        pipeline_cpu_group=alone,
        pg_collection=groups,
    )


class Resharder:
    """Copies weights from a model on one layout into the same model on another. All ranks make and use it together."""

    def __init__(
        self,
        source_models: Sequence[QwenModel],
        source_mesh: Mesh,
        target_models: Sequence[QwenModel],
        target_mesh: Mesh,
    ):
        first, target = source_models[0], target_models[0]
        assert (first.shape, first.head) == (target.shape, target.head)
        self.source_mesh = source_mesh
        self.target_mesh = target_mesh
        self.dtype = first.config.params_dtype
        self.rules = all_rules(first.shape, first.head)
        # Reversed, a tied output matrix gives way to the embedding.
        pairs = list(local_parameters(list(source_models)))[::-1]
        self.source: dict[Key, Tensor] = {tuple(rule.tensors): parameter for rule, parameter in pairs}
        self.owners = parameter_owners(list(self.source), source_mesh)
        self.targets: dict[Key, list[Tensor]] = defaultdict(list)
        for rule, parameter in local_parameters(list(target_models)):
            self.targets[tuple(rule.tensors)].append(parameter)

    @torch.no_grad()
    def refit(self) -> None:
        """Copy all weights into the target models, in place, cast to their dtype.

        Collectives, for each parameter: a gather over the tensor group that holds it, in the first copy of the source
        model, then a broadcast of its tensors over all ranks.
        """
        for key in self.rules:
            tensors = self._whole(key)
            for target in self.targets[key]:
                target.copy_(self._part(key, tensors, target))

    def _whole(self, key: Key) -> dict[str, Tensor]:
        """Return the Hugging Face tensors of one parameter, on all ranks."""
        mesh, rule = self.source_mesh, self.rules[key]
        root = mesh.rank_of(tensor_rank=0, pipeline_rank=self.owners[key], data_rank=0)
        shards: list[Tensor] = []
        if mesh.data_rank == 0 and mesh.pipeline_rank == self.owners[key]:
            shards = gather_shards(self.source[key].detach(), rule, mesh)
        if mesh.rank == root:
            tensors = assemble(rule, shards)
        else:
            empty = partial(torch.empty, dtype=self.dtype, device=mesh.device)
            tensors = {name: empty(size) for name, size in rule.tensors.items()}
        for tensor in tensors.values():
            dist.broadcast(tensor, src=root)
        return tensors

    def _part(self, key: Key, tensors: dict[str, Tensor], target: Tensor) -> Tensor:
        """Return this rank's value of a target parameter."""

        def read(name: str, bounds: tuple[slice, ...]) -> Tensor:
            return tensors[name][bounds]

        return fuse(self.rules[key], read, self.target_mesh.tensor_rank, self.target_mesh.tensor_size, target)
