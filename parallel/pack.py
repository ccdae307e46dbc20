"""`Pack`: whole sequences laid end to end, the micro-batch of every training pass.

Shapes: T tokens of the pack (padding included), n sequences, N scored tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Pack:
    """Whole sequences end to end. Attention never crosses `cu_seqlens`; positions restart at each sequence.

    Attributes:
        tokens: `[T]` int64.
        positions: `[T]` int64, index of each token in its own sequence.
        cu_seqlens: `[n + 1]` int32 on the CPU, borders of the sequences (padding is a last sequence of its own).
        scored: `[N]` int64, ascending indices into the pack of the tokens whose log-prob is wanted. Each is scored
            given the tokens before it in its own sequence, that is from the hidden state at `scored - 1`.
    """

    tokens: Tensor
    positions: Tensor
    cu_seqlens: Tensor
    scored: Tensor

    def to(self, device: torch.device) -> Pack:
        """Copy to `device`; `cu_seqlens` stays on the CPU, where attention reads it."""
        return Pack(self.tokens.to(device), self.positions.to(device), self.cu_seqlens, self.scored.to(device))


def pack_sequences(sequences: Sequence[Tensor], masks: Sequence[Tensor], pad_to_multiple: int = 1) -> Pack:
    """Pack token sequences.

    Args:
        sequences: int64 tensors `[len_i]`, each of at least one token.
        masks: bool tensors `[len_i]`, True where the token's log-prob is wanted.
        pad_to_multiple: T becomes a multiple of this by a last sequence of zeros (sequence parallelism: tensor size).

    Raises:
        ValueError: no sequence, an empty one, lengths of tokens and mask differ, or a first token is to be scored.
    """
    if not sequences:
        raise ValueError("sequences: got none, at least one is needed")
    for i, (tokens, mask) in enumerate(zip(sequences, masks, strict=True)):
        if len(tokens) == 0 or len(tokens) != len(mask):
            raise ValueError(f"sequences[{i}]: {len(tokens)} tokens, {len(mask)} mask values; must be equal and > 0")
        if mask[0]:
            raise ValueError(f"masks[{i}][0]: the first token of a sequence has no predecessor to be scored from")
    lengths = [len(tokens) for tokens in sequences]
    padding = -sum(lengths) % pad_to_multiple
    pieces, wanted = list(sequences), list(masks)
    if padding:
        lengths.append(padding)
        pieces.append(torch.zeros(padding, dtype=torch.int64))
        wanted.append(torch.zeros(padding, dtype=torch.bool))
    return Pack(
        tokens=torch.cat(pieces),
        positions=torch.cat([torch.arange(length) for length in lengths]),
        cu_seqlens=torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32),
        scored=torch.cat(wanted).nonzero().squeeze(1),
    )


def unpad(token_ids: Tensor, attention_mask: Tensor) -> list[list[int]]:
    """Return the token lists of a padded batch, as `rollout` requests and packs take them.

    Args:
        token_ids: `[B, S]`, padded on the left, on the right or both.
        attention_mask: `[B, S]`, nonzero at real tokens. What stands at the others is never read.

    Raises:
        ValueError: the shapes differ.
    """
    if token_ids.shape != attention_mask.shape:
        shape, wanted = list(attention_mask.shape), list(token_ids.shape)
        raise ValueError(f"attention_mask: got shape {shape}, allowed: {wanted}, that of token_ids")
    return [row[mask.bool()].tolist() for row, mask in zip(token_ids, attention_mask, strict=True)]
