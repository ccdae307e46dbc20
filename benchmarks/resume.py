"""Does a run that is killed anywhere go on bit for bit?

    python benchmarks/resume.py
    python benchmarks/resume.py --kills 4 --seed 7

A tiny Qwen2 takes 6 steps with PPO (critic, several optimizer steps a step) and with DAPO (groups that are dropped and
replaced, surplus), on 2 data-parallel processes, in fp32. Each run is then taken again and killed with kill -9, all its
processes at once, at a random moment of a phase: while responses are generated, while the reward rule runs, between
mini-batches, while a checkpoint is written and training waits, and while one is written in the background. It is
started again with --resume, and must end with the same weights and the same metrics, to the last bit (times and memory
left out). Columns:
  went on from  the checkpoint that was loaded; "responses": those of the step's rollout were there, too
  lost          phases that were done and had to be done again, because their checkpoint was not yet on the disk
Bars: all equal; lost: at most the phase whose checkpoint was being written, and one more where it was written in the
background while training went on.

At the end a run on TP2 x PP2 is stopped by the file `stop` and goes on as DP2: its losses must agree with those of the
unbroken run to 1e-6.
"""

import argparse
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from common import ONE_THREAD_ON_CPU, ROOT, finish, print_table

from examples.make_tiny_qwen import main as make_tiny_qwen
from megarl.report import read_metrics

NUM_STEPS = 6
EVAL_EVERY = 2
LIMIT_SECONDS = 300.0
REWARD = """
import time
from pathlib import Path

def mixed(prompt, response, answer):
    with Path(__file__).with_suffix(".calls").open("a") as calls:
        calls.write(".")
    time.sleep(0.004)
    return float(len(response) % 2)
"""
COMMON = (
    *("--num-steps", str(NUM_STEPS), "--prompts-per-step", "8", "--max-prompt-tokens", "40", "--max-new-tokens", "12"),
    *("--eval-every", str(EVAL_EVERY), "--eval-max-prompts", "8", "--lr", "1e-3", "--max-tokens-per-pack", "512"),
    *("--no-require-finished", "--save-every", "1", "--save-every-updates", "1", "--seed", "5"),
)
FLAGS = {
    "ppo": ("--group-size", "2", "--num-mini-batches", "3"),
    "dapo": ("--group-size", "4", "--num-mini-batches", "2"),
}
IGNORED = re.compile(r"seconds|per_second|memory|stall")


@dataclass(frozen=True)
class Kill:
    """When a run is killed."""

    phase: str
    recipe: str
    save_async: bool


KILLS = (
    Kill("rollout", "ppo", True),
    Kill("writing", "dapo", False),
    Kill("reward", "dapo", True),
    Kill("update", "ppo", True),
    Kill("background", "ppo", True),
    Kill("rollout", "dapo", False),
    Kill("writing", "ppo", False),
    Kill("update", "dapo", False),
    Kill("background", "dapo", True),
    Kill("reward", "ppo", False),
    Kill("update", "ppo", False),
    Kill("background", "ppo", True),
)


class Job:
    """The ranks of a run, as processes of ours."""

    def __init__(self, recipe: str, folder: Path, output: Path, world_size: int, *flags: str):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
        command = [sys.executable, str(ROOT / "examples" / f"train_{recipe}.py"), "--model", str(folder / "model")]
        command += ["--prompts", str(folder / "train.jsonl"), "--eval-prompts", str(folder / "heldout.jsonl")]
        command += ["--reward", f"{folder / 'reward.py'}:mixed", "--output", str(output), *COMMON, *FLAGS[recipe]]
        self.processes = []
        for rank in range(world_size):
            names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "MASTER_PORT": port}
            environment = {**os.environ, **ONE_THREAD_ON_CPU, "PYTHONPATH": str(ROOT), "MASTER_ADDR": "127.0.0.1"}
            environment |= {name: str(value) for name, value in names.items()} | {"OMP_WAIT_POLICY": "PASSIVE"}
            log = (folder / f"{output.name}.{rank}.out").open("a")
            self.processes.append(
                subprocess.Popen([*command, *flags], env=environment, stdout=log, stderr=subprocess.STDOUT)
            )

    def wait(self) -> None:
        """Wait for a good end."""
        codes = [process.wait(LIMIT_SECONDS) for process in self.processes]
        if any(codes):
            raise SystemExit(f"a run ended with status {codes}: {self.processes[0].args}")

    @property
    def alive(self) -> bool:
        return all(process.poll() is None for process in self.processes)

    def kill(self) -> None:
        """Kill -9 all ranks at once."""
        for process in self.processes:
            process.send_signal(signal.SIGKILL)
        for process in self.processes:
            process.wait()


def make_files(folder: Path) -> None:
    """Write model, prompts and reward rule."""
    make_tiny_qwen(["--out", str(folder / "model"), "--num-layers", "4"])
    make_data = [sys.executable, str(ROOT / "examples/make_sort_data.py"), "--out", str(folder), "--num-train", "64"]
    make_data += ["--num-heldout", "8", "--num-demonstrations", "1", "--num-preferences", "1"]
    subprocess.run(make_data, check=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
    (folder / "reward.py").write_text(REWARD)


def read_log(output: Path) -> str:
    path = output / "logs" / "rank_0.log"
    return path.read_text(encoding="utf-8") if path.exists() else ""


def phases(log: str) -> list[str]:
    """Return the phases that a log says are done."""
    found = []
    for line in log.splitlines():
        match = re.search(r"megarl\.borders: step (\d+): (.*)done$", line)
        evaluated = match and int(match[1]) % EVAL_EVERY == 0
        if match and (match[2] or evaluated):
            found.append(f"{match[1]} {match[2].strip() or 'evaluation'}")
    return found


def wait_until(job: Job, event: Callable[[], bool], what: str) -> None:
    """Wait for an event in a running job."""
    deadline = time.monotonic() + LIMIT_SECONDS
    while not event():
        if not job.alive:
            raise SystemExit(f"the run ended before {what}")
        if time.monotonic() > deadline:
            raise SystemExit(f"waited {LIMIT_SECONDS} s for {what}")
        time.sleep(0.001)


def kill_in_phase(job: Job, kill: Kill, folder: Path, output: Path, draw: random.Random) -> None:
    """Kill a run at a random moment of a phase of a random step."""
    step = draw.randint(2, NUM_STEPS - 1)
    calls = folder / "reward.calls"
    wait_until(job, lambda: f"step {step - 1}: done" in read_log(output), f"step {step}")
    if kill.phase == "rollout":
        time.sleep(draw.uniform(0.0, 0.03))
    elif kill.phase == "reward":
        start, more = calls.stat().st_size, draw.randint(1, 12)
        wait_until(job, lambda: calls.stat().st_size >= start + more, "the reward rule")
    elif kill.phase == "update":
        update = draw.randint(1, 2)
        wait_until(job, lambda: f"step {step}: update {update} done" in read_log(output), f"update {update}")
        time.sleep(draw.uniform(0.0, 0.05))
    else:
        checkpoints = output / "checkpoints"
        wait_until(job, lambda: any(checkpoints.glob(".step_*.partial")), "a checkpoint")
        time.sleep(draw.uniform(0.0, 0.03))
    job.kill()


def result(output: Path) -> tuple[bytes, dict[int, dict[str, float]]]:
    """Return the weights (of the critic too) and the metrics of a run that ended, times left out."""
    weights = b"".join(path.read_bytes() for path in sorted(output.glob("*/model.safetensors")))
    records = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == list(range(1, NUM_STEPS + 1)), "not one record for each step"
    return weights, {
        record["step"]: {name: value for name, value in record.items() if not IGNORED.search(name)}
        for record in records
    }


def killed_run(kill: Kill, folder: Path, number: int, draw: random.Random) -> tuple[list[object], Path, bool]:
    """Kill a run and let it go on; returns its row, its folder, and whether it lost too much."""
    output = folder / f"kill {number}"
    flags = ("--save-async" if kill.save_async else "--no-save-async",)
    job = Job(kill.recipe, folder, output, 2, *flags)
    kill_in_phase(job, kill, folder, output, draw)
    before = read_log(output)
    writing = any((output / "checkpoints").glob(".step_*.partial"))
    Job(kill.recipe, folder, output, 2, *flags, "--resume").wait()
    after = read_log(output)[len(before) :]
    went_on = re.search(r"goes on from (?:checkpoint )?(\S+)", after)
    done = phases(before)
    lost = [phase for phase in phases(after) if phase in done]
    lost = [phase for phase in lost if not (phase.endswith("assessment") and kill.recipe == "dapo")]
    source = went_on[1] if went_on else "?"
    source += ", responses" if "were generated before" in after else ""
    mode = "background" if kill.save_async else "waiting"
    row = [kill.phase, kill.recipe, mode, done[-1], writing, source, ", ".join(lost) or "-"]
    return row, output, len(lost) > (2 if kill.save_async else 1)


def other_layout(folder: Path) -> float:
    """Return the largest difference of a loss between an unbroken run on TP2 x PP2 and one that went on as DP2."""
    unbroken, stopped = folder / "unbroken TP2xPP2", folder / "TP2xPP2 then DP2"
    layout = ("--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "2")
    Job("dapo", folder, unbroken, 4, *layout).wait()
    job = Job("dapo", folder, stopped, 4, *layout)
    wait_until(job, lambda: "step 3: rollout done" in read_log(stopped), "step 3")
    (stopped / "stop").touch()
    job.wait()
    Job("dapo", folder, stopped, 2, "--resume").wait()
    losses = [[record["loss"] for record in read_metrics(one).values()] for one in (unbroken, stopped)]
    return max(abs(one - other) for one, other in zip(*losses, strict=True))


def main() -> None:
    """Run it all and exit with status 1 unless every bar is met."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=len(KILLS), help="the first ones of the list (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the moments (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the numbers here (default: nowhere)")
    args = parser.parse_args()
    if not 1 <= args.kills <= len(KILLS):
        parser.error(f"--kills: got {args.kills}, allowed: 1 to {len(KILLS)}")
    draw, rows, problems = random.Random(args.seed), [], 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_files(folder)
        unbroken = {}
        for recipe in FLAGS:
            Job(recipe, folder, folder / recipe, 2).wait()
            unbroken[recipe] = result(folder / recipe)
        for number, kill in enumerate(KILLS[: args.kills], start=1):
            row, output, lost_too_much = killed_run(kill, folder, number, draw)
            weights, metrics = result(output)
            equal = [weights == unbroken[kill.recipe][0], metrics == unbroken[kill.recipe][1]]
            problems += (not all(equal)) + lost_too_much
            rows.append([*row, *("equal" if one else "DIFFERENT" for one in equal)])
            print(f"kill {number} of {args.kills}: {kill.phase}, {kill.recipe}: {rows[-1][-2:]}", file=sys.stderr)
        header = ["killed in", "recipe", "saving", "last phase done", "half-written", "went on from", "lost"]
        print_table([*header, "weights", "metrics"], rows)
        difference = other_layout(folder)
    print(f"\nTP2 x PP2, stopped in step 3, went on as DP2: losses differ by at most {difference:.1e} (bar 1e-6)")
    verdict = f"{args.kills} runs killed, {problems} of them not as they should be"
    numbers = {"killed": args.kills, "problems": problems, "largest_difference_of_layouts": difference}
    finish(verdict, problems == 0 and difference <= 1e-6, numbers, args.json)


if __name__ == "__main__":
    main()
