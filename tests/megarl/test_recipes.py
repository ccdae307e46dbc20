import json
import pickle
from dataclasses import FrozenInstanceError, replace

import pytest
import torch

from megarl.aggregation import GlobalCounts, constant_divisor, token_mean, weighted_sum
from megarl.losses import clipped
from megarl.recipes import DAPO, GRPO, KLTerm, Recipe
from megarl.shaping import soft_overlong


def test_describe_names_every_part_and_is_json():
    assert json.loads(json.dumps(GRPO.describe())) == {
        "name": "grpo",
        "advantage": "GroupAdvantages(normalize='std', epsilon=1e-06)",
        "policy_loss": "ClippedPolicyLoss(low=0.2, high=0.2, dual=None)",
        "aggregation": "sequence_mean_token_mean",
        "kl": "None",
        "keep_group": "None",
        "shape_reward": "None",
        "mask_truncated": "False",
        "token_advantage": "None",
        "value_loss": "None",
        "kl_reward": "None",
        "entropy_coefficient": "0.0",
        "importance_cap": "None",
    }
    assert str(DAPO) == (
        "Recipe(name=dapo, advantage=GroupAdvantages(normalize='std', epsilon=1e-06), "
        "policy_loss=ClippedPolicyLoss(low=0.2, high=0.28, dual=None), aggregation=token_mean, kl=None, "
        "keep_group=mixed_outcomes, shape_reward=None, mask_truncated=True, token_advantage=None, value_loss=None, "
        "kl_reward=None, entropy_coefficient=0.0, importance_cap=None)"
    )


@pytest.mark.parametrize(
    "recipe",
    [
        GRPO,
        replace(GRPO, kl=KLTerm(0.04), aggregation=constant_divisor(16)),
        replace(DAPO, shape_reward=soft_overlong(max_length=20480, cache_length=4096)),
    ],
)
def test_a_recipe_survives_pickling(recipe: Recipe):
    assert pickle.loads(pickle.dumps(recipe)) == recipe


def test_a_recipe_is_frozen():
    with pytest.raises(FrozenInstanceError):
        GRPO.name = "other"


def objective(recipe: Recipe) -> tuple[float, list[float]]:
    """Loss and gradient of one group of two responses: lengths 1 and 3, rewards 1 and 0, all ratios 1.25."""
    log_probs = torch.full((4,), 1.25).log().requires_grad_()
    advantages = recipe.advantage(torch.tensor([1.0, 0.0]), torch.tensor([0, 0]))[torch.tensor([0, 1, 1, 1])]
    loss, _ = recipe.policy_loss(log_probs, torch.zeros(4), advantages, torch.tensor([0, 1, 1, 1]))
    lengths, mask = torch.tensor([1, 3, 3, 3]), torch.ones(4, dtype=torch.bool)
    total = weighted_sum(loss, recipe.aggregation(lengths, mask, GlobalCounts(num_tokens=4, num_sequences=2)))
    total.backward()
    return total.item(), log_probs.grad.tolist()


def test_grpo_clips_the_winner_at_1_2_and_weighs_sequences_equally():
    loss, gradient = objective(GRPO)
    # Advantages 1 and -1: token losses -1.2 (clipped), then 1.25 three times; sequence means -1.2 and 1.25, halved.
    assert loss == pytest.approx(0.5 * (-1.2 + 1.25), abs=1e-5)
    assert gradient == pytest.approx([0.0, 1.25 / 6, 1.25 / 6, 1.25 / 6], abs=1e-5)


def test_dapo_lets_the_winner_rise_to_1_28_and_weighs_tokens_equally():
    loss, gradient = objective(DAPO)
    assert loss == pytest.approx((-1.25 + 3 * 1.25) / 4, abs=1e-5)
    assert gradient == pytest.approx([-1.25 / 4, 1.25 / 4, 1.25 / 4, 1.25 / 4], abs=1e-5)


def test_a_variant_is_a_replaced_value():
    variant = replace(GRPO, name="mine", policy_loss=clipped(dual=10.0), aggregation=token_mean)
    assert variant.policy_loss == clipped(low=0.2, high=0.2, dual=10.0)
    assert GRPO.policy_loss == clipped(low=0.2, high=0.2)


def test_kl_term_refuses_zero_coefficients_and_unknown_estimators():
    with pytest.raises(ValueError, match=r"above 0 \(no KL term is kl=None\), got 0\.0"):
        KLTerm(coefficient=0.0)
    with pytest.raises(ValueError, match="one of k1, k2, k3, got 'k9'"):
        KLTerm(coefficient=0.1, estimator="k9")
