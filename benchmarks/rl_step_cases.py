"""What `rl_step.py` compares on, and how its two sides talk to it. Light: a side imports no more than it needs.

A side is a process of its own that makes one step for each line it reads. Lengths of responses are forced on both: in
TRL by a logits processor of `generate`, in megarl by the limits of the requests.
"""

import json
import math
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

NUM_PROMPTS, GROUP_SIZE = 8, 8
NUM_PAIRS = 32
LR, WEIGHT_DECAY = 1e-4, 0.1
PAD, END = 0, 1
"""Ids of the tokenizer."""
OURS, REPEATED, CACHED = "megarl", "megarl, repeated prompts", "megarl, cached reference"
QUARTERS = "TRL, 4 micro-batches"
TOKENS_PER_PACK = {"tiny": 4096, "mid": 1024}
"""Of megarl's micro-batches: at mid size, where memory counts, at least a quarter of what a step trains on."""


@dataclass(frozen=True)
class Case:
    """What a step works on.

    Attributes:
        shape: of `train_step.SIZES`.
        prompt_tokens: of each prompt.
        new_tokens: of each response or answer; with `skewed`, at most, and a quarter of it on average.
        time_bars: for each of our sides, most of its CPU time in that of the first side of TRL.
    """

    algorithm: str
    shape: str
    prompt_tokens: int
    new_tokens: int
    time_bars: dict[str, float | None]
    skewed: bool = False

    @property
    def has_memory_bar(self) -> bool:
        """Whether a step needs much more memory than what the process imports."""
        return self.shape != "tiny" or self.prompt_tokens > 100

    @property
    def trl_sides(self) -> tuple[str, ...]:
        return ("TRL", QUARTERS) if self.algorithm == "grpo" else ("TRL", QUARTERS, "TRL, cached reference")

    def lengths(self, step: int) -> list[list[int]]:
        """Tokens of each response of a step, `NUM_PROMPTS` lists of `GROUP_SIZE`; skewed ones are geometric."""
        size = (NUM_PROMPTS, GROUP_SIZE)
        if not self.skewed:
            return torch.full(size, self.new_tokens).tolist()
        uniform = torch.rand(size, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        stays = 1.0 - 4.0 / self.new_tokens
        return (uniform.log() / math.log(stays)).ceil().clamp(1, self.new_tokens).long().tolist()


EQUAL, SKEWED, LONG = ({OURS: bar, REPEATED: None} for bar in (1.0, 0.60, 0.45))
PAIRS = {OURS: 0.95, CACHED: 0.75}
CASES = {
    "tiny equal": Case("grpo", "tiny", 16, 32, EQUAL),
    "tiny skewed": Case("grpo", "tiny", 16, 64, SKEWED, skewed=True),
    "tiny, prompt 512": Case("grpo", "tiny", 512, 32, LONG),
    "mid equal": Case("grpo", "mid", 16, 32, EQUAL),
    "mid skewed": Case("grpo", "mid", 16, 64, SKEWED, skewed=True),
    "tiny DPO": Case("dpo", "tiny", 16, 32, PAIRS),
    "mid DPO": Case("dpo", "mid", 16, 32, PAIRS),
}


def even_digits(prompt: str, response: str, answer: str) -> float:
    """Reward: the share of even digits, so that the responses of a group differ."""
    return sum(letter in "02468" for letter in response) / max(len(response), 1)


@dataclass(frozen=True)
class Step:
    """What a step did: its loss, and the tokens of its responses or answers."""

    loss: float
    num_tokens: int


@dataclass(frozen=True)
class SideArguments:
    """What the process of a side is started with, as words on its command line."""

    case: str
    folder: str
    side: str
    num_steps: str

    def words(self) -> list[str]:
        return list(asdict(self).values())


class Pace:
    """A side's end of its standard input and output: waits for the word to step, and tells what a step was.

    Everything else that the process prints goes to its standard error.
    """

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self._out = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)

    def wait(self) -> None:
        sys.stdin.readline()
        self._started = time.process_time(), time.perf_counter()

    def done(self, step: Step) -> None:
        cpu, wall = time.process_time() - self._started[0], time.perf_counter() - self._started[1]
        self._tell({**asdict(step), "cpu": cpu, "wall": wall})

    def end(self) -> None:
        lines = Path("/proc/self/status").read_text().splitlines()
        self._tell({"peak": next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))})

    def _tell(self, message: dict[str, Any]) -> None:
        self._out.write(json.dumps(message) + "\n")
        self._out.flush()


def run_side(serve: Callable[[Case, SideArguments, Pace], None]) -> None:
    """Run a side's process: `serve` makes the steps, at its pace."""
    arguments, pace = SideArguments(*sys.argv[1:]), Pace()
    serve(CASES[arguments.case], arguments, pace)
    pace.end()
