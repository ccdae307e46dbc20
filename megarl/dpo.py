"""Direct preference optimisation and its relatives: a policy learns from pairs, pulled to the model it started from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megarl.batch import Sample, TrainPack, shares_prompts
from megarl.config import DTYPES
from megarl.config_preferences import DPOConfig
from megarl.losses import PreferenceLoss, sequence_means, sequence_sums
from megarl.passes import response_log_probs
from megarl.preference import PairData, PairTrainer, Unit, load_pairs, reward_metrics, run_training
from megarl.progress import Progress
from megarl.reference_cache import ReferenceCache
from megarl.run_folder import begin_run
from megarl.updates import Metrics
from parallel.launch import World
from parallel.log_probs import score_tokens
from parallel.mesh import Mesh
from parallel.model import QwenModel, build_model
from parallel.optimizer import Trainable
from parallel.qwen import QwenShape

SAMPLES_PER_PASS = 256
"""Answers that a data rank scores with the reference between two progress lines."""


def train_dpo(config: DPOConfig, shape: QwenShape, world: World) -> dict[str, float]:
    """Train a policy on pairs from a HF folder to a HF folder. The reference is the folder's model: its log-probs are
    computed once, before the first step, by the policy itself.

    Returns: the summary's numbers, on all ranks.
    """
    run = config.run
    mesh, plain = begin_run(config, world)
    data = load_pairs(config, shape)
    policy = Trainable(build_model(shape, mesh, DTYPES[run.dtype]), mesh, config.optimizer)
    policy.load_hf(run.model, seed=run.seed)
    data = PairData(add_reference(data.train, policy, config), add_reference(data.heldout, policy, config))
    return run_training("dpo", PairTrainer(config, policy, data, DPOHead(config.dpo.preference_loss())), plain)


def add_reference(units: Sequence[Unit], policy: Trainable, config: DPOConfig) -> list[Unit]:
    """Give the samples the log-probs of the weights that the policy has now: from the cache, or computed and kept.

    Every rank must call it, with the same pairs; rank 0 alone reads and writes the cache.
    """
    if not units:
        return []
    mesh = policy.mesh
    samples = [sample for unit in units for sample in unit]
    cache, found = None, None
    if config.dpo.cache_reference and mesh.rank == 0:
        cache = ReferenceCache.of(config.dpo.reference_cache, config.run.model, config.run.dtype, samples)
        found = cache.read()
    log_probs = _from_rank_0(found, mesh)
    if log_probs is None:
        log_probs = reference_log_probs(samples, policy, config)
        if cache is not None:
            cache.write(log_probs)
    parts = log_probs.split([len(sample.response) for sample in samples])
    scored = [replace(sample, ref_log_probs=part) for sample, part in zip(samples, parts, strict=True)]
    return list(zip(scored[0::2], scored[1::2], strict=True))


def reference_log_probs(samples: Sequence[Sample], policy: Trainable, config: DPOConfig) -> Tensor:
    """Score the answers with the policy as it is, showing progress: their tokens in a row, `[sum of lengths]` fp32."""
    run, mesh = config.run, policy.mesh
    size = SAMPLES_PER_PASS * mesh.data_size
    sharing = shares_prompts(config.data.share_prompts, mesh)
    scored: list[Tensor] = []
    with Progress("reference", len(samples), rank=mesh.rank, interval_seconds=run.progress_seconds) as progress:
        for start in range(0, len(samples), size):
            some = samples[start : start + size]
            scored += response_log_probs(policy.models, some, run.max_tokens_per_pack, mesh, sharing, temperature=1.0)
            progress.update(len(scored), {})
    return torch.cat(scored)


def _from_rank_0(item: Tensor | None, mesh: Mesh) -> Tensor | None:
    """Return `item` of rank 0 on all ranks: over its data group, then within each replica.

    One tensor, not its parts: pickled, each of those would bring the memory of the whole.
    """
    return mesh.from_first_model_rank(mesh.gather_over_data(item)[0])


@dataclass(frozen=True)
class DPOHead:
    """Loss and metrics of each pair from the log-probs of policy and reference; see `megarl.preference.PairHead`."""

    loss: PreferenceLoss

    def __call__(self, model: QwenModel, hidden: Tensor, pack: TrainPack) -> tuple[Tensor, Metrics]:
        """Return the loss [P] and metrics [P] of a pack."""
        log_probs, _ = score_tokens(model, hidden, pack)
        return self.from_log_probs(log_probs, pack)

    def from_log_probs(self, log_probs: Tensor, pack: TrainPack) -> tuple[Tensor, Metrics]:
        """As a call, from the policy's log-probs of the scored tokens, `[N]`.

        Tokens that are masked out are in no sum and in no divisor. An answer without tokens has a log-ratio of 0.
        """
        counted, num_sequences = pack.loss_weights != 0, len(pack.scores)
        log_probs, sequence_ids = log_probs[counted], pack.sequence_ids[counted]
        reduce = sequence_means if self.loss.averages else sequence_sums
        log_ratios = reduce(log_probs - pack.ref_log_probs[counted], sequence_ids, num_sequences)
        chosen, rejected = log_ratios[0::2], log_ratios[1::2]
        losses = self.loss(chosen, rejected)
        nll = -sequence_means(log_probs, sequence_ids, num_sequences)[0::2]
        if self.loss.nll:
            losses = losses + self.loss.nll * nll
        sums = sequence_sums(log_probs, sequence_ids, num_sequences)
        return losses, {
            **reward_metrics(self.loss.beta * chosen, self.loss.beta * rejected),
            "chosen_log_prob": sums[0::2],
            "rejected_log_prob": sums[1::2],
            "nll": nll,
        }
