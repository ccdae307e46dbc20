"""The stages of rollout against the modules that are trained."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from parallel.inference import MIN_PACKED, FunctionalStage, ModuleStage, build_stage, linear
from parallel.launch import World
from parallel.layers import packed_attention
from parallel.mesh import Layout, build_mesh
from parallel.model import build_model
from parallel.pack import with_parents
from parallel.qwen import read_shape
from parallel.weights import import_hf
from tests.tiny_model import draw_sequences, write_tiny_qwens

LENGTHS = [3, 7, 1]


class PackCache:
    """A cache that stores nothing: the rows are whole sequences."""

    def __init__(self, scale: float):
        self.borders = (0, 3, 10, 11)
        self.scale = scale

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        attended = packed_attention(query[:11, 0], key[:11, 0], value[:11, 0], self.borders, self.scale)
        return torch.nn.functional.pad(attended, (0, 0, 0, len(query) - 11))[:, None]


def run_stages(world: World, layout: Layout, folder: Path, dtype: torch.dtype) -> list[list[Tensor]]:
    """Final hidden states and logits by either kind of stage, and by the trained modules' own forward."""
    mesh = build_mesh(layout, world)
    (model,) = build_model(read_shape(folder), mesh, dtype)
    import_hf(folder, [model], mesh)
    tokens = torch.cat(draw_sequences(LENGTHS))
    positions = torch.cat([torch.arange(length) for length in LENGTHS])
    cache = PackCache(model.config.softmax_scale)
    results = []
    assert isinstance(build_stage(model), FunctionalStage)
    for stage in (FunctionalStage(model), ModuleStage(model)):
        hidden = stage(tokens, positions, None, cache)
        assert not hidden.requires_grad
        results.append([hidden, stage.logits(hidden)])
    assert all(layer.self_attention.core_attention.cache is None for layer in model.decoder.layers)
    if not layout.sequence_parallel:
        with torch.no_grad():
            trained = model.hidden_states(
                tokens, positions, with_parents(torch.tensor(cache.borders, dtype=torch.int32))
            )[:, 0]
        results.append([trained, results[1][1]])
    return results


@pytest.fixture(scope="module")
def qwens(tmp_path_factory):
    return write_tiny_qwens(tmp_path_factory.mktemp("qwens"))


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
@pytest.mark.parametrize(
    "layout", [Layout(), Layout(2), Layout(2, sequence_parallel=True)], ids=["TP1", "TP2", "TP2, sequence parallel"]
)
def test_both_stages_compute_what_the_trained_modules_compute(workers, qwens, family, layout):
    folder = vars(qwens)[family]
    for rank in workers.run(run_stages, layout.model_parallel_size, layout, folder, torch.float32):
        functional, modules, *trained = rank
        for found in (functional, *trained):
            for tensor, expected in zip(found, modules, strict=True):
                torch.testing.assert_close(tensor, expected, rtol=1e-5, atol=1e-5)
        assert functional[0].shape == (11, 64)


def test_in_bf16_they_agree_to_its_rounding(workers, qwens):
    (rank,) = workers.run(run_stages, 1, Layout(), qwens.qwen3, torch.bfloat16)
    functional, modules, trained = rank
    assert functional[0].dtype == torch.bfloat16
    assert functional[1].dtype == torch.bfloat16  # the sampler makes fp32 of it, exactly
    scale = trained[0].float().abs().mean()
    for found in (functional, modules):
        assert (found[0].float() - trained[0].float()).abs().mean() < 0.02 * scale


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(96, 64), (1024, MIN_PACKED // 1024)])
@pytest.mark.parametrize("with_bias", [False, True])
def test_linear_is_the_product_in_either_layout(dtype, shape, with_bias):
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(shape, generator=generator).to(dtype)
    bias = torch.randn(shape[0], generator=generator).to(dtype) if with_bias else None
    for rows in (1, 5):
        x = torch.randn(rows, shape[1], generator=generator).to(dtype)
        expected = x.double() @ weight.double().T + (0.0 if bias is None else bias.double())
        found = linear(weight, bias)(x)
        assert found.dtype == dtype
        precision = 1e-5 if dtype == torch.float32 else 2**-8
        torch.testing.assert_close(found.double(), expected, rtol=precision, atol=30 * precision)
