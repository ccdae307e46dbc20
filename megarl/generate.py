"""OpenAI-style completions of a policy, in Python and without a server: `Completer`.

    with loaded(Path("runs/demo/grpo/hf")) as completer:
        answer = completer.chat([{"role": "user", "content": "310173>"}], max_tokens=16)

or from a running trainer: `Completer(engine, tokenizer, stop_token_ids)`. Every rank of a model replica makes the same
calls and gets the same answers (but for `id` and `created`).

Deviations from OpenAI's API: log-probs of drawn tokens only, at the sampling temperature; `completion_tokens` counts
the stop token; `top_k` and `min_p` are added.
"""

from __future__ import annotations

import secrets
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, Literal

from megarl.config import DTYPES
from megarl.data.prompts import encode_prompt, read_messages
from megarl.data.tokenizer import Tokenizer
from megarl.model_folder import ModelFolder
from parallel.launch import detect_world, running
from parallel.mesh import Layout, Mesh, build_mesh
from rollout.engine import Engine
from rollout.requests import Completion, Request
from rollout.sampling import FinishReason, SamplingParams


@dataclass(frozen=True)
class Choice:
    """One response.

    Attributes:
        prompt_index, sample_index: from 0, in the order of the call.
        text: without stop token, cut before the stop string.
        tokens: ids drawn, the stop token and those of the stop string included.
        log_probs: of each of these tokens at the sampling temperature, over the whole vocabulary.
    """

    prompt_index: int
    sample_index: int
    text: str
    finish_reason: FinishReason
    tokens: list[int]
    log_probs: list[float]

    def pieces(self, tokenizer: Tokenizer) -> list[tuple[str, int, float]]:
        """Return (text, offset in the text, log-prob) of each token that adds to the text; end to end they are it."""
        heads = (self.tokens[: count + 1] for count in range(len(self.tokens)))
        lengths = (len(tokenizer.decode(head, skip_special_tokens=True)) for head in heads)
        ends = accumulate((min(length, len(self.text)) for length in lengths), max)
        found = zip(pairwise([0, *ends]), self.log_probs, strict=True)
        return [(self.text[start:end], start, log_prob) for (start, end), log_prob in found if end > start]


@dataclass(frozen=True)
class Completer:
    """Answers in the shape of OpenAI's responses.

    Args:
        engine: needs a `decode` for stop strings.
        stop_token_ids: ids that end a response.
        model: name given in the answers.
    """

    engine: Engine
    tokenizer: Tokenizer
    stop_token_ids: tuple[int, ...]
    model: str = "policy"

    def completions(
        self,
        prompt: str | Sequence[str],
        *,
        n: int = 1,
        max_tokens: int = 16,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = 0,
        min_p: float = 0.0,
        stop: str | Sequence[str] | None = None,
        seed: int | None = None,
        logprobs: int | None = None,
    ) -> dict[str, Any]:
        """Continue texts as they are, without the chat template: a `text_completion`.

        Args:
            n: responses to each prompt; choice `p * n + s` is response `s` to prompt `p`.
            seed: makes the answer repeatable; None: another one each time.
            logprobs: 0: with the log-probs of the drawn tokens.

        Raises:
            ValueError: names the parameter, its value and the values allowed.
        """
        if logprobs is not None and (type(logprobs) is not int or logprobs != 0):
            raise ValueError(f"logprobs: got {logprobs!r}, allowed: None, or 0 (drawn tokens only)")
        texts = [prompt] if isinstance(prompt, str) else list(prompt)
        if not texts or not all(isinstance(text, str) and text for text in texts):
            raise ValueError(f"prompt: got {prompt!r}, allowed: text, or a list of texts, not empty")
        prompts = [self.tokenizer.encode(text) for text in texts]
        params = self.params(max_tokens, temperature, top_p, top_k=top_k, min_p=min_p, stop=stop, seed=seed)
        choices = self._generate(prompts, n, params)
        answers = [
            {
                "index": index,
                "text": choice.text,
                "finish_reason": choice.finish_reason,
                "logprobs": None if logprobs is None else self._text_log_probs(choice),
            }
            for index, choice in enumerate(choices)
        ]
        return self._answer("cmpl", "text_completion", answers, prompts, choices)

    def chat(
        self,
        messages: Sequence[dict[str, str]],
        *,
        n: int = 1,
        max_tokens: int | None = None,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = 0,
        min_p: float = 0.0,
        stop: str | Sequence[str] | None = None,
        seed: int | None = None,
        logprobs: bool = False,
    ) -> dict[str, Any]:
        """Answer a chat through the chat template: a `chat.completion`.

        Args:
            messages: turns `{"role": ..., "content": ...}`, the last one the user's.
            max_tokens: None: as many as the context holds.

        Raises:
            ValueError: as `completions`.
        """
        turns = read_messages("messages", list(messages), last_role="user")
        prompt = encode_prompt(self.tokenizer, turns)
        limit = max(self.engine.context_length - len(prompt), 1) if max_tokens is None else max_tokens
        params = self.params(limit, temperature, top_p, top_k=top_k, min_p=min_p, stop=stop, seed=seed)
        choices = self._generate([prompt], n, params)
        answers = [
            {
                "index": index,
                "message": {"role": "assistant", "content": choice.text},
                "finish_reason": choice.finish_reason,
                "logprobs": self._chat_log_probs(choice) if logprobs else None,
            }
            for index, choice in enumerate(choices)
        ]
        return self._answer("chatcmpl", "chat.completion", answers, [prompt], choices)

    def params(
        self,
        max_tokens: int,
        temperature: float = 1.0,
        top_p: float = 1.0,
        *,
        top_k: int = 0,
        min_p: float = 0.0,
        stop: str | Sequence[str] | None = None,
        seed: int | None = None,
    ) -> SamplingParams:
        """Return checked sampling parameters; every rank must call it, since they agree on a seed."""
        if type(max_tokens) is not int or max_tokens < 1:
            raise ValueError(f"max_tokens: got {max_tokens!r}, allowed: from 1")
        if seed is None:
            seed = self.engine.mesh.from_first_model_rank(secrets.randbits(63))
        if not -(2**63) <= seed < 2**63:
            raise ValueError(f"seed: got {seed}, allowed: 64-bit integers")
        return SamplingParams(
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            min_p=min_p,
            max_new_tokens=max_tokens,
            stop_token_ids=self.stop_token_ids,
            stop_strings=(stop,) if isinstance(stop, str) else tuple(stop or ()),
            seed=seed,
        )

    def stream(self, prompts: Sequence[Sequence[int]], n: int, params: SamplingParams) -> Iterator[Choice]:
        """Yield `n` responses to each prompt (token ids) as they finish.

        Raises:
            ValueError: `n`, or a prompt that leaves no room for `max_new_tokens` in the context.
        """
        if type(n) is not int or n < 1:
            raise ValueError(f"n: got {n!r}, allowed: from 1")
        longest, context_length = max(map(len, prompts)), self.engine.context_length
        if longest + params.max_new_tokens > context_length:
            raise ValueError(
                f"max_tokens: got {params.max_new_tokens} after a prompt of {longest} tokens, "
                f"allowed: {context_length} together"
            )
        requests = [Request(index, prompt, n) for index, prompt in enumerate(prompts)]
        for completion in self.engine.stream(requests, params):
            yield self._choice(completion, params)

    def _generate(self, prompts: Sequence[Sequence[int]], n: int, params: SamplingParams) -> list[Choice]:
        return sorted(self.stream(prompts, n, params), key=lambda choice: (choice.prompt_index, choice.sample_index))

    def _choice(self, completion: Completion, params: SamplingParams) -> Choice:
        tokens = completion.tokens
        ended = bool(tokens) and tokens[-1] in params.stop_token_ids
        text = self.tokenizer.decode(tokens[:-1] if ended else tokens, skip_special_tokens=True)
        cuts = [text.find(stop) for stop in params.stop_strings if stop in text]
        return Choice(
            prompt_index=completion.prompt_id,
            sample_index=completion.sample_index,
            text=text[: min(cuts)] if cuts else text,
            finish_reason=completion.finish_reason,
            tokens=tokens,
            log_probs=completion.log_probs.tolist(),
        )

    def _text_log_probs(self, choice: Choice) -> dict[str, Any]:
        pieces = choice.pieces(self.tokenizer)
        return {
            "tokens": [text for text, _, _ in pieces],
            "token_logprobs": [log_prob for _, _, log_prob in pieces],
            "top_logprobs": None,
            "text_offset": [offset for _, offset, _ in pieces],
        }

    def _chat_log_probs(self, choice: Choice) -> dict[str, Any]:
        pieces = [
            {"token": text, "logprob": log_prob, "bytes": list(text.encode()), "top_logprobs": []}
            for text, _, log_prob in choice.pieces(self.tokenizer)
        ]
        return {"content": pieces}

    def _answer(
        self,
        prefix: str,
        kind: str,
        answers: list[dict[str, Any]],
        prompts: Sequence[Sequence[int]],
        choices: Sequence[Choice],
    ) -> dict[str, Any]:
        num_prompt = sum(map(len, prompts))
        num_drawn = sum(len(choice.tokens) for choice in choices)
        return {
            "id": f"{prefix}-{uuid.uuid4().hex}",
            "object": kind,
            "created": int(time.time()),
            "model": self.model,
            "choices": answers,
            "usage": {
                "prompt_tokens": num_prompt,
                "completion_tokens": num_drawn,
                "total_tokens": num_prompt + num_drawn,
            },
        }


@contextmanager
def loaded(
    folder: str | Path, layout: Layout | None = None, dtype: Literal["fp32", "bf16"] = "fp32"
) -> Iterator[Completer]:
    """Load a model folder in this process alone, or on all ranks of torchrun, until the block ends.

    Raises:
        ValueError: the folder or the layout is refused, before any process group exists.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype: got {dtype!r}, allowed: {', '.join(DTYPES)}")
    layout, world = layout or Layout(), detect_world()
    model = ModelFolder.check(Path(folder), layout, world.world_size)
    with running(world):
        yield load_completer(model, build_mesh(layout, world), dtype, model.shape.max_position_embeddings)


def load_completer(
    model: ModelFolder, mesh: Mesh, dtype: str, context_length: int, max_sequences: int = 256
) -> Completer:
    """Load the weights into an engine of their own; every rank must call it.

    Args:
        context_length: most tokens of prompt and response together.
        max_sequences: responses decoded at a time.
    """
    decode = partial(model.tokenizer.decode, skip_special_tokens=True)
    engine = Engine(model.load(mesh, dtype), mesh, context_length, max_sequences, decode=decode)
    return Completer(engine, model.tokenizer, model.stop_token_ids, model.folder.name)
