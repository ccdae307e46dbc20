"""The on-policy step: generate, score, learn, on one set of weights.

Every rank runs the same `step`. The batch is gathered to all data ranks as token ids and scores (never activations), so
that filtering, advantages and balancing are the same deterministic computation everywhere.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import torch

from megarl.batch import Sample, TrainPack, balance, build_packs, count_globally
from megarl.config import DTYPES, PolicyConfig
from megarl.data.prompts import PromptExample, PromptSource
from megarl.data.tokenizer import load_tokenizer, stop_token_ids
from megarl.evaluate import Evaluator
from megarl.groups import GroupCollector
from megarl.progress import Progress
from megarl.report import draw_curves
from megarl.responses import OpenGroup, Responder
from megarl.rewards.scoring import load_reward
from megarl.run_folder import begin_run
from megarl.tracking import Tracker
from megarl.updates import PolicyTokenLoss, count_skipped, reference_log_probs, update
from parallel.launch import World
from parallel.mesh import Mesh
from parallel.model import QwenModel, build_model
from parallel.optimizer import Trainable
from parallel.qwen import QwenShape
from parallel.reshard import Resharder, build_inference_mesh
from parallel.weights import export_hf, import_hf
from rollout.engine import Engine
from rollout.sampling import SamplingParams

logger = logging.getLogger(__name__)


@dataclass
class State:
    """Where a run stands: everything but weights and optimizer that the next step depends on."""

    step: int = 0
    optimizer_step: int = 0
    num_prompts_used: int = 0
    num_skipped: int = 0
    unfinished: list[OpenGroup] = field(default_factory=list)


class PolicyTrainer:
    """Owns the models, the engine and the state of a run; `step` is the algorithm."""

    def __init__(self, config: PolicyConfig, shape: QwenShape, mesh: Mesh):
        self.config = config
        self.mesh = mesh
        self.state = State()
        run, rollout = config.run, config.rollout
        self.tokenizer = load_tokenizer(run.model)
        self.prompts = PromptSource(rollout.prompts, self.tokenizer, rollout.max_prompt_tokens)
        self.policy = Trainable(build_model(shape, mesh, DTYPES[run.dtype]), mesh, config.optimizer)
        self.policy.load_hf(run.model, seed=run.seed)
        self.reference = self._build_reference(shape)
        self.responder = self._build_responder(shape)
        self.sampling = SamplingParams(
            temperature=rollout.temperature,
            max_new_tokens=rollout.max_new_tokens,
            stop_token_ids=stop_token_ids(self.tokenizer, run.model),
            seed=run.seed,
        )
        self.sampling.check_for_training()

    def _build_reference(self, shape: QwenShape) -> list[QwenModel]:
        """The starting model, only if the recipe has a KL term."""
        if self.config.recipe.kl is None:
            return []
        models = build_model(shape, self.mesh, DTYPES[self.config.run.dtype])
        import_hf(self.config.run.model, models, self.mesh)
        return models

    def _build_responder(self, shape: QwenShape) -> Responder:
        rollout, models, mesh, refresh = self.config.rollout, self.policy.models, self.mesh, None
        if rollout.layout is not None:
            mesh = build_inference_mesh(rollout.layout, self.mesh, shape)
            models = build_model(shape, mesh, DTYPES[self.config.run.dtype])
            refresh = Resharder(self.policy.models, self.mesh, models, mesh).refit
        engine = Engine(
            models,
            mesh,
            rollout.context_length,
            rollout.max_sequences,
            rollout.max_prefill_tokens,
            rollout.max_cache_tokens,
            keep_cache=rollout.keep_cache,
        )
        return Responder(
            engine,
            mesh,
            self.tokenizer,
            load_reward(rollout.reward),
            require_finished=rollout.require_finished,
            reward_threads=rollout.reward_threads,
            refresh=refresh,
        )

    def evaluator(self) -> Evaluator:
        """Return the evaluator of the config's held-out prompts; without a file it has nothing to evaluate."""
        rollout = self.config.rollout
        if rollout.eval_prompts is None:
            return Evaluator(self.responder, [], self.sampling)
        source = PromptSource(rollout.eval_prompts, self.tokenizer, rollout.max_prompt_tokens)
        return Evaluator(self.responder, source.rows[: rollout.eval_max_prompts], self.sampling)

    def step(self) -> dict[str, float]:
        """Run one on-policy step; returns its metrics, equal on all ranks."""
        started = time.perf_counter()
        groups, metrics = self.generate_groups()
        generated = time.perf_counter()
        samples = self.assign_advantages(groups)
        updates = [self.learn(samples_of) for samples_of in self.split(samples)]
        metrics |= _mean_metrics(updates)
        self.state.step += 1
        now = time.perf_counter()
        tokens = sum(sample.num_tokens for sample in samples)
        return metrics | {
            "rollout_seconds": generated - started,
            "train_seconds": now - generated,
            "tokens_per_second": tokens / (now - started),
        }

    def generate_groups(self) -> tuple[list[list[Sample]], dict[str, float]]:
        """Generate until `prompts_per_step` groups are kept, see `GroupCollector`.

        Returns: the kept groups in the order of prompts, and metrics of everything that was generated. If too few are
            kept, training goes on with those.
        """
        rollout, state = self.config.rollout, self.state
        collector = GroupCollector(
            self._take_prompts,
            self.config.recipe.keep_group,
            wanted=rollout.prompts_per_step,
            max_rounds=rollout.max_generation_rounds,
            oversampling=rollout.oversampling,
            num_under_way=len(state.unfinished),
        )
        state.unfinished = self.responder.respond_until(
            state.unfinished,
            collector.start(),
            rollout.group_size,
            self.sampling,
            collector.judge,
            version=state.step,
        )
        if not collector.enough:
            logger.warning(
                "step %d: %d of %d groups kept after %d rounds; training on those",
                *(state.step, len(collector.kept), rollout.prompts_per_step, collector.num_rounds),
            )
        return sorted(collector.kept, key=lambda group: group[0].prompt_id), {
            **_rollout_metrics(collector.everything),
            "groups_kept": len(collector.kept),
            "generation_rounds": collector.num_rounds,
            "groups_paused": len(state.unfinished),
            "stale_tokens": _share_of_older(collector.everything, state.step),
        }

    def _take_prompts(self, number: int) -> list[PromptExample]:
        prompts = self.prompts.take(self.state.num_prompts_used, number, self.config.run.seed)
        self.state.num_prompts_used += number
        return prompts

    def assign_advantages(self, groups: Sequence[Sequence[Sample]]) -> list[Sample]:
        """Shape rewards, mask truncated responses and compute advantages, as the recipe says."""
        recipe = self.config.recipe
        samples = [sample for group in groups for sample in group]
        if not samples:
            return []
        rewards = torch.tensor([sample.score for sample in samples], dtype=torch.float32)
        if recipe.shape_reward is not None:
            rewards = recipe.shape_reward(rewards, torch.tensor([len(sample.response) for sample in samples]))
        advantages = recipe.advantage(rewards, torch.tensor([sample.prompt_id for sample in samples]))
        return [
            replace(
                sample, reward=reward, advantage=advantage, in_loss=not (recipe.mask_truncated and sample.truncated)
            )
            for sample, reward, advantage in zip(samples, rewards.tolist(), advantages.tolist(), strict=True)
        ]

    def split(self, samples: Sequence[Sample]) -> list[list[Sample]]:
        """Split the step's samples into mini-batches of whole groups."""
        group_size = self.config.rollout.group_size
        num_groups = len(samples) // group_size
        borders = [
            num_groups * i // self.config.rollout.num_mini_batches
            for i in range(self.config.rollout.num_mini_batches + 1)
        ]
        pieces = [samples[start * group_size : end * group_size] for start, end in pairwise(borders)]
        return [list(piece) for piece in pieces if piece]

    def learn(self, mini_batch: Sequence[Sample]) -> dict[str, float]:
        """Take one optimizer step on a mini-batch; stops the run after too many skipped in a row.

        Raises:
            RuntimeError: `MAX_SKIPPED_STEPS` steps in a row had a loss or gradient that was not finite.
        """
        recipe, mesh = self.config.recipe, self.mesh
        share = balance([sample.num_tokens for sample in mini_batch], mesh.data_size)[mesh.data_rank]
        mine = [mini_batch[index] for index in share]
        counts = count_globally(mine, mesh)
        packs = build_packs(mine, self.config.run.max_tokens_per_pack, recipe.aggregation, counts, mesh)
        temperature = self.config.rollout.temperature
        if self.reference:
            packs = self._with_reference(packs, temperature)
        metrics = update(
            self.policy, packs, counts, PolicyTokenLoss(recipe), self.state.optimizer_step, temperature=temperature
        )
        self.state.optimizer_step += int(metrics["applied"])
        self.state.num_skipped = count_skipped(self.state.num_skipped, metrics, counts)
        return metrics

    def _with_reference(self, packs: Sequence[TrainPack], temperature: float) -> list[TrainPack]:
        scored = reference_log_probs(self.reference, packs, temperature)
        if not self.mesh.is_last_stage:
            return list(packs)
        return [replace(pack, ref_log_probs=log_probs) for pack, log_probs in zip(packs, scored, strict=True)]


def _rollout_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    num = len(samples)
    return {
        "score": sum(sample.score for sample in samples) / num,
        "response_tokens": sum(len(sample.response) for sample in samples) / num,
        "truncated": sum(sample.truncated for sample in samples) / num,
    }


def _share_of_older(samples: Sequence[Sample], version: int) -> float:
    """Share of the response tokens that earlier weights drew."""
    versions = [drawn_by for sample in samples for drawn_by in sample.versions]
    return sum(drawn_by < version for drawn_by in versions) / max(len(versions), 1)


def _mean_metrics(updates: Sequence[dict[str, float]]) -> dict[str, float]:
    """Mean over the mini-batches of a step; the gap between rollout and training is that of the first one, whose
    weights are those that sampled."""
    if not updates:
        return {}
    metrics = {}
    for name in sorted(set().union(*updates)):
        values = [update[name] for update in updates if name in update]
        metrics[name] = sum(values) / len(values)
    if "max_log_ratio" in metrics:
        metrics["max_log_ratio"] = max(update.get("max_log_ratio", 0.0) for update in updates)
    if "max_log_ratio" in updates[0]:
        metrics["on_policy_gap"] = updates[0]["max_log_ratio"]
    return metrics


def train_policy(config: PolicyConfig, shape: QwenShape, world: World) -> dict[str, float]:
    """Train a policy from a HF folder to a HF folder; the default process group must be running.

    Writes `config.json`, `metrics.jsonl`, `summary.json`, `logs/` and the trained model `hf/` to the run folder.

    Returns: the summary's numbers, on all ranks.
    """
    run = config.run
    mesh, plain = begin_run(config, world)
    trainer = PolicyTrainer(config, shape, mesh)
    evaluator = trainer.evaluator()
    summary: dict[str, float] = {}
    with (
        Tracker(run.output, rank=mesh.rank, config=plain, wandb_mode=run.wandb) as tracker,
        Progress(config.recipe.name, run.num_steps, rank=mesh.rank, interval_seconds=run.progress_seconds) as progress,
    ):
        summary |= {f"{name}_before": value for name, value in evaluator.run().items()}
        started = time.perf_counter()
        while trainer.state.step < run.num_steps:
            metrics = trainer.step()
            if config.rollout.eval_every and trainer.state.step % config.rollout.eval_every == 0:
                metrics |= {f"eval_{name}": value for name, value in evaluator.run().items()}
            tracker.log(trainer.state.step, metrics)
            progress.update(trainer.state.step, _shown(metrics))
        summary["training_seconds"] = time.perf_counter() - started
        summary |= {f"{name}_after": value for name, value in evaluator.run().items()}
        tracker.summarize({**summary, "world_size": mesh.world_size})
        export_hf(run.output / "hf", trainer.policy.models, mesh, source_folder=run.model)
    if mesh.rank == 0:
        draw_curves(run.output, f"{config.recipe.name}: {run.output.name}")
    return summary


def _shown(metrics: dict[str, float]) -> dict[str, float]:
    names = ("score", "loss", "entropy", "grad_norm", "response_tokens")
    return {name: metrics[name] for name in names if name in metrics}
