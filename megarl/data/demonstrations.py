"""Demonstrations for supervised fine-tuning: JSONL chats whose last message is the assistant's, as token ids."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from megarl.data.prompts import PromptExample, encode_prompt, read_json_lines, read_messages
from megarl.data.tokenizer import Tokenizer


@dataclass(frozen=True)
class Demonstration:
    """Token ids of a prompt and of the response to imitate, which ends with a stop token.

    Attributes:
        mask: for each token of the response whether it is imitated: those of the assistant and the stop token after
            each of its turns are; what others say between its turns, and the template's tokens, are not.
    """

    prompt: tuple[int, ...]
    response: tuple[int, ...]
    mask: tuple[bool, ...]


def read_demonstrations(
    path: Path, tokenizer: Tokenizer, stop_token_id: int, last_turn_only: bool = False
) -> list[Demonstration]:
    """Read and tokenise a file with one object per line, `{"messages": [{"role": ..., "content": ...}, ...]}`.

    Every turn of the assistant is imitated (`encode_chat`), or with `last_turn_only` the last message alone.

    Raises:
        ValueError: names the file, the line, the field, its value and what is allowed.
    """
    found: list[Demonstration] = []
    for place, row in read_json_lines(path):
        try:
            messages = read_messages("messages", row.get("messages"), last_role="assistant")
            if len(messages) < 2:
                raise ValueError("messages has 1 turn; allowed: the user's and the assistant's, or more")
            found += encode_chat(tokenizer, messages, stop_token_id, last_turn_only)
        except ValueError as error:
            raise ValueError(f"{path}, {place}: {error}") from error
    if not found:
        raise ValueError(f"demonstrations: {str(path)!r} holds none")
    return found


def encode_chat(
    tokenizer: Tokenizer, messages: tuple[dict[str, str], ...], stop_token_id: int, last_turn_only: bool = False
) -> list[Demonstration]:
    """Tokenise a chat so that each turn of the assistant stands after the very tokens that generation would see as its
    prompt: the chat before it through the chat template.

    The turn itself is its text, tokenised apart, and `stop_token_id`. Where the prompt of a turn goes on from all that
    came before, it continues the demonstration. Where the template renders earlier turns in another way (Qwen3 leaves
    out their thoughts), it begins a new one. A turn that opens the chat has no prompt and is not imitated.
    """
    turns = [index for index, message in enumerate(messages) if message["role"] == "assistant" and index > 0]
    found: list[Demonstration] = []
    for index in turns[-1:] if last_turn_only else turns:
        prompt = tuple(encode_prompt(tokenizer, messages[:index]))
        turn = (*tokenizer.encode(messages[index]["content"], add_special_tokens=False), stop_token_id)
        whole = found[-1].prompt + found[-1].response if found else ()
        if found and prompt[: len(whole)] == whole:
            found[-1] = _continue(found[-1], between=prompt[len(whole) :], turn=turn)
        else:
            found.append(Demonstration(prompt, turn, (True,) * len(turn)))
    return found


def _continue(before: Demonstration, between: tuple[int, ...], turn: tuple[int, ...]) -> Demonstration:
    mask = before.mask + (False,) * len(between) + (True,) * len(turn)
    return Demonstration(before.prompt, before.response + between + turn, mask)


def write_demonstrations(path: Path, pairs: Iterable[tuple[PromptExample, str]]) -> None:
    """Write (prompt, response text) pairs in the form that `read_demonstrations` reads."""
    with path.open("w", encoding="utf-8") as file:
        for example, response in pairs:
            messages = [*example.messages, {"role": "assistant", "content": response}]
            file.write(json.dumps({"messages": messages}, ensure_ascii=False) + "\n")
