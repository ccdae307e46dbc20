"""Random ragged batches for `loss_oracles.py`, and how far two sets of numbers are apart.

Shapes: B responses of a batch, N tokens of them, end to end.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from common import no_nan
from oracles_numpy import Number, derivatives
from torch import Tensor

Responses = list[np.ndarray]
"""One array per response, of a number for each token."""

GROUPS = (2, 3, 5)
"""Responses to each prompt."""
LONGEST = 12
LARGEST_LOG_RATIO = 19.0
"""From 20 on megarl bounds the ratio, which the papers do not."""


@dataclass(frozen=True)
class Differences:
    """Of value and gradient; None where there is none."""

    value: float | None
    gradient: float | None = None

    @property
    def largest(self) -> float:
        return max(0.0 if number is None else number for number in (self.value, self.gradient))


@dataclass(frozen=True)
class Row:
    """A quantity compared; with a `reason`, the other side defines it in another way and nothing is judged."""

    quantity: str
    reference: str
    differences: Differences
    reason: str = ""


@dataclass(frozen=True)
class Batch:
    """What the formulas need.

    Fields: log-probs `new`, `old` and `other` (of a reference, or of rollout), `masks` of the tokens that count,
    `rewards` and `values`, of each token; `scores`, `advantages`, `last_values` and `truncated`, of each response.
    """

    new: Responses
    old: Responses
    other: Responses
    masks: Responses
    rewards: Responses
    values: Responses
    scores: np.ndarray
    advantages: np.ndarray
    last_values: np.ndarray
    truncated: np.ndarray

    @property
    def lengths(self) -> Tensor:
        """`[B]`."""
        return torch.tensor([len(response) for response in self.new])

    @property
    def ids(self) -> Tensor:
        """The response of each token, `[N]`."""
        return torch.arange(len(self.new)).repeat_interleave(self.lengths)


Case = Callable[[Batch], Differences]


def draw(generator: np.random.Generator) -> Batch:
    """Return a batch with a response of one token, one that is masked as a whole, and ratios from e^-19 to e^19."""
    num = sum(GROUPS)
    lengths = generator.integers(1, LONGEST + 1, num)
    lengths[generator.integers(num)] = 1

    def tokens() -> Responses:
        return [generator.normal(size=length) for length in lengths]

    def off(log_probs: Responses) -> Responses:
        """Log-probs near the given ones, one in five of them far away."""
        spread = [np.where(generator.random(len(one)) < 0.2, 8.0, 0.2) * generator.normal(size=len(one)) for one in old]
        moves = [np.clip(one, -LARGEST_LOG_RATIO, LARGEST_LOG_RATIO) for one in spread]
        return [one + move for one, move in zip(log_probs, moves, strict=True)]

    old = [-LARGEST_LOG_RATIO - np.abs(one) for one in tokens()]
    new = off(old)
    masks = [generator.random(length) < 0.7 for length in lengths]
    masks[0][:] = True
    masks[generator.integers(1, num)][:] = False
    return Batch(
        new=new,
        old=old,
        other=off(new),
        masks=masks,
        rewards=tokens(),
        values=tokens(),
        scores=generator.normal(size=num).astype(np.float32).astype(float),  # megarl takes rewards in fp32
        advantages=generator.normal(size=num),
        last_values=generator.normal(size=num),
        truncated=generator.random(num) < 0.5,
    )


def flat(responses: Sequence[np.ndarray]) -> Tensor:
    """-> `[N]`."""
    return torch.from_numpy(np.concatenate(responses))


def difference(ours: Tensor, expected: Sequence[float] | np.ndarray | Tensor) -> float:
    """Return the largest difference: relative to each number expected, or to 1 (or the largest of them, if that is
    less than 1) where the number is smaller."""
    ours, expected = ours.detach().double().flatten(), torch.as_tensor(expected).detach().double().flatten()
    assert ours.shape == expected.shape, (ours.shape, expected.shape)
    floor = min(1.0, float(expected.abs().max())) or 1.0
    return no_nan(float(((ours - expected).abs() / expected.abs().clamp(min=floor)).max()))


def slope_difference(ours: Tensor, expected: Tensor) -> float:
    """Return the largest difference of a model's gradients, relative to the largest of them: that of a weight is a sum
    over tokens that may nearly cancel."""
    scale = expected.abs().max()
    return difference(ours / scale, expected / scale)


def both(
    ours: Callable[[Tensor], Tensor], paper: Callable[[Responses], Sequence[Number]], point: Responses
) -> Differences:
    """Compare the values at a point, and the gradient of their sum."""
    numbers = flat(point).requires_grad_()
    values = ours(numbers)
    values.sum().backward()
    slopes = derivatives(lambda moved: sum(paper(moved)), point)
    assert numbers.grad is not None
    return Differences(difference(values, paper(point)), difference(numbers.grad, np.concatenate(slopes)))
