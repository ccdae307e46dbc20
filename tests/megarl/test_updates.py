"""One optimizer step: losses, logged means and gradients do not depend on the split into ranks and micro-batches."""

import math
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from megarl.aggregation import GlobalCounts, token_mean
from megarl.batch import TrainPack
from megarl.recipes import GRPO, KLTerm
from megarl.updates import PolicyTokenLoss, count_skipped, reduce_metrics, sft_token_loss, update
from parallel.mesh import Layout, build_mesh
from parallel.pack import pack_sequences
from tests.megarl.small_batches import PROMPT, UNCLIPPED, build, make_samples, packs_and_counts, score_packs
from tests.tiny_model import (
    Records,
    all_parameters,
    assert_relatively_close,
    draw_sequences,
    hf_gradients,
    load_transformers,
    whole_difference,
)

LOSSES = {"A": [1.0, 1.0, 1.0], "B": [5.0] + [9.0] * 6}
COUNTED = {"A": [True] * 3, "B": [True] + [False] * 6}
WHOLE_A, WHOLE_B = ("A", 0, 3), ("B", 0, 7)
SPLITS = {
    "two ranks, 1 micro-batch": [[[WHOLE_A]], [[WHOLE_B]]],
    "two ranks, 2 micro-batches": [[[("A", 0, 2)], [("A", 2, 3)]], [[("B", 0, 1)], [("B", 1, 7)]]],
    "two ranks, 4 micro-batches": [
        [[("A", 0, 1)], [("A", 1, 2)], [("A", 2, 3)], [("A", 0, 0)]],
        [[("B", 0, 1)], [("B", 1, 3)], [("B", 3, 5)], [("B", 5, 7)]],
    ],
    "one process, 2 micro-batches": [[[WHOLE_A], [WHOLE_B]]],
    "one process, 4 micro-batches": [[[("A", 0, 2)], [("A", 2, 3)], [("B", 0, 1)], [("B", 1, 7)]]],
}
"""For each rank its micro-batches; each a list of (sequence, first, last + 1 scored response token)."""
Split = list[list[list[tuple[str, int, int]]]]


@dataclass(frozen=True)
class Updated:
    """Metrics of an update and the gradient it applied, under Hugging Face names."""

    metrics: dict[str, float]
    gradients: dict[str, torch.Tensor]


def stated_loss(log_probs, entropy, pack):
    """`pack.advantages` as the value of the loss, whatever the model says, with a gradient to the model."""
    loss = pack.advantages * (log_probs - log_probs.detach()).exp()
    return loss, {"token_loss": loss.detach(), "max_token_loss": loss.detach()}


def make_pack(pieces: list[tuple[str, int, int]], counts: GlobalCounts) -> TrainPack:
    sequences = dict(zip(LOSSES, draw_sequences([PROMPT + len(losses) for losses in LOSSES.values()]), strict=True))
    masks, losses, counted, lengths = [], [], [], []
    for name, start, end in pieces:
        index = torch.arange(len(sequences[name]))
        masks.append((index >= PROMPT + start) & (index < PROMPT + end))
        losses += LOSSES[name][start:end]
        counted += COUNTED[name][start:end]
        lengths += [sum(COUNTED[name])] * (end - start)
    pack = pack_sequences([sequences[name] for name, _, _ in pieces], masks)
    weights = token_mean(torch.tensor(lengths), torch.tensor(counted, dtype=torch.bool), counts)
    return TrainPack(
        **vars(pack), loss_weights=weights, advantages=torch.tensor(losses), old_log_probs=torch.zeros(len(losses))
    )


def update_split(world, split: Split, source: Path, target: Path) -> Updated:
    trainable = build(build_mesh(Layout(), world), source)
    mine = split[world.rank]
    num_counted = sum(sum(COUNTED[name][start:end]) for pieces in mine for name, start, end in pieces)
    (num_tokens,) = trainable.mesh.sum_over_data(torch.tensor([num_counted])).tolist()
    counts = GlobalCounts(num_tokens, num_sequences=2)
    metrics = update(trainable, [make_pack(pieces, counts) for pieces in mine], counts, stated_loss, 0)
    return Updated(metrics, hf_gradients(trainable, target))


@pytest.fixture(scope="module")
def single_batch(workers, tiny_qwen, tmp_path_factory) -> Updated:
    target = tmp_path_factory.mktemp("single batch") / "gradient"
    return workers.run(update_split, 1, [[[WHOLE_A, WHOLE_B]]], tiny_qwen.qwen2, target)[0]


def test_token_mean_counts_every_unmasked_token_once(single_batch):
    """RC11: (1 + 1 + 1 + 5) / 4 = 2; masked tokens (9) are in no mean, denominator or maximum."""
    assert single_batch.metrics["loss"] == pytest.approx(2.0, rel=1e-6)
    assert single_batch.metrics["token_loss"] == pytest.approx(2.0, rel=1e-6)
    assert single_batch.metrics["max_token_loss"] == 5.0
    assert single_batch.metrics["applied"] == 1.0


@pytest.mark.parametrize("split", SPLITS.values(), ids=SPLITS)
def test_split_over_ranks_and_micro_batches_changes_neither_loss_nor_gradient(
    workers, single_batch, tiny_qwen, tmp_path, split
):
    """RC11: loss and logged mean 2.0 on every rank, not 3.0; the gradient within 1e-6 relative."""
    for rank in workers.run(update_split, len(split), split, tiny_qwen.qwen2, tmp_path / "gradient"):
        assert rank.metrics == pytest.approx(single_batch.metrics, rel=1e-6)
        assert whole_difference(rank.gradients, single_batch.gradients) < 1e-6
        assert_relatively_close(rank.gradients, single_batch.gradients, 1e-5)


def test_mini_batch_without_any_token_is_skipped(workers, tiny_qwen):
    """RC13 (ii): one log line; weights, masters, moments and the optimizer's counters stay as they are."""
    for rank in workers.run(skip_a_step, 2, tiny_qwen.qwen2):
        assert rank["metrics"] == {"applied": 0.0, "lr": UNCLIPPED.lr}
        assert rank["messages"] == ["optimizer step 1 skipped: its mini-batch has nothing to train on"]
        assert rank["unchanged"]
        assert rank["counters"] == [1.0]


def skip_a_step(world, folder: Path) -> dict:
    trainable = build(build_mesh(Layout(), world), folder)
    applied = update(trainable, *packs_and_counts(make_samples([9], seed=world.rank), trainable), sft_token_loss, 0)
    assert applied["applied"] == 1.0
    before = all_parameters(trainable)
    masked = make_samples([9], seed=world.rank, in_loss=False)
    with Records("megarl.updates") as records:
        metrics = update(trainable, *packs_and_counts(masked, trainable), sft_token_loss, 1)
    after = all_parameters(trainable)
    states = [state for o in trainable.optimizer.chained_optimizers for state in o.optimizer.state.values()]
    return {
        "metrics": metrics,
        "messages": records.messages,
        "unchanged": all(torch.equal(a, b) for a, b in zip(before, after, strict=True)),
        "counters": sorted({float(state["step"]) for state in states}),
    }


def test_metrics_of_the_last_stage_reach_the_first(workers):
    """It alone has them."""
    assert workers.run(reduce_over_stages, 2) == [{"loss": 3.0, "max_ratio": 7.0}] * 2


def reduce_over_stages(world) -> dict[str, float]:
    mesh = build_mesh(Layout(1, 2), world)
    packs = [{"loss": torch.tensor(1.0), "max_ratio": torch.tensor(7.0)}]
    packs += [{"loss": torch.tensor(2.0), "max_ratio": torch.tensor(5.0)}]
    return reduce_metrics(packs if mesh.is_last_stage else [], mesh)


@dataclass(frozen=True)
class Logged:
    """Metrics of on-policy updates with and without a reference, and at two temperatures."""

    plain: dict[str, float]
    with_reference: dict[str, float]
    entropies: list[float]


def policy_updates(world, layout: Layout, folder: Path) -> Logged:
    trainable = build(build_mesh(layout, world), folder)
    packs, counts = packs_and_counts(make_samples([9, 5, 14], seed=3), trainable)
    scored = score_packs(trainable, packs)
    if trainable.mesh.is_last_stage:
        packs = [replace(p, old_log_probs=s, ref_log_probs=s + math.log(2)) for p, s in zip(packs, scored, strict=True)]
    trainable.settings = replace(UNCLIPPED, lr=1e-12)  # three updates of the same weights
    recipe = replace(GRPO, kl=KLTerm(coefficient=0.5, estimator="k2"))
    plain = update(trainable, packs, counts, PolicyTokenLoss(GRPO), 0)
    with_reference = update(trainable, packs, counts, PolicyTokenLoss(recipe), 1)
    entropies = [update(trainable, packs, counts, sft_token_loss, 2, temperature=t)["entropy"] for t in (1.0, 2.0)]
    return Logged(plain, with_reference, entropies)


@pytest.mark.parametrize("layout", [Layout(2), Layout(1, 2)], ids=["TP2", "PP2"])
def test_metrics_of_an_on_policy_update_by_hand(workers, tiny_qwen, layout):
    """Responses of 7, 3 and 12 tokens with advantages 1, 2, 3: loss -(7 + 6 + 36) / 22. A reference twice as likely
    makes k2 = log(2)^2 / 2, which the recipe adds by half."""
    k2 = math.log(2) ** 2 / 2
    entropies = entropies_of_transformers(tiny_qwen.qwen2)
    for rank in workers.run(policy_updates, 2, layout, tiny_qwen.qwen2):
        assert rank.plain["loss"] == pytest.approx(-49 / 22, rel=1e-5)
        assert rank.plain["ratio"] == pytest.approx(1.0, rel=1e-5)
        assert rank.plain["clip_fraction"] == 0.0
        assert 0.0 <= rank.plain["max_log_ratio"] < 1e-5
        assert rank.plain["entropy"] == pytest.approx(entropies[0], rel=1e-5)
        assert "ref_kl" not in rank.plain
        assert rank.with_reference["ref_kl"] == pytest.approx(k2, rel=1e-5)
        assert rank.with_reference["loss"] == pytest.approx(-49 / 22 + 0.5 * k2, rel=1e-5)
        assert rank.entropies == pytest.approx(entropies, rel=1e-5)


@torch.no_grad()
def entropies_of_transformers(folder: Path) -> list[float]:
    """Mean over all response tokens, at temperatures 1 and 2."""
    model, means = load_transformers(folder), []
    for temperature in (1.0, 2.0):
        tables = []
        for sample in make_samples([9, 5, 14], seed=3):
            tokens = torch.tensor([*sample.prompt, *sample.response])
            tables.append((model(tokens[None]).logits[0, PROMPT - 1 : -1] / temperature).log_softmax(-1))
        table = torch.cat(tables)
        means.append(float(-(table.exp() * table).sum(-1).mean()))
    return means


def test_the_tenth_optimizer_step_in_a_row_that_is_not_finite_stops_the_run():
    skipped, applied = {"applied": 0.0}, {"applied": 1.0}
    assert count_skipped(8, skipped, 3) == 9
    assert count_skipped(9, applied, 3) == 0
    assert count_skipped(9, skipped, 0) == 0  # nothing to train on: no fault
    with pytest.raises(RuntimeError, match="10 optimizer steps in a row"):
        count_skipped(9, skipped, 3)
