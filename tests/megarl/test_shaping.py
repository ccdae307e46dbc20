import pytest
import torch

from megarl.shaping import soft_overlong


def test_soft_overlong_penalty_grows_linearly_over_the_cache_and_ends_at_minus_one():
    shape = soft_overlong(max_length=20, cache_length=4)
    rewards = torch.tensor([1.0, 1.0, 1.0, 1.0, -1.0, 1.0])
    shaped = shape(rewards, torch.tensor([3, 16, 17, 19, 20, 25]))
    torch.testing.assert_close(shaped, torch.tensor([1.0, 1.0, 0.75, 0.25, -2.0, 0.0]))
    assert rewards.tolist() == [1.0, 1.0, 1.0, 1.0, -1.0, 1.0]


def test_paper_values_give_half_a_point_off_in_the_middle_of_the_cache():
    shape = soft_overlong(max_length=20480, cache_length=4096)
    assert shape(torch.tensor([1.0]), torch.tensor([18432])).item() == 0.5


@pytest.mark.parametrize("cache_length", [0, 20, -1])
def test_cache_that_does_not_fit_is_refused(cache_length: int):
    with pytest.raises(ValueError, match=r"cache_length must be within 1..19"):
        soft_overlong(max_length=20, cache_length=cache_length)
