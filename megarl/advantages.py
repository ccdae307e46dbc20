"""Advantages: how much better than expected a response or a token was. Pure functions, no gradients.

Shape legend: B is the number of responses, N the number of scored (response) tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

NORMALIZATIONS = ("std", "none")


def group_advantages(rewards: Tensor, group_ids: Tensor, normalize: str = "std", epsilon: float = 1e-6) -> Tensor:
    """Advantage of each response over the mean of its group, [B] fp32.

    `"std"` gives (R - mean) / (std + epsilon) with the population standard deviation (divide by the group size);
    `"none"` gives R - mean. Equal rewards give exactly 0, also for values such as 0.1 whose mean rounds.
    Source: GRPO, arXiv 2402.03300, section 4.1.2, which leaves open the kind of deviation; without std: Dr. GRPO,
    arXiv 2503.20783.

    Args:
        rewards: [B], used in fp32.
        group_ids: [B] integers, equal for the responses to one prompt, in any order. Groups must be whole.
        normalize: "std" or "none".
        epsilon: prevents 0/0 in a group of equal rewards.

    Raises:
        ValueError: unknown `normalize`, epsilon not above 0, shapes differ, or a group of one response (it has nothing
            to be compared with).
    """
    _check_settings(normalize, epsilon)
    if rewards.dim() != 1 or rewards.shape != group_ids.shape:
        raise ValueError(f"rewards {tuple(rewards.shape)} and group_ids {tuple(group_ids.shape)} must both be [B]")
    ids, index, sizes = torch.unique(group_ids, return_inverse=True, return_counts=True)
    if (sizes < 2).any():
        raise ValueError(f"a group needs at least 2 responses, group {ids[sizes < 2][0].item()} has 1")
    # Sums of equal fp32 numbers are exact in fp64, and so is their mean; in fp32 the mean of seven 0.1 is not 0.1, and
    # dividing the remainder by std + epsilon gives an advantage out of nothing.
    rewards = rewards.float().double()
    centred = rewards - _group_mean(rewards, index, sizes)[index]
    if normalize == "none":
        return centred.float()
    std = _group_mean(centred.square(), index, sizes).sqrt()
    return (centred / (std[index] + epsilon)).float()


def _group_mean(values: Tensor, index: Tensor, sizes: Tensor) -> Tensor:
    """[B] -> [groups]."""
    return values.new_zeros(len(sizes)).index_add(0, index, values) / sizes


def _check_settings(normalize: str, epsilon: float) -> None:
    if normalize not in NORMALIZATIONS:
        raise ValueError(f"normalize must be one of {', '.join(NORMALIZATIONS)}, got {normalize!r}")
    if not epsilon > 0.0:
        raise ValueError(f"epsilon must be above 0, got {epsilon}")


@dataclass(frozen=True)
class GroupAdvantages:
    """`group_advantages` with its settings, as a value for a `Recipe`."""

    normalize: str = "std"
    epsilon: float = 1e-6

    def __post_init__(self) -> None:
        _check_settings(self.normalize, self.epsilon)

    def __call__(self, rewards: Tensor, group_ids: Tensor) -> Tensor:
        """rewards [B], group_ids [B] -> advantages [B]."""
        return group_advantages(rewards, group_ids, self.normalize, self.epsilon)


def whiten(values: Tensor, mask: Tensor, reduce_sum: Callable[[Tensor], Tensor], epsilon: float = 1e-6) -> Tensor:
    """(values - mean) / (std + epsilon) over the unmasked tokens of all ranks, [N]; 0 where masked.

    Mean and population variance (divide by the count) are those of all ranks together, so each rank applies the same
    affine map. `reduce_sum` is called exactly once on every rank, with a tensor of one shape, even where a rank has no
    token: a rank that left early would make the others wait for ever. One token in all gives 0.

    Args:
        values: [N].
        mask: [N] bool; masked values have no influence, even if NaN.
        reduce_sum: sums a tensor over the ranks that hold different tokens (data-parallel group), e.g. an all-reduce;
            the identity on one process.
        epsilon: prevents 0/0 when all values are equal.

    Raises:
        ValueError: shapes differ or mask is not bool.
    """
    if mask.dtype != torch.bool or mask.shape != values.shape:
        raise ValueError(f"mask must be bool {tuple(values.shape)}, got {mask.dtype} {tuple(mask.shape)}")
    kept = torch.where(mask, values, 0.0).double()  # fp64: mean of squares minus square of mean cancels in fp32
    count, total, total_squared = reduce_sum(torch.stack([mask.sum().double(), kept.sum(), kept.square().sum()]))
    count = count.clamp(min=1.0)  # prevents 0/0 when no rank has a token
    mean = total / count
    variance = (total_squared / count - mean.square()).clamp(min=0.0)  # rounding may give -1e-20, whose root is NaN
    return torch.where(mask, (kept - mean) / (variance.sqrt() + epsilon), 0.0).to(values.dtype)
