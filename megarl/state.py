"""Where a run stands: all that its next step depends on, but for weights and optimizers."""

from __future__ import annotations

from dataclasses import dataclass, field

from megarl.batch import Sample
from megarl.groups import Group
from megarl.responses import ExpectedLengths, OpenGroup


@dataclass
class StepUnderWay:
    """A step whose rollout is done.

    Attributes:
        groups: to be trained on.
        metrics: of rollout, then of advantages too.
        samples: of the groups, once they have advantages.
        updates: metrics of each optimizer step that is done.
    """

    groups: list[Group]
    metrics: dict[str, float]
    samples: list[Sample] | None = None
    updates: list[dict[str, float]] = field(default_factory=list)
    rollout_seconds: float = 0.0
    scoring_seconds: float = 0.0
    train_seconds: float = 0.0


@dataclass
class State:
    """Of a run that generates what it trains on.

    Attributes:
        step: steps that are done; `under_way` is the next one, once its rollout is done.
        unfinished, surplus: groups for the next step that are not complete, or not trained on yet.
        expected: what sharing out work goes by.
        fingerprint: of the prompts; `num_prompts_used` is a position in them.
        group_size, num_mini_batches, num_epochs: of the step under way.
        summary: results so far.
    """

    step: int = 0
    optimizer_step: int = 0
    num_prompts_used: int = 0
    num_skipped: int = 0
    critic_step: int = 0
    num_critic_skipped: int = 0
    kl_coefficient: float = 0.0
    keep_rate: float = 1.0
    exhausted: bool = False
    unfinished: list[OpenGroup] = field(default_factory=list)
    surplus: list[Group] = field(default_factory=list)
    under_way: StepUnderWay | None = None
    expected: ExpectedLengths = field(default_factory=ExpectedLengths)
    fingerprint: str = ""
    group_size: int = 0
    num_mini_batches: int = 0
    num_epochs: int = 1
    summary: dict[str, float] = field(default_factory=dict)
    training_seconds: float = 0.0


@dataclass
class RowState:
    """Of a run on a fixed set of rows: those of a step are a function of (seed, step)."""

    step: int = 0
    num_skipped: int = 0
    fingerprint: str = ""
    summary: dict[str, float] = field(default_factory=dict)
    training_seconds: float = 0.0
