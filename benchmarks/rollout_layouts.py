"""Do sampled tokens depend on the layout, on the schedule, or on the size of the cache?

The same requests, 13 prompts with 4 responses each of up to 40 tokens, run on each layout: all at once, with 1 and with
3 prompts at a time, in another order, with small pieces of cache, and with a cache so small that responses give way to
others and are computed again. All must draw the tokens of one process. Their log-probs are compared with a training
pass over whole sequences. Then one GRPO mini-batch is learnt, and everything runs once more on the new weights.
TP4 has more tensor ranks than the model has key/value heads (2).
"""

import random
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from common import CASES, finish, make_model, make_parser, make_prompts, make_trainer, no_nan, on_layouts, print_table

from megarl.trainer import PolicyTrainer
from parallel.log_probs import score_tokens
from parallel.mesh import Mesh
from parallel.pack import pack_sequences
from parallel.schedule import forward
from rollout.engine import Engine
from rollout.replicas import SharedRollout
from rollout.requests import Completion, Request

BAR = 1e-5
NUM_PROMPTS, GROUP_SIZE = 13, 4
LAYOUTS = ("TP1", "TP2", "TP2+SP", "TP4", "PP2", "PP2 3+1", "PP2xVP2", "PP4", "TP2xPP2", "DP2")
BATCHES = {"all at once": NUM_PROMPTS, "1 prompt at a time": 1, "3 prompts at a time": 3}


@dataclass(frozen=True)
class Run:
    """Responses of one way to schedule the requests, by (prompt id, sample index), and responses that gave way."""

    tokens: dict[tuple[int, int], list[int]]
    log_probs: dict[tuple[int, int], torch.Tensor]
    num_preempted: int


def measure(mesh: Mesh, folder: Path, seed: int) -> tuple[list[dict[str, Run]], list[float]]:
    """Return the runs before and after an optimizer step, and the largest gap to the training pass of each."""
    trainer = make_trainer(mesh, folder / "qwen2", folder / "prompts.jsonl", 192, seed=seed)
    trainer.sampling = replace(trainer.sampling, max_new_tokens=40)
    runs, gaps = [], []
    for after_step in (False, True):
        if after_step:
            groups, _ = trainer.generate_groups()
            trainer.learn(trainer.assign_advantages(groups))
        found = all_schedules(trainer, seed)
        runs.append(found)
        gaps.append(max(training_gap(trainer, run) for run in found.values()))
    return runs, gaps


def requests_of(trainer: PolicyTrainer) -> list[Request]:
    prompts = trainer.prompts.take(0, NUM_PROMPTS, trainer.config.run.seed)
    return [Request(prompt.prompt_id, prompt.tokens, GROUP_SIZE) for prompt in prompts]


def all_schedules(trainer: PolicyTrainer, seed: int) -> dict[str, Run]:
    """Run the requests in every way."""
    requests, models, mesh = requests_of(trainer), trainer.policy.models, trainer.mesh
    shuffled = random.Random(seed).sample(requests, len(requests))
    large = Engine(models, mesh, context_length=128)
    pages = Engine(models, mesh, context_length=128, cache_page_tokens=4, max_prefill_tokens=16, max_sequences=24)
    # A response with its prompt reserves at most 112 tokens of a lane's cache.
    small_tokens = 128 * mesh.pipeline_size
    small = Engine(models, mesh, context_length=128, cache_page_tokens=4, max_cache_tokens=small_tokens)
    runs = {
        name: generate(trainer, large, [requests[first : first + size] for first in range(0, NUM_PROMPTS, size)])
        for name, size in BATCHES.items()
    }
    runs["shuffled"] = generate(trainer, large, [shuffled])
    runs["small pages"] = generate(trainer, pages, [requests])
    runs["small cache"] = generate(trainer, small, [requests])
    return runs


def generate(trainer: PolicyTrainer, engine: Engine, batches: Sequence[Sequence[Request]]) -> Run:
    """Run batches one after another on all replicas; every rank returns all responses."""
    mine: list[Completion] = []
    num_preempted = 0
    for batch in batches:
        with SharedRollout(engine, trainer.sampling, border_steps=4) as shared:
            shared.add(batch)
            while shared.busy:
                mine += shared.run_to_border()
            num_preempted += shared.num_preempted
    everything = [c for part in trainer.mesh.gather_over_data(mine) for c in part]
    keys = [(c.prompt_id, c.sample_index) for c in everything]
    assert len(set(keys)) == len(keys)
    return Run(
        dict(zip(keys, [c.tokens for c in everything], strict=True)),
        dict(zip(keys, [c.log_probs for c in everything], strict=True)),
        sum(trainer.mesh.gather_over_data(num_preempted)),
    )


def training_gap(trainer: PolicyTrainer, run: Run) -> float:
    """Largest |rollout log-prob - training log-prob| on this rank; 0 on ranks that compute no log-probs."""
    mesh = trainer.mesh
    prompts = {request.prompt_id: list(request.prompt) for request in requests_of(trainer)}
    keys = sorted(run.tokens)
    sequences = [torch.tensor(prompts[key[0]] + run.tokens[key]) for key in keys]
    masks = [torch.arange(len(s)) >= len(prompts[key[0]]) for s, key in zip(sequences, keys, strict=True)]
    pack = pack_sequences(sequences, masks, mesh.tensor_size)
    temperature = trainer.sampling.temperature
    scored = forward(
        trainer.policy.chunks, [pack] * mesh.pipeline_size, lambda *given: score_tokens(*given, temperature)[0]
    )
    if not scored:
        return 0.0
    return no_nan(float((scored[0] - torch.cat([run.log_probs[key] for key in keys])).abs().max()))


def summarize(name: str, ranks: Sequence[tuple[list[dict[str, Run]], list[float]]], reference: list[dict[str, Run]]):
    """Return one row per moment: whether tokens equal those of one process, gap, responses that gave way."""
    rows = []
    for moment, label in enumerate(("before", "after")):
        expected = reference[moment]["all at once"].tokens
        wrong = sorted({
            schedule for runs, _ in ranks for schedule, run in runs[moment].items() if run.tokens != expected
        })  # fmt: skip
        gap = max(gaps[moment] for _, gaps in ranks)
        gave_way = ranks[0][0][moment]["small cache"].num_preempted
        rows.append([name, label, "equal" if not wrong else "DIFFER: " + ", ".join(wrong), gap, gave_way])
    return rows


def main() -> None:
    parser = make_parser(__doc__, LAYOUTS)
    args = parser.parse_args()
    names = list(dict.fromkeys(["TP1", *args.layouts]))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_model(folder / "qwen2", args.seed)
        make_prompts(folder / "prompts.jsonl", args.seed, count=64)
        found = on_layouts(measure, names, folder, folder, args.seed)
    reference = found["TP1"][0][0]
    rows = [row for layout, ranks in found.items() for row in summarize(layout, ranks, reference)]
    num_tokens = sum(len(tokens) for tokens in reference[0]["all at once"].tokens.values())
    print_table(["layout", "optimizer step", "tokens", "largest gap", "gave way"], rows)
    print(
        f"\n{NUM_PROMPTS * GROUP_SIZE} responses, {num_tokens} tokens before the step; "
        "gap: |rollout - training log-prob|"
    )
    different = [row[:3] for row in rows if row[2] != "equal"]
    never_full = [row[0] for row in rows if row[4] == 0]
    changed = reference[0]["all at once"].tokens != reference[1]["all at once"].tokens
    worst = max(row[3] for row in rows)
    ranks = max(CASES[layout].world_size for layout in names)
    figure = (
        f"tokens {'equal' if not different else 'DIFFERENT'} on {len(found)} layouts of up to {ranks} ranks and "
        f"{len(BATCHES) + 3} schedules; log-probs within {worst:.1e} of the training pass (bar {BAR:.0e})"
    )
    passed = not different and not never_full and changed and worst <= BAR
    finish(figure, passed, {"bar": BAR, "rows": rows}, args.json)


if __name__ == "__main__":
    main()
