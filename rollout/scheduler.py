"""Which responses advance in a step: continuous batching within a bounded cache, in one or more pipeline lanes.

Every rank of a model replica holds the same scheduler and feeds it the same drawn tokens, so all take the same
decisions without a message. Nothing here knows tensors or models.

A lane holds responses that are decoded together. In each step of a lane all its active responses advance by one token
and waiting prompts are computed in chunks, first come first served. When the cache is full the youngest response gives
way: its memory is freed, and later its prompt and tokens are computed again as a prefix of its own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from rollout.columns import Changes
from rollout.steps import Chunk, Prefix, Response, Scored, Step


class TierBook(Protocol):
    """Bookkeeping of one cache tier (`rollout.columns.Columns`)."""

    keys: list
    counts: list[int]

    @property
    def used(self) -> int: ...
    def __contains__(self, key: object) -> bool: ...
    def cost(self, length: int) -> int: ...
    def row(self, key: object) -> int: ...
    def reserved(self, key: object) -> int: ...
    def add(self, key: object, length: int) -> None: ...
    def grow(self, key: object, length: int) -> None: ...
    def remove(self, key: object) -> None: ...
    def take_changes(self) -> Changes: ...


class Lane:
    """Responses decoded together, and the books of their cache."""

    def __init__(self, make_book: Callable[[], TierBook], max_rows: int, max_tokens: int):
        self.prefixes, self.suffixes = make_book(), make_book()
        self.max_rows = max_rows
        self.max_tokens = max_tokens
        self.members: dict[Response, None] = {}
        self.filling: list[Prefix] = []
        self.ready: deque[Response] = deque()

    @property
    def free(self) -> int:
        """Tokens of the cache that nothing has reserved."""
        return self.max_tokens - self.prefixes.used - self.suffixes.used


def tokens_needed(cost: Callable[[int], int], prompt_length: int, limit: int) -> int:
    """Return the tokens of a lane's cache that one response may need, however often it gives way.

    Args:
        cost: tokens that a book reserves for a number of tokens.
        limit: most tokens of the response.
    """
    need = base = 0  # tokens that it had when it gave way last
    while base < max(limit, 1):
        prefix = cost(prompt_length + base)
        need = max(need, prefix + cost(max(limit - base - 1, 1)))
        base = prefix - prompt_length + 1
    return need


class Scheduler:
    """Queue and lanes.

    Args:
        make_book: gives an empty book of a tier.
        num_lanes: lanes in flight, one for each pipeline stage that shall work at the same time.
        max_rows: most responses of one lane.
        max_tokens: memory of one lane's cache.
        max_prefill_tokens: most prefix tokens computed in one step.
    """

    def __init__(
        self,
        make_book: Callable[[], TierBook],
        *,
        num_lanes: int,
        max_rows: int,
        max_tokens: int,
        max_prefill_tokens: int,
    ):
        self.lanes = [Lane(make_book, max_rows, max_tokens) for _ in range(num_lanes)]
        self.max_prefill_tokens = max_prefill_tokens
        self.waiting: deque[Prefix] = deque()
        self.num_preempted = 0

    @property
    def busy(self) -> bool:
        return bool(self.waiting) or any(lane.members for lane in self.lanes)

    @property
    def num_unfinished(self) -> int:
        return sum(len(prefix.waiting) for prefix in self.waiting) + sum(len(lane.members) for lane in self.lanes)

    def check_fits(self, prompt_length: int, limit: int) -> int:
        """Return the tokens of a lane's cache that one response may need, however often it gives way.

        Raises:
            ValueError: the cache is smaller.
        """
        max_tokens = self.lanes[0].max_tokens
        need = tokens_needed(self.lanes[0].suffixes.cost, prompt_length, limit)
        if need > max_tokens:
            raise ValueError(
                f"max_cache_tokens: got {max_tokens} per lane; allowed for a prompt of {prompt_length} tokens and a "
                f"response of {limit}: from {need} per lane, {len(self.lanes)} lanes"
            )
        return need

    def add(self, responses: Iterable[Response], scored: bool = False) -> None:
        """Queue responses, in their order. Those at the start of equal prompts share a prefix.

        Args:
            scored: also score the prompt's tokens.
        """
        shared: dict[tuple[int, ...], Prefix] = {}
        for response in responses:
            prompt = tuple(response.request.prompt)
            if response.tokens:
                self.waiting.append(Prefix([*prompt, *response.tokens], [response], scored))
            elif prompt in shared:
                shared[prompt].waiting.append(response)
            else:
                shared[prompt] = Prefix(prompt, [response], scored)
                self.waiting.append(shared[prompt])

    def withdraw(self, keep: int = 0) -> list[Response]:
        """Take out all unfinished responses but the first `keep`, in order; no step may be under way."""
        queued = [response for prefix in self.waiting for response in prefix.waiting]
        members = [(response, lane) for lane in self.lanes for response in lane.members]
        everyone = sorted([*queued, *(r for r, _ in members)], key=lambda response: response.order)
        out = dict.fromkeys(everyone[keep:])
        for response, lane in sorted(members, key=lambda member: -member[0].order):
            if response in out:
                self._give_way(lane, response)
        for prefix in self.waiting:
            prefix.waiting = [response for response in prefix.waiting if response not in out]
        self.waiting = deque(prefix for prefix in self.waiting if prefix.waiting)
        return list(out)

    def plan(self, lane: Lane) -> Step | None:
        """Return the next step of a lane whose former step is finished; None if there is nothing to do."""
        self._make_room(lane)
        while lane.ready and lane.free >= lane.suffixes.cost(1) and len(lane.suffixes.keys) < lane.max_rows:
            lane.suffixes.add(lane.ready.popleft(), 1)
        chunks = self._plan_chunks(lane)
        if not chunks and not lane.suffixes.keys:
            return None
        return self._lay_out(lane, chunks)

    def finish(self, lane: Lane, step: Step, ended: Sequence[bool]) -> list[Response]:
        """Take note that the drawn tokens were appended; returns the responses that `ended`, which leave the lane."""
        done = []
        for (_, response), end in zip(step.draws, ended, strict=True):
            if end:
                self._leave(lane, response)
                done.append(response)
            elif response not in lane.suffixes:
                lane.ready.append(response)
        return done

    def _make_room(self, lane: Lane) -> None:
        """Let every active response have room for its next token; the youngest give way."""
        while True:
            growing = [r for r in lane.suffixes.keys if lane.suffixes.reserved(r) < r.num_cached + 1]
            needed = sum(lane.suffixes.cost(r.num_cached + 1) - lane.suffixes.reserved(r) for r in growing)
            if lane.ready and not lane.suffixes.keys:
                needed += lane.suffixes.cost(1)
            if needed <= lane.free:
                break
            self._give_way(lane, self._youngest(lane))
            self.num_preempted += 1
        for response in growing:
            lane.suffixes.grow(response, response.num_cached + 1)

    @staticmethod
    def _youngest(lane: Lane) -> Response:
        """Return the youngest response that holds memory: a suffix, or a prefix that no suffix needs."""
        needed = {response.prefix for response in lane.suffixes.keys}
        holders = [r for r in lane.members if r in lane.suffixes or r.prefix not in needed]
        assert len(lane.members) > 1, "the cache is too small for one response"
        return max(holders, key=lambda response: response.order)

    def _plan_chunks(self, lane: Lane) -> list[tuple[Prefix, int]]:
        """Choose (prefix, tokens) to compute: prefixes under way first, then waiting ones for which there is room."""
        chunks: list[tuple[Prefix, int]] = []
        budget = self.max_prefill_tokens
        share = -(-self.num_unfinished // len(self.lanes)) if len(self.lanes) > 1 else None
        while budget > 0:
            begun = next((p for p in lane.filling if all(p is not chosen for chosen, _ in chunks)), None)
            prefix = begun or self._admit(lane, share)
            if prefix is None:
                break
            tokens = min(len(prefix.tokens) - prefix.filled, budget)
            chunks.append((prefix, tokens))
            budget -= tokens
        return chunks

    def _admit(self, lane: Lane, share: int | None) -> Prefix | None:
        """Move the first waiting prefix into the lane if it fits with a first column for each of its responses.

        One more column for each active response is left free, so that the newcomer doesn't give way at once. A lane
        takes no more than its `share` of all responses while another one has fewer: idle lanes make idle stages.
        """
        if not self.waiting or len(lane.members) >= lane.max_rows:
            return None
        prefix, column = self.waiting[0], lane.suffixes.cost(1)
        has_more = len(lane.members) > min(len(other.members) for other in self.lanes)
        if share is not None and has_more and len(lane.members) + len(prefix.waiting) > share:
            return None
        needed = lane.prefixes.cost(len(prefix.tokens)) + column * min(len(prefix.waiting), lane.max_rows)
        reserve = column * (len(lane.members) - len(lane.ready))
        if lane.members and needed + reserve > lane.free:
            return None
        if lane.prefixes.cost(len(prefix.tokens)) > lane.free:
            return None
        self.waiting.popleft()
        lane.prefixes.add(prefix, len(prefix.tokens))
        lane.filling.append(prefix)
        prefix.users = len(prefix.waiting)
        for response in prefix.waiting:
            response.prefix = prefix
            response.base = len(prefix.tokens) - len(response.request.prompt)
            lane.members[response] = None
        return prefix

    def _lay_out(self, lane: Lane, chunks: list[tuple[Prefix, int]]) -> Step:
        active: list[Response] = lane.suffixes.keys
        lengths = [response.num_cached for response in active]
        prefixes = [response.its_prefix for response in active]
        step = Step(
            tokens=[response.tokens[-1] for response in active],
            positions=[len(p.tokens) + n for p, n in zip(prefixes, lengths, strict=True)],
            suffix_lengths=lengths,
            prefix_of_row=[lane.prefixes.row(prefix) for prefix in prefixes],
            prefix_lengths=[prefix.filled for prefix in lane.prefixes.keys],
            suffix_counts=list(lane.suffixes.counts),
            prefix_counts=list(lane.prefixes.counts),
            suffix_changes=lane.suffixes.take_changes(),
            prefix_changes=lane.prefixes.take_changes(),
            draws=list(enumerate(active)),
        )
        for prefix, length in sorted(chunks, key=lambda chunk: chunk[0].filled == 0):
            self._lay_out_chunk(lane, step, prefix, length)
        return step

    def _lay_out_chunk(self, lane: Lane, step: Step, prefix: Prefix, length: int) -> None:
        start, first = prefix.filled, len(step.tokens)
        step.chunks.append(Chunk(lane.prefixes.row(prefix), start, length))
        step.tokens.extend(prefix.tokens[start : start + length])
        step.positions.extend(range(start, start + length))
        if prefix.scored:
            prompt = prefix.waiting[0].request.prompt
            targets = list(prompt[start + 1 : start + length + 1])
            step.scored.append(Scored(prompt, first, start, targets))
        prefix.filled += length
        if prefix.filled == len(prefix.tokens):
            lane.filling.remove(prefix)
            step.draws.extend((len(step.tokens) - 1, response) for response in prefix.waiting)
            prefix.waiting = []

    def _give_way(self, lane: Lane, response: Response) -> None:
        """Free the response's memory and queue it first, with what it needs to go on."""
        prefix = response.its_prefix
        self._leave(lane, response)
        if not response.tokens and self.waiting and self.waiting[0].tokens is prefix.tokens:
            self.waiting[0].waiting.insert(0, response)  # the rest of its group gave way just before
            return
        tokens = [*response.request.prompt, *response.tokens] if response.tokens else prefix.tokens
        self.waiting.appendleft(Prefix(tokens, [response], prefix.scored))

    def _leave(self, lane: Lane, response: Response) -> None:
        """Take a response out of its lane, and its prefix if nobody else needs it."""
        prefix = response.its_prefix
        del lane.members[response]
        if response in lane.suffixes:
            lane.suffixes.remove(response)
        elif response in lane.ready:
            lane.ready.remove(response)
        elif response in prefix.waiting:
            prefix.waiting.remove(response)
        response.prefix = None
        prefix.users -= 1
        if prefix.users == 0:
            lane.prefixes.remove(prefix)
            if prefix in lane.filling:
                lane.filling.remove(prefix)
