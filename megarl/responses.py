"""`Responder`: groups of scored responses to prompts, the same on every rank; used by training and evaluation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from megarl.batch import Sample
from megarl.data.prompts import PromptExample
from megarl.data.tokenizer import Tokenizer
from megarl.groups import Group
from megarl.pending_scores import PendingScores, Wait
from megarl.rewards.pool import RewardPool
from megarl.rewards.rules import Reward
from megarl.rewards.scoring import score_response
from parallel.mesh import Mesh
from rollout.engine import Engine
from rollout.replicas import BORDER_STEPS, SharedRollout
from rollout.requests import Completion, Paused, Request
from rollout.sampling import SamplingParams

Judge = Callable[[list[Group]], "Sequence[PromptExample] | None"]
"""Called with groups as they are complete, at the same moment on every rank. Returns prompts to respond to as well, or
None to pause everything that isn't finished."""


@dataclass
class OpenGroup:
    """A group that isn't complete: its scored samples, and the rest to be generated."""

    prompt: PromptExample
    samples: Group = field(default_factory=list)
    rest: list[Request | Paused] = field(default_factory=list)


@dataclass
class ExpectedLengths:
    """Mean length of the responses to each prompt (by the hash of its tokens) when it was last seen, to share work out
    fairly: results don't depend on it."""

    means: dict[int, float] = field(default_factory=dict)
    total: float = 0.0

    def learn(self, groups: Sequence[Group]) -> None:
        """Take note of the mean response length of complete groups."""
        for group in groups:
            prompt, mean = hash(tuple(group[0].prompt)), sum(len(sample.response) for sample in group) / len(group)
            self.total += mean - self.means.get(prompt, 0.0)
            self.means[prompt] = mean

    def relative(self, items: Sequence[Request | Paused]) -> list[float]:
        """Return what is expected to be left of one response to each item, in multiples of the mean length."""
        if not self.total:
            return [1.0] * len(items)
        mean = self.total / len(self.means)
        left = []
        for item in items:
            request, done = (item.request, len(item.tokens)) if isinstance(item, Paused) else (item, 0)
            length = self.means.get(hash(tuple(request.prompt)), mean)
            left.append(max(length - done, 1.0) / mean)
        return left


@dataclass(frozen=True)
class Responder:
    """Generates with the engine and scores with a reward rule.

    Attributes:
        mesh: that of the engine.
        require_finished: a response cut off at the length limit scores 0, whatever the rule would say of its text.
        pool: scores finished responses while others are still generated; without threads for rules that only work in
            the main thread (they use signals).
        refresh: brings the engine's weights up to date before a rollout, where they are a copy.
        border_steps: engine steps after which replicas compare notes, see `rollout.replicas`.
        on_border: called at each border, and about once a second while rewards are waited for: a sign of life.
    """

    engine: Engine
    mesh: Mesh
    tokenizer: Tokenizer
    reward: Reward
    require_finished: bool
    pool: RewardPool = field(default_factory=RewardPool)
    refresh: Callable[[], None] | None = None
    border_steps: int = BORDER_STEPS
    expected: ExpectedLengths = field(default_factory=ExpectedLengths)
    on_border: Callable[[], None] | None = None

    def respond(
        self, prompts: Sequence[PromptExample], group_size: int, sampling: SamplingParams, version: int = 0
    ) -> list[Group]:
        """Generate and score `group_size` responses to each prompt, shared out over data ranks.

        Returns: the groups of all prompts on all ranks, in the order of `prompts`.
        """
        groups: dict[int, Group] = {}

        def judge(complete: list[Group]) -> Sequence[PromptExample]:
            groups.update((group[0].prompt_id, group) for group in complete)
            return ()

        self.respond_until([], prompts, group_size, sampling, judge, version)
        return [groups[prompt.prompt_id] for prompt in prompts]

    def respond_until(
        self,
        unfinished: Sequence[OpenGroup],
        prompts: Sequence[PromptExample],
        group_size: int,
        sampling: SamplingParams,
        judge: Judge,
        version: int = 0,
        steady: bool = False,
    ) -> list[OpenGroup]:
        """Go on with unfinished groups and respond to prompts until all groups, and those `judge` asks for, are
        complete, or until it pauses the rest.

        Args:
            steady: at each border wait for the scores of what had finished by the border before, and take only those:
                when `judge` sees which groups then doesn't depend on how long rewards take.

        Returns: the groups that were paused, the same on every rank.
        """
        if self.refresh is not None:
            self.refresh()
        work = _Work(group_size, unfinished)
        shared = SharedRollout(self.engine, sampling, version, self.border_steps)
        while_decoding: Wait = "earlier" if steady else "none"
        with shared, PendingScores(self.mesh, self.pool, self._score, self._at_border) as scores:
            items: list[Request | Paused] = [
                *(item for group in unfinished for item in group.rest),
                *work.start(prompts),
            ]
            shared.add(items, self.expected.relative(items))
            while shared.busy or work.groups:
                finished = shared.run_to_border()
                self._at_border()
                scores.start([(work.groups[completion.prompt_id].prompt, completion) for completion in finished])
                complete = work.add(scores.collect(while_decoding if shared.busy else "all"))
                if not complete:
                    continue
                self.expected.learn(complete)
                more = judge(complete)
                if more is None:
                    rest = shared.pause()
                    complete = work.add(scores.collect("all"))
                    judge(complete)
                    return work.pause(rest)
                items = list(work.start(more))
                shared.add(items, self.expected.relative(items))
        return []

    def _at_border(self) -> None:
        if self.on_border is not None:
            self.on_border()

    def _score(self, prompt: PromptExample, completion: Completion) -> float:
        """Call the rule, unless the response scores 0 anyway."""
        truncated = completion.finish_reason == "length"
        if truncated and self.require_finished:
            return 0.0
        tokens = completion.tokens if truncated else completion.tokens[:-1]
        text = self.tokenizer.decode(tokens, skip_special_tokens=True)
        return score_response(self.reward, prompt.prompt_id, prompt.text, text, prompt.answer)


class _Work:
    """The groups under way."""

    def __init__(self, group_size: int, unfinished: Sequence[OpenGroup]):
        self.group_size = group_size
        self.groups = {group.prompt.prompt_id: group for group in unfinished}

    def start(self, prompts: Sequence[PromptExample]) -> list[Request]:
        self.groups |= {prompt.prompt_id: OpenGroup(prompt) for prompt in prompts}
        return [Request(prompt.prompt_id, prompt.tokens, self.group_size) for prompt in prompts]

    def add(self, samples: Sequence[Sample]) -> list[Group]:
        """Sort samples into their groups; returns those now complete, in the order of prompts and samples."""
        complete = []
        for sample in samples:
            group = self.groups[sample.prompt_id].samples
            group.append(sample)
            if len(group) == self.group_size:
                del self.groups[sample.prompt_id]
                complete.append(sorted(group, key=lambda sample: sample.sample_index))
        return sorted(complete, key=lambda group: group[0].prompt_id)

    def pause(self, rest: Sequence[Request | Paused]) -> list[OpenGroup]:
        """Return the groups that aren't complete, with what is left to generate."""
        for group in self.groups.values():
            group.rest = []
        for item in rest:
            request = item.request if isinstance(item, Paused) else item
            self.groups[request.prompt_id].rest.append(item)
        return [self.groups[prompt_id] for prompt_id in sorted(self.groups)]
