"""Megatron-core's DDP and distributed optimizer around a model's chunks; the learning rate, a function of the step.

`Trainable` owns both, because master weights must follow every change of the model's weights.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from parallel.mesh import Mesh
from parallel.model import QwenModel
from parallel.options import option
from parallel.schedule import unwrap
from parallel.weights import import_hf

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class OptimizerSettings:
    """AdamW (arXiv 1711.05101) with clipping by the global gradient norm."""

    lr: float = option(1e-6, "peak learning rate")
    weight_decay: float = option(0.1, "decoupled weight decay of matrices, not of biases and norms")
    adam_beta1: float = option(0.9, "decay of the first moment")
    adam_beta2: float = option(0.999, "decay of the second moment")
    adam_eps: float = option(1e-8, "added to the root of the second moment")
    clip_grad: float = option(1.0, "largest global gradient norm")
    lr_warmup_steps: int = option(0, "optimizer steps of linear warm-up")
    lr_decay_style: Literal["constant", "linear"] = option("constant", "after the warm-up")
    lr_decay_start: int = option(0, "optimizer step at which the linear decay begins")
    lr_decay_steps: int = option(0, "optimizer step at which the linear decay reaches zero")
    min_lr_ratio: float = option(0.05, "lowest learning rate of the decay, as a share of lr")

    def __post_init__(self) -> None:
        for name in ("lr", "adam_eps", "clip_grad"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name}: got {getattr(self, name)}, allowed: above 0")
        for name in ("weight_decay", "lr_warmup_steps", "lr_decay_start"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name}: got {getattr(self, name)}, allowed: from 0")
        for name in ("adam_beta1", "adam_beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name}: got {getattr(self, name)}, allowed: from 0 to below 1")
        if not 0 <= self.min_lr_ratio <= 1:
            raise ValueError(f"min_lr_ratio: got {self.min_lr_ratio}, allowed: from 0 to 1")
        if self.lr_decay_style not in ("constant", "linear"):
            raise ValueError(f"lr_decay_style: got {self.lr_decay_style!r}, allowed: 'constant', 'linear'")
        if self.lr_decay_style == "linear" and self.lr_decay_steps <= self.lr_decay_start:
            raise ValueError(
                f"lr_decay_steps: got {self.lr_decay_steps}, allowed: above lr_decay_start {self.lr_decay_start}"
            )


def learning_rate(settings: OptimizerSettings, step: int) -> float:
    """Return the learning rate of optimizer step `step` (from 0): linear warm-up, then constant, or constant until
    `lr_decay_start` and linear to zero at `lr_decay_steps`, never below `min_lr_ratio * lr`."""
    factor = 1.0
    if settings.lr_decay_style == "linear":
        length = settings.lr_decay_steps - settings.lr_decay_start
        factor = max(settings.min_lr_ratio, min(1.0, (settings.lr_decay_steps - step) / length))
    if step < settings.lr_warmup_steps:
        factor = min(factor, (step + 1) / settings.lr_warmup_steps)
    return settings.lr * factor


@dataclass(frozen=True)
class StepResult:
    """Outcome of one optimizer step; `grad_norm` is the global norm before clipping."""

    grad_norm: float
    applied: bool


class Trainable:
    """This rank's model chunks under DDP with their optimizer.

    Gradients are summed over data ranks and never divided; a non-finite gradient never reaches the optimizer.
    `num_steps` counts the steps that were applied.
    """

    def __init__(self, chunks: Sequence[QwenModel], mesh: Mesh, settings: OptimizerSettings):
        self.settings = settings
        self.mesh = mesh
        self.models = list(chunks)
        self.chunks = _wrap(self.models, mesh)
        self.optimizer = _build_optimizer(self.chunks, settings)
        self.num_steps = 0

    def load_hf(self, folder: Path, seed: int = 0) -> None:
        """Import a HF folder's weights; the optimizer's master weights follow."""
        import_hf(folder, self.models, self.mesh, seed=seed)
        self.weights_changed()

    def weights_changed(self) -> None:
        """Copy the model's weights into the optimizer's masters; call after any change from outside."""
        self.optimizer.reload_model_params()

    def zero_grad(self) -> None:
        """Clear all gradients before a new mini-batch."""
        for chunk in self.chunks:
            chunk.zero_grad_buffer()  # type: ignore[operator]
        self.optimizer.zero_grad()

    def step(self, lr: float) -> StepResult:
        """Clip and apply the gradients of `forward_backward`.

        Args:
            lr: learning rate of this step.

        Returns: the norm before clipping; `applied` is False, and nothing changed, when the norm is not finite.
        """
        from megatron.core.optimizer import clip_grads

        for group in self.optimizer.param_groups:
            group["lr"] = lr * group.get("lr_mult", 1.0)
            # megatron-core marks biases and norms with 0 and leaves it to a scheduler, which we don't use, to apply it.
            group["weight_decay"] = self.settings.weight_decay * group.get("wd_mult", 1.0)
        self.optimizer.prepare_grads()
        grad_norm = float(self.optimizer.get_grad_norm())
        if not math.isfinite(grad_norm):
            logger.warning("optimizer step skipped: gradient norm is %s", grad_norm)
            return StepResult(grad_norm, applied=False)
        for optimizer in self.optimizer.chained_optimizers:
            parameters = optimizer.get_parameters()
            if parameters:
                clip_grads.clip_grad_by_total_norm_fp32(parameters, self.settings.clip_grad, grad_norm)
        self.optimizer.step_with_ready_grads()
        self.num_steps += 1
        return StepResult(grad_norm, applied=True)


def _wrap(models: Sequence[QwenModel], mesh: Mesh) -> list[nn.Module]:
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads

    def finalize(chunks: list[nn.Module], num_tokens: Any = None, **options: Any) -> None:
        # `num_tokens` would divide the gradient: our loss weights have done so already.
        finalize_model_grads(chunks, None, **options)

    models[0].config.finalize_model_grads_func = finalize
    ddp = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, use_distributed_optimizer=True, overlap_grad_reduce=False, check_for_nan_in_grad=False
    )
    return [
        DistributedDataParallel(model.config, ddp, model, disable_bucketing=index > 0)
        for index, model in enumerate(models)
    ]


def _build_optimizer(chunks: list[nn.Module], settings: OptimizerSettings) -> Any:
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    dtype = unwrap(chunks[0]).config.params_dtype
    config = OptimizerConfig(
        optimizer="adam",
        lr=settings.lr,
        weight_decay=settings.weight_decay,
        adam_beta1=settings.adam_beta1,
        adam_beta2=settings.adam_beta2,
        adam_eps=settings.adam_eps,
        bf16=dtype == torch.bfloat16,
        params_dtype=dtype,
        use_distributed_optimizer=True,
        clip_grad=settings.clip_grad,
    )
    return get_megatron_optimizer(config, chunks)
