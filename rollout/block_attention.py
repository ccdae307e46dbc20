"""Attention to keys and values in blocks: flash-attn's paged kernels (not yet run on a GPU), or torch on copies.

Shapes: n sequences of at most M blocks, B blocks of s tokens, c chunks of t tokens in all, Hq and Hkv heads of this
tensor rank, D head size.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from parallel.model import QwenModel
from rollout.attention import partial_attention
from rollout.steps import Chunk

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Prefill:
    """Chunks of prefixes in the order of their rows.

    Attributes:
        chunks: on the host.
        slots: `[t]` int64, where each token is stored.
        tables: `[c, M]` int32, the blocks of each prefix.
        query_borders: `[c + 1]` int32, cumulated tokens of the chunks.
        key_borders: `[c + 1]` int32, the same of the prefixes, each up to the end of its chunk.
    """

    chunks: Sequence[Chunk]
    slots: Tensor
    tables: Tensor
    query_borders: Tensor
    key_borders: Tensor

    def to(self, device: torch.device) -> Prefill:
        tensors = (self.slots, self.tables, self.query_borders, self.key_borders)
        return Prefill(self.chunks, *(tensor.to(device, non_blocking=True) for tensor in tensors))


class BlockAttention(Protocol):
    """Attention with `keys` and `values [B, s, Hkv, D]`."""

    capturable: bool
    """Whether a CUDA graph can record `part`."""

    def part(
        self, query: Tensor, keys: Tensor, values: Tensor, tables: Tensor, lengths: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Attend with `query [n, q, Hkv, D]` to the first `lengths [n]` (from 1) tokens of `tables [n, M]`.

        Returns: output `[n, q, Hkv, D]` and log-sum-exp `[n, Hkv, q]` fp32.
        """

    def prefill(self, query: Tensor, keys: Tensor, values: Tensor, plan: Prefill) -> Tensor:
        """Attend causally with the chunks' `query [t, Hq, D]`, whose keys are stored; returns `[t, Hq, D]`."""


class GatheredBlocks:
    """The reference: copies the blocks of each sequence to where torch's kernels can read them."""

    capturable = False

    def __init__(self, scale: float):
        self.scale = scale

    def part(
        self, query: Tensor, keys: Tensor, values: Tensor, tables: Tensor, lengths: Tensor
    ) -> tuple[Tensor, Tensor]:
        key, value = (x[tables.long()].flatten(1, 2).transpose(1, 2) for x in (keys, values))  # [n, Hkv, M * s, D]
        hidden = torch.arange(key.shape[2], device=key.device) >= lengths[:, None]
        mask = torch.zeros(hidden.shape, dtype=query.dtype, device=key.device).masked_fill_(hidden, -torch.inf)
        output, log_sum = partial_attention(query.transpose(1, 2), key, value, self.scale, mask[:, None, None])
        return output.transpose(1, 2), log_sum

    def prefill(self, query: Tensor, keys: Tensor, values: Tensor, plan: Prefill) -> Tensor:
        attended, first = torch.empty_like(query), 0
        for chunk, table in zip(plan.chunks, plan.tables.long(), strict=True):
            rows, end = slice(first, first + chunk.length), chunk.start + chunk.length
            key, value = (x[table].flatten(0, 1)[:end].transpose(0, 1)[None] for x in (keys, values))
            places = torch.arange(end, device=query.device)
            seen = places <= places[chunk.start :, None]
            own = query[rows].transpose(0, 1)[None]
            output = F.scaled_dot_product_attention(own, key, value, seen, scale=self.scale, enable_gqa=True)
            attended[rows] = output[0].transpose(0, 1)
            first = rows.stop
        return attended


class FlashBlocks:
    """flash-attn 2.6 and later: its `flash_attn_with_kvcache` and `flash_attn_varlen_func`.

    The first decodes, as it can share out a long sequence. By the source of 2.6.0 to 2.8.4 the second, with a block
    table and one query per sequence, may mix up the log-sum-exp of grouped heads; so only its output is used.
    """

    def __init__(self, scale: float, with_kvcache: Callable, varlen: Callable, capturable: bool):
        self.scale = scale
        self.capturable = capturable
        self._with_kvcache, self._varlen = with_kvcache, varlen

    def part(
        self, query: Tensor, keys: Tensor, values: Tensor, tables: Tensor, lengths: Tensor
    ) -> tuple[Tensor, Tensor]:
        return self._with_kvcache(
            query,
            keys,
            values,
            cache_seqlens=lengths,
            block_table=tables,
            softmax_scale=self.scale,
            causal=False,
            return_softmax_lse=True,
        )

    def prefill(self, query: Tensor, keys: Tensor, values: Tensor, plan: Prefill) -> Tensor:
        return self._varlen(
            query,
            keys,
            values,
            cu_seqlens_q=plan.query_borders,
            cu_seqlens_k=plan.key_borders,
            max_seqlen_q=max(chunk.length for chunk in plan.chunks),
            max_seqlen_k=max(chunk.start + chunk.length for chunk in plan.chunks),
            softmax_scale=self.scale,
            causal=True,  # aligned at the last key, as a chunk that continues its prefix needs
            block_table=plan.tables,
        )


def choose_attention(model: QwenModel, block_size: int) -> BlockAttention:
    """Return flash-attn's kernels if they can serve this model here, else torch on gathered blocks; says which.

    Raises:
        ValueError: flash-attn would serve, but for the block size.
    """
    device, scale = model.mesh.device, model.config.softmax_scale
    reason = _why_not_flash(device, model.config.params_dtype, model.config.kv_channels)
    if reason is not None:
        level = logging.WARNING if device.type == "cuda" else logging.INFO
        logger.log(level, "rollout attention: torch on gathered blocks, as %s", reason)
        return GatheredBlocks(scale)
    if block_size % 256:
        raise ValueError(f"cache_page_tokens: got {block_size}, allowed with flash-attn: multiples of 256")
    from flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache

    installed = version("flash_attn")
    logger.info("rollout attention: flash-attn %s", installed)
    # From 2.8.4 on each call with a block table reads the largest length back to the host.
    return FlashBlocks(
        scale, flash_attn_with_kvcache, flash_attn_varlen_func, capturable=_release(installed) < (2, 8, 4)
    )


def _why_not_flash(device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """Return why flash-attn can't serve; None if it can."""
    if device.type != "cuda":
        return "flash-attn needs CUDA"
    if dtype != torch.bfloat16:
        return f"flash-attn needs bf16, not {dtype}"
    if head_dim % 8 or head_dim > 256:
        return f"flash-attn needs a head size of 8, 16, .., 256, not {head_dim}"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return "flash-attn needs compute capability 8.0"
    try:
        installed = version("flash_attn")
    except PackageNotFoundError:
        return "flash-attn is not installed"
    return None if _release(installed) >= (2, 6) else f"flash-attn {installed} is older than 2.6"


def _release(text: str) -> tuple[int, ...]:
    """Return the leading numbers of a version: "2.8.3.post1" -> (2, 8, 3)."""
    numbers = []
    for part in text.split("."):
        if not part.isdigit():
            break
        numbers.append(int(part))
    return tuple(numbers)
