"""Recipes: an algorithm is a value made of pure parts; the trainer calls the parts and knows no algorithm by name.

A variant is `dataclasses.replace(GRPO, name="mine", policy_loss=...)`. Parts are module-level functions or frozen
dataclasses with `__call__`, so that a recipe can be pickled, compared and printed.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace

from torch import Tensor

from megarl.advantages import BatchAdvantages, GeneralizedAdvantages, GroupAdvantages, LeaveOneOut, TokenAdvantage
from megarl.aggregation import (
    GlobalCounts,
    constant_divisor,
    sequence_mean_token_mean,
    sequence_mean_token_sum,
    token_mean,
)
from megarl.filters import mixed_outcomes
from megarl.losses import ClippedValueLoss, SequenceClippedPolicyLoss, check_estimator, clipped

Advantage = Callable[[Tensor, Tensor], Tensor]  # rewards [B], group_ids [B] -> advantages [B]
PolicyLoss = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, dict[str, Tensor]]]
#            log_probs [N], old_log_probs [N], advantages [N], sequence_ids [N] -> loss [N], metrics of [N]
Aggregation = Callable[[Tensor, Tensor, GlobalCounts], Tensor]  # lengths [N], mask [N], counts -> loss_weights [N]
KeepGroup = Callable[[Sequence[float]], bool]  # unshaped scores of one group -> train on it?
ShapeReward = Callable[[Tensor, Tensor], Tensor]  # rewards [B], lengths [B] -> rewards [B]


@dataclass(frozen=True)
class KLTerm:
    """Adds `coefficient * kl_penalty(log_probs, ref_log_probs, estimator)` to the loss of every token."""

    coefficient: float
    estimator: str = "k3"

    def __post_init__(self) -> None:
        if not self.coefficient > 0.0:
            raise ValueError(f"KL coefficient must be above 0 (no KL term is kl=None), got {self.coefficient}")
        check_estimator(self.estimator)


@dataclass(frozen=True)
class KLReward:
    """Takes `coefficient * (log_prob - ref_log_prob)` of each token, under the weights that drew it, from its reward.

    Fields:
        coefficient: at the start.
        target: of the KL per response, nats: after each step the coefficient changes by the factor
            1 + clip(KL / target - 1, -0.2, 0.2) * responses / horizon (arXiv 1909.08593, section 2.2); None: fixed.
        horizon: in responses.
    """

    coefficient: float
    target: float | None = None
    horizon: int = 10_000

    def __post_init__(self) -> None:
        for name, value in (("coefficient", self.coefficient), ("target", self.target), ("horizon", self.horizon)):
            if value is not None and not value > 0:
                raise ValueError(f"{name} of the KL in the reward must be above 0, got {value}")

    def next_coefficient(self, coefficient: float, kl: float, num_responses: int) -> float:
        """Return the coefficient after a step whose responses had this mean KL."""
        if self.target is None:
            return coefficient
        error = min(max(kl / self.target - 1.0, -0.2), 0.2)
        return coefficient * (1.0 + error * num_responses / self.horizon)


@dataclass(frozen=True, repr=False)
class Recipe:
    """What makes an algorithm.

    Fields:
        name: for logs only; nothing branches on it.
        advantage: rewards and groups to one advantage per response; None with `token_advantage`.
        policy_loss: elementwise loss of the policy, see `losses.py`.
        aggregation: weight of each token, see `aggregation.py`.
        kl: penalty towards the reference model; None: no reference model is needed.
        keep_group: whether to train on a group, given its unshaped scores; None: on all.
        shape_reward: changes rewards by response length, after `keep_group`; None: rewards are the scores.
        mask_truncated: no loss on responses that were cut off at the length limit.
        token_advantage: rewards (and values) of tokens to one advantage per token, see `advantages.TokenOutcomes`.
        value_loss: trains a critic, whose values `token_advantage` gets; None: there is no critic.
        kl_reward: penalty towards the reference model in the reward of each token, for `token_advantage`.
        entropy_coefficient: the entropy of each token's distribution, times this, is taken from its loss.
        importance_cap: weigh each token by min(training / rollout probability, cap), with the old log-probs computed
            anew by a training pass; None: rollout's log-probs are the old ones.
    """

    name: str
    advantage: Advantage | None
    policy_loss: PolicyLoss
    aggregation: Aggregation
    kl: KLTerm | None = None
    keep_group: KeepGroup | None = None
    shape_reward: ShapeReward | None = None
    mask_truncated: bool = False
    token_advantage: TokenAdvantage | None = None
    value_loss: ClippedValueLoss | None = None
    kl_reward: KLReward | None = None
    entropy_coefficient: float = 0.0
    importance_cap: float | None = None

    def __post_init__(self) -> None:
        if (self.advantage is None) == (self.token_advantage is None):
            raise ValueError("a recipe has one of advantage and token_advantage")
        if self.token_advantage is None and (self.value_loss or self.kl_reward):
            raise ValueError("value_loss and kl_reward belong to a recipe with token_advantage")
        if self.importance_cap is not None and not self.importance_cap >= 1.0:
            raise ValueError(f"importance_cap must be at least 1 or None, got {self.importance_cap}")
        if not 0.0 <= self.entropy_coefficient < math.inf:
            raise ValueError(f"entropy_coefficient must be at least 0, got {self.entropy_coefficient}")

    @property
    def needs_reference(self) -> bool:
        """Whether the starting model has to be kept."""
        return self.kl is not None or self.kl_reward is not None

    def describe(self) -> dict[str, str]:
        """Every field as text, the same in every process (no addresses), for the printed and the saved config."""
        parts = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: part.__name__ if inspect.isfunction(part) else str(part) for name, part in parts.items()}

    def __repr__(self) -> str:
        return f"Recipe({', '.join(f'{name}={text}' for name, text in self.describe().items())})"


GRPO = Recipe(
    name="grpo",
    advantage=GroupAdvantages(normalize="std"),
    policy_loss=clipped(low=0.2, high=0.2),
    aggregation=sequence_mean_token_mean,
)
"""Group relative policy optimization, outcome supervision (DeepSeekMath, arXiv 2402.03300, eq. 3).

Deviations from the paper:
- no KL term, hence no reference model; the paper's is `replace(GRPO, kl=KLTerm(coefficient=0.04))`;
- the paper states neither the clip range (0.2 here, as in PPO) nor the kind of standard deviation (population here).
"""

DAPO = replace(
    GRPO,
    name="dapo",
    policy_loss=clipped(low=0.2, high=0.28),
    aggregation=token_mean,
    keep_group=mixed_outcomes,
    mask_truncated=True,
)
"""Decoupled clip and dynamic sampling policy optimization (arXiv 2503.14476, eq. 8 and section 4.1).

Deviations from the paper:
- no soft overlong punishment, as its lengths belong to a run: add it by
  `replace(DAPO, shape_reward=soft_overlong(max_length=20480, cache_length=4096))` (the paper's values);
- `keep_group` drops groups of equal scores, which for right/wrong scores are those of accuracy 0 and 1.
"""


PPO = Recipe(
    name="ppo",
    advantage=None,
    token_advantage=GeneralizedAdvantages(gamma=1.0, lam=0.95),
    policy_loss=clipped(low=0.2, high=0.2),
    value_loss=ClippedValueLoss(clip=0.2),
    kl_reward=KLReward(coefficient=0.05),
    aggregation=token_mean,
)
"""Proximal policy optimization (arXiv 1707.06347) with generalised advantages (arXiv 1506.02438) and the KL to the
starting model in the reward (InstructGPT, arXiv 2203.02155, section 3.5).

Deviations: no entropy bonus (`entropy_coefficient`), as in InstructGPT, and lambda 0.95 as there.
"""

RLOO = replace(GRPO, name="rloo", advantage=LeaveOneOut(), aggregation=sequence_mean_token_sum)
"""REINFORCE leave-one-out (arXiv 2402.14740, eq. 9): a response is compared with the mean of the others to its prompt,
and the log-prob of a whole response is the sum over its tokens.

Deviations: the ratio is clipped as in PPO, which changes nothing in the first update of a step; the paper's KL to the
reference, in the reward, is `kl=KLTerm(...)` here, in the loss.
"""

REINFORCE_PP = Recipe(
    name="reinforce++",
    advantage=None,
    token_advantage=BatchAdvantages(gamma=1.0),
    policy_loss=clipped(low=0.2, high=0.2),
    kl_reward=KLReward(coefficient=0.01),
    aggregation=token_mean,
)
"""REINFORCE++ (arXiv 2501.03262, section 3): no critic; rewards to come, with the KL to the reference in the reward of
each token, normalised over the whole step."""

GSPO = replace(GRPO, name="gspo", policy_loss=SequenceClippedPolicyLoss(low=3e-4, high=4e-4))
"""Group sequence policy optimization (arXiv 2507.18071): ratio and clipping of whole responses."""


def dr_grpo(max_new_tokens: int) -> Recipe:
    """Dr. GRPO (arXiv 2503.20783, section 3.2): no division by the standard deviation, and token sums divided by the
    length limit, so that neither easy prompts nor short responses weigh more.

    Args:
        max_new_tokens: longest response allowed, in tokens.
    """
    advantage = GroupAdvantages(normalize="none")
    return replace(GRPO, name="dr_grpo", advantage=advantage, aggregation=constant_divisor(max_new_tokens))
