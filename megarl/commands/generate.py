"""Generate responses to prompts with a model folder, for example one that is being trained.

    megarl generate --model runs/demo/grpo/hf --prompt "310173>" --num-samples 4
    torchrun --nproc-per-node 2 -m megarl generate --tensor-model-parallel-size 2 --model DIR --prompt TEXT

Responses are shown as they finish. The same flags give the same responses on every layout.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from megarl.cli import add_flags, read_flags
from megarl.commands import refusals, write
from megarl.data.prompts import encode_prompt, user_message
from megarl.generate import Choice, load_completer
from megarl.model_folder import ModelFolder
from parallel.launch import detect_world, running
from parallel.mesh import Layout, build_mesh
from parallel.options import option
from rollout.sampling import SamplingParams


@dataclass(frozen=True)
class GenerateSettings:
    """What is generated, and how it is shown."""

    num_samples: int = option(1, "responses to each prompt")
    max_new_tokens: int = option(256, "limit of a response, in tokens")
    temperature: float = option(1.0, "divides the logits; 0: greedy")
    top_p: float = option(1.0, "nucleus: mass of the most probable tokens kept; 1 keeps all")
    top_k: int = option(0, "number of most probable tokens kept; 0 keeps all")
    min_p: float = option(0.0, "least probability kept, relative to the most probable token; 0 keeps all")
    seed: int = option(0, "of all random numbers")
    system: str | None = option(None, "system message before each prompt")
    raw: bool = option(False, "continue the prompts as they are, without the chat template")
    dtype: Literal["fp32", "bf16"] = option("fp32", "of weights and activations")
    max_sequences: int = option(256, "responses decoded at a time")
    json: bool = option(False, "write a JSON object for each response, one a line")
    timeout_seconds: float = option(600.0, "longest wait of one collective, in seconds")

    def check(self) -> None:
        """Check what `SamplingParams` doesn't.

        Raises:
            ValueError: names the field, its value and the values allowed.
        """
        for name, value in (
            ("num_samples", self.num_samples),
            ("max_new_tokens", self.max_new_tokens),
            ("max_sequences", self.max_sequences),
        ):
            if value < 1:
                raise ValueError(f"{name}: got {value}, allowed: from 1")
        if not self.timeout_seconds > 0:
            raise ValueError(f"timeout_seconds: got {self.timeout_seconds}, allowed: above 0")
        if not -(2**63) <= self.seed < 2**63:
            raise ValueError(f"seed: got {self.seed}, allowed: 64-bit integers")
        if self.raw and self.system is not None:
            raise ValueError(f"system: got {self.system!r}, allowed with raw: none")


@dataclass(frozen=True)
class Job:
    """Everything `main` was given."""

    model: Path
    prompts: list[str]
    stop: list[str]
    settings: GenerateSettings
    layout: Layout

    def check(self, world_size: int) -> tuple[ModelFolder, list[list[int]], SamplingParams]:
        """Check all values before any process group exists; returns the model, the prompts' ids and how to sample.

        Raises:
            ValueError: names the field, its value and the values allowed.
        """
        settings = self.settings
        settings.check()
        if not all(self.prompts):
            raise ValueError("prompt: got '', allowed: text, not empty")
        model = ModelFolder.check(self.model, self.layout, world_size)
        if self.layout.data_parallel_size(world_size) != 1:
            raise ValueError(
                f"world size: got {world_size}, allowed: the ranks of one copy of the model, "
                f"{self.layout.model_parallel_size} in this layout"
            )
        params = SamplingParams(
            temperature=settings.temperature,
            top_p=settings.top_p,
            top_k=settings.top_k,
            min_p=settings.min_p,
            max_new_tokens=settings.max_new_tokens,
            stop_token_ids=model.stop_token_ids,
            stop_strings=tuple(self.stop),
            seed=settings.seed,
        )
        prompts = [self._encode(model, prompt) for prompt in self.prompts]
        longest, most = max(map(len, prompts)) + settings.max_new_tokens, model.shape.max_position_embeddings
        if longest > most:
            raise ValueError(f"prompt + max_new_tokens: got {longest} tokens, allowed by the model: at most {most}")
        return model, prompts, params

    def _encode(self, model: ModelFolder, prompt: str) -> list[int]:
        if self.settings.raw:
            return model.tokenizer.encode(prompt)
        system = self.settings.system
        before = () if system is None else ({"role": "system", "content": system},)
        return encode_prompt(model.tokenizer, (*before, *user_message(prompt)))

    def show(self, choice: Choice) -> None:
        """Write a response."""
        num_tokens, reason = len(choice.tokens), choice.finish_reason
        if not self.settings.json:
            place = f"prompt {choice.prompt_index}, sample {choice.sample_index}"
            write(f"[{place}: {num_tokens} tokens, {reason}]\n{choice.text}\n")
            return
        fields = {
            "prompt_index": choice.prompt_index,
            "sample_index": choice.sample_index,
            "prompt": self.prompts[choice.prompt_index],
            "text": choice.text,
            "finish_reason": reason,
            "num_tokens": num_tokens,
            "log_prob": sum(choice.log_probs),
        }
        write(json.dumps(fields, ensure_ascii=False))


def parse(arguments: Sequence[str]) -> Job:
    """Read a command line; a wrong one ends the process with status 2 and the reason."""
    parser = argparse.ArgumentParser(
        prog="megarl generate",
        description=__doc__,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", type=Path, required=True, metavar="DIR", help="HF folder of a Qwen model")
    parser.add_argument("--prompt", action="append", required=True, metavar="TEXT", help="may be given several times")
    parser.add_argument(
        "--stop", action="append", default=[], metavar="STRING", help="text that ends a response; may be given again"
    )
    add_flags(parser, GenerateSettings())
    add_flags(parser, Layout())
    found = parser.parse_args(arguments)
    settings, layout = read_flags(found, GenerateSettings()), read_flags(found, Layout())
    return Job(found.model, found.prompt, found.stop, settings, layout)


def main(arguments: Sequence[str]) -> None:
    """Generate and show."""
    job = parse(arguments)
    with refusals():
        world = detect_world()
        model, prompts, params = job.check(world.world_size)
    settings = job.settings
    context_length = max(map(len, prompts)) + params.max_new_tokens
    with running(world, settings.timeout_seconds):
        mesh = build_mesh(job.layout, world, settings.timeout_seconds)
        completer = load_completer(model, mesh, settings.dtype, context_length, settings.max_sequences)
        for choice in completer.stream(prompts, settings.num_samples, params):
            if mesh.rank == 0:
                job.show(choice)
