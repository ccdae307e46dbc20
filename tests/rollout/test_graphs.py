"""Decoding steps of padded sizes, with a plain call in place of a recorded CUDA graph."""

from pathlib import Path

import pytest
import torch

from parallel.inference import build_stage
from parallel.launch import World
from parallel.mesh import Layout, build_mesh
from rollout.engine import Engine
from rollout.graphs import DecodeGraphs, bucket, pad
from rollout.paged_cache import Decode
from rollout.requests import Request
from rollout.sampling import SamplingParams
from tests.rollout.engine_calls import PROMPTS, load


def ints(*numbers) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


@pytest.mark.parametrize(("number", "expected"), [(1, 1), (2, 2), (3, 4), (4, 4), (5, 8), (9, 12), (12, 12)])
def test_sizes_are_powers_of_two_up_to_the_most_rows(number, expected):
    assert bucket(number, most=12) == expected


def test_padding_reads_and_writes_the_scratch_block_only():
    """3 rows, of prefixes 0, 1, 1, become 4 rows, 3 tiles of 4; blocks have 10 tokens, 7 is the scratch block."""
    plan = Decode(
        slots=torch.tensor([13, 22, 40]),
        suffix_tables=ints([1], [2], [4]),
        suffix_lengths=ints(4, 3, 1),
        prefix_tables=ints([0, 3], [5, 0]),
        prefix_lengths=ints(12, 6),
        fold=torch.tensor([0, 0, 1, 2]),
        unfold=torch.tensor([0, 2, 3]),
    )
    padded = pad(plan, (4, 3, 4), most_blocks=3, scratch=7, block_size=10)
    assert padded.slots.tolist() == [13, 22, 40, 70]
    assert padded.suffix_tables.tolist() == [[1, 0, 0], [2, 0, 0], [4, 0, 0], [7, 7, 7]]
    assert padded.suffix_lengths.tolist() == [4, 3, 1, 1]
    assert padded.prefix_tables.tolist() == [[0, 3, 0], [5, 0, 0], [7, 7, 7]]
    assert padded.prefix_lengths.tolist() == [12, 6, 1]
    assert padded.unfold.tolist() == [0, 4, 5, 0]
    assert padded.fold.view(3, 4).tolist() == [[0, 0, 0, 0], [1, 2, 0, 0], [0, 0, 0, 0]]
    assert [tensor.dtype for tensor in padded] == [tensor.dtype for tensor in plan]
    assert pad(plan, (3, 2, 2), most_blocks=2, scratch=7, block_size=10).fold.tolist() == plan.fold.tolist()


def repeat(call):
    """As a graph does: the same inputs' addresses, the same output's address."""
    output = call().clone()
    return lambda: output.copy_(call()), output


def generate_with_and_without(world: World, folder: Path, params: SamplingParams):
    mesh = build_mesh(Layout(), world)
    models = load(folder, mesh)
    requests = [Request(number, prompt, num_samples=number + 1) for number, prompt in enumerate(PROMPTS)]
    engine = Engine(
        models, mesh, context_length=64, max_sequences=12, cache_page_tokens=4, num_lanes=2, keep_cache=True, paged=True
    )
    plain = engine.generate(requests, params)
    pool = engine.kept.caches[0][0]
    unused = pool.pool[:, :, pool.scratch].count_nonzero()
    graphs = engine.kept.graphs = DecodeGraphs(build_stage(models[0]), pool, 6, 16, record=repeat)
    return plain, engine.generate(requests, params), graphs.sizes, unused, pool.pool[:, :, pool.scratch]


def test_padding_rows_do_not_change_the_real_ones(workers, folder):
    params = SamplingParams(max_new_tokens=20, stop_token_ids=tuple(range(0, 150, 15)), seed=3)
    ((plain, padded, sizes, unused, scratch),) = workers.run(generate_with_and_without, 1, folder, params)
    assert [c.tokens for c in padded] == [c.tokens for c in plain]
    for ours, theirs in zip(padded, plain, strict=True):
        torch.testing.assert_close(ours.log_probs, theirs.log_probs, rtol=0, atol=1e-5)
    assert len(sizes) == len(set(sizes)) > 3
    assert {number for size in sizes for number in size} <= {1, 2, 4, 6}
    assert unused == scratch[:, :, 1:].count_nonzero() == 0
    assert scratch[:, :, 0].count_nonzero() > 0  # padding writes the first token of the scratch block
