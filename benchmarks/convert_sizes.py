"""Part 2 of convert.py: time and memory of `megarl convert` at real sizes.

Each conversion is a process of its own: its time includes the start of Python, memory is the most that it held. `cp` of
the same files and a sync are timed in turn with both directions; the least time of each counts.
"""

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from common import print_table
from torch import Tensor

from parallel.hf_folder import TensorInfo, plan_shards, write_json, write_shards
from parallel.hf_tensors import all_rules
from parallel.qwen import QwenShape, hf_config
from parallel.rope import RopeSettings

SIZES = {  # layers, hidden, heads, kv heads, head size, ffn, vocabulary, tied
    "0.5B": (24, 896, 14, 2, 64, 4864, 151936, True),
    "1.5B": (28, 1536, 12, 2, 128, 8960, 151936, True),
    "32B width, 2 layers": (2, 5120, 40, 8, 128, 27648, 152064, False),
    "32B width, 4 layers": (4, 5120, 40, 8, 128, 27648, 152064, False),
    "32B width, 8 layers": (8, 5120, 40, 8, 128, 27648, 152064, False),
}
ROUNDS = 2
TIME_BAR, MEMORY_BAR, GROWTH_BAR = 2.0, 4 * 2**30, 1.2
MEASURED = """
import resource, sys
from megarl.__main__ import main
try:
    main(["convert", *sys.argv[1:]])
finally:
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
"""


def make_shape(name: str) -> QwenShape:
    layers, hidden, heads, groups, head_dim, ffn, vocab, tied = SIZES[name]
    rope = RopeSettings("default", 1e6)
    return QwenShape("qwen2", layers, hidden, heads, groups, head_dim, ffn, vocab, tied, 1e-6, 32768, rope)


def write_model(folder: Path, shape: QwenShape) -> int:
    """Write random weights with a config; returns their bytes."""
    infos = [
        TensorInfo(name, size, torch.bfloat16)
        for rule in all_rules(shape, "lm").values()
        for name, size in rule.tensors.items()
    ]

    def tensors() -> Iterator[tuple[str, Tensor]]:
        generator = torch.Generator().manual_seed(0)
        noise = torch.randint(-(2**15), 2**15, (2**20 + 7,), generator=generator, dtype=torch.int16) & -16385
        for info in infos:  # the noise again and again: of an odd length, so that rows differ; no NaN among its bits
            number = torch.Size(info.shape).numel()
            yield info.name, noise.repeat(number // len(noise) + 1)[:number].view(torch.bfloat16).view(info.shape)

    folder.mkdir(parents=True)
    write_shards(folder, tensors(), plan_shards(infos, 5 * 10**9))
    write_json(folder / "config.json", hf_config(shape, torch.bfloat16))
    return sum(info.num_bytes for info in infos)


@dataclass(frozen=True)
class Measured:
    """Seconds and peak bytes of a process."""

    seconds: float
    peak: int


def convert(*words: object) -> Measured:
    """Run `megarl convert`; it must succeed."""
    started = time.perf_counter()
    command = [sys.executable, "-c", MEASURED, *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"megarl convert {words} ended with status {done.returncode}:\n{done.stderr[-3000:]}")
    return Measured(time.perf_counter() - started, int(done.stdout.split()[-1]))


def copy_plainly(source: Path, target: Path) -> float:
    """Return the seconds that `cp` takes; like a conversion it ends when everything is on the disk."""
    started = time.perf_counter()
    subprocess.run(["cp", "-r", source, target], check=True)
    subprocess.run(["sync", "-f", target], check=True)
    seconds = time.perf_counter() - started
    shutil.rmtree(target)
    return seconds


def warm(folder: Path) -> None:
    """Read all files once, so that they lie in the system's cache if they fit."""
    subprocess.run(["sync", "-f", folder], check=True)
    for path in folder.rglob("*"):
        if path.is_file():
            subprocess.run(["cat", path], stdout=subprocess.DEVNULL, check=True)


def measure(name: str, scratch: Path) -> dict[str, float]:
    """Convert a model of a size there and back, in turn with `cp`; it must come back bit for bit."""
    source, checkpoint, back = (scratch / part for part in ("source", "checkpoint", "back"))
    size = write_model(source, make_shape(name))
    plain, there, again = [], [], []
    for number in range(ROUNDS):
        warm(source)
        plain.append(copy_plainly(source, scratch / "copy"))
        warm(source)
        there.append(convert("to-megatron", source, checkpoint))
        warm(checkpoint)
        again.append(convert("to-hf", checkpoint, back))
        if number == 0:
            convert("verify", source, back)
        shutil.rmtree(checkpoint)
        shutil.rmtree(back)
    shutil.rmtree(source)
    return {
        "bytes": size,
        "cp": min(plain),
        "there": min(each.seconds for each in there),
        "back": min(each.seconds for each in again),
        "peak": max(each.peak for each in [*there, *again]),
    }


def main(names: list[str], scratch: Path) -> tuple[str, bool, dict[str, Any]]:
    """Run the part; returns its figure, whether it passed, and its numbers."""
    found: dict[str, dict[str, float]] = {}
    missed = []
    start_up = measure_start_up(scratch)
    for name in names:
        row = found[name] = measure(name, scratch)
        print(json.dumps({"size": name, **{key: round(value, 2) for key, value in row.items()}}), flush=True)
        slowest = max(row["there"], row["back"]) / row["cp"]
        if not slowest <= TIME_BAR:
            missed.append(f"{name}: {slowest:.2f} times cp (bar {TIME_BAR})")
        if not row["peak"] < MEMORY_BAR:
            missed.append(f"{name}: {row['peak'] / 2**20:.0f} MiB (bar {MEMORY_BAR / 2**20:.0f})")
    small, large = (found.get(f"32B width, {layers} layers") for layers in (2, 8))
    if small and large and not large["peak"] <= GROWTH_BAR * small["peak"]:
        missed.append(f"8 layers take {large['peak'] / small['peak']:.2f} times the memory of 2 (bar {GROWTH_BAR})")
    rows = [
        [
            name,
            f"{row['bytes'] / 1e9:.2f}",
            *(f"{row[key]:.1f}" for key in ("cp", "there", "back")),
            *(f"{row[key] / row['cp']:.2f}" for key in ("there", "back")),
            *(f"{(row[key] - start_up) / row['cp']:.2f}" for key in ("there", "back")),
            f"{row['peak'] / 2**20:.0f}",
        ]
        for name, row in found.items()
    ]
    header = ["model", "GB", "cp s", "to-megatron s", "to-hf s", "of cp's", "of cp's", "without start", "", "peak MiB"]
    print_table(header, rows)
    print(f"start: a conversion of next to nothing takes {start_up:.1f} s")
    figure = "conversions are exact; " + ("; ".join(missed) or "all within their bars")
    return figure, not missed, {"sizes": found, "start_up": start_up}


def measure_start_up(scratch: Path) -> float:
    """Return the seconds that a conversion of next to nothing takes."""
    shape = QwenShape("qwen2", 1, 64, 1, 1, 64, 64, 64, True, 1e-6, 64, RopeSettings("default", 1e6))
    write_model(scratch / "source", shape)
    seconds = []
    for _ in range(3):
        seconds.append(convert("to-megatron", scratch / "source", scratch / "checkpoint").seconds)
        shutil.rmtree(scratch / "checkpoint")
    shutil.rmtree(scratch / "source")
    return min(seconds)
