"""The on-policy step: generate, score, learn, on one set of weights.

Every rank runs the same `step`. The batch is gathered to all data ranks as token ids and scores (never activations), so
that filtering, advantages and balancing are the same deterministic computation everywhere.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from megarl.assessor import Assessor, build_critic, build_reference, build_reward_model, next_kl_coefficient
from megarl.batch import Sample, build_packs, count_globally, shares_prompts, spread_samples
from megarl.config import DTYPES, PolicyConfig
from megarl.data.prompts import PromptExample, PromptSource
from megarl.data.tokenizer import load_tokenizer, stop_token_ids
from megarl.evaluate import Evaluator
from megarl.groups import Group, GroupCollector, observed_keep_rate
from megarl.model_card import model_card
from megarl.progress import Progress
from megarl.report import draw_curves
from megarl.responses import OpenGroup, Responder
from megarl.rewards.scoring import load_reward
from megarl.run_folder import begin_run, end_run
from megarl.step_metrics import (
    advantage_metrics,
    mean_metrics,
    oldest_version,
    rollout_metrics,
    share_of_older,
    used_memory,
)
from megarl.tracking import Tracker
from megarl.updates import PolicyTokenLoss, count_skipped, take_step, update, value_head
from parallel.launch import World
from parallel.mesh import Mesh
from parallel.model import build_model
from parallel.optimizer import Trainable
from parallel.qwen import QwenShape
from parallel.reshard import Resharder, build_inference_mesh
from parallel.weights import export_hf
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
    critic_step: int = 0
    num_critic_skipped: int = 0
    kl_coefficient: float = 0.0
    keep_rate: float = 1.0
    exhausted: bool = False
    unfinished: list[OpenGroup] = field(default_factory=list)
    surplus: list[Group] = field(default_factory=list)


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
        self.critic = build_critic(config, mesh)
        reference, reward_model = build_reference(config, shape, mesh), build_reward_model(config, mesh)
        self.assessor = Assessor(config, mesh, self.policy, self.critic, reference, reward_model)
        self.state.kl_coefficient = config.recipe.kl_reward.coefficient if config.recipe.kl_reward else 0.0
        self.responder = self._build_responder(shape)
        self.sampling = SamplingParams(
            temperature=rollout.temperature,
            max_new_tokens=rollout.max_new_tokens,
            stop_token_ids=stop_token_ids(self.tokenizer, run.model),
            seed=run.seed,
        )
        self.sampling.check_for_training()

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
        """Run one on-policy step; returns its metrics, equal on all ranks but for times and memory."""
        started = time.perf_counter()
        groups, metrics = self.generate_groups()
        generated = time.perf_counter()
        samples = self.assign_advantages(groups)
        metrics |= advantage_metrics(samples, self.state.kl_coefficient)
        self.state.kl_coefficient = next_kl_coefficient(self.config, self.state.kl_coefficient, samples)
        assigned = time.perf_counter()
        updates = [self.learn(piece) for _ in range(self.config.rollout.num_epochs) for piece in self.split(samples)]
        metrics |= mean_metrics(updates)
        self.state.step += 1
        now = time.perf_counter()
        trained = sum(sample.num_tokens for sample in samples)
        return metrics | {
            "rollout_seconds": generated - started,
            "scoring_seconds": assigned - generated,
            "train_seconds": now - assigned,
            "tokens_per_second": trained / (now - started),
            "rollout_tokens_per_second": metrics["generated_tokens"] / (generated - started),
            "train_tokens_per_second": trained * self.config.rollout.num_epochs / (now - assigned),
            "memory_gib": used_memory(self.mesh) / 2**30,
        }

    def generate_groups(self) -> tuple[list[list[Sample]], dict[str, float]]:
        """Generate until `prompts_per_step` groups are kept, see `GroupCollector`.

        Returns: the kept groups in the order of prompts, and metrics of everything that was generated. They are
            too few where `max_generation_rounds` ended it; the config's `on_exhausted` decides what then happens.
        """
        rollout, state = self.config.rollout, self.state
        collector = GroupCollector(
            self._take_prompts,
            self.config.recipe.keep_group,
            wanted=rollout.prompts_per_step,
            max_rounds=rollout.max_generation_rounds,
            oversampling=rollout.oversampling,
            keep_rate=state.keep_rate if rollout.adaptive_oversampling else None,
            num_under_way=len(state.unfinished),
            kept=list(state.surplus),
        )
        num_carried = len(state.surplus)
        if not collector.enough:
            state.unfinished = self.responder.respond_until(
                state.unfinished,
                collector.start(),
                rollout.group_size,
                self.sampling,
                collector.judge,
                version=state.step,
            )
        groups, state.surplus = collector.split_surplus()
        num_judged = len(collector.everything) // rollout.group_size
        state.keep_rate = observed_keep_rate(state.keep_rate, len(collector.kept) - num_carried, num_judged)
        state.exhausted = not collector.enough
        if state.exhausted:
            logger.warning(
                "step %d: %d of %d groups kept after %d rounds; %s",
                *(state.step, len(collector.kept), rollout.prompts_per_step, collector.num_rounds),
                "training on those" if rollout.on_exhausted == "train" else "the run stops",
            )
        return groups, {
            **rollout_metrics(collector.everything),
            "groups_kept": len(groups),
            "groups_carried": num_carried,
            "groups_left_over": len(state.surplus),
            "oldest_group": max((state.step - oldest_version(group) for group in groups), default=0),
            "keep_rate": state.keep_rate,
            "generation_rounds": collector.num_rounds,
            "groups_paused": len(state.unfinished),
            "stale_tokens": share_of_older(collector.everything, state.step),
        }

    def _take_prompts(self, number: int) -> list[PromptExample]:
        prompts = self.prompts.take(self.state.num_prompts_used, number, self.config.run.seed)
        self.state.num_prompts_used += number
        return prompts

    def assign_advantages(self, groups: Sequence[Sequence[Sample]]) -> list[Sample]:
        """Return the groups' samples with advantages, see `Assessor`."""
        return self.assessor.assign_advantages(groups, self.state.kl_coefficient)

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
        recipe, mesh, state = self.config.recipe, self.mesh, self.state
        sharing = shares_prompts(self.config.rollout.share_prompts, mesh)
        share = spread_samples(mini_batch, mesh.data_size, sharing)[mesh.data_rank]
        mine = [mini_batch[index] for index in share]
        counts = count_globally(mine, mesh)
        packs = build_packs(mine, self.config.run.max_tokens_per_pack, recipe.aggregation, counts, mesh, sharing)
        metrics: dict[str, float] = {}
        if self.critic is not None:
            assert recipe.value_loss is not None
            found = take_step(self.critic, packs, counts.num_tokens, value_head(recipe.value_loss), state.critic_step)
            state.critic_step += int(found["applied"])
            state.num_critic_skipped = count_skipped(state.num_critic_skipped, found, counts.num_tokens)
            metrics = {f"critic_{name}": value for name, value in found.items()}
            if state.step < self.config.critic.critic_warmup_steps:
                return metrics
        temperature = self.config.rollout.temperature
        metrics |= update(
            self.policy, packs, counts, PolicyTokenLoss(recipe), state.optimizer_step, temperature=temperature
        )
        state.optimizer_step += int(metrics["applied"])
        state.num_skipped = count_skipped(state.num_skipped, metrics, counts.num_tokens)
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
            if trainer.state.exhausted and config.rollout.on_exhausted == "stop":
                summary["stopped_at_step"] = trainer.state.step
                break
        summary["training_seconds"] = time.perf_counter() - started
        summary |= {f"{name}_after": value for name, value in evaluator.run().items()}
        tracker.summarize({**summary, "world_size": mesh.world_size})
        card = model_card(config.recipe.name, plain, summary)
        export_hf(run.output / "hf", trainer.policy.models, mesh, source_folder=run.model, card=card)
        if trainer.critic is not None:
            source = config.critic.critic_model or run.model
            export_hf(run.output / "critic", trainer.critic.models, mesh, source_folder=source)
    if mesh.rank == 0:
        draw_curves(run.output, f"{config.recipe.name}: {run.output.name}")
    end_run(run.output, mesh)
    return summary


def _shown(metrics: dict[str, float]) -> dict[str, float]:
    names = ("score", "loss", "entropy", "grad_norm", "response_tokens")
    return {name: metrics[name] for name in names if name in metrics}
