"""The on-policy step: generate, score, learn, on one set of weights.

Every rank runs the same `step`. The batch is gathered to all data ranks as token ids and scores (never activations), so
that filtering, advantages and balancing are the same deterministic computation everywhere.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from itertools import pairwise

from megarl.assessor import Assessor, build_critic, build_reference, build_reward_model, next_kl_coefficient
from megarl.batch import Sample, build_packs, count_globally, shares_prompts, spread_samples
from megarl.config import DTYPES, PolicyConfig
from megarl.data.prompts import PromptExample, PromptSource
from megarl.data.tokenizer import load_tokenizer, stop_token_ids
from megarl.evaluate import Evaluator
from megarl.groups import GroupCollector, observed_keep_rate
from megarl.responses import Responder
from megarl.rewards.pool import RewardPool
from megarl.rewards.scoring import load_reward
from megarl.state import State, StepUnderWay
from megarl.step_metrics import (
    advantage_metrics,
    mean_metrics,
    oldest_version,
    rollout_metrics,
    share_of_older,
    used_memory,
)
from megarl.updates import PolicyTokenLoss, count_skipped, take_step, update, value_head
from parallel.mesh import Mesh
from parallel.model import build_model
from parallel.optimizer import Trainable
from parallel.qwen import QwenShape
from parallel.reshard import Resharder, build_inference_mesh
from rollout.engine import Engine
from rollout.sampling import SamplingParams

logger = logging.getLogger(__name__)


class PolicyTrainer:
    """Owns the models, the engine and the state of a run; `step` is the algorithm."""

    def __init__(self, config: PolicyConfig, shape: QwenShape, mesh: Mesh):
        self.config = config
        self.mesh = mesh
        self.state = State()
        self.at_border: Callable[[str], None] = _no_border
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
        self.state.fingerprint = self.prompts.fingerprint
        self.state.group_size, self.state.num_mini_batches = rollout.group_size, rollout.num_mini_batches
        self.state.num_epochs = rollout.num_epochs

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
            pool=RewardPool(rollout.reward_threads, rollout.reward_timeout_seconds),
            refresh=refresh,
            expected=self.state.expected,
        )

    def evaluator(self) -> Evaluator:
        """Return the evaluator of the config's held-out prompts; without a file it has nothing to evaluate."""
        rollout = self.config.rollout
        if rollout.eval_prompts is None:
            return Evaluator(self.responder, [], self.sampling)
        source = PromptSource(rollout.eval_prompts, self.tokenizer, rollout.max_prompt_tokens)
        return Evaluator(self.responder, source.rows[: rollout.eval_max_prompts], self.sampling)

    def step(self) -> dict[str, float]:
        """Run one on-policy step, or what is left of it; returns its metrics, equal on all ranks but for times and
        memory. `at_border` is called after each phase: "rollout", "assessment" (advantages), "update" (one optimizer
        step); between two of them all that the step has found lies in `state`."""
        state, clock = self.state, time.perf_counter
        if state.under_way is None:
            started = clock()
            groups, metrics = self.generate_groups()
            state.under_way = StepUnderWay(groups, metrics, rollout_seconds=clock() - started)
            self.at_border("rollout")
        step = state.under_way
        if step.samples is None:
            started = clock()
            step.samples = self.assign_advantages(step.groups)
            step.metrics |= advantage_metrics(step.samples, state.kl_coefficient)
            state.kl_coefficient = next_kl_coefficient(self.config, state.kl_coefficient, step.samples)
            step.scoring_seconds = clock() - started
            self.at_border("assessment")
        pieces = self.split(step.samples) * self.config.rollout.num_epochs
        for piece in pieces[len(step.updates) :]:
            started = clock()
            step.updates.append(self.learn(piece))
            step.train_seconds += clock() - started
            self.at_border("update")
        state.step += 1
        state.under_way = None
        return self._metrics_of(step)

    def _metrics_of(self, step: StepUnderWay) -> dict[str, float]:
        """Return the metrics of a step that is done."""
        assert step.samples is not None
        trained = sum(sample.num_tokens for sample in step.samples)
        seconds = step.rollout_seconds + step.scoring_seconds + step.train_seconds
        return {
            **step.metrics,
            **mean_metrics(step.updates),
            "rollout_seconds": step.rollout_seconds,
            "scoring_seconds": step.scoring_seconds,
            "train_seconds": step.train_seconds,
            "tokens_per_second": _rate(trained, seconds),
            "rollout_tokens_per_second": _rate(step.metrics["generated_tokens"], step.rollout_seconds),
            "train_tokens_per_second": _rate(trained * self.config.rollout.num_epochs, step.train_seconds),
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
                steady=collector.reacts_at_once,
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

    def restore(self, state: State) -> None:
        """Go on from a state that was saved; models and optimizers are loaded elsewhere.

        Raises:
            ValueError: it doesn't go with the config or its data.
        """
        rollout = self.config.rollout
        if state.fingerprint != self.prompts.fingerprint:
            raise ValueError(
                f"prompts: {str(rollout.prompts)!r} are not those of the run's checkpoint, allowed: the same prompts "
                "(max_prompt_tokens counts, too), or a new run from the exported model"
            )
        allowed = (state.group_size, state.num_mini_batches, state.num_epochs)
        given = (rollout.group_size, rollout.num_mini_batches, rollout.num_epochs)
        if state.under_way is not None and given != allowed:
            raise ValueError(
                f"group_size, num_mini_batches, num_epochs: got {given}, allowed for the step under way: {allowed}"
            )
        if rollout.group_size != state.group_size and (state.surplus or state.unfinished):
            raise ValueError(f"group_size: got {given[0]}, allowed with groups left over: {allowed[0]}")
        state.group_size, state.num_mini_batches, state.num_epochs = given
        self.responder.expected.means, self.responder.expected.total = state.expected.means, state.expected.total
        state.expected = self.responder.expected
        state.num_skipped = state.num_critic_skipped = 0
        self.state = state


def _rate(amount: float, seconds: float) -> float:
    """A restarted run may have no time for a phase that was done before."""
    return amount / seconds if seconds else math.nan


def _no_border(phase: str) -> None:
    """What happens at the border of a phase unless a run is saved there."""
