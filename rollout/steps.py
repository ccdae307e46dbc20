"""Responses on their way, and the steps that advance them: what scheduler, pipeline and cache tell each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from rollout.columns import Changes
from rollout.requests import Paused, Request
from rollout.sampling_params import FinishReason


@dataclass(eq=False)
class Response:
    """A response on its way.

    Attributes:
        order: its place in the queue; the lowest is served first and gives way last.
        stream: of random numbers, hashed from (seed, prompt id, sample index).
        limit: most tokens.
        scores: log-prob, sampling log-prob and entropy of each token.
        base: tokens that are part of its prefix (after it gave way, or was resumed).
    """

    request: Request
    sample_index: int
    limit: int
    stop_token_ids: frozenset[int]
    order: int = -1
    stream: int = 0
    tokens: list[int] = field(default_factory=list)
    scores: list[tuple[float, float, float]] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    prefix: Prefix | None = None
    base: int = 0
    finish_reason: FinishReason | None = None

    @property
    def its_prefix(self) -> Prefix:
        """Its prefix, which every response in a lane has."""
        assert self.prefix is not None
        return self.prefix

    @property
    def num_cached(self) -> int:
        """Tokens in the suffix tier: all but those of the prefix and the last, which is the next step's input."""
        return len(self.tokens) - self.base - 1

    def pause(self) -> Paused:
        """Return what is needed to go on."""
        return Paused(self.request, self.sample_index, tuple(self.tokens), tuple(self.scores), tuple(self.versions))


@dataclass(eq=False)
class Prefix:
    """Tokens whose keys are shared; `waiting` responses draw their next token when all are computed."""

    tokens: Sequence[int]
    waiting: list[Response]
    scored: bool = False
    filled: int = 0
    users: int = 0


@dataclass(frozen=True)
class Chunk:
    """Tokens `start` .. `start + length - 1` of the prefix in `row`, to be computed in this step."""

    row: int
    start: int
    length: int


@dataclass(frozen=True)
class Scored:
    """Prompt tokens to score: hidden states `first` .. of the step predict `targets`, `prompt[start + 1]` .. ."""

    prompt: Sequence[int]
    first: int
    start: int
    targets: Sequence[int]


@dataclass
class Step:
    """One step of one lane: n decoded tokens in the order of suffix rows, then chunks of prefixes.

    Attributes:
        suffix_lengths: `[n]` tokens already stored for each decoded response.
        prefix_of_row: `[n]` row of its prefix.
        prefix_lengths: tokens stored of each prefix.
        draws: (row of the step whose hidden state is drawn from, response).
    """

    tokens: list[int]
    positions: list[int]
    suffix_lengths: list[int]
    prefix_of_row: list[int]
    prefix_lengths: list[int]
    suffix_counts: list[int]
    prefix_counts: list[int]
    suffix_changes: Changes
    prefix_changes: Changes
    chunks: list[Chunk] = field(default_factory=list)
    draws: list[tuple[int, Response]] = field(default_factory=list)
    scored: list[Scored] = field(default_factory=list)
