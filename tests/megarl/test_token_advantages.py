"""Leave-one-out, and what is made of the rewards of tokens."""

import math
from dataclasses import replace

import pytest
import torch

from megarl.advantages import (
    BatchAdvantages,
    GeneralizedAdvantages,
    LeaveOneOut,
    TokenOutcomes,
    gae,
    token_rewards,
)


def outcomes(rewards: list[list[float]], values: list[list[float]], **changes) -> TokenOutcomes:
    """Of responses, each a list; none is truncated and last values are 9 unless given."""
    lengths = torch.tensor([len(response) for response in rewards])
    return TokenOutcomes(
        torch.tensor([reward for response in rewards for reward in response]),
        torch.tensor([value for response in values for value in response]),
        changes.get("last_values", torch.full((len(rewards),), 9.0)),
        lengths,
        changes.get("truncated", torch.zeros(len(rewards), dtype=torch.bool)),
    )


def test_leave_one_out_compares_with_the_mean_of_the_others():
    rewards, ids = torch.tensor([1.0, 4.0, 0.0, 2.0, 0.0]), torch.tensor([7, 3, 7, 3, 7])
    assert LeaveOneOut()(rewards, ids).tolist() == [1.0, 2.0, -0.5, -2.0, -0.5]


def test_leave_one_out_of_equal_rewards_is_exactly_zero_and_of_one_response_refused():
    assert LeaveOneOut()(torch.full((7,), 0.1), torch.zeros(7, dtype=torch.int64)).tolist() == [0.0] * 7
    with pytest.raises(ValueError, match="at least 2 responses, group 5 has 1"):
        LeaveOneOut()(torch.ones(3), torch.tensor([0, 0, 5]))


def test_generalised_advantages_by_hand():
    """gamma = lambda = 1/2. Deltas -3/8 (V' 1/4), 1/8 (V' 3/4), 1/4 (no V'), each adding a quarter of the next."""
    found = outcomes([[0.0, 0.0, 1.0], [2.0]], [[0.5, 0.25, 0.75], [0.5]])
    advantages, returns = GeneralizedAdvantages(0.5, 0.5, whiten=False)(found)
    assert advantages.tolist() == [-0.328125, 0.1875, 0.25, 1.5]
    assert returns.tolist() == [0.171875, 0.4375, 1.0, 2.0]


@pytest.mark.parametrize(
    ("lam", "expected"),
    [
        (1.0, [0.625, 1.0, 0.25]),  # all rewards to come, less the value: 0.5 + 0.375 + 0.25 - 0.5 at first
        (0.0, [0.125, 0.875, 0.25]),  # one reward and the next value: 0.5 + 0.125 - 0.5 at first
    ],
)
def test_lambda_goes_from_one_reward_to_all_of_them(lam: float, expected: list[float]):
    found = gae(outcomes([[0.5, 0.75, 1.0]], [[0.5, 0.25, 0.75]]), 0.5, lam, bootstrap_truncated=False)
    assert found.tolist() == expected


def test_the_reward_of_a_response_is_at_its_last_token_and_reaches_all_before_it():
    """RC25: one response ends with a stop token after 3 tokens, one fills its 5 without any."""
    lengths = torch.tensor([3, 5])
    rewards = token_rewards(torch.tensor([1.0, 2.0]), lengths, kl=None, coefficient=0.0)
    assert rewards.tolist() == [0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 2.0]
    found = TokenOutcomes(rewards, torch.zeros(8), torch.zeros(2), lengths, torch.tensor([False, True]))
    assert gae(found, 1.0, 1.0, bootstrap_truncated=False).tolist() == [1.0] * 3 + [2.0] * 5


def test_the_kl_is_taken_from_the_reward_of_every_token():
    kl = torch.tensor([0.5, -0.25, 2.0])
    rewards = token_rewards(torch.tensor([1.0, -1.0]), torch.tensor([2, 1]), kl, coefficient=0.1)
    torch.testing.assert_close(rewards, torch.tensor([-0.05, 1.025, -1.2]))
    assert kl.tolist() == [0.5, -0.25, 2.0]


@pytest.mark.parametrize(
    ("truncated", "bootstrap", "expected"),
    [(True, True, [0.4, 0.2]), (False, True, [-0.2, -0.4]), (True, False, [-0.2, -0.4])],
)
def test_a_truncated_response_is_worth_its_last_value_only_if_asked_for(truncated, bootstrap, expected):
    """RC28: values 0.2 and 0.4, then 0.6; no rewards. Another response comes first, with another last value."""
    found = outcomes(
        [[0.0], [0.0, 0.0]],
        [[0.0], [0.2, 0.4]],
        last_values=torch.tensor([9.0, 0.6]),
        truncated=torch.tensor([False, truncated]),
    )
    advantages, returns = GeneralizedAdvantages(1.0, 1.0, whiten=False, bootstrap_truncated=bootstrap)(found)
    torch.testing.assert_close(advantages, torch.tensor([0.0, *expected]))
    torch.testing.assert_close(
        returns, torch.full((3,), 0.6 if truncated and bootstrap else 0.0) * (torch.arange(3) > 0)
    )


def test_advantages_are_whitened_over_all_tokens_and_returns_are_not():
    """Raw advantages 1, 1, 1 and -1: mean 1/2, variance 3/4."""
    found = outcomes([[0.0, 0.0, 1.0], [-1.0]], [[0.0, 0.0, 0.0], [0.0]])
    advantages, returns = GeneralizedAdvantages(1.0, 1.0)(found)
    root3 = math.sqrt(3.0)
    torch.testing.assert_close(advantages, torch.tensor([1 / root3] * 3 + [-root3]), rtol=1e-5, atol=0.0)
    assert returns.tolist() == [1.0, 1.0, 1.0, -1.0]


@pytest.mark.parametrize("advantage", [GeneralizedAdvantages(1.0, 1.0), BatchAdvantages(1.0)])
def test_responses_that_are_not_learnt_from_have_no_part_in_whitening(advantage):
    """The second of three is cut off and masked: the others are whitened as if it were not there."""
    first, masked, last = [0.0, 0.0, 1.0], [50.0, 50.0], [-1.0]
    rewards = [first, masked, last]
    found = outcomes(rewards, [[0.0] * len(one) for one in rewards])
    found = replace(found, in_loss=torch.tensor([True, False, True]))
    alone, _ = advantage(outcomes([first, last], [[0.0] * 3, [0.0]]))
    advantages, returns = advantage(found)
    torch.testing.assert_close(advantages[[0, 1, 2, 5]], alone)
    assert advantages[3:5].tolist() == [0.0, 0.0]
    assert returns.tolist() == [1.0, 1.0, 1.0, 100.0, 50.0, -1.0]


@pytest.mark.parametrize("value", [0.0, 7.0])
def test_batch_advantages_normalise_discounted_rewards_to_come_whatever_the_values(value: float):
    """Rewards to come 1.5, 1, 2 and 4: mean 2.125, variance 1.296875."""
    found = outcomes([[1.0, 0.0, 2.0], [4.0]], [[value] * 3, [value]], truncated=torch.tensor([True, False]))
    advantages, returns = BatchAdvantages(gamma=0.5)(found)
    assert returns.tolist() == [1.5, 1.0, 2.0, 4.0]
    expected = torch.tensor([-0.625, -1.125, -0.125, 1.875]) / math.sqrt(1.296875)
    torch.testing.assert_close(advantages, expected, rtol=1e-5, atol=0.0)


def test_no_responses_give_no_advantages():
    nothing = outcomes([], [])
    for advantage in (GeneralizedAdvantages(), BatchAdvantages()):
        assert [part.shape for part in advantage(nothing)] == [(0,), (0,)]


def test_discounts_outside_their_range_are_refused():
    with pytest.raises(ValueError, match=r"gamma must be within 0\.\.1, got 1\.5"):
        GeneralizedAdvantages(gamma=1.5)
    with pytest.raises(ValueError, match=r"lam must be within 0\.\.1, got -0\.1"):
        GeneralizedAdvantages(lam=-0.1)
    with pytest.raises(ValueError, match=r"gamma must be within 0\.\.1, got 2\.0"):
        BatchAdvantages(gamma=2.0)
