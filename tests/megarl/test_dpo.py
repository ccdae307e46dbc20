"""DPO from command-line flags to the loss value, its reference, and a whole run."""

import json
import logging
import shutil
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from examples import train_dpo
from megarl.batch import Sample, TrainPack
from megarl.config_preferences import DPOConfig
from megarl.dpo import DPOHead, add_reference
from megarl.dpo import train_dpo as run_dpo
from megarl.losses import PreferenceLoss
from megarl.preference import Unit, load_pairs, pack_pairs
from megarl.reference_cache import ReferenceCache
from parallel.mesh import Layout, Mesh, build_mesh
from tests.megarl.small_batches import build
from tests.megarl.small_pairs import dpo_config
from tests.tiny_model import load_transformers

IPO = PreferenceLoss("ipo", beta=0.1)


def sample(prompt_id: int, ratios: list[float], counted: list[bool] | None = None) -> Sample:
    """An answer whose tokens have these log-ratios where the policy's log-probs are 0."""
    ref, unused = -torch.tensor(ratios), torch.zeros(len(ratios))
    answer = tuple(range(5, 5 + len(ratios)))
    return Sample(prompt_id, 0, (1, 2), answer, unused, 0.0, False, loss_mask=counted, ref_log_probs=ref)


def outcome(loss: PreferenceLoss, pack: TrainPack) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Loss [P], its gradient to the log-probs [N], and metrics [P] of a pack, for log-probs of 0."""
    log_probs = torch.zeros(len(pack.scored), requires_grad=True)
    losses, metrics = DPOHead(loss).from_log_probs(log_probs, pack)
    losses.sum().backward()
    return losses.detach(), log_probs.grad, metrics


def packed(mesh: Mesh, *units: Unit) -> TrainPack:
    (pack,), _ = pack_pairs(units, 100, mesh)
    return pack


@pytest.fixture
def mesh(single_world) -> Mesh:
    return build_mesh(Layout(), single_world)


def test_ipo_averages_over_the_tokens_of_each_answer(mesh):
    """RC35: 3 tokens of log-ratio 9 in all against one of -3: margin 6, loss (6 - 5)^2; the sum version gives 49."""
    pack = packed(mesh, (sample(0, [2.0, 3.0, 4.0]), sample(0, [-3.0])))
    losses, gradient, metrics = outcome(IPO, pack)
    assert losses.tolist() == pytest.approx([1.0])
    assert gradient.tolist() == pytest.approx([2 / 3, 2 / 3, 2 / 3, -2.0])
    assert [metrics[name].item() for name in ("chosen_reward", "rejected_reward")] == pytest.approx([0.3, -0.3])


def test_only_ipo_averages(mesh):
    """RC35: the same pair has a margin of 12 by sums."""
    pack = packed(mesh, (sample(0, [2.0, 3.0, 4.0]), sample(0, [-3.0])))
    assert outcome(PreferenceLoss("hinge", beta=0.05), pack)[0].tolist() == pytest.approx([0.4])
    losses, gradient, metrics = outcome(PreferenceLoss("sigmoid", beta=0.1), pack)
    assert losses.tolist() == pytest.approx([0.263282], abs=1e-6)  # log(1 + e^-1.2)
    assert gradient.tolist() == pytest.approx([-0.0231475] * 3 + [0.0231475], abs=1e-6)  # 0.1 / (1 + e^1.2)
    assert metrics["margin"].tolist() == pytest.approx([1.2])


def test_a_token_that_is_masked_is_in_no_sum_and_no_divisor(mesh):
    """RC35: the end token excluded from sum and count."""
    pack = packed(mesh, (sample(0, [4.0, 5.0, 90.0], [True, True, False]), sample(0, [-1.5])))
    losses, gradient, metrics = outcome(IPO, pack)
    assert losses.tolist() == pytest.approx([1.0])
    assert gradient.tolist() == pytest.approx([1.0, 1.0, 0.0, -2.0])
    assert metrics["nll"].tolist() == [0.0]


@pytest.mark.parametrize("kind", ["sigmoid", "ipo", "hinge"])
@pytest.mark.parametrize("empty", [sample(0, []), sample(0, [7.0], [False])])
def test_an_answer_without_tokens_has_a_finite_loss(mesh, kind, empty):
    """RC35: also in the last place of a pack, and without any other pair."""
    for units in ([(empty, sample(0, [-6.0]))], [(sample(0, [1.0]), sample(0, [2.0])), (sample(1, [6.0]), empty)]):
        losses, gradient, metrics = outcome(PreferenceLoss(kind, beta=0.1, nll=1.0), packed(mesh, *units))
        assert losses.isfinite().all()
        assert gradient.isfinite().all()
        assert all(values.isfinite().all() for values in metrics.values())
        assert metrics["margin"][-1].item() == pytest.approx(0.6)


def test_pairs_in_one_pack_are_as_alone(mesh):
    """RC35"""
    units = [(sample(0, [2.0, 3.0, 4.0]), sample(0, [-3.0])), (sample(1, [1.0]), sample(1, [0.5, -4.0]))]
    together = outcome(IPO, packed(mesh, *units))
    separate = [outcome(IPO, packed(mesh, unit)) for unit in units]
    for pair, (losses, _, metrics) in enumerate(separate):
        assert together[0][pair] == losses[0]
        assert {name: values[pair] for name, values in together[2].items()} == {
            name: values[0] for name, values in metrics.items()
        }


def test_the_nll_term_is_the_mean_over_the_chosen_answer(mesh):
    pack = packed(mesh, (sample(0, [0.0, 0.0]), sample(0, [0.0, 0.0, 0.0])))
    log_probs = torch.tensor([-1.0, -3.0, -9.0, -9.0, -9.0])
    pack = replace(pack, ref_log_probs=log_probs)
    losses, metrics = DPOHead(PreferenceLoss(nll=0.5)).from_log_probs(log_probs, pack)
    assert losses.tolist() == pytest.approx([0.693147 + 0.5 * 2.0], abs=1e-6)
    assert [metrics[name].item() for name in ("nll", "chosen_log_prob", "rejected_log_prob")] == [2.0, -4.0, -27.0]
    assert metrics["accuracy"].item() == 0.0  # a margin of 0 is not right


@dataclass(frozen=True)
class Prepared:
    """A model, a file with one pair and a cache that holds its log-probs."""

    model: Path
    preferences: Path
    cache: Path


def run_with_flags(monkeypatch, folder: Path, prepared: Prepared, flags: str) -> dict[str, float]:
    """Run the example for one step on one pair; returns the metrics of the step."""
    paths = ["--model", prepared.model, "--preferences", prepared.preferences, "--output", folder]
    paths += ["--reference-cache", prepared.cache]
    fixed = "--num-steps 1 --batch-size 1 --max-tokens-per-pack 64 --lr 1e-3"
    arguments = [*map(str, paths), *fixed.split(), *flags.split()]
    monkeypatch.setattr(sys, "argv", ["train_dpo.py", *arguments])
    train_dpo.main()
    return json.loads((folder / "metrics.jsonl").read_text())


@pytest.fixture(scope="module")
def prepared(small_run, tmp_path_factory) -> Prepared:
    folder = tmp_path_factory.mktemp("one pair")
    (folder / "pair.jsonl").write_text('{"prompt": "21>", "chosen": "1", "rejected": "2"}\n')
    found = Prepared(small_run.folder / "model", folder / "pair.jsonl", folder / "cache")
    with pytest.MonkeyPatch.context() as monkeypatch:
        assert run_with_flags(monkeypatch, folder / "run", found, "--beta 0.1")["loss"] == pytest.approx(0.693147)
    return found


@pytest.mark.parametrize(
    ("flags", "log_ratios", "loss"),
    [
        ("--loss sigmoid --beta 0.1", [1.5, 1.5], 0.437488),
        ("--loss hinge --beta 0.1", [1.5, 1.5], 0.4),
        ("--loss ipo --beta 0.1", [3.0, 3.0], 1.0),
        ("--label-smoothing 0.1 --beta 0.1", [1.5, 1.5], 0.497488),
        ("--loss sigmoid --beta 0.1", [-500.0, -500.0], 200.0),
    ],
)
def test_every_flag_of_the_loss_reaches_it(monkeypatch, tmp_path, prepared, flags, log_ratios, loss):
    """RC37: a reference that makes the margin 6 (mean for ipo, else sum), then beta * margin = -200. The model is a
    real one: its log-probs of two tokens each are taken from the cache, moved and put back."""
    shutil.copytree(prepared.cache, tmp_path / "cache")
    (path,) = (tmp_path / "cache").iterdir()
    cache = ReferenceCache(path, [2, 2])
    moved = torch.tensor([*log_ratios, *(-ratio for ratio in log_ratios)])
    cache.write(cache.read() - moved)
    metrics = run_with_flags(monkeypatch, tmp_path / "run", replace(prepared, cache=tmp_path / "cache"), flags)
    assert metrics["loss"] == pytest.approx(loss, abs=2e-5)
    assert metrics["applied"] == 1.0
    assert 0 < metrics["grad_norm"] < 100


def test_beta_and_nll_reach_the_loss(monkeypatch, tmp_path, prepared):
    """At the start the margin is 0: ipo's loss is (1 / 2 beta)^2 and the nll term adds its weight times the nll."""
    plain = run_with_flags(monkeypatch, tmp_path / "plain", prepared, "--loss ipo --beta 0.25")
    assert plain["loss"] == pytest.approx(4.0, abs=1e-4)
    assert plain["nll"] > 1.0
    weighed = run_with_flags(monkeypatch, tmp_path / "nll", prepared, "--loss ipo --beta 0.25 --nll 0.5")
    assert weighed["loss"] == pytest.approx(plain["loss"] + 0.5 * plain["nll"], abs=1e-4)


def train(world, config: DPOConfig) -> dict[str, float]:
    return run_dpo(config, config.check(world.world_size), world)


def answers_of_transformers(folder: Path, units: list[Unit]) -> torch.Tensor:
    """Log-prob of each answer, one row at a time, `[P, 2]`."""
    model = load_transformers(folder)
    with torch.no_grad():
        return torch.tensor([[_answer(model, chosen), _answer(model, rejected)] for chosen, rejected in units])


def _answer(model, row: Sample) -> float:
    tokens = torch.tensor([*row.prompt, *row.response])
    table = model(tokens[None]).logits[0, len(row.prompt) - 1 : -1].log_softmax(-1)
    return float(table.gather(1, tokens[len(row.prompt) :, None]).sum())


def test_a_run_on_two_ranks_reports_what_transformers_finds_in_its_folders(small_run, tmp_path, workers):
    """RC35: packed rows against each row alone. Before training all margins are 0."""
    config = dpo_config(small_run, tmp_path, nll=1.0)
    config = replace(config, data=replace(config.data, eval_every=1))
    first, second = workers.run(train, 2, config)
    assert {**first, "training_seconds": 0} == {**second, "training_seconds": 0}
    heldout = load_pairs(config, config_shape(config)).heldout
    before, after = (answers_of_transformers(path, heldout) for path in (config.run.model, config.run.output / "hf"))
    rewards = 0.1 * (after - before)
    expected = {
        "chosen_log_prob_before": before[:, 0].mean(),
        "rejected_log_prob_before": before[:, 1].mean(),
        "chosen_log_prob_after": after[:, 0].mean(),
        "chosen_reward_after": rewards[:, 0].mean(),
        "rejected_reward_after": rewards[:, 1].mean(),
        "margin_after": (rewards[:, 0] - rewards[:, 1]).mean(),
        "accuracy_after": (rewards[:, 0] > rewards[:, 1]).float().mean(),
    }
    assert {name: first[name] for name in expected} == pytest.approx(
        {name: float(value) for name, value in expected.items()}, abs=1e-4
    )
    assert first["margin_before"] == pytest.approx(0.0, abs=1e-6)
    check_files(config)


def config_shape(config: DPOConfig):
    return replace(config, run=replace(config.run, output=config.run.output.parent / "unused")).check(world_size=1)


def check_files(config: DPOConfig) -> None:
    output = config.run.output
    names = {path.name for path in output.iterdir()}
    assert {"config.json", "metrics.jsonl", "summary.json", "logs", "hf", "curves.png"} <= names
    assert json.loads((output / "config.json").read_text())["dpo"]["nll"] == 1.0
    records = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == [1, 2]
    assert all({"eval_loss", "eval_accuracy", "margin", "chosen_log_prob"} <= set(record) for record in records)


@pytest.mark.parametrize(("world_size", "layout"), [(2, Layout(1, 2)), (4, Layout(2))], ids=["PP2", "DP2 x TP2"])
def test_runs_are_the_same_on_every_layout_with_and_without_a_cache(small_run, tmp_path, workers, world_size, layout):
    (expected,) = workers.run(train, 1, dpo_config(small_run, tmp_path / "alone"))
    config = dpo_config(small_run, tmp_path / "layout", layout)
    for number, cached in enumerate((True, True, False)):
        run = replace(config.run, output=tmp_path / str(number))
        one = replace(config, run=run, dpo=replace(config.dpo, cache_reference=cached))
        for rank in workers.run(train, world_size, one):
            expected["training_seconds"] = rank["training_seconds"]
            assert rank == pytest.approx(expected, rel=1e-3, abs=1e-5)


def test_the_reference_is_read_from_the_cache_and_computed_again_if_that_is_broken(small_run, tmp_path, mesh, caplog):
    config = dpo_config(small_run, tmp_path)
    config.dpo.reference_cache.mkdir()
    policy = build(mesh, config.run.model)
    units = load_pairs(config, config_shape(config)).heldout
    computed = references(add_reference(units, policy, config))
    (path,) = config.dpo.reference_cache.iterdir()
    ReferenceCache(path, [len(row.response) for unit in units for row in unit]).write(computed - 1.0)
    assert torch.equal(references(add_reference(units, policy, config)), computed - 1.0)
    uncached = replace(config, dpo=replace(config.dpo, cache_reference=False))
    assert torch.equal(references(add_reference(units, policy, uncached)), computed)
    path.write_bytes(path.read_bytes()[:100])
    with caplog.at_level(logging.WARNING):
        assert torch.equal(references(add_reference(units, policy, config)), computed)
    assert "computed again" in caplog.text
    assert add_reference([], policy, config) == []


def references(units: list[Unit]) -> torch.Tensor:
    return torch.cat([row.ref_log_probs for unit in units for row in unit])
