"""Weights on their way from training's layout into another on the same ranks, and what the models there compute."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from transformers import Qwen2Config, Qwen3Config

from parallel.mesh import Layout, build_mesh
from parallel.model import build_model
from parallel.pack import pack_sequences
from parallel.qwen import read_shape
from parallel.reshard import Resharder, build_inference_mesh, check_inference_layout
from parallel.weights import import_hf
from tests.parallel.hf_models import SIZES, TOKENS, logits_of, make_model

# 100 rows are 128 inside with one tensor rank and 256 with two: rows of padding come and go.
CONFIGS = {
    "qwen2": Qwen2Config(**(SIZES | {"vocab_size": 100}), tie_word_embeddings=True),
    "qwen3": Qwen3Config(**(SIZES | {"vocab_size": 100}), head_dim=16, tie_word_embeddings=False),
}
PAIRS = {
    "TP2 x PP2 to DP4": (Layout(2, 2), Layout()),
    "TP2 x PP2, sequence parallel, to TP2 x DP2": (Layout(2, 2, sequence_parallel=True), Layout(2)),
    "PP2 with 2 virtual stages x DP2 to TP2 x DP2": (Layout(1, 2, 2), Layout(2)),
    "PP4 to DP4": (Layout(1, 4), Layout()),
    "PP2 of 3 + 1 layers x DP2 to DP4": (Layout(1, 2, num_layers_in_last_pipeline_stage=1), Layout()),
    "TP4 of 2 key/value heads to TP2 x DP2": (Layout(4), Layout(2)),
    "TP4 of 2 key/value heads to TP4": (Layout(4), Layout(4)),
    "DP4 to TP2 x DP2": (Layout(), Layout(2)),
}


def reshard(world, folders: list[Path], training: Layout, inference: Layout) -> list[dict]:
    mesh = build_mesh(training, world)
    other = build_inference_mesh(inference, mesh, read_shape(folders[0]))
    return [reshard_one(folder, mesh, other) for folder in folders]


def reshard_one(folder: Path, mesh, other) -> dict:
    shape = read_shape(folder)
    sources = build_model(shape, mesh, torch.float32)
    import_hf(folder, sources, mesh)
    targets, expected = build_model(shape, other, torch.float32), build_model(shape, other, torch.float32)
    import_hf(folder, expected, other)
    resharder = Resharder(sources, mesh, targets, other)
    resharder.refit()
    equal = all_equal(targets, expected, 1.0)
    logits = inference_logits(targets[0], other)
    for parameter in (parameter for model in sources for parameter in model.parameters()):
        parameter.data.mul_(2.0)
    resharder.refit()
    return {
        "equal to an import": equal,
        "follows the source": all_equal(targets, expected, 2.0),
        "logits": logits,
        "training logits": logits_of(sources, mesh),
    }


def all_equal(found, expected, factor: float) -> bool:
    return all(torch.equal(a, b * factor) for a, b in zip(found[0].parameters(), expected[0].parameters(), strict=True))


@torch.no_grad()
def inference_logits(model, mesh) -> torch.Tensor:
    hidden = model(pack_sequences([TOKENS], [torch.zeros(len(TOKENS), dtype=torch.bool)]))
    local = hidden[:, 0] @ model.output_weight().T
    shards = [torch.empty_like(local) for _ in range(mesh.tensor_size)]
    dist.all_gather(shards, local, group=mesh.tensor_group)
    return torch.cat(shards, dim=1)[:, : model.shape.vocab_size]


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[Path, torch.nn.Module]:
    folder = tmp_path_factory.mktemp("models")
    return {folder / family: make_model(config, folder / family) for family, config in CONFIGS.items()}


@pytest.mark.parametrize(("training", "inference"), PAIRS.values(), ids=PAIRS)
def test_weights_arrive_bit_equal_and_both_models_compute_alike(workers, models, training, inference):
    """Also a second time, when the source has changed; training's own groups stay as they were."""
    done = workers.run(reshard, 4, list(models), training, inference, timeout_seconds=180)
    for number, model in enumerate(models.values()):
        with torch.no_grad():
            expected = model(TOKENS[None]).logits[0]
            for parameter in model.parameters():
                parameter.mul_(2.0)
            doubled = model(TOKENS[None]).logits[0]
            for parameter in model.parameters():
                parameter.div_(2.0)
        for rank in (results[number] for results in done):
            assert rank["equal to an import"]
            assert rank["follows the source"]
            torch.testing.assert_close(rank["logits"], expected, rtol=0, atol=1e-5)
            if rank["training logits"] is not None:
                torch.testing.assert_close(rank["training logits"], doubled, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(
    ("training", "inference", "message"),
    [
        (Layout(1, 2), Layout(1, 2), "pipeline_model_parallel_size of the inference layout: got 2, allowed: 1"),
        (
            Layout(),
            Layout(2, sequence_parallel=True),
            "sequence_parallel of the inference layout: got True, allowed",
        ),
        (
            Layout(2, 2),
            Layout(4),
            "tensor_model_parallel_size of the inference layout: got 4, allowed: up to num_query_groups = 2, or "
            "training's size 2",
        ),
        (Layout(), Layout(3), "tensor_model_parallel_size: got 3, but num_attention_heads = 4 is no multiple of it"),
    ],
)
def test_layout_that_cannot_stand_beside_trainings_is_refused(models, training, inference, message):
    shape = read_shape(next(iter(models)))
    with pytest.raises(ValueError, match=f"^{message}"):
        check_inference_layout(inference, training, shape, 12)
