"""Transformer Engine layer spec for CUDA. Not yet run on a GPU.

Imported only where the device is CUDA, so that a machine without Transformer Engine needs nothing of it.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.extensions.transformer_engine import TEDotProductAttention, TENorm
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from parallel.layers import Cache
from parallel.qwen import QwenShape


class TEPackedAttention(TEDotProductAttention):
    """Transformer Engine's attention over packed sequences (`thd`), or `cache.attend` when a cache is bound."""

    cache: Cache | None = None
    cache_layer: int = -1

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
        """As `parallel.layers.PackedAttention.forward`: `attention_mask` is `cu_seqlens [n + 1]` on the CPU."""
        if self.cache is not None:
            return self.cache.attend(self.cache_layer, query, key, value)
        longest = int(attention_mask.diff().max())
        borders = attention_mask.to(query.device, non_blocking=True)
        packed = PackedSeqParams("thd", borders, borders, max_seqlen_q=longest, max_seqlen_kv=longest)
        attended = super().forward(query[:, 0], key[:, 0], value[:, 0], None, attn_mask_type, packed_seq_params=packed)
        return attended.reshape(query.shape[0], 1, -1)


def layer_spec(shape: QwenShape) -> Any:
    """Return Transformer Engine's layer spec with our core attention."""
    spec = get_gpt_layer_with_transformer_engine_spec(qk_layernorm=shape.qk_layernorm)
    spec.submodules.self_attention.submodules.core_attention = TEPackedAttention
    return spec


def final_norm() -> type[torch.nn.Module]:
    """Return the norm after the last layer."""
    return TENorm
