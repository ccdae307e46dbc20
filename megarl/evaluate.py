"""Accuracy on held-out prompts: sampled as in training, and greedy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from megarl.data.prompts import PromptExample
from megarl.responses import Responder
from rollout.random_numbers import derive_seed
from rollout.sampling import SamplingParams

EVAL_STREAM = 1
"""Second part of evaluation's sampling seed: its random numbers are never those of training."""


@dataclass(frozen=True)
class Evaluator:
    """Scores one sampled and one greedy response to each held-out prompt with the training reward."""

    responder: Responder
    prompts: Sequence[PromptExample]
    sampling: SamplingParams

    def run(self) -> dict[str, float]:
        """Return `accuracy` (sampled) and `greedy_accuracy`, mean scores on all ranks; empty without prompts."""
        if not self.prompts:
            return {}
        sampled = replace(self.sampling, seed=derive_seed(self.sampling.seed, EVAL_STREAM))
        greedy = replace(self.sampling, temperature=0.0)
        return {"accuracy": self._mean_score(sampled), "greedy_accuracy": self._mean_score(greedy)}

    def _mean_score(self, sampling: SamplingParams) -> float:
        groups = self.responder.respond(self.prompts, 1, sampling)
        return sum(group[0].score for group in groups) / len(groups)
