import math
from collections.abc import Callable

import pytest
import torch

from megarl.aggregation import (
    GlobalCounts,
    constant_divisor,
    sequence_mean_token_mean,
    sequence_mean_token_sum,
    token_mean,
    weighted_sum,
    zero_where_masked,
)
from megarl.losses import clipped

AGGREGATIONS = [token_mean, sequence_mean_token_mean, sequence_mean_token_sum, constant_divisor(4)]

# Three sequences of 3 places: token losses [1, 2, x], [3, x, x], [x, x, x] with x masked.
LOSSES = torch.tensor([1.0, 2.0, 99.0, 3.0, 99.0, 99.0, 99.0, 99.0, 99.0])
MASK = torch.tensor([1, 1, 0, 1, 0, 0, 0, 0, 0], dtype=torch.bool)
LENGTHS = torch.tensor([2, 2, 2, 1, 1, 1, 0, 0, 0])
COUNTS = GlobalCounts(num_tokens=3, num_sequences=2)


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [
        (token_mean, 2.0),  # (1 + 2 + 3) / 3
        (sequence_mean_token_sum, 3.0),  # (3 + 3) / 2
        (sequence_mean_token_mean, 2.25),  # (1.5 + 3) / 2: the wholly masked third sequence is not counted
        (constant_divisor(4), 0.75),  # (3/4 + 3/4) / 2
    ],
)
def test_each_aggregation_gives_its_own_mean_and_skips_wholly_masked_sequences(aggregation: Callable, expected: float):
    """RC14"""
    weights = aggregation(LENGTHS, MASK, COUNTS)
    assert weights.dtype == torch.float32
    assert weights[~MASK].tolist() == [0.0] * 6
    torch.testing.assert_close(weighted_sum(LOSSES, weights), torch.tensor(expected))


def test_weights_are_the_hand_computed_ones():
    torch.testing.assert_close(token_mean(LENGTHS, MASK, COUNTS)[MASK], torch.tensor([1 / 3, 1 / 3, 1 / 3]))
    torch.testing.assert_close(sequence_mean_token_mean(LENGTHS, MASK, COUNTS)[MASK], torch.tensor([0.25, 0.25, 0.5]))
    torch.testing.assert_close(sequence_mean_token_sum(LENGTHS, MASK, COUNTS)[MASK], torch.tensor([0.5, 0.5, 0.5]))
    torch.testing.assert_close(constant_divisor(4)(LENGTHS, MASK, COUNTS)[MASK], torch.tensor([0.125, 0.125, 0.125]))


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("split", [[10], [3, 7], [3, 0, 3, 4], [0, 1, 2, 7]])
def test_loss_and_gradient_do_not_depend_on_the_split_into_micro_batches(aggregation: Callable, split: list[int]):
    """RC11. Each part is a micro-batch of either rank: summing over ranks is the same sum as over micro-batches."""
    scale = torch.ones((), requires_grad=True)  # stands for the model's parameters
    # Rank 0: one sequence of 3 tokens, loss 1 each. Rank 1: one token of loss 5, then 6 masked ones.
    losses = torch.tensor([1.0, 1.0, 1.0, 5.0] + [99.0] * 6)
    mask = torch.tensor([True] * 4 + [False] * 6)
    lengths = torch.tensor([3, 3, 3] + [1] * 7)
    counts = GlobalCounts(num_tokens=4, num_sequences=2)
    total = torch.zeros(())
    parts = zip(losses.split(split), lengths.split(split), mask.split(split), strict=True)
    for part_losses, part_lengths, part_mask in parts:
        loss = weighted_sum(scale * part_losses, aggregation(part_lengths, part_mask, counts))
        loss.backward()
        total += loss.detach()
    # Token-mean 8/4 (not the 3.0 of averaged rank means); sequence means (1 + 5)/2, sums (3 + 5)/2; sums over 4 tokens.
    expected = dict(zip(AGGREGATIONS, [2.0, 3.0, 4.0, 1.0], strict=True))[aggregation]
    torch.testing.assert_close(total, torch.tensor(expected))
    torch.testing.assert_close(scale.grad, torch.tensor(expected), rtol=1e-6, atol=0.0)


def test_nan_in_a_masked_place_reaches_neither_loss_nor_gradient():
    """RC13 (iii)"""
    inputs = torch.tensor([1.0, 4.0, -1.0], requires_grad=True)
    mask = torch.tensor([True, True, False])
    weights = token_mean(torch.full((3,), 2), mask, GlobalCounts(num_tokens=2, num_sequences=1))
    values = inputs.log2() + 1.0  # [1, 3, NaN]
    assert values.isnan().tolist() == [False, False, True]
    loss = weighted_sum(values, weights)
    loss.backward()
    torch.testing.assert_close(loss, torch.tensor(2.0))
    torch.testing.assert_close(inputs.grad, torch.tensor([0.5, 0.125, 0.0]) / math.log(2.0))
    torch.testing.assert_close(weighted_sum(torch.tensor([1.0, 2.0, math.nan]), weights), torch.tensor(1.5))


def test_infinite_derivative_at_a_masked_place_is_stopped_by_zeroing_the_inputs_of_the_loss():
    """RC13"""
    log_probs = torch.tensor([-1.0, math.nan], requires_grad=True)
    weights = torch.tensor([1.0, 0.0])
    advantages = torch.tensor([2.0, math.inf])
    kept = [zero_where_masked(values, weights) for values in (log_probs, log_probs.detach(), advantages)]
    loss = weighted_sum(clipped()(*kept)[0], weights)
    loss.backward()
    assert loss.item() == -2.0
    assert log_probs.grad.tolist() == [-2.0, 0.0]


def test_nan_in_an_unmasked_place_is_not_hidden():
    assert math.isnan(weighted_sum(torch.tensor([1.0, math.nan]), torch.tensor([0.5, 0.5])))


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("num_places", [0, 3])
def test_no_unmasked_token_gives_a_zero_loss_whose_backward_runs(aggregation: Callable, num_places: int):
    """RC13 (i), (ii)"""
    scale = torch.ones((), requires_grad=True)
    mask = torch.zeros(num_places, dtype=torch.bool)
    lengths = torch.zeros(num_places, dtype=torch.int64)
    for counts in (GlobalCounts(num_tokens=5, num_sequences=2), GlobalCounts(num_tokens=0, num_sequences=0)):
        weights = aggregation(lengths, mask, counts)
        assert weights.tolist() == [0.0] * num_places
        loss = weighted_sum(scale * torch.full((num_places,), math.inf), weights)
        loss.backward()
        assert loss.item() == 0.0


def test_an_empty_pack_backpropagates_zero_to_the_parameters():
    """RC13"""
    scale = torch.ones((), requires_grad=True)
    weighted_sum(scale * torch.zeros(0), torch.zeros(0)).backward()
    assert scale.grad.item() == 0.0


def test_mismatched_shapes_and_masks_that_are_not_bool_are_refused():
    with pytest.raises(ValueError, match="differ in shape"):
        weighted_sum(torch.zeros(3), torch.zeros(3, 1))
    with pytest.raises(ValueError, match="mask must be bool"):
        token_mean(torch.ones(3), torch.ones(3), GlobalCounts(3, 1))
    with pytest.raises(ValueError, match="mask must be bool"):
        token_mean(torch.ones(3), torch.ones(2, dtype=torch.bool), GlobalCounts(3, 1))
    with pytest.raises(ValueError, match="at least 1, got 0"):
        constant_divisor(0)
