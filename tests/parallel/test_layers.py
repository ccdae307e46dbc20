"""Packed attention against one sequence at a time, the norm against torch's, and the binding of a cache.

Shapes: T tokens, Hq query heads, Hkv key/value heads, D head size.
"""

import itertools
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from parallel.layers import PackedAttention, bind_cache, packed_attention
from parallel.pack import keys_of_segments

LENGTHS = {
    "mixed": [7, 1, 30, 8, 2, 9, 16, 1, 3],
    "equal": [6, 6, 6],
    "one sequence": [13],
    "single tokens": [1, 1, 1, 1],
    "powers of two and their neighbours": [4, 5, 8, 9, 16, 17],
}
HEADS = {"multi-head": (4, 4), "grouped": (4, 2), "one key head": (3, 1)}
D = 8
SCALE = 0.37


def draw(total: int, num_heads: int, num_groups: int) -> list[Tensor]:
    """Query [T, Hq, D], key and value [T, Hkv, D], fp64 leaves."""
    generator = torch.Generator().manual_seed(total)
    sizes = (num_heads, num_groups, num_groups)
    return [torch.randn(total, n, D, generator=generator, dtype=torch.float64).requires_grad_() for n in sizes]


def borders_of(lengths: list[int]) -> tuple[int, ...]:
    return tuple(sum(lengths[:i]) for i in range(len(lengths) + 1))


def one_at_a_time(query: Tensor, key: Tensor, value: Tensor, borders: tuple[int, ...]) -> Tensor:
    """Softmax of the masked scores, written out, of each sequence alone: [T, Hq * D]."""
    repeat = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(repeat, dim=1) for x in (key, value))
    pieces = []
    for start, end in itertools.pairwise(borders):
        scores = torch.einsum("qhd,khd->hqk", query[start:end], key[start:end]) * SCALE
        later = torch.ones(end - start, end - start).triu(1).bool()
        weights = scores.masked_fill(later, -torch.inf).softmax(-1)
        pieces.append(torch.einsum("hqk,khd->qhd", weights, value[start:end]).flatten(1))
    return torch.cat(pieces)


@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_packed_attention_equals_one_sequence_at_a_time(lengths, heads):
    """Values and gradients, 1e-12 in fp64."""
    borders = borders_of(lengths)
    inputs = draw(sum(lengths), *heads)
    weights = torch.arange(sum(lengths) * heads[0] * D, dtype=torch.float64).cos().reshape(sum(lengths), -1)
    results = []
    for attended in (packed_attention(*inputs, borders, SCALE), one_at_a_time(*inputs, borders)):
        gradients = torch.autograd.grad((attended * weights).sum(), inputs)
        results.append((attended, *gradients))
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=1e-12)


PARENTS = {  # lengths of segments, and what they continue
    "one prompt": ([5, 3, 1, 4], (0, 0, 0, 0)),
    "prompts, a whole sequence, equal lengths": ([2, 3, 3, 3, 7, 1, 6], (0, 0, 0, 0, 4, 5, 5)),
    "equal lengths": ([4, 4], (0, 0)),
}


@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
@pytest.mark.parametrize(("lengths", "parents"), PARENTS.values(), ids=PARENTS)
def test_segments_attend_as_the_sequences_that_they_end(lengths, parents, heads):
    """Values and gradients are those of one sequence at a time that repeat their beginnings, 1e-12 in fp64; on the way
    to Transformer Engine, keys are laid out for the same."""
    borders = borders_of(lengths)
    inputs = draw(sum(lengths), *heads)
    weights = torch.arange(sum(lengths) * heads[0] * D, dtype=torch.float64).cos().reshape(sum(lengths), -1)
    index, key_borders = keys_of_segments(borders, parents)
    whole, kept = one_at_a_time(*(x[index] for x in inputs), tuple(key_borders.tolist())), []
    for length, end in zip(lengths, key_borders.tolist()[1:], strict=True):
        kept.append(whole[end - length : end])
    results = []
    for attended in (packed_attention(*inputs, borders, SCALE, parents), torch.cat(kept)):
        gradients = torch.autograd.grad((attended * weights).sum(), inputs)
        results.append((attended, *gradients))
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=1e-12)


def test_tokens_of_another_sequence_have_no_influence_even_if_nan():
    borders = borders_of([5, 3, 6])
    query, key, value = (x.detach().clone() for x in draw(14, 4, 2))
    expected = packed_attention(query, key, value, borders, SCALE)
    for tensor in (query, key, value):
        tensor[5:8] = torch.nan
    attended = packed_attention(query, key, value, borders, SCALE)
    kept = torch.cat([torch.arange(5), torch.arange(8, 14)])
    assert torch.equal(attended[kept], expected[kept])


def test_core_attention_reads_borders_from_the_mask_and_scales_by_the_head_size():
    attention = PackedAttention(SimpleNamespace(kv_channels=D), 1, None, "self")
    query, key, value = (x.detach().float()[:, None] for x in draw(12, 4, 2))
    attended = attention(query, key, value, torch.tensor([[0, 7, 12], [0, 1, 2]], dtype=torch.int32))
    assert attended.shape == (12, 1, 4 * D)
    for start, end in ((0, 7), (7, 12)):
        alone = [x[start:end, 0].transpose(0, 1) for x in (query, key, value)]
        expected = F.scaled_dot_product_attention(*alone, is_causal=True, enable_gqa=True)  # scale: 1 / sqrt(D)
        torch.testing.assert_close(attended[start:end, 0], expected.transpose(0, 1).flatten(1))


def test_core_attention_takes_the_softmax_scale_it_is_given():
    assert PackedAttention(SimpleNamespace(kv_channels=16), 1, None, "self").softmax_scale == 0.25
    assert PackedAttention(SimpleNamespace(kv_channels=16), 1, None, "self", softmax_scale=0.1).softmax_scale == 0.1


class FixedCache:
    """Answers with the layer's index."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return torch.full((len(query), 1, query.shape[2] * D), float(layer))


def test_bound_cache_answers_for_every_layer_until_it_is_unbound():
    config = SimpleNamespace(kv_channels=D)
    attentions = [PackedAttention(config, number, None, "self") for number in (1, 2, 3)]
    layers = [SimpleNamespace(self_attention=SimpleNamespace(core_attention=attention)) for attention in attentions]
    decoder = SimpleNamespace(layers=layers)
    query, key, value = (x.detach().float()[:, None] for x in draw(4, 4, 2))
    borders = torch.tensor([[0, 4], [0, 1]], dtype=torch.int32)
    trained = [attention(query, key, value, borders) for attention in attentions]
    bind_cache(decoder, FixedCache())
    assert [float(attention(query, key, value, None)[0, 0, 0]) for attention in attentions] == [0.0, 1.0, 2.0]
    bind_cache(decoder, None)
    for attention, expected in zip(attentions, trained, strict=True):
        assert torch.equal(attention(query, key, value, borders), expected)
