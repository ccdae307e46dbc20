"""`Responder`: groups of scored responses to prompts, the same on every rank; used by training and evaluation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megarl.batch import Sample
from megarl.data.prompts import PromptExample
from megarl.data.tokenizer import Tokenizer
from megarl.rewards.rules import Reward
from megarl.rewards.scoring import score_response
from parallel.mesh import Mesh
from rollout.engine import Completion, Engine, Request
from rollout.sampling import SamplingParams


@dataclass(frozen=True)
class Responder:
    """Generates with the engine and scores with a reward rule.

    `require_finished`: a response cut off at the length limit scores 0, whatever the rule would say of its text.
    """

    engine: Engine
    mesh: Mesh
    tokenizer: Tokenizer
    reward: Reward
    require_finished: bool

    def respond(
        self, prompts: Sequence[PromptExample], group_size: int, sampling: SamplingParams
    ) -> list[list[Sample]]:
        """Generate and score `group_size` responses to each prompt, shared out over data ranks.

        Returns: the groups of all prompts on all ranks, in the order of `prompts`.
        """
        mine = prompts[self.mesh.data_rank :: self.mesh.data_size]
        requests = [Request(prompt.prompt_id, prompt.tokens, group_size) for prompt in mine]
        completions = self.engine.generate(requests, sampling)
        groups = [completions[start : start + group_size] for start in range(0, len(completions), group_size)]
        scored = None
        if self.mesh.tensor_rank == 0 and self.mesh.is_first_stage:
            # The rule runs once per response: it may be random, slow or a service.
            scored = [
                [self._score(prompt, completion) for completion in group]
                for prompt, group in zip(mine, groups, strict=True)
            ]
        everywhere = self.mesh.gather_over_data(self.mesh.from_first_model_rank(scored))
        return [everywhere[index % self.mesh.data_size][index // self.mesh.data_size] for index in range(len(prompts))]

    def _score(self, prompt: PromptExample, completion: Completion) -> Sample:
        truncated = completion.finish_reason == "length"
        score = 0.0
        if not (truncated and self.require_finished):
            tokens = completion.tokens if truncated else completion.tokens[:-1]
            text = self.tokenizer.decode(tokens, skip_special_tokens=True)
            score = score_response(self.reward, prompt.prompt_id, prompt.text, text, prompt.answer)
        return Sample(
            prompt_id=prompt.prompt_id,
            sample_index=completion.sample_index,
            prompt=prompt.tokens,
            response=completion.tokens,
            rollout_log_probs=completion.log_probs,
            score=score,
            truncated=truncated,
        )
