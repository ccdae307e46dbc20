import math
import threading

import pytest
import torch

from megarl.advantages import GroupAdvantages, group_advantages, whiten


def identity(sums: torch.Tensor) -> torch.Tensor:
    return sums


def test_group_advantages_use_each_groups_own_mean_and_population_std():
    rewards = torch.tensor([1.0, 0.0, 0.0, 0.0, 2.0, 4.0])
    group_ids = torch.tensor([7, 7, 7, 7, 3, 3])
    # Group 7: mean 1/4, std sqrt(3/16); group 3: mean 3, std 1.
    root3 = math.sqrt(3.0)
    expected = torch.tensor([root3, -1 / root3, -1 / root3, -1 / root3, -1.0, 1.0])
    torch.testing.assert_close(group_advantages(rewards, group_ids), expected, rtol=1e-5, atol=0.0)
    torch.testing.assert_close(
        group_advantages(rewards, group_ids, normalize="none"), torch.tensor([0.75, -0.25, -0.25, -0.25, -1.0, 1.0])
    )


def test_group_advantages_follow_the_responses_in_any_order():
    rewards = torch.tensor([1.0, 2.0, 0.0, 0.0, 4.0, 0.0])
    group_ids = torch.tensor([7, 3, 7, 7, 3, 7])
    order = torch.tensor([0, 2, 3, 5, 1, 4])
    in_order = group_advantages(rewards[order], group_ids[order])
    assert torch.equal(group_advantages(rewards, group_ids)[order], in_order)


@pytest.mark.parametrize("reward", [0.1, 1.0, -1.0, 1 / 3, 1e8])
@pytest.mark.parametrize("normalize", ["std", "none"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_rewards_give_exactly_zero(reward: float, normalize: str, dtype: torch.dtype):
    rewards = torch.full((14,), reward, dtype=dtype)
    advantages = group_advantages(rewards, torch.tensor([0] * 7 + [1] * 7), normalize=normalize)
    assert advantages.tolist() == [0.0] * 14


def test_small_differences_on_top_of_a_large_reward_are_not_lost():
    advantages = group_advantages(torch.tensor([1e4, 1e4 + 1.0]), torch.tensor([0, 0]))
    torch.testing.assert_close(advantages, torch.tensor([-1.0, 1.0]), rtol=1e-5, atol=0.0)


def test_group_of_one_is_refused_with_its_id():
    with pytest.raises(ValueError, match="at least 2 responses, group 9 has 1"):
        group_advantages(torch.tensor([1.0, 0.0, 1.0]), torch.tensor([4, 4, 9]))


def test_no_responses_give_no_advantages():
    assert group_advantages(torch.zeros(0), torch.zeros(0, dtype=torch.int64)).shape == (0,)


def test_group_advantages_as_a_value_equals_the_function():
    rewards, group_ids = torch.tensor([1.0, 0.0, 3.0]), torch.tensor([0, 0, 0])
    for normalize in ("std", "none"):
        expected = group_advantages(rewards, group_ids, normalize)
        assert torch.equal(GroupAdvantages(normalize)(rewards, group_ids), expected)


def test_bad_settings_and_shapes_are_refused():
    with pytest.raises(ValueError, match="one of std, none, got 'variance'"):
        GroupAdvantages(normalize="variance")
    with pytest.raises(ValueError, match=r"epsilon must be above 0, got 0\.0"):
        GroupAdvantages(epsilon=0.0)
    with pytest.raises(ValueError, match=r"must both be \[B\]"):
        group_advantages(torch.zeros(4), torch.zeros(2, dtype=torch.int64))
    with pytest.raises(ValueError, match="mask must be bool"):
        whiten(torch.zeros(3), torch.ones(3), identity)


def test_whitening_uses_mean_and_population_variance_of_unmasked_tokens():
    """RC29"""
    values = torch.tensor([1.0, 2.0, math.nan, 3.0, 6.0])
    mask = torch.tensor([True, True, False, True, True])
    expected = torch.tensor([-2.0, -1.0, 0.0, 0.0, 3.0]) / math.sqrt(3.5)  # mean 3, variance 14/4; masked stays 0
    torch.testing.assert_close(whiten(values, mask, identity), expected, rtol=1e-5, atol=1e-9)


def whiten_on_two_ranks(values: list[torch.Tensor], masks: list[torch.Tensor]) -> tuple[list[torch.Tensor], list[int]]:
    """Two threads as ranks; the barrier makes a rank that skips a reduction fail the test instead of passing unseen."""
    barrier, contributions = threading.Barrier(2, timeout=20.0), [torch.zeros(3)] * 2
    calls, results = [0, 0], [torch.zeros(0)] * 2

    def run(rank: int) -> None:
        def reduce_sum(sums: torch.Tensor) -> torch.Tensor:
            calls[rank] += 1
            contributions[rank] = sums
            barrier.wait()
            return contributions[0] + contributions[1]

        results[rank] = whiten(values[rank], masks[rank], reduce_sum)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results, calls


def test_whitening_over_two_ranks_equals_one_process():
    """RC29"""
    values = [torch.tensor([1.0, 2.0]), torch.tensor([3.0, 6.0])]
    results, _ = whiten_on_two_ranks(values, [torch.ones(2, dtype=torch.bool)] * 2)
    alone = whiten(torch.cat(values), torch.ones(4, dtype=torch.bool), identity)
    torch.testing.assert_close(torch.cat(results), alone)


def test_whitening_on_two_ranks_by_hand():
    """RC29: mean 3 and variance 14/4 of 1, 2 on one rank and 3, 6 on the other; then one token in all."""
    masks = [torch.ones(2, dtype=torch.bool)] * 2
    results, _ = whiten_on_two_ranks([torch.tensor([1.0, 2.0]), torch.tensor([3.0, 6.0])], masks)
    expected = torch.tensor([[-2.0, -1.0], [0.0, 3.0]]) / math.sqrt(3.5)
    torch.testing.assert_close(torch.stack(results), expected, rtol=1e-5, atol=1e-9)
    masks = [torch.tensor([False, True]), torch.tensor([False, False])]
    results, _ = whiten_on_two_ranks([torch.tensor([math.nan, 5.0])] * 2, masks)
    assert torch.stack(results).tolist() == [[0.0, 0.0]] * 2


@pytest.mark.parametrize("num_places", [0, 4])
def test_a_rank_without_tokens_reduces_as_often_as_the_others_and_changes_nothing(num_places: int):
    """RC20"""
    values = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0])
    full, empty = torch.ones(5, dtype=torch.bool), torch.zeros(num_places, dtype=torch.bool)
    results, calls = whiten_on_two_ranks([values, torch.full((num_places,), math.nan)], [full, empty])
    assert calls == [1, 1]
    torch.testing.assert_close(results[0], whiten(values, full, identity))
    assert results[1].tolist() == [0.0] * num_places


def test_whitening_one_token_equal_tokens_or_none_is_finite():
    """RC29"""
    assert whiten(torch.tensor([5.0]), torch.tensor([True]), identity).tolist() == [0.0]
    assert whiten(torch.tensor([5.0, 7.0]), torch.tensor([False, False]), identity).tolist() == [0.0, 0.0]
    equal = whiten(torch.full((7,), 0.1), torch.ones(7, dtype=torch.bool), identity)
    torch.testing.assert_close(equal, torch.zeros(7), atol=1e-6, rtol=0.0)
