"""KV cache of this rank's share of the model: its tensor rank's heads, its pipeline stages' layers.

Core attention calls `attend` with the rows of the step announced by `begin_prefill` or `begin_decode`. Active slots
are always the first ones, so that decoding reads views.

Shapes: T rows of a step (padding last), L cached tokens, Hq and Hkv heads of this tensor rank, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from parallel.layers import packed_attention


@dataclass(frozen=True)
class _Prefill:
    borders: tuple[int, ...]
    slots: tuple[int, ...]


@dataclass(frozen=True)
class _Decode:
    positions: Tensor
    mask: Tensor


class KVCache:
    """Keys and values `[layers, slots, Hkv, capacity, D]`."""

    def __init__(
        self, num_layers: int, num_slots: int, capacity: int, kv_heads: int, head_dim: int, scale: float, like: Tensor
    ):
        """Allocate.

        Args:
            capacity: tokens of one slot, prompt and response.
            scale: softmax scale of attention.
            like: gives dtype and device.
        """
        shape = (num_layers, num_slots, kv_heads, capacity, head_dim)
        # Zeros, not empty: a masked position has weight 0, and 0 times a stray NaN would be NaN.
        self.keys, self.values = like.new_zeros(shape), like.new_zeros(shape)
        self.scale = scale
        self._step: _Prefill | _Decode | None = None

    @property
    def capacity(self) -> int:
        """Tokens that fit into one slot."""
        return self.keys.shape[3]

    @property
    def num_slots(self) -> int:
        return self.keys.shape[1]

    def begin_prefill(self, lengths: list[int], slots: list[int]) -> None:
        """The next rows are whole prompts end to end; prompt i goes into `slots[i]`, from position 0."""
        assert max(lengths) <= self.capacity, "a prompt is longer than its slot"
        borders = torch.tensor([0, *lengths]).cumsum(0).tolist()
        self._step = _Prefill(tuple(borders), tuple(slots))

    def begin_decode(self, positions: Tensor) -> None:
        """The next row i is one token at `positions[i]` of slot i."""
        longest = int(positions.max()) + 1
        assert longest <= self.capacity, "a response is longer than its slot"
        seen = torch.arange(longest, device=positions.device)[None] <= positions[:, None]
        self._step = _Decode(positions, seen[:, None, None])

    def fork(self, source: int, targets: list[int], length: int) -> None:
        """Copy the first `length` tokens of a slot into other slots."""
        for target in targets:
            self.move(source, target, length)

    def move(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` tokens of one slot into another."""
        for cached in (self.keys, self.values):
            cached[:, target, :, :length] = cached[:, source, :, :length]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Store key and value `[T, 1, Hkv, D]` of local layer `layer` and attend with query `[T, 1, Hq, D]`.

        Returns: `[T, 1, Hq * D]`, zero for padding rows.
        """
        query, key, value = query[:, 0], key[:, 0], value[:, 0]
        assert self._step is not None, "attention before begin_prefill or begin_decode"
        if isinstance(self._step, _Prefill):
            attended = self._prefill(self._step, layer, query, key, value)
        else:
            attended = self._decode(self._step, layer, query, key, value)
        return F.pad(attended, (0, 0, 0, len(query) - len(attended)))[:, None]

    def _prefill(self, step: _Prefill, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        for slot, start, end in zip(step.slots, step.borders, step.borders[1:], strict=False):
            self.keys[layer, slot, :, : end - start] = key[start:end].transpose(0, 1)
            self.values[layer, slot, :, : end - start] = value[start:end].transpose(0, 1)
        real = step.borders[-1]
        return packed_attention(query[:real], key[:real], value[:real], step.borders, self.scale)

    def _decode(self, step: _Decode, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        num, longest = len(step.positions), step.mask.shape[-1]
        rows = torch.arange(num, device=query.device)
        self.keys[layer, rows, :, step.positions] = key[:num]
        self.values[layer, rows, :, step.positions] = value[:num]
        # Queries that share a key/value head become rows of one small attention: no key is repeated.
        grouped = query[:num].unflatten(1, (key.shape[1], -1))  # [num, Hkv, Hq / Hkv, D]
        keys, values = self.keys[layer, :num, :, :longest], self.values[layer, :num, :, :longest]
        attended = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=step.mask, scale=self.scale)
        return attended.flatten(1)
