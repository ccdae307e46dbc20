"""Accuracy on held-out prompts: sampled as in training, and greedy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from megarl.data.prompts import PromptExample, PromptSource
from rollout.engine import Engine, Request
from rollout.random_numbers import derive_seed
from rollout.sampling import SamplingParams

if TYPE_CHECKING:
    from megarl.trainer import PolicyTrainer

EVAL_STREAM = 1
"""Second part of evaluation's sampling seed: its random numbers are never those of training."""


@dataclass
class Evaluator:
    """Scores one sampled and one greedy response to each held-out prompt with the training reward."""

    trainer: PolicyTrainer
    prompts: Sequence[PromptExample]

    @classmethod
    def from_trainer(cls, trainer: PolicyTrainer) -> Evaluator:
        """Read the held-out prompts of the trainer's config; without a file there is nothing to evaluate."""
        rollout = trainer.config.rollout
        if rollout.eval_prompts is None:
            return cls(trainer, [])
        source = PromptSource(rollout.eval_prompts, trainer.tokenizer, rollout.max_prompt_tokens)
        return cls(trainer, source.rows[: rollout.eval_max_prompts])

    def run(self) -> dict[str, float]:
        """Return `accuracy` (sampled) and `greedy_accuracy`, means of the scores, on all ranks; empty without prompts."""
        if not self.prompts:
            return {}
        sampling = self.trainer.sampling
        sampled = replace(sampling, seed=derive_seed(sampling.seed, EVAL_STREAM))
        greedy = replace(sampling, temperature=0.0)
        return {"accuracy": self._mean_score(sampled), "greedy_accuracy": self._mean_score(greedy)}

    def _mean_score(self, sampling: SamplingParams) -> float:
        mesh, engine = self.trainer.mesh, self.trainer.engine
        mine = self.prompts[mesh.data_rank :: mesh.data_size]
        scores = None
        completions = _one_each(engine, mine, sampling)
        if mesh.tensor_rank == 0 and mesh.is_first_stage:
            pairs = zip(mine, completions, strict=True)
            scores = [self.trainer.score(prompt, [completion])[0].score for prompt, completion in pairs]
        scores = mesh.from_first_model_rank(scores)
        everywhere = [score for rank in mesh.gather_over_data(scores) for score in rank]
        return sum(everywhere) / len(everywhere)


def _one_each(engine: Engine, prompts: Sequence[PromptExample], sampling: SamplingParams) -> list:
    return engine.generate([Request(prompt.prompt_id, prompt.tokens) for prompt in prompts], sampling)
