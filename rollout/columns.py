"""Bookkeeping of keys and values of unequal length, laid out so that attention reads views.

A row is one sequence. Its tokens lie in columns: column 0 has tokens 0 .. w0 - 1 of all rows, column 1 the next w1 of
the rows that are longer, and so on. Rows are sorted by number of columns, longest first, so the rows that have a column
are its first ones, without holes. A row takes at most one column more than it fills: a long response reserves nothing
for short ones. This module counts and decides; `rollout.kv_cache` holds the tensors and carries the moves out.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from torch import Tensor

FIRST_WIDTH, LARGEST_WIDTH = 128, 1024


def column_widths(length: int, first: int = FIRST_WIDTH) -> list[int]:
    """Widths, in tokens, of the columns that hold `length` tokens: 128, 128, 256, 512, 1024, 1024, ..."""
    widths, total = [], 0
    while total < length:
        widths.append(min(max(total, first), max(first, LARGEST_WIDTH)))
        total += widths[-1]
    return widths


@dataclass(frozen=True)
class Move:
    """Copy the first `columns` columns of row `source` to row `target`, or exchange them."""

    source: int
    target: int
    columns: int
    swap: bool = False


@dataclass(frozen=True)
class Changes:
    """What a step changes in the tensors: first moves that close the holes of removed rows, after which each column
    holds `kept` rows; then moves that make way for new rows and columns, for which it must hold `rows`. A tier of
    blocks moves nothing and says instead where each row's blocks are, `tables [rows, blocks]` int32."""

    closing: list[Move]
    kept: list[int]
    rows: list[int]
    opening: list[Move]
    tables: Tensor | None = None


class Columns:
    """Rows of one cache tier; a key names a sequence.

    Args:
        widths: tokens of each column.
    """

    def __init__(self, widths: Sequence[int]):
        self.widths = list(widths)
        self.starts = [0, *accumulate(self.widths)]
        self.keys: list[Hashable] = []
        self.counts = [0] * len(self.widths)
        self._row: dict[Hashable, int] = {}
        self._columns: dict[Hashable, int] = {}
        self._closing: list[Move] = []
        self._opening: list[Move] = []
        self._kept: list[int] | None = None

    def cost(self, length: int) -> int:
        """Tokens reserved by a row of `length` tokens."""
        return self.starts[bisect_left(self.starts, length)]

    @property
    def used(self) -> int:
        """Tokens reserved by all rows."""
        return sum(width * count for width, count in zip(self.widths, self.counts, strict=True))

    def __contains__(self, key: Hashable) -> bool:
        return key in self._row

    def row(self, key: Hashable) -> int:
        return self._row[key]

    def reserved(self, key: Hashable) -> int:
        """Tokens reserved by the row of `key`."""
        return self.starts[self._columns[key]]

    def add(self, key: Hashable, length: int) -> None:
        """Give `key` a row for `length` tokens (at least one)."""
        self._open()
        columns = max(bisect_left(self.starts, length), 1)
        hole = len(self.keys)
        self.keys.append(key)
        for level in range(1, columns):  # the first row with exactly `level` columns goes behind its equals
            first = self.counts[level]
            if first != hole:
                self._opening.append(Move(first, hole, level))
                self._place(self.keys[first], hole)
                hole = first
        self._columns[key] = columns
        self._place(key, hole)
        self._count(0, columns, 1)

    def grow(self, key: Hashable, length: int) -> None:
        """Make room for `length` tokens in the row of `key`."""
        self._open()
        while self.starts[self._columns[key]] < length:
            level = self._columns[key]
            row, first = self._row[key], self.counts[level]
            if row != first:
                self._opening.append(Move(first, row, level, swap=True))
                self._place(self.keys[first], row)
                self._place(key, first)
            self._columns[key] = level + 1
            self._count(level, level + 1, 1)

    def remove(self, key: Hashable) -> None:
        """Free the row of `key`; within a step all removals come before anything is added."""
        assert self._kept is None, "removal after an addition"
        hole, columns = self._row.pop(key), self._columns.pop(key)
        for level in range(columns, 0, -1):  # the last row with exactly `level` columns fills the hole
            last = self.counts[level - 1] - 1
            if last != hole:
                self._closing.append(Move(last, hole, level))
                self._place(self.keys[last], hole)
                hole = last
        self.keys.pop()
        self._count(0, columns, -1)

    def take_changes(self) -> Changes:
        """Return what has happened since the last call."""
        kept = list(self.counts) if self._kept is None else self._kept
        changes = Changes(self._closing, kept, list(self.counts), self._opening)
        self._closing, self._opening, self._kept = [], [], None
        return changes

    def _open(self) -> None:
        if self._kept is None:
            self._kept = list(self.counts)

    def _place(self, key: Hashable, row: int) -> None:
        self.keys[row] = key
        self._row[key] = row

    def _count(self, first: int, end: int, number: int) -> None:
        for column in range(first, end):
            self.counts[column] += number
