"""One rollout on all data-parallel replicas: requests are shared out, and late work moves to replicas that are done.

Replicas decode on their own and meet at borders, every so many steps, where they tell each other how many responses
they have left. Random numbers belong to the response, so it doesn't matter where it is finished.
"""

from __future__ import annotations

from collections.abc import Sequence

from rollout.engine import Engine
from rollout.requests import Completion, Paused, Request
from rollout.sampling import SamplingParams

BORDER_STEPS = 32
MIN_MOVED = 2
"""A moved response is computed again up to its last token: moving fewer doesn't pay."""


class SharedRollout:
    """A rollout whose requests all ranks know; every rank of the job must make the same calls.

    Args:
        border_steps: engine steps between two borders.
    """

    def __init__(self, engine: Engine, params: SamplingParams, version: int = 0, border_steps: int = BORDER_STEPS):
        if border_steps < 1:
            raise ValueError(f"border_steps: got {border_steps}, allowed: from 1")
        self.mesh = engine.mesh
        self.border_steps = border_steps
        self.busy = False
        self.num_moved = 0
        self._own = engine.start(params, version)
        self._loads = [0.0] * self.mesh.data_size

    def __enter__(self) -> SharedRollout:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """See `Rollout.close`."""
        self._own.close()

    @property
    def num_preempted(self) -> int:
        """How often responses of this replica gave way because its cache was full."""
        return self._own.scheduler.num_preempted

    def add(self, requests: Sequence[Request | Paused], expected: Sequence[float] | None = None) -> None:
        """Queue requests, each on the replica with least to do.

        Args:
            expected: expected length of one response to each request, in multiples of the mean; None: all 1.
        """
        costs = [1.0] * len(requests) if expected is None else expected
        weights = [
            cost * (request.num_samples if isinstance(request, Request) else 1)
            for request, cost in zip(requests, costs, strict=True)
        ]
        shares = share_out(weights, self._loads)
        self._own.add([requests[index] for index in shares[self.mesh.data_rank]])
        self._loads = [load + sum(weights[i] for i in share) for load, share in zip(self._loads, shares, strict=True)]
        self.busy = self.busy or bool(requests)

    def run_to_border(self) -> list[Completion]:
        """Decode up to the next border; returns what finished on this replica."""
        completions: list[Completion] = []
        for _ in range(self.border_steps):
            if not self._own.busy:
                break
            completions += [completion for _, completion in self._own.step()]
        self._own.drain()
        completions += [completion for _, completion in self._own.take()]
        counts = self.mesh.gather_over_data(self._own.num_unfinished)
        self._loads = [float(count) for count in counts]
        self.busy = any(counts)
        if self.mesh.data_size > 1:
            self._move(plan_moves(counts), counts[self.mesh.data_rank])
        return completions

    def pause(self) -> list[Paused | Request]:
        """Take out everything unfinished on all replicas; each rank gets all of it. Call it at a border."""
        self.busy = False
        self._loads = [0.0] * self.mesh.data_size
        return [item for items in self.mesh.gather_over_data(self._own.pause()) for item in items]

    def _move(self, moves: Sequence[tuple[int, int, int]], num_unfinished: int) -> None:
        if not moves:
            return
        rank = self.mesh.data_rank
        given = sum(num for source, _, num in moves if source == rank)
        paused = self._own.pause(num_unfinished - given) if given else []
        everywhere = self.mesh.gather_over_data(paused)
        taken = [0] * len(everywhere)
        for source, target, num in moves:
            items = everywhere[source][taken[source] : taken[source] + num]
            taken[source] += num
            self.num_moved += num
            if target == rank:
                self._own.add(items)


def share_out(weights: Sequence[float], loads: Sequence[float]) -> list[list[int]]:
    """Give each item to the replica with least to do, heaviest first; returns the items of each replica, in order.

    Longest-processing-time rule (Graham 1969): at most a third above the best possible.
    """
    totals = list(loads)
    shares: list[list[int]] = [[] for _ in totals]
    for index in sorted(range(len(weights)), key=lambda index: -weights[index]):
        least = min(range(len(totals)), key=totals.__getitem__)
        shares[least].append(index)
        totals[least] += weights[index]
    return [sorted(share) for share in shares]


def plan_moves(counts: Sequence[int]) -> list[tuple[int, int, int]]:
    """Return (source, target, number) of responses to move so that replicas have about as many left.

    Nothing moves while the busiest replica has less than a quarter more than the mean.
    """
    left = list(counts)
    moves: list[tuple[int, int, int]] = []
    if 4 * max(left) * len(left) < 5 * sum(left):
        return []
    while True:
        source = max(range(len(left)), key=left.__getitem__)
        target = min(range(len(left)), key=left.__getitem__)
        number = (left[source] - left[target]) // 2
        if number < MIN_MOVED:
            return moves
        mean = sum(left) // len(left)
        number = min(number, max(left[source] - mean, 1), max(mean - left[target], 1))
        moves.append((source, target, number))
        left[source] -= number
        left[target] += number
