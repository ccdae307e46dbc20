"""TRL's side of `rl_step.py`; run by it."""

import json
import os
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import datasets
import torch
import transformers
from datasets import Dataset
from rl_step_cases import (
    END,
    GROUP_SIZE,
    LR,
    NUM_PAIRS,
    NUM_PROMPTS,
    QUARTERS,
    WEIGHT_DECAY,
    Case,
    Pace,
    SideArguments,
    Step,
    even_digits,
    run_side,
)
from torch import Tensor
from torch.utils.data import SequentialSampler
from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM, TrainerCallback
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer


def serve(case: Case, arguments: SideArguments, pace: Pace) -> None:
    folder = Path(arguments.folder)
    warnings.filterwarnings("ignore", category=FutureWarning)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    datasets.disable_progress_bars()
    num_parts = 4 if arguments.side == QUARTERS else 1
    settings = {
        "output_dir": str(folder / "trl"),
        "gradient_accumulation_steps": num_parts,
        "max_steps": int(arguments.num_steps),
        "learning_rate": LR,
        "weight_decay": WEIGHT_DECAY,
        "lr_scheduler_type": "constant",
        "optim": "adamw_torch",
        "logging_strategy": "no",
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": True,
        "bf16": False,
        "disable_tqdm": True,
        "gradient_checkpointing": False,
    }
    model = Qwen2ForCausalLM.from_pretrained(folder / "model", attn_implementation="sdpa")
    found: dict[str, Any] = {}
    build = _grpo if case.algorithm == "grpo" else _dpo
    trainer = build(case, folder, arguments.side, settings, model, found)
    compute_loss = trainer.compute_loss

    def keep_loss(*arguments: Any, **options: Any) -> Any:
        loss = compute_loss(*arguments, **options)
        found["loss"] = loss.detach() if num_parts == 1 else torch.nan  # one of a part says little
        return loss

    trainer.compute_loss = keep_loss
    trainer.add_callback(Paced(pace, found))
    trainer.train()


class Paced(TrainerCallback):
    """Lets the trainer step when it is told to."""

    def __init__(self, pace: Pace, found: dict[str, Any]):
        self.pace = pace
        self.found = found

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.pace.wait()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.pace.done(Step(float(self.found["loss"]), int(self.found["num_tokens"])))


def _grpo(case: Case, folder: Path, side: str, settings: dict, model: Any, found: dict[str, Any]) -> Any:
    config = GRPOConfig(
        **settings,
        per_device_train_batch_size=NUM_PROMPTS * GROUP_SIZE // settings["gradient_accumulation_steps"],
        num_generations=GROUP_SIZE,
        max_completion_length=case.new_tokens,
        beta=0.0,
        num_iterations=1,
        steps_per_generation=settings["gradient_accumulation_steps"],
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        loss_type="dapo",
        epsilon=0.2,
        epsilon_high=0.28,
        shuffle_dataset=False,
    )

    def reward(completions: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
        found["num_tokens"] = sum(len(ids) for ids in completion_ids)
        return [even_digits("", completion, "") for completion in completions]

    trainer = GRPOTrainer(
        model=model,
        args=config,
        train_dataset=Dataset.from_list(read(folder / "ordered prompts.jsonl")),
        processing_class=_loaded_tokenizer(folder),
        reward_funcs=[reward],
    )
    generate = model.generate

    def generate_forced(**inputs: Any) -> Tensor:
        lengths = torch.tensor(case.lengths(trainer.state.global_step)).flatten()
        force = _ForcedLengths(inputs["input_ids"].shape[1], lengths)
        return generate(**inputs, logits_processor=[force])

    model.generate = generate_forced
    return trainer


@dataclass(frozen=True)
class _ForcedLengths:
    """Logits processor: each row ends with its last token, not before."""

    prompt_tokens: int
    lengths: Tensor

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        ends = self.lengths <= input_ids.shape[1] - self.prompt_tokens + 1
        scores[:, END] = torch.where(ends, 0.0, -torch.inf)
        scores[ends, :END] = -torch.inf
        scores[ends, END + 1 :] = -torch.inf
        return scores


def _dpo(case: Case, folder: Path, side: str, settings: dict, model: Any, found: dict[str, Any]) -> Any:
    cached = "cached" in side
    config = DPOConfig(
        **settings,
        per_device_train_batch_size=NUM_PAIRS // settings["gradient_accumulation_steps"],
        beta=0.1,
        max_length=case.prompt_tokens + case.new_tokens,
        loss_type=["sigmoid"],
        precompute_ref_log_probs=cached,
    )
    reference = None if cached else Qwen2ForCausalLM.from_pretrained(folder / "model", attn_implementation="sdpa")
    trainer = DPOTrainer(
        model=model,
        ref_model=reference,
        args=config,
        train_dataset=Dataset.from_list(read(folder / "ordered pairs.jsonl")),
        processing_class=_loaded_tokenizer(folder),
    )
    trainer._get_train_sampler = lambda *_: SequentialSampler(trainer.train_dataset)
    found["num_tokens"] = 2 * NUM_PAIRS * case.new_tokens
    return trainer


def _loaded_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder / "model")
    tokenizer.model_input_names = ["input_ids", "attention_mask"]
    return tokenizer


def read(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


if __name__ == "__main__":
    run_side(serve)
