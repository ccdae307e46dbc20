"""Which ids top-k, top-p and min-p keep."""

import math

import pytest
import torch

from parallel.mesh import Layout, build_mesh
from rollout.sampling import SamplingParams, sample
from rollout.truncation import least_kept
from rollout.vocab_blocks import VocabBlocks
from tests.rollout.sampling_calls import columns_of_rank, kept_by_sorting, keys, random_logits, whole

LN = {p: math.log(p) for p in (0.1, 0.2, 0.3, 0.4, 0.5)}
INFINITY = math.inf


def kept_ids(row: list[float] | torch.Tensor, **settings: float) -> list[int]:
    """Return the ids that may be drawn from one row of logits."""
    logits = torch.as_tensor(row, dtype=torch.float32)[None]
    params = SamplingParams(**settings)
    blocks = VocabBlocks.of(logits, params.temperature)
    kept = logits >= least_kept(blocks, params, whole(logits.shape[1]))[:, None]
    drawn = sample(logits.expand(500, -1), keys(500), params, whole(logits.shape[1]))
    assert kept[0, drawn.tokens].all(), "a token was drawn that is not kept"
    return kept[0].nonzero()[:, 0].tolist()


def test_top_k_keeps_exactly_k_ids_and_more_only_in_a_tie():
    logits = [3.0, -1.0, 2.0, -2.0, 2.5, 0.0]
    for top_k, ids in ((1, [0]), (2, [0, 4]), (3, [0, 2, 4]), (5, [0, 1, 2, 4, 5])):
        assert kept_ids(logits, top_k=top_k, temperature=4.0) == ids
    for top_k in (6, 7, 99, 10**12):
        assert kept_ids(logits, top_k=top_k, temperature=4.0) == list(range(6))
    # Neighbouring floats are told apart; equal ones at the border stay together, and -0.0 equals 0.0.
    close = [1.0, 1.0 + 2.0**-23, -0.0, 0.0, -1.0]
    for top_k, ids in ((1, [1]), (2, [0, 1]), (3, [0, 1, 2, 3]), (4, [0, 1, 2, 3])):
        assert kept_ids(close, top_k=top_k) == ids


def test_top_p_keeps_the_id_that_reaches_the_mass():
    logits = [LN[0.3], LN[0.5], LN[0.2]]
    for top_p, ids in ((1e-9, [1]), (0.49, [1]), (0.51, [0, 1]), (0.79, [0, 1]), (0.81, [0, 1, 2]), (1.0, [0, 1, 2])):
        assert kept_ids(logits, top_p=top_p) == ids
    # At temperature 0.5 the probabilities are squared: 0.25, 0.09, 0.04 of 0.38, the first of them 0.658.
    assert kept_ids(logits, top_p=0.65, temperature=0.5) == [1]
    assert kept_ids(logits, top_p=0.66, temperature=0.5) == [0, 1]


def test_top_p_keeps_ties_and_tells_neighbouring_floats_apart():
    assert kept_ids([0.0] * 4, top_p=0.3) == [0, 1, 2, 3]
    assert kept_ids([0.0, -0.0, 0.0, -50.0], top_p=0.5) == [0, 1, 2]
    close = [1.0, 1.0 + 2.0**-23, 1.0 - 2.0**-24, 1.0, -50.0]  # a quarter each
    assert kept_ids(close, top_p=0.2) == [1]
    assert kept_ids(close, top_p=0.3) == [0, 1, 3]
    assert kept_ids(close, top_p=0.8) == [0, 1, 2, 3]
    tiny = [1e-45, 0.0, -1e-45, -1.0]  # the smallest steps there are; about 0.297, 0.297, 0.297 and 0.109
    assert [kept_ids(tiny, top_p=top_p) for top_p in (0.2, 0.4, 0.6, 0.95)] == [[0], [0, 1], [0, 1, 2], [0, 1, 2, 3]]


def test_top_p_finds_a_border_anywhere():
    """One high logit among zeros: wherever it lies, it alone reaches 0.05 and never 0.999."""
    logits = torch.zeros(5000, 4)
    logits[:, 2] = torch.linspace(0.1, 7.0, 5000)
    for params, least in ((SamplingParams(top_p=0.05), logits[:, 2]), (SamplingParams(top_p=0.999), logits[:, 0])):
        assert torch.equal(least_kept(VocabBlocks.of(logits, 1.0), params, whole(4)), least)


def test_min_p_is_relative_to_the_most_probable_token():
    logits = [LN[0.1], LN[0.4], LN[0.2], LN[0.3]]
    for min_p, ids in (
        (0.2, [0, 1, 2, 3]),
        (0.26, [1, 2, 3]),
        (0.49, [1, 2, 3]),
        (0.51, [1, 3]),
        (0.76, [1]),
        (1, [1]),
    ):
        assert kept_ids(logits, min_p=min_p) == ids
    # At temperature 2 the probabilities relative to the largest are the square roots: 0.5, 1, 0.707, 0.866.
    assert kept_ids(logits, min_p=0.51, temperature=2.0) == [1, 2, 3]
    assert kept_ids([5.0, 5.0, 4.0], min_p=1.0) == [0, 1]


def test_top_p_counts_within_top_k_and_min_p_does_not_depend_on_either():
    logits = [LN[0.4], LN[0.3], LN[0.2], LN[0.1]]
    assert kept_ids(logits, top_p=0.69) == [0, 1]
    # Of the two ids of top-k 2 the first has 0.571, of three 0.444.
    assert kept_ids(logits, top_k=2, top_p=0.56) == [0]
    assert kept_ids(logits, top_k=2, top_p=0.58) == [0, 1]
    assert kept_ids(logits, top_k=3, top_p=0.5) == [0, 1]
    assert kept_ids(logits, top_k=3, top_p=0.77) == [0, 1]
    assert kept_ids(logits, top_k=3, top_p=0.79) == [0, 1, 2]
    assert kept_ids(logits, top_k=3, top_p=0.79, min_p=0.6) == [0, 1]
    # All four ids at the border of top-k belong to the mass: the first has 1/3, not 1/2, of it.
    tied = [math.log(2), 0.0, 0.0, 0.0, 0.0, -50.0]
    assert kept_ids(tied, top_k=2, top_p=0.32) == [0]
    assert kept_ids(tied, top_k=2, top_p=0.35) == [0, 1, 2, 3, 4]


def test_minus_infinity_is_never_kept_with_probability_and_extreme_logits_do_not_overflow():
    masked = [-INFINITY, 1.0, -INFINITY, 0.0, -INFINITY]
    for settings in ({"top_p": 0.99}, {"top_k": 2}, {"top_k": 2, "top_p": 0.99}, {"min_p": 0.3}):
        assert kept_ids(masked, **settings) == [1, 3]
    # More of them wanted than have a probability: the others are never drawn.
    logits = torch.tensor(masked)
    drawn = sample(logits.expand(500, -1), keys(500), SamplingParams(top_k=4), whole(5))
    assert set(drawn.tokens.tolist()) == {1, 3}
    extreme = [1e4, -1e4, 1e4 - 1.0, 0.0]
    for settings in ({"top_p": 0.99}, {"top_k": 2}, {"top_k": 3, "top_p": 0.99}, {"min_p": 0.3}):
        assert kept_ids(extreme, **settings) == [0, 2]
    # Four equal probabilities, to fp32, at one end of the temperature, and a single one at the other.
    assert kept_ids([1.0, 2.0, 3.0, 4.0], top_p=0.6, temperature=1e38) == [1, 2, 3]
    assert kept_ids([1.0, 2.0, 3.0, 4.0], top_p=0.6, temperature=1e-42) == [3]


@pytest.mark.parametrize("num_ids", [7, 128, 300, 2000])
@pytest.mark.parametrize("spread", [1e-3, 0.1, 3.0, 1000.0])
def test_ids_kept_are_those_found_by_sorting(num_ids, spread):
    logits = spread * random_logits(20, num_ids, seed=1) / 3
    logits[10:] = (logits[10:] / spread).round() * spread / 3  # with ties
    for settings in (
        {"top_p": 0.1},
        {"top_p": 0.9},
        {"top_p": 0.999, "temperature": 0.7},
        {"top_k": 3},
        {"top_k": 150},
        {"top_k": 40, "top_p": 0.8, "temperature": 2.0},
        {"top_p": 0.95, "min_p": 0.02},
    ):
        params = SamplingParams(**settings)
        least = least_kept(VocabBlocks.of(logits, params.temperature), params, whole(num_ids))
        assert torch.equal(logits >= least[:, None], kept_by_sorting(logits, params)), settings


def border_on_rank(world, num_ids: int) -> list[torch.Tensor]:
    logits = random_logits(40, num_ids)
    logits[:10] = logits[:10].round()
    logits[10:20] *= 1e-3
    mine, shard = columns_of_rank(logits, build_mesh(Layout(world.world_size), world))
    found = []
    for top_p in (0.05, 0.3, 0.6, 0.9, 0.99, 1.0):
        for top_k in (0, 1, 20, 200):
            params = SamplingParams(top_p=top_p, top_k=top_k, temperature=1.3)
            found.append(least_kept(VocabBlocks.of(mine, params.temperature), params, shard))
    return found


@pytest.mark.parametrize("num_ids", [100, 257, 1000])
def test_the_border_does_not_depend_on_the_tensor_size(workers, num_ids):
    """It is one of the logits, to the last bit; with 100 ids rank 1 has none."""
    (alone,) = workers.run(border_on_rank, 1, num_ids)
    for rank in workers.run(border_on_rank, 2, num_ids):
        assert all(map(torch.equal, rank, alone))
