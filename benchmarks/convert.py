"""Time, memory and exactness of `megarl convert` on models of real size with random weights.

    python benchmarks/convert.py
    python benchmarks/convert.py --sizes 0.5B "32B width, 2 layers" --folder /scratch

For each size: a Hugging Face folder of random bf16 weights is written, copied by `cp` (warm cache), converted to a
checkpoint and back, and compared. Each conversion is a process of its own; its time includes the start of Python,
memory is the most that it held. Bars: at most twice the time of `cp` plus what a conversion of nothing takes; memory
below 4 GiB, and at 8 layers of the 32B width at most 1.2 times that at 2 layers; equal bit for bit.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from common import finish, print_table
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
TIME_BAR, MEMORY_BAR, GROWTH_BAR = 2.0, 4 * 2**30, 1.2
MEASURED = """
import resource, sys
from megarl.__main__ import main
try:
    main(["convert", *sys.argv[1:]])
finally:
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
"""


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
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return Measured(time.perf_counter() - started, int(done.stdout.split()[-1]))


def measure(name: str, scratch: Path) -> dict[str, float]:
    """Convert a model of a size there and back."""
    layers, hidden, heads, groups, head_dim, ffn, vocab, tied = SIZES[name]
    rope = RopeSettings("default", 1e6)
    shape = QwenShape("qwen2", layers, hidden, heads, groups, head_dim, ffn, vocab, tied, 1e-6, 32768, rope)
    source, copy, checkpoint, back = (scratch / part for part in ("source", "copy", "checkpoint", "back"))
    size = write_model(source, shape)
    seconds = []
    for _ in range(2):  # the first one warms up
        shutil.rmtree(copy, ignore_errors=True)
        started = time.perf_counter()
        subprocess.run(["cp", "-r", source, copy], check=True)
        subprocess.run(["sync", "-f", copy], check=True)  # a conversion ends when everything is on the disk
        seconds.append(time.perf_counter() - started)
    shutil.rmtree(copy)
    there = convert("to-megatron", source, checkpoint)
    again = convert("to-hf", checkpoint, back)
    convert("verify", source, back)
    for folder in (source, checkpoint, back):
        shutil.rmtree(folder)
    return {
        "bytes": size,
        "cp": seconds[-1],
        "there": there.seconds,
        "back": again.seconds,
        "peak": max(there.peak, again.peak),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = ", ".join(SIZES)
    parser.add_argument(
        "--sizes", nargs="+", choices=SIZES, default=list(SIZES), metavar="NAME", help=f"of {names} (all)"
    )
    parser.add_argument("--folder", type=Path, help="scratch space, up to 45 GB (default: the system's)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the numbers here (default: nowhere)")
    args = parser.parse_args()
    found, missed = {}, []
    with tempfile.TemporaryDirectory(dir=args.folder) as scratch:
        start_up = measure_start_up(Path(scratch))
        for name in args.sizes:
            row = found[name] = measure(name, Path(scratch))
            slowest = (max(row["there"], row["back"]) - start_up) / row["cp"]
            print(json.dumps({"size": name, **{key: round(value, 2) for key, value in row.items()}}), flush=True)
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
            f"{row['bytes'] / row['there'] / 1e9:.2f}",
            f"{row['peak'] / 2**20:.0f}",
        ]
        for name, row in found.items()
    ]
    print_table(["model", "GB", "cp s", "to-megatron s", "to-hf s", "GB/s", "peak MiB"], rows)
    print(f"\na conversion of a tiny model takes {start_up:.1f} s")
    figure = "conversions are exact; " + ("; ".join(missed) or "all within their bars")
    finish(figure, not missed, {"sizes": found, "start_up": start_up}, args.json)


def measure_start_up(scratch: Path) -> float:
    """Return the seconds that a conversion of next to nothing takes."""
    shape = QwenShape("qwen2", 1, 64, 1, 1, 64, 64, 64, True, 1e-6, 64, RopeSettings("default", 1e6))
    write_model(scratch / "source", shape)
    seconds = convert("to-megatron", scratch / "source", scratch / "checkpoint").seconds
    for part in ("source", "checkpoint"):
        shutil.rmtree(scratch / part)
    return seconds


if __name__ == "__main__":
    main()
