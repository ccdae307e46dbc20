"""Part 3 of convert.py: a Hugging Face folder into a running model and out again, by ours and by mbridge.

Both get the same megatron-core model of one rank, in bf16 on the CPU. mbridge knows Transformer Engine's names of the
two norms of a layer; those of the torch spec are added to its table. Each run is a process of its own; the time is that
of loading and saving alone, until all is on the disk, memory the most that the process held, model included.
"""

import json
import os
import resource
import shutil
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from common import ONE_THREAD_ON_CPU, print_table
from convert_sizes import make_shape, warm, write_model

from megarl.conversion import differences
from parallel.launch import detect_world, running
from parallel.mesh import Layout, Mesh, build_mesh
from parallel.model import QwenModel, build_model
from parallel.qwen import read_shape
from parallel.weights import export_hf, import_hf

SIZES = ("0.5B", "1.5B")
ROUNDS = 3
LAYER = "model.layers.{layer_number}."


def ours(source: Path, target: Path, model: QwenModel, mesh: Mesh) -> None:
    import_hf(source, [model], mesh)
    export_hf(target, [model], mesh, source)


def mbridge(source: Path, target: Path, model: QwenModel, mesh: Mesh) -> None:
    from mbridge import AutoBridge
    from mbridge.core.parallel_states import ParallelStates
    from mbridge.models.qwen2 import Qwen2Bridge

    Qwen2Bridge._MLP_MAPPING |= {"pre_mlp_layernorm.weight": [LAYER + "post_attention_layernorm.weight"]}
    Qwen2Bridge._OTHER_MAPPING |= {"input_layernorm.weight": [LAYER + "input_layernorm.weight"]}
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment, return-value]
    alone = dict.fromkeys(("tp_group", "pp_group", "cp_group", "ep_group", "etp_group"), dist.group.WORLD)
    bridge = AutoBridge.from_pretrained(source, parallel_states=ParallelStates(vpp_size=None, **alone))
    bridge.load_weights([model], str(source))
    bridge.save_weights([model], str(target))
    for path in target.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())


CONVERTERS = {"ours": ours, "mbridge": mbridge}


def convert(name: str, source: Path, target: Path) -> None:
    """Run one conversion and print its seconds and the peak bytes of this process."""
    with running(detect_world(), 600.0) as world:
        mesh = build_mesh(Layout(), world)
        (model,) = build_model(read_shape(source), mesh, torch.bfloat16)
        started = time.perf_counter()
        CONVERTERS[name](source, target, model, mesh)
        seconds = time.perf_counter() - started
    print(json.dumps({"seconds": seconds, "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}))


def run(name: str, source: Path, target: Path) -> dict[str, float]:
    """Convert in a process of its own."""
    command = [sys.executable, __file__, name, str(source), str(target)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | ONE_THREAD_ON_CPU)
    if done.returncode:
        raise RuntimeError(f"{name} ended with status {done.returncode}:\n{done.stderr[-3000:]}")
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


def main(scratch: Path) -> tuple[str, bool, dict[str, Any]]:
    """Run the part; returns its figure, whether it passed, and its numbers."""
    if find_spec("mbridge") is None:
        return "mbridge is not installed (pip install 'mbridge>=0.15,<0.16')", False, {}
    rows, slowest, num_unequal = [], 0.0, 0
    for size in SIZES:
        source = scratch / "source"
        num_bytes = write_model(source, make_shape(size))
        found: dict[str, list[dict[str, float]]] = {name: [] for name in CONVERTERS}
        unequal = {}
        for _ in range(ROUNDS):
            for name, results in found.items():
                warm(source)
                results.append(run(name, source, scratch / name))
                unequal[name] = len(list(differences(source, scratch / name)))
                shutil.rmtree(scratch / name)
        seconds = {name: min(each["seconds"] for each in results) for name, results in found.items()}
        for name, results in found.items():
            peak = max(each["peak"] for each in results)
            cells = (f"{num_bytes / 1e9:.2f}", f"{seconds[name]:.1f}", f"{seconds[name] / seconds['mbridge']:.2f}")
            rows.append([f"{size}, {name}", *cells, f"{peak / 2**20:.0f}", unequal[name] or "equal"])
        slowest = max(slowest, seconds["ours"] / seconds["mbridge"])
        num_unequal += unequal["ours"]
        shutil.rmtree(source)
    print_table(["there and back", "GB", "s", "of mbridge's", "peak MiB", "tensors that differ"], rows)
    figure = f"at most {slowest:.2f} of mbridge's time (bar 1), {num_unequal} tensors differ"
    return figure, slowest <= 1 and num_unequal == 0, {"slowest": slowest, "rows": rows}


if __name__ == "__main__":
    convert(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
