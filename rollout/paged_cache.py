"""KV cache in blocks: `rollout.kv_cache` for kernels that read through block tables. Not yet run on a GPU.

All memory is taken at the start: one pool of blocks, from which `rollout.blocks` gives to prompts and to responses. The
keys of a prompt are stored once for all its responses; in decoding, each response attends to its own tokens, and the
queries of all responses to a prompt attend together to the prompt, merged by log-sum-exp.

Shapes: T rows of a step (n decoding ones, then t of chunks, then padding), B blocks of s tokens, P tiles of g rows that
share a prefix, M most blocks of a sequence, Hq and Hkv heads of this tensor rank, r = Hq / Hkv, D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from parallel.model import QwenModel
from rollout.attention import merge
from rollout.block_attention import BlockAttention, Prefill
from rollout.steps import Step


class Decode(NamedTuple):
    """What all layers share in decoding n rows.

    Attributes:
        slots: `[n]` int64, where each row's token is stored.
        suffix_tables: `[n, M]` int32; suffix_lengths: `[n]` int32, with the token of this step.
        prefix_tables: `[P, M]` int32; prefix_lengths: `[P]` int32.
        fold: `[P * g]` int64; unfold: `[n]` int64, see `fold_groups`.
    """

    slots: Tensor
    suffix_tables: Tensor
    suffix_lengths: Tensor
    prefix_tables: Tensor
    prefix_lengths: Tensor
    fold: Tensor
    unfold: Tensor

    @property
    def width(self) -> int:
        """g."""
        return len(self.fold) // len(self.prefix_lengths)

    def map(self, function: Callable[[Tensor], Tensor]) -> Decode:
        return Decode(*map(function, self))


def plan_decode(step: Step, block_size: int) -> Decode:
    """Return, on the CPU, what the step's decoded rows read and where they are stored."""
    tables, prefix_tables = step.suffix_changes.tables, step.prefix_changes.tables
    assert tables is not None
    assert prefix_tables is not None
    stored = torch.tensor(step.suffix_lengths)
    used, member = torch.tensor(step.prefix_of_row).unique(return_inverse=True)
    group, fold, unfold = fold_groups(member)
    prefixes = used[group]
    return Decode(
        slots=_slots(tables, stored[:, None], block_size)[:, 0],
        suffix_tables=tables,
        suffix_lengths=(stored + 1).int(),
        prefix_tables=prefix_tables[prefixes],
        prefix_lengths=torch.tensor(step.prefix_lengths, dtype=torch.int32)[prefixes],
        fold=fold,
        unfold=unfold,
    )


def fold_groups(member: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Lay out rows as tiles of equal width, so that rows of a group lie in one tile, or in several if it is large.

    A tile is at most twice as wide as the mean group: one large group among many small ones doesn't make all wide.

    Args:
        member: `[n]` int64, the group of each row; each of groups 0, 1, .. has one.

    Returns: group `[tiles]`; fold `[tiles * width]`, the row of each place (0 where none is); unfold `[n]`, the place
        of each row.
    """
    num, rows = torch.bincount(member), torch.arange(len(member))
    width = min(int(num.max()), -(-2 * len(member) // len(num)))
    order = member.argsort(stable=True)
    number = torch.empty_like(order)  # of each row in its group
    number[order] = rows - (num.cumsum(0) - num)[member[order]]
    tiles = -(-num // width)
    unfold = ((tiles.cumsum(0) - tiles)[member] + number // width) * width + number % width
    fold = torch.zeros(int(tiles.sum()) * width, dtype=torch.int64)
    fold[unfold] = rows
    return torch.arange(len(num)).repeat_interleave(tiles), fold, unfold


def plan_prefill(step: Step, block_size: int) -> Prefill:
    """Return, on the CPU, what the step's chunks read and where they are stored."""
    assert step.prefix_changes.tables is not None
    tables = step.prefix_changes.tables[[chunk.row for chunk in step.chunks]]
    places = [torch.arange(chunk.start, chunk.start + chunk.length) for chunk in step.chunks]
    return Prefill(
        chunks=step.chunks,
        slots=torch.cat([_slots(table, place, block_size) for table, place in zip(tables, places, strict=True)]),
        tables=tables,
        query_borders=_borders([chunk.length for chunk in step.chunks]),
        key_borders=_borders([chunk.start + chunk.length for chunk in step.chunks]),
    )


def _slots(tables: Tensor, places: Tensor, block_size: int) -> Tensor:
    """Return the slots of tokens `places [..., k]` of sequences with `tables [..., M]`."""
    return tables.gather(-1, places // block_size).long() * block_size + places % block_size


def _borders(lengths: Sequence[int]) -> Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)


class PagedCache:
    """Keys and values of one model chunk, for all lanes; `attend` serves the rows announced by `begin`.

    Args:
        num_blocks: blocks to be given out; one more is written by rows that are only padding.
        attention: see `rollout.block_attention`.
        like: gives dtype and device.
    """

    def __init__(
        self,
        num_layers: int,
        kv_heads: int,
        head_dim: int,
        *,
        num_blocks: int,
        block_size: int,
        attention: BlockAttention,
        like: Tensor,
    ):
        # Zeros, not empty: a masked key has weight 0, and 0 times a stray NaN would be NaN.
        self.pool = like.new_zeros(num_layers, 2, num_blocks + 1, block_size, kv_heads, head_dim)
        self.block_size = block_size
        self.scratch = num_blocks
        self.attention = attention
        self._decode: Decode | None = None
        self._prefill: Prefill | None = None
        self._slots = torch.empty(0, dtype=torch.int64)

    @staticmethod
    def of(model: QwenModel, num_blocks: int, block_size: int, attention: BlockAttention) -> PagedCache:
        """Return an empty cache for a chunk's layers and this tensor rank's heads."""
        return PagedCache(
            len(model.decoder.layers),
            model.mesh.layout.local_kv_heads(model.shape),
            model.config.kv_channels,
            num_blocks=num_blocks,
            block_size=block_size,
            attention=attention,
            like=model.decoder.layers[0].self_attention.linear_qkv.weight,
        )

    @property
    def num_bytes(self) -> int:
        """Memory held, always the same."""
        return self.pool.nbytes

    def begin(self, step: Step) -> None:
        """Announce the rows of a step."""
        device = self.pool.device
        decode = prefill = None
        if step.suffix_lengths:
            decode = plan_decode(step, self.block_size).map(lambda tensor: tensor.to(device, non_blocking=True))
        if step.chunks:
            prefill = plan_prefill(step, self.block_size).to(device)
        self.use(decode, prefill)

    def use(self, decode: Decode | None, prefill: Prefill | None = None) -> None:
        """Announce rows that are planned already."""
        self._decode, self._prefill = decode, prefill
        slots = [plan.slots for plan in (decode, prefill) if plan is not None]
        self._slots = slots[0] if len(slots) == 1 else torch.cat(slots)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Store key and value `[T, 1, Hkv, D]` of local layer `layer` and attend with query `[T, 1, Hq, D]`.

        Returns: `[T, 1, Hq * D]`, zero for padding rows.
        """
        num, real = 0 if self._decode is None else len(self._decode.slots), len(self._slots)
        keys, values = self.pool[layer]
        for stored, new in ((keys, key), (values, value)):
            stored.flatten(0, 1)[self._slots] = new[:real, 0]
        parts = []
        if self._decode is not None:
            parts.append(self._attend_decoding(self._decode, query[:num, 0], keys, values))
        if self._prefill is not None:
            parts.append(self.attention.prefill(query[num:real, 0], keys, values, self._prefill).flatten(1))
        attended = parts[0] if len(parts) == 1 else torch.cat(parts)
        return F.pad(attended, (0, 0, 0, len(query) - real))[:, None]

    def _attend_decoding(self, plan: Decode, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """`[n, Hq, D]` -> `[n, Hq * D]`."""
        rows = query.unflatten(1, (keys.shape[2], -1)).transpose(1, 2)  # [n, r, Hkv, D]
        output, log_sum = self.attention.part(rows, keys, values, plan.suffix_tables, plan.suffix_lengths)
        folded = rows[plan.fold].unflatten(0, (-1, plan.width)).flatten(1, 2)  # [P, g * r, Hkv, D]
        other, other_log_sum = self.attention.part(folded, keys, values, plan.prefix_tables, plan.prefix_lengths)
        other = other.unflatten(1, (plan.width, -1)).flatten(0, 1)[plan.unfold]
        other_log_sum = other_log_sum.unflatten(2, (plan.width, -1)).transpose(1, 2).flatten(0, 1)[plan.unfold]
        output = output.transpose(1, 2)  # [n, Hkv, r, D]
        merge(output, log_sum, other.transpose(1, 2), other_log_sum)
        return output.flatten(1)
