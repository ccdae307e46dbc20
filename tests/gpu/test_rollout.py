"""Rollout on one GPU: the cache in blocks, flash-attn, CUDA graphs. Not yet run on a GPU.

python -m pytest tests/gpu
"""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from parallel.inference import build_stage
from parallel.launch import World, detect_world, running
from parallel.log_probs import score_tokens
from parallel.mesh import Layout, Mesh, build_mesh
from parallel.model import QwenModel
from parallel.pack import pack_sequences
from parallel.schedule import forward
from rollout.block_attention import BlockAttention, GatheredBlocks, Prefill, choose_attention
from rollout.engine import Engine
from rollout.graphs import DecodeGraphs
from rollout.requests import Completion, Request
from rollout.sampling import SamplingParams
from rollout.steps import Chunk
from tests.rollout.engine_calls import PROMPTS, load
from tests.rollout.test_engine import greedy_without_cache
from tests.rollout.test_graphs import repeat
from tests.tiny_model import load_transformers, write_tiny_qwens

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
GROUPS = [Request(number, prompt, num_samples=4) for number, prompt in enumerate(PROMPTS)]
SAMPLED = SamplingParams(max_new_tokens=20, seed=1)


@pytest.fixture(scope="module")
def world() -> World:
    with running(detect_world({})) as started:
        yield started


@pytest.fixture(scope="module")
def mesh(world) -> Mesh:
    return build_mesh(Layout(), world)


@pytest.fixture(scope="module", params=["qwen2", "qwen3"])
def folder(request, tmp_path_factory) -> Path:
    return vars(write_tiny_qwens(tmp_path_factory.mktemp("tiny")))[request.param]


@pytest.fixture(scope="module")
def models(folder, mesh) -> list[QwenModel]:
    return load(folder, mesh, torch.bfloat16)


@pytest.fixture(scope="module")
def flash(models) -> BlockAttention:
    pytest.importorskip("flash_attn")
    attention = choose_attention(models[0], block_size=256)
    assert type(attention).__name__ == "FlashBlocks"
    return attention


def ints(numbers) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32, device="cuda")


def training_log_probs(models: list[QwenModel], completions: list[Completion]) -> Tensor:
    sequences = [torch.tensor(PROMPTS[c.prompt_id] + c.tokens) for c in completions]
    masks = [torch.arange(len(s)) >= len(PROMPTS[c.prompt_id]) for s, c in zip(sequences, completions, strict=True)]
    pack = pack_sequences(sequences, masks).to(torch.device("cuda", 0))
    return forward(models, [pack], lambda *given: score_tokens(*given)[0])[0].cpu()


def check_log_probs(models: list[QwenModel], completions: list[Completion]) -> None:
    rollout = torch.cat([completion.log_probs for completion in completions])
    difference = (training_log_probs(models, completions) - rollout).abs()
    assert difference.max() < 0.1  # bf16: kernels of decoding and training differ
    assert difference.mean() < 0.01


def test_greedy_tokens_equal_transformers_without_a_cache(folder, mesh):
    """fp32, which flash-attn doesn't take: torch on gathered blocks."""
    engine = Engine(load(folder, mesh), mesh, context_length=64, max_prefill_tokens=7)
    assert isinstance(engine.attention, GatheredBlocks)
    requests = [Request(number, prompt) for number, prompt in enumerate(PROMPTS)]
    completions = engine.generate(requests, SamplingParams(temperature=0.0, max_new_tokens=6))
    for completion, prompt in zip(completions, PROMPTS, strict=True):
        tokens, log_probs = greedy_without_cache(load_transformers(folder), prompt, 6)
        assert completion.tokens == tokens
        torch.testing.assert_close(completion.log_probs, torch.tensor(log_probs), rtol=0, atol=1e-3)


@pytest.mark.parametrize("cache_tokens", [None, 4 * 256], ids=["enough", "small"])
def test_log_probs_are_close_to_those_of_training(models, mesh, cache_tokens):
    """With whichever attention this machine has; 4 blocks let one group or two responses in at a time."""
    engine = Engine(models, mesh, context_length=64, max_cache_tokens=cache_tokens, max_prefill_tokens=7)
    completions = engine.generate(GROUPS, SAMPLED)
    assert [len(completion.tokens) for completion in completions] == [20] * len(completions)
    check_log_probs(models, completions)


def test_log_probs_of_gathered_blocks_are_close_to_those_of_training(models, mesh, flash):
    engine = Engine(models, mesh, context_length=64)
    engine.attention = GatheredBlocks(flash.scale)
    check_log_probs(models, engine.generate(GROUPS, SAMPLED))


def random_pool(num_blocks: int) -> tuple[Tensor, Tensor, torch.Generator]:
    """Keys and values `[B, 256, 2, 64]` bf16."""
    generator = torch.Generator("cuda").manual_seed(0)
    keys, values = torch.randn(2, num_blocks, 256, 2, 64, generator=generator, device="cuda").bfloat16()
    return keys, values, generator


@pytest.mark.parametrize("num_queries", [1, 7, 100])
@pytest.mark.parametrize("lengths", [[1, 700, 256], [5000], [257, 3] * 100], ids=["uneven", "one long", "many"])
def test_flash_attn_attends_to_a_part_as_the_reference_does(flash, num_queries, lengths):
    """One long sequence is shared out over the GPU; the log-sum-exp decides how parts are merged."""
    keys, values, generator = random_pool(64)
    query = torch.randn(len(lengths), 2, num_queries, 64, generator=generator, device="cuda").bfloat16().transpose(1, 2)
    tables = torch.randint(64, (len(lengths), 20), generator=generator, device="cuda", dtype=torch.int32)
    output, log_sum = flash.part(query, keys, values, tables, ints(lengths))
    expected, expected_log_sum = GatheredBlocks(flash.scale).part(query, keys, values, tables, ints(lengths))
    torch.testing.assert_close(output, expected, rtol=0.02, atol=0.02)
    torch.testing.assert_close(log_sum, expected_log_sum, rtol=0, atol=0.05)  # the reference rounds scores to bf16


@pytest.mark.parametrize("chunks", [[(0, 300), (255, 2), (0, 1)], [(511, 1)], [(1000, 2000)]])
def test_flash_attn_attends_with_chunks_as_the_reference_does(flash, chunks):
    keys, values, generator = random_pool(64)
    lengths, ends = [length for _, length in chunks], [start + length for start, length in chunks]
    query = torch.randn(sum(lengths), 14, 64, generator=generator, device="cuda").bfloat16()
    plan = Prefill(
        [Chunk(row, start, length) for row, (start, length) in enumerate(chunks)],
        slots=torch.empty(0),
        tables=torch.randint(64, (len(chunks), 12), generator=generator, device="cuda", dtype=torch.int32),
        query_borders=ints([0, *lengths]).cumsum(0).int(),
        key_borders=ints([0, *ends]).cumsum(0).int(),
    )
    output = flash.prefill(query, keys, values, plan)
    expected = GatheredBlocks(flash.scale).prefill(query, keys, values, plan)
    torch.testing.assert_close(output, expected, rtol=0.02, atol=0.02)


def test_replayed_graphs_do_what_padded_steps_do_without_them(models, mesh, flash):
    """The same kernels on the same sizes: equal to the bit."""
    if not flash.capturable:
        pytest.skip("this flash-attn can't be recorded")
    engine = Engine(models, mesh, context_length=512, keep_cache=True, cuda_graphs=True)
    completions = engine.generate(GROUPS, SAMPLED)
    recorded = engine.kept.graphs
    engine.kept.graphs = DecodeGraphs(build_stage(models[0]), engine.kept.caches[0][0], 256, 2, record=repeat)
    expected = engine.generate(GROUPS, SAMPLED)
    assert recorded.sizes == engine.kept.graphs.sizes
    assert [c.tokens for c in completions] == [c.tokens for c in expected]
    assert all(
        torch.equal(ours.log_probs, theirs.log_probs) for ours, theirs in zip(completions, expected, strict=True)
    )
    check_log_probs(models, completions)


def test_graphs_follow_weights_that_change_in_place(models, mesh, flash):
    if not flash.capturable:
        pytest.skip("this flash-attn can't be recorded")
    engine = Engine(models, mesh, context_length=64, keep_cache=True, cuda_graphs=True)
    before = engine.generate(GROUPS, SAMPLED)
    weight = models[0].decoder.layers[0].mlp.linear_fc2.weight
    kept = weight.detach().clone()
    with torch.no_grad():
        weight.neg_()
    after = engine.generate(GROUPS, SAMPLED)
    check_log_probs(models, after)
    assert [c.tokens for c in after] != [c.tokens for c in before]
    with torch.no_grad():
        weight.copy_(kept)
