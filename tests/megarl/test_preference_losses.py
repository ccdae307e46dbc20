"""Losses of pairs: `PreferenceLoss` and `bradley_terry`."""

import math

import pytest
import torch

from megarl.losses import PreferenceLoss, bradley_terry, negative_log_likelihood, sequence_means, sequence_sums


def value_and_gradients(loss: PreferenceLoss, chosen: float, rejected: float) -> tuple[float, float, float]:
    """Loss of one pair, and its derivatives by both log-ratios."""
    ratios = torch.tensor([chosen, rejected], dtype=torch.float64, requires_grad=True)
    value = loss(ratios[:1], ratios[1:])
    value.sum().backward()
    return value.item(), *ratios.grad.tolist()


@pytest.mark.parametrize(
    ("loss", "value", "gradient"),
    [
        (PreferenceLoss("sigmoid", 0.1), 0.437488, -0.035434),  # log(1 + e^-0.6); -0.1 / (1 + e^0.6)
        (PreferenceLoss("hinge", 0.1), 0.4, -0.1),
        (PreferenceLoss("ipo", 0.1), 1.0, 2.0),  # (6 - 5)^2
        # 0.9 * 0.437488 + 0.1 * 1.037488; 0.9 * -0.035434 + 0.1 * 0.064566
        (PreferenceLoss("sigmoid", 0.1, label_smoothing=0.1), 0.497488, -0.025434),
    ],
)
def test_a_margin_of_six(loss: PreferenceLoss, value: float, gradient: float):
    """RC37"""
    found = value_and_gradients(loss, 4.0, -2.0)
    assert found == pytest.approx((value, gradient, -gradient), abs=1e-6)


def test_a_strongly_wrong_pair_has_a_finite_loss_and_gradient_in_fp32():
    """RC37: sigmoid(-200) is 0 in fp32, its logarithm would be infinite."""
    chosen = torch.tensor([-2000.0, 2000.0], requires_grad=True)
    losses = PreferenceLoss(beta=0.1)(chosen, torch.zeros(2))
    losses.sum().backward()
    assert losses.tolist() == [200.0, 0.0]
    torch.testing.assert_close(chosen.grad, torch.tensor([-0.1, 0.0]))


def test_hinge_leaves_a_pair_alone_whose_margin_is_wide_enough():
    assert value_and_gradients(PreferenceLoss("hinge", 0.1), 12.0, 0.0) == (0.0, 0.0, 0.0)


def test_ipo_is_the_only_one_that_averages_over_tokens():
    """RC35: chosen three tokens of log-ratio 3, rejected one of -3; margin 6 of means, 12 of sums."""
    ratios = torch.tensor([3.0, 3.0, 3.0, -3.0], requires_grad=True)
    ids = torch.tensor([0, 0, 0, 1])
    loss = PreferenceLoss("ipo", 0.1)
    means, sums = sequence_means(ratios, ids), sequence_sums(ratios, ids)
    value = loss(means[:1], means[1:])
    value.backward()
    assert value.item() == pytest.approx(1.0)
    torch.testing.assert_close(ratios.grad, torch.tensor([2 / 3, 2 / 3, 2 / 3, -2.0]))
    assert loss(sums[:1], sums[1:]).item() == pytest.approx(49.0)
    assert [PreferenceLoss(kind).averages for kind in ("sigmoid", "ipo", "hinge")] == [False, True, False]


def test_the_likelihood_of_an_answer_is_averaged_over_its_tokens():
    """RPO's second term: of two tokens of log-prob -1 and -3, 2."""
    means = sequence_means(negative_log_likelihood(torch.tensor([-1.0, -3.0, -7.0])), torch.tensor([0, 0, 1]))
    assert means.tolist() == [2.0, 7.0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kind": "kto"}, "loss: got 'kto', allowed: sigmoid, ipo, hinge"),
        ({"beta": 0.0}, "beta: got 0.0, allowed: above 0"),
        ({"beta": math.nan}, "beta: got nan"),
        ({"label_smoothing": 0.5}, "label_smoothing: got 0.5, allowed: from 0 to below 0.5"),
        ({"label_smoothing": 0.1, "kind": "ipo"}, "label_smoothing: got 0.1, allowed with loss 'ipo': 0"),
        ({"label_smoothing": 0.1, "kind": "hinge"}, "label_smoothing: got 0.1, allowed with loss 'hinge': 0"),
        ({"nll": -1.0}, "nll: got -1.0, allowed: from 0"),
    ],
)
def test_settings_without_meaning_are_refused(changes: dict, message: str):
    """RC37: smoothing of a loss that has none is an error, not ignored."""
    with pytest.raises(ValueError, match=message):
        PreferenceLoss(**changes)


@pytest.mark.parametrize(
    ("margin", "value", "gradient"),
    [
        (0.0, 0.474077, -0.377541),  # log(1 + e^-0.5); -1 / (1 + e^0.5)
        (0.25, 0.575939, -0.437823),  # log(1 + e^-0.25); -1 / (1 + e^0.25)
        (0.5, math.log(2.0), -0.5),
        (200.5, 200.0, -1.0),
    ],
)
def test_bradley_terry_wants_the_chosen_reward_above_the_rejected_by_the_margin(
    margin: float, value: float, gradient: float
):
    rewards = torch.tensor([1.0, 0.5], requires_grad=True)
    loss = bradley_terry(rewards[:1], rewards[1:], torch.tensor([margin]))
    loss.backward()
    assert loss.item() == pytest.approx(value, abs=1e-6)
    assert rewards.grad.tolist() == pytest.approx([gradient, -gradient], abs=1e-6)
