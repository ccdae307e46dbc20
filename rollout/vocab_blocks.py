"""Vocab-parallel logits in blocks of 128 token ids, and the log-sum of each block.

A tensor rank's vocabulary rows start at a multiple of 128, so a block never spans ranks, and what is computed of a
block depends on nothing else: it is the same to the last bit for every tensor size and every set of rows.

Shapes: U rows, V/TP columns (unpadded ids of this tensor rank), B blocks of this rank.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from parallel.log_probs import VocabShard

BLOCK = 128
"""Ids of a block."""
CHUNK_BLOCKS_CPU = 2048
CHUNK_BLOCKS_GPU = 2**19
"""Blocks worked on at a time: 1 MiB of logits, which a CPU's cache holds, or 256 MiB, which bounds the scratch."""
MAX_RATE = 1e30
"""At temperatures near 0 a larger factor would be infinite in fp32, and infinity times 0 is NaN."""
MIN_EXPONENT = -200.0
"""2^-200 is 0 in fp32; minus infinity times 0 would be NaN in the entropy."""


class Part(NamedTuple):
    """Some blocks: their numbers `[n]` among all U x B, the logits row of each `[n]`, and a copy of them `[n, 128]` in
    fp32."""

    block: Tensor
    row: Tensor
    values: Tensor


@dataclass(frozen=True)
class VocabBlocks:
    """Logits of this tensor rank and what is known of their softmax(logits / temperature).

    Attributes:
        values: `[U, B, 128]`, not divided by the temperature; minus infinity beyond the last id. In the dtype of the
            logits: whatever is computed of them is computed in fp32, block by block, in a CPU's cache.
        maxima: `[U, B]` fp32, the largest of each block; the lowest finite number in place of minus infinity.
        log_sums: `[U, B]` float64, log of the sum of exp(logit / temperature) of each block.
        means: `[U, B]` float64, each block's mean of logit / temperature under its own softmax, if asked for.
    """

    values: Tensor
    maxima: Tensor
    log_sums: Tensor
    means: Tensor | None
    temperature: float

    @classmethod
    def of(cls, logits: Tensor, temperature: float, with_means: bool = False) -> VocabBlocks:
        """Compute the log-sums of logits `[U, V/TP]` in one pass; a rank without ids gets a block of minus infinity."""
        num_ids = logits.shape[1]
        padding = -num_ids % BLOCK if num_ids else BLOCK
        padded = F.pad(logits, (0, padding), value=-torch.inf) if padding else logits
        values = padded.contiguous().unflatten(1, (-1, BLOCK))
        flat = values.view(-1, BLOCK)
        maxima, sums, moments = flat.new_empty(3, len(flat), dtype=torch.float32).unbind()
        size = min(_chunk_size(flat), len(flat))
        scratch = flat.new_empty(2 if with_means else 1, size, BLOCK, dtype=torch.float32)
        for start in range(0, len(flat), size or 1):
            part = slice(start, start + size)
            chunk, exponents, powers = flat[part], scratch[0, : len(flat) - start], scratch[-1, : len(flat) - start]
            if chunk.dtype != torch.float32:
                chunk = exponents.copy_(chunk)
            maxima[part] = chunk.amax(-1).clamp_(min=torch.finfo(torch.float32).min)
            torch.sub(chunk, maxima[part, None], out=exponents).mul_(_rate(temperature))
            if with_means:
                exponents.clamp_(min=MIN_EXPONENT)
            torch.exp2(exponents, out=powers)
            torch.sum(powers, -1, out=sums[part])
            if with_means:
                torch.sum(exponents.mul_(powers), -1, out=moments[part])
        highest = maxima.double() / temperature
        log_sums = (highest + sums.double().log()).view(values.shape[:2])
        means = None
        if with_means:
            # No mean of a block without probability: its moment is 0, and so is its weight.
            means = (highest + math.log(2) * moments.double() / sums.double().clamp(min=1e-300)).view(log_sums.shape)
        return cls(values, maxima.view(log_sums.shape), log_sums, means, temperature)

    def mean(self) -> Tensor:
        """Return the mean of logit / temperature under this rank's softmax, `[U]` float64."""
        assert self.means is not None
        shares = self.log_sums.softmax(-1).nan_to_num()  # NaN where the rank has no probability at all
        return (shares * self.means).sum(-1)

    def select(self, block: Tensor) -> Part:
        """Copy blocks `[n]`, numbered among all U x B."""
        return Part(block, block // self.maxima.shape[1], self.values.view(-1, BLOCK).index_select(0, block).float())

    def parts(self, least: Tensor) -> Iterator[Part]:
        """Yield the blocks that hold a logit of at least `least [U]` of their row. The host waits for their number."""
        for block in (self.maxima >= least[:, None]).view(-1).nonzero()[:, 0].split(_chunk_size(self.values)):
            yield self.select(block)

    def exponentials(self, part: Part, least: Tensor | None = None) -> Tensor:
        """Return exp((logit - block maximum) / temperature), `[n, 128]` fp32; uses up the part's values.

        Args:
            least: lower logits than this of their row, `[U]`, give 0.
        """
        highest = self.maxima.view(-1).index_select(0, part.block)[:, None]
        differences = part.values.sub_(highest) if least is None else part.values - highest
        exponentials = differences.mul_(_rate(self.temperature)).exp2_()
        if least is not None:
            # The comparison in place gives 1.0 and 0.0, which is faster than a mask.
            exponentials.mul_(part.values.ge_(least.index_select(0, part.row)[:, None]))
        return exponentials

    def kept_log_sums(self, least: Tensor) -> Tensor:
        """Return log-sums `[U, B]` float64 over the ids whose logit is at least `least [U]` of its row."""
        sums = torch.zeros_like(self.maxima).view(-1)
        for part in self.parts(least):
            sums[part.block] = self.exponentials(part, least).sum(-1)
        return self.maxima.double() / self.temperature + sums.double().log().view(self.maxima.shape)


def _chunk_size(values: Tensor) -> int:
    return CHUNK_BLOCKS_CPU if values.device.type == "cpu" else CHUNK_BLOCKS_GPU


def _rate(temperature: float) -> float:
    """Factor of logits in powers of two, which a CPU computes twice as fast as those of e."""
    return min(math.log2(math.e) / temperature, MAX_RATE)


def gather_over_tensor_ranks(local: Tensor, shard: VocabShard) -> Tensor:
    """All-gather `[n, ...]` over the tensor group -> `[TP, n, ...]`."""
    if shard.group_size == 1:
        return local[None]
    everywhere = local.new_empty(shard.group_size, *local.shape)
    dist.all_gather_into_tensor(everywhere.flatten(0, 1), local, group=shard.group)
    return everywhere
