"""Sampling from vocab-parallel logits with stateless random numbers, and where a response ends.

Each row draws its token in two stages: Gumbel-max over fixed blocks of 128 token ids, then the inverse CDF inside the
winning block. Both numbers are hashes of (key, block), so the token depends on neither tensor size nor batch order.
One all-gather of four numbers per row and rank; logits never leave their rank.

Shapes: R rows, V/TP columns (unpadded ids of this tensor rank), B blocks of this rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from parallel.log_probs import VocabShard
from rollout.random_numbers import combine, uniform

BLOCK = 128
FinishReason = Literal["stop", "length"]


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are drawn.

    Attributes:
        temperature: divides the logits; 0 means greedy (evaluation only).
        top_p: nucleus mass in (0, 1]; ties at the border are kept.
        top_k: number of most probable tokens kept; 0 keeps all.
        max_new_tokens: limit of a response, in tokens.
        stop_token_ids: ids that end a response; the stop token belongs to the response.
        seed: of all random numbers.
        prompt_log_probs: also score the prompt's tokens.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_new_tokens: int = 256
    stop_token_ids: tuple[int, ...] = ()
    seed: int = 0
    prompt_log_probs: bool = False

    def __post_init__(self) -> None:
        if not self.temperature >= 0:
            raise ValueError(f"temperature: got {self.temperature}, allowed: 0 (greedy) or above")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p: got {self.top_p}, allowed: above 0, at most 1")
        for name in ("top_k", "max_new_tokens"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}: got {getattr(self, name)}, allowed: 0 or above")

    @property
    def score_temperature(self) -> float:
        """Temperature of reported log-probs: that of sampling, 1 for greedy decoding."""
        return self.temperature or 1.0

    def check_for_training(self) -> None:
        """Check that responses have log-probs to train on.

        With top-p or top-k both sides of the ratio score the whole distribution, so it starts at 1; the responses come
        from a part of it.

        Raises:
            ValueError: temperature 0: greedy responses have no log-probs.
        """
        if self.temperature == 0:
            raise ValueError("temperature: got 0, allowed in training: above 0 (greedy responses have no log-probs)")


def response_length(tokens: Sequence[int], stop_token_ids: Sequence[int]) -> tuple[int, FinishReason]:
    """Return how many tokens belong to the response (the first stop token included) and how it ended.

    The one rule for sampler, mask, reward and metrics; padding after the stop token is never looked at.
    """
    for index, token in enumerate(tokens):
        if token in stop_token_ids:
            return index + 1, "stop"
    return len(tokens), "length"


def sample(logits: Tensor, keys: Tensor, params: SamplingParams, shard: VocabShard) -> tuple[Tensor, Tensor]:
    """Draw one token per row.

    Args:
        logits: `[R, V/TP]` fp32 of this tensor rank's ids, not divided by the temperature.
        keys: `[R]` int64, equal on all tensor ranks.

    Returns:
        tokens `[R]` int64 and their log-probs `[R]` fp32 under softmax(logits / temperature) over the whole
        vocabulary (top-p and top-k restrict the draw, not the reported distribution), equal on all tensor ranks.
    """
    scaled = logits if params.score_temperature == 1.0 else logits / params.score_temperature
    log_sum = torch.logsumexp(scaled, -1) if shard.num_real else scaled.new_full((len(scaled),), -torch.inf)
    if params.temperature == 0:
        score, column = _best_column(scaled)
    else:
        kept = _restrict(scaled, params, shard, log_sum)
        score, column = _draw(kept, keys, shard.first // BLOCK)
    chosen = scaled.gather(1, column[:, None])[:, 0] if shard.num_real else log_sum
    local = torch.stack([score, (column + shard.first).double(), chosen.double(), log_sum.double()])
    everywhere = _gather(local, shard)
    winner = everywhere[:, 0].argmax(0, keepdim=True)
    _, token, logit, _ = everywhere.gather(0, winner[:, None].expand(1, 4, -1))[0]
    return token.long(), (logit - everywhere[:, 3].logsumexp(0)).float()


def _gather(local: Tensor, shard: VocabShard) -> Tensor:
    """All-gather `[4, R]` over the tensor group -> `[TP, 4, R]`."""
    if shard.group_size == 1:
        return local[None]
    everywhere = local.new_empty(shard.group_size, *local.shape)
    dist.all_gather_into_tensor(everywhere.flatten(0, 1), local, group=shard.group)
    return everywhere


def _best_column(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return the largest logit of each row and its first column."""
    if logits.shape[1] == 0:
        return _nothing(logits)
    best, column = logits.max(-1)
    return best.double(), column


def _nothing(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Score of a rank whose vocabulary rows are all padding."""
    rows, device = len(logits), logits.device
    score = torch.full((rows,), -torch.inf, dtype=torch.float64, device=device)
    return score, torch.zeros(rows, dtype=torch.int64, device=device)


def _draw(logits: Tensor, keys: Tensor, first_block: int) -> tuple[Tensor, Tensor]:
    """Return the Gumbel score of this rank's best block `[R]` float64 and the column drawn inside it `[R]`."""
    if logits.shape[1] == 0:
        return _nothing(logits)
    padded = F.pad(logits, (0, -logits.shape[1] % BLOCK), value=-torch.inf)
    blocks = padded.unflatten(1, (-1, BLOCK))  # [R, B, 128]
    numbers = torch.arange(blocks.shape[1], device=logits.device) + first_block
    gumbel = -torch.log(-torch.log(uniform(combine(keys[:, None], 2 * numbers))))
    score, block = (torch.logsumexp(blocks, -1).double() + gumbel).max(-1)
    inside = blocks[torch.arange(len(blocks), device=logits.device), block].double()
    cumulative = (inside - inside.amax(-1, keepdim=True)).exp().cumsum(-1)
    target = uniform(combine(keys, 2 * (block + first_block) + 1)) * cumulative[:, -1]
    column = torch.searchsorted(cumulative, target[:, None], right=True)[:, 0]
    # Where top-k or top-p left nothing on this rank the search runs off the end; its score never wins.
    return score, (block * BLOCK + column).clamp(max=logits.shape[1] - 1)


def _restrict(logits: Tensor, params: SamplingParams, shard: VocabShard, log_sum: Tensor) -> Tensor:
    """Set logits outside the top-k and the nucleus to minus infinity."""
    if params.top_k == 0 and params.top_p == 1:
        return logits
    if params.top_k:
        threshold = _threshold(logits, torch.ones_like(logits), float(params.top_k), shard)
        logits = logits.where(logits >= threshold, -torch.inf)
    if params.top_p < 1:
        total = _total_log_sum(torch.logsumexp(logits, -1) if shard.num_real else log_sum, shard)
        mass = (logits - total[:, None]).exp()
        logits = logits.where(logits >= _threshold(logits, mass, params.top_p, shard), -torch.inf)
    return logits


def _total_log_sum(log_sum: Tensor, shard: VocabShard) -> Tensor:
    highest = shard.reduce(log_sum.clone(), dist.ReduceOp.MAX)
    return highest + shard.reduce((log_sum - highest).exp()).log()


def _threshold(logits: Tensor, measure: Tensor, wanted: float, shard: VocabShard) -> Tensor:
    """Return the highest t `[R, 1]` for which the ids with logit >= t measure at least `wanted` in all shards together.

    Bisection over the ordered bit patterns of fp32 is exact in 32 rounds of one number per row.
    """
    low = _ordered(logits.new_full((len(logits), 1), -torch.inf))
    high = _ordered(logits.new_full((len(logits), 1), torch.inf))
    ordered = _ordered(logits)
    while bool((high - low > 1).any()):
        middle = (low + high) // 2
        enough = shard.reduce((measure * (ordered >= middle)).sum(-1, keepdim=True)) >= wanted
        low, high = low.where(~enough, middle), high.where(enough, middle)
    return _from_ordered(low)


def _ordered(values: Tensor) -> Tensor:
    """Map fp32 to int64 so that the order is kept."""
    bits = values.float().contiguous().view(torch.int32).long()
    return bits.where(bits >= 0, -(bits & 0x7FFFFFFF))


def _from_ordered(ordered: Tensor) -> Tensor:
    bits = ordered.where(ordered >= 0, (-ordered) - 2**31)
    return bits.to(torch.int32).view(torch.float32)
