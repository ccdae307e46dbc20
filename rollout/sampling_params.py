"""How tokens are drawn, checked, and where a response ends."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are drawn. In the order of transformers: repetition penalty, temperature, top-k, top-p, min-p.

    Attributes:
        temperature: divides the logits; 0 means greedy (evaluation only).
        top_p: nucleus mass in (0, 1]; ties at the border are kept.
        top_k: number of most probable tokens kept; 0 keeps all; ties at the border are kept.
        min_p: least probability kept, relative to the most probable token; 0 keeps all.
        repetition_penalty: divides positive and multiplies negative logits of ids in prompt or response (CTRL, Keskar
            et al. 2019); 1 changes nothing, above 1 discourages; evaluation only.
        max_new_tokens: limit of a response, in tokens.
        stop_token_ids: ids that end a response; the stop token belongs to the response.
        stop_strings: texts that end a response.
        seed: of all random numbers.
        prompt_log_probs: also score the prompt's tokens.
        entropies: also report the entropy of each token's full distribution.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    max_new_tokens: int = 256
    stop_token_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()
    seed: int = 0
    prompt_log_probs: bool = False
    entropies: bool = False

    def __post_init__(self) -> None:
        # Written so that NaN fails each of them.
        if not (self.temperature == 0 or 1e-45 <= self.temperature <= 1e38):
            raise ValueError(f"temperature: got {self.temperature}, allowed: 0 (greedy) or above, up to 1e38")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p: got {self.top_p}, allowed: above 0, at most 1")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p: got {self.min_p}, allowed: from 0 to 1")
        if not 0 < self.repetition_penalty < math.inf:
            raise ValueError(f"repetition_penalty: got {self.repetition_penalty}, allowed: above 0, finite")
        for name, value in (("top_k", self.top_k), ("max_new_tokens", self.max_new_tokens)):
            if not isinstance(value, int) or value < 0:
                raise ValueError(f"{name}: got {value}, allowed: integers from 0")
        if not isinstance(self.seed, int) or not -(2**63) <= self.seed < 2**63:
            raise ValueError(f"seed: got {self.seed!r}, allowed: integers of 64 bits")
        for token in self.stop_token_ids:
            if not isinstance(token, int) or token < 0:
                raise ValueError(f"stop_token_ids: got {token!r}, allowed: integers from 0")
        strings = self.stop_strings
        if isinstance(strings, str) or not all(isinstance(text, str) and text for text in strings):
            raise ValueError(f"stop_strings: got {strings!r}, allowed: a tuple of strings that are not empty")

    @property
    def score_temperature(self) -> float:
        """Temperature of reported log-probs: that of sampling, 1 for greedy decoding."""
        return self.temperature or 1.0

    @property
    def truncates(self) -> bool:
        """Whether top-k, top-p or min-p may leave tokens out; greedy decoding has no distribution to cut."""
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)

    def check_for_training(self) -> None:
        """Check that responses have log-probs to train on.

        With top-k, top-p or min-p both sides of the ratio score the whole distribution, so it starts at 1; the
        responses come from a part of it.

        Raises:
            ValueError: temperature 0: greedy responses have no log-probs; a repetition penalty: the distribution drawn
                from depends on more than the policy.
        """
        if self.temperature == 0:
            raise ValueError("temperature: got 0, allowed in training: above 0 (greedy responses have no log-probs)")
        if self.repetition_penalty != 1:
            raise ValueError(
                f"repetition_penalty: got {self.repetition_penalty}, allowed in training: 1 (the distribution drawn "
                "from would depend on more than the policy)"
            )


def response_length(tokens: Sequence[int], stop_token_ids: Collection[int]) -> tuple[int, FinishReason]:
    """Return how many tokens belong to the response (the first stop token included) and how it ended.

    The engine's rule for stop tokens, on whose finish reason mask, reward and metrics rely; padding after the stop
    token is never looked at.
    """
    for index, token in enumerate(tokens):
        if token in stop_token_ids:
            return index + 1, "stop"
    return len(tokens), "length"
