"""Elementwise losses: one number per scored token, knowing neither ranks, nor masks, nor means.

Shape legend: N is the number of scored (response) tokens of a pack or batch; every tensor is [N], fp32 (fp64 in tests).
Reducing is the task of `aggregation.py` alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

# exp() of a difference of log-probs overflows fp32 above 88.7, and inf * 0 in the backward pass is NaN. e^20 = 4.9e8
# still has a finite square (gradient norms are sums of squares). No lower bound is needed: exp(-1000) is a harmless 0.
MAX_EXPONENT = 20.0

KL_ESTIMATORS = ("k1", "k2", "k3")


def _check(tensors: Mapping[str, Tensor]) -> None:
    """Refuse what would silently broadcast ([N] with [N, 1]) or round away small differences of log-probs (bf16)."""
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if len(set(shapes.values())) != 1:
        raise ValueError(f"per-token tensors must have one shape [N], got {shapes}")
    for name, tensor in tensors.items():
        if tensor.dtype not in (torch.float32, torch.float64):
            raise ValueError(f"{name} must be torch.float32, got {tensor.dtype}")


@dataclass(frozen=True)
class ClippedPolicyLoss:
    """Clipped surrogate loss of PPO; built by `clipped`.

    Fields: the ratio new/old is kept within [1 - low, 1 + high]; `dual` bounds the loss of a token with a negative
    advantage by `dual * |advantage|` (None: no bound).
    Source: PPO, arXiv 1707.06347, eq. 7; separate bounds: DAPO, arXiv 2503.14476, eq. 10; dual clip: arXiv 1912.09729.
    """

    low: float
    high: float
    dual: float | None

    def __post_init__(self) -> None:
        if not 0.0 < self.low < 1.0:
            raise ValueError(f"clip low must be within (0, 1), got {self.low}")
        if not self.high > 0.0:
            raise ValueError(f"clip high must be above 0, got {self.high}")
        if self.dual is not None and not self.dual > 1.0:
            raise ValueError(f"dual clip must be above 1 or None, got {self.dual}")

    def __call__(
        self, log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss [N] with gradients to `log_probs`, and detached metrics [N].

        Metrics: `ratio` (its exponent bounded by MAX_EXPONENT), `log_ratio` (never bounded: the real drift),
        `approx_kl` (k3 estimate of KL(old || new)), `clip_fraction` and `dual_clip_fraction` (1.0 where that term is
        the one used).
        A token whose log-ratio is above MAX_EXPONENT gets a finite loss and no gradient.

        Raises:
            ValueError: shapes differ, or a tensor is in half precision.
        """
        _check({"log_probs": log_probs, "old_log_probs": old_log_probs, "advantages": advantages})
        log_ratio = log_probs - old_log_probs
        ratio = log_ratio.clamp(max=MAX_EXPONENT).exp()
        surrogate = -advantages * ratio
        clipped_surrogate = -advantages * ratio.clamp(1.0 - self.low, 1.0 + self.high)
        is_clipped = clipped_surrogate > surrogate
        loss = torch.where(is_clipped, clipped_surrogate, surrogate)
        is_dual_clipped = torch.zeros_like(is_clipped)
        if self.dual is not None:
            bound = -advantages * self.dual
            is_dual_clipped = (advantages < 0) & (loss > bound)
            loss = torch.where(is_dual_clipped, bound, loss)
        metrics = {
            "ratio": ratio.detach(),
            "log_ratio": log_ratio.detach(),
            "approx_kl": (ratio - 1.0 - log_ratio).detach(),
            "clip_fraction": is_clipped.to(loss.dtype),
            "dual_clip_fraction": is_dual_clipped.to(loss.dtype),
        }
        return loss, metrics


def clipped(low: float = 0.2, high: float = 0.2, dual: float | None = None) -> ClippedPolicyLoss:
    """PPO's clipped policy loss as a value for a `Recipe`.

    Raises:
        ValueError: low outside (0, 1), high not above 0, or dual not above 1.
    """
    return ClippedPolicyLoss(low=low, high=high, dual=dual)


def kl_penalty(log_probs: Tensor, ref_log_probs: Tensor, estimator: str) -> Tensor:
    """Estimate of KL(policy || reference) for each sampled token, [N], with gradients to `log_probs`.

    With r = reference/policy: `"k1"` is -log r (unbiased, may be negative), `"k2"` is (log r)^2 / 2, `"k3"` is
    r - 1 - log r (unbiased, never negative; the one of GRPO, arXiv 2402.03300, eq. 4).
    As a loss term prefer k2 or k3: the gradient of k1 is zero on average over the policy's own samples.
    In k3, log r is bounded by MAX_EXPONENT in both places: bounding only the exponent would leave the gradient of
    -log r, which pushes the wrong way. A bounded token gives a finite value and no gradient.
    Source: J. Schulman, Approximating KL divergence, http://joschu.net/blog/kl-approx.html.

    Raises:
        ValueError: unknown estimator, shapes differ, or a tensor is in half precision.
    """
    check_estimator(estimator)
    _check({"log_probs": log_probs, "ref_log_probs": ref_log_probs})
    log_ratio = ref_log_probs - log_probs
    if estimator == "k1":
        return -log_ratio
    if estimator == "k2":
        return 0.5 * log_ratio.square()
    log_ratio = log_ratio.clamp(max=MAX_EXPONENT)
    return log_ratio.exp() - 1.0 - log_ratio


def check_estimator(estimator: str) -> None:
    """Raise ValueError unless `estimator` is one of KL_ESTIMATORS."""
    if estimator not in KL_ESTIMATORS:
        raise ValueError(f"KL estimator must be one of {', '.join(KL_ESTIMATORS)}, got {estimator!r}")


def negative_log_likelihood(log_probs: Tensor) -> Tensor:
    """Loss of supervised fine-tuning, [N]: minus the log-prob of each target token.

    Raises:
        ValueError: `log_probs` is in half precision.
    """
    _check({"log_probs": log_probs})
    return -log_probs
