"""Speed of one training step against plain PyTorch, and memory of the log-prob pass, on one process.

    python benchmarks/train_step.py

Step: forward, backward and AdamW on 64 packed sequences of 48 tokens, every token scored. Plain PyTorch is
transformers' Qwen2ForCausalLM (SDPA) on the same weights and tokens as a [64, 48] batch, cross entropy on full logits,
`clip_grad_norm_` and torch's AdamW. Both run in turn, A B A B, one thread; the ratio is the
median of the pairs' ratios.

Memory: resident bytes added at the peak by forward and backward of the log-probs of 2,048 tokens at Qwen's vocabulary
of 151,936, chunked and by full fp32 logits, each in a process of its own.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.nn.functional as F
from common import finish, print_table
from sizes import SIZES
from torch import Tensor
from transformers import Qwen2ForCausalLM

from megarl.aggregation import weighted_sum
from parallel.launch import detect_world, running
from parallel.log_probs import score_tokens, vocab_parallel_log_probs
from parallel.mesh import Layout, Mesh, build_mesh
from parallel.model import QwenModel, build_model
from parallel.optimizer import OptimizerSettings, Trainable
from parallel.pack import Pack, pack_sequences
from parallel.qwen import QwenShape
from parallel.rope import RopeSettings
from parallel.schedule import forward_backward
from parallel.weights import export_hf

NUM_SEQUENCES, LENGTH = 64, 48
BARS = {"tiny": 1.5, "mid": 1.15}
METHODS = ("chunked", "full")
MEMORY_TOKENS, MEMORY_HIDDEN, MEMORY_VOCAB = 2048, 896, 151936


def qwen_shape(layers: int, hidden: int, heads: int, groups: int, ffn: int, vocab: int) -> QwenShape:
    """A tied Qwen2 of the given sizes."""
    rope = RopeSettings("default", 10000.0)
    return QwenShape("qwen2", layers, hidden, heads, groups, hidden // heads, ffn, vocab, True, 1e-6, 4096, rope)


def megarl_step(shape: QwenShape, mesh: Mesh, tokens: Tensor) -> tuple[Callable[[], float], Trainable]:
    """Return one training step of ours, which returns its loss."""
    policy = Trainable(build_model(shape, mesh, torch.float32), mesh, OptimizerSettings(lr=1e-4, weight_decay=0.1))
    mask = torch.ones(LENGTH, dtype=torch.bool)
    mask[0] = False
    pack = pack_sequences(list(tokens), [mask] * len(tokens))
    weights = torch.full((len(pack.scored),), 1.0 / len(pack.scored))

    def loss(model: QwenModel, hidden: Tensor, pack: Pack) -> tuple[Tensor, dict[str, Tensor]]:
        total = weighted_sum(-score_tokens(model, hidden, pack)[0], weights)
        return total, {"loss": total.detach().clone()}

    def step() -> float:
        policy.zero_grad()
        kept = forward_backward(policy.chunks, [pack], loss)
        policy.step(1e-4)
        return kept[0]["loss"].item()

    return step, policy


def plain_step(shape: QwenShape, weights: Path, tokens: Tensor) -> Callable[[], float]:
    """Return the same step in transformers and PyTorch."""
    model = Qwen2ForCausalLM.from_pretrained(weights, attn_implementation="sdpa")
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.1)

    def step() -> float:
        optimizer.zero_grad()
        logits = model(input_ids=tokens, use_cache=False).logits[:, :-1]
        loss = F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    return step


def compare_speed(name: str, mesh: Mesh, num_pairs: int, folder: Path) -> dict[str, float]:
    """Time both steps in turn; returns medians in seconds and the ratio."""
    shape = qwen_shape(*SIZES[name])
    torch.manual_seed(0)
    tokens = torch.randint(0, shape.vocab_size, (NUM_SEQUENCES, LENGTH))
    ours, policy = megarl_step(shape, mesh, tokens)
    export_hf(folder / name, policy.models, mesh)
    plain = plain_step(shape, folder / name, tokens)
    first = [step() for step in (ours, plain)]
    assert abs(first[0] - first[1]) < 1e-4, f"the two steps differ: losses {first}"
    pairs = [(seconds(ours), seconds(plain)) for _ in range(num_pairs)]
    median = [statistics.median(column) for column in zip(*pairs, strict=True)]
    return {"megarl": median[0], "plain": median[1], "ratio": statistics.median(a / b for a, b in pairs)}


def seconds(step: Callable[[], float]) -> float:
    started = time.perf_counter()
    step()
    return time.perf_counter() - started


def peak_bytes(method: str) -> int:
    """Return the resident bytes that forward and backward of the log-probs add at their peak, in this process."""
    generator = torch.Generator().manual_seed(0)
    shape = qwen_shape(1, MEMORY_HIDDEN, 14, 2, 64, MEMORY_VOCAB)
    with running(detect_world()) as world:
        model = build_model(shape, build_mesh(Layout(), world), torch.float32)[0]
        rows = torch.randn(MEMORY_TOKENS, MEMORY_HIDDEN, generator=generator).requires_grad_()
        targets = torch.randint(0, MEMORY_VOCAB, (MEMORY_TOKENS,), generator=generator)
        weight = model.output_weight()
        weight.grad = torch.zeros_like(weight)  # both methods need it: not counted
        before = reset_peak()
        if method == "chunked":
            log_probs = vocab_parallel_log_probs(model, rows, targets)[0]
        else:
            log_probs = (rows @ weight.T).float().log_softmax(-1).gather(1, targets[:, None])[:, 0]
        log_probs.mean().backward()
        return status_bytes("VmHWM") - before


def reset_peak() -> int:
    """Let the kernel's peak start again from now; returns the resident bytes of now."""
    Path("/proc/self/clear_refs").write_text("5")
    return status_bytes("VmRSS")


def status_bytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def compare_memory() -> dict[str, int]:
    """Measure both methods, each in a fresh process."""
    command = [sys.executable, __file__, "--memory"]
    runs = {name: subprocess.run([*command, name], capture_output=True, text=True, check=True) for name in METHODS}
    return {name: int(run.stdout.split()[-1]) for name, run in runs.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--pairs", type=int, default=15, help="timed pairs of steps (default: %(default)s)")
    parser.add_argument("--sizes", nargs="+", default=list(SIZES), choices=SIZES, help="shapes (default: all)")
    parser.add_argument("--json", type=Path, help="file for the figures")
    parser.add_argument("--memory", choices=METHODS, help="only print the peak bytes of one method")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.memory:
        print(peak_bytes(args.memory))
        return
    with running(detect_world()) as world, tempfile.TemporaryDirectory() as folder:
        mesh = build_mesh(Layout(), world)
        speed = {name: compare_speed(name, mesh, args.pairs, Path(folder)) for name in args.sizes}
    memory = compare_memory()
    rows = [
        (
            name,
            *(f"{1e3 * row[column]:.1f}" for column in ("megarl", "plain")),
            f"{row['ratio']:.3f}",
            f"{BARS[name]:.2f}",
        )
        for name, row in speed.items()
    ]
    print_table(("training step", "megarl ms", "plain ms", "ratio", "bar"), rows)
    share = memory["chunked"] / memory["full"]
    print(f"\nlog-probs of {MEMORY_TOKENS} tokens, vocabulary {MEMORY_VOCAB}")
    print_table(("method", "peak MiB added"), [(name, f"{size / 2**20:.0f}") for name, size in memory.items()])
    passed = all(row["ratio"] <= BARS[name] for name, row in speed.items()) and share < 1
    figures = ", ".join(f"{name} {row['ratio']:.3f} (bar {BARS[name]})" for name, row in speed.items())
    figure = f"time against plain PyTorch: {figures}; log-prob memory {share:.2f} of full logits"
    finish(figure, passed, {"speed": speed, "memory": memory}, args.json)


if __name__ == "__main__":
    main()
