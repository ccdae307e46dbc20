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
from megarl.losses import kl_penalty, negative_log_likelihood
from megarl.recipes import Recipe
from parallel.log_probs import score_tokens
from parallel.mesh import Mesh
from parallel.model import QwenModel
from parallel.optimizer import Trainable, learning_rate
from parallel.schedule import forward, forward_backward

logger = logging.getLogger(__name__)

Metrics = dict[str, Tensor]
TokenLoss = Callable[[Tensor, Tensor, TrainPack], tuple[Tensor, Metrics]]
"""(log_probs [N], entropy [N], pack) -> elementwise loss [N] and elementwise metrics [N]."""

MAX_SKIPPED_STEPS = 10
"""Optimizer steps in a row that may be skipped for a non-finite loss or gradient before the run stops."""

MAX_PREFIX = "max_"
"""Metrics whose name begins so, of values from 0 up, are reduced by maximum; all others are weighted sums."""


@dataclass(frozen=True)
class PolicyTokenLoss:
    """The recipe's policy loss, plus its KL term, of each token."""

    recipe: Recipe

    def __call__(self, log_probs: Tensor, entropy: Tensor, pack: TrainPack) -> tuple[Tensor, Metrics]:
        """See `TokenLoss`."""
        loss, metrics = self.recipe.policy_loss(log_probs, pack.old_log_probs, pack.advantages)
        metrics["max_log_ratio"] = metrics["log_ratio"].abs()
        if self.recipe.kl is not None:
            kl = kl_penalty(log_probs, pack.ref_log_probs, self.recipe.kl.estimator)
            loss = loss + self.recipe.kl.coefficient * kl
            metrics["ref_kl"] = kl.detach()
        return loss, metrics


def sft_token_loss(log_probs: Tensor, entropy: Tensor, pack: TrainPack) -> tuple[Tensor, Metrics]:
    """Negative log-likelihood of each token; see `TokenLoss`."""
    return negative_log_likelihood(log_probs), {}


def update(
    trainable: Trainable,
    packs: Sequence[TrainPack],
    counts: GlobalCounts,
    token_loss: TokenLoss,
    optimizer_step: int,
    temperature: float = 1.0,
) -> dict[str, float]:
    """Accumulate the gradient of all packs and apply it.

    Args:
        packs: of this rank, from `megarl.batch.build_packs`.
        counts: of the mini-batch; without any token the step is skipped.
        optimizer_step: counted from 0, gives the learning rate.
        temperature: of the policy that is scored.

    Returns: metrics, equal on all ranks; `applied` is 0.0 where nothing was changed, because the loss or the gradient
        was not finite.
    """
    lr = learning_rate(trainable.settings, optimizer_step)
    if counts.num_tokens == 0:
        logger.warning("optimizer step %d skipped: its mini-batch has no token to train on", optimizer_step)
        return {"applied": 0.0, "lr": lr}

    def head(model: QwenModel, hidden: Tensor, pack: TrainPack) -> tuple[Tensor, Metrics]:
        log_probs, entropy = score_tokens(model, hidden, pack, temperature)
        loss, elementwise = token_loss(log_probs, entropy, pack)
        total = weighted_sum(loss, pack.loss_weights)
        kept = {name: _reduce_tokens(name, values, pack) for name, values in elementwise.items()}
        # megarl divides nothing, but megatron-core may scale the loss in place: keep a copy.
        return total, {
            "loss": total.detach().clone(),
            "entropy": weighted_sum(entropy.detach(), pack.loss_weights),
            **kept,
        }

    trainable.zero_grad()
    metrics = reduce_metrics(forward_backward(trainable.chunks, packs, head), trainable.mesh)
    if not math.isfinite(metrics["loss"]):
        # The gradient may be finite all the same: a clamp passes none on where its input is NaN.
        logger.warning("optimizer step %d skipped: the loss is %s", optimizer_step, metrics["loss"])
        return {**metrics, "grad_norm": math.nan, "applied": 0.0, "lr": lr}
    result = trainable.step(lr)
    return {**metrics, "grad_norm": result.grad_norm, "applied": float(result.applied), "lr": lr}


def count_skipped(num_skipped: int, metrics: dict[str, float], counts: GlobalCounts) -> int:
    """Return how many optimizer steps in a row were skipped for what is not finite, the one of `metrics` included.

    Raises:
        RuntimeError: `MAX_SKIPPED_STEPS` were.
    """
    if metrics["applied"] or not counts.num_tokens:
        return 0
    if num_skipped + 1 >= MAX_SKIPPED_STEPS:
        raise RuntimeError(f"{num_skipped + 1} optimizer steps in a row had a loss or gradient that was not finite")
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


def reference_log_probs(chunks: Sequence[QwenModel], packs: Sequence[TrainPack], temperature: float) -> list[Tensor]:
    """Score the packs with another model: `[N]` for each pack on the last stage, an empty list elsewhere."""
    return forward(chunks, packs, lambda model, hidden, pack: score_tokens(model, hidden, pack, temperature)[0])
