"""Aggregation: a weight per token, so that a loss is `weighted_sum(loss, loss_weights)` and nothing else divides.

The weights hold every divisor, counted over the whole mini-batch and all data-parallel ranks before any forward pass.
So the sum over micro-batches and ranks, and its gradient, does not depend on how the mini-batch is split. Metrics use
the same weights.

An aggregation is any callable `(lengths [N], mask [N], counts) -> loss_weights [N]`:

- `lengths`, int or float: the number of unmasked response tokens of the sequence that the token belongs to;
- `mask`, bool: the token counts;
- `loss_weights`, fp32: exactly 0 where masked, and all 0 if the mini-batch has no token (the trainer skips that step).

Shape legend: N is the number of scored (response) tokens of a pack or batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class GlobalCounts:
    """What a mini-batch holds over all data-parallel ranks.

    Fields: `num_tokens`, unmasked response tokens; `num_sequences`, sequences with at least one unmasked token.
    """

    num_tokens: int
    num_sequences: int


def token_mean(lengths: Tensor, mask: Tensor, counts: GlobalCounts) -> Tensor:
    """Every token weighs the same: 1 / num_tokens. Source: DAPO, arXiv 2503.14476, eq. 12.

    Deviation: the mean is over the mini-batch, where the paper writes it for the responses to one prompt.
    """
    return _divide(mask, torch.full_like(lengths, counts.num_tokens, dtype=torch.float32))


def sequence_mean_token_mean(lengths: Tensor, mask: Tensor, counts: GlobalCounts) -> Tensor:
    """Every sequence weighs the same: 1 / (length * num_sequences). Source: GRPO, arXiv 2402.03300, eq. 3.

    Deviation: a wholly masked sequence is not counted; the paper masks none.
    """
    return _divide(mask, lengths.float() * counts.num_sequences)


def sequence_mean_token_sum(lengths: Tensor, mask: Tensor, counts: GlobalCounts) -> Tensor:
    """Mean over sequences of the sum over tokens: 1 / num_sequences."""
    return _divide(mask, torch.full_like(lengths, counts.num_sequences, dtype=torch.float32))


@dataclass(frozen=True)
class ConstantDivisor:
    """Aggregation by 1 / (length * num_sequences) with one fixed length; built by `constant_divisor`."""

    length: int

    def __post_init__(self) -> None:
        if self.length < 1:
            raise ValueError(f"constant divisor length must be at least 1, got {self.length}")

    def __call__(self, lengths: Tensor, mask: Tensor, counts: GlobalCounts) -> Tensor:
        """Weights [N], the same for short and long sequences."""
        divisor = float(self.length * counts.num_sequences)
        return _divide(mask, torch.full_like(lengths, divisor, dtype=torch.float32))


def constant_divisor(length: int) -> ConstantDivisor:
    """Aggregation of Dr. GRPO (arXiv 2503.20783): token sums divided by `length`, usually the longest response allowed.

    Raises:
        ValueError: length below 1.
    """
    return ConstantDivisor(length)


def _divide(mask: Tensor, divisor: Tensor) -> Tensor:
    """1 / divisor where unmasked, else 0, [N]. The bound prevents 1/0 in masked sequences and empty mini-batches."""
    if mask.dtype != torch.bool or mask.shape != divisor.shape:
        raise ValueError(f"mask must be bool {tuple(divisor.shape)}, got {mask.dtype} {tuple(mask.shape)}")
    return torch.where(mask, 1.0 / divisor.clamp(min=1.0), 0.0)


def zero_where_masked(values: Tensor, loss_weights: Tensor) -> Tensor:
    """`values` [N] with 0 where the weight is 0, in value and in gradient, whatever stood there (NaN and inf included).

    NaN * 0 is NaN, so multiplying by a mask does not do this. A loss whose inputs may be NaN at masked places needs it
    on those inputs as well, since a zero gradient times an infinite derivative is NaN again.
    """
    return torch.where(loss_weights != 0, values, torch.zeros_like(values))


def weighted_sum(values: Tensor, loss_weights: Tensor) -> Tensor:
    """Sum of `values * loss_weights`, a scalar; places of weight 0 have no influence, even if they hold NaN.

    With no token, or none unmasked, it is 0.0 and still attached to the graph, so that the backward pass of this rank
    runs (and takes part in the collectives of the others).

    Raises:
        ValueError: shapes differ.
    """
    if values.shape != loss_weights.shape:
        raise ValueError(f"values {tuple(values.shape)} and loss_weights {tuple(loss_weights.shape)} differ in shape")
    return (zero_where_masked(values, loss_weights) * loss_weights).sum()
