"""Supervised fine-tuning on the same backbone: packed demonstrations, loss on the assistant's turns only."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from megarl.aggregation import token_mean
from megarl.batch import Sample, balance, build_packs, count_globally
from megarl.config import DTYPES, SFTConfig
from megarl.data.demonstrations import Demonstration, read_demonstrations
from megarl.data.prompts import rows_at
from megarl.data.tokenizer import load_tokenizer, response_end
from megarl.model_card import model_card
from megarl.progress import Progress
from megarl.report import draw_curves
from megarl.run_folder import begin_run, end_run
from megarl.tracking import Tracker
from megarl.updates import count_skipped, sft_token_loss, update
from parallel.launch import World
from parallel.model import build_model
from parallel.optimizer import Trainable
from parallel.qwen import QwenShape
from parallel.weights import export_hf


def train_sft(config: SFTConfig, shape: QwenShape, world: World) -> dict[str, float]:
    """Fine-tune from a HF folder to a HF folder; files as `megarl.trainer.train_policy`.

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
    started = time.perf_counter()
    metrics: dict[str, float] = {}
    num_skipped = 0
    with (
        Tracker(run.output, rank=mesh.rank, config=plain, wandb_mode=run.wandb) as tracker,
        Progress("sft", run.num_steps, rank=mesh.rank, interval_seconds=run.progress_seconds) as progress,
    ):
        for step in range(run.num_steps):
            batch = batch_of(demonstrations, step, config.data.batch_size, run.seed)
            share = balance([sample.num_tokens for sample in batch], mesh.data_size)[mesh.data_rank]
            mine = [batch[index] for index in share]
            counts = count_globally(mine, mesh)
            packs = build_packs(mine, run.max_tokens_per_pack, token_mean, counts, mesh)
            metrics = update(policy, packs, counts, sft_token_loss, step)
            num_skipped = count_skipped(num_skipped, metrics, counts.num_tokens)
            tracker.log(step + 1, metrics)
            progress.update(step + 1, {name: metrics[name] for name in ("loss", "grad_norm") if name in metrics})
        summary = {"training_seconds": time.perf_counter() - started, "final_loss": metrics.get("loss", float("nan"))}
        tracker.summarize({**summary, "world_size": mesh.world_size})
        card = model_card("sft", plain, summary)
        export_hf(run.output / "hf", policy.models, mesh, source_folder=run.model, card=card)
    if mesh.rank == 0:
        draw_curves(run.output, f"sft: {run.output.name}")
    end_run(run.output, mesh)
    return summary


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
