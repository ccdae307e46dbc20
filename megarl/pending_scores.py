"""`PendingScores`: finished responses whose scores are on their way, on all replicas of a rollout."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Literal

from megarl.batch import Sample
from megarl.data.prompts import PromptExample
from megarl.rewards.pool import RewardPool, RewardTimeout
from parallel.mesh import Mesh
from rollout.requests import Completion

logger = logging.getLogger(__name__)

MEET_SECONDS = 1.0
"""So long ranks wait for scores before they meet: no collective takes as long as a slow reward."""

Wait = Literal["none", "earlier", "all"]


@dataclass(frozen=True)
class _Pending:
    prompt: PromptExample
    completion: Completion
    score: Future[float]


class PendingScores:
    """The scores under way of one rollout; a context manager: when it is left, no further rule is called.

    Every rank of the job must make the same calls. Rules are called on the first rank of each model replica, once for
    each response: a rule may be random, or a service.

    Args:
        score: calls the rule.
        while_waiting: called whenever ranks meet without having all scores they wait for.
    """

    def __init__(
        self,
        mesh: Mesh,
        pool: RewardPool,
        score: Callable[[PromptExample, Completion], float],
        while_waiting: Callable[[], None],
    ):
        self._mesh = mesh
        self._pool = pool
        self._score = score
        self._while_waiting = while_waiting
        self._pending: deque[_Pending] = deque()
        self._num_new = 0

    def __enter__(self) -> PendingScores:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._pool.cancel()

    def start(self, finished: Sequence[tuple[PromptExample, Completion]]) -> None:
        """Begin to score the responses that finished on this replica since the last call, at a border."""
        self._num_new = 0
        if not self._mesh.is_first_model_rank:
            return
        for prompt, completion in finished:
            call = self._pool.submit(partial(self._score, prompt, completion))
            self._pending.append(_Pending(prompt, completion, call))
        self._num_new = len(finished)

    def collect(self, wait: Wait) -> list[Sample]:
        """Return samples whose scores are there, of all replicas, on all ranks.

        Args:
            wait: "none": those that happen to be there; "earlier": exactly those begun before the last `start`, so
                that the same ones come in every run; "all": those, too.

        Raises:
            Exception: a reward failed: its own error on the rank that called it, RuntimeError on the others. Or too
                many rewards hang.
        """
        due = {"none": 0, "earlier": len(self._pending) - self._num_new, "all": len(self._pending)}[wait]
        everywhere: list[list[Sample]] = [[] for _ in range(self._mesh.data_size)]
        while True:
            scored, error = self._take(due, or_more=wait == "none")
            due -= len(scored)
            mine = self._mesh.from_first_model_rank((scored, None if error is None else str(error), max(due, 0)))
            gathered = self._mesh.gather_over_data(mine)
            if error is not None:
                raise error
            for samples, (new, problem, _) in zip(everywhere, gathered, strict=True):
                if problem is not None:
                    raise RuntimeError(problem)
                samples += new
            if not any(missing for _, _, missing in gathered):
                return [sample for samples in everywhere for sample in samples]
            self._while_waiting()

    def _take(self, due: int, or_more: bool) -> tuple[list[Sample], BaseException | None]:
        """Return the first `due` samples, or those of them whose scores come soon, and what failed."""
        until = time.monotonic() + MEET_SECONDS
        scored: list[Sample] = []
        try:
            self._pool.replace_hanging()
            while self._pending and (or_more or len(scored) < due):
                pending = self._pending[0]
                if not (pending.score.done() if or_more else self._pool.wait(pending.score, until - time.monotonic())):
                    break
                self._pending.popleft()
                scored.append(self._sample(pending))
        except BaseException as error:  # a rule's own: the others have to be told
            return scored, error
        return scored, None

    def _sample(self, pending: _Pending) -> Sample:
        prompt, completion, timed_out = pending.prompt, pending.completion, False
        try:
            score = pending.score.result(timeout=0)
        except RewardTimeout:
            logger.warning(
                "the reward gave no answer on a response to prompt %d within %g s: it scores 0",
                *(prompt.prompt_id, self._pool.timeout_seconds),
            )
            score, timed_out = 0.0, True
        return Sample(
            prompt_id=prompt.prompt_id,
            sample_index=completion.sample_index,
            prompt=prompt.tokens,
            response=completion.tokens,
            rollout_log_probs=completion.log_probs,
            score=score,
            truncated=completion.finish_reason == "length",
            versions=completion.versions,
            timed_out=timed_out,
        )
