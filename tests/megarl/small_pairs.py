"""Preference pairs of test size, updates on any split of them, and the config of a small run on files of pairs."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from megarl.config import RunSettings
from megarl.config_preferences import DPOConfig, DPOSettings, PreferenceSettings, RewardModelConfig
from megarl.data.preferences import PreferencePair
from megarl.preference import PairHead, Unit, as_units, mean_over_pairs, pack_pairs
from megarl.updates import take_step
from parallel.mesh import Layout, build_mesh
from parallel.optimizer import OptimizerSettings
from tests.megarl.small_batches import build
from tests.megarl.small_run import SmallRun
from tests.tiny_model import draw_sequences, hf_gradients

SIZES = [(2, 7, 3), (5, 1, 12), (3, 4, 4), (1, 20, 2), (4, 2, 9)]
"""Tokens of prompt, chosen and rejected answer of each pair."""
BUDGET = 50
"""Tokens of a pack: the five pairs take several."""
LAYOUTS = {
    "DP2, uneven": (Layout(), [[0, 1, 3, 4], [2]]),
    "DP2, one rank without pairs": (Layout(), [[0, 1, 2, 3, 4], []]),
    "TP2, sequence parallel": (Layout(2, sequence_parallel=True), [[0, 1, 2, 3, 4]]),
    "TP2": (Layout(2), [[4, 3, 2, 1, 0]]),
    "PP2": (Layout(1, 2), [[0, 1, 2, 3, 4]]),
    "PP2 with 2 virtual stages": (Layout(1, 2, 2), [[0, 1, 2, 3, 4]]),
}
"""Layout and the pairs of each data rank; two processes each."""


def draw_units(seed: int = 0, max_tokens: int = 16) -> list[Unit]:
    """Pairs of the tiny vocabulary with margins 0, 0.1, ... and log-probs of a reference around -5. Rows longer than
    `max_tokens` lose their start, so that the prompts of a pair differ."""
    generator = torch.Generator().manual_seed(seed)
    pairs = []
    for number, (prompt, chosen, rejected) in enumerate(SIZES):
        tokens = (tuple(row.tolist()) for row in draw_sequences([prompt, chosen, rejected], seed=10 * seed + number))
        pairs.append(PreferencePair(*tokens, margin=number / 10))

    def scored(sample):
        return replace(sample, ref_log_probs=torch.randn(len(sample.response), generator=generator) - 5.0)

    return [(scored(chosen), scored(rejected)) for chosen, rejected in as_units(pairs, max_tokens, "keep_end")]


@dataclass(frozen=True)
class Updated:
    """Metrics of an update on pairs and the gradient it applied, under Hugging Face names."""

    metrics: dict[str, float]
    gradients: dict[str, torch.Tensor]


def update_on_pairs(
    world, layout: Layout, split: list[list[int]], head: PairHead, kind: str, folders, share: bool = False
) -> Updated:
    """Update on `draw_units()`; each data rank has the pairs that `split` says. `folders`: of model and gradient."""
    trainable = build(build_mesh(layout, world), folders[0], kind)
    units = draw_units()
    mine = [units[index] for index in split[trainable.mesh.data_rank]]
    packs, num_pairs = pack_pairs(mine, BUDGET, trainable.mesh, share)
    metrics = take_step(trainable, packs, num_pairs, mean_over_pairs(head, num_pairs), 0)
    return Updated(metrics, hf_gradients(trainable, folders[1]))


def write_pairs(path: Path, count: int) -> Path:
    """Write rows of text whose answers differ in length, with margins."""
    rows = [
        {"prompt": f"{path.stem[0]}{number}", "chosen": "1" * (number % 3), "rejected": "is it", "margin": number / 10}
        for number in range(count)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def pair_settings(small_run: SmallRun, folder: Path, **changes: Any) -> tuple[RunSettings, PreferenceSettings]:
    """Settings of 2 steps of 4 pairs out of 10, with 3 held-out ones, whose files are written to `folder`."""
    folder.mkdir(exist_ok=True)
    files = [write_pairs(folder / f"{name}.jsonl", count) for name, count in (("train", 10), ("heldout", 3))]
    run = replace(small_run.config(folder / "run").run, **changes)
    return run, PreferenceSettings(preferences=files[0], eval_preferences=files[1], batch_size=4)


def dpo_config(small_run: SmallRun, folder: Path, layout: Layout | None = None, **dpo: Any) -> DPOConfig:
    """A small DPO run, with its cache in `folder`."""
    run, data = pair_settings(small_run, folder)
    settings = DPOSettings(**{"reference_cache": folder / "cache", **dpo})
    return DPOConfig(run, data, layout or Layout(), OptimizerSettings(lr=1e-3), settings)


def reward_config(small_run: SmallRun, folder: Path, layout: Layout | None = None) -> RewardModelConfig:
    """A small run of a reward model."""
    return RewardModelConfig(*pair_settings(small_run, folder), layout or Layout(), OptimizerSettings(lr=1e-2))
