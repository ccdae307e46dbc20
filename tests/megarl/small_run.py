"""A complete run in a folder: a tiny model with many stop ids, prompts, reward rules, and the config of it all."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from examples.make_tiny_qwen import main as make_tiny_qwen
from megarl.config import PolicyConfig, RolloutSettings, RunSettings
from megarl.data.prompts import PromptExample, user_message, write_prompts
from megarl.recipes import GRPO, Recipe
from parallel.mesh import Layout
from parallel.optimizer import OptimizerSettings

STOPS = (*range(60), 319)
"""A fresh model draws from 320 ids almost evenly: with 61 stop ids, two in three responses of 6 tokens end early."""

REWARDS = """
from pathlib import Path

def parity(prompt, response, answer):
    with Path(__file__).with_suffix(".calls").open("a") as calls:
        calls.write(f"{prompt}|{answer}\\n")
    return len(response) % 2

def right(prompt, response, answer):
    return 1.0

def length(prompt, response, answer):
    return len(response)
"""


@dataclass(frozen=True)
class SmallRun:
    """Files of a run, written by `write_small_run`."""

    folder: Path

    @property
    def reward_file(self) -> Path:
        return self.folder / "rewards.py"

    def config(
        self,
        output: Path,
        *,
        layout: Layout | None = None,
        recipe: Recipe = GRPO,
        run: dict[str, Any] | None = None,
        rollout: dict[str, Any] | None = None,
    ) -> PolicyConfig:
        """4 prompts of 2 responses each, 2 mini-batches a step; `run` and `rollout` change fields."""
        settings = RunSettings(model=self.folder / "model", output=output, num_steps=2, max_tokens_per_pack=64, seed=3)
        generation = RolloutSettings(
            prompts=self.folder / "train.jsonl",
            eval_prompts=self.folder / "heldout.jsonl",
            reward=f"{self.reward_file}:parity",
            require_finished=False,
            prompts_per_step=4,
            group_size=2,
            max_prompt_tokens=16,
            max_new_tokens=6,
            num_mini_batches=2,
        )
        return PolicyConfig(
            run=replace(settings, **run or {}),
            rollout=replace(generation, **rollout or {}),
            layout=layout or Layout(),
            optimizer=OptimizerSettings(lr=1e-3),
            recipe=recipe,
        )


def write_small_run(folder: Path) -> SmallRun:
    """Write the files: 10 training and 3 held-out prompts, whose answers are their numbers."""
    make_tiny_qwen(["--out", str(folder / "model"), "--num-layers", "4"])
    settings = folder / "model" / "generation_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"eos_token_id": list(STOPS[:-1])}))
    for name, count in (("train", 10), ("heldout", 3)):
        examples = [PromptExample(i, user_message(f"{name[0]}{i}"), str(i)) for i in range(count)]
        write_prompts(folder / f"{name}.jsonl", examples)
    (folder / "rewards.py").write_text(REWARDS)
    return SmallRun(folder)
