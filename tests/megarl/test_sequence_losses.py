"""Losses and sums by response, weights of importance, and the critic's loss."""

import math

import pytest
import torch

from megarl.losses import (
    ClippedValueLoss,
    SequenceClippedPolicyLoss,
    clipped,
    importance_weights,
    sequence_means,
    sequence_sums,
)

S = math.exp(0.1)


def test_all_tokens_of_a_response_share_its_mean_log_ratio():
    """Responses of two tokens (log-ratios 0.3 and -0.1, mean 0.1) and of one (0.5), interleaved."""
    log_probs = torch.tensor([0.3, 0.5, -0.1], requires_grad=True)
    ids, advantages = torch.tensor([0, 1, 0]), torch.tensor([2.0, -1.0, 2.0])
    loss, metrics = SequenceClippedPolicyLoss(0.2, 0.2)(log_probs, torch.zeros(3), advantages, ids)
    loss.sum().backward()
    torch.testing.assert_close(loss, torch.tensor([-2 * S, math.exp(0.5), -2 * S]))
    # Both tokens of the first response have the loss -2 s, and ds / dlog_prob is s / 2 for each of them.
    torch.testing.assert_close(log_probs.grad, torch.tensor([-2 * S, math.exp(0.5), -2 * S]))
    torch.testing.assert_close(metrics["ratio"], torch.tensor([S, math.exp(0.5), S]))
    assert metrics["clip_fraction"].tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("log_ratio", "advantage", "loss", "gradient", "bound"),
    [
        (0.5, 1.0, -1.3, 0.0, "high"),
        (0.5, -1.0, math.exp(0.5), math.exp(0.5), None),
        (-0.5, -1.0, 0.8, 0.0, "low"),
        (-0.5, 1.0, -math.exp(-0.5), -math.exp(-0.5), None),
        (0.0, 1.0, -1.0, -1.0, None),
    ],
)
def test_a_response_is_clipped_as_a_whole(log_ratio, advantage, loss, gradient, bound):
    """Two tokens far apart whose mean is `log_ratio`; each by itself would be clipped."""
    log_probs = torch.tensor([log_ratio + 4.0, log_ratio - 4.0], requires_grad=True)
    ids, advantages = torch.tensor([0, 0]), torch.full((2,), advantage)
    found, metrics = SequenceClippedPolicyLoss(0.2, 0.3)(log_probs, torch.zeros(2), advantages, ids)
    found.sum().backward()
    torch.testing.assert_close(found, torch.full((2,), loss))
    torch.testing.assert_close(log_probs.grad, torch.full((2,), gradient))
    for name in ("low", "high"):
        assert metrics[f"clip_fraction_{name}"].tolist() == [float(bound == name)] * 2


def test_responses_of_one_token_are_clipped_as_tokens_are():
    log_probs, advantages = torch.tensor([0.4, -0.4, 0.1]), torch.tensor([1.0, -1.0, 2.0])
    loss, _ = SequenceClippedPolicyLoss(0.2, 0.2)(log_probs, torch.zeros(3), advantages, torch.arange(3))
    torch.testing.assert_close(loss, clipped(0.2, 0.2)(log_probs, torch.zeros(3), advantages)[0])


def test_no_tokens_give_an_empty_loss_attached_to_the_graph():
    log_probs, nothing = torch.zeros(0, requires_grad=True), torch.zeros(0)
    loss, _ = SequenceClippedPolicyLoss()(log_probs, nothing, nothing, nothing.long())
    loss.sum().backward()
    assert loss.shape == log_probs.grad.shape == (0,)


def test_bounds_of_the_sequence_ratio_are_checked():
    with pytest.raises(ValueError, match="clip low must be within"):
        SequenceClippedPolicyLoss(low=0.0)
    with pytest.raises(ValueError, match="clip high must be above 0"):
        SequenceClippedPolicyLoss(high=0.0)


def test_sums_and_means_by_sequence_leave_sequences_without_tokens_at_zero():
    values = torch.tensor([1.0, 2.0, 3.0, 10.0], requires_grad=True)
    ids = torch.tensor([0, 2, 0, 2])
    assert sequence_sums(values, ids).tolist() == [4.0, 0.0, 12.0]
    assert sequence_sums(values, ids, 4).tolist() == [4.0, 0.0, 12.0, 0.0]
    means = sequence_means(values, ids, 4)
    assert means.tolist() == [2.0, 0.0, 6.0, 0.0]
    means[2].backward()
    assert values.grad.tolist() == [0.0, 0.5, 0.0, 0.5]


def test_sums_of_no_tokens_have_the_number_of_sequences_asked_for():
    nothing = torch.zeros(0)
    assert sequence_sums(nothing, nothing.long()).shape == (0,)
    assert sequence_means(nothing, nothing.long(), 2).tolist() == [0.0, 0.0]


def test_importance_weights_are_the_ratio_to_rollout_up_to_a_cap_and_pass_no_gradient():
    old = torch.tensor([0.2, 0.8, 0.1, 0.5]).log().requires_grad_()
    rollout = torch.tensor([0.1, 0.8, 0.4, 0.01]).log().requires_grad_()
    weights = importance_weights(old, rollout, cap=5.0)
    torch.testing.assert_close(weights, torch.tensor([2.0, 1.0, 0.25, 5.0]))
    assert not weights.requires_grad


def test_importance_weights_of_impossible_tokens_are_finite():
    weights = importance_weights(torch.tensor([0.0, -200.0]), torch.tensor([-200.0, 0.0]), cap=2.0)
    torch.testing.assert_close(weights, torch.tensor([2.0, 0.0]))


@pytest.mark.parametrize(
    ("value", "target", "loss", "gradient", "is_clipped"),
    [
        (2.0, 3.0, 1.125, 0.0, 1.0),  # kept at 1.5: 1.5^2 / 2 is more than 1^2 / 2
        (2.0, 0.0, 2.0, 2.0, 0.0),  # kept at 1.5: 1.5^2 / 2 is less than 2^2 / 2
        (0.0, -1.0, 1.125, 0.0, 1.0),  # kept at 0.5
        (0.0, 2.0, 2.0, -2.0, 0.0),
        (1.2, 2.0, 0.32, -0.8, 0.0),  # within the range: both are the same
    ],
)
def test_value_loss_is_the_larger_of_the_plain_and_the_clipped_error(value, target, loss, gradient, is_clipped):
    values = torch.tensor([value], requires_grad=True)
    found, metrics = ClippedValueLoss(clip=0.5)(values, torch.tensor([1.0]), torch.tensor([target]))
    found.sum().backward()
    assert found.item() == pytest.approx(loss)
    assert values.grad.item() == pytest.approx(gradient)
    assert metrics["value_clip_fraction"].item() == is_clipped
    assert metrics["value_error"].item() == pytest.approx((value - target) ** 2)
    assert metrics["value"].item() == pytest.approx(value)
    assert not any(metric.requires_grad for metric in metrics.values())


def test_value_loss_without_clipping_is_half_the_squared_error():
    values = torch.tensor([2.0, -1.0], requires_grad=True)
    loss, metrics = ClippedValueLoss(clip=None)(values, torch.tensor([90.0, 90.0]), torch.tensor([3.0, 1.0]))
    loss.sum().backward()
    assert loss.tolist() == [0.5, 2.0]
    assert values.grad.tolist() == [-1.0, -2.0]
    assert metrics["value_clip_fraction"].tolist() == [0.0, 0.0]


def test_value_losses_without_meaning_are_refused():
    with pytest.raises(ValueError, match=r"value clip must be above 0 or None, got 0\.0"):
        ClippedValueLoss(clip=0.0)
    with pytest.raises(ValueError, match="one shape"):
        ClippedValueLoss()(torch.zeros(3), torch.zeros(3), torch.zeros(3, 1))
