"""Which prompts a step uses: as many as it takes until enough groups are kept, within a bound."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from megarl.batch import Sample
from megarl.data.prompts import PromptExample

Group = list[Sample]


@dataclass
class GroupCollector:
    """Collects the groups of a step.

    In place of a group that is dropped another prompt starts at once. With `oversampling` 1 which prompts are used
    depends neither on the layout nor on what finishes first: it is the first ones of the data of which `wanted` are
    kept.

    With a `keep_rate` prompts are started in rounds, as many as are expected to be enough; what is kept beyond `wanted`
    is the surplus of the step. This too depends on nothing but the data.

    Attributes:
        take: gives the next prompts of the run.
        keep: whether to train on a group, from its scores; None keeps all.
        wanted: groups to be kept.
        max_rounds: most prompts to start, in multiples of `wanted`.
        oversampling: prompts under way or kept, per group wanted.
        keep_rate: share of groups that is expected to be kept, above 0; None: no rounds.
        num_under_way: groups that are being generated.
        kept: groups to train on; may start with the surplus of the former step.
    """

    take: Callable[[int], list[PromptExample]]
    keep: Callable[[Sequence[float]], bool] | None
    wanted: int
    max_rounds: int
    oversampling: float = 1.0
    keep_rate: float | None = None
    num_under_way: int = 0
    num_started: int = 0
    kept: list[Group] = field(default_factory=list)
    everything: list[Sample] = field(default_factory=list)

    @property
    def reacts_at_once(self) -> bool:
        """Whether what is generated together depends on which groups are complete first. Then that must not depend on
        how long their rewards took."""
        return self.oversampling > 1 or (self.keep is not None and self.keep_rate is None)

    @property
    def enough(self) -> bool:
        return len(self.kept) >= self.wanted

    @property
    def num_rounds(self) -> int:
        """Prompts started in multiples of `wanted`, rounded up."""
        return math.ceil(self.num_started / self.wanted)

    def start(self) -> list[PromptExample]:
        """Return the prompts to start now."""
        if self.keep_rate is None:
            missing = math.ceil(self.wanted * self.oversampling) - len(self.kept) - self.num_under_way
        elif self.num_under_way:
            return []  # the round isn't over
        else:
            missing = math.ceil((self.wanted - len(self.kept)) / self.keep_rate)
        number = max(min(missing, self.wanted * self.max_rounds - self.num_started), 0)
        self.num_started += number
        self.num_under_way += number
        return self.take(number)

    def judge(self, groups: Sequence[Group]) -> list[PromptExample] | None:
        """Take in complete groups; returns prompts to start in place of dropped ones, None once there are enough."""
        self.num_under_way -= len(groups)
        for group in groups:
            self.everything += group
            if self.keep is None or self.keep([sample.score for sample in group]):
                self.kept.append(group)
        if self.enough and (self.keep_rate is None or not self.num_under_way):
            return None
        return self.start()

    def split_surplus(self) -> tuple[list[Group], list[Group]]:
        """Return the groups to train on in the order of prompts, the oldest if there are too many, and the others."""
        ordered = sorted(self.kept, key=lambda group: group[0].prompt_id)
        return ordered[: self.wanted], ordered[self.wanted :]


def observed_keep_rate(former: float, num_kept: int, num_judged: int, memory: float = 0.7) -> float:
    """Return the expected share of kept groups after a step in which `num_kept` of `num_judged` were: a moving mean,
    never below 1/20, so that an unlucky step doesn't start endless prompts."""
    if num_judged == 0:
        return former
    return max(memory * former + (1.0 - memory) * num_kept / num_judged, 0.05)
