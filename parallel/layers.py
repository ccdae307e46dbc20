"""Layer specs of Qwen: torch modules on CPU, Transformer Engine on CUDA, both with our core attention.

megatron-core calls ``core_attention(query, key, value, attention_mask, ...)`` with one signature in every supported
version. We put all tokens of a micro-batch on the sequence axis (batch 1) and pass `cu_seqlens`, the compressed form
of the block-diagonal causal mask, where megatron-core passes its mask; it survives pipelining and recomputation.

Shapes: T tokens, Hq query heads and Hkv key/value heads of this tensor rank, D head size, n sequences.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parallel.qwen import QwenShape


class Cache(Protocol):
    """What a KV cache offers to core attention (see `rollout.kv_cache`)."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Store key and value of layer `layer` (local index), return attention `[T, 1, Hq * D]`."""


class RMSNorm(nn.Module):
    """Root-mean-square norm (arXiv 1910.07467) that marks its weight for sequence parallelism.

    megatron-core's torch norm refuses sequence parallelism; a weight marked `sequence_parallel` has its gradient
    summed over the tensor group when gradients are finalised.
    """

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-6):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden: Tensor) -> Tensor:
        """Normalise the last dimension."""
        return rms_norm(hidden, self.weight, self.eps)


def rms_norm(hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm of the last dimension, computed in fp32."""
    if hidden.dtype == torch.float32:
        return F.rms_norm(hidden, weight.shape, weight, eps)
    return weight * F.rms_norm(hidden.float(), weight.shape, None, eps).to(hidden.dtype)


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
            attention_mask: `cu_seqlens [n + 1]` int32 on the CPU; not read when a cache is bound.

        Returns: `[T, 1, Hq * D]`.
        """
        if self.cache is not None:
            return self.cache.attend(self.cache_layer, query, key, value)
        borders = tuple(attention_mask.tolist())
        return packed_attention(query[:, 0], key[:, 0], value[:, 0], borders, self.softmax_scale)[:, None]


def packed_attention(query: Tensor, key: Tensor, value: Tensor, borders: tuple[int, ...], scale: float) -> Tensor:
    """Causal attention inside each sequence of a pack.

    Sequences of similar length (same power of two) are padded on the right to the longest and attend in one call:
    a causal mask hides the padding from every real query, so no other mask is needed.

    Args:
        query: `[T, Hq, D]`; key, value: `[T, Hkv, D]`.
        borders: n + 1 ascending borders, from 0 to T.

    Returns: `[T, Hq * D]`.
    """
    buckets, inverse = _buckets(borders)
    if inverse is None:
        query, key, value = (x.unflatten(0, buckets) for x in (query, key, value))
        return _causal(query, key, value, scale).flatten(0, 1)
    pieces = []
    for index, real in buckets:
        index = index.to(query.device)
        attended = _causal(query[index], key[index], value[index], scale)
        pieces.append(attended.flatten(0, 1)[real.to(query.device)])
    return torch.cat(pieces)[inverse.to(query.device)]


def _causal(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """`[n, L, Hq, D]`, `[n, L, Hkv, D]` -> `[n, L, Hq * D]`."""
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    grouped = query.shape[1] != key.shape[1]
    attended = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=grouped)
    return attended.transpose(1, 2).flatten(2)


@lru_cache(maxsize=256)
def _buckets(borders: tuple[int, ...]) -> tuple[Any, Tensor | None]:
    """Plan of `packed_attention`: ((n, L), None) when all lengths are equal, else (buckets, inverse).

    A bucket is (index `[n_b, L_b]` of pack tokens, real `[tokens of the bucket]` places in the flattened index);
    `inverse [T]` brings the concatenated buckets back into pack order.
    """
    starts = torch.tensor(borders[:-1])
    lengths = torch.tensor(borders[1:]) - starts
    if bool((lengths == lengths[0]).all()):
        return (len(lengths), int(lengths[0])), None
    power = torch.tensor([int(length - 1).bit_length() for length in lengths])
    buckets, order = [], []
    for exponent in power.unique():
        start, length = starts[power == exponent], lengths[power == exponent]
        offset = torch.arange(int(length.max()))
        index = start[:, None] + torch.minimum(offset[None], length[:, None] - 1)
        real = (offset[None] < length[:, None]).flatten().nonzero().squeeze(1)
        buckets.append((index, real))
        order.append(index.flatten()[real])
    return buckets, torch.cat(order).argsort()


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
    attention = spec.submodules.self_attention.submodules
    attention.core_attention = PackedAttention
    if shape.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    return spec
