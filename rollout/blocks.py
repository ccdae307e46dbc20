"""Bookkeeping of keys and values in blocks of equal size, for kernels that read them through a block table.

A sequence takes blocks as it grows, whichever are free; its row of the block table lists them in order. So nothing is
ever copied, and a sequence reserves less than one block more than it fills. `rollout.paged_cache` holds the tensors.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Iterable

import torch

from rollout.columns import Changes

BLOCK_TOKENS = 256
"""Tokens of a block; flash-attn's paged kernels take multiples of 256."""


class BlockPool:
    """Free blocks, shared by all tiers of all lanes. The lowest is taken first: every rank of a replica takes the same.

    Args:
        num_blocks: blocks there is memory for.
        block_size: tokens of a block.
    """

    def __init__(self, num_blocks: int, block_size: int = BLOCK_TOKENS):
        self.block_size = block_size
        self._free = list(range(num_blocks))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self) -> int:
        """Return the lowest free block, which is free no longer."""
        assert self._free, "lanes have reserved more than there is"
        return heapq.heappop(self._free)

    def give_back(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            heapq.heappush(self._free, block)


class Blocks:
    """Rows of one cache tier; a key names a sequence. The last row takes the place of a removed one.

    Args:
        most_blocks: most blocks of one sequence.
    """

    def __init__(self, pool: BlockPool, most_blocks: int):
        self.keys: list[Hashable] = []
        self.counts: list[int] = []  # a tier of columns counts the rows of each; here all rows are alike
        self._pool = pool
        self._row: dict[Hashable, int] = {}
        self._blocks: dict[Hashable, list[int]] = {}
        self._num_used = 0
        self._table = torch.zeros(16, most_blocks, dtype=torch.int32)

    def cost(self, length: int) -> int:
        """Tokens reserved by a row of `length` tokens."""
        return -(-length // self._pool.block_size) * self._pool.block_size

    @property
    def used(self) -> int:
        """Tokens reserved by all rows."""
        return self._num_used * self._pool.block_size

    def __contains__(self, key: Hashable) -> bool:
        return key in self._row

    def row(self, key: Hashable) -> int:
        return self._row[key]

    def reserved(self, key: Hashable) -> int:
        """Tokens reserved by the row of `key`."""
        return len(self._blocks[key]) * self._pool.block_size

    def add(self, key: Hashable, length: int) -> None:
        """Give `key` a row for `length` tokens (at least one)."""
        if len(self.keys) == len(self._table):
            self._table = torch.cat((self._table, torch.zeros_like(self._table)))
        self._row[key] = len(self.keys)
        self._blocks[key] = []
        self.keys.append(key)
        self.grow(key, max(length, 1))

    def grow(self, key: Hashable, length: int) -> None:
        """Make room for `length` tokens in the row of `key`."""
        while self.reserved(key) < length:
            block, held = self._pool.take(), self._blocks[key]
            self._table[self._row[key], len(held)] = block
            held.append(block)
            self._num_used += 1

    def remove(self, key: Hashable) -> None:
        """Free the row of `key` and its blocks."""
        hole, blocks = self._row.pop(key), self._blocks.pop(key)
        self._pool.give_back(blocks)
        self._num_used -= len(blocks)
        last = self.keys.pop()
        if last != key:
            self.keys[hole] = last
            self._row[last] = hole
            self._table[hole] = self._table[len(self.keys)]
        self._table[len(self.keys)] = 0

    def take_changes(self) -> Changes:
        """Return the block table `[rows, most blocks of a row]`; places behind a row's blocks hold 0."""
        widest = max(map(len, self._blocks.values()), default=0)
        return Changes([], [], [], [], tables=self._table[: len(self.keys), :widest].clone())
