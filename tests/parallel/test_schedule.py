"""Passes through the pipeline: how many, in which order, what comes back where, and that gradients are sums."""

from pathlib import Path

import pytest
import torch

from parallel.log_probs import score_tokens
from parallel.mesh import Layout, build_mesh
from parallel.model import build_model
from parallel.optimizer import OptimizerSettings, Trainable
from parallel.pack import pack_sequences
from parallel.qwen import read_shape
from parallel.schedule import forward, forward_backward, num_passes, unwrap
from tests.tiny_model import draw_sequences, load_transformers

LENGTHS = [5, 23, 2, 11]  # each a pack of its own: stages exchange tensors of changing size


def count_passes(world, layout: Layout, counts: list[tuple[int, int]]) -> list[int]:
    mesh = build_mesh(layout, world)
    return [num_passes(count[world.rank], mesh) for count in counts]


def test_data_ranks_agree_on_the_largest_number_of_passes(workers):
    """RC19, RC20: also where a rank has no pack at all."""
    assert workers.run(count_passes, 2, Layout(), [(3, 5), (4, 0), (0, 0), (2, 2)]) == [[5, 4, 0, 2]] * 2


def test_interleaved_stages_need_a_multiple_of_the_pipeline_size(workers):
    counts = [(3, 3), (4, 4), (1, 1), (0, 0)]
    assert workers.run(count_passes, 2, Layout(1, 2, 2), counts) == [[4, 4, 2, 0]] * 2
    assert workers.run(count_passes, 2, Layout(1, 2), counts) == [[3, 4, 1, 0]] * 2


def build(world, layout: Layout, folder: Path) -> Trainable:
    mesh = build_mesh(layout, world)
    models = build_model(read_shape(folder), mesh, torch.float32)
    trainable = Trainable(models, mesh, OptimizerSettings())
    trainable.load_hf(folder)
    return trainable


def all_packs() -> list:
    return [pack_sequences([tokens], [torch.arange(len(tokens)) > 0]) for tokens in draw_sequences(LENGTHS)]


def log_probs_head(model, hidden, pack) -> tuple[torch.Tensor, bool, bool]:
    log_probs, _ = score_tokens(model, hidden, pack)
    return log_probs, log_probs.requires_grad, model.training


@pytest.mark.parametrize("layout", [Layout(1, 2), Layout(1, 2, 2)], ids=["PP2", "PP2 with 2 virtual stages"])
def test_forward_gives_the_outputs_of_the_last_stage_in_the_order_of_the_packs(workers, tiny_qwen, layout):
    first, last = workers.run(outputs_of, 2, layout, tiny_qwen.qwen2)
    assert first == []
    model = load_transformers(tiny_qwen.qwen2)
    for tokens, (log_probs, requires_grad, training) in zip(draw_sequences(LENGTHS), last, strict=True):
        table = model(tokens[None]).logits[0, :-1].log_softmax(-1)
        torch.testing.assert_close(log_probs, table.gather(1, tokens[1:, None]).squeeze(1), rtol=1e-5, atol=1e-5)
        assert not requires_grad
        assert not training


def outputs_of(world, layout: Layout, folder: Path) -> list:
    return forward(build(world, layout, folder).chunks, all_packs(), log_probs_head)


def test_gradients_add_up_over_packs_and_calls_until_they_are_cleared(workers, tiny_qwen):
    """Nothing divides: a pack twice in one call, or in two calls, is twice its gradient. In training mode."""
    (norms,) = workers.run(gradient_norms, 1, tiny_qwen.qwen2)
    assert norms["once"] > 0.1
    assert norms["twice in a call"] == pytest.approx(2 * norms["once"], rel=1e-6)
    assert norms["in two calls"] == pytest.approx(2 * norms["once"], rel=1e-6)
    assert norms["after clearing"] == norms["once"]


def gradient_norms(world, folder: Path) -> dict[str, float]:
    trainable = build(world, Layout(), folder)
    pack = all_packs()[1]

    def norm_after(*calls: list) -> float:
        trainable.zero_grad()
        for packs in calls:
            forward_backward(trainable.chunks, packs, loss)
        return float(torch.stack([p.main_grad.norm() for p in trainable.models[0].parameters()]).norm())

    return {
        "once": norm_after([pack]),
        "twice in a call": norm_after([pack, pack]),
        "in two calls": norm_after([pack], [pack]),
        "after clearing": norm_after([pack]),
    }


def loss(model, hidden, pack) -> tuple[torch.Tensor, dict]:
    assert model.training
    log_probs, _ = score_tokens(model, hidden, pack)
    return -log_probs.sum(), {"num_tokens": torch.tensor(len(log_probs))}


def test_metrics_come_back_from_the_last_stage_in_the_order_of_the_packs(workers, tiny_qwen):
    assert workers.run(metrics_of, 2, Layout(1, 2), tiny_qwen.qwen2) == [[], [4, 22, 1, 10]]


def metrics_of(world, layout: Layout, folder: Path) -> list[int]:
    kept = forward_backward(build(world, layout, folder).chunks, all_packs(), loss)
    return [int(metrics["num_tokens"]) for metrics in kept]


def test_model_is_found_inside_its_wrapper(workers, tiny_qwen):
    assert workers.run(unwraps, 1, tiny_qwen.qwen2) == [(True, True)]


def unwraps(world, folder: Path) -> tuple[bool, bool]:
    trainable = build(world, Layout(), folder)
    (model,), (chunk,) = trainable.models, trainable.chunks
    return unwrap(chunk) is model, unwrap(model) is model
