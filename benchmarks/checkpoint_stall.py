"""How long does training wait for a checkpoint, and how fast is it written?

    python benchmarks/checkpoint_stall.py
    python benchmarks/checkpoint_stall.py --layers 24 --saves 5

A Qwen2 of 768 hidden units in fp32, weights and Adam's moments, on one process: saved so that training waits, saved in
the background while training goes on, and a plain copy of the same bytes by `dd conv=fsync` to the same disk, in turn.
  waits      seconds until training may go on (smallest of all saves)
  writes     seconds until the checkpoint is whole and on the disk, checksums and all
  GiB/s      of writing
  step       seconds of a training step that runs while a checkpoint is written, over one that runs alone
Bars: in the background training waits at most a third as long; writing while training waits runs at 0.4 of dd's speed
at least, though each byte is also read once more for its checksum.
"""

import argparse
import statistics
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from common import finish, print_table

from parallel.checkpoint import Checkpoints, Saved
from parallel.checkpoint_folder import CheckpointSettings
from parallel.launch import detect_world, running
from parallel.log_probs import score_tokens
from parallel.mesh import Layout, build_mesh
from parallel.model import build_model
from parallel.optimizer import OptimizerSettings, Trainable
from parallel.pack import pack_sequences
from parallel.qwen import read_shape
from parallel.schedule import forward_backward

GIB = 2**30
MOST_STALL, LEAST_SPEED = 1 / 3, 0.4


@dataclass
class Figures:
    """Seconds of one way of saving, of each save."""

    waits: list[float]
    writes: list[float]
    steps: list[float]


def loss(model, hidden, pack):
    return -score_tokens(model, hidden, pack)[0].mean(), {}


def train_step(trainable: Trainable, pack) -> float:
    """Take a step; returns its seconds."""
    started = time.perf_counter()
    trainable.zero_grad()
    forward_backward(trainable.chunks, [pack], loss)
    trainable.step(1e-4)
    return time.perf_counter() - started


def save(trainable: Trainable, folder: Path, source: Path, in_background: bool, num_saves: int, pack) -> Figures:
    """Save again and again; in the background with training steps meanwhile."""
    settings = CheckpointSettings(save_async=in_background, keep_last=1)
    owner = Checkpoints(folder, trainable.mesh, {"policy": Saved(trainable, source)}, settings)
    figures = Figures([], [], [])
    for number in range(num_saves):
        started = time.perf_counter()
        owner.save(f"step_{number:06d}", {}, {})
        figures.waits.append(time.perf_counter() - started)
        while in_background and not owner.idle:
            figures.steps.append(train_step(trainable, pack))
        owner.wait()
        figures.writes.append(time.perf_counter() - started)
    owner.close()
    return figures


def copy_with_dd(folder: Path, num_bytes: int, num_copies: int) -> float:
    """Return the seconds of the fastest copy of so many bytes from memory to the disk."""
    file, seconds = folder / "copy", []
    for _ in range(num_copies):
        started = time.perf_counter()
        count = f"count={num_bytes // 2**20}"
        command = ["dd", "if=/dev/zero", f"of={file}", "bs=1M", count, "conv=fsync", "status=none"]
        subprocess.run(command, check=True)
        seconds.append(time.perf_counter() - started)
        file.unlink()
    return min(seconds)


def write_model(folder: Path, num_layers: int) -> None:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        hidden_size=768,
        num_attention_heads=12,
        num_key_value_heads=2,
        intermediate_size=3072,
        num_hidden_layers=num_layers,
        vocab_size=32_000,
        tie_word_embeddings=True,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)


def main() -> None:
    """Measure and exit with status 1 unless both bars are met."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=12, help="of the model (default: %(default)s)")
    parser.add_argument("--saves", type=int, default=3, help="of each way (default: %(default)s)")
    parser.add_argument("--output", type=Path, help="folder on the disk to measure (default: a temporary one)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the numbers here (default: nowhere)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=args.output) as name, running(detect_world()) as world:
        folder = Path(name)
        write_model(folder / "model", args.layers)
        mesh = build_mesh(Layout(), world)
        shape = read_shape(folder / "model")
        trainable = Trainable(build_model(shape, mesh, torch.float32), mesh, OptimizerSettings(lr=1e-4))
        tokens = torch.arange(256) % 1000
        pack = pack_sequences([tokens], [tokens > 0])
        alone = statistics.median(train_step(trainable, pack) for _ in range(3))
        waiting = save(trainable, folder / "waiting", folder / "model", False, args.saves, pack)
        files = (folder / "waiting").glob("*/*/*.distcp")
        num_bytes = sum(path.stat().st_size for path in files)
        dd_seconds = copy_with_dd(folder, num_bytes, args.saves)
        background = save(trainable, folder / "background", folder / "model", True, args.saves, pack)
    rows = [
        ["training waits", min(waiting.waits), min(waiting.writes), num_bytes / GIB / min(waiting.writes), "-"],
        [
            "in the background",
            min(background.waits),
            min(background.writes),
            num_bytes / GIB / min(background.writes),
            statistics.median(background.steps) / alone if background.steps else "-",
        ],
        ["dd conv=fsync", "-", dd_seconds, num_bytes / GIB / dd_seconds, "-"],
    ]
    print(f"a checkpoint of {num_bytes / GIB:.2f} GiB; a training step alone: {alone:.2f} s\n")
    print_table(["saving", "waits s", "writes s", "GiB/s", "step"], rows)
    stall, speed = min(background.waits) / min(waiting.waits), dd_seconds / min(waiting.writes)
    figure = (
        f"in the background training waits {stall:.3f} as long (bar {MOST_STALL:.2f}); "
        f"{speed:.2f} of dd's speed (bar {LEAST_SPEED})"
    )
    finish(figure, stall <= MOST_STALL and speed >= LEAST_SPEED, {"stall": stall, "speed": speed}, args.json)


if __name__ == "__main__":
    main()
