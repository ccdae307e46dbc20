"""One optimizer step of any loss on any model of the backbone, with its metrics reduced over ranks."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megarl.aggregation import GlobalCounts, weighted_sum
from megarl.batch import TrainPack
from megarl.losses import (
    MAX_EXPONENT,
    ClippedValueLoss,
    importance_weights,
    kl_penalty,
    negative_log_likelihood,
)
from megarl.recipes import Recipe
from parallel.log_probs import score_tokens
from parallel.mesh import Mesh
from parallel.model import QwenModel, scalar_values
from parallel.optimizer import Trainable, learning_rate
from parallel.schedule import forward_backward

logger = logging.getLogger(__name__)

Metrics = dict[str, Tensor]
TokenLoss = Callable[[Tensor, Tensor, TrainPack], tuple[Tensor, Metrics]]
"""(log_probs [N], entropy [N], pack) -> elementwise loss [N] and elementwise metrics [N]."""

MAX_SKIPPED_STEPS = 10
"""Optimizer steps in a row that may be skipped for a non-finite loss or gradient before the run stops."""


class NotFinite(RuntimeError):
    """Too many optimizer steps in a row had a loss or gradient that was not finite."""


MAX_PREFIX = "max_"
"""Metrics whose name begins so, of values from 0 up, are reduced by maximum; all others are weighted sums."""


@dataclass(frozen=True)
class PolicyTokenLoss:
    """The recipe's policy loss, plus its KL term, of each token."""

    recipe: Recipe

    def __call__(self, log_probs: Tensor, entropy: Tensor, pack: TrainPack) -> tuple[Tensor, Metrics]:
        """See `TokenLoss`."""
        recipe = self.recipe
        loss, metrics = recipe.policy_loss(log_probs, pack.old_log_probs, pack.advantages, pack.sequence_ids)
        metrics["probability"] = log_probs.detach().exp()
        metrics["max_log_ratio"] = metrics["log_ratio"].abs()
        metrics["max_ratio"] = metrics["ratio"]
        metrics["max_inverse_ratio"] = (-metrics["log_ratio"]).clamp(max=MAX_EXPONENT).exp()
        if recipe.importance_cap is not None:
            weights = importance_weights(pack.old_log_probs, pack.rollout_log_probs, recipe.importance_cap)
            loss = loss * weights
            metrics["importance_weight"] = weights
        if recipe.kl is not None:
            kl = kl_penalty(log_probs, pack.ref_log_probs, recipe.kl.estimator)
            loss = loss + recipe.kl.coefficient * kl
            metrics["ref_kl"] = kl.detach()
        if recipe.entropy_coefficient:
            loss = loss - recipe.entropy_coefficient * entropy
        return loss, metrics


def sft_token_loss(log_probs: Tensor, entropy: Tensor, pack: TrainPack) -> tuple[Tensor, Metrics]:
    """Negative log-likelihood of each token; see `TokenLoss`."""
    return negative_log_likelihood(log_probs), {}


LossHead = Callable[[QwenModel, Tensor, TrainPack], tuple[Tensor, Metrics]]
"""(last stage, hidden states, pack) -> the pack's part of the loss, a scalar, and of its metrics, scalars."""


def policy_head(token_loss: TokenLoss, temperature: float) -> LossHead:
    """Loss head of a language model: its log-probs and entropies under `temperature`, through `token_loss`."""

    def head(model: QwenModel, hidden: Tensor, pack: TrainPack) -> tuple[Tensor, Metrics]:
        log_probs, entropy = score_tokens(model, hidden, pack, temperature)
        loss, elementwise = token_loss(log_probs, entropy, pack)
        return _aggregate(loss, {"entropy": entropy.detach(), **elementwise}, pack)

    return head


def value_head(value_loss: ClippedValueLoss) -> LossHead:
    """Loss head of a critic."""

    def head(model: QwenModel, hidden: Tensor, pack: TrainPack) -> tuple[Tensor, Metrics]:
        loss, elementwise = value_loss(scalar_values(model, hidden, pack), pack.values, pack.returns)
        return _aggregate(loss, elementwise, pack)

    return head


def _aggregate(loss: Tensor, elementwise: Metrics, pack: TrainPack) -> tuple[Tensor, Metrics]:
    total = weighted_sum(loss, pack.loss_weights)
    kept = {name: _reduce_tokens(name, values, pack) for name, values in elementwise.items()}
    # megarl divides nothing, but megatron-core may scale the loss in place: keep a copy.
    return total, {"loss": total.detach().clone(), **kept}


def update(
    trainable: Trainable,
    packs: Sequence[TrainPack],
    counts: GlobalCounts,
    token_loss: TokenLoss,
    optimizer_step: int,
    temperature: float = 1.0,
) -> dict[str, float]:
    """`take_step` on a language model with a loss of its tokens.

    Args:
        counts: of the mini-batch; without any token the step is skipped.
        temperature: of the policy that is scored.
    """
    return take_step(trainable, packs, counts.num_tokens, policy_head(token_loss, temperature), optimizer_step)


def take_step(
    trainable: Trainable, packs: Sequence[TrainPack], num_items: int, head: LossHead, optimizer_step: int
) -> dict[str, float]:
    """Accumulate the gradient of all packs and apply it.

    Args:
        packs: of this rank, from `megarl.batch`.
        num_items: what the whole mini-batch has to learn from (tokens, pairs); 0: the step is skipped.
        optimizer_step: counted from 0, gives the learning rate.

    Returns: metrics, equal on all ranks; `applied` is 0.0 where nothing was changed, because the loss or the gradient
        was not finite.
    """
    lr = learning_rate(trainable.settings, optimizer_step)
    if num_items == 0:
        logger.warning("optimizer step %d skipped: its mini-batch has nothing to train on", optimizer_step)
        return {"applied": 0.0, "lr": lr}
    trainable.zero_grad()
    metrics = reduce_metrics(forward_backward(trainable.chunks, packs, head), trainable.mesh)
    if not math.isfinite(metrics["loss"]):
        # The gradient may be finite all the same: a clamp passes none on where its input is NaN.
        logger.warning("optimizer step %d skipped: the loss is %s", optimizer_step, metrics["loss"])
        return {**metrics, "grad_norm": math.nan, "applied": 0.0, "lr": lr}
    result = trainable.step(lr)
    return {**metrics, "grad_norm": result.grad_norm, "applied": float(result.applied), "lr": lr}


def count_skipped(num_skipped: int, metrics: dict[str, float], num_items: int) -> int:
    """Return how many optimizer steps in a row were skipped for what is not finite, the one of `metrics` included.

    Raises:
        NotFinite: `MAX_SKIPPED_STEPS` were.
    """
    if metrics["applied"] or not num_items:
        return 0
    if num_skipped + 1 >= MAX_SKIPPED_STEPS:
        raise NotFinite(f"{num_skipped + 1} optimizer steps in a row had a loss or gradient that was not finite")
    return num_skipped + 1


def _reduce_tokens(name: str, values: Tensor, pack: TrainPack) -> Tensor:
    if not name.startswith(MAX_PREFIX):
        return weighted_sum(values, pack.loss_weights)
    counted = values[pack.loss_weights != 0]
    return counted.max() if len(counted) else values.new_zeros(())


def reduce_metrics(metrics: Sequence[Metrics], mesh: Mesh) -> dict[str, float]:
    """Reduce the packs' metrics over packs and data ranks, and send them from the last stage to all.

    Every data rank has the same metric names, for each runs at least one pack (perhaps an empty one).
    """
    names = mesh.object_from_last_stage(sorted(metrics[0]) if metrics else [])
    sums = torch.zeros(len(names), dtype=torch.float64, device=mesh.device)
    maxima = torch.zeros_like(sums)
    for kept in metrics:
        values = torch.stack([kept[name].double() for name in names])
        sums, maxima = sums + values, torch.maximum(maxima, values)
    if mesh.is_last_stage:
        mesh.sum_over_data(sums)
        mesh.max_over_data(maxima)
    both = mesh.from_last_stage(torch.stack([sums, maxima]))
    return {name: both[int(name.startswith(MAX_PREFIX)), i].item() for i, name in enumerate(names)}
