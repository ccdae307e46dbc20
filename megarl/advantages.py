"""Advantages: how much better than expected a response or a token was. Pure functions, no gradients.

Shape legend: B is the number of responses, N the number of scored (response) tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

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


@dataclass(frozen=True)
class LeaveOneOut:
    """R minus the mean reward of the other responses to the prompt (RLOO, arXiv 2402.14740), as a recipe's advantage.

    It is `group_advantages(..., "none")` times G / (G - 1) for a group of G.
    """

    def __call__(self, rewards: Tensor, group_ids: Tensor) -> Tensor:
        """rewards [B], group_ids [B] -> advantages [B]. Raises ValueError for a group of one."""
        _, index, sizes = torch.unique(group_ids, return_inverse=True, return_counts=True)
        size = sizes[index].double()
        return (group_advantages(rewards, group_ids, "none").double() * size / (size - 1)).float()


@dataclass(frozen=True)
class TokenOutcomes:
    """What token-level advantages are made of: B responses end to end, N tokens in all.

    Fields: `rewards [N]`; `values [N]`, of the state before each token; `last_values [B]`, of the state after the last
    token of each response; `lengths [B]`; `truncated [B]`, which responses were cut off at the length limit;
    `in_loss [B]`, which are learnt from (None: all), for only those are normalised over.
    """

    rewards: Tensor
    values: Tensor
    last_values: Tensor
    lengths: Tensor
    truncated: Tensor
    in_loss: Tensor | None = None


TokenAdvantage = Callable[[TokenOutcomes], tuple[Tensor, Tensor]]
"""outcomes -> advantages [N], and returns [N]: what a critic should have said."""


@dataclass(frozen=True)
class GeneralizedAdvantages:
    """Generalised advantage estimation (arXiv 1506.02438, eq. 16), as a recipe's token-level advantage.

    A_t = sum over l of (gamma lam)^l (r_{t+l} + gamma V_{t+l+1} - V_{t+l}); the return of a token is A_t + V_t, before
    whitening.

    Fields:
        gamma, lam: discount and trace decay, 0 to 1.
        whiten: advantages to mean 0 and standard deviation 1 over all tokens of the step.
        bootstrap_truncated: a response that was cut off is worth `last_values` after its last token, not 0.
    """

    gamma: float = 1.0
    lam: float = 0.95
    whiten: bool = True
    bootstrap_truncated: bool = False

    def __post_init__(self) -> None:
        _check_share("gamma", self.gamma)
        _check_share("lam", self.lam)

    def __call__(self, outcomes: TokenOutcomes) -> tuple[Tensor, Tensor]:
        """See `TokenAdvantage`."""
        raw = gae(outcomes, self.gamma, self.lam, bootstrap_truncated=self.bootstrap_truncated)
        returns = raw + outcomes.values
        return _whitened(raw, outcomes) if self.whiten else raw, returns


def gae(outcomes: TokenOutcomes, gamma: float, lam: float, *, bootstrap_truncated: bool) -> Tensor:
    """Return the advantages of `GeneralizedAdvantages` before whitening, [N] fp32."""
    advantages = torch.empty_like(outcomes.rewards, dtype=torch.float64)
    after = torch.where(outcomes.truncated, outcomes.last_values, 0.0) if bootstrap_truncated else None
    start = 0
    for number, length in enumerate(outcomes.lengths.tolist()):
        part = slice(start, start + length)
        values = torch.zeros(length + 1, dtype=torch.float64)
        values[:-1] = outcomes.values[part]
        if after is not None:
            values[-1] = after[number]
        deltas = (outcomes.rewards[part].double() + gamma * values[1:] - values[:-1]).tolist()
        trace = 0.0
        for place in range(length - 1, -1, -1):
            trace = deltas[place] + gamma * lam * trace
            advantages[start + place] = trace
        start += length
    return advantages.float()


@dataclass(frozen=True)
class BatchAdvantages:
    """Discounted sum of rewards to come, normalised over all tokens of the step (REINFORCE++, arXiv 2501.03262), as a
    recipe's token-level advantage; needs no critic.

    Fields: `gamma`, discount, 0 to 1.
    """

    gamma: float = 1.0

    def __post_init__(self) -> None:
        _check_share("gamma", self.gamma)

    def __call__(self, outcomes: TokenOutcomes) -> tuple[Tensor, Tensor]:
        """See `TokenAdvantage`."""
        nothing = [torch.zeros_like(values) for values in (outcomes.values, outcomes.last_values)]
        without_critic = replace(outcomes, values=nothing[0], last_values=nothing[1])
        returns = gae(without_critic, self.gamma, 1.0, bootstrap_truncated=False)
        return _whitened(returns, outcomes), returns


def _check_share(name: str, value: float) -> None:
    if not 0.0 <= value <= 1.0:
        raise ValueError(f"{name} must be within 0..1, got {value}")


def _whitened(values: Tensor, outcomes: TokenOutcomes) -> Tensor:
    """`whiten` over all tokens that are learnt from; every rank holds all of them, so there is nothing to reduce."""
    mask = torch.ones_like(values, dtype=torch.bool)
    if outcomes.in_loss is not None:
        mask = outcomes.in_loss.repeat_interleave(outcomes.lengths)
    return whiten(values, mask, lambda sums: sums)


def token_rewards(scores: Tensor, lengths: Tensor, kl: Tensor | None, coefficient: float) -> Tensor:
    """Return the reward of each token, [N]: the score of a response at its last token (the stop token if it has one),
    minus `coefficient * kl` at every token (arXiv 1909.08593, section 2).

    Args:
        scores: [B]; lengths: [B], at least 1.
        kl: [N] estimate of the divergence from the reference; None: none.
    """
    rewards = scores.new_zeros(int(lengths.sum())) if kl is None else -coefficient * kl
    rewards[lengths.cumsum(0) - 1] += scores
    return rewards
