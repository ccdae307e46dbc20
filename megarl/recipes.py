"""Recipes: an algorithm is a value made of pure parts; the trainer calls the parts and knows no algorithm by name.

A variant is `dataclasses.replace(GRPO, name="mine", policy_loss=...)`. Parts are module-level functions or frozen
dataclasses with `__call__`, so that a recipe can be pickled, compared and printed.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace

from torch import Tensor

from megarl.advantages import GroupAdvantages
from megarl.aggregation import GlobalCounts, sequence_mean_token_mean, token_mean
from megarl.filters import mixed_outcomes
from megarl.losses import check_estimator, clipped

Advantage = Callable[[Tensor, Tensor], Tensor]  # rewards [B], group_ids [B] -> advantages [B]
PolicyLoss = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, dict[str, Tensor]]]
#            log_probs [N], old_log_probs [N], advantages [N] -> loss [N], metrics of [N]
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


@dataclass(frozen=True, repr=False)
class Recipe:
    """What makes an algorithm.

    Fields:
        name: for logs only; nothing branches on it.
        advantage: rewards and groups to one advantage per response.
        policy_loss: elementwise loss of the policy, see `losses.py`.
        aggregation: weight of each token, see `aggregation.py`.
        kl: penalty towards the reference model; None: no reference model is needed.
        keep_group: whether to train on a group, given its unshaped scores; None: on all.
        shape_reward: changes rewards by response length, after `keep_group`; None: rewards are the scores.
        mask_truncated: no loss on responses that were cut off at the length limit.
    """

    name: str
    advantage: Advantage
    policy_loss: PolicyLoss
    aggregation: Aggregation
    kl: KLTerm | None = None
    keep_group: KeepGroup | None = None
    shape_reward: ShapeReward | None = None
    mask_truncated: bool = False

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
