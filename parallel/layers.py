"""Layer specs of Qwen: torch modules on CPU, Transformer Engine on CUDA, both with our core attention.

megatron-core calls ``core_attention(query, key, value, attention_mask, ...)`` with one signature in every supported
version. We put all tokens of a micro-batch on the sequence axis (batch 1) and pass `Pack.borders`, the compressed form
of the causal mask, where megatron-core passes its mask; it survives pipelining and recomputation.

Shapes: T tokens, Hq query heads and Hkv key/value heads of this tensor rank, D head size, n segments of the pack.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parallel.functions import RMSNorm, swiglu
from parallel.qwen import QwenShape


class Cache(Protocol):
    """What a KV cache offers to core attention (see `rollout.kv_cache`)."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Store key and value of layer `layer` (local index), return attention `[T, 1, Hq * D]`."""


class PackedAttention(nn.Module):
    """Core attention on torch's scaled-dot-product kernel: packed causal self-attention, or `cache.attend`."""

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
    ):
        super().__init__()
        self.softmax_scale = config.kv_channels**-0.5 if softmax_scale is None else softmax_scale
        self.cache: Cache | None = None
        self.cache_layer = -1

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> Tensor:
        """Attend.

        Args:
            query: `[T, 1, Hq, D]`, rotated.
            key, value: `[T, 1, Hkv, D]`.
            attention_mask: `Pack.borders` `[2, n + 1]`; not read when a cache is bound.

        Returns: `[T, 1, Hq * D]`.
        """
        if self.cache is not None:
            return self.cache.attend(self.cache_layer, query, key, value)
        borders, parents = (tuple(row) for row in attention_mask.tolist())
        attended = packed_attention(
            query[:, 0], key[:, 0], value[:, 0], borders, self.softmax_scale, parents[: len(borders) - 1]
        )
        return attended[:, None]


def packed_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    borders: tuple[int, ...],
    scale: float,
    parents: tuple[int, ...] | None = None,
) -> Tensor:
    """Causal attention inside each sequence of a pack.

    Segments of similar length (same power of two, or short) that continue as many tokens are padded on the right to the
    longest and attend in one call: a causal mask hides the padding from every real query.

    Args:
        query: `[T, Hq, D]`; key, value: `[T, Hkv, D]`.
        borders: n + 1 ascending borders, from 0 to T.
        parents: the segment that each one continues, see `Pack`; None: all are whole sequences.

    Returns: `[T, Hq * D]`.
    """
    plan = _plan(borders, parents)
    if isinstance(plan, _EqualLengths):
        query, key, value = (x.unflatten(0, (plan.number, plan.length)) for x in (query, key, value))
        return _causal(query, key, value, scale).flatten(0, 1)
    queries, keys, values = (
        _gather(x.flatten(1), index).split([n * length for n, length in sizes])
        for x, index, sizes in (
            (query, plan.queries, plan.query_sizes),
            (key, plan.keys, plan.key_sizes),
            (value, plan.keys, plan.key_sizes),
        )
    )
    head_dim = query.shape[2]
    attended = [
        _causal(
            queries[bucket].view(*query_size, -1, head_dim),
            keys[bucket].view(*key_size, -1, head_dim),
            values[bucket].view(*key_size, -1, head_dim),
            scale,
        ).flatten(0, 1)
        for bucket, (query_size, key_size) in enumerate(zip(plan.query_sizes, plan.key_sizes, strict=True))
    ]
    return _gather(torch.cat(attended), plan.places)


def _gather(rows: Tensor, index: Tensor) -> Tensor:
    """Pick rows of `[T, k]`: an embedding, as its gradient is added up fastest."""
    return F.embedding(index.to(rows.device), rows)


def _causal(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """`[n, L, Hq, D]`, `[n, P + L, Hkv, D]` -> `[n, L, Hq * D]`; the queries are those of the last L keys."""
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    grouped, length, num_keys = query.shape[1] != key.shape[1], query.shape[2], key.shape[2]
    mask = None
    if num_keys > length:
        mask = torch.ones(length, num_keys, dtype=torch.bool, device=query.device).tril(num_keys - length)
    attended = F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=grouped
    )
    return attended.transpose(1, 2).flatten(2)


LEAST_POWER = 4
"""Segments of up to 2 to this many tokens attend in one call: more calls would cost more than the padding."""


@dataclass(frozen=True)
class _EqualLengths:
    """Whole sequences of one length."""

    number: int
    length: int


@dataclass(frozen=True)
class _Buckets:
    """Segments that attend together, bucket after bucket; past the end of a segment stands its last token again.

    Attributes:
        queries, keys: pack tokens, those of a segment's keys beginning with its parent's.
        query_sizes, key_sizes: (segments, tokens of each) of each bucket.
        places: `[T]` where each pack token stands among the queries.
    """

    queries: Tensor
    keys: Tensor
    query_sizes: list[torch.Size]
    key_sizes: list[torch.Size]
    places: Tensor


@lru_cache(maxsize=256)
def _plan(borders: tuple[int, ...], parents: tuple[int, ...] | None = None) -> _EqualLengths | _Buckets:
    """Say what `packed_attention` does."""
    starts = torch.tensor(borders[:-1])
    lengths = torch.tensor(borders[1:]) - starts
    own = torch.arange(len(lengths))
    parent = own if parents is None else torch.tensor(parents)
    before = torch.where(parent == own, 0, lengths[parent])
    if bool((lengths == lengths[0]).all() and not before.any()):
        return _EqualLengths(len(lengths), int(lengths[0]))
    power = torch.tensor([max(int(length - 1).bit_length(), LEAST_POWER) for length in lengths])
    queries, keys, places = [], [], torch.empty(borders[-1], dtype=torch.int64)
    num_queries = 0
    for num_before, exponent in torch.stack([before, power], 1).unique(dim=0):
        chosen = (before == num_before) & (power == exponent)
        start, length = starts[chosen, None], lengths[chosen, None]
        offset = torch.arange(int(length.max()))[None]
        index = start + torch.minimum(offset, length - 1)
        prefix = starts[parent[chosen], None] + torch.arange(int(num_before))[None]
        real = (offset < length).flatten()
        places[index.flatten()[real]] = num_queries + real.nonzero().squeeze(1)
        num_queries += index.numel()
        queries.append(index)
        keys.append(torch.cat([prefix, index], 1))
    return _Buckets(
        queries=torch.cat([index.flatten() for index in queries]),
        keys=torch.cat([index.flatten() for index in keys]),
        query_sizes=[index.shape for index in queries],
        key_sizes=[index.shape for index in keys],
        places=places,
    )


def bind_cache(decoder: nn.Module, cache: Cache | None) -> None:
    """Let the attention of every layer of a megatron-core `TransformerBlock` use `cache`; None unbinds it."""
    for index, layer in enumerate(decoder.layers):  # type: ignore[arg-type]
        layer.self_attention.core_attention.cache = cache
        layer.self_attention.core_attention.cache_layer = index


def block_spec(shape: QwenShape, config: Any, vp_stage: int | None, device: torch.device) -> Any:
    """Return the `TransformerBlockSubmodules` of this rank's stage for the device's kernels."""
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build

    if device.type == "cuda":
        from parallel.layers_te import final_norm, layer_spec

        spec, norm = layer_spec(shape), final_norm()
    else:
        spec, norm = _torch_layer_spec(shape), RMSNorm
    num_layers = get_num_layers_to_build(config, vp_stage=vp_stage)
    return TransformerBlockSubmodules(layer_specs=[spec] * num_layers, layer_norm=norm)


def _torch_layer_spec(shape: QwenShape) -> Any:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    spec = get_gpt_layer_local_spec(qk_layernorm=shape.qk_layernorm, normalization="RMSNorm")
    spec.submodules.input_layernorm = RMSNorm
    spec.submodules.pre_mlp_layernorm = RMSNorm
    spec.submodules.mlp.submodules.activation_func = swiglu
    attention = spec.submodules.self_attention.submodules
    attention.core_attention = PackedAttention
    if shape.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    return spec
