"""`Rollout`: responses under way, stepped by the engine or by whoever wants to add, pause or move work in between."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rollout.pipeline import Drawn, Pipeline
from rollout.random_numbers import combine, start_stream
from rollout.requests import Completion, Paused, Request
from rollout.sampling import SamplingParams, response_length
from rollout.scheduler import Scheduler
from rollout.steps import Response, Step

if TYPE_CHECKING:
    from rollout.engine import Engine


class Rollout:
    """Responses under way. Every rank of the replica must make the same calls; it closes the rollout at the end."""

    def __init__(self, engine: Engine, scheduler: Scheduler, params: SamplingParams, version: int):
        self.scheduler = scheduler
        self.params = params
        self.version = version
        self._engine = engine
        self._pipeline: Pipeline | None = None
        self._done: list[Response] = []
        self._prompt_log_probs: dict[tuple[int, ...], Tensor] = {}
        self._num_added = 0
        self._closed = False

    def __enter__(self) -> Rollout:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Finish the messages under way and free the cache, unless the engine keeps it. Nothing can be done after."""
        self._closed = True
        pipeline, self._pipeline = self._pipeline, None
        if pipeline is not None:
            self._engine.close_pipeline(pipeline)

    @property
    def busy(self) -> bool:
        """Whether completions are still to come."""
        return bool(self._done) or self.scheduler.busy

    @property
    def num_unfinished(self) -> int:
        return self.scheduler.num_unfinished

    @property
    def cache_bytes(self) -> int:
        """Memory that the cache holds now on this rank."""
        return 0 if self._pipeline is None else self._pipeline.cache_bytes

    def add(self, requests: Sequence[Request | Paused]) -> list[Response]:
        """Queue requests; returns a response for each of their samples. Nothing is queued if one is refused.

        Raises:
            ValueError: see `Engine.generate`.
        """
        responses = [response for request in requests for response in self._responses(request)]
        for response in responses:
            self.scheduler.check_fits(len(response.request.prompt), response.limit)
        waiting = []
        for response, stream in zip(responses, random_streams(responses, self.params.seed), strict=True):
            response.stream = stream
            response.order = self._num_added
            self._num_added += 1
            if len(response.tokens) < response.limit or self.params.prompt_log_probs:
                waiting.append(response)
            else:
                response.finish_reason = "length"
                self._done.append(response)
        self.scheduler.add(waiting, self.params.prompt_log_probs)
        return responses

    def step(self) -> list[tuple[Response, Completion]]:
        """Advance every lane by one step; returns what has finished since the last call, the same on every rank."""
        if self._closed:
            raise RuntimeError("this rollout is closed; start another one with Engine.start")
        if self.scheduler.busy:
            if self._pipeline is None:
                self._pipeline = self._engine.open_pipeline(self.scheduler, self.params)
            self._pipeline.advance(self._next_step)
        return self.take()

    def take(self) -> list[tuple[Response, Completion]]:
        """Return what has finished since the last call, without another step."""
        done, self._done = self._done, []
        return [(response, self._completion(response)) for response in done]

    def drain(self) -> None:
        """Take in the steps under way, so that all ranks know the same of every lane."""
        if self._pipeline is not None:
            self._pipeline.drain(self._finish)

    def pause(self, keep: int = 0) -> list[Paused | Request]:
        """Take out all unfinished responses but the first `keep`, in order: as `Paused`, or as requests for one sample
        where no token was drawn yet. Responses that have finished are still to be fetched with `take`."""
        self.drain()
        withdrawn = self.scheduler.withdraw(keep)
        return [response.pause() if response.tokens else _single(response) for response in withdrawn]

    def _responses(self, item: Request | Paused) -> list[Response]:
        request = item.request if isinstance(item, Paused) else item
        wanted = self.params.max_new_tokens if request.max_new_tokens is None else request.max_new_tokens
        self._check(request, wanted)
        limit = min(wanted, self._engine.context_length - len(request.prompt))
        stops = self.params.stop_token_ids if request.stop_token_ids is None else request.stop_token_ids
        if isinstance(item, Request):
            indices = range(request.first_sample, request.first_sample + request.num_samples)
            return [Response(request, index, limit, frozenset(stops)) for index in indices]
        self._check_tokens(request.prompt_id, item.tokens)
        if not 1 <= len(item.tokens) == len(item.scores) == len(item.versions):
            sizes = f"{len(item.tokens)}, {len(item.scores)}, {len(item.versions)}"
            raise ValueError(
                f"prompt {request.prompt_id}: tokens, scores, versions of a pause: got {sizes}; as many each"
            )
        response = Response(request, item.sample_index, limit, frozenset(stops))
        response.tokens, response.scores, response.versions = list(item.tokens), list(item.scores), list(item.versions)
        return [response]

    def _check(self, request: Request, max_new_tokens: int) -> None:
        name, length, context = f"prompt {request.prompt_id}", len(request.prompt), self._engine.context_length
        if not 1 <= length <= context:
            raise ValueError(f"{name}: {length} tokens, allowed: 1 to context_length {context}")
        self._check_tokens(request.prompt_id, request.prompt)
        counts = (("max_new_tokens", max_new_tokens, 0), ("num_samples", request.num_samples, 1))
        for field, value, least in (*counts, ("first_sample", request.first_sample, 0)):
            if not isinstance(value, int) or value < least:
                raise ValueError(f"{name}: {field} {value}, allowed: integers from {least}")

    def _check_tokens(self, prompt_id: int, tokens: Sequence[int]) -> None:
        """An id outside the embedding would stop one rank alone, or be taken for another id."""
        size = self._engine.models[0].shape.vocab_size
        wrong = [token for token in tokens if not isinstance(token, int) or not 0 <= token < size]
        if wrong:
            raise ValueError(f"prompt {prompt_id}: token id {wrong[0]!r}, allowed: integers from 0 to {size - 1}")

    def _next_step(self, lane: int, finished: tuple[Step, Drawn] | None) -> Step | None:
        """Take in what a lane has drawn and plan its next step."""
        if finished is not None:
            self._finish(lane, *finished)
        return self.scheduler.plan(self.scheduler.lanes[lane])

    def _finish(self, lane: int, step: Step, drawn: Drawn) -> None:
        for scored, values in zip(step.scored, drawn.prompt_log_probs, strict=True):
            prompt = tuple(scored.prompt)
            known = self._prompt_log_probs.setdefault(prompt, torch.empty(len(prompt) - 1))
            known[scored.start : scored.start + len(values)] = values
        ended = [self._append(r, *token) for (_, r), token in zip(step.draws, drawn.tokens, strict=True)]
        self._done.extend(self.scheduler.finish(self.scheduler.lanes[lane], step, ended))

    def _append(self, response: Response, token: int, *scores: float) -> bool:
        """Append a drawn token; returns whether the response has ended."""
        if len(response.tokens) == response.limit:  # nothing was wanted but the prompt's log-probs
            response.finish_reason = "length"
            return True
        response.tokens.append(token)
        response.scores.append(scores)  # type: ignore[arg-type]
        response.versions.append(self.version)
        _, reason = response_length([token], response.stop_token_ids)
        if reason == "stop" or self._ends_in_stop_string(response.tokens):
            response.finish_reason = "stop"
        elif len(response.tokens) == response.limit:
            response.finish_reason = "length"
        return response.finish_reason is not None

    def _ends_in_stop_string(self, tokens: Sequence[int]) -> bool:
        """Whether the last token has completed a stop string; each token is at least one byte of text."""
        if not self.params.stop_strings or self._engine.decode is None:
            return False
        longest = max(len(text.encode()) for text in self.params.stop_strings)
        # Some tokens more, as special ones may leave no text; the first may be a part of a character.
        tail = self._engine.decode(tokens[-longest - 8 :]).lstrip("\ufffd")
        return any(text in tail for text in self.params.stop_strings)

    def _completion(self, response: Response) -> Completion:
        assert response.finish_reason is not None
        scores = torch.tensor(response.scores, dtype=torch.float32).reshape(-1, 3)
        return Completion(
            prompt_id=response.request.prompt_id,
            sample_index=response.sample_index,
            tokens=response.tokens,
            log_probs=scores[:, 0].clone(),
            sampling_log_probs=scores[:, 1].clone(),
            entropies=scores[:, 2].clone() if self.params.entropies else None,
            versions=response.versions,
            finish_reason=response.finish_reason,
            prompt_log_probs=self._prompt_log_probs.get(tuple(response.request.prompt))
            if self.params.prompt_log_probs
            else None,
        )


def random_streams(responses: Sequence[Response], seed: int) -> list[int]:
    """Hash (seed, prompt id, sample index) of each response into a stream of random numbers."""
    key = torch.full((len(responses),), seed, dtype=torch.int64)
    for numbers in ([r.request.prompt_id for r in responses], [r.sample_index for r in responses]):
        key = combine(key, torch.tensor(numbers, dtype=torch.int64))
    return start_stream(key).tolist()


def _single(response: Response) -> Request:
    return replace(response.request, num_samples=1, first_sample=response.sample_index)
