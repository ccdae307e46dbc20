"""Training on preference pairs: what DPO and the reward model share.

A pair is a unit of two samples, the chosen one first, that share a pack; its loss is one number. Shapes: P pairs of a
pack.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megarl.aggregation import GlobalCounts
from megarl.batch import Sample, TrainPack, balance, pack_units, shares_prompts
from megarl.config_preferences import PreferenceConfig, longest_row
from megarl.data.preferences import PreferencePair, Truncation, read_preferences, truncate
from megarl.data.prompts import fingerprint, rows_at
from megarl.data.tokenizer import load_tokenizer, response_end
from megarl.keeper import RunKeeper, RunStopped
from megarl.model_card import model_card
from megarl.report import PAIR_PANELS
from megarl.run_folder import end_run
from megarl.state import RowState
from megarl.updates import LossHead, Metrics, count_skipped, reduce_metrics, take_step
from parallel.checkpoint import Saved
from parallel.mesh import Mesh
from parallel.model import QwenModel
from parallel.optimizer import Trainable
from parallel.qwen import QwenShape
from parallel.schedule import forward

logger = logging.getLogger(__name__)

Unit = tuple[Sample, Sample]
"""The samples of the chosen and of the rejected answer; their scores differ by the pair's margin."""
PairHead = Callable[[QwenModel, Tensor, TrainPack], tuple[Tensor, Metrics]]
"""(last stage, hidden states, pack) -> loss [P] and metrics [P]; it knows neither ranks nor means."""


@dataclass(frozen=True)
class PairData:
    """Training pairs, and held-out ones (perhaps none)."""

    train: list[Unit]
    heldout: list[Unit]


def load_pairs(config: PreferenceConfig, shape: QwenShape) -> PairData:
    """Read, tokenise and cut the pairs of a config.

    Raises:
        ValueError: an unreadable row, or a file of which no pair is left.
    """
    run, data = config.run, config.data
    tokenizer = load_tokenizer(run.model)
    end = response_end(tokenizer, run.model)
    max_tokens = data.max_tokens or longest_row(shape, run.max_tokens_per_pack)

    def read(path: Path) -> list[Unit]:
        units = as_units(read_preferences(path, tokenizer, end), max_tokens, data.truncation)
        if not units:
            raise ValueError(f"max_tokens: got {max_tokens}, but then no pair of {str(path)!r} keeps both answers")
        return units

    heldout = [] if data.eval_preferences is None else read(data.eval_preferences)
    return PairData(read(data.preferences), heldout[: data.eval_max_pairs])


def as_units(pairs: Sequence[PreferencePair], max_tokens: int, truncation: Truncation) -> list[Unit]:
    """Cut prompt and answer of each pair to `max_tokens` tokens; pairs of which an answer is cut away completely are
    dropped. Both are counted and logged."""
    units: list[Unit] = []
    num_cut = 0
    for pair in pairs:
        rows = [truncate(pair.prompt, answer, max_tokens, truncation) for answer in (pair.chosen, pair.rejected)]
        num_cut += rows != [(pair.prompt, pair.chosen), (pair.prompt, pair.rejected)]
        if all(answer for _, answer in rows):
            chosen, rejected = rows
            units.append((_sample(len(units), 0, *chosen, pair.margin), _sample(len(units), 1, *rejected, 0.0)))
    logger.log(
        logging.WARNING if num_cut else logging.INFO,
        "%d of %d pairs are longer than %d tokens and were cut (%s); %d of them lost an answer and were dropped",
        *(num_cut, len(pairs), max_tokens, truncation, len(pairs) - len(units)),
    )
    return units


def _sample(number: int, index: int, prompt: tuple[int, ...], answer: tuple[int, ...], score: float) -> Sample:
    return Sample(number, index, prompt, answer, torch.zeros(len(answer)), score, truncated=False)


def pack_pairs(
    units: Sequence[Unit], max_tokens_per_pack: int, mesh: Mesh, share_prompts: bool = False
) -> tuple[list[TrainPack], int]:
    """Pack this rank's pairs; returns the packs and the number of pairs on all data ranks (the one all-reduce)."""
    num_pairs = int(mesh.sum_over_data(torch.tensor([len(units)], device=mesh.device)))
    counts = GlobalCounts(num_tokens=0, num_sequences=num_pairs)
    return pack_units(units, max_tokens_per_pack, _mark, counts, mesh, share_prompts), num_pairs


def _mark(lengths: Tensor, mask: Tensor, counts: GlobalCounts) -> Tensor:
    """An aggregation that says only which tokens count, `[N]`: what a pair's tokens are divided by is in its loss."""
    return mask.float()


def mean_over_pairs(head: PairHead, num_pairs: int) -> LossHead:
    """Loss head of a mini-batch with `num_pairs` pairs on all data ranks: nothing else divides."""

    def loss_head(model: QwenModel, hidden: Tensor, pack: TrainPack) -> tuple[Tensor, Metrics]:
        losses, metrics = head(model, hidden, pack)
        total = losses.sum() / num_pairs
        kept = {name: values.detach().sum() / num_pairs for name, values in metrics.items()}
        # megarl divides nothing more, but megatron-core may scale the loss in place: keep a copy.
        return total, {"loss": total.detach().clone(), **kept}

    return loss_head


def reward_metrics(chosen: Tensor, rejected: Tensor) -> Metrics:
    """Accuracy, rewards and their difference, `[P]` each, from the rewards of both answers."""
    return {
        "accuracy": (chosen > rejected).float(),
        "chosen_reward": chosen,
        "rejected_reward": rejected,
        "margin": chosen - rejected,
    }


class PairTrainer:
    """Owns the model and the position of a run on pairs; `step` is the algorithm."""

    def __init__(self, config: PreferenceConfig, trainable: Trainable, data: PairData, head: PairHead):
        self.config = config
        self.trainable = trainable
        self.data = data
        self.head = head
        self.state = RowState(fingerprint=_fingerprint(data.train))

    def step(self) -> dict[str, float]:
        """Take one optimizer step; the order of the pairs is a function of (seed, epoch).

        Returns: its metrics, equal on all ranks.

        Raises:
            RuntimeError: `MAX_SKIPPED_STEPS` steps in a row had a loss or gradient that was not finite.
        """
        size, train = self.config.data.batch_size, self.data.train
        positions = range(self.state.step * size, (self.state.step + 1) * size)
        packs, num_pairs = self._packs([train[row] for row in rows_at(positions, len(train), self.config.run.seed)])
        head = mean_over_pairs(self.head, num_pairs)
        metrics = take_step(self.trainable, packs, num_pairs, head, self.state.step)
        self.state.num_skipped = count_skipped(self.state.num_skipped, metrics, num_pairs)
        self.state.step += 1
        return metrics

    def evaluate(self) -> dict[str, float]:
        """Return the loss and metrics of the held-out pairs, equal on all ranks; nothing if there are none."""
        if not self.data.heldout:
            return {}
        packs, num_pairs = self._packs(self.data.heldout)
        head = mean_over_pairs(self.head, num_pairs)
        kept = forward(self.trainable.models, packs, lambda model, hidden, pack: head(model, hidden, pack)[1])
        return reduce_metrics(kept, self.trainable.mesh)

    def _packs(self, units: Sequence[Unit]) -> tuple[list[TrainPack], int]:
        """Pack this rank's share of pairs that all ranks know."""
        mesh = self.trainable.mesh
        costs = [chosen.num_tokens + rejected.num_tokens for chosen, rejected in units]
        share = balance(costs, mesh.data_size)[mesh.data_rank]
        mine = [units[index] for index in share]
        sharing = shares_prompts(self.config.data.share_prompts, mesh)
        return pack_pairs(mine, self.config.run.max_tokens_per_pack, mesh, sharing)


def run_training(name: str, trainer: PairTrainer, plain: dict[str, Any]) -> dict[str, float]:
    """Train, evaluate and export, or go on where the last checkpoint was; files as `megarl.policy_run.train_policy`.

    Args:
        name: of the algorithm, for progress and titles.
        plain: the config as plain values.

    Returns: the summary's numbers, on all ranks; those so far, if the run was stopped.
    """
    run, mesh = trainer.config.run, trainer.trainable.mesh
    saved = Saved(trainer.trainable, run.model)
    with RunKeeper(trainer.config, mesh, plain, name, {"policy": saved}) as keeper:
        trainer.state = keeper.row_state(trainer.state)
        try:
            _train(trainer, keeper)
        except RunStopped as stopped:
            logger.warning("%s", stopped)
            return trainer.state.summary
        summary = trainer.state.summary
        keeper.tracker.summarize({**summary, "world_size": mesh.world_size})
        keeper.export(run.output / "hf", saved, model_card(name, plain, summary))
    end_run(run.output, mesh, f"{name}: {run.output.name}", PAIR_PANELS)
    return summary


def _train(trainer: PairTrainer, keeper: RunKeeper) -> None:
    """Take the steps that are left, with evaluations and checkpoints; fills the summary in the state."""
    every, state = trainer.config.data.eval_every, trainer.state
    if state.step == 0:
        state.summary |= {f"{metric}_before": value for metric, value in trainer.evaluate().items()}
    while state.step < trainer.config.run.num_steps:
        started = time.perf_counter()
        with keeper.saving_rows(state):
            metrics = trainer.step()
        if every and state.step % every == 0:
            metrics |= {f"eval_{metric}": value for metric, value in trainer.evaluate().items()}
        shown = ("loss", "accuracy", "margin", "grad_norm")
        keeper.log(state.step, metrics, {metric: metrics[metric] for metric in shown if metric in metrics})
        state.training_seconds += time.perf_counter() - started
        keeper.after_row_step(state, metrics)
    state.summary["training_seconds"] = state.training_seconds
    state.summary |= {f"{metric}_after": value for metric, value in trainer.evaluate().items()}


def _fingerprint(units: Sequence[Unit]) -> str:
    """A hash of the pairs, to notice another file."""
    return fingerprint([(list(sample.prompt), list(sample.response)) for unit in units for sample in unit])
