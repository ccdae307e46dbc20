"""CISPO is written in its example alone: its loss by hand, and that the trainer's loss takes it as any other recipe."""

import math
import pickle

import pytest
import torch

from examples.train_cispo import CISPO, CISPOLoss
from megarl.aggregation import token_mean
from megarl.batch import TrainPack
from megarl.recipes import GRPO
from megarl.updates import PolicyTokenLoss
from parallel.pack import pack_sequences

RATIOS = [2.0, 0.5, 1.0, 2.0]


def test_the_ratio_is_clipped_whatever_the_sign_of_the_advantage_and_has_no_gradient():
    log_probs = torch.tensor([-1.0, -2.0, -3.0, -4.0], requires_grad=True)
    old_log_probs = log_probs.detach() - torch.tensor(RATIOS).log()
    advantages = torch.tensor([1.0, 1.0, -2.0, -1.0])
    loss, metrics = CISPOLoss(low=0.2, high=0.28)(log_probs, old_log_probs, advantages, torch.tensor([0, 0, 1, 1]))
    loss.sum().backward()
    # -weight * advantage * log_prob, with the weights 1.28, 0.8, 1 and 1.28.
    torch.testing.assert_close(loss, torch.tensor([1.28, 1.6, -6.0, -5.12]))
    torch.testing.assert_close(log_probs.grad, torch.tensor([-1.28, -0.8, 2.0, 1.28]))
    torch.testing.assert_close(metrics["ratio"], torch.tensor(RATIOS))
    torch.testing.assert_close(metrics["log_ratio"], torch.tensor(RATIOS).log())
    torch.testing.assert_close(metrics["approx_kl"], torch.tensor(RATIOS) - 1.0 - torch.tensor(RATIOS).log())
    assert metrics["clip_fraction"].tolist() == [1.0, 1.0, 0.0, 1.0]
    assert not any(metric.requires_grad for metric in metrics.values())


def test_by_default_only_large_ratios_are_clipped():
    log_ratios = torch.tensor([-50.0, math.log(4.9), math.log(6.0), 200.0])
    loss, metrics = CISPOLoss()(torch.full((4,), -1.0), -1.0 - log_ratios, torch.ones(4), torch.arange(4))
    torch.testing.assert_close(loss, torch.tensor([0.0, 4.9, 5.0, 5.0]))
    assert metrics["clip_fraction"].tolist() == [0.0, 0.0, 1.0, 1.0]


def test_the_recipe_is_grpo_with_another_loss_and_the_token_mean():
    assert (CISPO.policy_loss, CISPO.aggregation, CISPO.advantage) == (CISPOLoss(), token_mean, GRPO.advantage)
    assert pickle.loads(pickle.dumps(CISPO)) == CISPO


def test_the_trainers_loss_takes_it():
    tokens = torch.arange(3)
    pack = TrainPack(
        **vars(pack_sequences([tokens], [tokens > 0])),
        loss_weights=torch.full((2,), 0.5),
        advantages=torch.tensor([1.0, 1.0]),
        old_log_probs=torch.tensor([-1.0, -2.0]),
        sequence_ids=torch.tensor([0, 0]),
    )
    loss, metrics = PolicyTokenLoss(CISPO)(torch.tensor([-1.0, -1.0]), torch.zeros(2), pack)
    assert loss.tolist() == pytest.approx([1.0, math.e])
    assert metrics["max_ratio"].tolist() == pytest.approx([1.0, math.e])
