"""How fast is rollout on several processes of this machine, and what do pipeline lanes bring?

128 prompts of 64 tokens with one response of 32 tokens each, on a Qwen2 of 8 layers and hidden size 512 (fp32, random
weights), one thread per process: on one process, on 2 tensor ranks, on 2 pipeline ranks with one and with two lanes in
flight, and on 2 data ranks with half of the prompts each. PP2 with one and with two lanes runs by turns in the same
processes; the best of the repetitions counts. Wall time: run it on a quiet machine.
"""

import argparse
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from common import finish, on_layouts, print_table

from parallel.mesh import Mesh
from parallel.model import build_model
from parallel.qwen import QwenShape
from parallel.rope import RopeSettings
from rollout.engine import Engine
from rollout.replicas import SharedRollout
from rollout.requests import Request
from rollout.sampling import SamplingParams

BAR = 1.5
SHAPE = QwenShape(
    family="qwen2",
    num_layers=8,
    hidden_size=512,
    num_attention_heads=8,
    num_query_groups=4,
    head_dim=64,
    ffn_hidden_size=1408,
    vocab_size=8192,
    tie_word_embeddings=True,
    rms_norm_eps=1e-6,
    max_position_embeddings=1024,
    rope=RopeSettings("default", 1e6),
)
NUM_PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 128, 64, 32
LANES = {"TP1": (1,), "TP2": (1,), "PP2": (1, 2), "DP2": (1,)}


def measure(mesh: Mesh, repetitions: int) -> dict[int, float]:
    """Return the best seconds of a rollout for each number of lanes."""
    models = build_model(SHAPE, mesh, torch.float32)
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(SHAPE.vocab_size, (NUM_PROMPTS, PROMPT_TOKENS), generator=generator)
    requests = [Request(number, tuple(prompt)) for number, prompt in enumerate(drawn.tolist())]
    params = SamplingParams(max_new_tokens=NEW_TOKENS)
    (name,) = [name for name in LANES if _is(mesh, name)]
    seconds = {lanes: float("inf") for lanes in LANES[name]}
    engines = {
        lanes: Engine(models, mesh, context_length=256, num_lanes=lanes, keep_cache=True) for lanes in LANES[name]
    }
    for repetition in range(repetitions + 1):
        for lanes, engine in engines.items():
            dist.barrier()
            started = time.perf_counter()
            with SharedRollout(engine, params) as shared:
                shared.add(requests)
                while shared.busy:
                    shared.run_to_border()
            dist.barrier()
            if repetition:  # the first one makes caches and warms up
                seconds[lanes] = min(seconds[lanes], time.perf_counter() - started)
    return seconds


def _is(mesh: Mesh, name: str) -> bool:
    sizes = {"TP": mesh.tensor_size, "PP": mesh.pipeline_size, "DP": mesh.data_size}
    return all(size == int(name[2]) if axis == name[:2] else size == 1 for axis, size in sizes.items())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--repetitions", type=int, default=3, metavar="N", help="of each rollout (default: %(default)s)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the numbers here (default: nowhere)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = on_layouts(measure, list(LANES), Path(folder), args.repetitions)
    best = {(name, lanes): max(rank[lanes] for rank in ranks) for name, ranks in found.items() for lanes in LANES[name]}
    tokens = NUM_PROMPTS * NEW_TOKENS
    rows = [
        [name, len(found[name]), lanes, f"{seconds:.2f}", f"{tokens / seconds:.0f}", f"{best['TP1', 1] / seconds:.2f}"]
        for (name, lanes), seconds in best.items()
    ]
    print_table(["layout", "processes", "lanes", "seconds", "tokens/s", "against one process"], rows)
    gain = best["PP2", 1] / best["PP2", 2]
    figure = f"PP2: two lanes are {gain:.2f} times as fast as one (bar {BAR})"
    finish(figure, gain >= BAR, {"bar": BAR, "rows": rows}, args.json)


if __name__ == "__main__":
    main()
