import pytest
import torch

from megarl.filters import mixed_outcomes
from megarl.shaping import soft_overlong


def test_only_groups_of_differing_scores_are_kept():
    assert mixed_outcomes([1.0, -1.0, -1.0])
    assert not mixed_outcomes([1.0, 1.0])
    assert not mixed_outcomes([-1.0, -1.0])
    assert not mixed_outcomes([1.0])


def test_all_correct_group_is_dropped_on_its_scores_though_length_penalties_spread_its_rewards():
    """RC22 (iii)"""
    scores = torch.tensor([1.0, 1.0, 1.0, 1.0])
    shaped = soft_overlong(max_length=30, cache_length=10)(scores, torch.tensor([20, 22, 25, 30]))
    torch.testing.assert_close(shaped, torch.tensor([1.0, 0.8, 0.5, 0.0]))
    assert not mixed_outcomes(scores.tolist())
    assert mixed_outcomes(shaped.tolist())


def test_group_without_scores_is_refused():
    with pytest.raises(ValueError, match="at least 1 score"):
        mixed_outcomes([])
