"""What the tests of the sampler share: keys, shards of a vocabulary, and the distribution drawn from, found by sorting.

Shapes: U rows of logits, V ids.
"""

import math

import torch
from torch import Tensor

from parallel.log_probs import VocabShard
from parallel.mesh import Mesh
from parallel.qwen import padded_vocab_size
from rollout.random_numbers import combine
from rollout.sampling import SamplingParams


def keys(number: int, seed: int = 0) -> Tensor:
    return combine(torch.tensor(seed), torch.arange(number))


def whole(num_ids: int) -> VocabShard:
    """The shard of a single process."""
    return VocabShard(first=0, num_real=num_ids, group=None, group_size=1)


def columns_of_rank(logits: Tensor, mesh: Mesh) -> tuple[Tensor, VocabShard]:
    """Return this tensor rank's columns of logits `[U, V]` and their shard."""
    columns = padded_vocab_size(logits.shape[1], mesh.tensor_size) // mesh.tensor_size
    first = mesh.tensor_rank * columns
    mine = logits[:, first : first + columns]
    return mine, VocabShard(first, mine.shape[1], mesh.tensor_group, mesh.tensor_size)


def random_logits(num_rows: int, num_ids: int, seed: int = 0) -> Tensor:
    return 3 * torch.randn(num_rows, num_ids, generator=torch.Generator().manual_seed(seed))


def kept_by_sorting(logits: Tensor, params: SamplingParams) -> Tensor:
    """Return which ids `[U, V]` top-k, top-p and min-p keep, one after the other, with ties at each border."""
    scores = logits.double() / params.temperature
    kept = torch.ones_like(logits, dtype=torch.bool)
    if params.top_k:
        kept = logits >= logits.topk(min(params.top_k, logits.shape[1]), -1).values[:, -1:]
    if params.top_p < 1:
        ordered = scores.masked_fill(~kept, -torch.inf).sort(-1, descending=True).values
        probabilities = ordered.softmax(-1)
        # The nucleus is the shortest head whose mass reaches top_p: an id is in if the mass before it falls short.
        in_head = probabilities.cumsum(-1) - probabilities < params.top_p
        kept &= scores >= ordered.where(in_head, torch.inf).amin(-1, keepdim=True)
    if params.min_p:
        kept &= scores >= scores.amax(-1, keepdim=True) + math.log(params.min_p)
    return kept


def drawn_from(logits: Tensor, params: SamplingParams) -> Tensor:
    """Return the log-probs `[U, V]` float64 after temperature, top-k, top-p and min-p."""
    kept = kept_by_sorting(logits, params)
    return (logits.double() / params.temperature).masked_fill(~kept, -torch.inf).log_softmax(-1)
