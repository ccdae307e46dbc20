"""Balance over ranks, packs under a token budget, and what the loss is told about each scored token."""

import math
from dataclasses import replace

import pytest
import torch

from megarl.aggregation import GlobalCounts, sequence_mean_token_mean, token_mean
from megarl.batch import Sample, balance, build_packs, count_globally, plan_packs
from megarl.losses import SequenceClippedPolicyLoss
from parallel.mesh import Layout, build_mesh


def make_sample(number: int, num_prompt: int, num_response: int, **changes) -> Sample:
    """Tokens 100 * number, counting up; the log-prob of response token i is -(number + i / 10)."""
    tokens = list(range(100 * number, 100 * number + num_prompt + num_response))
    log_probs = -(number + torch.arange(num_response) / 10)
    prompt, response = tokens[:num_prompt], tokens[num_prompt:]
    return replace(Sample(number, 0, prompt, response, log_probs, score=1.0, truncated=False), **changes)


def test_dearest_items_go_first_to_the_rank_with_the_smallest_sum():
    """9 -> rank 0, 7 -> rank 1, 6 -> rank 1 (13), 5 -> rank 0 (14), 2 -> rank 1 (15)."""
    assert balance([2, 9, 5, 6, 7], 2) == [[1, 2], [0, 3, 4]]


def test_items_that_ranks_dont_divide_leave_nobody_empty():
    """RC23: 10 equal ones over 4 ranks, 3 over 2."""
    assert [len(rank) for rank in balance([5] * 10, 4)] == [3, 3, 2, 2]
    assert [len(rank) for rank in balance([5] * 3, 2)] == [2, 1]
    assert balance([9, 1, 1, 1], 2) == [[0], [1, 2, 3]]


@pytest.mark.parametrize(
    ("costs", "num_ranks", "sizes"),
    [
        ([7] * 10, 4, [3, 3, 2, 2]),
        ([7] * 3, 2, [2, 1]),
        ([9, 1, 1, 1], 2, [1, 3]),
        ([5], 3, [1, 0, 0]),
        ([], 2, [0, 0]),
    ],
)
def test_each_item_is_used_once_and_no_rank_is_empty_if_there_are_enough(costs, num_ranks, sizes):
    """RC23: 10 over 4 ranks, 3 over 2, and lengths [9, 1, 1, 1] over 2."""
    ranks = balance(costs, num_ranks)
    assert [len(rank) for rank in ranks] == sizes
    assert sorted(index for rank in ranks for index in rank) == list(range(len(costs)))
    assert all(rank == sorted(rank) for rank in ranks)


def test_packs_are_filled_first_fit_longest_first():
    """60 opens a pack, 50 another, 40 fits the first (100), 30 and 20 the second (100)."""
    assert plan_packs([20, 60, 50, 40, 30], 100) == [[1, 3], [2, 4, 0]]
    assert plan_packs([100, 1], 100) == [[0], [1]]
    assert plan_packs([], 100) == []


def test_sequence_longer_than_a_pack_is_refused():
    with pytest.raises(ValueError, match="max_tokens_per_pack: got 100, but a sequence has 101 tokens"):
        plan_packs([5, 101], 100)


RANK_SAMPLES = [
    [make_sample(1, 2, 3), make_sample(2, 1, 4, in_loss=False)],
    [make_sample(3, 3, 5), make_sample(4, 2, 1), make_sample(5, 2, 0)],
]


def test_counts_are_those_of_all_ranks_without_masked_and_empty_responses(workers):
    """3 + 5 + 1 tokens of three sequences."""
    assert workers.run(count, 2, RANK_SAMPLES) == [GlobalCounts(9, 3)] * 2


def test_ranks_without_a_sample_count_nothing(workers):
    """RC20"""
    assert workers.run(count, 2, [RANK_SAMPLES[0], []]) == [GlobalCounts(3, 1)] * 2
    assert workers.run(count, 2, [[], []]) == [GlobalCounts(0, 0)] * 2


def count(world, samples: list[list[Sample]]) -> GlobalCounts:
    return count_globally(samples[world.rank], build_mesh(Layout(), world))


def packs_of(
    world, layout: Layout, samples: list[list[Sample]], aggregation=token_mean, max_tokens=10, share=False
) -> list:
    mesh = build_mesh(layout, world)
    mine = samples[mesh.data_rank]
    return build_packs(mine, max_tokens, aggregation, count_globally(mine, mesh), mesh, share)


def test_every_field_is_aligned_to_the_scored_tokens(workers):
    """Samples of 5, 5 and 4 tokens under a limit of 10: the first two make a pack, the third the next."""
    samples = [
        make_sample(1, 2, 3, advantage=0.5),
        make_sample(2, 1, 4, advantage=-2.0, in_loss=False),
        make_sample(3, 3, 1, advantage=4.0),
    ]
    ((first, second),) = workers.run(packs_of, 1, Layout(), [samples], sequence_mean_token_mean)
    assert first.tokens.tolist() == [100, 101, 102, 103, 104, 200, 201, 202, 203, 204]
    assert first.positions.tolist() == [0, 1, 2, 3, 4] * 2
    assert first.cu_seqlens.tolist() == [0, 5, 10]
    assert first.tokens[first.scored].tolist() == [102, 103, 104, 201, 202, 203, 204]
    assert first.advantages.tolist() == [0.5] * 3 + [-2.0] * 4
    torch.testing.assert_close(first.old_log_probs, torch.tensor([-1.0, -1.1, -1.2, -2.0, -2.1, -2.2, -2.3]))
    # Two sequences count: 1 / (3 tokens * 2 sequences), nothing for the masked one, 1 / (1 * 2).
    torch.testing.assert_close(first.loss_weights, torch.tensor([1 / 6] * 3 + [0.0] * 4))
    assert second.tokens[second.scored].tolist() == [303]
    assert (second.loss_weights.tolist(), second.advantages.tolist()) == ([0.5], [4.0])
    assert {field.dtype for field in (first.loss_weights, first.advantages, first.old_log_probs)} == {torch.float32}


def test_ends_are_the_last_tokens_of_the_samples(workers):
    """Of two prompts with responses of 3, 2 and 1 tokens, and padding behind."""
    samples = [make_sample(1, 2, 3), make_sample(1, 2, 2), make_sample(2, 1, 1)]
    for share, ends in ((False, [4, 8, 10]), (True, [4, 6, 8])):
        for (pack,) in workers.run(packs_of, 2, Layout(2, sequence_parallel=True), [samples], token_mean, 20, share):
            assert pack.ends.tolist() == ends
            assert pack.tokens[pack.ends].tolist() == [104, 103, 201]


def test_masked_tokens_belong_to_no_sequence(workers):
    samples = [
        make_sample(1, 1, 3, loss_mask=[True, False, True]),
        make_sample(2, 1, 2, in_loss=False),
        make_sample(3, 1, 1),
    ]
    ((pack,),) = workers.run(packs_of, 1, Layout(), [samples])
    assert pack.sequence_ids.tolist() == [0, 3, 0, 3, 3, 2]


def test_the_ratio_of_a_response_is_that_of_the_tokens_it_learns_from(workers):
    """Tokens 1 and 3 of the response got e^0.2 and 1 times as likely, the masked one e^9 times: the mean is e^0.1."""
    sample = make_sample(1, 1, 3, loss_mask=[True, False, True], advantage=1.0)
    ((pack,),) = workers.run(packs_of, 1, Layout(), [[sample]])
    log_probs = pack.old_log_probs + torch.tensor([0.2, 9.0, 0.0])
    loss, _ = SequenceClippedPolicyLoss(0.2, 0.2)(log_probs, pack.old_log_probs, pack.advantages, pack.sequence_ids)
    torch.testing.assert_close(loss[[0, 2]], torch.full((2,), -math.exp(0.1)))


def test_weights_of_all_ranks_add_up_to_one(workers):
    packs = [pack for rank in workers.run(packs_of, 2, Layout(), RANK_SAMPLES) for pack in rank]
    assert float(sum(pack.loss_weights.sum() for pack in packs)) == pytest.approx(1.0)
    assert sum(len(pack.scored) for pack in packs) == 13  # the 4 masked tokens are scored, with weight 0


def test_ranks_get_equal_numbers_of_packs_filled_up_with_empty_ones(workers):
    """RC19: five sequences of 10 tokens are five packs, two of 4 are one."""
    samples = [[make_sample(n, 4, 6) for n in range(5)], [make_sample(n, 2, 2) for n in range(2)]]
    first, second = workers.run(packs_of, 2, Layout(), samples)
    assert [len(pack.tokens) for pack in first] == [10] * 5
    assert [len(pack.tokens) for pack in second] == [8, 1, 1, 1, 1]
    for pack in second[1:]:
        assert [len(pack.scored), len(pack.loss_weights), len(pack.advantages), len(pack.old_log_probs)] == [0] * 4


def test_packs_are_padded_for_sequence_parallelism_and_counted_for_interleaving(workers):
    samples = [[make_sample(1, 2, 3)]]
    for (pack,) in workers.run(packs_of, 2, Layout(2, sequence_parallel=True), samples):
        assert pack.cu_seqlens.tolist() == [0, 5, 6]
    for packs in workers.run(packs_of, 2, Layout(1, 2, 2), samples):
        assert [len(pack.scored) for pack in packs] == [3, 0]


def test_pack_moves_with_all_its_fields_but_the_borders(workers):
    ((pack,),) = workers.run(packs_of, 1, Layout(), [[make_sample(1, 2, 3)]])
    devices = {name: value.device.type for name, value in vars(pack.to(torch.device("meta"))).items()}
    assert devices.pop("cu_seqlens") == devices.pop("parents") == "cpu"
    assert set(devices.values()) == {"meta"}
