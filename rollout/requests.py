"""What goes into the engine and what comes out of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from rollout.sampling import FinishReason


@dataclass(frozen=True)
class Request:
    """A prompt and how many responses it gets.

    Attributes:
        prompt_id: unique in the run; with the sample index it keys all random numbers.
        prompt: token ids, at least one. Requests with equal prompts share its keys and values.
        num_samples: responses wanted, with sample indices from `first_sample`.
        max_new_tokens, stop_token_ids: in place of those of the call's `SamplingParams`, if given.
    """

    prompt_id: int
    prompt: Sequence[int]
    num_samples: int = 1
    first_sample: int = 0
    max_new_tokens: int | None = None
    stop_token_ids: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Paused:
    """A response cut off in the middle. Given to the engine in place of a request it goes on where it stopped, with
    the same random numbers; its tokens count against its limit.

    Attributes:
        tokens: ids of the response so far, at least one.
        scores: for each token its log-prob, sampling log-prob and entropy (NaN if not asked for).
        versions: for each token the version of the weights that drew it.
    """

    request: Request
    sample_index: int
    tokens: tuple[int, ...]
    scores: tuple[tuple[float, float, float], ...]
    versions: tuple[int, ...]


@dataclass(frozen=True)
class Completion:
    """One finished response. Its tensors are `[len(tokens)]` fp32 on the CPU.

    Attributes:
        tokens: ids of the response, the stop token included.
        log_probs: under the sampling temperature over the whole vocabulary: those that training uses.
        sampling_log_probs: of the distribution drawn from, after top-k, top-p and min-p.
        entropies: of the whole distribution at the sampling temperature in nats, if asked for.
        versions: for each token the version of the weights that drew it.
        finish_reason: "stop" after a stop token or stop string, "length" at the limit.
        prompt_log_probs: `[len(prompt) - 1]` fp32 of the prompt's tokens from the second on, if asked for.
    """

    prompt_id: int
    sample_index: int
    tokens: list[int]
    log_probs: Tensor
    sampling_log_probs: Tensor
    entropies: Tensor | None
    versions: list[int]
    finish_reason: FinishReason
    prompt_log_probs: Tensor | None = None
