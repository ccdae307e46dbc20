"""The whole way on a laptop: make a tiny Qwen2 and a task, warm it up, train it by GRPO, check the result.

    python examples/demo.py --seed 0 --nproc 2

The task is to sort 6 digits. The warm start imitates demonstrations half of which are wrong, so the model knows right
answers before RL: much of the rise is sharpening. Ends with status 1 if the model has not learnt, or if transformers
does not load the exported folder strictly and score the same greedy accuracy.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import make_sort_data
import make_tiny_qwen
import torch
from transformers import AutoModelForCausalLM

from megarl.data.prompts import PromptSource
from megarl.data.tokenizer import load_tokenizer, stop_token_ids
from megarl.report import draw_curves
from megarl.rewards.rules import exact_match

EXAMPLES = Path(__file__).parent
MAX_NEW_TOKENS = 8
ADAM = ["--weight-decay", "0", "--adam-beta2", "0.98"]
MIN_ACCURACY, MIN_RISE, MAX_SAMPLED_DIFFERENCE = 0.85, 0.5, 0.06


def main() -> None:
    args = parse_arguments()
    folder, seed = args.output, str(args.seed)
    num_sft, num_rl = (120, 20) if args.quick else (240, 200)
    make_room(folder)
    make_tiny_qwen.main(["--out", str(folder / "tiny"), "--seed", seed])
    make_sort_data.main(["--out", str(folder / "data"), "--seed", seed])
    torchrun(args.nproc, "train_sft.py", folder / "tiny", folder / "sft", seed, [
        *("--demonstrations", folder / "data/demonstrations.jsonl", "--num-steps", num_sft, "--batch-size", 64),
        *("--lr", 3e-3, "--lr-warmup-steps", 20, *ADAM),
    ])  # fmt: skip
    torchrun(args.nproc, "train_grpo.py", folder / "sft/hf", folder / "grpo", seed, [
        *("--prompts", folder / "data/train.jsonl", "--eval-prompts", folder / "data/heldout.jsonl"),
        *("--num-steps", num_rl, "--prompts-per-step", 32, "--group-size", 8, "--num-mini-batches", 4),
        *("--max-prompt-tokens", 40, "--max-new-tokens", MAX_NEW_TOKENS),
        *("--lr", 7e-4, "--lr-warmup-steps", 40, "--lr-decay-style", "linear", *ADAM),
        *("--lr-decay-start", 4 * num_rl * 3 // 10, "--lr-decay-steps", 4 * num_rl),
    ])  # fmt: skip
    finish(folder, args)


def make_room(folder: Path) -> None:
    """Remove the last demo from the folder; ends the demo if the folder is not of its making."""
    marker = folder / "made_by_demo"
    if folder.exists() and any(folder.iterdir()) and not marker.exists():
        sys.exit(f"error: --output {folder} holds other files, allowed: a new folder or one of an earlier demo")
    if marker.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True, exist_ok=True)
    marker.touch()


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seed", type=int, default=0, help="of model, data and sampling (default: %(default)s)")
    parser.add_argument("--nproc", type=int, default=2, help="processes, data-parallel (default: %(default)s)")
    parser.add_argument("--output", type=Path, default=Path("runs/demo"), help="folder to write (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="a few steps that only show that everything runs")
    return parser.parse_args()


def torchrun(nproc: int, script: str, model: Path, output: Path, seed: str, flags: list) -> None:
    """Run an example on `nproc` processes; ends the demo if it fails."""
    print(f"\n== {script} on {nproc} processes -> {output}", flush=True)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", nproc]
    command += [
        EXAMPLES / script,
        "--model",
        model,
        "--output",
        output,
        "--seed",
        seed,
        "--progress-seconds",
        5,
        *flags,
    ]
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    if subprocess.run([str(part) for part in command], env=environment, check=False).returncode:
        sys.exit(f"{script} failed; its logs are in {output / 'logs'}")


def finish(folder: Path, args: argparse.Namespace) -> None:
    """Score the exported model under transformers, print the result, judge it."""
    summary = json.loads((folder / "grpo/summary.json").read_text())
    started = time.perf_counter()
    transformers = transformers_accuracy(folder / "grpo/hf", folder / "data/heldout.jsonl", args.seed)
    picture = draw_curves(folder / "grpo", f"GRPO: sort 6 digits, seed {args.seed}, {args.nproc} processes")
    print(f"\n{'accuracy, 512 held-out prompts':34}{'sampled':>9}{'greedy':>9}")
    for name, key in (("before (warm start)", "before"), ("after GRPO", "after")):
        print(f"{name:34}{summary[f'accuracy_{key}']:9.3f}{summary[f'greedy_accuracy_{key}']:9.3f}")
    print(f"{'after, under transformers.generate':34}{transformers['sampled']:9.3f}{transformers['greedy']:9.3f}")
    print(f"RL took {summary['training_seconds']:.0f} s, the check {time.perf_counter() - started:.0f} s")
    print(f"model {folder / 'grpo/hf'}   metrics {folder / 'grpo/metrics.jsonl'}   curves {picture}")
    result = {**summary, **{f"{name}_accuracy_transformers": value for name, value in transformers.items()}}
    (folder / "summary.json").write_text(json.dumps(result, indent=2) + "\n")
    problems = judge(summary, transformers, args.quick)
    print("\n".join(f"FAILED: {problem}" for problem in problems) or "passed")
    sys.exit(bool(problems))


def judge(summary: dict, transformers: dict[str, float], quick: bool) -> list[str]:
    """Return what is wrong, an empty list if nothing."""
    before, after = summary["accuracy_before"], summary["accuracy_after"]
    problems = []
    if not quick and after < MIN_ACCURACY:
        problems.append(f"sampled accuracy after is {after:.3f}, wanted {MIN_ACCURACY}")
    if not quick and after - before < MIN_RISE:
        problems.append(f"sampled accuracy rose by {after - before:.3f}, wanted {MIN_RISE}")
    if transformers["greedy"] != summary["greedy_accuracy_after"]:
        problems.append(
            f"greedy accuracy is {summary['greedy_accuracy_after']}, {transformers['greedy']} in transformers"
        )
    if abs(transformers["sampled"] - after) > MAX_SAMPLED_DIFFERENCE:
        problems.append(f"sampled accuracy is {after:.3f}, {transformers['sampled']:.3f} in transformers")
    return problems


def transformers_accuracy(model_folder: Path, prompts: Path, seed: int) -> dict[str, float]:
    """Load the folder strictly with transformers and score sampled and greedy responses.

    Raises:
        ValueError: the folder lacks a parameter of the model or holds one too many.
    """
    model, info = AutoModelForCausalLM.from_pretrained(model_folder, output_loading_info=True)
    if info["missing_keys"] or info["unexpected_keys"] or info["mismatched_keys"]:
        raise ValueError(f"{model_folder} does not load strictly: {info}")
    tokenizer = load_tokenizer(model_folder)
    stops = list(stop_token_ids(tokenizer, model_folder))
    rows = PromptSource(prompts, tokenizer, max_prompt_tokens=40).rows
    inputs = torch.tensor([row.tokens for row in rows])  # all prompts of the task have one length: no padding
    torch.manual_seed(seed)
    accuracy = {}
    for name, options in {"sampled": {"do_sample": True, "top_k": 0}, "greedy": {"do_sample": False}}.items():
        output = model.generate(
            inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=MAX_NEW_TOKENS, eos_token_id=stops, **options
        )[:, inputs.shape[1] :]
        accuracy[name] = sum(map(score, output.tolist(), rows, [(tokenizer, stops)] * len(rows))) / len(rows)
    return accuracy


def score(tokens: list[int], row, reading) -> float:
    """Score one response like training does: unfinished ones get 0."""
    tokenizer, stops = reading
    end = next((index for index, token in enumerate(tokens) if token in stops), None)
    return 0.0 if end is None else exact_match(row.text, tokenizer.decode(tokens[:end]), row.answer)


if __name__ == "__main__":
    main()
