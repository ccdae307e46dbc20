import math

import numpy as np
import pytest
import torch

from megarl.losses import clipped, kl_penalty, negative_log_likelihood


def from_ratio(*ratios: float) -> torch.Tensor:
    """Log-probs whose ratio to old log-probs of 0 is as given."""
    return torch.tensor(ratios).log().requires_grad_()


def test_dual_clip_bounds_only_negative_advantages_and_its_fraction_counts_only_them():
    """RC16"""
    log_probs = from_ratio(10.0, 1.1, 10.0)
    advantages = torch.tensor([-1.0, -1.0, 1.0])
    loss, metrics = clipped(low=0.2, high=0.2, dual=3.0)(log_probs, torch.zeros(3), advantages)
    torch.testing.assert_close(loss, torch.tensor([3.0, 1.1, -1.2]))
    assert metrics["dual_clip_fraction"].tolist() == [1.0, 0.0, 0.0]
    assert metrics["clip_fraction"].tolist() == [0.0, 0.0, 1.0]
    loss.sum().backward()
    torch.testing.assert_close(log_probs.grad, torch.tensor([0.0, 1.1, 0.0]))

    loss, metrics = clipped(low=0.2, high=0.2, dual=None)(log_probs, torch.zeros(3), advantages)
    torch.testing.assert_close(loss, torch.tensor([10.0, 1.1, -1.2]))
    assert metrics["dual_clip_fraction"].tolist() == [0.0, 0.0, 0.0]


def test_clip_acts_only_where_it_makes_the_objective_smaller():
    log_probs = from_ratio(0.5, 0.5, 1.25, 1.5, 1.5)
    advantages = torch.tensor([2.0, -2.0, 2.0, 2.0, -2.0])
    loss, metrics = clipped(low=0.2, high=0.28)(log_probs, torch.zeros(5), advantages)
    # ratio * A where the ratio moved against the advantage, else the bound * A: 0.8 below, 1.28 above.
    torch.testing.assert_close(loss, torch.tensor([-1.0, 1.6, -2.5, -2.56, 3.0]))
    assert metrics["clip_fraction"].tolist() == [0.0, 1.0, 0.0, 1.0, 0.0]
    loss.sum().backward()
    torch.testing.assert_close(log_probs.grad, torch.tensor([-1.0, 0.0, -2.5, 0.0, 3.0]))


def test_on_policy_loss_is_minus_the_advantage_in_value_and_gradient():
    log_probs = torch.tensor([-0.5, -3.0, -7.0], requires_grad=True)
    advantages = torch.tensor([1.5, -0.5, 0.0])
    loss, metrics = clipped()(log_probs, log_probs.detach(), advantages)
    loss.sum().backward()
    assert torch.equal(loss, -advantages)
    assert torch.equal(log_probs.grad, -advantages)
    assert torch.equal(metrics["ratio"], torch.ones(3))
    assert all(not metric.requires_grad for metric in metrics.values())


def test_clipped_loss_equals_a_numpy_recomputation():
    rng = np.random.default_rng(0)
    new, old, advantages = rng.normal(-1.0, 0.5, 200), rng.normal(-1.0, 0.5, 200), rng.normal(size=200)
    ratio = np.exp(new - old)
    objective = np.minimum(ratio * advantages, np.clip(ratio, 0.8, 1.28) * advantages)
    expected = -np.where(advantages < 0, np.maximum(objective, 2.0 * advantages), objective)
    approx_kl = ratio - 1.0 - np.log(ratio)
    assert (expected != -ratio * advantages).sum() > 20  # the clips do act in this data

    loss, metrics = clipped(0.2, 0.28, dual=2.0)(*map(torch.from_numpy, (new, old, advantages)))
    np.testing.assert_allclose(loss.numpy(), expected, rtol=1e-12)
    np.testing.assert_allclose(metrics["approx_kl"].numpy(), approx_kl, rtol=1e-9, atol=1e-15)


def test_clipped_loss_passes_gradcheck():
    log_probs = torch.log(torch.tensor([0.5, 0.9, 1.1, 1.5, 4.0, 4.0], dtype=torch.float64)).requires_grad_()
    old_log_probs = torch.zeros(6, dtype=torch.float64)
    advantages = torch.tensor([1.0, -1.0, 2.0, -2.0, -1.0, 1.0], dtype=torch.float64)
    loss = clipped(0.2, 0.28, dual=3.0)
    assert torch.autograd.gradcheck(lambda x: loss(x, old_log_probs, advantages)[0], log_probs)


def test_huge_log_ratio_stays_finite_gives_no_gradient_and_logs_the_real_drift():
    """RC17"""
    log_probs = torch.tensor([-0.5, -0.5, -100.5], requires_grad=True)
    old_log_probs = torch.tensor([-100.5, -100.5, -0.5])
    loss, metrics = clipped()(log_probs, old_log_probs, torch.tensor([-1.0, 1.0, 1.0]))
    loss.sum().backward()
    torch.testing.assert_close(loss, torch.tensor([math.exp(20.0), -1.2, 0.0]))
    assert log_probs.grad[:2].tolist() == [0.0, 0.0]
    assert abs(log_probs.grad[2]) < 1e-40  # not bounded: its ratio is e^-100
    assert metrics["log_ratio"].tolist() == [100.0, 100.0, -100.0]
    assert all(metric.isfinite().all() for metric in metrics.values())


def test_kl_estimators_match_hand_computed_values_and_gradients():
    # Reference/policy ratios 2 and 1/2: log r = +-0.693147; d/dlog_prob is 1 (k1), -log r (k2), 1 - r (k3).
    ref_log_probs = torch.tensor([2.0, 0.5]).log()
    log2 = math.log(2.0)
    expected = {
        "k1": ([-log2, log2], [1.0, 1.0]),
        "k2": ([log2**2 / 2, log2**2 / 2], [-log2, log2]),
        "k3": ([1.0 - log2, -0.5 + log2], [-1.0, 0.5]),
    }
    for estimator, (values, gradients) in expected.items():
        log_probs = torch.zeros(2, requires_grad=True)
        kl = kl_penalty(log_probs, ref_log_probs, estimator)
        kl.sum().backward()
        torch.testing.assert_close(kl, torch.tensor(values))
        torch.testing.assert_close(log_probs.grad, torch.tensor(gradients))


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_estimators_pass_gradcheck(estimator: str):
    log_probs = torch.tensor([-0.1, -2.0, -5.0], dtype=torch.float64, requires_grad=True)
    ref_log_probs = torch.tensor([-1.0, -2.0, -0.5], dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda x: kl_penalty(x, ref_log_probs, estimator), log_probs)


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_mean_of_the_estimator_under_the_policy_is_the_kl_divergence(estimator: str):
    policy = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    reference = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64)
    exact = (policy * (policy / reference).log()).sum()
    torch.testing.assert_close((policy * kl_penalty(policy.log(), reference.log(), estimator)).sum(), exact)


def test_kl_of_far_apart_log_probs_is_finite_and_its_gradient_never_points_the_wrong_way():
    """RC17"""
    log_probs = torch.tensor([-0.01, -200.0], requires_grad=True)
    ref_log_probs = torch.tensor([-200.0, -0.01])
    kl = kl_penalty(log_probs, ref_log_probs, "k3")
    kl.sum().backward()
    torch.testing.assert_close(kl, torch.tensor([198.99, math.exp(20.0) - 21.0]))
    # First: exp(-199.99) is 0, the gradient is that of -log r. Second: bounded, so none; +1 would lower a log-prob that
    # is far too low already.
    assert log_probs.grad.tolist() == [1.0, 0.0]


def test_building_rewards_from_the_kl_leaves_the_kl_and_all_inputs_as_they_were():
    """RC17"""
    log_probs, ref_log_probs = torch.tensor([-0.01, -200.0]), torch.tensor([-200.0, -0.01])
    kl = kl_penalty(log_probs, ref_log_probs, "k3")
    logged = kl.clone()
    rewards = torch.tensor([0.0, 1.0]) - 0.1 * kl
    clipped(dual=3.0)(log_probs, ref_log_probs, rewards)
    assert torch.equal(kl, logged)
    assert log_probs.tolist() == torch.tensor([-0.01, -200.0]).tolist()
    assert ref_log_probs.tolist() == torch.tensor([-200.0, -0.01]).tolist()


def test_negative_log_likelihood_is_minus_the_log_prob():
    log_probs = torch.tensor([-0.25, -4.0], requires_grad=True)
    loss = negative_log_likelihood(log_probs)
    loss.sum().backward()
    assert loss.tolist() == [0.25, 4.0]
    assert log_probs.grad.tolist() == [-1.0, -1.0]


def test_no_tokens_give_an_empty_loss_attached_to_the_graph():
    log_probs = torch.zeros(0, requires_grad=True)
    loss, metrics = clipped(dual=3.0)(log_probs, torch.zeros(0), torch.zeros(0))
    loss.sum().backward()
    assert loss.shape == log_probs.grad.shape == metrics["ratio"].shape == (0,)


def test_shapes_that_would_broadcast_and_half_precision_are_refused():
    column = torch.zeros(3, 1)
    with pytest.raises(ValueError, match="one shape"):
        clipped()(torch.zeros(3), torch.zeros(3), column)
    with pytest.raises(ValueError, match="one shape"):
        kl_penalty(torch.zeros(3), column, "k3")
    with pytest.raises(ValueError, match=r"old_log_probs must be torch\.float32, got torch\.bfloat16"):
        clipped()(torch.zeros(3), torch.zeros(3, dtype=torch.bfloat16), torch.zeros(3))
    with pytest.raises(ValueError, match=r"log_probs must be torch\.float32"):
        negative_log_likelihood(torch.zeros(3, dtype=torch.float16))


def test_settings_without_meaning_are_refused():
    with pytest.raises(ValueError, match="clip low must be within"):
        clipped(low=1.0)
    with pytest.raises(ValueError, match=r"clip high must be above 0, got -0\.1"):
        clipped(high=-0.1)
    with pytest.raises(ValueError, match="dual clip must be above 1"):
        clipped(dual=0.5)
    with pytest.raises(ValueError, match="one of k1, k2, k3, got 'k4'"):
        kl_penalty(torch.zeros(1), torch.zeros(1), "k4")
