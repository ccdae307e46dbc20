"""Does GRPO learn on every layout?

From one warm start (a tiny Qwen2 of 4 layers, fine-tuned on demonstrations half of which are wrong) each layout trains
with `torchrun examples/train_grpo.py` to sort 6 digits. Accuracy is the share of right responses to held-out prompts,
sampled at temperature 1, before and after training. The layouts start equal and drift apart with rounding errors.
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from common import CASES, Case, finish, make_parser, print_table, run_example

BAR = 0.5
"""Least rise of the accuracy on every layout, with the default number of steps (0.69 to 0.72 were seen)."""
SFT_FLAGS = ("--num-steps", "200", "--lr", "3e-3", "--lr-warmup-steps", "20")
OPTIMIZER_FLAGS = ("--weight-decay", "0", "--adam-beta2", "0.98")
MINI_BATCHES_PER_STEP = 4  # the default of examples/train_grpo.py


def warm_start(folder: Path, seed: int) -> None:
    """Write the task's files to `folder/data` and the fine-tuned model to `folder/sft/hf`."""
    data, seed_flags = folder / "data", ("--seed", str(seed))
    run_example("make_tiny_qwen.py", "--out", str(folder / "tiny"), "--num-layers", "4", *seed_flags)
    run_example("make_sort_data.py", "--out", str(data), *seed_flags)
    flags = {"model": folder / "tiny", "output": folder / "sft", "demonstrations": data / "demonstrations.jsonl"}
    run_example("train_sft.py", *_as_flags(flags), *SFT_FLAGS, *OPTIMIZER_FLAGS, *seed_flags, num_processes=1)


def train(name: str, case: Case, folder: Path, num_steps: int, seed: int) -> dict[str, Any]:
    """Train on one layout; returns its row of numbers."""
    layout, optimizer_steps = case.layout, num_steps * MINI_BATCHES_PER_STEP
    flags = {
        "model": folder / "sft" / "hf",
        "output": folder / name,
        "prompts": folder / "data" / "train.jsonl",
        "eval-prompts": folder / "data" / "heldout.jsonl",
        "max-prompt-tokens": 40,
        "max-new-tokens": 8,
        "seed": seed,
        "num-steps": num_steps,
        "lr": 7e-4,
        "lr-warmup-steps": optimizer_steps // 8,
        "lr-decay-style": "linear",
        "lr-decay-start": optimizer_steps // 2,
        "lr-decay-steps": optimizer_steps,
        "tensor-model-parallel-size": layout.tensor_model_parallel_size,
        "pipeline-model-parallel-size": layout.pipeline_model_parallel_size,
    }
    if layout.virtual_pipeline_model_parallel_size is not None:
        flags["virtual-pipeline-model-parallel-size"] = layout.virtual_pipeline_model_parallel_size
    switches = ["--sequence-parallel"] if layout.sequence_parallel else []
    run_example("train_grpo.py", *_as_flags(flags), *OPTIMIZER_FLAGS, *switches, num_processes=case.world_size)
    summary = json.loads((folder / name / "summary.json").read_text(encoding="utf-8"))
    before, after = summary["accuracy_before"], summary["accuracy_after"]
    return {"layout": name, "processes": case.world_size, "before": before, "after": after, "rise": after - before}


def _as_flags(values: dict[str, Any]) -> list[str]:
    return [part for name, value in values.items() for part in (f"--{name}", str(value))]


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument(
        "--num-steps",
        type=int,
        default=40,
        metavar="N",
        help="steps of 32 groups of 8 responses (default: %(default)s)",
    )
    args = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        warm_start(folder, args.seed)
        for layout in args.layouts:
            rows.append(train(layout, CASES[layout], folder, args.num_steps, args.seed))
            print(
                f"{layout}: accuracy {rows[-1]['before']:.3f} -> {rows[-1]['after']:.3f}", file=sys.stderr, flush=True
            )
    cells = [[cell if isinstance(cell, (str, int)) else f"{cell:.3f}" for cell in row.values()] for row in rows]
    print_table(list(rows[0]), cells)
    least = min(rows, key=lambda row: row["rise"])
    figure = f"smallest rise of held-out accuracy: {least['rise']:.3f} on {least['layout']} (bar {BAR})"
    finish(figure, least["rise"] >= BAR, {"bar": BAR, "num_steps": args.num_steps, "rows": rows}, args.json)


if __name__ == "__main__":
    main()
