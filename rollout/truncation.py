"""Top-k, top-p and min-p over a vocabulary that is split between tensor ranks: the least logit that is kept.

All three keep the most probable ids, so together they are one threshold per row, and ties at it are kept. Top-k and
top-p find it exactly, as one of the logits, and not by their rounded probabilities: it depends on the tensor size only
where a sum of probabilities is within float64 rounding of `top_p`. Collectives over the tensor group, for all rows
together: an all-gather of three numbers; for top-k another one of k logits; for top-p without top-k four all-reduces
of 257 numbers.

Shapes: U rows, B blocks of this rank, k = top_k.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from parallel.log_probs import VocabShard
from rollout.sampling_params import SamplingParams
from rollout.vocab_blocks import VocabBlocks, gather_over_tensor_ranks

BITS = 8
ROUNDS = 4
"""Four histograms of 2^8 ranges tell all 2^32 fp32 numbers apart."""
BINS = 2**BITS + 1
"""A range of patterns that does not start at a multiple touches one bin more."""
SLACK = 1e-3
"""Of a bound, in nats: far above the rounding of log-sums."""


def least_kept(blocks: VocabBlocks, params: SamplingParams, shard: VocabShard) -> Tensor:
    """Return the least logit `[U]` fp32 (not divided by the temperature) that top-k, top-p and min-p all keep."""
    highest, log_sum = blocks.maxima.amax(-1).double(), blocks.log_sums.logsumexp(-1)
    local = torch.stack([highest, log_sum, torch.full_like(highest, shard.num_real)])
    everywhere = gather_over_tensor_ranks(local, shard)
    highest, log_sum = everywhere[:, 0].amax(0), everywhere[:, 1].logsumexp(0)
    num_ids = int(everywhere[:, 2].sum(0).amax())
    least = torch.full_like(highest, -torch.inf, dtype=torch.float32)
    if params.min_p:
        least = (highest + params.temperature * math.log(params.min_p)).float()
    if 0 < params.top_k < num_ids:
        return torch.maximum(least, _top_k(blocks, params, shard, log_sum))
    if params.top_p < 1:
        return torch.maximum(least, _top_p(blocks, params.top_p, shard, highest, log_sum, num_ids))
    return least


def _top_k(blocks: VocabBlocks, params: SamplingParams, shard: VocabShard, log_sum: Tensor) -> Tensor:
    """Return the k-th largest logit of all ranks `[U]`, raised to the border of top-p among those kept."""
    k, local = params.top_k, _largest(blocks, params.top_k)
    message = local.double()
    if params.top_p < 1:
        message = torch.cat([message, _count(blocks, local[:, -1])[:, None] - k], 1)
    everywhere = gather_over_tensor_ranks(message, shard)
    listed = everywhere[..., :k].transpose(0, 1).flatten(1).sort(-1, descending=True).values
    border = listed[:, k - 1]
    if params.top_p < 1:
        # Ids that equal a rank's own k-th largest logit but are not in its list: kept if that is also the border.
        unlisted = (everywhere[..., k] * (everywhere[..., k - 1] == border)).sum(0)
        masses = (listed / params.temperature - log_sum[:, None]).exp()
        total = (masses * (listed >= border[:, None])).sum(-1)
        total += unlisted * (border / params.temperature - log_sum).exp()
        num_short = (masses.cumsum(-1) < params.top_p * total[:, None]).sum(-1)
        reached = listed.gather(1, num_short.clamp(max=listed.shape[1] - 1)[:, None])[:, 0]
        border = torch.maximum(border, reached)
    return border.float()


def _largest(blocks: VocabBlocks, k: int) -> Tensor:
    """Return the k largest logits of this rank, `[U, k]`, descending; minus infinity where there are fewer.

    The k blocks with the largest maxima are enough: each holds a logit at least as large as any of the other blocks.
    """
    values, num_blocks = blocks.values, min(k, blocks.maxima.shape[1])
    if num_blocks < blocks.maxima.shape[1]:
        best = blocks.maxima.topk(num_blocks, -1).indices
        values = values.gather(1, best[..., None].expand(-1, -1, values.shape[2]))
    largest = values.flatten(1).topk(min(k, num_blocks * values.shape[2]), -1).values.float()
    return torch.nn.functional.pad(largest, (0, k - largest.shape[1]), value=-torch.inf)


def _count(blocks: VocabBlocks, least: Tensor) -> Tensor:
    """Return how many logits of this rank are at least `least [U]`, as float64."""
    counts = torch.zeros(len(least), dtype=torch.float64, device=least.device)
    for part in blocks.parts(least):
        counts.index_add_(0, part.row, (part.values >= least[part.row, None]).sum(-1).double())
    return counts


def _top_p(
    blocks: VocabBlocks, top_p: float, shard: VocabShard, highest: Tensor, log_sum: Tensor, num_ids: int
) -> Tensor:
    """Return the highest logit t `[U]` for which the ids with logit >= t have a probability of at least `top_p`.

    A search over the ordered bit patterns of fp32. A histogram of the probabilities over 2^8 ranges of patterns, summed
    over the ranks, says which range t is in; the next one divides that range, whose ids are few.
    """
    # Ids below (1 - top_p) / V have less than 1 - top_p together: the nucleus never needs one.
    floor = blocks.temperature * (log_sum + math.log((1 - top_p) / num_ids) - SLACK)
    low = _pattern(floor.clamp(min=torch.finfo(torch.float32).min).float())
    width = _pattern(highest.float()).double() - low
    # With a shift of at least 1 differences of patterns fit in int32.
    shift = (torch.frexp(width).exponent - BITS).clamp(min=1)
    weights = (blocks.maxima.double() / blocks.temperature - log_sum[:, None]).exp().view(-1)
    histogram = _empty_histogram(low)
    for part in blocks.parts(_number(low)):
        pattern = _pattern(part.values)
        masses = blocks.exponentials(part).double().mul_(weights[part.block, None])
        _add(histogram, part.row[:, None], pattern, masses, low, shift)
    low, above = _narrow(shard.reduce(histogram), torch.zeros_like(log_sum), low, shift, top_p)
    row, pattern, masses = _within(blocks, low, (((low >> shift) + 1) << shift) - 1, log_sum)
    for _ in range(ROUNDS - 1):
        shift = (shift - BITS).clamp(min=0)
        histogram = _empty_histogram(low)
        _add(histogram, row, pattern, masses, low, shift)
        low, _ = _narrow(shard.reduce(histogram), above, low, shift, top_p)
    return _number(low)


def _empty_histogram(low: Tensor) -> Tensor:
    return torch.zeros(len(low), BINS, dtype=torch.float64, device=low.device)


def _add(histogram: Tensor, row: Tensor, pattern: Tensor, masses: Tensor, low: Tensor, shift: Tensor) -> None:
    """Add masses to the bins `[U, 257]` of 2^shift patterns from `low [U]` on, outside them to the nearer end.

    The mass above belongs to every sum from the top, and the mass below to none that matters.
    """
    bins = (pattern >> shift[row]).sub_((low >> shift)[row]).clamp_(0, BINS - 1).add_(row.int() * BINS)
    histogram.view(-1).scatter_add_(0, bins.view(-1).long(), masses.view(-1))


def _narrow(histogram: Tensor, above: Tensor, low: Tensor, shift: Tensor, top_p: float) -> tuple[Tensor, Tensor]:
    """Find the highest bin of each row from which on the ids have at least `top_p`.

    Args:
        histogram: of all ranks, as `_add` fills it.
        above: `[U]` probability above the histogram.

    Returns: the least pattern in that bin (and from `low` on) and the probability above it, `[U]` each.
    """
    cumulative = torch.cat([above[:, None], histogram.flip(-1)], 1).cumsum(-1)
    num_short = (cumulative[:, 1:] < top_p).sum(-1, keepdim=True).clamp(max=BINS - 1)
    first = ((low >> shift) + (BINS - 1 - num_short[:, 0]).int()) << shift
    return torch.maximum(low, first), cumulative.gather(1, num_short)[:, 0]


def _within(blocks: VocabBlocks, low: Tensor, high: Tensor, log_sum: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return row, pattern and probability `[n]` of this rank's ids whose pattern is from `low [U]` to `high [U]`."""
    rows, logits = [], []
    for part in blocks.parts(_number(low)):
        pattern = _pattern(part.values)
        inside = (pattern >= low[part.row, None]) & (pattern <= high[part.row, None])
        block, place = inside.nonzero().unbind(1)
        rows.append(part.row[block])
        logits.append(part.values[block, place])
    row, found = torch.cat(rows), torch.cat(logits)
    return row, _pattern(found), (found.double() / blocks.temperature - log_sum[row]).exp()


def _pattern(values: Tensor) -> Tensor:
    """Map fp32 to int32 so that the order is kept (and -0.0 comes just before 0.0)."""
    bits = values.contiguous().view(torch.int32)
    return (bits >> 31).bitwise_and_(0x7FFFFFFF).bitwise_xor_(bits)


def _number(pattern: Tensor) -> Tensor:
    """Inverse of `_pattern`."""
    return (pattern ^ ((pattern >> 31) & 0x7FFFFFFF)).view(torch.float32)
