"""Supervised fine-tuning on the same backbone: packed demonstrations, loss on the assistant's turns only."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

import torch

from megarl.aggregation import token_mean
from megarl.batch import Sample, balance, build_packs, count_globally
from megarl.config import DTYPES, SFTConfig
from megarl.data.demonstrations import Demonstration, read_demonstrations
from megarl.data.prompts import fingerprint, rows_at
from megarl.data.tokenizer import load_tokenizer, response_end
from megarl.keeper import RunKeeper, RunStopped
from megarl.model_card import model_card
from megarl.run_folder import begin_run, end_run
from megarl.state import RowState
from megarl.updates import count_skipped, sft_token_loss, update
from parallel.checkpoint import Saved
from parallel.launch import World
from parallel.model import build_model
from parallel.optimizer import Trainable
from parallel.qwen import QwenShape

logger = logging.getLogger(__name__)


def train_sft(config: SFTConfig, shape: QwenShape, world: World) -> dict[str, float]:
    """Fine-tune from a HF folder to a HF folder; files as `megarl.policy_run.train_policy`.

    Returns: the summary's numbers, on all ranks.
    """
    run = config.run
    mesh, plain = begin_run(config, world)
    tokenizer = load_tokenizer(run.model)
    end = response_end(tokenizer, run.model)
    demonstrations = read_demonstrations(config.data.demonstrations, tokenizer, end, config.data.last_turn_only)
    check_lengths(demonstrations, min(run.max_tokens_per_pack, shape.max_position_embeddings))
    policy = Trainable(build_model(shape, mesh, DTYPES[run.dtype]), mesh, config.optimizer)
    policy.load_hf(run.model, seed=run.seed)
    saved = Saved(policy, run.model)
    state = RowState(fingerprint=fingerprint([(list(one.prompt), list(one.response)) for one in demonstrations]))
    with RunKeeper(config, mesh, plain, "sft", {"policy": saved}) as keeper:
        state = keeper.row_state(state)
        try:
            _train(config, demonstrations, policy, state, keeper)
        except RunStopped as stopped:
            logger.warning("%s", stopped)
            return state.summary
        keeper.tracker.summarize({**state.summary, "world_size": mesh.world_size})
        keeper.export(run.output / "hf", saved, model_card("sft", plain, state.summary))
    end_run(run.output, mesh, f"sft: {run.output.name}")
    return state.summary


def _train(
    config: SFTConfig,
    demonstrations: Sequence[Demonstration],
    policy: Trainable,
    state: RowState,
    keeper: RunKeeper,
) -> None:
    """Take the steps that are left, with checkpoints; fills the summary in the state."""
    run, mesh = config.run, policy.mesh
    while state.step < run.num_steps:
        started = time.perf_counter()
        batch = batch_of(demonstrations, state.step, config.data.batch_size, run.seed)
        share = balance([sample.num_tokens for sample in batch], mesh.data_size)[mesh.data_rank]
        mine = [batch[index] for index in share]
        counts = count_globally(mine, mesh)
        packs = build_packs(mine, run.max_tokens_per_pack, token_mean, counts, mesh)
        with keeper.saving_rows(state):
            metrics = update(policy, packs, counts, sft_token_loss, state.step)
            state.num_skipped = count_skipped(state.num_skipped, metrics, counts.num_tokens)
        state.step += 1
        keeper.log(state.step, metrics, {name: metrics[name] for name in ("loss", "grad_norm") if name in metrics})
        state.training_seconds += time.perf_counter() - started
        state.summary |= {
            "training_seconds": state.training_seconds,
            "final_loss": metrics.get("loss", float("nan")),
        }
        keeper.after_row_step(state, metrics)


def check_lengths(demonstrations: Sequence[Demonstration], max_tokens: int) -> None:
    """Raise ValueError unless every demonstration fits into a pack and into the model's context, in tokens."""
    longest = max(len(demonstration.prompt) + len(demonstration.response) for demonstration in demonstrations)
    if longest > max_tokens:
        raise ValueError(
            f"demonstrations: the longest has {longest} tokens, "
            f"allowed by max_tokens_per_pack and the model: {max_tokens}"
        )


def batch_of(demonstrations: Sequence[Demonstration], step: int, batch_size: int, seed: int) -> list[Sample]:
    """Return the demonstrations of a step, in an order that is a function of (seed, epoch); epochs may be crossed."""
    positions = range(step * batch_size, (step + 1) * batch_size)
    rows = zip(positions, rows_at(positions, len(demonstrations), seed), strict=True)
    return [_as_sample(position, demonstrations[row]) for position, row in rows]


def _as_sample(position: int, demonstration: Demonstration) -> Sample:
    unused = torch.zeros(len(demonstration.response))
    return Sample(
        position,
        0,
        demonstration.prompt,
        demonstration.response,
        unused,
        score=0.0,
        truncated=False,
        loss_mask=demonstration.mask,
    )
