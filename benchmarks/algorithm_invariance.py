"""Is the gradient of every algorithm the same on every layout? The part `--all-algorithms` of `layout_invariance.py`.

One mini-batch of responses of very uneven lengths (1 to 40 tokens) is learnt by each algorithm on each layout with
several token budgets; gradients before clipping are compared with those of one process that holds everything in one
micro-batch. A second mini-batch has no token to learn from on one of two data ranks.

The last column shows why: the same gradient if two data ranks took the first third of the mini-batch and the rest, each
divided by its own counts, and the ranks were averaged, as a mean of per-rank means does.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from common import no_nan
from layout_invariance import export_gradients, worst_tensor

from megarl.aggregation import GlobalCounts, token_mean
from megarl.batch import Sample, balance, count_globally, pack_units
from megarl.dpo import DPOHead
from megarl.losses import ClippedValueLoss, PreferenceLoss
from megarl.preference import mean_over_pairs
from megarl.recipes import DAPO, GRPO, PPO, Aggregation, KLTerm, Recipe
from megarl.reward_model import reward_head
from megarl.updates import LossHead, PolicyTokenLoss, policy_head, sft_token_loss, value_head
from parallel.mesh import Mesh
from parallel.model import Head, build_model
from parallel.optimizer import OptimizerSettings, Trainable
from parallel.qwen import read_shape
from parallel.schedule import forward_backward

BUDGETS = (96, 200, 4096)
"""Tokens per micro-batch: one pair of the longest responses, a few, all."""
LENGTHS = (1, 3, 2, 1, 5, 1, 40, 40, 17, 31, 22, 9)
"""Of the responses, in tokens."""
PROMPT_TOKENS = 6
TEMPERATURE = 0.9
Unit = list[Sample]


@dataclass(frozen=True)
class Algorithm:
    """A loss on a model of the backbone.

    Attributes:
        loss_head: made of the counts of the mini-batch and of its units that are learnt from.
        pairs: a unit is a chosen and a rejected response.
    """

    head: Head
    aggregation: Aggregation
    loss_head: Callable[[GlobalCounts, int], LossHead]
    pairs: bool = False


def policy(recipe: Recipe) -> Algorithm:
    return Algorithm("lm", recipe.aggregation, lambda *_: policy_head(PolicyTokenLoss(recipe), TEMPERATURE))


ALGORITHMS = {
    "SFT": Algorithm("lm", DAPO.aggregation, lambda *_: policy_head(sft_token_loss, 1.0)),
    "GRPO": policy(replace(GRPO, kl=KLTerm(0.04))),
    "DAPO": policy(DAPO),
    "PPO actor": policy(replace(PPO, entropy_coefficient=0.01)),
    "PPO critic": Algorithm("scalar", PPO.aggregation, lambda *_: value_head(ClippedValueLoss(0.2))),
    "DPO": Algorithm("lm", token_mean, lambda _, pairs: mean_over_pairs(DPOHead(PreferenceLoss(nll=1.0)), pairs), True),
    "reward model": Algorithm("scalar", token_mean, lambda _, pairs: mean_over_pairs(reward_head, pairs), True),
}


def units_of(algorithm: Algorithm, *, empty_rank: bool) -> list[Unit]:
    """Return the mini-batch: units of one response, or of a chosen and a rejected one."""
    generator = torch.Generator().manual_seed(5)
    samples = []
    for number, length in enumerate(LENGTHS):
        tokens = torch.randint(300, (PROMPT_TOKENS + length,), generator=generator).tolist()
        noise = torch.randn(6, length, generator=generator)
        samples.append(
            Sample(
                *(number, 0, tokens[:PROMPT_TOKENS], tokens[PROMPT_TOKENS:], noise[0] - 5.7),
                score=0.0,
                truncated=False,
                advantage=noise[1],
                ref_log_probs=noise[2] - 5.7,
                values=0.1 * noise[3],
                returns=noise[4],
            )
        )
    units = [samples[i : i + 2] for i in range(0, len(samples), 2)] if algorithm.pairs else [[one] for one in samples]
    if empty_rank:
        for index in shares_of(units, 2)[1]:
            units[index] = [replace(sample, in_loss=False) for sample in units[index]]
    return units


def shares_of(units: Sequence[Unit], num_ranks: int) -> list[list[int]]:
    return balance([sum(sample.num_tokens for sample in unit) for unit in units], num_ranks)


def gradients(mesh: Mesh, folder: Path) -> dict[tuple[str, bool, int], Path]:
    """Write the gradients of every algorithm, mini-batch and budget on this layout; run on every rank."""
    layout = mesh.layout
    sizes = (mesh.tensor_size, mesh.pipeline_size, mesh.data_size, layout.num_chunks, layout.sequence_parallel)
    root = folder / "-".join(map(str, sizes))
    found = {}
    for name, algorithm in ALGORITHMS.items():
        trainable = build(algorithm, mesh, folder)
        for empty_rank in (False, True):
            units = units_of(algorithm, empty_rank=empty_rank)
            mine = [units[index] for index in shares_of(units, mesh.data_size)[mesh.data_rank]]
            if algorithm.pairs:
                mine = [unit for unit in mine if unit[0].in_loss]
            for budget in BUDGETS:
                target = root / name / f"{empty_rank}-{budget}"
                accumulate(algorithm, trainable, mine, budget, count(mine, mesh))
                export_gradients(trainable, target)
                found[name, empty_rank, budget] = target
        if mesh.world_size == 1:
            found[name, False, 0] = write_mean_of_means(algorithm, trainable, root / name / "means")
    return found


def build(algorithm: Algorithm, mesh: Mesh, folder: Path) -> Trainable:
    models = build_model(read_shape(folder / "qwen2"), mesh, torch.float32, algorithm.head)
    trainable = Trainable(models, mesh, OptimizerSettings())
    trainable.load_hf(folder / "qwen2", seed=7)
    return trainable


def count(units: Sequence[Unit], mesh: Mesh) -> tuple[GlobalCounts, int]:
    """Return the counts of the mini-batch, and its units that are learnt from, over all data ranks."""
    counts = count_globally([sample for unit in units for sample in unit], mesh)
    num_units = mesh.sum_over_data(torch.tensor([sum(unit[0].in_loss for unit in units)]))
    return counts, int(num_units)


def accumulate(
    algorithm: Algorithm,
    trainable: Trainable,
    units: Sequence[Unit],
    budget: int,
    counted: tuple[GlobalCounts, int],
    *,
    keep: bool = False,
) -> None:
    """Run forward and backward over this rank's units."""
    counts, _ = counted
    if not keep:
        trainable.zero_grad()
    packs = pack_units(units, budget, algorithm.aggregation, counts, trainable.mesh)
    forward_backward(trainable.chunks, packs, algorithm.loss_head(*counted))


def write_mean_of_means(algorithm: Algorithm, trainable: Trainable, target: Path) -> Path:
    """Write the gradient that two data ranks would average if each divided by its own counts."""
    units = units_of(algorithm, empty_rank=False)
    third = len(units) // 3
    for number, mine in enumerate((units[:third], units[third:])):
        own = count(mine, trainable.mesh)
        doubled = GlobalCounts(2 * own[0].num_tokens, 2 * own[0].num_sequences), 2 * own[1]
        accumulate(algorithm, trainable, mine, max(BUDGETS), doubled, keep=number > 0)
    export_gradients(trainable, target)
    return target


def rows_of(found: dict[str, list[dict[tuple[str, bool, int], Path]]]) -> list[list[object]]:
    """Return a row for each algorithm and layout: the worst relative differences of a parameter's gradient.

    Args:
        found: what `gradients` returned on each rank of each layout, TP1 among them.
    """
    reference = found["TP1"][0]
    rows: list[list[object]] = []
    for name in ALGORITHMS:
        means = worst_tensor(reference[name, False, 0], reference[name, False, max(BUDGETS)])[0]
        for layout, ranks in found.items():
            worst = [
                max(
                    no_nan(worst_tensor(ranks[0][name, empty, budget], reference[name, empty, max(BUDGETS)])[0])
                    for budget in BUDGETS
                )
                for empty in (False, True)
            ]
            rows.append([name, layout, *worst, means])
    return rows
