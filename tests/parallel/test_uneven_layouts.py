"""Layouts whose ranks have unequal parts: more tensor ranks than key/value heads, pipeline stages of unequal length."""

import re
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from transformers import Qwen2Config, Qwen3Config

from parallel.log_probs import score_tokens
from parallel.mesh import Layout, build_mesh
from parallel.model import build_model
from parallel.optimizer import OptimizerSettings, Trainable
from parallel.pack import pack_sequences
from parallel.qwen import SIZES as PUBLISHED
from parallel.qwen import read_shape, transformer_config
from parallel.schedule import forward_backward
from parallel.weights import export_hf
from tests.parallel.hf_models import check_equal, logits_of, make_model, tensors_of
from tests.tiny_model import SIZES, assert_relatively_close, draw_sequences, hf_gradients

# Four query heads to a key/value head, so that each of four tensor ranks has two of the four.
WIDE = SIZES | {"num_attention_heads": 8, "num_hidden_layers": 6}
CONFIGS = {
    "qwen2": Qwen2Config(**WIDE, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**WIDE, head_dim=16, tie_word_embeddings=False),
}
# Layout and, for each pipeline rank, the numbers of its layers in the order of its chunks.
ALL_LAYERS = [[1, 2, 3, 4, 5, 6]]
LAYOUTS = {
    "TP4": (Layout(4), ALL_LAYERS),
    "TP4, sequence parallel": (Layout(4, sequence_parallel=True), ALL_LAYERS),
    "PP2, last 1": (Layout(1, 2, num_layers_in_last_pipeline_stage=1), [[1, 2, 3, 4, 5], [6]]),
    "PP2 x VP2, last 2": (Layout(1, 2, 2, num_layers_in_last_pipeline_stage=2), [[1, 2, 4, 5], [3, 6]]),
    "PP2 x VP2, first 2": (Layout(1, 2, 2, num_layers_in_first_pipeline_stage=2), [[1, 4], [2, 3, 5, 6]]),
    "PP4, first 2, last 2": (
        Layout(1, 4, num_layers_in_first_pipeline_stage=2, num_layers_in_last_pipeline_stage=2),
        [[1, 2], [3], [4], [5, 6]],
    ),
    "TP2 x PP2, sequence parallel, first 4": (
        Layout(2, 2, sequence_parallel=True, num_layers_in_first_pipeline_stage=4),
        [[1, 2, 3, 4], [5, 6]],
    ),
}
# A large epsilon: where a gradient is nearly zero, its sign (and with a small epsilon the whole step) is rounding.
SETTINGS = OptimizerSettings(lr=1e-3, adam_eps=1e-3)
LENGTHS = [9, 4, 17, 2]
PACKS = [[0, 1], [2, 3]]
NUM_STEPS = 2
TWELVE_LAYERS = replace(PUBLISHED["Qwen2.5-0.5B"], num_layers=12)


@dataclass(frozen=True)
class Done:
    """What one rank saw: the first logits and each step's loss over all packs (on the last stage), each step's gradient
    norm, the whole gradient of the first step and the parameters after all, the numbers of its layers."""

    logits: torch.Tensor | None
    losses: list[float]
    grad_norms: list[float]
    gradients: dict[str, torch.Tensor]
    parameters: dict[str, torch.Tensor]
    layers: list[int]


def train(world, layout: Layout, source: Path, target: Path) -> Done:
    """Load, compute logits, write the model back to `target/same`, learn."""
    mesh = build_mesh(layout, world)
    trainable = Trainable(build_model(read_shape(source), mesh, torch.float32), mesh, SETTINGS)
    trainable.load_hf(source)
    logits = logits_of(trainable.models, mesh)
    export_hf(target / "same", trainable.models, mesh, source)
    losses, grad_norms = [], []
    for step in range(NUM_STEPS):
        trainable.zero_grad()
        kept = forward_backward(trainable.chunks, all_packs(layout), loss)
        losses.append(sum(float(metrics["loss"]) for metrics in kept))
        if step == 0:
            gradients = hf_gradients(trainable, target / "gradients")
        grad_norms.append(trainable.step(SETTINGS.lr).grad_norm)
    export_hf(target / "trained", trainable.models, mesh)
    layers = [layer.layer_number for model in trainable.models for layer in model.decoder.layers]
    return Done(logits, losses, grad_norms, gradients, tensors_of(target / "trained"), layers)


def all_packs(layout: Layout) -> list:
    sequences = draw_sequences(LENGTHS)
    masks = [torch.arange(len(tokens)) > 0 for tokens in sequences]
    multiple = layout.tensor_model_parallel_size if layout.sequence_parallel else 1
    return [pack_sequences([sequences[i] for i in pack], [masks[i] for i in pack], multiple) for pack in PACKS]


def loss(model, hidden, pack):
    log_probs, entropy = score_tokens(model, hidden, pack)
    total = -log_probs.mean() - 0.3 * entropy.mean()
    return total, {"loss": total.detach().clone()}


@pytest.fixture(scope="module")
def sources(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("wide")
    for family, config in CONFIGS.items():
        make_model(config, folder / family, scale=0.1)
    return {family: folder / family for family in CONFIGS}


@pytest.fixture(scope="module")
def one_process(workers, sources, tmp_path_factory) -> dict[str, Done]:
    folder = tmp_path_factory.mktemp("one process")
    return {family: workers.run(train, 1, Layout(), sources[family], folder / family)[0] for family in sources}


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("name", LAYOUTS)
def test_training_equals_that_of_one_process(workers, sources, one_process, tmp_path, name, family):
    """Logits, loss, gradients and their norm within 1e-5, parameters after two steps within 1e-6; export bit-equal."""
    layout, layers = LAYOUTS[name]
    done = workers.run(train, layout.model_parallel_size, layout, sources[family], tmp_path, timeout_seconds=180)
    expected = one_process[family]
    size = layout.tensor_model_parallel_size
    assert [rank.layers for rank in done[::size]] == layers
    for rank in done[-size:]:
        torch.testing.assert_close(rank.logits, expected.logits, rtol=0, atol=1e-5)
        assert rank.losses == pytest.approx(expected.losses, rel=1e-5)
    for rank in done:
        assert rank.grad_norms == pytest.approx(expected.grad_norms, rel=1e-5)
    assert_relatively_close(done[0].gradients, expected.gradients, 1e-5)
    assert_relatively_close(done[0].parameters, expected.parameters, 1e-6)
    source = tensors_of(sources[family])
    assert min(float((expected.parameters[name] - source[name]).norm() / source[name].norm()) for name in source) > 1e-4
    check_equal(tensors_of(tmp_path / "same"), source)


def uneven(pipeline: int, virtual: int | None = None, first: int | None = None, last: int | None = None) -> Layout:
    return Layout(
        1, pipeline, virtual, num_layers_in_first_pipeline_stage=first, num_layers_in_last_pipeline_stage=last
    )


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        (
            uneven(2, last=4),
            "num_layers_in_last_pipeline_stage: got 4, allowed with num_layers 4, pipeline_model_parallel_size 2: "
            "[1, 2, 3]",
        ),
        (
            uneven(3, first=1),
            "num_layers_in_first_pipeline_stage: got 1, allowed with num_layers 4, pipeline_model_parallel_size 3: [2]",
        ),
        (
            uneven(2, first=0),
            "num_layers_in_first_pipeline_stage: got 0, allowed with num_layers 4, pipeline_model_parallel_size 2: "
            "[1, 2, 3]",
        ),
        (
            uneven(2, first=1, last=2),
            "num_layers_in_last_pipeline_stage: got 2, allowed with num_layers 4, pipeline_model_parallel_size 2, "
            "num_layers_in_first_pipeline_stage 1: [3]",
        ),
        (
            uneven(2, 2, last=1),
            "num_layers_in_last_pipeline_stage: got 1, allowed with num_layers 4, pipeline_model_parallel_size 2, "
            "virtual_pipeline_model_parallel_size 2: [2]",
        ),
        (
            uneven(1, first=4),
            "num_layers_in_first_pipeline_stage: got 4, allowed with num_layers 4, pipeline_model_parallel_size 1: "
            "none",
        ),
        (
            uneven(1, first=2, last=2),
            "num_layers_in_last_pipeline_stage: got 2, allowed with num_layers 4, pipeline_model_parallel_size 1, "
            "num_layers_in_first_pipeline_stage 2: none",
        ),
        (
            uneven(3, first=3, last=1),
            "num_layers_in_last_pipeline_stage: got 1, allowed with num_layers 4, pipeline_model_parallel_size 3, "
            "num_layers_in_first_pipeline_stage 3: none",
        ),
    ],
)
def test_stages_that_do_not_add_up_are_refused(layout, message):
    four_layers = replace(PUBLISHED["Qwen2.5-0.5B"], num_layers=4)
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        layout.check(four_layers, 12)


@pytest.mark.parametrize("virtual", [None, 2])
@pytest.mark.parametrize("pipeline", [2, 3, 4])
def test_accepted_splits_are_those_that_megatron_lays_end_to_end(pipeline, virtual):
    """12 layers, every pair of numbers: accepted if and only if megatron-core's stages hold each layer once, in order,
    and its first and last rank as many as asked for."""
    accepted, right = set(), set()
    for first in (None, *range(1, 12)):
        for last in (None, *range(1, 12)):
            layout = uneven(pipeline, virtual, first, last)
            with suppress(ValueError):
                layout.check(TWELVE_LAYERS, pipeline)
                accepted.add((first, last))
            with suppress(ValueError, AssertionError):
                layers, counts = megatron_stages(layout)
                if layers == list(range(12)) and first in (None, counts[0]) and last in (None, counts[-1]):
                    right.add((first, last))
    assert accepted == right
    assert len(accepted) > 2


def megatron_stages(layout: Layout) -> tuple[list[int], list[int]]:
    """The 12 layers in the order in which a token passes them, and how many each pipeline rank has."""
    config = transformer_config(TWELVE_LAYERS, layout, torch.float32, torch.device("cpu"))
    layers: list[int] = []
    counts = [0] * layout.pipeline_model_parallel_size
    for stage in [None] if layout.num_chunks == 1 else range(layout.num_chunks):
        for rank in range(len(counts)):
            offset = get_transformer_layer_offset(config, stage, rank)
            count = get_num_layers_to_build(config, stage, rank)
            layers += range(offset, offset + count)
            counts[rank] += count
    return layers, counts
