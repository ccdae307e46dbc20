"""Filters: which groups of responses are worth training on."""

from __future__ import annotations

from collections.abc import Sequence


def mixed_outcomes(scores: Sequence[float]) -> bool:
    """Keep a group whose responses did not all score the same; the others have zero advantages.

    Args:
        scores: the unshaped score of each response of one group (a length penalty would make an all-correct group
            look mixed).

    Raises:
        ValueError: no scores.

    Source: dynamic sampling, DAPO, arXiv 2503.14476, eq. 11 (drops groups of accuracy 0 and 1).
    """
    if len(scores) == 0:
        raise ValueError("a group needs at least 1 score, got none")
    return min(scores) != max(scores)
