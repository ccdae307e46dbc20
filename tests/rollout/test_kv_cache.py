"""The cache against causal attention written out.

Shapes: Hq = 4 query heads, Hkv = 2 key/value heads, D = 8 head size, S tokens of a sequence.
"""

import pytest
import torch
from torch import Tensor

from rollout.kv_cache import KVCache

HQ, HKV, D, SCALE = 4, 2, 8, 0.3
LAYERS = 2


def new_cache(num_slots: int, capacity: int) -> KVCache:
    return KVCache(LAYERS, num_slots, capacity, HKV, D, SCALE, like=torch.empty(0))


def draw(num_tokens: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Query `[S, 1, Hq, D]`, key and value `[S, 1, Hkv, D]`."""
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(num_tokens, 1, heads, D, generator=generator) for heads in (HQ, HKV, HKV))


def causal_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """`[S, 1, Hq * D]`: each token in turn looks at its predecessors and itself; head h reads key/value head h // 2."""
    rows = []
    for token in range(len(query)):
        heads = []
        for head in range(HQ):
            keys, values = key[: token + 1, 0, head // 2], value[: token + 1, 0, head // 2]
            weights = (SCALE * keys @ query[token, 0, head]).softmax(0)
            heads.append(weights @ values)
        rows.append(torch.cat(heads))
    return torch.stack(rows)[:, None]


def prefill(
    cache: KVCache, sequences: list[tuple[Tensor, Tensor, Tensor]], lengths: list[int], slots: list[int]
) -> Tensor:
    """Put the first tokens of each sequence into its slot, the same in every layer."""
    cache.begin_prefill(lengths, slots)
    heads = [[part[:length] for part in whole] for whole, length in zip(sequences, lengths, strict=True)]
    rows = [torch.cat(parts) for parts in zip(*heads, strict=True)]
    return [cache.attend(layer, *rows) for layer in range(LAYERS)][-1]


def decode(cache: KVCache, sequences: list[tuple[Tensor, Tensor, Tensor]], positions: list[int]) -> Tensor:
    """One step: token `positions[i]` of sequence i, which is in slot i."""
    cache.begin_decode(torch.tensor(positions))
    rows = [
        torch.stack([whole[part][place] for whole, place in zip(sequences, positions, strict=True)])
        for part in range(3)
    ]
    return [cache.attend(layer, *rows) for layer in range(LAYERS)][-1]


def check_rows(found: Tensor, sequences: list[tuple[Tensor, Tensor, Tensor]], positions: list[int]) -> None:
    expected = torch.stack([causal_attention(*whole)[place] for whole, place in zip(sequences, positions, strict=True)])
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_prefill_and_decode_equal_causal_attention_over_the_whole_sequence():
    sequences, lengths = [draw(9, 1), draw(9, 2), draw(9, 3)], [3, 1, 5]
    cache = new_cache(num_slots=3, capacity=9)
    first = prefill(cache, sequences, lengths, slots=[0, 1, 2])
    expected = [causal_attention(*whole)[:length] for whole, length in zip(sequences, lengths, strict=True)]
    torch.testing.assert_close(first, torch.cat(expected), rtol=1e-5, atol=1e-6)
    for step in range(4):
        positions = [length + step for length in lengths]
        check_rows(decode(cache, sequences, positions), sequences, positions)


def test_padding_rows_give_zeros_and_are_not_stored():
    query, key, value = draw(4, 1)
    cache = new_cache(num_slots=1, capacity=4)
    cache.begin_prefill([3], [0])
    attended = cache.attend(0, query, key, value)
    assert attended.shape == (4, 1, HQ * D)
    assert not attended[3].any()
    assert not cache.keys[0, 0, :, 3].any()
    cache.begin_decode(torch.tensor([3]))
    attended = cache.attend(0, query[2:], key[2:], value[2:])
    assert attended[0].any()
    assert not attended[1].any()
    assert torch.equal(cache.keys[0, 0, :, 3], key[2, 0])


def test_slots_hold_each_layer_and_sequence_apart():
    cache = new_cache(num_slots=2, capacity=3)
    sequences = [draw(2, 1), draw(3, 2)]
    cache.begin_prefill([2, 3], [1, 0])
    query, key, value = (torch.cat(parts) for parts in zip(*sequences, strict=True))
    cache.attend(1, query, key, value)
    assert not cache.keys[0].any()
    assert torch.equal(cache.keys[1, 1, :, :2], sequences[0][1][:, 0].transpose(0, 1))
    assert torch.equal(cache.values[1, 0], sequences[1][2][:, 0].transpose(0, 1))


def test_memory_that_was_never_written_cannot_reach_a_result():
    """A masked position has weight zero, but zero times NaN is NaN: new memory must not hold what was there before."""
    for _ in range(3):
        poison = torch.full((LAYERS, 2, HKV, 64, D), torch.nan)
        del poison  # the allocator may hand out the same memory again
        cache = new_cache(num_slots=2, capacity=64)
        assert not cache.keys.any()
        assert not cache.values.any()
        sequences = [draw(40, 1), draw(40, 2)]
        prefill(cache, sequences, [33, 2], [0, 1])
        check_rows(decode(cache, sequences, [33, 2]), sequences, [33, 2])


def test_what_an_earlier_sequence_left_in_a_slot_is_masked():
    cache = new_cache(num_slots=2, capacity=8)
    cache.keys.fill_(50.0)
    cache.values.fill_(1e6)
    sequences, lengths = [draw(8, 1), draw(8, 2)], [2, 6]
    prefill(cache, sequences, lengths, [0, 1])
    for step in range(2):
        positions = [length + step for length in lengths]
        check_rows(decode(cache, sequences, positions), sequences, positions)


def test_a_fork_goes_on_from_the_prompt_on_its_own():
    prompt = draw(3, 0)
    branches = [
        tuple(torch.cat([part, rest]) for part, rest in zip(prompt, draw(3, seed), strict=True)) for seed in (1, 2, 3)
    ]
    cache = new_cache(num_slots=3, capacity=6)
    prefill(cache, [prompt], [3], [0])
    cache.fork(0, [1, 2], length=3)
    for place in (3, 4, 5):
        check_rows(decode(cache, branches, [place] * 3), branches, [place] * 3)


def test_a_moved_sequence_goes_on_in_its_new_slot():
    sequences = [draw(8, 1), draw(8, 2), draw(8, 3)]
    cache = new_cache(num_slots=3, capacity=8)
    prefill(cache, sequences, [5, 2, 4], [0, 1, 2])
    decode(cache, sequences, [5, 2, 4])
    cache.move(2, 0, length=5)  # sequence 0, the longest, is done
    kept = [sequences[2], sequences[1]]
    for step in range(2):
        positions = [5 + step, 3 + step]
        check_rows(decode(cache, kept, positions), kept, positions)


def test_nothing_is_written_past_a_slot():
    cache = new_cache(num_slots=1, capacity=4)
    assert (cache.num_slots, cache.capacity) == (1, 4)
    with pytest.raises(AssertionError, match="a prompt is longer than its slot"):
        cache.begin_prefill([5], [0])
    with pytest.raises(AssertionError, match="a response is longer than its slot"):
        cache.begin_decode(torch.tensor([4]))
    with pytest.raises(AssertionError, match="attention before begin_prefill or begin_decode"):
        cache.attend(0, *draw(1, 1))
