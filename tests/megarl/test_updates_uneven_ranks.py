"""Ranks with fewer packs, without tokens or without samples: all take part in every pass and collective."""

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from megarl.advantages import whiten
from megarl.aggregation import weighted_sum
from megarl.batch import Sample, TrainPack
from megarl.updates import reduce_metrics, sft_token_loss, update
from parallel.log_probs import score_tokens
from parallel.mesh import Layout, build_mesh
from parallel.model import scalar_values
from parallel.schedule import forward_backward, num_passes
from tests.megarl.small_batches import PROMPT, build, make_samples, packs_and_counts, score_packs
from tests.tiny_model import assert_relatively_close, hf_gradients, load_transformers


def nll_head(model, hidden, pack):
    log_probs, _ = score_tokens(model, hidden, pack)
    loss = weighted_sum(-log_probs, pack.loss_weights)
    return loss, {"loss": loss.detach().clone(), "attached": torch.tensor(loss.requires_grad)}


@dataclass(frozen=True)
class Passes:
    """Loss of each pack, whether it hung on the graph, and the whole gradient."""

    losses: list[float]
    attached: list[bool]
    gradients: dict[str, torch.Tensor]


def run_passes(world, samples: list[list[Sample]], source: Path, target: Path) -> Passes:
    trainable = build(build_mesh(Layout(), world), source)
    packs, _ = packs_and_counts(samples[world.rank], trainable)
    trainable.zero_grad()
    kept = forward_backward(trainable.chunks, packs, nll_head)
    losses, attached = [float(k["loss"]) for k in kept], [bool(k["attached"]) for k in kept]
    return Passes(losses, attached, hf_gradients(trainable, target))


@pytest.mark.parametrize("of_rank_1", ["masked", "no samples"])
def test_rank_without_trainable_tokens_adds_zero_and_takes_part(workers, tiny_qwen, tmp_path, of_rank_1):
    """RC13 (i), RC20: loss 0.0, attached to the graph; the gradient is that of rank 0 alone."""
    of_rank_0 = make_samples([9, 5], seed=1)
    others = make_samples([12, 4], seed=2, in_loss=False) if of_rank_1 == "masked" else []
    first, second = workers.run(run_passes, 2, [of_rank_0, others], tiny_qwen.qwen2, tmp_path / "two")
    (alone,) = workers.run(run_passes, 1, [of_rank_0], tiny_qwen.qwen2, tmp_path / "one")
    assert (second.losses, second.attached) == ([0.0], [True])
    assert first.losses == pytest.approx(alone.losses, rel=1e-6)
    assert_relatively_close(first.gradients, alone.gradients, 1e-6)


def test_collectives_return_on_a_rank_without_tokens_as_on_the_others(workers):
    """RC20: whitening, metrics (3 packs against 1) and the number of steps equal those of rank 0 alone."""
    first, second = workers.run(use_collectives, 2)
    (alone,) = workers.run(use_collectives, 1)
    torch.testing.assert_close(first.pop("whitened"), alone.pop("whitened"))
    assert second.pop("whitened").shape == (0,)
    assert first == second == alone == {"metrics": {"loss": 6.0, "max_ratio": 4.0}, "num_passes": 3}


def use_collectives(world) -> dict:
    mesh = build_mesh(Layout(), world)
    values = [1.0, 2.0, 3.0, 4.0, 5.0] if world.rank == 0 else []
    whitened = whiten(torch.tensor(values), torch.ones(len(values), dtype=torch.bool), mesh.sum_over_data)
    packs = [(1.0, 0.5), (2.0, 4.0), (3.0, 1.5)] if world.rank == 0 else [(0.0, 0.0)]
    metrics = [{"loss": torch.tensor(loss), "max_ratio": torch.tensor(ratio)} for loss, ratio in packs]
    return {
        "whitened": whitened,
        "metrics": reduce_metrics(metrics, mesh),
        "num_passes": num_passes(3 if world.rank == 0 else 0, mesh),
    }


LENGTHS_OF_RANK_0 = [95, 95, 95, 95, 95]
LENGTHS_OF_RANK_1 = {"five of 20 tokens": [20] * 5, "two of 20 tokens": [20] * 2}


@dataclass(frozen=True)
class Phases:
    """Passes of each phase, old log-probs by response, metrics, and the gradients of actor and critic."""

    num_passes: list[int]
    log_probs: dict[tuple[int, ...], torch.Tensor]
    metrics: dict[str, float]
    actor: dict[str, torch.Tensor]
    critic: dict[str, torch.Tensor]


def run_phases(world, samples: list[list[Sample]], source: Path, target: Path) -> Phases:
    actor = build(build_mesh(Layout(), world), source)
    packs, counts = packs_and_counts(samples[world.rank], actor)
    scored = score_packs(actor, packs)
    metrics = update(actor, packs, counts, sft_token_loss, 0)
    critic = build(actor.mesh, source, head="scalar")
    critic.zero_grad()
    values = forward_backward(critic.chunks, packs, critic_head)
    return Phases(
        num_passes=[len(packs), len(scored), len(values)],
        log_probs=by_response(packs, scored),
        metrics=metrics,
        actor=hf_gradients(actor, target / "actor"),
        critic=hf_gradients(critic, target / "critic"),
    )


def critic_head(model, hidden, pack):
    loss = weighted_sum((scalar_values(model, hidden, pack) - 1.0).square(), pack.loss_weights)
    return loss, {"loss": loss.detach().clone()}


def by_response(packs: list[TrainPack], scored: list[torch.Tensor]) -> dict[tuple[int, ...], torch.Tensor]:
    """Cut each pack's log-probs [N] at its sequences' borders and file them under the response they stand beside."""
    found = {}
    for pack, log_probs in zip(packs, scored, strict=True):
        for start, end in zip(pack.cu_seqlens[:-1], pack.cu_seqlens[1:], strict=True):
            inside = (pack.scored >= start) & (pack.scored < end)
            if inside.any():
                found[tuple(pack.tokens[pack.scored[inside]].tolist())] = log_probs[inside]
    return found


@pytest.mark.parametrize("lengths", LENGTHS_OF_RANK_1.values(), ids=LENGTHS_OF_RANK_1)
def test_ranks_with_fewer_packs_run_as_many_passes_and_change_nothing(workers, tiny_qwen, tmp_path, lengths):
    """RC19: 5 packs of 95 tokens against 1 pack; old log-probs, actor and critic."""
    samples = [make_samples(LENGTHS_OF_RANK_0, seed=1), make_samples(lengths, seed=2)]
    done = workers.run(run_phases, 2, samples, tiny_qwen.qwen2, tmp_path / "two")
    (alone,) = workers.run(run_phases, 1, [samples[0] + samples[1]], tiny_qwen.qwen2, tmp_path / "one")
    model = load_transformers(tiny_qwen.qwen2)
    for rank, mine in zip(done, samples, strict=True):
        assert rank.num_passes == [5, 5, 5]
        assert rank.metrics == pytest.approx(alone.metrics, rel=1e-5)
        assert_relatively_close(rank.actor, alone.actor, 1e-5)
        assert_relatively_close(rank.critic, alone.critic, 1e-5)
        assert len(rank.log_probs) == len(mine)
        for sample in mine:
            expected = log_probs_of(model, sample)
            torch.testing.assert_close(rank.log_probs[tuple(sample.response)], expected, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def log_probs_of(model, sample: Sample) -> torch.Tensor:
    tokens = torch.tensor([*sample.prompt, *sample.response])
    table = model(tokens[None]).logits[0, PROMPT - 1 : -1].log_softmax(-1)
    return table.gather(1, tokens[PROMPT:, None]).squeeze(1)


def test_empty_pack_adds_exactly_zero(workers, tiny_qwen):
    """RC19: bit by bit, and for both heads."""
    for losses, gradients_are_zero in workers.run(run_empty_pack, 2, tiny_qwen.qwen2):
        assert losses == [0.0, 0.0]
        assert gradients_are_zero == [True, True]


def run_empty_pack(world, folder: Path) -> tuple[list[float], list[bool]]:
    mesh = build_mesh(Layout(), world)
    losses, zero = [], []
    for head, loss in (("lm", nll_head), ("scalar", critic_head)):
        trainable = build(mesh, folder, head)
        packs = []
        for busy_rank in range(2):  # the other one gets an empty pack
            mine = make_samples([9], seed=0) if world.rank == busy_rank else []
            packs += packs_and_counts(mine, trainable)[0]
        (empty,) = [pack for pack in packs if not len(pack.scored)]
        trainable.zero_grad()
        (kept,) = forward_backward(trainable.chunks, [empty], loss)
        losses.append(float(kept["loss"]))
        zero.append(not any(parameter.main_grad.any() for parameter in trainable.models[0].parameters()))
    return losses, zero
