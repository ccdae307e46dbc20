"""Does every example improve its own measure, on the task of the demo?

    python benchmarks/examples_learn.py
    python benchmarks/examples_learn.py --examples ppo dapo --seeds 0

A tiny Qwen2 sorts 6 digits, on 2 data-parallel processes. SFT starts from random weights; everything else from the SFT
model, which has seen demonstrations of which half are wrong. Measures, on held-out data but for SFT:
  sft           loss of the first and of the last 10 steps
  grpo, dapo, ppo   accuracy of sampled responses
  dpo           share of pairs whose preferred answer has the larger implicit reward (0 before: all rewards are 0)
  reward_model  share of pairs whose preferred answer has the larger reward (a new head starts anywhere around a half)
What counts is the gain: the share of the way from the start to the best value (accuracy 1, loss 0) that a run goes.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from common import finish, print_table, run_example

from megarl.report import read_metrics

ADAM = ("--weight-decay", "0", "--adam-beta2", "0.98")
ROLLOUT = (
    *("--prompts-per-step", "32", "--group-size", "8", "--max-prompt-tokens", "40", "--max-new-tokens", "8"),
    *("--num-mini-batches", "4", "--num-steps", "120"),
    *("--lr", "7e-4", "--lr-warmup-steps", "40", "--lr-decay-style", "linear"),
    *("--lr-decay-start", "160", "--lr-decay-steps", "480", *ADAM),
)
PAIRS = ("--batch-size", "64", "--lr", "5e-4", "--lr-warmup-steps", "10", *ADAM)


@dataclass(frozen=True)
class Example:
    """How an example is run and what its measure must do.

    Attributes:
        flags: but for model, output, seed and data.
        measure: (run folder) -> the measure before and after.
        least_gain: bar of (after - before) / (best - before).
        best: value of the measure that cannot be bettered.
    """

    flags: tuple[str, ...]
    measure: Callable[[Path], tuple[float, float]]
    least_gain: float
    best: float = 1.0

    def gain(self, before: float, after: float) -> float:
        return (after - before) / (self.best - before)


def summary_pair(name: str) -> Callable[[Path], tuple[float, float]]:
    """Measure `name` of a run's summary, before and after."""

    def read(folder: Path) -> tuple[float, float]:
        summary = json.loads((folder / "summary.json").read_text())
        return summary[f"{name}_before"], summary[f"{name}_after"]

    return read


def first_and_last_loss(folder: Path) -> tuple[float, float]:
    losses = [record["loss"] for record in read_metrics(folder).values()]
    return sum(losses[:10]) / 10, sum(losses[-10:]) / 10


EXAMPLES = {
    "sft": Example(
        ("--num-steps", "240", "--batch-size", "64", "--lr", "3e-3", "--lr-warmup-steps", "20", *ADAM),
        first_and_last_loss,
        least_gain=0.5,
        best=0.0,
    ),
    "grpo": Example(ROLLOUT, summary_pair("accuracy"), least_gain=0.7),
    "dapo": Example(ROLLOUT, summary_pair("accuracy"), least_gain=0.7),
    "ppo": Example(
        (*ROLLOUT, "--prompts-per-step", "256", "--group-size", "1", "--lam", "1", "--critic-lr", "1e-3"),
        summary_pair("accuracy"),
        least_gain=0.7,
    ),
    "dpo": Example(
        (*PAIRS, "--num-steps", "150", "--beta", "0.1", "--nll", "1"),
        summary_pair("accuracy"),
        least_gain=0.9,
    ),
    "reward_model": Example((*PAIRS, "--num-steps", "150"), summary_pair("accuracy"), least_gain=0.9),
}


def data_flags(name: str, data: Path) -> tuple[str, ...]:
    """Flags that name an example's files."""
    if name == "sft":
        return ("--demonstrations", str(data / "demonstrations.jsonl"))
    if name in ("dpo", "reward_model"):
        pairs = (data / "preferences.jsonl", data / "heldout_preferences.jsonl")
        return ("--preferences", str(pairs[0]), "--eval-preferences", str(pairs[1]))
    return ("--prompts", str(data / "train.jsonl"), "--eval-prompts", str(data / "heldout.jsonl"))


def run(name: str, model: Path, data: Path, output: Path, seed: int) -> tuple[float, float, float]:
    """Train an example on 2 processes; returns its measure before and after, and the seconds it took in all."""
    started = time.perf_counter()
    flags = ("--model", str(model), "--output", str(output), "--seed", str(seed), *data_flags(name, data))
    run_example(f"train_{name}.py", *flags, *EXAMPLES[name].flags, num_processes=2, log=output.with_suffix(".log"))
    return *EXAMPLES[name].measure(output), time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--examples", nargs="+", choices=EXAMPLES, default=list(EXAMPLES), help="(default: all)")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2], help="(default: 0 1 2)")
    parser.add_argument("--output", type=Path, help="keep the runs in this new folder (default: they are removed)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the numbers here (default: nowhere)")
    args = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        for seed in args.seeds:
            folder = (args.output or Path(scratch)) / f"seed_{seed}"
            folder.mkdir(parents=True)
            run_example("make_tiny_qwen.py", "--out", str(folder / "tiny"), "--seed", str(seed))
            run_example("make_sort_data.py", "--out", str(folder / "data"), "--seed", str(seed))
            for name in ["sft", *(name for name in args.examples if name != "sft")]:
                model = folder / ("tiny" if name == "sft" else "sft/hf")
                before, after, seconds = run(name, model, folder / "data", folder / name, seed)
                gain = EXAMPLES[name].gain(before, after)
                rows.append((name, seed, before, after, gain, seconds, gain >= EXAMPLES[name].least_gain))
                print(f"seed {seed}, {name}: {before:.3f} -> {after:.3f} in {seconds:.0f} s", flush=True)
    header = ("example", "seed", "before", "after", "gain", "bar", "seconds", "")
    table = [
        (n, s, f"{b:.3f}", f"{a:.3f}", f"{g:.2f}", EXAMPLES[n].least_gain, f"{t:.0f}", "passed" if ok else "FAILED")
        for n, s, b, a, g, t, ok in sorted(rows)
    ]
    print_table(header, table)
    failed = [f"{name} (seed {seed})" for name, seed, *_, ok in rows if not ok]
    figure = f"{len(rows) - len(failed)} of {len(rows)} runs improved their measure beyond the bar"
    finish(figure, not failed, {"rows": rows}, args.json)


if __name__ == "__main__":
    main()
