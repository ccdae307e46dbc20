"""megarl's side of `rl_step.py`; run by it."""

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from rl_step_cases import (
    GROUP_SIZE,
    LR,
    NUM_PAIRS,
    NUM_PROMPTS,
    TOKENS_PER_PACK,
    WEIGHT_DECAY,
    Case,
    Pace,
    SideArguments,
    Step,
    run_side,
)
from torch import Tensor

from megarl.aggregation import token_mean
from megarl.batch import Sample, shares_prompts
from megarl.config import PolicyConfig, RolloutSettings, RunSettings
from megarl.config_preferences import DPOConfig, DPOSettings, PreferenceSettings
from megarl.data.prompts import rows_at
from megarl.dpo import DPOHead, add_reference
from megarl.losses import clipped
from megarl.passes import response_log_probs
from megarl.preference import PairData, PairTrainer, Unit, load_pairs
from megarl.recipes import GRPO
from megarl.trainer import PolicyTrainer
from parallel.launch import detect_world, running
from parallel.mesh import Layout, build_mesh
from parallel.model import build_model
from parallel.optimizer import OptimizerSettings, Trainable
from parallel.qwen import read_shape
from parallel.weights import import_hf
from rollout.requests import Request

OPTIMIZER = OptimizerSettings(lr=LR, weight_decay=WEIGHT_DECAY)


def serve(case: Case, arguments: SideArguments, pace: Pace) -> None:
    folder = Path(arguments.folder)
    with running(detect_world()) as world:
        mesh = build_mesh(Layout(), world)
        run = RunSettings(folder / "model", folder / "run", max_tokens_per_pack=TOKENS_PER_PACK[case.shape])
        build = _grpo if case.algorithm == "grpo" else _dpo
        step = build(case, folder, run, mesh, arguments.side)
        for _ in range(int(arguments.num_steps)):
            pace.wait()
            pace.done(step())


def _grpo(case: Case, folder: Path, run: RunSettings, mesh: Any, side: str) -> Callable[[], Step]:
    rollout = RolloutSettings(
        prompts=folder / "prompts.jsonl",
        reward="rl_step_cases:even_digits",
        require_finished=False,
        prompts_per_step=NUM_PROMPTS,
        group_size=GROUP_SIZE,
        max_prompt_tokens=case.prompt_tokens,
        max_new_tokens=case.new_tokens,
        num_mini_batches=1,
        share_prompts="repeated prompts" not in side,
    )
    recipe = replace(GRPO, policy_loss=clipped(0.2, 0.28), aggregation=token_mean)
    trainer = PolicyTrainer(PolicyConfig(run, rollout, Layout(), OPTIMIZER, recipe), read_shape(run.model), mesh)
    start = trainer.responder.engine.start

    def start_forced(*arguments: Any) -> Any:
        rollout = start(*arguments)
        add, lengths = rollout.add, case.lengths(trainer.state.step)
        rollout.add = lambda requests: add([one for r in requests for one in _one_by_one(r, lengths)])
        return rollout

    trainer.responder.engine.start = start_forced

    def step() -> Step:
        metrics = trainer.step()
        return Step(metrics["loss"], round(metrics["generated_tokens"]))

    return step


def _one_by_one(request: Request, lengths: list[list[int]]) -> list[Request]:
    """A request for each sample, that ends at its length and nowhere else."""
    return [
        replace(request, num_samples=1, first_sample=sample, max_new_tokens=length, stop_token_ids=())
        for sample, length in enumerate(lengths[request.prompt_id % NUM_PROMPTS])
    ]


def _dpo(case: Case, folder: Path, run: RunSettings, mesh: Any, side: str) -> Callable[[], Step]:
    data = PreferenceSettings(
        folder / "pairs.jsonl", batch_size=NUM_PAIRS, share_prompts="repeated prompts" not in side
    )
    config = DPOConfig(run, data, Layout(), OPTIMIZER, DPOSettings(cache_reference=False))
    shape = read_shape(run.model)
    pairs = load_pairs(config, shape).train
    policy = Trainable(build_model(shape, mesh, torch.float32), mesh, OPTIMIZER)
    policy.load_hf(run.model)
    reference = None
    if "cached" in side:
        pairs = add_reference(pairs, policy, config)
    else:
        reference = build_model(shape, mesh, torch.float32)
        import_hf(run.model, reference, mesh)
    trainer = PairTrainer(config, policy, PairData(pairs, []), DPOHead(config.dpo.preference_loss()))

    def step() -> Step:
        first = trainer.num_steps * NUM_PAIRS
        rows = rows_at(range(first, first + NUM_PAIRS), len(pairs), run.seed)
        if reference is not None:
            samples = [sample for row in rows for sample in pairs[row]]
            sharing = shares_prompts(data.share_prompts, mesh)
            scored = response_log_probs(reference, samples, run.max_tokens_per_pack, mesh, sharing, temperature=1.0)
            for row, unit in zip(rows, _paired(samples, scored), strict=True):
                pairs[row] = unit
        metrics = trainer.step()
        return Step(metrics["loss"], sum(len(sample.response) for row in rows for sample in pairs[row]))

    return step


def _paired(samples: list[Sample], scored: list[Tensor]) -> list[Unit]:
    done = [replace(sample, ref_log_probs=one) for sample, one in zip(samples, scored, strict=True)]
    return list(zip(done[0::2], done[1::2], strict=True))


if __name__ == "__main__":
    run_side(serve)
