"""The learning rate by hand, steps against torch's AdamW, master weights, and gradients that are not finite."""

import math
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from parallel.log_probs import score_tokens
from parallel.mesh import Layout, build_mesh
from parallel.model import build_model
from parallel.optimizer import OptimizerSettings, Trainable, learning_rate
from parallel.pack import pack_sequences
from parallel.qwen import read_shape
from parallel.schedule import forward_backward
from parallel.weights import export_hf, import_hf
from tests.tiny_model import Records, all_parameters, draw_sequences, load_transformers

LENGTHS = [9, 14, 6, 21]
# A large epsilon: where a gradient is nearly zero, its sign (and with a small epsilon the whole step) is rounding.
SETTINGS = OptimizerSettings(lr=1e-3, weight_decay=0.1, adam_beta2=0.95, adam_eps=1e-3, clip_grad=1.0)
LEARNING_RATES = [1e-3, 5e-4, 2e-3]


def test_constant_learning_rate_after_a_linear_warm_up():
    """Warm-up of 4 steps: a quarter more each, the full rate from step 3 on."""
    settings = OptimizerSettings(lr=0.8, lr_warmup_steps=4)
    rates = [learning_rate(settings, step) for step in (0, 1, 2, 3, 4, 1000)]
    assert rates == pytest.approx([0.2, 0.4, 0.6, 0.8, 0.8, 0.8])
    assert learning_rate(OptimizerSettings(lr=0.8), 0) == 0.8


def test_linear_decay_ends_at_the_lowest_rate():
    """From step 30 to zero at 100, never below a twentieth: at 65 half, at 93 a tenth, at 97 3/70 < 0.05."""
    settings = OptimizerSettings(lr=2.0, lr_decay_style="linear", lr_decay_start=30, lr_decay_steps=100)
    rates = [learning_rate(settings, step) for step in (0, 30, 65, 93, 97, 100, 1000)]
    assert rates == pytest.approx([2.0, 2.0, 1.0, 0.2, 0.1, 0.1, 0.1])


def test_smaller_of_warm_up_and_decay_counts():
    settings = OptimizerSettings(lr=1.0, lr_warmup_steps=8, lr_decay_style="linear", lr_decay_steps=10)
    rates = [learning_rate(settings, step) for step in (0, 3, 5, 7)]
    assert rates == pytest.approx([1 / 8, 4 / 8, 5 / 10, 3 / 10])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lr": 0.0}, "lr: got 0.0, allowed: above 0"),
        ({"lr": float("nan")}, "lr: got nan, allowed: above 0"),
        ({"adam_eps": 0.0}, "adam_eps: got 0.0, allowed: above 0"),
        ({"clip_grad": -1.0}, "clip_grad: got -1.0, allowed: above 0"),
        ({"weight_decay": -0.1}, "weight_decay: got -0.1, allowed: from 0"),
        ({"lr_warmup_steps": -1}, "lr_warmup_steps: got -1, allowed: from 0"),
        ({"lr_decay_start": -1}, "lr_decay_start: got -1, allowed: from 0"),
        ({"adam_beta1": 1.0}, "adam_beta1: got 1.0, allowed: from 0 to below 1"),
        ({"adam_beta2": -0.1}, "adam_beta2: got -0.1, allowed: from 0 to below 1"),
        ({"min_lr_ratio": 1.5}, "min_lr_ratio: got 1.5, allowed: from 0 to 1"),
        ({"lr_decay_style": "cosine"}, "lr_decay_style: got 'cosine', allowed: 'constant', 'linear'"),
        (
            {"lr_decay_style": "linear", "lr_decay_start": 5, "lr_decay_steps": 5},
            "lr_decay_steps: got 5, allowed: above lr_decay_start 5",
        ),
    ],
)
def test_settings_without_meaning_are_refused(changes, message):
    with pytest.raises(ValueError, match=f"^{message}$"):
        replace(OptimizerSettings(), **changes)


def loss(model, hidden, pack, factor: float = 1.0):
    log_probs, _ = score_tokens(model, hidden, pack)
    return -log_probs.mean() * factor, {}


def all_packs() -> list:
    return [pack_sequences([tokens], [torch.arange(len(tokens)) > 0]) for tokens in draw_sequences(LENGTHS)]


def build(world, layout: Layout, dtype: torch.dtype, folder: Path, settings: OptimizerSettings) -> Trainable:
    mesh = build_mesh(layout, world)
    return Trainable(build_model(read_shape(folder), mesh, dtype), mesh, settings)


def learn(trainable: Trainable, lr: float, factor: float = 1.0):
    """One step on this data rank's packs."""
    mesh = trainable.mesh
    trainable.zero_grad()
    packs = all_packs()[mesh.data_rank :: mesh.data_size]
    forward_backward(trainable.chunks, packs, partial(loss, factor=factor))
    return trainable.step(lr)


def steps_of_torch(folder: Path) -> tuple[dict[str, torch.Tensor], list[float]]:
    """Weights and gradient norms after `LEARNING_RATES` in transformers and torch's AdamW."""
    model = load_transformers(folder)
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-3)
    norms = []
    for lr in LEARNING_RATES:
        optimizer.zero_grad()
        for tokens in draw_sequences(LENGTHS):
            table = model(tokens[None]).logits[0, :-1].log_softmax(-1)
            (-table.gather(1, tokens[1:, None]).mean()).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}, norms


def take_steps(world, layout: Layout, source: Path, target: Path) -> list[float]:
    trainable = build(world, layout, torch.float32, source, SETTINGS)
    trainable.load_hf(source)
    norms = [learn(trainable, lr).grad_norm for lr in LEARNING_RATES]
    export_hf(target, trainable.models, trainable.mesh)
    return norms


@pytest.mark.parametrize("layout", [Layout(), Layout(2), Layout(1, 2)], ids=["DP2", "TP2", "PP2"])
def test_three_clipped_steps_equal_adamw_of_torch(workers, tiny_qwen, tmp_path, layout):
    """Weights within 1e-6, tied embedding included; decay on matrices only; the norm is that before clipping."""
    done = workers.run(take_steps, 2, layout, tiny_qwen.qwen2, tmp_path / "trained")
    expected, norms = steps_of_torch(tiny_qwen.qwen2)
    assert min(norms) > 1.0  # clipping takes place
    assert done[0] == done[1] == pytest.approx(norms, rel=1e-5)
    trained = load_file(tmp_path / "trained" / "model.safetensors")
    source = load_file(tiny_qwen.qwen2 / "model.safetensors")
    assert sorted(trained) == sorted(expected)
    for name, weight in expected.items():
        torch.testing.assert_close(trained[name], weight, rtol=0, atol=1e-6, msg=lambda text, name=name: name + text)
        assert (trained[name] - source[name]).abs().max() > 1e-4


@pytest.mark.parametrize("num_processes", [1, 2])
def test_loaded_weights_survive_the_first_steps_in_bf16(workers, tiny_qwen, tmp_path, num_processes):
    """RC52: the optimizer is built first, then weights are loaded; its masters hold them, not the random start."""
    target = tmp_path / "after zero gradient"
    done = workers.run(load_then_step, num_processes, tiny_qwen.qwen2, target)
    source = load_file(tiny_qwen.qwen2 / "model.safetensors")
    exported = load_file(target / "model.safetensors")
    assert sorted(exported) == sorted(source)
    assert [name for name in source if not torch.equal(exported[name], source[name].to(torch.bfloat16))] == []
    for rank in done:
        assert rank["unchanged by a zero gradient"]
        assert rank["rounding steps"] <= 1
        assert 0.5e-6 < rank["largest move of a master"] < 1.1e-6


def load_then_step(world, source: Path, target: Path) -> dict:
    settings = OptimizerSettings(lr=1.0, weight_decay=0.0)
    trainable = build(world, Layout(), torch.bfloat16, source, settings)
    trainable.load_hf(source)
    imported = weights_of(trainable)
    trainable.zero_grad()
    result = trainable.step(1.0)
    assert (result.grad_norm, result.applied) == (0.0, True)
    unchanged = all_equal(imported, weights_of(trainable))
    export_hf(target, trainable.models, trainable.mesh)
    masters = [master.detach().clone() for master in trainable.optimizer.get_parameters()]
    assert {master.dtype for master in masters} == {torch.float32}
    assert learn(trainable, 1e-6).applied
    moves = [(a - b).abs().max() for a, b in zip(masters, trainable.optimizer.get_parameters(), strict=True)]
    return {
        "unchanged by a zero gradient": unchanged,
        # Neighbouring bf16 numbers of one sign are neighbouring integers, bit by bit.
        "rounding steps": max(
            int((a.view(torch.int16).int() - b.view(torch.int16).int()).abs().max())
            for a, b in zip(imported, weights_of(trainable), strict=True)
        ),
        "largest move of a master": float(max(moves)),
    }


def all_equal(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def weights_of(trainable: Trainable) -> list[torch.Tensor]:
    return [parameter.detach().clone() for model in trainable.models for parameter in model.parameters()]


def test_masters_overrule_weights_that_changed_without_notice(workers, tiny_qwen):
    """What `weights_changed` is for; without it the test above would see the random start again (RC52)."""
    assert workers.run(change_without_notice, 1, tiny_qwen.qwen2) == [(False, True)]


def change_without_notice(world, folder: Path) -> tuple[bool, bool]:
    trainable = build(world, Layout(), torch.bfloat16, folder, OptimizerSettings(weight_decay=0.0))
    kept = []
    for notice in (False, True):
        import_hf(folder, trainable.models, trainable.mesh)
        if notice:
            trainable.weights_changed()
        imported = weights_of(trainable)
        trainable.zero_grad()
        trainable.step(1e-6)
        kept.append(all_equal(imported, weights_of(trainable)))
    return tuple(kept)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("factor", [float("nan"), float("inf")])
def test_gradient_that_is_not_finite_changes_nothing_on_any_rank(workers, tiny_qwen, factor, dtype):
    """It comes from data rank 1 alone. Weights, masters and moments stay as they are, and it leaves no trace later."""
    for rank in workers.run(take_bad_step, 2, tiny_qwen.qwen2, factor, dtype):
        assert rank["applied"] == [True, False, True]
        assert not math.isfinite(rank["bad norm"])
        assert rank["messages"] == [f"optimizer step skipped: gradient norm is {rank['bad norm']}"]
        assert rank["unchanged by the bad step"]
        assert rank["equal to never having had it"]


def take_bad_step(world, folder: Path, factor: float, dtype: torch.dtype) -> dict:
    trainable = build(world, Layout(), dtype, folder, SETTINGS)
    trainable.load_hf(folder)
    first = learn(trainable, 1e-3)
    before = all_parameters(trainable)
    with Records("parallel.optimizer") as records:
        bad = learn(trainable, 1e-3, factor=factor if world.rank == 1 else 1.0)
    after = all_parameters(trainable)
    second = learn(trainable, 1e-3)
    untouched = Trainable(build_model(read_shape(folder), trainable.mesh, dtype), trainable.mesh, SETTINGS)
    untouched.load_hf(folder)
    for _ in range(2):
        learn(untouched, 1e-3)
    return {
        "applied": [first.applied, bad.applied, second.applied],
        "bad norm": bad.grad_norm,
        "messages": records.messages,
        "unchanged by the bad step": all_equal(before, after),
        "equal to never having had it": all_equal(all_parameters(trainable), all_parameters(untouched)),
    }
