"""The reward model: its loss, and a folder that transformers and `--reward-model` read alike."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification

from megarl.batch import Sample
from megarl.config_preferences import RewardModelConfig
from megarl.passes import state_values
from megarl.preference import Unit, load_pairs, mean_over_pairs, pack_pairs
from megarl.reward_model import reward_head, train_reward_model
from parallel.mesh import Layout, build_mesh
from parallel.model import build_model
from parallel.qwen import read_shape
from parallel.schedule import forward
from parallel.weights import import_hf
from tests.megarl.small_batches import build
from tests.megarl.small_pairs import BUDGET, draw_units, reward_config
from tests.tiny_model import Records

PADDING = 317


def train(world, config: RewardModelConfig) -> tuple[dict[str, float], list[str]]:
    with Records("parallel.weights") as records:
        return train_reward_model(config, config.check(world.world_size), world), records.messages


def score_rows(world, folder: Path, units: list[Unit]) -> list[float]:
    """What the model of a folder says of each answer as the reward model of a policy's run reads it."""
    mesh = build_mesh(Layout(), world)
    models = build_model(read_shape(folder), mesh, torch.float32, "scalar")
    import_hf(folder, models, mesh)
    values = state_values(models, [row for unit in units for row in unit], BUDGET, mesh)
    return [float(value[-1]) for value in values]


@torch.no_grad()
def scores_of_transformers(folder: Path, rows: list[Sample]) -> torch.Tensor:
    """Score a batch padded on the right, `[rows]`; transformers reads the last token that is no padding."""
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
    assert type(model).__name__ == "Qwen2ForSequenceClassification"
    assert model.config.pad_token_id == PADDING
    tokens = [torch.tensor([*row.prompt, *row.response]) for row in rows]
    ids = torch.nn.utils.rnn.pad_sequence(tokens, batch_first=True, padding_value=PADDING)
    return model(ids, attention_mask=ids != PADDING).logits.squeeze(1)


@pytest.mark.parametrize(
    "layout", [Layout(), Layout(2, sequence_parallel=True), Layout(1, 2)], ids=["DP2", "TP2", "PP2"]
)
def test_the_trained_folder_scores_the_same_in_transformers_and_as_reward_model(small_run, tmp_path, workers, layout):
    """RC31: the head is new, small, warned of once, and comes back bit for bit."""
    config = reward_config(small_run, tmp_path, layout)
    (first, messages), (second, silence) = workers.run(train, 2, config)
    assert {**first, "training_seconds": 0} == {**second, "training_seconds": 0}
    assert (len(messages), silence) == (1, [])
    folder = config.run.output / "hf"
    stated = json.loads((folder / "config.json").read_text())
    assert (stated["architectures"], stated["tie_word_embeddings"]) == (["Qwen2ForSequenceClassification"], False)
    assert load_file(folder / "model.safetensors")["score.weight"].shape == (1, 64)
    again = replace(config, run=replace(config.run, model=folder, output=tmp_path / "next"))
    heldout = load_pairs(again, again.check(world_size=2)).heldout  # a reward model is trained on from its own folder
    scores = scores_of_transformers(folder, [row for unit in heldout for row in unit])
    (found,) = workers.run(score_rows, 1, folder, heldout)
    assert found == pytest.approx(scores.tolist(), abs=1e-4)
    chosen, rejected = scores[0::2], scores[1::2]
    margins = torch.tensor([unit[0].score for unit in heldout])
    expected = {
        "chosen_reward": chosen.mean(),
        "rejected_reward": rejected.mean(),
        "margin": (chosen - rejected).mean(),
        "accuracy": (chosen > rejected).float().mean(),
        "loss": (1 + (rejected - chosen + margins).exp()).log().mean(),
    }
    assert margins.tolist() == pytest.approx([0.0, 0.1, 0.2])
    assert {name: first[f"{name}_after"] for name in expected} == pytest.approx(
        {name: float(value) for name, value in expected.items()}, abs=1e-4
    )
    assert first["margin_after"] != pytest.approx(first["margin_before"], abs=1e-3)


@pytest.mark.parametrize(("world_size", "layout"), [(2, Layout()), (4, Layout(2, 2))], ids=["DP2", "TP2 x PP2"])
def test_runs_are_the_same_on_every_layout(small_run, tmp_path, workers, world_size, layout):
    ((expected, _),) = workers.run(train, 1, reward_config(small_run, tmp_path / "alone"))
    for rank, _ in workers.run(train, world_size, reward_config(small_run, tmp_path / "layout", layout)):
        expected["training_seconds"] = rank["training_seconds"]
        assert rank == pytest.approx(expected, rel=1e-3, abs=1e-5)


def test_the_trained_folder_passes_the_check_of_a_policy_run(small_run, tmp_path, workers):
    config = reward_config(small_run, tmp_path)
    workers.run(train, 1, config)
    folder = config.run.output / "hf"
    policy = small_run.config(tmp_path / "policy", rollout={"reward_model": folder})
    assert policy.check(world_size=1).vocab_size == 320


def test_equal_scores_give_the_loss_of_a_coin_and_the_margin_shifts_it(workers, tiny_qwen):
    """A head of zeros: the loss of each pair is log(1 + e^margin), with margins 0, 0.1, ..., 0.4."""
    expected = sum(math.log(1 + math.exp(number / 10)) for number in range(5)) / 5
    (metrics,) = workers.run(loss_of_zeros, 1, tiny_qwen.qwen2)
    assert metrics.pop("loss") == pytest.approx(expected)
    assert set(metrics.values()) == {0.0}


def loss_of_zeros(world, folder: Path) -> dict[str, float]:
    trainable = build(build_mesh(Layout(), world), folder, "scalar")
    trainable.models[0].output_layer.weight.data.zero_()
    packs, num_pairs = pack_pairs(draw_units(), BUDGET, trainable.mesh)
    head = mean_over_pairs(reward_head, num_pairs)
    kept = forward(trainable.models, packs, lambda model, hidden, pack: head(model, hidden, pack)[1])
    return {name: float(sum(metrics[name] for metrics in kept)) for name in kept[0]}
