"""Attention over a part of the keys, and merging the parts exactly by their log-sum-exp.

Shapes: n rows, H heads, r queries of a row and head, L keys of the part, D head size.
"""

from __future__ import annotations

import torch
from torch import Tensor


def partial_attention(
    query: Tensor, key: Tensor, value: Tensor, scale: float, mask: Tensor | None = None, causal: bool = False
) -> tuple[Tensor, Tensor]:
    """Attend to some of the keys.

    Args:
        query: `[n, H, r, D]`; key, value: `[n, H, L, D]`, views are fine.
        mask: added to the scores, `[n, 1, 1, L]`, zero or minus infinity.
        causal: query i sees keys 0 .. i (r = L).

    Returns: output `[n, H, r, D]` and log-sum-exp of the scores `[n, H, r]` fp32; where nothing is seen the first is
        undefined and the second minus infinity or NaN.
    """
    if query.device.type == "cpu":
        if mask is not None:
            mask = mask.expand(-1, 1, query.shape[2], -1)
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, causal, attn_mask=mask, scale=scale
        )
    scores = query.float() @ key.float().transpose(2, 3) * scale
    if mask is not None:
        scores = scores + mask
    if causal:
        scores = scores.masked_fill(torch.ones_like(scores[0, 0], dtype=torch.bool).triu(1), -torch.inf)
    log_sum = scores.logsumexp(-1)
    return (scores - log_sum[..., None]).exp().to(value.dtype) @ value, log_sum


def merge(output: Tensor, log_sum: Tensor, other: Tensor, other_log_sum: Tensor) -> None:
    """Merge the attention to two disjoint sets of keys into the first pair of tensors, in place."""
    share = torch.sigmoid(other_log_sum - log_sum)[..., None]
    output.lerp_(other, share.to(output.dtype))
    torch.logaddexp(log_sum, other_log_sum, out=log_sum)
