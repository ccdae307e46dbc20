"""`Pack`: whole sequences laid end to end, the micro-batch of every training pass.

A prompt with several responses may stand in a pack once: then prompt and responses are segments, and the responses
continue the prompt.

Shapes: T tokens of the pack (padding included), n segments, N scored tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from typing import TypeVar

import torch
from torch import Tensor

P = TypeVar("P", bound="Pack")


@dataclass(frozen=True)
class Pack:
    """Segments end to end: whole sequences, or parts of one. Attention never leaves a sequence; positions count in it.

    Attributes:
        tokens: `[T]` int64.
        positions: `[T]` int64, index of each token in its own sequence.
        cu_seqlens: `[n + 1]` int32 on the CPU, borders of the segments (padding is a last segment of its own).
        parents: `[n]` int32 on the CPU, the segment that each one continues; itself where it is a whole sequence or
            begins one.
        scored: `[N]` int64, ascending indices into the pack of the tokens whose log-prob is wanted. Each is scored
            given the tokens before it in its own sequence.
        sources: `[N]` int64, indices of those last before them, whose hidden states score them.
    """

    tokens: Tensor
    positions: Tensor
    cu_seqlens: Tensor
    parents: Tensor
    scored: Tensor
    sources: Tensor

    @property
    def borders(self) -> Tensor:
        """What attention needs to know, `[2, n + 1]` int32 on the CPU: `cu_seqlens`, and `parents` (the last is n)."""
        return with_parents(self.cu_seqlens, self.parents)

    def to(self: P, device: torch.device) -> P:
        """Copy to `device`; what attention reads stays on the CPU."""
        return replace(self, **{name: value.to(device) for name, value in vars(self).items() if name not in ON_CPU})


ON_CPU = ("cu_seqlens", "parents")
"""Fields of a pack that stay on the CPU."""


def with_parents(cu_seqlens: Tensor, parents: Tensor | None = None) -> Tensor:
    """Return borders of segments together with their parents, see `Pack.borders`; None: whole sequences."""
    number = torch.arange(len(cu_seqlens), dtype=torch.int32)
    return torch.stack([cu_seqlens, number if parents is None else torch.cat([parents, number[-1:]])])


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
    scored = torch.cat(wanted).nonzero().squeeze(1)
    return Pack(
        tokens=torch.cat(pieces),
        positions=torch.cat([torch.arange(length) for length in lengths]),
        cu_seqlens=_ends(lengths),
        parents=torch.arange(len(lengths), dtype=torch.int32),
        scored=scored,
        sources=scored - 1,
    )


def pack_groups(groups: Sequence[tuple[Tensor, Sequence[Tensor]]], pad_to_multiple: int = 1) -> Pack:
    """Pack prompts, each once and followed by all its responses, whose tokens are scored.

    The same log-probs and gradients as from a pack that repeats the prompts, for less work.

    Args:
        groups: a prompt and its responses: int64 tensors, each of at least one token.
        pad_to_multiple: as in `pack_sequences`.

    Raises:
        ValueError: no group, an empty prompt, a group without responses, or an empty response.
    """
    pieces: list[Tensor] = []
    parents: list[int] = []
    starts: list[int] = []
    scored: list[Tensor] = []
    sources: list[Tensor] = []
    place = 0
    for prompt, responses in groups:
        if not len(prompt) or not responses or not all(len(response) for response in responses):
            raise ValueError("groups: got an empty prompt, group or response; each needs at least one token")
        last, parent = place + len(prompt) - 1, len(pieces)
        for number, piece in enumerate([prompt, *responses]):
            pieces.append(piece)
            parents.append(parent)
            starts.append(len(prompt) if number else 0)
            if number:
                scored.append(torch.arange(place, place + len(piece)))
                sources.append(torch.cat([torch.tensor([last]), scored[-1][:-1]]))
            place += len(piece)
    if not pieces:
        raise ValueError("groups: got none, at least one is needed")
    padding = -place % pad_to_multiple
    if padding:
        parents.append(len(pieces))
        pieces.append(torch.zeros(padding, dtype=torch.int64))
        starts.append(0)
    lengths = [len(piece) for piece in pieces]
    return Pack(
        tokens=torch.cat(pieces),
        positions=torch.cat([torch.arange(n) + start for start, n in zip(starts, lengths, strict=True)]),
        cu_seqlens=_ends(lengths),
        parents=torch.tensor(parents, dtype=torch.int32),
        scored=torch.cat(scored),
        sources=torch.cat(sources),
    )


@lru_cache(maxsize=256)
def keys_of_segments(borders: tuple[int, ...], parents: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Return the pack tokens that each segment attends to, one segment after the other, and their borders.

    Those of the segment that it continues, then its own: causal masks aligned at the bottom right (last query, last
    key) let each token attend to those before it in its sequence.

    Args:
        borders, parents: see `Pack`, n + 1 and n of them.

    Returns: indices int64, and borders `[n + 1]` int32, on the CPU.
    """
    spans = [torch.arange(start, end) for start, end in pairwise(borders)]
    keys = [
        span if parent == number else torch.cat([spans[parent], span])
        for number, (span, parent) in enumerate(zip(spans, parents, strict=True))
    ]
    return torch.cat(keys), _ends([len(one) for one in keys])


def _ends(lengths: Sequence[int]) -> Tensor:
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)


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
