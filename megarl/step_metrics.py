"""What a step tells about itself: numbers for `metrics.jsonl`, equal on all ranks."""

from __future__ import annotations

from collections.abc import Sequence

import psutil
import torch

from megarl.assessor import reference_log_ratios
from megarl.batch import Sample
from parallel.mesh import Mesh


def rollout_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    num, lengths = len(samples), [len(sample.response) for sample in samples]
    if not num:
        return {"generated_tokens": 0}
    return {
        "score": sum(sample.score for sample in samples) / num,
        "accuracy": sum(sample.score > 0 for sample in samples) / num,
        "response_tokens": sum(lengths) / num,
        "longest_response": max(lengths),
        "truncated": sum(sample.truncated for sample in samples) / num,
        "reward_timeouts": sum(sample.timed_out for sample in samples),
        "generated_tokens": sum(lengths),
    }


def share_of_older(samples: Sequence[Sample], version: int) -> float:
    """Share of the response tokens that earlier weights drew."""
    versions = [drawn_by for sample in samples for drawn_by in sample.versions]
    return sum(drawn_by < version for drawn_by in versions) / max(len(versions), 1)


def mean_metrics(updates: Sequence[dict[str, float]]) -> dict[str, float]:
    """Mean over the mini-batches of a step; the gap between rollout and training is that of the first one, whose
    weights are those that sampled."""
    if not updates:
        return {}
    metrics = {}
    for name in sorted(set().union(*updates)):
        values = [update[name] for update in updates if name in update]
        metrics[name] = sum(values) / len(values)
    for name in metrics:
        if "max_" in name:
            metrics[name] = max(update.get(name, 0.0) for update in updates)
    if "max_log_ratio" in updates[0]:
        metrics["on_policy_gap"] = updates[0]["max_log_ratio"]
    return metrics


def oldest_version(group: Sequence[Sample]) -> int:
    """Return the oldest weights that drew a token of the group."""
    return min((version for sample in group for version in sample.versions), default=0)


def advantage_metrics(samples: Sequence[Sample], kl_coefficient: float) -> dict[str, float]:
    """What the step's rewards and advantages look like."""
    if not samples:
        return {}
    per_sample = [torch.as_tensor(sample.advantage, dtype=torch.float32).mean() for sample in samples]
    advantages = torch.stack(per_sample)
    groups: dict[int, list[float]] = {}
    for sample in samples:
        groups.setdefault(sample.prompt_id, []).append(sample.reward)
    metrics = {
        "reward": sum(sample.reward for sample in samples) / len(samples),
        "advantage_std": float(advantages.std(correction=0)),
        "advantage_max": float(advantages.abs().max()),
        "zero_advantage_groups": sum(min(rewards) == max(rewards) for rewards in groups.values()) / len(groups),
    }
    if samples[0].ref_log_probs is not None:
        metrics["reference_kl"] = sum(float(reference_log_ratios(sample).sum()) for sample in samples) / len(samples)
    if kl_coefficient:
        metrics["kl_coefficient"] = kl_coefficient
    if samples[0].old_log_probs is not None:
        gaps = [(sample.old_log_probs - sample.rollout_log_probs).abs() for sample in samples]  # type: ignore[operator]
        metrics["rollout_gap"] = float(torch.cat(gaps).max())
    if samples[0].returns is not None and samples[0].values is not None:
        returns = torch.cat([sample.returns for sample in samples])  # type: ignore[misc]
        errors = returns - torch.cat([sample.values for sample in samples])  # type: ignore[misc]
        variance = float(returns.var(correction=0))
        metrics["explained_variance"] = 1.0 - float(errors.var(correction=0)) / variance if variance else 0.0
    return metrics


def used_memory(mesh: Mesh) -> int:
    """Return the bytes used by this rank: the peak on its GPU, or resident on a CPU."""
    if mesh.device.type == "cuda":
        return torch.cuda.max_memory_allocated(mesh.device)
    return psutil.Process().memory_info().rss
