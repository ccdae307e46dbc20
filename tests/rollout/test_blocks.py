"""The books of blocks against a plain model: the blocks of each key, and the name that each block's memory holds."""

import random

import pytest

from rollout.blocks import BlockPool, Blocks


def test_a_row_costs_whole_blocks():
    books = Blocks(BlockPool(8, 4), most_blocks=3)
    assert [books.cost(length) for length in (0, 1, 4, 5, 12)] == [0, 4, 4, 8, 12]
    books.add("empty", 0)
    books.add("long", 9)
    assert (books.used, books.reserved("empty"), books.reserved("long")) == (16, 4, 12)
    assert ("long" in books, "short" in books) == (True, False)


def test_the_lowest_free_blocks_are_taken_and_the_last_row_fills_a_hole():
    pool = BlockPool(7, 4)
    books, others = Blocks(pool, most_blocks=4), Blocks(pool, most_blocks=4)
    books.add("a", 5)
    others.add("x", 1)
    books.add("b", 4)
    books.add("c", 1)
    assert books.take_changes().tables.tolist() == [[0, 1], [3, 0], [4, 0]]
    assert others.take_changes().tables.tolist() == [[2]]
    books.remove("a")  # c takes its row; 0 and 1 are free
    assert (books.keys, books.row("c"), pool.num_free) == (["c", "b"], 0, 4)
    books.grow("b", 9)
    others.add("y", 1)
    assert books.take_changes().tables.tolist() == [[4, 0, 0], [3, 0, 1]]
    assert others.take_changes().tables.tolist() == [[2], [5]]
    books.remove("b")
    assert (books.keys, books.used, others.used, pool.num_free) == (["c"], 4, 8, 4)


def test_nothing_is_moved_and_tables_handed_out_stay_as_they_are():
    books = Blocks(BlockPool(40, 4), most_blocks=2)
    for key in range(20):  # more rows than the table has at first
        books.add(key, 5)
    changes = books.take_changes()
    assert (changes.closing, changes.opening) == ([], [])
    assert changes.tables.tolist() == [[2 * key, 2 * key + 1] for key in range(20)]
    books.remove(0)
    assert changes.tables[0].tolist() == [0, 1]
    assert books.take_changes().tables[0].tolist() == [38, 39]


@pytest.mark.parametrize("seed", range(5))
def test_any_sequence_of_changes_keeps_every_block_with_its_owner(seed):
    """Two tiers share 60 blocks of 4 tokens; a sequence has up to 20 tokens."""
    chance, pool = random.Random(seed), BlockPool(60, 4)
    tiers = [Blocks(pool, most_blocks=5), Blocks(pool, most_blocks=5)]
    owned: list[dict[int, list[int]]] = [{}, {}]
    free, memory, most = set(range(60)), [None] * 60, 0

    def give(tier: int, key: int, length: int) -> None:
        held = owned[tier].setdefault(key, [])
        while 4 * len(held) < max(length, 1):
            held.append(min(free))
            free.remove(held[-1])
            memory[held[-1]] = (tier, key)

    for step in range(300):
        for tier, books in enumerate(tiers):
            for key in chance.sample(list(owned[tier]), min(len(owned[tier]), chance.choice([0, 0, 1, 3]))):
                books.remove(key)
                free.update(owned[tier].pop(key))
            for key in chance.sample(list(owned[tier]), min(len(owned[tier]), chance.choice([0, 1, 3]))):
                length = chance.randint(1, 20)
                if books.cost(length) - books.reserved(key) <= 4 * len(free):
                    books.grow(key, length)
                    give(tier, key, length)
            length = chance.randint(0, 20)
            if books.cost(length) < 4 * len(free) and chance.random() < 0.7:
                books.add(step, length)
                give(tier, step, length)
            table = books.take_changes().tables
            assert sorted(books.keys) == sorted(owned[tier])
            for row, key in enumerate(books.keys):
                held = owned[tier][key]
                assert (books.row(key), books.reserved(key)) == (row, 4 * len(held))
                assert table[row, : len(held)].tolist() == held
                assert [memory[block] for block in held] == [(tier, key)] * len(held)
            assert books.used == 4 * sum(map(len, owned[tier].values()))
        assert pool.num_free == len(free) == 60 - sum(books.used for books in tiers) // 4
        most = max(most, 60 - len(free))
    assert most > 50
    for books in tiers:
        for key in list(books.keys):
            books.remove(key)
    assert (pool.num_free, tiers[0].used, tiers[1].keys) == (60, 0, [])
