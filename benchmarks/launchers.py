"""Does the same run give the same numbers, bit for bit, whoever has started its ranks?

    python benchmarks/launchers.py
    python benchmarks/launchers.py --launchers torchrun mpirun

A tiny Qwen2 takes 3 steps with DAPO (groups that are dropped and replaced, several optimizer steps a step) on 4
processes, TP2 x DP2, in fp32, started in turn by

    torchrun --standalone --nproc-per-node 4
    mpirun -n 4                                      (MPICH's)
    srun -n 4                                        (over the 2 nodes of a private Slurm cluster on this host)

Metrics and weights are compared with those of the first; times and memory are left out. Bar: no difference. Where no
private Slurm cluster can run, srun is left out, and the table and the last line say so.
"""

import argparse
import json
import math
import os
import re
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

from common import ONE_THREAD_ON_CPU, ROOT, finish, make_model, make_prompts, no_nan, print_table

from tests.slurm.cluster import private_cluster, problem

LAUNCHERS = ("torchrun", "mpirun", "srun")
NUM_RANKS = 4
LIMIT_SECONDS = 600.0
IGNORED = re.compile(r"seconds|per_second|memory|stall")
FLAGS = (
    *("--num-steps", "3", "--prompts-per-step", "8", "--group-size", "4", "--num-mini-batches", "2"),
    *("--max-prompt-tokens", "40", "--max-new-tokens", "16", "--overlong-cache-tokens", "8", "--no-require-finished"),
    *("--reward", f"{ROOT / 'benchmarks' / 'common.py'}:checksum", "--lr", "1e-3", "--save-every", "0"),
    *("--tensor-model-parallel-size", "2", "--eval-max-prompts", "8"),
)

Records = dict[tuple[float, str], float]


def run(launcher: str, folder: Path, seed: int) -> Path:
    """Train under a launcher; returns the run folder."""
    output = folder / launcher
    program = [sys.executable, str(ROOT / "examples/train_dapo.py"), "--output", str(output), "--seed", str(seed)]
    program += ["--model", str(folder / "model"), "--prompts", str(folder / "train.jsonl")]
    program += ["--eval-prompts", str(folder / "heldout.jsonl"), *FLAGS]
    if launcher == "srun":
        with private_cluster(num_nodes=2) as cluster:
            srun = ["srun", "--nodes=2", f"--ntasks={NUM_RANKS}", "--ntasks-per-node=2", "--kill-on-bad-exit=1"]
            # Names of the private cluster's nodes resolve nowhere.
            start([*srun, *program], {**cluster.environment, "MASTER_ADDR": "127.0.0.1"})
    elif launcher == "mpirun":
        start([str(Path(sys.executable).parent / "mpirun"), "-n", str(NUM_RANKS), *program], dict(os.environ))
    else:
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(NUM_RANKS)]
        start([*torchrun, *program[1:]], dict(os.environ))
    return output


def start(command: list[str], environment: dict[str, str]) -> None:
    """Run a command to its end."""
    environment |= {**ONE_THREAD_ON_CPU, "OMP_WAIT_POLICY": "PASSIVE", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT_SECONDS,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(command[:6])} ... ended with status {done.returncode}:\n{done.stdout[-3000:]}")


def read_numbers(output: Path) -> Records:
    """Return every number of metrics.jsonl and summary.json that is no time and no memory, by step and name."""
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    lines.append({"step": math.inf, **json.loads((output / "summary.json").read_text(encoding="utf-8"))})
    return {
        (line["step"], name): float(value)
        for line in lines
        for name, value in line.items()
        if not IGNORED.search(name) and name != "status"
    }


def compare(first: Records, other: Records) -> tuple[float, int]:
    """Return the largest difference (infinity where one run lacks a number) and how many numbers differ in a bit."""
    names = first.keys() | other.keys()
    pairs = [(first.get(name, math.nan), other.get(name, math.inf)) for name in names]
    different = [(one, two) for one, two in pairs if struct.pack("d", one) != struct.pack("d", two)]
    return max((no_nan(abs(one - two)) for one, two in different), default=0.0), len(different)


def weights(output: Path) -> bytes:
    return (output / "hf/model.safetensors").read_bytes()


def main() -> None:
    """Run it all and exit with status 1 unless every bit is equal."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--launchers", nargs="+", choices=LAUNCHERS, default=list(LAUNCHERS), help="(all)")
    parser.add_argument("--seed", type=int, default=0, help="of weights, prompts and sampling (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the numbers here (default: nowhere)")
    args = parser.parse_args()
    reason = problem() if "srun" in args.launchers else None
    launchers = [name for name in dict.fromkeys(args.launchers) if name != "srun" or reason is None]
    if len(launchers) < 2:
        parser.error(f"--launchers: {', '.join(launchers)} can run here, wanted at least 2 to compare ({reason})")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_model(folder / "model", args.seed)
        make_prompts(folder / "train.jsonl", args.seed, 64)
        make_prompts(folder / "heldout.jsonl", args.seed + 1, 8)
        outputs = [run(launcher, folder, args.seed) for launcher in launchers]
        numbers = [read_numbers(output) for output in outputs]
        found = [(*compare(numbers[0], other), weights(outputs[0]) == weights(output))
                 for other, output in zip(numbers, outputs, strict=True)]  # fmt: skip
    rows: list[list[object]] = [
        [launcher, len(each), largest, different, "equal" if same else "DIFFERENT"]
        for launcher, each, (largest, different, same) in zip(launchers, numbers, found, strict=True)
    ]
    if reason is not None:
        rows.append(["srun", "not run", "-", "-", "-"])
    print_table(["launcher", "numbers", "largest difference", "differ", "weights"], rows)
    if reason is not None:
        print(f"srun was not run: {reason}")
    largest = max(each[0] for each in found)
    passed = all(different == 0 and same for _, different, same in found) and len(numbers[0]) > 0
    figure = f"largest difference of a metric between {', '.join(launchers)}: {largest:.1e} (bar 0, every bit equal)"
    finish(figure, passed, {"launchers": launchers, "largest_difference": largest, "srun_left_out": reason}, args.json)


if __name__ == "__main__":
    main()
