"""What the benchmarks share: layouts and starting them on the CPU, a tiny model with prompts, tables, exit status."""

import argparse
import json
import math
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.multiprocessing as multiprocessing
from safetensors.torch import load_file, save_file

sys.path.insert(0, str(Path(__file__).parents[1]))  # before this folder, whose rollout.py would hide the package

from megarl.config import PolicyConfig, RolloutSettings, RunSettings
from megarl.data.prompts import write_prompts
from megarl.data.tasks import SortDigits
from megarl.recipes import GRPO
from megarl.trainer import PolicyTrainer
from parallel.launch import detect_world, running
from parallel.mesh import Layout, Mesh, build_mesh
from parallel.optimizer import OptimizerSettings

ROOT = Path(__file__).parents[1]
TIMEOUT_SECONDS = 600.0
ONE_THREAD_ON_CPU = {
    "CUDA_VISIBLE_DEVICES": "",
    "OMP_NUM_THREADS": "1",
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",  # without it megatron-core advises, on the CPU too, to set it
}
"""Environment of all processes: these benchmarks are about numbers, not speed."""


@dataclass(frozen=True)
class Case:
    """A layout on a number of ranks."""

    layout: Layout
    world_size: int


CASES = {
    "TP1": Case(Layout(), 1),
    "TP2": Case(Layout(2), 2),
    "PP2": Case(Layout(1, 2), 2),
    "DP2": Case(Layout(), 2),
    "PP2xVP2": Case(Layout(1, 2, 2), 2),
    "TP2xPP2": Case(Layout(2, 2), 4),
    "TP2xPP2xDP2+SP": Case(Layout(2, 2, sequence_parallel=True), 8),
    "TP2+SP": Case(Layout(2, sequence_parallel=True), 2),
    "TP4": Case(Layout(4), 4),
    "PP4": Case(Layout(1, 4), 4),
    "PP2 3+1": Case(Layout(1, 2, num_layers_in_first_pipeline_stage=3, num_layers_in_last_pipeline_stage=1), 2),
    "PP3 1+2+1": Case(Layout(1, 3, num_layers_in_first_pipeline_stage=1, num_layers_in_last_pipeline_stage=1), 3),
}
"""Tensor, pipeline, data and virtual pipeline sizes; SP is sequence parallelism, 3+1 an uneven split of 4 layers."""

TRAINING_CASES = tuple(list(CASES)[:7])


def make_parser(description: str, layouts: Sequence[str] = TRAINING_CASES) -> argparse.ArgumentParser:
    """Return a parser with the flags that all benchmarks over layouts take; `layouts` are those run by default."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    names, default = ", ".join(CASES), ", ".join(layouts)
    parser.add_argument(
        "--layouts", nargs="+", choices=CASES, default=list(layouts), metavar="NAME", help=f"of {names} ({default})"
    )
    parser.add_argument("--seed", type=int, default=0, help="of weights, prompts and sampling (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the numbers here (default: nowhere)")
    return parser


def print_table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print rows under a header; floats get three significant digits, the first column is aligned to the left."""
    lines = [header, *([f"{cell:.2e}" if isinstance(cell, float) else str(cell) for cell in row] for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    for line in lines:
        first, *rest = (cell.rjust(width) for cell, width in zip(line, widths, strict=True))
        print("  ".join([first.strip().ljust(widths[0]), *rest]).rstrip(), flush=True)


def no_nan(value: float) -> float:
    """Return infinity in place of NaN: a NaN is lost in a maximum, and must not pass below a bar."""
    return math.inf if math.isnan(value) else value


def finish(figure: str, passed: bool, numbers: dict[str, Any], json_file: Path | None) -> NoReturn:
    """Print the figure the benchmark is about as the last line and end the process, with status 1 below the bar."""
    if json_file is not None:
        result = {"figure": figure, "passed": passed, **numbers}
        json_file.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(f"\n{figure}: {'passed' if passed else 'FAILED'}", flush=True)
    sys.exit(0 if passed else 1)


def on_layouts(
    function: Callable[..., Any], names: Sequence[str], folder: Path, *arguments: Any
) -> dict[str, list[Any]]:
    """Call `function(mesh, *arguments)` on every rank of each layout; gloo processes on the CPU, one thread each.

    Processes are started once for each world size. `function` must be a module's own, so that they find it by name.

    Args:
        folder: scratch space; must exist.

    Returns: for each layout, in the order of `names`, what the ranks returned.
    """
    os.environ |= ONE_THREAD_ON_CPU | {"MASTER_ADDR": "127.0.0.1"}
    for world_size in sorted({CASES[name].world_size for name in names}):
        chosen = [name for name in names if CASES[name].world_size == world_size]
        # A port for each layout: a store that is just being closed must not take the next one's ranks.
        jobs = list(zip(chosen, _free_ports(len(chosen)), strict=True))
        multiprocessing.spawn(_run_rank, (world_size, function, jobs, folder, arguments), nprocs=world_size)
    return {name: [_load(folder, name, rank) for rank in range(CASES[name].world_size)] for name in names}


def _run_rank(
    rank: int,
    world_size: int,
    function: Callable[..., Any],
    jobs: list[tuple[str, int]],
    folder: Path,
    arguments: Sequence[Any],
) -> None:
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_RANK": str(rank)}
    for name, port in jobs:
        os.environ["MASTER_PORT"] = str(port)
        with running(detect_world(), TIMEOUT_SECONDS) as world:
            result = function(build_mesh(CASES[name].layout, world), *arguments)
        torch.save(result, folder / f"{name}.{rank}.pt")


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [listener.getsockname()[1] for listener in sockets]
    for listener in sockets:
        listener.close()
    return ports


def _load(folder: Path, name: str, rank: int) -> Any:
    path = folder / f"{name}.{rank}.pt"
    result = torch.load(path, weights_only=False)
    path.unlink()
    return result


def run_example(name: str, *flags: str, num_processes: int = 0, log: Path | None = None) -> None:
    """Run a script of `examples/`, under torchrun if `num_processes` is given; its output goes to `log`, or nowhere.

    Raises:
        RuntimeError: it failed; holds the end of its output.
    """
    command = [sys.executable]
    if num_processes:
        command += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_processes)]
    environment = os.environ | ONE_THREAD_ON_CPU
    command += [str(ROOT / "examples" / name), *flags]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    if log is not None:
        log.write_text(done.stdout, encoding="utf-8")
    if done.returncode:
        raise RuntimeError(f"examples/{name} ended with status {done.returncode}:\n{done.stdout[-3000:]}")


def make_model(folder: Path, seed: int, *flags: str) -> None:
    """Write a Qwen of 4 layers, all of whose weights matter: logits of order one, no zero bias, no norm of ones.

    One token in twelve ends a response, so that responses differ in length.

    Args:
        flags: further ones of `examples/make_tiny_qwen.py`.
    """
    run_example("make_tiny_qwen.py", "--out", str(folder), "--num-layers", "4", *flags)
    generator = torch.Generator().manual_seed(seed)
    tensors = load_file(folder / "model.safetensors")
    for name in sorted(tensors):
        around, scale = (1.0, 0.2) if "norm" in name else (0.0, 0.2 if name.endswith("bias") else 0.1)
        tensors[name] = around + scale * torch.randn(tensors[name].shape, generator=generator)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    stops = list(range(0, len(tensors["model.embed_tokens.weight"]), 12))
    generation = folder / "generation_config.json"
    generation.write_text(json.dumps(json.loads(generation.read_text()) | {"eos_token_id": stops}), encoding="utf-8")


def make_prompts(path: Path, seed: int, count: int) -> None:
    """Write prompts of 2 to 12 digits."""
    write_prompts(path, [SortDigits(2 + index % 11).example(seed, index) for index in range(count)])


def checksum(prompt: str, response: str, answer: str) -> float:
    """Reward of a model that knows nothing: a number from 0 to 6 that depends on every letter of the response."""
    return float(sum(ord(letter) * (place + 1) for place, letter in enumerate(response)) % 7)


def make_trainer(
    mesh: Mesh, model: Path, prompts: Path, max_tokens_per_pack: int, dtype: str = "fp32", seed: int = 0
) -> PolicyTrainer:
    """Return a GRPO trainer: steps of 13 groups of 4 responses (neither divides evenly over 2 data ranks), learnt in
    3 mini-batches."""
    run = RunSettings(model=model, dtype=dtype, seed=seed, max_tokens_per_pack=max_tokens_per_pack)  # type: ignore[arg-type]
    rollout = RolloutSettings(
        prompts=prompts,
        reward=f"{Path(__file__)}:checksum",
        require_finished=False,
        prompts_per_step=13,
        group_size=4,
        max_prompt_tokens=40,
        max_new_tokens=24,
        temperature=0.9,
        num_mini_batches=3,
    )
    config = PolicyConfig(run, rollout, mesh.layout, OptimizerSettings(lr=1e-4), GRPO)
    return PolicyTrainer(config, config.check(mesh.world_size), mesh)
