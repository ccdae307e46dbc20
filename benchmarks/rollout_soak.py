"""Is every request answered once, and as if it had been alone, when the engine is flooded?

2,000 requests with random prompts (1 to 700 tokens), limits (0 to 300) and stop tokens, in a random mixture of group
sizes and shared prompts, run in one engine whose KV cache holds a tenth of what they all need. Then each response runs
alone. Tokens must be equal, log-probs within the bar, and the process must not grow: the cache stays below its bound,
and resident memory in the second half of the work below what the first half needed, give or take the margin.
"""

import argparse
import os
import random
import tempfile
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import ExitStack
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

import psutil
import torch
from common import ONE_THREAD_ON_CPU, finish, make_model, no_nan, print_table

from megarl.progress import Progress
from parallel.launch import World, detect_world, running
from parallel.mesh import Layout, Mesh, build_mesh
from parallel.model import QwenModel, build_model
from parallel.qwen import read_shape
from parallel.weights import import_hf
from rollout.engine import Engine
from rollout.requests import Completion, Request
from rollout.sampling import SamplingParams

BAR = 1e-5
MEMORY_MARGIN = 0.1
LONGEST_PROMPT, HIGHEST_LIMIT, CONTEXT_LENGTH = 700, 300, 1024
PAGE_TOKENS = 32  # small ones, so that responses outgrow what admission leaves free, and give way
TIMEOUT = 600.0
alone_engine: Engine


def random_requests(num_requests: int, vocab_size: int, seed: int) -> list[Request]:
    """Requests for `num_requests` responses in all."""
    chance = random.Random(seed)
    requests: list[Request] = []
    total = 0
    while total < num_requests:
        prompt = tuple(chance.randrange(vocab_size) for _ in range(chance.randint(1, LONGEST_PROMPT)))
        num_samples = min(chance.choice([1, 1, 2, 4, 8]), num_requests - total)
        stops = tuple(chance.sample(range(vocab_size), chance.choice([0, 2, 8, 32])))
        limit = chance.randint(0, HIGHEST_LIMIT)
        requests.append(Request(len(requests), prompt, num_samples, max_new_tokens=limit, stop_token_ids=stops))
        total += num_samples
    return requests


def flood(engine: Engine, requests: list[Request], params: SamplingParams) -> tuple[list[Completion], dict[str, float]]:
    """Run all requests together; returns completions as they came, and figures of memory (MiB) and scheduling."""
    process, done = psutil.Process(), []
    resident: list[tuple[int, float]] = []
    largest_cache = 0
    num_responses = sum(request.num_samples for request in requests)
    with engine.start(params) as rollout, Progress("together", num_responses, rank=0) as progress:
        rollout.add(requests)
        while rollout.busy:
            finished = [completion for _, completion in rollout.step()]
            done += finished
            progress.update(len(done), {"cache MiB": rollout.cache_bytes / 2**20})
            largest_cache = max(largest_cache, rollout.cache_bytes)
            resident.append((len(done), process.memory_info().rss / 2**20))
        num_preempted = rollout.scheduler.num_preempted
    half = len(done) // 2
    first = max(size for number, size in resident if number <= half)
    second = max(size for number, size in resident if number > half)
    return done, {
        "gave way": num_preempted,
        "cache MiB": largest_cache / 2**20,
        "resident MiB, first half": first,
        "resident MiB, second half": second,
    }


def start_alone(folder: Path) -> None:
    """Give this process an engine of its own, which lives as long as the process."""
    global alone_engine
    torch.set_num_threads(1)
    world = ExitStack().enter_context(running(detect_world(), TIMEOUT))
    alone_engine = Engine(*build(folder, world), context_length=CONTEXT_LENGTH, keep_cache=True)


def run_alone(requests: list[Request], params: SamplingParams) -> list[Completion]:
    """Generate each response alone."""
    singles = [
        replace(request, num_samples=1, first_sample=index)
        for request in requests
        for index in range(request.num_samples)
    ]
    return [alone_engine.generate([single], params)[0] for single in singles]


def compare_alone(
    folder: Path, requests: list[Request], params: SamplingParams, together: list[Completion], num_processes: int
) -> tuple[int, float]:
    """Run each response alone; returns how many differ in tokens or reason, and the largest log-prob difference."""
    found = {(c.prompt_id, c.sample_index): c for c in together}
    num_different, num_done, gap = 0, 0, 0.0
    pool = ProcessPoolExecutor(num_processes, get_context("spawn"), start_alone, (folder,))
    with pool, Progress("alone", len(found), rank=0) as progress:
        parts = [requests[start : start + 4] for start in range(0, len(requests), 4)]
        for part in as_completed([pool.submit(run_alone, part, params) for part in parts]):
            for alone in part.result():
                other = found[alone.prompt_id, alone.sample_index]
                same = (alone.tokens, alone.finish_reason) == (other.tokens, other.finish_reason)
                num_different += not same
                if same and alone.tokens:
                    gap = max(gap, no_nan(float((alone.log_probs - other.log_probs).abs().max())))
                num_done += 1
            progress.update(num_done, {"different": num_different})
    return num_different, gap


def build(folder: Path, world: World) -> tuple[list[QwenModel], Mesh]:
    """Load the model of `folder`."""
    mesh = build_mesh(Layout(), world)
    models = build_model(read_shape(folder), mesh, torch.float32)
    import_hf(folder, models, mesh)
    return models, mesh


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-requests", type=int, default=2000, metavar="N", help="responses (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of weights, requests and sampling (default: %(default)s)")
    parser.add_argument(
        "--num-processes", type=int, default=os.cpu_count(), metavar="N", help="run alone in (default: all cores)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the numbers here (default: nowhere)")
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    os.environ |= ONE_THREAD_ON_CPU
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as root, running(detect_world(), TIMEOUT) as world:
        folder = Path(root) / "qwen2"
        make_model(folder, args.seed, "--max-positions", str(CONTEXT_LENGTH))
        models, mesh = build(folder, world)
        shape = models[0].shape
        requests = random_requests(args.num_requests, shape.vocab_size, args.seed)
        needed = sum(len(r.prompt) + r.num_samples * (r.max_new_tokens or 0) for r in requests)
        engine = Engine(
            models,
            mesh,
            CONTEXT_LENGTH,
            max_sequences=args.num_requests,
            max_cache_tokens=needed // 10,
            cache_page_tokens=PAGE_TOKENS,
        )
        params = SamplingParams(seed=args.seed)
        started = time.perf_counter()
        together, figures = flood(engine, requests, params)
        seconds = time.perf_counter() - started
        num_different, gap = compare_alone(folder, requests, params, together, args.num_processes)
    wanted = Counter((r.prompt_id, index) for r in requests for index in range(r.num_samples))
    answered_once = Counter((c.prompt_id, c.sample_index) for c in together) == wanted
    bound = engine.max_cache_tokens * 2 * shape.num_layers * shape.num_query_groups * shape.head_dim * 4 / 2**20
    reasons = Counter(completion.finish_reason for completion in together)
    rows = [
        ["responses", f"{len(together)} ({dict(reasons)})"],
        ["tokens", sum(len(completion.tokens) for completion in together)],
        ["seconds together", f"{seconds:.0f}"],
        ["cache bound MiB", f"{bound:.1f}"],
        *([name, f"{value:.1f}"] for name, value in figures.items()),
        ["different from alone", num_different],
        ["largest log-prob difference", gap],
    ]
    print_table(["", "value"], rows)
    grown = figures["resident MiB, second half"] / figures["resident MiB, first half"] - 1
    passed = answered_once and num_different == 0 and gap <= BAR and figures["gave way"] > 0
    passed = passed and figures["cache MiB"] <= bound and grown <= MEMORY_MARGIN
    figure = (
        f"{len(together)} of {sum(wanted.values())} answered{'' if answered_once else ', NOT each once'}, "
        f"{num_different} different from alone, log-probs within {gap:.1e} (bar {BAR:.0e}), memory {grown:+.1%}"
    )
    finish(figure, passed, {"bar": BAR, "rows": rows}, args.json)


if __name__ == "__main__":
    main()
