"""How much of what is generated is trained on, when most groups teach nothing?

    python benchmarks/dynamic_sampling.py

A tiny Qwen2 responds to prompts of which about 70 % have groups of equal scores (all right or all wrong), whatever the
response; the score of the others depends on the response. DAPO's filter drops groups of equal scores. Two ways to fill
a step with mixed groups:
  fixed     three times the prompts needed are started in each round, and what is kept beyond the step is thrown away
            (the recipe of arXiv 2503.14476)
  adaptive  as many prompts as the observed share of kept groups calls for, and what is kept beyond the step goes into
            the next one
Columns: steps whose groups are all mixed and as many as wanted, groups started, kept, trained on, thrown away and left
for a next step, and the share of generated tokens that end in a gradient.
"""

import argparse
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from common import ONE_THREAD_ON_CPU, finish, make_model, make_prompts, make_trainer, print_table

from megarl.filters import mixed_outcomes
from megarl.recipes import DAPO
from megarl.rewards.scoring import load_reward
from parallel.launch import detect_world, running
from parallel.mesh import Layout, Mesh, build_mesh

FIXED_FACTOR = 3
REWARD = '''
def score(prompt, response, answer):
    """Seven prompts in ten have one score for all responses."""
    number = sum(ord(letter) * (place + 1) for place, letter in enumerate(prompt)) % 10
    return float(number < 3) if number < 7 else float(len(response) % 2)
'''


@dataclass
class Tally:
    """What the steps of one way did."""

    full_steps: int = 0
    started: int = 0
    kept: int = 0
    trained: int = 0
    thrown_away: int = 0
    left_over: int = 0
    generated_tokens: int = 0
    trained_tokens: int = 0

    @property
    def share(self) -> float:
        return self.trained_tokens / self.generated_tokens


def run(mesh: Mesh, folder: Path, num_steps: int, seed: int, *, adaptive: bool) -> Tally:
    """Generate the groups of some steps; nothing is learnt, so that both ways meet the same responses."""
    trainer = make_trainer(mesh, folder / "model", folder / "prompts.jsonl", 4096, "fp32", seed)
    rollout = replace(trainer.config.rollout, adaptive_oversampling=True, max_generation_rounds=20)
    trainer.config = replace(trainer.config, recipe=DAPO, rollout=rollout)
    trainer.responder = replace(trainer.responder, reward=load_score(folder), require_finished=False)
    tally = Tally()
    for step in range(num_steps):
        trainer.state.step = step
        if not adaptive:
            trainer.state.keep_rate = 1 / FIXED_FACTOR
        before = trainer.state.num_prompts_used
        groups, metrics = trainer.generate_groups()
        mixed = all(mixed_outcomes([sample.score for sample in group]) for group in groups)
        tally.full_steps += int(mixed and len(groups) == rollout.prompts_per_step)
        tally.started += trainer.state.num_prompts_used - before
        tally.kept += len(groups) + len(trainer.state.surplus) - int(metrics["groups_carried"])
        tally.trained += len(groups)
        tally.generated_tokens += int(metrics["generated_tokens"])
        tally.trained_tokens += sum(len(sample.response) for group in groups for sample in group)
        if not adaptive:
            tally.thrown_away += len(trainer.state.surplus)
            trainer.state.surplus = []
    tally.left_over = len(trainer.state.surplus)
    return tally


def load_score(folder: Path) -> Any:
    (folder / "score.py").write_text(REWARD, encoding="utf-8")
    return load_reward(f"{folder / 'score.py'}:score")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--num-steps", type=int, default=30, metavar="N", help="steps of each way (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of weights, prompts and sampling (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the numbers here (default: nowhere)")
    args = parser.parse_args()
    torch.set_num_threads(int(ONE_THREAD_ON_CPU["OMP_NUM_THREADS"]))
    with tempfile.TemporaryDirectory() as root, running(detect_world()) as world:
        folder = Path(root)
        make_model(folder / "model", args.seed)
        make_prompts(folder / "prompts.jsonl", args.seed, count=4096)
        mesh = build_mesh(Layout(), world)
        tallies = {
            name: run(mesh, folder, args.num_steps, args.seed, adaptive=name == "adaptive")
            for name in ("fixed", "adaptive")
        }
    header = (
        "way",
        "full steps",
        "started",
        "kept",
        "trained on",
        "thrown away",
        "left over",
        "tokens trained",
    )
    rows = [
        (
            name,
            f"{tally.full_steps}/{args.num_steps}",
            *(tally.started, tally.kept, tally.trained, tally.thrown_away, tally.left_over),
            f"{tally.share:.1%}",
        )
        for name, tally in tallies.items()
    ]
    print_table(header, rows)
    fixed, adaptive = tallies["fixed"], tallies["adaptive"]
    nothing_lost = adaptive.kept == adaptive.trained + adaptive.left_over and adaptive.thrown_away == 0
    figure = (
        f"generated tokens that end in a gradient: {adaptive.share:.1%} adaptive, {fixed.share:.1%} with a fixed "
        f"{FIXED_FACTOR}x; full steps {adaptive.full_steps} of {args.num_steps}, thrown away {adaptive.thrown_away}"
    )
    passed = adaptive.full_steps == args.num_steps and nothing_lost and adaptive.share > fixed.share
    finish(figure, passed, {name: vars(tally) for name, tally in tallies.items()}, args.json)


if __name__ == "__main__":
    main()
