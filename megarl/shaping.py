"""Reward shaping: what is added to a verifier's score before advantages are computed."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class SoftOverlong:
    """Length penalty that grows over the last `cache_length` tokens; built by `soft_overlong`."""

    max_length: int
    cache_length: int

    def __post_init__(self) -> None:
        if not 0 < self.cache_length < self.max_length:
            raise ValueError(
                f"cache_length must be within 1..{self.max_length - 1} (below max_length), got {self.cache_length}"
            )

    def __call__(self, rewards: Tensor, lengths: Tensor) -> Tensor:
        """rewards [B], lengths [B] (response tokens) -> shaped rewards [B]; the input is left as it is."""
        penalties = (self.max_length - self.cache_length - lengths) / self.cache_length
        return rewards + penalties.clamp(-1.0, 0.0)


def soft_overlong(max_length: int, cache_length: int) -> SoftOverlong:
    """Soft overlong punishment: 0 up to max_length - cache_length, then linear down to -1 at max_length and beyond.

    Args:
        max_length: longest response allowed, tokens (the paper: 20,480).
        cache_length: tokens over which the penalty grows (the paper: 4,096).

    Raises:
        ValueError: cache_length not within 1..max_length - 1.

    Source: DAPO, arXiv 2503.14476, eq. 13.
    """
    return SoftOverlong(max_length, cache_length)
