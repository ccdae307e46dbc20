"""Two-tier KV cache of one model chunk: this tensor rank's heads, this stage's layers.

The prefix tier holds the keys of a prompt once for all its responses, the suffix tier those of each response. A query
attends to both parts, merged by log-sum-exp; queries that share keys (the heads of a group, the responses to a prompt)
become rows of one product, so keys are read once and never repeated. `rollout.columns` decides where things lie.

Shapes: T rows of a step (n decoding ones, then chunks of prefixes, then padding), P prefixes, g most responses of a
prefix, Hq and Hkv heads of this tensor rank, r = Hq / Hkv, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from parallel.layers import packed_attention
from parallel.model import QwenModel
from rollout.attention import merge, partial_attention
from rollout.columns import Move
from rollout.steps import Chunk, Step


@dataclass(frozen=True)
class _Span:
    """The part of one column that is attended to, its first rows and tokens: views `[rows, Hkv, tokens, D]` of the
    keys and the values of each layer."""

    rows: int
    keys: Sequence[Tensor]
    values: Sequence[Tensor]
    mask: Tensor | None


class _Write(NamedTuple):
    """Where the next keys and values of some rows go in one column: for each layer `[2, rows, Hkv, D]`, or with
    `places`, where they differ, the column itself `[2, all rows, Hkv, width, D]`."""

    targets: Sequence[Tensor]
    rows: Tensor | None = None
    places: Tensor | None = None

    def store(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Store `[n, Hkv, D]` of all decoded rows."""
        keys, values = self.targets[layer]
        if self.places is None:
            keys.copy_(key)
            values.copy_(value)
        else:
            keys[self.rows, :, self.places] = key[self.rows]
            values[self.rows, :, self.places] = value[self.rows]


@dataclass(frozen=True)
class _Decode:
    """What all layers share in decoding n rows.

    `fold [P * g]` is the row of each place of the prefix queries (None: rows lie in this order already), `unfold [n]`
    the place of each row.
    """

    writes: list[_Write]
    suffix_spans: list[_Span]
    prefix_spans: list[_Span]
    num_rows: int
    group: int
    fold: Tensor | None
    unfold: Tensor


class Tier:
    """Tensors of one tier: for each column `[layers, 2 (keys, values), rows, Hkv, width, D]`."""

    def __init__(self, num_layers: int, kv_heads: int, head_dim: int, widths: Sequence[int], like: Tensor):
        self.widths = widths
        self.columns = [like.new_zeros(num_layers, 2, 0, kv_heads, width, head_dim) for width in self.widths]

    @property
    def tokens(self) -> int:
        """Tokens there is memory for."""
        return sum(column.shape[2] * column.shape[4] for column in self.columns)

    def trim(self, rows: Sequence[int]) -> None:
        """Free all memory but that of the first `rows` rows of each column."""
        for index, num in enumerate(rows):
            if self.columns[index].shape[2] > num:
                self.columns[index] = self.columns[index][:, :, :num].clone()

    def missing(self, rows: Sequence[int]) -> list[int]:
        """Rows of each column that there is no memory for."""
        return [max(num - column.shape[2], 0) for num, column in zip(rows, self.columns, strict=True)]

    def reserve(self, rows: Sequence[int], spare_tokens: int) -> int:
        """Get memory for `rows` rows of each column; doubles a column as far as `spare_tokens` allow.

        Returns: the spare tokens left.
        """
        for index, missing in enumerate(self.missing(rows)):
            if missing == 0:
                continue
            old, width = self.columns[index], self.widths[index]
            held = old.shape[2]
            more = max(min(held - missing, spare_tokens // width), 0)
            spare_tokens -= more * width
            # Zeros, not empty: a masked key has weight 0, and 0 times a stray NaN would be NaN.
            self.columns[index] = old.new_zeros((*old.shape[:2], held + missing + more, *old.shape[3:]))
            self.columns[index][:, :, :held] = old
        return spare_tokens

    def move(self, moves: Sequence[Move]) -> None:
        """Copy or exchange rows."""
        for move in moves:
            for column in self.columns[: move.columns]:
                if move.swap:
                    column[:, :, [move.source, move.target]] = column[:, :, [move.target, move.source]]
                else:
                    column[:, :, move.target] = column[:, :, move.source]

    def spans(self, lengths: Sequence[int], counts: Sequence[int], like: Tensor) -> list[_Span]:
        """Return what rows of these lengths attend to; `counts` are the rows of each column."""
        spans, start = [], 0
        for index, (width, rows) in enumerate(zip(self.widths, counts, strict=True)):
            longest = min(max(lengths[:rows], default=0) - start, width)
            if longest <= 0:
                break
            mask = None
            if min(lengths[:rows]) - start < longest:
                ends = torch.tensor(lengths[:rows], device=like.device)
                hidden = torch.arange(start, start + longest, device=like.device)[None] >= ends[:, None]
                mask = torch.zeros(rows, 1, 1, longest, dtype=like.dtype, device=like.device)
                mask.masked_fill_(hidden[:, None, None], -torch.inf)
            keys, values = self.columns[index][:, :, :rows, :, :longest].unbind(1)
            spans.append(_Span(rows, keys.unbind(), values.unbind(), mask))
            start += width
        return spans

    def write(self, layer: int, row: int, start: int, key: Tensor, value: Tensor) -> None:
        """Store `[t, Hkv, D]` as tokens `start` .. `start + t - 1` of a row."""
        offset = 0
        for column in self.columns:
            width = column.shape[4]
            first, last = max(start, offset), min(start + len(key), offset + width)
            if first < last:
                for place, source in ((0, key), (1, value)):
                    part = source[first - start : last - start].transpose(0, 1)
                    column[layer, place, row, :, first - offset : last - offset] = part
            offset += width


def _attend(layer: int, query: Tensor, spans: Sequence[_Span], scale: float) -> tuple[Tensor, Tensor]:
    """Attend with `query [rows, Hkv, queries, D]` to the spans of a tier, whose first has all rows; returns output and
    log-sum-exp of each query."""
    first, *others = spans
    output, log_sum = partial_attention(query, first.keys[layer], first.values[layer], scale, first.mask)
    for span in others:
        part = partial_attention(query[: span.rows], span.keys[layer], span.values[layer], scale, span.mask)
        merge(output[: span.rows], log_sum[: span.rows], *part)
    return output, log_sum


class KVCache:
    """Keys and values of one model chunk; core attention calls `attend` with the rows announced by `begin`.

    Args:
        widths: tokens of each column, see `rollout.columns`.
        max_tokens: memory bound of both tiers together.
        scale: softmax scale of attention.
        like: gives dtype and device.
    """

    def __init__(
        self,
        num_layers: int,
        kv_heads: int,
        head_dim: int,
        *,
        widths: Sequence[int],
        max_tokens: int,
        scale: float,
        like: Tensor,
    ):
        self.prefix = Tier(num_layers, kv_heads, head_dim, widths, like)
        self.suffix = Tier(num_layers, kv_heads, head_dim, widths, like)
        self.max_tokens = max_tokens
        self.scale = scale
        self.like = like
        self._step: _Decode | None = None
        self._chunks: list[Chunk] = []

    @staticmethod
    def of(model: QwenModel, widths: Sequence[int], max_tokens: int) -> KVCache:
        """Return an empty cache for a chunk's layers and this tensor rank's heads."""
        config = model.config
        return KVCache(
            len(model.decoder.layers),
            model.mesh.layout.local_kv_heads(model.shape),
            config.kv_channels,
            widths=widths,
            max_tokens=max_tokens,
            scale=config.softmax_scale,
            like=model.decoder.layers[0].self_attention.linear_qkv.weight,
        )

    @property
    def num_bytes(self) -> int:
        """Memory held now."""
        columns = self.prefix.columns + self.suffix.columns
        return sum(column.numel() * column.element_size() for column in columns)

    def begin(self, step: Step) -> None:
        """Make room for a step and announce its rows."""
        tiers = ((self.prefix, step.prefix_changes), (self.suffix, step.suffix_changes))
        for tier, changes in tiers:
            tier.move(changes.closing)
        if self._spare(step) < 0:
            for tier, changes in tiers:
                tier.trim(changes.kept)
        spare = self._spare(step)
        for tier, changes in tiers:
            spare = tier.reserve(changes.rows, spare)
            tier.move(changes.opening)
        self._step = self._plan_decode(step) if step.suffix_lengths else None
        self._chunks = step.chunks

    def _spare(self, step: Step) -> int:
        """Tokens left of the memory bound once all rows of the step have memory."""
        held = self.prefix.tokens + self.suffix.tokens
        rows = ((self.prefix, step.prefix_changes.rows), (self.suffix, step.suffix_changes.rows))
        missing = sum(
            num * width for tier, wanted in rows for num, width in zip(tier.missing(wanted), tier.widths, strict=True)
        )
        return self.max_tokens - held - missing

    def _plan_decode(self, step: Step) -> _Decode:
        device = self.like.device
        members = [0] * len(step.prefix_lengths)
        places = []
        for prefix in step.prefix_of_row:
            places.append(members[prefix])
            members[prefix] += 1
        widest = max(members)
        unfold = [prefix * widest + place for prefix, place in zip(step.prefix_of_row, places, strict=True)]
        fold = None
        if unfold != list(range(len(members) * widest)):
            fold = torch.zeros(len(members) * widest, dtype=torch.int64)
            fold[torch.tensor(unfold)] = torch.arange(len(unfold))
        return _Decode(
            writes=self._writes(step.suffix_lengths, device),
            suffix_spans=self.suffix.spans([n + 1 for n in step.suffix_lengths], step.suffix_counts, self.like),
            prefix_spans=self.prefix.spans(step.prefix_lengths, step.prefix_counts, self.like),
            num_rows=len(unfold),
            group=widest,
            fold=None if fold is None else fold.to(device),
            unfold=torch.tensor(unfold, device=device),
        )

    def _writes(self, lengths: Sequence[int], device: torch.device) -> list[_Write]:
        writes, start = [], 0
        for column, width in enumerate(self.suffix.widths):
            rows = [row for row, length in enumerate(lengths) if start <= length < start + width]
            places = [lengths[row] - start for row in rows]
            targets = self.suffix.columns[column]
            if len(set(places)) == 1 and len(rows) == len(lengths):
                writes.append(_Write(targets[:, :, : len(rows), :, places[0]].unbind()))
            elif rows:
                where = (torch.tensor(index, device=device) for index in (rows, places))
                writes.append(_Write(targets.unbind(), *where))
            start += width
        return writes

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Store key and value `[T, 1, Hkv, D]` of local layer `layer` and attend with query `[T, 1, Hq, D]`.

        Returns: `[T, 1, Hq * D]`, zero for padding rows.
        """
        query, key, value = query[:, 0], key[:, 0], value[:, 0]
        parts, start = [], 0
        if self._step is not None:
            start = self._step.num_rows
            parts.append(self._decode(self._step, layer, query[:start], key[:start], value[:start]))
        for chunk in self._chunks:
            if chunk.start:  # those that continue a prefix come first
                end = start + chunk.length
                parts.append(self._continue(layer, chunk, query[start:end], key[start:end], value[start:end]))
                start = end
        fresh = [chunk for chunk in self._chunks if chunk.start == 0]
        if fresh:
            parts.append(self._prefill(layer, fresh, query[start:], key[start:], value[start:]))
        attended = parts[0] if len(parts) == 1 else torch.cat(parts)
        if len(attended) < len(query):
            attended = F.pad(attended, (0, 0, 0, len(query) - len(attended)))
        return attended[:, None]

    def _decode(self, step: _Decode, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        for write in step.writes:
            write.store(layer, key, value)
        grouped = query.unflatten(1, (key.shape[1], -1))  # [n, Hkv, r, D]
        output, log_sum = _attend(layer, grouped, step.suffix_spans, self.scale)
        folded = (grouped if step.fold is None else grouped[step.fold]).unflatten(0, (-1, step.group))
        folded = folded.transpose(1, 2).flatten(2, 3)  # [P, Hkv, g * r, D]
        other, other_log_sum = _attend(layer, folded, step.prefix_spans, self.scale)
        other, other_log_sum = (x.unflatten(2, (step.group, -1)).transpose(1, 2) for x in (other, other_log_sum))
        if step.fold is None:  # rows lie in order: merge views [P, g, Hkv, r, ...] of both
            output, log_sum = (x.unflatten(0, (-1, step.group)) for x in (output, log_sum))
        else:
            other, other_log_sum = (x.flatten(0, 1)[step.unfold] for x in (other, other_log_sum))
        share = torch.sigmoid(other_log_sum - log_sum)[..., None].to(output.dtype)
        merged = output.new_empty(output.shape)
        return torch.lerp(output, other, share, out=merged).view(step.num_rows, -1)

    def _prefill(self, layer: int, chunks: list[Chunk], query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Store chunks that begin their prefix and attend inside each."""
        borders = [0]
        for chunk in chunks:
            start, end = borders[-1], borders[-1] + chunk.length
            self.prefix.write(layer, chunk.row, 0, key[start:end], value[start:end])
            borders.append(end)
        real = borders[-1]
        return packed_attention(query[:real], key[:real], value[:real], tuple(borders), self.scale)

    def _continue(self, layer: int, chunk: Chunk, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Store the next tokens of a prefix and attend, to what was stored before and causally to themselves."""
        self.prefix.write(layer, chunk.row, chunk.start, key, value)
        kv_heads = key.shape[1]
        repeats = query.shape[1] // kv_heads
        own_key, own_value = (x.transpose(0, 1).repeat_interleave(repeats, 0)[None] for x in (key, value))
        own = query.transpose(0, 1)[None]  # [1, Hq, t, D]
        output, log_sum = partial_attention(own, own_key, own_value, self.scale, causal=True)
        folded = own.unflatten(1, (kv_heads, repeats)).flatten(2, 3)  # [1, Hkv, r * t, D]
        start = 0
        for column in self.prefix.columns:
            tokens = min(chunk.start - start, column.shape[4])
            if tokens <= 0:
                break
            old_key, old_value = column[layer, :, chunk.row, :, :tokens]
            part, part_log_sum = partial_attention(folded, old_key[None], old_value[None], self.scale)
            merge(output, log_sum, part.reshape(output.shape), part_log_sum.reshape(log_sum.shape))
            start += column.shape[4]
        return output[0].transpose(0, 1).flatten(1)
