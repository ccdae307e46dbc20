"""Packs of whole sequences, on hand-made ones."""

import pytest
import torch

from parallel.pack import keys_of_segments, pack_groups, pack_sequences, unpad

SEQUENCES = [torch.tensor([11, 12, 13]), torch.tensor([21]), torch.tensor([31, 32, 33, 34])]
MASKS = [torch.tensor([False, True, True]), torch.tensor([False]), torch.tensor([False, False, True, False])]


def test_sequences_lie_end_to_end_and_positions_restart():
    pack = pack_sequences(SEQUENCES, MASKS)
    assert pack.tokens.tolist() == [11, 12, 13, 21, 31, 32, 33, 34]
    assert pack.positions.tolist() == [0, 1, 2, 0, 0, 1, 2, 3]
    assert pack.cu_seqlens.tolist() == [0, 3, 4, 8]
    assert pack.scored.tolist() == [1, 2, 6]
    assert pack.tokens[pack.scored].tolist() == [12, 13, 33]
    assert [pack.tokens.dtype, pack.cu_seqlens.dtype, pack.scored.dtype] == [torch.int64, torch.int32, torch.int64]


def test_padding_is_a_last_sequence_without_scored_tokens():
    pack = pack_sequences(SEQUENCES, MASKS, pad_to_multiple=3)
    assert pack.tokens.tolist() == [11, 12, 13, 21, 31, 32, 33, 34, 0]
    assert pack.positions.tolist() == [0, 1, 2, 0, 0, 1, 2, 3, 0]
    assert pack.cu_seqlens.tolist() == [0, 3, 4, 8, 9]
    assert pack.scored.tolist() == [1, 2, 6]


def test_full_multiple_is_not_padded():
    assert pack_sequences(SEQUENCES, MASKS, pad_to_multiple=4).cu_seqlens.tolist() == [0, 3, 4, 8]


def test_pack_without_scored_tokens_has_an_empty_index():
    pack = pack_sequences([torch.tensor([5])], [torch.tensor([False])])
    assert pack.scored.shape == (0,)
    assert pack.scored.dtype == torch.int64


def test_borders_stay_on_the_cpu_when_a_pack_moves():
    moved = pack_sequences(SEQUENCES, MASKS).to(torch.device("meta"))
    devices = [moved.tokens.device.type, moved.positions.device.type, moved.scored.device.type]
    assert devices == ["meta", "meta", "meta"]
    assert moved.cu_seqlens.device.type == moved.parents.device.type == moved.borders.device.type == "cpu"


GROUPS = [
    (torch.tensor([11, 12]), [torch.tensor([21, 22, 23]), torch.tensor([31])]),
    (torch.tensor([41]), [torch.tensor([51, 52])]),
]


def test_a_prompt_stands_once_before_its_responses():
    pack = pack_groups(GROUPS, pad_to_multiple=5)
    assert pack.tokens.tolist() == [11, 12, 21, 22, 23, 31, 41, 51, 52, 0]
    assert pack.positions.tolist() == [0, 1, 2, 3, 4, 2, 0, 1, 2, 0]
    assert pack.borders.tolist() == [[0, 2, 5, 6, 7, 9, 10], [0, 0, 0, 3, 3, 5, 6]]
    assert pack.tokens[pack.scored].tolist() == [21, 22, 23, 31, 51, 52]
    assert pack.tokens[pack.sources].tolist() == [12, 21, 22, 12, 41, 51]
    assert pack.parents.dtype == pack.cu_seqlens.dtype == torch.int32


def test_whole_sequences_continue_nothing():
    pack = pack_sequences(SEQUENCES, MASKS)
    assert pack.borders.tolist() == [[0, 3, 4, 8], [0, 1, 2, 3]]
    assert pack.sources.tolist() == [0, 1, 5]


def test_keys_of_a_segment_are_those_of_its_parent_and_its_own():
    index, borders = keys_of_segments((0, 2, 5, 6, 7), (0, 0, 0, 3))
    assert index.tolist() == [0, 1, 0, 1, 2, 3, 4, 0, 1, 5, 6]
    assert borders.tolist() == [0, 2, 7, 10, 11]


@pytest.mark.parametrize(
    "groups",
    [
        [(torch.tensor([]), [torch.tensor([1])])],
        [(torch.tensor([1]), [])],
        [(torch.tensor([1]), [torch.tensor([2]), torch.tensor([])])],
    ],
)
def test_groups_without_tokens_are_refused(groups):
    with pytest.raises(ValueError, match="groups: got an empty prompt, group or response; each needs at least one"):
        pack_groups(groups)
    with pytest.raises(ValueError, match="groups: got none, at least one is needed"):
        pack_groups([])


@pytest.mark.parametrize(
    ("sequences", "masks", "message"),
    [
        ([], [], "sequences: got none, at least one is needed"),
        ([torch.tensor([1]), torch.tensor([])], [torch.zeros(1), torch.zeros(0)], r"sequences\[1\]: 0 tokens"),
        ([torch.tensor([1, 2])], [torch.tensor([False])], r"sequences\[0\]: 2 tokens, 1 mask values"),
        ([torch.tensor([1, 2])], [torch.tensor([True, True])], r"masks\[0\]\[0\]: the first token .* no predecessor"),
        ([torch.tensor([1, 2])], [], "shorter"),
    ],
)
def test_sequences_that_make_no_pack_are_refused(sequences, masks, message):
    with pytest.raises(ValueError, match=message):
        pack_sequences(sequences, masks)


def test_padding_on_either_side_is_removed_and_never_read():
    tokens = torch.tensor([[7, 7, 1, 2], [3, 7, 7, 7], [7, 4, 5, 7]])
    mask = torch.tensor([[0, 0, 1, 1], [1, 0, 0, 0], [0, 1, 1, 0]])
    assert unpad(tokens, mask) == [[1, 2], [3], [4, 5]]
    assert unpad(tokens * (2 * mask - 1), mask.bool()) == [[1, 2], [3], [4, 5]]


def test_mask_of_another_shape_is_refused():
    with pytest.raises(ValueError, match=r"attention_mask: got shape \[2, 3\], allowed: \[2, 4\], that of token_ids"):
        unpad(torch.zeros(2, 4), torch.zeros(2, 3))
