import json
import math
import pickle
from dataclasses import FrozenInstanceError, replace

import pytest
import torch

from megarl.advantages import BatchAdvantages, TokenOutcomes, token_rewards
from megarl.aggregation import GlobalCounts, constant_divisor, token_mean, weighted_sum
from megarl.losses import ClippedValueLoss, clipped
from megarl.recipes import DAPO, GRPO, GSPO, PPO, REINFORCE_PP, RLOO, KLReward, KLTerm, Recipe, dr_grpo
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
        PPO,
        REINFORCE_PP,
        GSPO,
        RLOO,
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


def test_rloo_compares_with_the_other_response_and_sums_over_tokens():
    loss, gradient = objective(RLOO)
    # Advantages 1 and -1; sums -1.2 and 3.75, halved.
    assert loss == pytest.approx(0.5 * (-1.2 + 3.75))
    assert gradient == pytest.approx([0.0, 0.625, 0.625, 0.625])


def test_dr_grpo_divides_neither_by_the_deviation_nor_by_the_length():
    loss, gradient = objective(dr_grpo(max_new_tokens=5))
    # Advantages 1/2 and -1/2; sums -0.6 and 1.875 over 5 tokens, halved.
    assert loss == pytest.approx(0.5 * (-0.6 + 1.875) / 5)
    assert gradient == pytest.approx([0.0, 0.0625, 0.0625, 0.0625])


def test_gspo_clips_whole_responses_within_its_narrow_range():
    loss, gradient = objective(GSPO)
    assert loss == pytest.approx(0.5 * (-1.0004 + 1.25), abs=1e-5)
    assert gradient == pytest.approx([0.0, 1.25 / 6, 1.25 / 6, 1.25 / 6], abs=1e-5)


def token_objective(recipe: Recipe) -> tuple[list[float], list[float], float]:
    """Advantages, returns and loss of two responses: of 1 token, score 1, value 0.5; and of 2 tokens, score 0, values
    0.2 and 0.4. The policy is the reference; all ratios are 1.25."""
    lengths = torch.tensor([1, 2])
    found = TokenOutcomes(
        rewards=token_rewards(torch.tensor([1.0, 0.0]), lengths, torch.zeros(3), recipe.kl_reward.coefficient),
        values=torch.tensor([0.5, 0.2, 0.4]),
        last_values=torch.tensor([9.0, 9.0]),
        lengths=lengths,
        truncated=torch.tensor([False, True]),
    )
    advantages, returns = recipe.token_advantage(found)
    loss, _ = recipe.policy_loss(torch.full((3,), 1.25).log(), torch.zeros(3), advantages, torch.tensor([0, 1, 1]))
    counts = GlobalCounts(num_tokens=3, num_sequences=2)
    weights = recipe.aggregation(torch.tensor([1, 2, 2]), torch.ones(3, dtype=torch.bool), counts)
    return advantages.tolist(), returns.tolist(), weighted_sum(loss, weights).item()


def test_ppo_by_hand():
    advantages, returns, loss = token_objective(PPO)
    # Raw: 1 - 0.5; 0.4 - 0.2 + 0.95 * -0.4; 0 - 0.4. Mean -0.08 / 3, variance 0.146756.
    assert advantages == pytest.approx([1.374797, -0.400257, -0.974539], abs=1e-5)
    assert returns == pytest.approx([1.0, 0.02, 0.0], abs=1e-6)
    # The good token is clipped at 1.2, the bad ones are not.
    assert loss == pytest.approx((-1.2 * 1.374797 + 1.25 * (0.400257 + 0.974539)) / 3, abs=1e-5)


def test_the_critic_of_ppo_is_clipped_around_its_old_values():
    loss, _ = PPO.value_loss(torch.tensor([0.9, 0.3]), torch.tensor([0.5, 0.2]), torch.tensor([1.0, 0.0]))
    torch.testing.assert_close(loss, torch.tensor([0.045, 0.045]))  # 0.7 misses 1 by 0.3; 0.3 misses 0 by 0.3


def test_reinforce_plus_plus_by_hand():
    advantages, returns, loss = token_objective(REINFORCE_PP)
    # Rewards to come 1, 0 and 0: mean 1/3, deviation sqrt(2) / 3. Values play no part.
    root2 = math.sqrt(2.0)
    assert advantages == pytest.approx([root2, -1 / root2, -1 / root2], abs=1e-5)
    assert returns == [1.0, 0.0, 0.0]
    assert loss == pytest.approx((-1.2 * root2 + 2.5 / root2) / 3, abs=1e-5)


def test_which_recipes_keep_the_starting_model():
    kept = {recipe.name: recipe.needs_reference for recipe in (GRPO, DAPO, GSPO, RLOO, PPO, REINFORCE_PP)}
    assert kept == {"grpo": False, "dapo": False, "gspo": False, "rloo": False, "ppo": True, "reinforce++": True}
    assert replace(GRPO, kl=KLTerm(0.04)).needs_reference


@pytest.mark.parametrize(
    ("recipe", "changes", "message"),
    [
        (GRPO, {"advantage": None}, "a recipe has one of advantage and token_advantage"),
        (GRPO, {"token_advantage": BatchAdvantages()}, "a recipe has one of advantage and token_advantage"),
        (GRPO, {"value_loss": ClippedValueLoss()}, "value_loss and kl_reward belong to a recipe with token_advantage"),
        (GRPO, {"kl_reward": KLReward(0.1)}, "value_loss and kl_reward belong to a recipe with token_advantage"),
        (GRPO, {"importance_cap": 0.5}, r"importance_cap must be at least 1 or None, got 0\.5"),
        (GRPO, {"entropy_coefficient": -1.0}, r"entropy_coefficient must be at least 0, got -1\.0"),
        (PPO, {"advantage": GRPO.advantage}, "a recipe has one of advantage and token_advantage"),
    ],
)
def test_recipes_whose_parts_do_not_fit_are_refused(recipe: Recipe, changes: dict, message: str):
    with pytest.raises(ValueError, match=message):
        replace(recipe, **changes)


@pytest.mark.parametrize(
    ("kl", "expected"),
    [
        (12.0, 0.102),  # twice the target: the error 1 is cut to 0.2, times 10 / 100 responses
        (0.0, 0.098),
        (6.6, 0.101),  # error 0.1
        (5.4, 0.099),
        (6.0, 0.1),
    ],
)
def test_the_coefficient_of_the_kl_follows_its_target(kl: float, expected: float):
    adaptive = KLReward(0.1, target=6.0, horizon=100)
    assert adaptive.next_coefficient(0.1, kl, num_responses=10) == pytest.approx(expected)
    assert KLReward(0.1).next_coefficient(0.1, kl, num_responses=10) == 0.1


@pytest.mark.parametrize("changes", [{"coefficient": 0.0}, {"target": -1.0}, {"horizon": 0}])
def test_kl_rewards_without_meaning_are_refused(changes: dict):
    ((name, value),) = changes.items()
    with pytest.raises(ValueError, match=f"{name} of the KL in the reward must be above 0, got {value}"):
        KLReward(**({"coefficient": 0.1} | changes))


def test_a_variant_is_a_replaced_value():
    variant = replace(GRPO, name="mine", policy_loss=clipped(dual=10.0), aggregation=token_mean)
    assert variant.policy_loss == clipped(low=0.2, high=0.2, dual=10.0)
    assert GRPO.policy_loss == clipped(low=0.2, high=0.2)


def test_kl_term_refuses_zero_coefficients_and_unknown_estimators():
    with pytest.raises(ValueError, match=r"above 0 \(no KL term is kl=None\), got 0\.0"):
        KLTerm(coefficient=0.0)
    with pytest.raises(ValueError, match="one of k1, k2, k3, got 'k9'"):
        KLTerm(coefficient=0.1, estimator="k9")
