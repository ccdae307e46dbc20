"""Log-probs and entropy of scored tokens from vocab-parallel hidden states, in chunks of rows.

The full `[N, V]` logits never exist: forward and backward each hold one chunk of fp32 logits at a time. Padded
vocabulary rows are masked before the softmax.

Shapes: N scored tokens, C rows of a chunk, H hidden size, V/TP rows of the output matrix on this tensor rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from parallel.model import QwenModel
from parallel.pack import Pack

CHUNK_BYTES = 128 * 2**20
"""Size of one chunk of fp32 logits, in bytes."""


def score_tokens(
    model: QwenModel, hidden: Tensor, pack: Pack, temperature: float = 1.0, chunk_bytes: int = CHUNK_BYTES
) -> tuple[Tensor, Tensor]:
    """Score the `pack.scored` tokens under softmax(logits / temperature) over the unpadded vocabulary.

    Args:
        model: the last stage, head "lm".
        hidden: its output, `[T, 1, H]` or `[T / tensor_size, 1, H]` under sequence parallelism.
        temperature: > 0.

    Returns:
        log_probs `[N]` and entropy `[N]` in nats, fp32, differentiable, equal on all tensor ranks.
    """
    rows = model.gather_sequence(hidden, vocab_parallel=True)[:, 0].index_select(0, pack.sources)
    return vocab_parallel_log_probs(model, rows, pack.tokens[pack.scored], temperature, chunk_bytes)


def vocab_parallel_log_probs(
    model: QwenModel, rows: Tensor, targets: Tensor, temperature: float = 1.0, chunk_bytes: int = CHUNK_BYTES
) -> tuple[Tensor, Tensor]:
    """As `score_tokens`, from hidden states `rows [N, H]` and token ids `targets [N]`."""
    if not temperature > 0:
        raise ValueError(
            f"temperature: got {temperature}, allowed: above 0 (greedy decoding has no log-probs to train on)"
        )
    weight = model.output_weight()
    shard = VocabShard.of(model)
    num_rows = max(1, chunk_bytes // (4 * weight.shape[0]))
    return _LogProbs.apply(rows, weight, targets, shard, 1.0 / temperature, num_rows)


@dataclass(frozen=True)
class VocabShard:
    """The vocabulary rows of this tensor rank: ids `first` .. `first + num_real - 1` exist, the rest is padding."""

    first: int
    num_real: int
    group: Any
    group_size: int

    @classmethod
    def of(cls, model: QwenModel) -> VocabShard:
        """Return the shard held by this rank's output matrix."""
        mesh, padded = model.mesh, model.output_weight().shape[0]
        first = mesh.tensor_rank * padded
        num_real = min(max(model.shape.vocab_size - first, 0), padded)
        return cls(first, num_real, mesh.tensor_group, mesh.tensor_size)

    def reduce(self, tensor: Tensor, op: Any = dist.ReduceOp.SUM) -> Tensor:
        """All-reduce over the tensor group, in place."""
        if self.group_size > 1:
            dist.all_reduce(tensor, op=op, group=self.group)
        return tensor

    def logits(self, rows: Tensor, weight: Tensor, inverse_temperature: float = 1.0) -> Tensor:
        """Return fp32 logits `[C, num_real]`: padded rows of the output matrix are left out."""
        logits = (rows @ weight[: self.num_real].T).float()
        return logits if inverse_temperature == 1.0 else logits.mul_(inverse_temperature)

    def maxima(self, logits: Tensor) -> Tensor:
        """Return the largest logit of each row over the whole vocabulary, `[C]`."""
        if self.num_real:
            local = logits.amax(-1)
        else:
            local = logits.new_full((len(logits),), -torch.inf)
        return self.reduce(local, dist.ReduceOp.MAX)

    def locate(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return the rows `[k]` whose id lives on this rank and the local columns `[k]` of those ids."""
        local = ids - self.first
        rows = ((local >= 0) & (local < self.num_real)).nonzero().squeeze(1)
        return rows, local[rows]


class _LogProbs(torch.autograd.Function):
    """Chunked log-softmax, gather and entropy.

    The log-probs of the last chunk are kept for the backward pass, which uses them up before it recomputes another
    chunk: one chunk exists at a time, and a batch of a single chunk is computed once.
    """

    @staticmethod
    def forward(ctx, rows, weight, targets, shard, inverse_temperature, num_rows):
        log_probs, log_sums, entropy = torch.empty(3, len(rows), dtype=torch.float32, device=rows.device)
        logits = None
        for chunk in _chunks(len(rows), num_rows):
            del logits  # the former chunk is freed before the next is made
            logits = shard.logits(rows[chunk], weight, inverse_temperature)
            maxima = shard.maxima(logits)
            logits.sub_(maxima[:, None])
            sums = shard.reduce(_softmax_sums(logits, shard, targets[chunk]))
            log_sum = sums[0].log()
            log_probs[chunk] = sums[2] - log_sum
            entropy[chunk] = log_sum - sums[1] / sums[0]
            log_sums[chunk] = log_sum + maxima
            logits.sub_(log_sum[:, None])
        ctx.shard, ctx.inverse_temperature, ctx.num_rows = shard, inverse_temperature, num_rows
        ctx.last_chunk = logits if any(ctx.needs_input_grad[:2]) else None
        ctx.save_for_backward(rows, weight, targets, log_sums, entropy)
        ctx.set_materialize_grads(False)
        return log_probs, entropy

    @staticmethod
    def backward(ctx, grad_log_probs, grad_entropy):
        rows, weight, targets, log_sums, entropy = ctx.saved_tensors
        shard, inverse_temperature = ctx.shard, ctx.inverse_temperature
        grad_rows = torch.zeros_like(rows)
        grad_weight = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)
        if grad_log_probs is None:
            grad_log_probs = torch.zeros_like(log_sums)
        logits, ctx.last_chunk = ctx.last_chunk, None
        for chunk in reversed(_chunks(len(rows), ctx.num_rows)):
            if logits is None:
                logits = shard.logits(rows[chunk], weight, inverse_temperature).sub_(log_sums[chunk, None])
            chunk_entropy = None if grad_entropy is None else (grad_entropy[chunk], entropy[chunk])
            _logits_gradient(logits, grad_log_probs[chunk], chunk_entropy)
            here, columns = shard.locate(targets[chunk])
            logits[here, columns] += grad_log_probs[chunk][here]
            grad = logits.mul_(inverse_temperature).to(rows.dtype)
            logits = None
            grad_rows[chunk] = grad @ weight[: shard.num_real]
            _add_product(grad_weight[: shard.num_real], grad.T, rows[chunk])
            del grad  # the chunk is freed before the next is made
        return grad_rows, grad_weight.to(weight.dtype), None, None, None, None


def _chunks(num_rows: int, chunk_rows: int) -> list[slice]:
    return [slice(start, start + chunk_rows) for start in range(0, num_rows, chunk_rows)]


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left @ right, accumulated in fp32; without a temporary of the size of `total` when all is fp32."""
    if left.dtype == total.dtype:
        total.addmm_(left, right)
    else:
        total.add_(left @ right)


def _blocks(logits: Tensor) -> tuple[Tensor, ...]:
    """Views of a sixteenth of a chunk's rows, so that temporaries stay small beside the chunk."""
    return logits.split(max(1, len(logits) // 16)) if len(logits) else ()


def _softmax_sums(shifted: Tensor, shard: VocabShard, targets: Tensor) -> Tensor:
    """Local parts of sum(exp z), sum(z exp z) and of the target's z, `[3, C]`, for logits shifted by the row maxima."""
    sums = torch.zeros(3, len(shifted), dtype=torch.float32, device=shifted.device)
    start = 0
    for block in _blocks(shifted):
        exponentials = block.exp()
        sums[0, start : start + len(block)] = exponentials.sum(-1)
        sums[1, start : start + len(block)] = exponentials.mul_(block).sum(-1)
        start += len(block)
    here, columns = shard.locate(targets)
    sums[2, here] = shifted[here, columns]
    return sums


def _logits_gradient(log_probs: Tensor, grad: Tensor, entropy: tuple[Tensor, Tensor] | None) -> None:
    """Replace log-probs `[C, V/TP]` by the logits' gradient, but for the target's own `+ grad`, in place.

    d log p_target / d z_j = 1[j = target] - p_j and d entropy / d z_j = -p_j (log p_j + entropy).
    """
    start = 0
    for block in _blocks(log_probs):
        part = slice(start, start + len(block))
        probabilities = block.exp()
        if entropy is None:
            torch.mul(probabilities, -grad[part, None], out=block)
        else:
            grad_entropy, value = entropy
            block.add_(value[part, None]).mul_(grad_entropy[part, None]).add_(grad[part, None])
            block.mul_(probabilities).neg_()
        start += len(block)
