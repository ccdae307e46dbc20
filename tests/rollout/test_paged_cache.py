"""The cache in blocks, driven by the scheduler, against causal attention written out; and against the cache in columns.

flash-attn runs on GPUs only: its place is taken by the same two functions in torch.
"""

import logging
import math
from pathlib import Path

import pytest
import torch

from parallel.launch import World
from parallel.mesh import Layout, build_mesh
from rollout.block_attention import FlashBlocks, GatheredBlocks, choose_attention
from rollout.blocks import BlockPool, Blocks
from rollout.engine import Engine
from rollout.memory import cache_bytes_per_token, cache_tokens, most_cache_tokens
from rollout.paged_cache import PagedCache, fold_groups
from rollout.requests import Request
from rollout.sampling import SamplingParams
from tests.parallel.hf_models import Records
from tests.rollout.engine_calls import PROMPTS, load
from tests.rollout.flash_stand_in import flash_attn_varlen_func, flash_attn_with_kvcache
from tests.rollout.test_kv_cache import HKV, LAYERS, SCALE, D, Play, random_responses

ATTENTION = {
    "gathered": GatheredBlocks(SCALE),
    "flash-attn's interface": FlashBlocks(SCALE, flash_attn_with_kvcache, flash_attn_varlen_func, capturable=False),
}


class PagedPlay(Play):
    """As `Play`, with blocks of a few tokens."""

    def __init__(self, attention, block_size: int, *args: int):
        self.attention, self.block_size = attention, block_size
        super().__init__(*args)

    def make_cache(self, max_tokens: int) -> PagedCache:
        num_blocks = max_tokens // self.block_size
        self.pool = BlockPool(num_blocks, self.block_size)
        sizes = {"num_blocks": num_blocks, "block_size": self.block_size}
        return PagedCache(LAYERS, HKV, D, **sizes, attention=self.attention, like=torch.empty(0))

    def make_book(self) -> Blocks:
        return Blocks(self.pool, most_blocks=-(-32 // self.block_size))

    def tokens_held(self) -> int:
        (lane,) = self.scheduler.lanes
        used = lane.prefixes.used + lane.suffixes.used
        assert used == (self.cache.scratch - self.pool.num_free) * self.block_size
        return used


@pytest.mark.parametrize("attention", ATTENTION.values(), ids=ATTENTION)
@pytest.mark.parametrize(
    ("block_size", "max_tokens", "max_rows", "max_prefill_tokens"),
    [(4, 2000, 64, 1000), (1, 2000, 5, 4), (2, 61, 64, 7), (16, 130, 3, 1000)],
)
@pytest.mark.parametrize("seed", range(2))
def test_every_row_attends_to_its_own_tokens_within_the_memory(
    attention, block_size, max_tokens, max_rows, max_prefill_tokens, seed
):
    """Long and short prompts in chunks, groups, responses that end, grow, give way and come back."""
    play = PagedPlay(attention, block_size, seed, max_tokens, max_rows, max_prefill_tokens)
    responses = random_responses(seed)
    play.run(responses)
    assert play.largest_error < 1e-5
    assert play.most_tokens <= max_tokens
    assert sorted(response.order for response in play.done) == list(range(len(responses)))
    assert all(len(response.tokens) == response.limit for response in responses)
    if max_tokens == 61:
        assert play.scheduler.num_preempted > 0
    assert play.pool.num_free == max_tokens // block_size
    assert play.cache.pool[:, :, play.cache.scratch].count_nonzero() == 0


def test_groups_lie_in_tiles_of_the_width_of_the_largest():
    group, fold, unfold = fold_groups(torch.tensor([1, 0, 1, 2, 1]))
    assert group.tolist() == [0, 1, 2]
    assert unfold.tolist() == [3, 0, 4, 6, 5]
    assert fold.view(3, 3).tolist() == [[1, 0, 0], [0, 2, 4], [3, 0, 0]]


def test_a_large_group_among_small_ones_takes_several_tiles():
    """9 rows of 4 groups: tiles of at most ceil(2 * 9 / 4) = 5 rows."""
    group, fold, unfold = fold_groups(torch.tensor([0, 1, 1, 1, 1, 1, 1, 2, 3]))
    assert group.tolist() == [0, 1, 1, 2, 3]
    assert fold.view(5, 5)[:, :2].tolist() == [[0, 0], [1, 2], [6, 0], [7, 0], [8, 0]]
    assert fold[unfold].tolist() == list(range(9))


@pytest.mark.parametrize("attention", ATTENTION.values(), ids=ATTENTION)
def test_a_part_is_the_softmax_over_the_tokens_of_its_blocks(attention):
    """Blocks 2 and 0 of 2 tokens, of which 3 are seen; keys are 1, 2, 3 times the query's only direction."""
    keys = torch.zeros(3, 2, 1, 8)
    keys[2, :, 0, 0], keys[0, :, 0, 0] = torch.tensor([1.0, 2.0]), torch.tensor([3.0, 100.0])
    values = keys.roll(1, -1)
    query = torch.zeros(1, 2, 1, 8)
    query[0, :, 0, 0] = torch.tensor([0.0, 1 / SCALE])
    tables, lengths = torch.tensor([[2, 0]], dtype=torch.int32), torch.tensor([3], dtype=torch.int32)
    output, log_sum = attention.part(query, keys, values, tables, lengths)
    weights = [math.exp(1), math.exp(2), math.exp(3)]
    expected = [2.0, (weights[0] + 2 * weights[1] + 3 * weights[2]) / sum(weights)]
    torch.testing.assert_close(output[0, :, 0, 1], torch.tensor(expected))
    torch.testing.assert_close(log_sum, torch.tensor([[[math.log(3), math.log(sum(weights))]]]))


GROUPS = [Request(10 + number, prompt, num_samples=3) for number, prompt in enumerate(PROMPTS)]
SAMPLED = SamplingParams(max_new_tokens=12, stop_token_ids=tuple(range(0, 150, 10)), seed=4, prompt_log_probs=True)
SIZES = {
    "enough": {},
    "small": {"max_cache_tokens": 64, "cache_page_tokens": 2, "max_prefill_tokens": 7, "num_lanes": 1},
    "small, lanes": {"max_cache_tokens": 110, "cache_page_tokens": 4, "num_lanes": 2},
}


def generate_both_ways(world: World, folder: Path, layout: Layout) -> dict[str, list]:
    mesh = build_mesh(layout, world)
    models, found = load(folder, mesh), {}
    for name, sizes in SIZES.items():
        for paged in (False, True):
            engine = Engine(models, mesh, context_length=64, paged=paged, keep_cache=True, **sizes)
            with engine.start(SAMPLED) as rollout:
                rollout.add(GROUPS)
                completions = []
                while rollout.busy:
                    completions += [(response.order, completion) for response, completion in rollout.step()]
                done = [completion for _, completion in sorted(completions, key=lambda item: item[0])]
                again = [completion.tokens for completion in engine.generate(GROUPS, SAMPLED)]
                found.setdefault(name, []).append((done, again, rollout.scheduler.num_preempted))
    return found


@pytest.mark.parametrize(
    "layout", [Layout(), Layout(2, sequence_parallel=True), Layout(1, 2, 2)], ids=["TP1", "TP2 SP", "PP2 virtual"]
)
def test_both_caches_give_equal_responses(workers, folder, layout):
    for rank in workers.run(generate_both_ways, layout.model_parallel_size, folder, layout):
        for columns, blocks in rank.values():
            assert [c.tokens for c in blocks[0]] == [c.tokens for c in columns[0]] == blocks[1]
            for name in ("log_probs", "prompt_log_probs"):
                ours, theirs = (torch.cat([getattr(c, name) for c in done]) for done in (blocks[0], columns[0]))
                torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)
        assert rank["small"][1][2] > 0, "nothing gave way"
        assert rank["enough"][1][2] == 0


def measure(world: World, folder: Path, layout: Layout) -> tuple[list[int], int, int]:
    mesh = build_mesh(layout, world)
    models = load(folder, mesh)
    engine = Engine(
        models, mesh, context_length=60, max_sequences=8, cache_page_tokens=16, num_lanes=2, keep_cache=True, paged=True
    )
    held = []
    for prompts in (GROUPS[:1], GROUPS):
        with engine.start(SAMPLED) as rollout:
            rollout.add(prompts)
            while rollout.busy:
                rollout.step()
                held.append(rollout.cache_bytes)
    num_layers = sum(len(model.decoder.layers) for model in models)
    per_token = cache_bytes_per_token(models[0].shape, layout, num_layers, 4)
    return held, per_token, cache_tokens(models, mesh, 8, [16] * 4)


@pytest.mark.parametrize("layout", [Layout(), Layout(2)], ids=["TP1", "TP2"])
def test_the_memory_is_as_predicted_from_the_first_step_to_the_last(workers, folder, layout):
    """8 responses of up to 60 tokens, each with a prefix of its own: 16 times 4 blocks of 16, and the scratch block."""
    for held, per_token, most in workers.run(measure, layout.model_parallel_size, folder, layout):
        assert most == most_cache_tokens(8, [16] * 4) == 16 * 64
        assert set(held) == {(most + 16) * per_token}


def read_choice(world: World, folder: Path) -> tuple[str, list[str]]:
    records = Records()
    logger = logging.getLogger("rollout.block_attention")
    logger.addHandler(records)
    logger.setLevel(logging.INFO)
    attention = choose_attention(load(folder, build_mesh(Layout(), world))[0], block_size=5)
    logger.removeHandler(records)
    return type(attention).__name__, records.messages


def test_the_choice_of_attention_is_logged(workers, folder):
    ((name, messages),) = workers.run(read_choice, 1, folder)
    assert name == "GatheredBlocks"
    assert messages == ["rollout attention: torch on gathered blocks, as flash-attn needs CUDA"]


def refuse_graphs(world: World, folder: Path) -> list[str]:
    mesh, refusals = build_mesh(Layout(), world), []
    for paged in (False, True):
        try:
            Engine(load(folder, mesh), mesh, context_length=64, paged=paged, cuda_graphs=True)
        except ValueError as error:
            refusals.append(str(error))
    return refusals


def test_cuda_graphs_are_refused_where_they_cannot_be_recorded(workers, folder):
    (refusals,) = workers.run(refuse_graphs, 1, folder)
    assert refusals == ["cuda_graphs: got True, allowed only with flash-attn from 2.6 to before 2.8.4 on CUDA"] * 2
