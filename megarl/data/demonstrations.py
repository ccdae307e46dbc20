"""Demonstrations for supervised fine-tuning: JSONL chats whose last message is the assistant's."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from megarl.data.prompts import PromptExample, encode_prompt, read_json_lines, read_messages
from megarl.data.tokenizer import Tokenizer


@dataclass(frozen=True)
class Demonstration:
    """Token ids of a prompt and of the response to imitate, which ends with a stop token."""

    prompt: tuple[int, ...]
    response: tuple[int, ...]


def read_demonstrations(path: Path, tokenizer: Tokenizer, stop_token_id: int) -> list[Demonstration]:
    """Read and tokenise a file with one object per line, `{"messages": [{"role": ..., "content": ...}, ...]}`.

    The prompt is the chat before the last message, up to the assistant's turn; the response is the last message's text
    and `stop_token_id`. The two are tokenised apart, as in generation.

    Raises:
        ValueError: names the file, the line, the field, its value and what is allowed.
    """
    found = []
    for place, row in read_json_lines(path):
        try:
            messages = read_messages("messages", row.get("messages"), last_role="assistant")
            if len(messages) < 2:
                raise ValueError("messages has 1 turn; allowed: the user's and the assistant's, or more")
            prompt = encode_prompt(tokenizer, messages[:-1])
            response = tokenizer.encode(messages[-1]["content"], add_special_tokens=False)
        except ValueError as error:
            raise ValueError(f"{path}, {place}: {error}") from error
        found.append(Demonstration(tuple(prompt), (*response, stop_token_id)))
    if not found:
        raise ValueError(f"demonstrations: {str(path)!r} holds none")
    return found


def write_demonstrations(path: Path, pairs: Iterable[tuple[PromptExample, str]]) -> None:
    """Write (prompt, response text) pairs in the form that `read_demonstrations` reads."""
    with path.open("w", encoding="utf-8") as file:
        for example, response in pairs:
            messages = [*example.messages, {"role": "assistant", "content": response}]
            file.write(json.dumps({"messages": messages}, ensure_ascii=False) + "\n")
