"""Sampling from vocab-parallel logits with stateless random numbers.

A token is drawn in two stages: Gumbel-max over fixed blocks of 128 token ids, then the inverse CDF inside the winning
block. Both numbers are hashes of (key, block), so the token depends neither on the tensor size nor on batch order.
Logits never leave their rank (but for the k largest under top-k). One all-gather of a few numbers per draw and
rank; top-k, top-p and min-p add those listed in `rollout/truncation.py`.

Shapes: R draws, U rows of logits, V/TP columns (unpadded ids of this tensor rank), B blocks of this rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from parallel.log_probs import VocabShard
from rollout.random_numbers import draw, start_stream, uniform
from rollout.sampling_params import FinishReason, SamplingParams, response_length
from rollout.truncation import least_kept
from rollout.vocab_blocks import BLOCK, VocabBlocks, gather_over_tensor_ranks

__all__ = ["Draws", "FinishReason", "SamplingParams", "response_length", "sample"]


@dataclass(frozen=True)
class Draws:
    """Tokens drawn, equal on all tensor ranks.

    Attributes:
        tokens: `[R]` int64.
        log_probs: `[R]` fp32, under softmax(logits / temperature) over the whole vocabulary (temperature 1 if greedy).
        sampling_log_probs: `[R]` fp32, under the distribution drawn from: after the repetition penalty and renormalised
            after top-k, top-p and min-p. The tensor `log_probs` itself where none of them is set; 0 if greedy, which
            draws from no distribution.
        entropies: `[R]` fp32, in nats, of the distribution of `log_probs`; None unless asked for.
    """

    tokens: Tensor
    log_probs: Tensor
    sampling_log_probs: Tensor
    entropies: Tensor | None


@torch.no_grad()
def sample(
    logits: Tensor,
    keys: Tensor,
    params: SamplingParams,
    shard: VocabShard,
    rows: Tensor | None = None,
    seen: Tensor | None = None,
) -> Draws:
    """Draw one token for each key.

    Args:
        logits: `[U, V/TP]` of this tensor rank's ids, not divided by the temperature; left as they are.
        keys: `[R]` int64, equal on all tensor ranks.
        rows: `[R]` int64, the row of logits that each draw is from; None: row i for key i.
        seen: `[U, L]` int64 ids of prompt and response so far, padded with -1; read only under a repetition penalty.
    """
    assert shard.first % BLOCK == 0, "blocks must not span ranks"
    assert rows is not None or len(keys) == len(logits), "as many keys as rows, unless draws name their row"
    full = drawn = VocabBlocks.of(logits, params.score_temperature, params.entropies)
    if params.repetition_penalty != 1:
        assert seen is not None, "a repetition penalty needs the ids seen"
        drawn = VocabBlocks.of(_penalise(logits, seen, params.repetition_penalty, shard), params.score_temperature)
    log_sums, least = drawn.log_sums, None
    if params.truncates:
        least = least_kept(drawn, params, shard)
        log_sums = drawn.kept_log_sums(least)
    if params.temperature == 0:
        score, block, place = _best(drawn, rows)
    else:
        score, block, place = _draw(drawn, log_sums, keys, rows, least, shard.first // BLOCK)
    place += block * BLOCK
    # Logits of NaN may lead to padding, where there is no id.
    column = (place % (full.values.shape[1] * BLOCK)).clamp_(max=max(shard.num_real - 1, 0))
    chosen = [
        score,
        column + shard.first,
        full.values.view(-1).index_select(0, place).float(),
        _of_draws(full.log_sums.logsumexp(-1), rows),
    ]
    if log_sums is not full.log_sums:
        chosen += [drawn.values.view(-1).index_select(0, place).float(), _of_draws(log_sums.logsumexp(-1), rows)]
    if params.entropies:
        chosen.append(_of_draws(full.mean(), rows))
    local = torch.stack([column.double() for column in chosen])
    return _report(gather_over_tensor_ranks(local, shard), params)


def _report(everywhere: Tensor, params: SamplingParams) -> Draws:
    """Combine what each tensor rank chose, `[TP, columns, R]` float64 in the order of `sample`."""
    winner = everywhere[:, 0].argmax(0)
    best = everywhere.gather(0, winner.expand(1, everywhere.shape[1], -1))[0] if len(everywhere) > 1 else everywhere[0]
    log_sum = _total(everywhere[:, 3])
    log_probs = (best[2] / params.score_temperature - log_sum).float()
    if params.temperature == 0:
        sampling_log_probs = torch.zeros_like(log_probs)
    elif params.truncates or params.repetition_penalty != 1:
        sampling_log_probs = (best[4] / params.temperature - _total(everywhere[:, 5])).float()
    else:
        sampling_log_probs = log_probs
    entropies = None
    if params.entropies:
        shares = (everywhere[:, 3] - log_sum).exp()
        entropies = (log_sum - (shares * everywhere[:, -1]).sum(0)).float()
    return Draws(best[1].long(), log_probs, sampling_log_probs, entropies)


def _total(log_sums: Tensor) -> Tensor:
    """Return the log-sum over tensor ranks, `[TP, R]` -> `[R]`."""
    return log_sums.logsumexp(0) if len(log_sums) > 1 else log_sums[0]


def _of_draws(values: Tensor, rows: Tensor | None) -> Tensor:
    """Return the values `[U, ...]` of each draw's row, `[R, ...]`."""
    return values if rows is None else values.index_select(0, rows)


def _penalise(logits: Tensor, seen: Tensor, penalty: float, shard: VocabShard) -> Tensor:
    """Return the logits in fp32, those of the ids seen divided (if positive) or multiplied by the penalty."""
    penalised, local = logits.to(torch.float32, copy=True), seen - shard.first
    row, place = ((local >= 0) & (local < shard.num_real)).nonzero().unbind(1)
    column = local[row, place]
    values = penalised[row, column]
    penalised[row, column] = torch.where(values > 0, values / penalty, values * penalty)
    return penalised


def _best(blocks: VocabBlocks, rows: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return each draw's largest logit and, of the first id that has it, the block (numbered among all U x B) and the
    place in it, `[R]` each."""
    score, block = blocks.maxima.max(-1)
    block += torch.arange(len(block), device=block.device) * blocks.maxima.shape[1]
    place = blocks.select(block).values.argmax(-1)
    return _of_draws(score, rows), _of_draws(block, rows), _of_draws(place, rows)


def _draw(
    blocks: VocabBlocks, log_sums: Tensor, keys: Tensor, rows: Tensor | None, least: Tensor | None, first_block: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return, `[R]` each, the Gumbel score of this rank's best block, that block (numbered among all U x B), and the
    place drawn inside it.

    Args:
        log_sums: `[U, B]` float64 of the ids that may be drawn.
        least: the least logit `[U]` that may be drawn; None: all may.
    """
    num_blocks, stream = log_sums.shape[1], start_stream(keys)
    numbers = torch.arange(first_block, first_block + num_blocks, device=keys.device)
    gumbel = uniform(draw(stream[:, None], 2 * numbers)).log_().neg_().log_()  # the negative of it
    score, block = torch.sub(_of_draws(log_sums, rows), gumbel, out=gumbel).max(-1)
    target = uniform(draw(stream, 2 * (block + first_block) + 1))
    block += num_blocks * (torch.arange(len(keys), device=keys.device) if rows is None else rows)
    cumulative = blocks.exponentials(blocks.select(block), least).double().cumsum_(-1)
    place = torch.searchsorted(cumulative, (target * cumulative[:, -1])[:, None], right=True)[:, 0]
    # On a rank where nothing may be drawn the search runs off the end; its score, minus infinity, never wins.
    return score, block, place.clamp_(max=BLOCK - 1)
