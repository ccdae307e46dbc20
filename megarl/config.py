"""Everything a run is made of, as frozen dataclasses; a command line is made from their fields (`megarl.cli`).

`check` compares the values with each other, with the model and with the world before any process group exists.
"""

from __future__ import annotations

import dataclasses
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch

from megarl.data.prompts import read_prompts
from megarl.data.tokenizer import load_tokenizer
from megarl.recipes import Recipe
from megarl.resumable import check_checkpoint
from megarl.rewards.scoring import load_reward
from megarl.run_list import process_of
from megarl.tracking import WandbMode, check_wandb
from parallel.checkpoint_folder import CHECKPOINTS, CheckpointSettings
from parallel.hf_checks import check_hf, has_scalar_head
from parallel.hf_tensors import SCORE, Head
from parallel.mesh import Layout
from parallel.optimizer import OptimizerSettings
from parallel.options import option
from parallel.qwen import QwenShape, read_shape
from parallel.reshard import check_inference_layout
from rollout.memory import least_cache_tokens


def share_prompts_option(answer: str) -> Any:
    """The option `share_prompts` of a training whose prompts have several answers, called `answer`."""
    return option(
        None,
        f"train on a prompt once, not once for each {answer}: the same gradients for less work; none: on the CPU, as "
        "it was not yet run on a GPU",
    )


DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class RunSettings:
    """What every kind of training has."""

    model: Path = option(Path("runs/tiny"), "HF folder of a Qwen2, Qwen2.5 or Qwen3 model to start from")
    output: Path = option(Path("runs/run"), "run folder: config, metrics, logs, summary, trained model")
    dtype: Literal["fp32", "bf16"] = option("fp32", "of weights and activations (bf16 keeps fp32 master weights)")
    seed: int = option(0, "of data order, sampling and new heads")
    num_steps: int = option(120, "training steps")
    max_tokens_per_pack: int = option(4096, "token budget of a micro-batch (a pack of whole sequences)")
    resume: bool = option(False, "go on from the newest checkpoint of the output folder; without one start anew")
    wandb: WandbMode = option(
        "disabled", "Weights & Biases: offline writes to the run folder, online needs WANDB_API_KEY"
    )
    timeout_seconds: float = option(600.0, "longest wait of one collective, in seconds")
    progress_seconds: float = option(10.0, "between two progress lines where the output is no terminal, in seconds")

    def check(self, head: Head = "lm") -> QwenShape:
        """Check the fields by themselves, and the model's folder; returns its shape.

        Raises:
            ValueError: names the field, its value and the values allowed.
        """
        _at_least(self, num_steps=1, max_tokens_per_pack=1, progress_seconds=0)
        if not self.timeout_seconds > 0:
            raise ValueError(f"timeout_seconds: got {self.timeout_seconds}, allowed: above 0")
        _one_of(self, dtype=tuple(DTYPES))
        check_wandb(self.wandb)
        if not (self.model / "config.json").is_file():
            raise ValueError(f"model: got {str(self.model)!r}, allowed: a folder with a config.json")
        _finite(self)
        if not -(2**63) <= self.seed < 2**63:
            raise ValueError(f"seed: got {self.seed}, allowed: 64-bit integers")
        self._check_output()
        shape = read_shape(self.model)
        check_hf(self.model, shape, head)
        return shape

    def _check_output(self) -> None:
        if not self.resume and any((self.output / name).exists() for name in ("hf", "metrics.jsonl", CHECKPOINTS)):
            raise ValueError(f"output: {str(self.output)!r} already holds a run, allowed: another folder, or resume")
        folder = self.output / CHECKPOINTS
        if folder.is_symlink() and not folder.exists():
            raise ValueError(f"output: {str(folder)!r} is a link that leads nowhere, allowed: a folder")
        process = process_of(self.output)
        if process not in (None, os.getpid()):
            raise ValueError(
                f"output: a run is going on in {str(self.output)!r} (process {process}), allowed: another folder"
            )
        check_folder("output", self.output)


@dataclass(frozen=True)
class RolloutSettings:
    """Prompts and how responses to them are generated and scored."""

    prompts: Path = option(Path("runs/data/train.jsonl"), "training prompts, JSONL or parquet")
    eval_prompts: Path | None = option(None, "held-out prompts; none: no evaluation")
    eval_every: int = option(0, "steps between evaluations; 0: only before and after training")
    eval_max_prompts: int = option(512, "held-out prompts used by an evaluation")
    reward: str = option(
        "exact_match", "built-in rule, module:function or file.py:function of (prompt, response, answer)"
    )
    require_finished: bool = option(True, "a response cut off at the length limit scores 0")
    prompts_per_step: int = option(32, "prompts (groups) of a step")
    group_size: int = option(8, "responses per prompt")
    max_prompt_tokens: int = option(512, "longer prompts are left out, in tokens")
    max_new_tokens: int = option(256, "limit of a response, in tokens")
    temperature: float = option(1.0, "of sampling and of all log-probs; above 0")
    max_sequences: int = option(256, "responses decoded at a time by one model replica")
    max_prefill_tokens: int = option(
        8192, "prompt tokens computed in one decoding step (with L > 1 pipeline lanes: 1 / 4 L of it)"
    )
    max_cache_tokens: int | None = option(
        None, "bound of a replica's KV cache in tokens; none: what free memory allows"
    )
    rollout_tensor_model_parallel_size: int | None = option(
        None, "tensor ranks of rollout, on a second copy of the weights without pipeline; none: the trained weights"
    )
    keep_cache: bool = option(False, "keep the KV cache's memory during training")
    reward_threads: int = option(
        1, "threads that score while others decode; 0: main thread, for rules with signals (without a time-out)"
    )
    reward_timeout_seconds: float = option(
        300.0, "a response whose rule gives no answer in so many seconds scores 0; not enforced with reward_threads 0"
    )
    max_generation_rounds: int = option(10, "times prompts_per_step: most prompts of a step whose recipe drops groups")
    oversampling: float = option(
        1.0,
        "prompts started per prompt needed; above 1 a step ends once enough groups are complete and the rest goes on "
        "in the next: responses then come from several versions of the weights, and results depend on the layout",
    )
    adaptive_oversampling: bool = option(
        False,
        "start as many prompts at once as the observed share of kept groups calls for, in rounds; groups kept beyond "
        "prompts_per_step are trained on in the next step",
    )
    on_exhausted: Literal["train", "stop"] = option(
        "train", "when max_generation_rounds keep too few groups: train on those, or stop the run with its model saved"
    )
    num_mini_batches: int = option(4, "optimizer steps of a step, each on its own groups")
    num_epochs: int = option(1, "times that a step goes over its mini-batches")
    share_prompts: bool | None = share_prompts_option("response")
    reward_model: Path | None = option(
        None, "HF folder of a sequence-classification model whose score is the reward; the rule gives the accuracy only"
    )

    def check(self, shape: QwenShape, max_tokens_per_pack: int) -> None:
        """Check the fields by themselves and against the model.

        Raises:
            ValueError: names the field, its value and the values allowed.
        """
        _at_least(self, prompts_per_step=1, group_size=1, max_prompt_tokens=1, max_new_tokens=1, max_sequences=1)
        _at_least(self, max_generation_rounds=1, eval_every=0, eval_max_prompts=1)
        _at_least(self, max_prefill_tokens=1, reward_threads=0, num_epochs=1)
        _one_of(self, on_exhausted=("train", "stop"))
        if self.adaptive_oversampling and self.oversampling != 1:
            raise ValueError(f"oversampling: got {self.oversampling}, allowed with adaptive_oversampling: 1")
        if not 1 <= self.oversampling <= 100:
            raise ValueError(f"oversampling: got {self.oversampling}, allowed: 1 to 100")
        if not 0 < self.reward_timeout_seconds < math.inf:
            raise ValueError(f"reward_timeout_seconds: got {self.reward_timeout_seconds}, allowed: above 0")
        if self.max_cache_tokens is not None:
            _at_least(self, max_cache_tokens=1)
        if not 1 <= self.num_mini_batches <= self.prompts_per_step:
            raise ValueError(
                f"num_mini_batches: got {self.num_mini_batches}, allowed: 1 to prompts_per_step {self.prompts_per_step}"
            )
        if not 0.01 <= self.temperature <= 100:
            raise ValueError(f"temperature: got {self.temperature}, allowed in training: 0.01 to 100")
        if self.context_length > shape.max_position_embeddings:
            raise ValueError(
                f"max_prompt_tokens + max_new_tokens: got {self.context_length}, allowed by the model: "
                f"at most {shape.max_position_embeddings}"
            )
        if self.context_length > max_tokens_per_pack:
            raise ValueError(
                f"max_tokens_per_pack: got {max_tokens_per_pack}, allowed: from max_prompt_tokens + max_new_tokens = "
                f"{self.context_length}, the longest sequence"
            )
        for name, path in (("prompts", self.prompts), ("eval_prompts", self.eval_prompts)):
            if path is not None and not path.is_file():
                raise ValueError(f"{name}: there is no file {str(path)!r}")
            if path is not None:
                read_prompts(path)
        load_reward(self.reward)

    @property
    def layout(self) -> Layout | None:
        """Layout of rollout if it isn't training's."""
        size = self.rollout_tensor_model_parallel_size
        return None if size is None else Layout(tensor_model_parallel_size=size)

    @property
    def context_length(self) -> int:
        """Most tokens of prompt and response together."""
        return self.max_prompt_tokens + self.max_new_tokens


@dataclass(frozen=True)
class CriticSettings:
    """The critic of recipes with a value loss, in the layout of the policy."""

    critic_model: Path | None = option(None, "HF folder to start the critic from; none: the policy's")
    critic_lr: float = option(1e-5, "peak learning rate of the critic; everything else as the policy's optimizer")
    critic_warmup_steps: int = option(0, "first steps that train the critic alone")

    def check(self) -> None:
        """As `RunSettings.check`."""
        _at_least(self, critic_warmup_steps=0)
        if not 0 < self.critic_lr < math.inf:
            raise ValueError(f"critic_lr: got {self.critic_lr}, allowed: above 0")


@dataclass(frozen=True)
class PolicyConfig:
    """A whole reinforcement-learning run."""

    run: RunSettings
    rollout: RolloutSettings
    layout: Layout
    optimizer: OptimizerSettings
    recipe: Recipe
    critic: CriticSettings = CriticSettings()
    checkpoints: CheckpointSettings = CheckpointSettings()
    kind: ClassVar[str] = "policy"

    def check(self, world_size: int) -> QwenShape:
        """Check all values before anything is built; returns the model's shape.

        Raises:
            ValueError: names the field, its value and the values allowed.
        """
        shape = self.run.check()
        self.layout.check(shape, world_size)
        self.rollout.check(shape, self.run.max_tokens_per_pack)
        if self.rollout.layout is not None:
            check_inference_layout(self.rollout.layout, self.layout, shape, world_size)
        check_vocabulary(self.run.model, shape)
        self._check_group_size()
        self._check_cache()
        self.critic.check()
        self.checkpoints.check()
        models = ["policy"] + ["critic"] * (self.recipe.value_loss is not None)
        check_checkpoint(self.run, self.kind, models, shape)
        for name, folder in (("critic_model", self.critic.critic_model), ("reward_model", self.rollout.reward_model)):
            if folder is not None:
                _check_same_tokens(name, folder, shape, self.layout, world_size)
        return shape

    def _check_cache(self) -> None:
        rollout = self.rollout
        least = least_cache_tokens(rollout.layout or self.layout, rollout.max_prompt_tokens, rollout.max_new_tokens)
        if rollout.max_cache_tokens is not None and rollout.max_cache_tokens < least:
            raise ValueError(
                f"max_cache_tokens: got {rollout.max_cache_tokens}, allowed for prompts of {rollout.max_prompt_tokens} "
                f"and responses of {rollout.max_new_tokens} tokens: from {least}"
            )

    def _check_group_size(self) -> None:
        size = self.rollout.group_size
        if self.recipe.advantage is None:
            return
        try:
            self.recipe.advantage(torch.zeros(size), torch.zeros(size, dtype=torch.int64))
        except ValueError as error:
            raise ValueError(f"group_size: got {size}, not allowed by recipe {self.recipe.name}: {error}") from error


@dataclass(frozen=True)
class DemonstrationSettings:
    """What is imitated."""

    demonstrations: Path = option(Path("runs/data/demonstrations.jsonl"), "JSONL of chats that end with the assistant")
    batch_size: int = option(64, "demonstrations of a step")
    last_turn_only: bool = option(False, "learn from the last message of a chat only, not from all of the assistant's")

    def check(self) -> None:
        """As `RunSettings.check`."""
        _at_least(self, batch_size=1)
        if not self.demonstrations.is_file():
            raise ValueError(f"demonstrations: there is no file {str(self.demonstrations)!r}")


@dataclass(frozen=True)
class SFTConfig:
    """A whole supervised fine-tuning run."""

    run: RunSettings
    data: DemonstrationSettings
    layout: Layout
    optimizer: OptimizerSettings
    checkpoints: CheckpointSettings = CheckpointSettings()
    kind: ClassVar[str] = "sft"

    def check(self, world_size: int) -> QwenShape:
        """As `PolicyConfig.check`."""
        shape = self.run.check()
        self.layout.check(shape, world_size)
        self.data.check()
        self.checkpoints.check()
        check_checkpoint(self.run, self.kind, ["policy"], shape)
        check_vocabulary(self.run.model, shape)
        return shape


def _check_same_tokens(name: str, folder: Path, shape: QwenShape, layout: Layout, world_size: int) -> None:
    """Check a model that reads the policy's token ids in the policy's layout."""
    if not (folder / "config.json").is_file():
        raise ValueError(f"{name}: got {str(folder)!r}, allowed: a folder with a config.json")
    own = read_shape(folder)
    check_hf(folder, own, head="scalar")
    if name == "reward_model" and not has_scalar_head(folder):
        raise ValueError(f"{name}: got {str(folder)!r}, allowed: a trained reward model ({SCORE} is missing)")
    layout.check(own, world_size)
    if own.vocab_size != shape.vocab_size:
        raise ValueError(f"{name}: vocab_size is {own.vocab_size}, allowed: {shape.vocab_size}, that of the policy")


def check_folder(name: str, folder: Path) -> None:
    """Make the folder of a setting.

    Raises:
        ValueError: it can't be made or written to.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        writable = os.access(folder, os.W_OK)
    except OSError as error:
        raise ValueError(f"{name}: got {str(folder)!r}, allowed: a folder that can be made ({error})") from error
    if not writable:
        raise ValueError(f"{name}: got {str(folder)!r}, allowed: a folder that can be written to")


def check_vocabulary(folder: Path, shape: QwenShape) -> None:
    """Check that every token id has a row in the embedding.

    Raises:
        ValueError: the tokenizer has more ids than the model.
    """
    highest = max(load_tokenizer(folder).get_vocab().values())
    if highest >= shape.vocab_size:
        raise ValueError(
            f"tokenizer of {str(folder)!r}: has id {highest}, allowed by vocab_size: below {shape.vocab_size}"
        )


def to_plain(value: Any) -> Any:
    """Return a config as plain JSON values."""
    if isinstance(value, Recipe):
        return value.describe()
    if dataclasses.is_dataclass(value):
        return {field.name: to_plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    return str(value) if isinstance(value, Path) else value


def _at_least(settings: Any, **bounds: int) -> None:
    for name, bound in bounds.items():
        if getattr(settings, name) < bound:
            raise ValueError(f"{name}: got {getattr(settings, name)}, allowed: from {bound}")


def _finite(settings: Any) -> None:
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{field.name}: got {value}, allowed: finite numbers")


def _one_of(settings: Any, **choices: tuple[str, ...]) -> None:
    for name, allowed in choices.items():
        if getattr(settings, name) not in allowed:
            raise ValueError(f"{name}: got {getattr(settings, name)!r}, allowed: {', '.join(allowed)}")
