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
from parallel.pack import keys_of_segments
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
        """As `parallel.layers.PackedAttention.forward`."""
        if self.cache is not None:
            return self.cache.attend(self.cache_layer, query, key, value)
        borders, parents = attention_mask
        if bool((parents == torch.arange(len(parents))).all()):
            longest = int(borders.diff().max())
            borders = borders.to(query.device, non_blocking=True)
            packed = PackedSeqParams("thd", borders, borders, max_seqlen_q=longest, max_seqlen_kv=longest)
            attended = super().forward(
                query[:, 0], key[:, 0], value[:, 0], None, attn_mask_type, packed_seq_params=packed
            )
        else:
            attended = self._continued(query[:, 0], key[:, 0], value[:, 0], borders, parents)
        return attended.reshape(query.shape[0], 1, -1)

    def _continued(self, query: Tensor, key: Tensor, value: Tensor, borders: Tensor, parents: Tensor) -> Tensor:
        """Attention where segments continue others: each gets a copy of its parent's keys and values before its own.

        megatron-core's mask types lack the one that this needs, so Transformer Engine is called without it.
        """
        index, key_borders = keys_of_segments(tuple(borders.tolist()), tuple(parents[:-1].tolist()))
        index = index.to(query.device, non_blocking=True)
        return super(TEDotProductAttention, self).forward(
            query,
            key[index],
            value[index],
            qkv_format="thd",
            cu_seqlens_q=borders.to(query.device, non_blocking=True),
            cu_seqlens_kv=key_borders.to(query.device, non_blocking=True),
            max_seqlen_q=int(borders.diff().max()),
            max_seqlen_kv=int(key_borders.diff().max()),
            attn_mask_type="padding_causal_bottom_right",
        )


def layer_spec(shape: QwenShape) -> Any:
    """Return Transformer Engine's layer spec with our core attention."""
    spec = get_gpt_layer_with_transformer_engine_spec(qk_layernorm=shape.qk_layernorm)
    spec.submodules.self_attention.submodules.core_attention = TEPackedAttention
    return spec


def final_norm() -> type[torch.nn.Module]:
    """Return the norm after the last layer."""
    return TENorm
