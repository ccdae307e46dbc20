"""Elementwise losses: one number per scored token, knowing neither ranks, nor masks, nor means.

Shape legend: N is the number of scored (response) tokens of a pack or batch; every tensor is [N], fp32 (fp64 in tests).
Reducing is the task of `aggregation.py` alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
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
        self, log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, sequence_ids: Tensor | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss [N] with gradients to `log_probs`, and detached metrics [N]; `sequence_ids` is not used.

        Metrics: `ratio` (its exponent bounded by MAX_EXPONENT), `log_ratio` (never bounded: the real drift),
        `approx_kl` (k3 estimate of KL(old || new)), `clip_fraction` (1.0 where the clipped term is the one used), its
        parts `clip_fraction_low` and `clip_fraction_high` (by the bound), and `dual_clip_fraction`.
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
        metrics = _ratio_metrics(ratio, log_ratio) | {
            "clip_fraction": is_clipped.to(loss.dtype),
            "clip_fraction_low": (is_clipped & (advantages < 0)).to(loss.dtype),
            "clip_fraction_high": (is_clipped & (advantages > 0)).to(loss.dtype),
            "dual_clip_fraction": is_dual_clipped.to(loss.dtype),
        }
        return loss, metrics


def _ratio_metrics(ratio: Tensor, log_ratio: Tensor) -> dict[str, Tensor]:
    return {
        "ratio": ratio.detach(),
        "log_ratio": log_ratio.detach(),
        "approx_kl": (ratio - 1.0 - log_ratio).detach(),
    }


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


@dataclass(frozen=True)
class SequenceClippedPolicyLoss:
    """Clipped surrogate of the sequence-level ratio s = exp(mean over the response of log new/old), the same for all
    its tokens (GSPO, arXiv 2507.18071, eq. 5 to 7). Aggregate it by `sequence_mean_token_mean`.

    Fields: s is kept within [1 - low, 1 + high]; the paper uses 3e-4 and 4e-4.
    """

    low: float = 3e-4
    high: float = 4e-4

    def __post_init__(self) -> None:
        ClippedPolicyLoss(self.low, self.high, dual=None)  # the same bounds

    def __call__(
        self, log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, sequence_ids: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """As `ClippedPolicyLoss`; `sequence_ids [N]` says which response a token belongs to."""
        log_ratio = sequence_means(log_probs - old_log_probs, sequence_ids)[sequence_ids]
        clipped_loss = ClippedPolicyLoss(self.low, self.high, dual=None)
        return clipped_loss(log_ratio, torch.zeros_like(log_ratio), advantages)


def sequence_sums(values: Tensor, sequence_ids: Tensor, num_sequences: int | None = None) -> Tensor:
    """Sum values [N] over the tokens of each sequence, [S] with S one more than the largest id unless given."""
    if num_sequences is None:
        num_sequences = int(sequence_ids.max()) + 1 if len(sequence_ids) else 0
    return values.new_zeros(num_sequences).index_add(0, sequence_ids, values)


def sequence_means(values: Tensor, sequence_ids: Tensor, num_sequences: int | None = None) -> Tensor:
    """As `sequence_sums`, divided by the number of tokens that were summed; 0 for a sequence without tokens."""
    counts = sequence_sums(torch.ones_like(values), sequence_ids, num_sequences)
    return sequence_sums(values, sequence_ids, num_sequences) / counts.clamp(min=1.0)


def importance_weights(old_log_probs: Tensor, rollout_log_probs: Tensor, cap: float) -> Tensor:
    """Return min(training / rollout probability, cap) of each token, [N], without a gradient: it makes up for a rollout
    that drew from slightly other probabilities than training's (truncated importance sampling, Ionides 2008)."""
    return (old_log_probs - rollout_log_probs).clamp(max=math.log(cap)).exp().detach()


@dataclass(frozen=True)
class ClippedValueLoss:
    """Squared error of a critic, at least that of its value kept within `clip` of the old one (PPO, arXiv 1707.06347).

    loss = max((V - R)^2, (clamp(V, V_old - clip, V_old + clip) - R)^2) / 2. `clip` None: no clipping.
    """

    clip: float | None = 0.2

    def __post_init__(self) -> None:
        if self.clip is not None and not self.clip > 0.0:
            raise ValueError(f"value clip must be above 0 or None, got {self.clip}")

    def __call__(self, values: Tensor, old_values: Tensor, returns: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss [N] with gradients to `values`, and detached metrics [N]."""
        _check({"values": values, "old_values": old_values, "returns": returns})
        error = (values - returns).square()
        is_clipped = torch.zeros_like(error, dtype=torch.bool)
        if self.clip is not None:
            near = torch.minimum(torch.maximum(values, old_values - self.clip), old_values + self.clip)
            clipped_error = (near - returns).square()
            is_clipped = clipped_error > error
            error = torch.maximum(error, clipped_error)
        return 0.5 * error, {
            "value": values.detach(),
            "value_clip_fraction": is_clipped.to(error.dtype),
            "value_error": (values - returns).square().detach(),
        }


PREFERENCE_LOSSES = ("sigmoid", "ipo", "hinge")


@dataclass(frozen=True)
class PreferenceLoss:
    """Loss of a preference pair from its log-ratios to the reference (DPO, arXiv 2305.18290, eq. 7).

    Fields:
        kind: with the margin m = chosen - rejected log-ratio, `"sigmoid"`: -log sigmoid(beta m); `"hinge"` (SLiC,
            arXiv 2305.10425): relu(1 - beta m); `"ipo"` (arXiv 2310.12036, eq. 17): (m - 1 / (2 beta))^2. Log-ratios
            are sums over the tokens of a response, for ipo means.
        beta: above 0.
        label_smoothing: share of pairs that are taken to be the wrong way round (cDPO); below 0.5, sigmoid only.
        nll: weight of the chosen response's mean negative log-likelihood (RPO, arXiv 2404.19733, eq. 2).
    """

    kind: str = "sigmoid"
    beta: float = 0.1
    label_smoothing: float = 0.0
    nll: float = 0.0

    def __post_init__(self) -> None:
        if self.kind not in PREFERENCE_LOSSES:
            raise ValueError(f"loss: got {self.kind!r}, allowed: {', '.join(PREFERENCE_LOSSES)}")
        if not 0.0 < self.beta < math.inf:
            raise ValueError(f"beta: got {self.beta}, allowed: above 0")
        if not 0.0 <= self.label_smoothing < 0.5:
            raise ValueError(f"label_smoothing: got {self.label_smoothing}, allowed: from 0 to below 0.5")
        if self.label_smoothing and self.kind != "sigmoid":
            raise ValueError(f"label_smoothing: got {self.label_smoothing}, allowed with loss {self.kind!r}: 0")
        if not 0.0 <= self.nll < math.inf:
            raise ValueError(f"nll: got {self.nll}, allowed: from 0")

    @property
    def averages(self) -> bool:
        """Whether log-ratios are means over tokens."""
        return self.kind == "ipo"

    def __call__(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        """Loss of each pair, [P], from log-ratios [P] of the chosen and the rejected response."""
        margin = chosen - rejected
        if self.kind == "ipo":
            return (margin - 1.0 / (2.0 * self.beta)).square()
        if self.kind == "hinge":
            return torch.relu(1.0 - self.beta * margin)
        # log sigmoid underflows nowhere in this form.
        right, wrong = F.logsigmoid(self.beta * margin), F.logsigmoid(-self.beta * margin)
        return -(1.0 - self.label_smoothing) * right - self.label_smoothing * wrong


def bradley_terry(chosen: Tensor, rejected: Tensor, margins: Tensor) -> Tensor:
    """Loss of a reward model, [P]: -log sigmoid(chosen - rejected - margin) (arXiv 2307.09288, section 3.2.2)."""
    return -F.logsigmoid(chosen - rejected - margins)
