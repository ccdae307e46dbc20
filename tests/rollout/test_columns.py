"""The books against a plain model of rows: a list of tokens for each key."""

import random

import pytest

from rollout.columns import Changes, Columns, Move, column_widths


class Memory:
    """What `Changes` do to rows of columns, with the checks of a real memory: a row must have been made room for."""

    def __init__(self, num_columns: int):
        self.columns: list[list[object]] = [[] for _ in range(num_columns)]

    def apply(self, changes: Changes) -> None:
        self.move(changes.closing)
        for column, kept, rows in zip(self.columns, changes.kept, changes.rows, strict=True):
            del column[kept:]
            column.extend([None] * (rows - len(column)))
        self.move(changes.opening)

    def move(self, moves: list[Move]) -> None:
        for move in moves:
            for column in self.columns[: move.columns]:
                source, target = column[move.source], column[move.target]
                column[move.target] = source
                if move.swap:
                    column[move.source] = target


def test_widths_double_up_to_the_largest():
    assert column_widths(1) == [128]
    assert column_widths(129) == [128, 128]
    assert column_widths(4000) == [128, 128, 256, 512, 1024, 1024, 1024]
    assert column_widths(5, first=2) == [2, 2, 4]


def test_a_row_costs_whole_columns():
    books = Columns([4, 4, 8])
    assert [books.cost(length) for length in (0, 1, 4, 5, 8, 9, 16)] == [0, 4, 4, 8, 8, 16, 16]
    books.add("short", 3)
    books.add("long", 9)
    assert (books.used, books.counts) == (20, [2, 1, 1])
    assert books.keys == ["long", "short"]
    assert (books.reserved("short"), books.reserved("long")) == (4, 16)


def test_rows_stay_sorted_by_columns_with_few_moves():
    books = Columns([4, 4, 8])
    for key, length in (("a", 9), ("b", 5), ("c", 1), ("d", 1)):
        books.add(key, length)
    assert books.take_changes() == Changes([], [0, 0, 0], [4, 2, 1], [])
    books.grow("d", 5)  # changes places with the first of the rows of one column
    assert books.keys == ["a", "b", "d", "c"]
    (move,) = books.take_changes().opening
    assert (move.source, move.target, move.columns, move.swap) == (2, 3, 1, True)
    books.remove("a")  # the last row of two columns fills the hole, the last of one column fills the next
    assert books.keys == ["d", "b", "c"]
    changes = books.take_changes()
    assert [(move.source, move.target, move.columns) for move in changes.closing] == [(2, 0, 2), (3, 2, 1)]
    assert books.counts == [3, 2, 0]


@pytest.mark.parametrize("seed", range(5))
def test_any_sequence_of_changes_leaves_every_row_with_its_own_tokens(seed):
    """The memory holds, in each column of a row, the name of the key that owns it."""
    chance = random.Random(seed)
    books, memory = Columns([2, 2, 4, 8]), Memory(4)
    lengths: dict[int, int] = {}
    written: dict[int, int] = {}  # columns of each key that hold its name
    for step in range(200):
        for key in chance.sample(list(lengths), min(len(lengths), chance.choice([0, 0, 1, 3]))):
            del lengths[key], written[key]
            books.remove(key)
        for key in chance.sample(list(lengths), min(len(lengths), chance.choice([0, 1, 3]))):
            lengths[key] = chance.randint(lengths[key], 16)
            books.grow(key, lengths[key])
        for number in range(chance.choice([0, 1, 3])):
            name = 10 * step + number
            lengths[name], written[name] = chance.randint(1, 16), 0
            books.add(name, lengths[name])
        memory.apply(books.take_changes())
        columns = [sum(start < lengths[key] for start in (0, 2, 4, 8)) for key in books.keys]
        assert columns == sorted(columns, reverse=True)
        assert sorted(books.keys) == sorted(lengths)
        assert books.used == sum(books.cost(length) for length in lengths.values())
        for key, num in zip(books.keys, columns, strict=True):
            row = books.row(key)
            assert [column[row] for column in memory.columns[: written[key]]] == [key] * written[key]
            for column in memory.columns[:num]:
                column[row] = key
            written[key] = num
    assert len(lengths) > 10
