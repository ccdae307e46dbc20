"""Size of the KV cache: the one place that predicts it, for the engine and for planning.

A cached token costs a rank keys and values of its own heads and layers only.
"""

from __future__ import annotations

from collections.abc import Sequence

import psutil
import torch
import torch.distributed as dist

from parallel.mesh import Layout, Mesh
from parallel.model import QwenModel
from parallel.qwen import QwenShape
from rollout.columns import Columns, column_widths
from rollout.scheduler import tokens_needed

FREE_SHARE = {"cpu": 0.5, "cuda": 0.9}
"""Share of the free memory the cache may take; a CPU machine keeps more for everything else on it."""


def cache_bytes_per_token(shape: QwenShape, layout: Layout, num_layers: int, element_size: int) -> int:
    """Return the bytes that one cached token costs a rank with `num_layers` layers."""
    return 2 * num_layers * layout.local_kv_heads(shape) * shape.head_dim * element_size


def most_cache_tokens(max_sequences: int, widths: Sequence[int]) -> int:
    """Return the tokens that `max_sequences` responses can reserve at most, each with a prefix of its own.

    Args:
        widths: tokens of the columns, or blocks, that hold the longest sequence.
    """
    return 2 * max_sequences * sum(widths)


def least_cache_tokens(layout: Layout, prompt_length: int, max_new_tokens: int) -> int:
    """Return the smallest bound of the cache with which such a prompt and response can be generated on a CPU, where it
    is kept in columns and every pipeline rank has a lane."""
    book = Columns(column_widths(prompt_length + max_new_tokens))
    return layout.pipeline_model_parallel_size * tokens_needed(book.cost, prompt_length, max_new_tokens)


def cache_tokens(models: Sequence[QwenModel], mesh: Mesh, max_sequences: int, widths: Sequence[int]) -> int:
    """Return the tokens of cache that the memory now free allows on every rank of this replica.

    Call it when weights, gradients and optimizer state exist. All ranks of the model group must call it.
    """
    num_layers = sum(len(model.decoder.layers) for model in models)
    element_size = models[0].config.params_dtype.itemsize
    per_token = cache_bytes_per_token(models[0].shape, mesh.layout, num_layers, element_size)
    tokens = torch.tensor(_free_bytes(mesh) // per_token, device=mesh.device)
    if mesh.layout.model_parallel_size > 1:
        dist.all_reduce(tokens, op=dist.ReduceOp.MIN, group=mesh.model_group)
    return min(int(tokens), most_cache_tokens(max_sequences, widths))


def _free_bytes(mesh: Mesh) -> int:
    share = FREE_SHARE[mesh.device.type]
    if mesh.device.type == "cuda":
        return int(torch.cuda.mem_get_info(mesh.device)[0] * share)
    # All ranks may run on this one machine.
    return int(psutil.virtual_memory().available * share) // mesh.world_size
