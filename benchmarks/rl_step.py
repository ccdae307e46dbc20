"""Time and memory of one GRPO step and of one DPO step against TRL.

    python benchmarks/rl_step.py
    python benchmarks/rl_step.py --cases "tiny skewed" "mid DPO"

A GRPO step generates 8 responses to each of 8 prompts, scores them and trains once on all. A DPO step trains on 32
pairs; its reference is computed in the step, or was before ("cached"; compared with TRL computing it). Both sides have
the same Qwen2 (random weights, fp32), prompts, lengths, AdamW and one thread. Each is a process of its own; they step
by turns, and CPU time counts: the ratio is the median over the pairs of steps, to TRL with the whole batch at once; for
information TRL with 4 micro-batches, as megarl has them at mid size (1,024 tokens). Memory is the most that a process
held, imports included; its bar holds where the model is of mid size or the prompts are long: elsewhere the imports of
either side are most of it. "repeated prompts" is the option `--no-share-prompts`. The losses of DPO must agree.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from common import ONE_THREAD_ON_CPU, finish, no_nan, print_table
from rl_step_cases import CASES, END, NUM_PAIRS, NUM_PROMPTS, PAD, QUARTERS, Case, SideArguments
from sizes import SIZES
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from megarl.data.prompts import order

MEMORY_BAR = 0.75
HEADER = ("case, side", "CPU s", "wall s", "of TRL's", "bar", "peak MiB", "of TRL's", "bar")


def write_inputs(folder: Path, case: Case, num_steps: int) -> None:
    """Write model, tokenizer, prompts and pairs (also in the order of training): random weights, and random digits, one
    token each."""
    layers, hidden, heads, groups, ffn, vocab = SIZES[case.shape]
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=ffn,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=groups,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=END,
        pad_token_id=PAD,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder / "model")
    _tokenizer(vocab).save_pretrained(folder / "model")
    draw = random.Random(0)

    def digits(number: int) -> str:
        return "".join(draw.choice("0123456789") for _ in range(number))

    prompts = [{"prompt": digits(case.prompt_tokens), "answer": ""} for _ in range(num_steps * NUM_PROMPTS)]
    pairs = [
        {"prompt": digits(case.prompt_tokens), **{name: digits(case.new_tokens - 1) for name in ("chosen", "rejected")}}
        for _ in range(num_steps * NUM_PAIRS)
    ]
    for name, rows in (("prompts", prompts), ("pairs", pairs)):
        ordered = [rows[row] for row in order(len(rows), 0, 0)]
        for file, content in ((name, rows), (f"ordered {name}", ordered)):
            text = "".join(json.dumps(row) + "\n" for row in content)
            (folder / f"{file}.jsonl").write_text(text, encoding="utf-8")


def _tokenizer(vocab_size: int) -> PreTrainedTokenizerFast:
    letters = ["<pad>", "<eos>", *(chr(code) for code in range(32, 94))]
    vocab = {word: number for number, word in enumerate([*letters, *(f"<{n}>" for n in range(64, vocab_size))])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>", unk_token="<pad>", padding_side="left"
    )


@dataclass(frozen=True)
class Side:
    """A running side."""

    name: str
    process: subprocess.Popen[str]

    @classmethod
    def start(cls, arguments: SideArguments) -> "Side":
        file = "rl_step_trl.py" if arguments.side.startswith("TRL") else "rl_step_megarl.py"
        command = [sys.executable, str(Path(__file__).with_name(file)), *arguments.words()]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        return cls(arguments.side, process)

    def step(self) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write("step\n")
        self.process.stdin.flush()
        return self._read()

    def end(self) -> int:
        """Return the peak bytes."""
        peak = self._read()["peak"]
        self.process.wait()
        return peak

    def _read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"the process of {self.name!r} has ended with status {self.process.wait()}")
        return json.loads(line)


def compare(name: str, num_pairs: int) -> dict[str, dict[str, float]]:
    """Step all sides by turns; returns for each side its medians, and its ratios to TRL in time and memory."""
    case, num_steps = CASES[name], num_pairs + 1  # the first step warms up
    with tempfile.TemporaryDirectory() as scratch:
        write_inputs(Path(scratch), case, num_steps)
        names = (*case.time_bars, *case.trl_sides)
        sides = [Side.start(SideArguments(name, scratch, side, str(num_steps))) for side in names]
        turns = [[side.step() for side in sides] for _ in range(num_steps)]
        peaks = [side.end() for side in sides]
    for turn in turns:
        _check_same_work(case, turn)
    reference = len(case.time_bars)  # the first side of TRL
    found = {}
    for number, side in enumerate(sides):
        found[side.name] = {
            "seconds": statistics.median(turn[number]["cpu"] for turn in turns[1:]),
            "wall": statistics.median(turn[number]["wall"] for turn in turns[1:]),
            "ratio": statistics.median(turn[number]["cpu"] / turn[reference]["cpu"] for turn in turns[1:]),
            "peak": peaks[number],
            "memory ratio": peaks[number] / peaks[reference],
            "loss": turns[-1][number]["loss"],
        }
    return found


def _check_same_work(case: Case, turn: Sequence[dict[str, Any]]) -> None:
    tokens = {step["num_tokens"] for step in turn}
    assert len(tokens) == 1, f"the sides had different numbers of tokens: {tokens}"
    names = (*case.time_bars, *case.trl_sides)
    losses = {name: step["loss"] for name, step in zip(names, turn, strict=True) if name != QUARTERS}
    if case.algorithm == "dpo":  # GRPO draws other tokens
        assert no_nan(max(losses.values()) - min(losses.values())) < 1e-3, f"the losses of DPO differ: {losses}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--cases", nargs="+", choices=CASES, default=list(CASES), metavar="NAME", help=f"of {', '.join(CASES)} (all)"
    )
    parser.add_argument("--pairs", type=int, default=7, help="timed steps of each side (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the numbers here (default: nowhere)")
    args = parser.parse_args()
    os.environ |= ONE_THREAD_ON_CPU
    found = {}
    for name in args.cases:
        found[name] = compare(name, args.pairs)
        print_table(HEADER, _rows(name, found[name]))
        print()
    missed = [
        f"{name}, {side}: {figure} {value:.2f} (bar {bar})"
        for name, sides in found.items()
        for side, figure, value, bar in _figures(name, sides)
        if not value <= bar
    ]
    figure = "time and memory of a step against TRL: " + ("; ".join(missed) or "all within their bars")
    finish(figure, not missed, {"cases": found}, args.json)


def _rows(name: str, sides: dict[str, dict[str, float]]) -> list[list[str]]:
    bars = {(side, figure): str(bar) for side, figure, _, bar in _figures(name, sides)}
    return [
        [
            f"{name}, {side}",
            *(f"{row[column]:.3f}" for column in ("seconds", "wall", "ratio")),
            bars.get((side, "time"), ""),
            f"{row['peak'] / 2**20:.0f}",
            f"{row['memory ratio']:.2f}",
            bars.get((side, "memory"), ""),
        ]
        for side, row in sides.items()
    ]


def _figures(name: str, sides: dict[str, dict[str, float]]) -> list[tuple[str, str, float, float]]:
    """Every figure with a bar: side, what it is, value, bar."""
    case = CASES[name]
    barred = {side: bar for side, bar in case.time_bars.items() if bar is not None}
    times = [(side, "time", sides[side]["ratio"], bar) for side, bar in barred.items()]
    if not case.has_memory_bar:
        return times
    return times + [(side, "memory", sides[side]["memory ratio"], MEMORY_BAR) for side in barred]


if __name__ == "__main__":
    main()
