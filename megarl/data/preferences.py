"""Preference pairs (JSONL, parquet) as token ids: a prompt with a better and a worse answer."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from megarl.data.prompts import PromptExample, encode_prompt, read_messages, read_prompt, read_rows
from megarl.data.tokenizer import Tokenizer

Tokens = tuple[int, ...]
Truncation = Literal["keep_start", "keep_end"]
TRUNCATIONS: tuple[Truncation, ...] = ("keep_start", "keep_end")
_COLUMNS = ("prompt", "chosen", "rejected", "margin")


@dataclass(frozen=True)
class PreferencePair:
    """Token ids of a prompt and of two answers to it, each with its stop token.

    Attributes:
        chosen, rejected: the better and the worse answer.
        margin: by how much the score of the chosen one should be higher, for a reward model.
    """

    prompt: Tokens
    chosen: Tokens
    rejected: Tokens
    margin: float = 0.0


@dataclass(frozen=True)
class PreferenceRow:
    """A pair as its file states it; `place` is the line or row.

    Attributes:
        are_chats: the answers came as whole chats, so they are rendered with their prompt and not by themselves.
    """

    place: str
    prompt: tuple[dict[str, str], ...]
    chosen: str
    rejected: str
    margin: float
    are_chats: bool


def read_preferences(path: str | Path, tokenizer: Tokenizer, stop_token_id: int) -> list[PreferencePair]:
    """Read and tokenise a file of pairs (`read_preference_rows`).

    Answers given as text are tokenised apart from the prompt and end with `stop_token_id`, as in generation. Answers
    given as whole chats go through the chat template with their prompt and are cut by `split_prompt`; what the
    template writes after the last stop token is left out.

    Raises:
        ValueError: names the file, the line or row (from 1), the field, its value and what is allowed.
    """
    pairs = []
    for row in read_preference_rows(path):
        try:
            pairs.append(_encode(tokenizer, row, stop_token_id))
        except ValueError as error:
            raise ValueError(f"{path}, {row.place}: {error}") from error
    return pairs


def read_preference_rows(path: str | Path) -> list[PreferenceRow]:
    """Read a file of pairs.

    Each row has `chosen` and `rejected` and may have a number `margin`. The answers are text, beside `prompt` (text or
    a list of messages), or whole chats as lists of messages that differ in the last one only, the assistant's. Lists
    that begin with the assistant's message follow `prompt`; beside other lists it is not read.

    Raises:
        ValueError: as `read_preferences`.
    """
    rows = []
    for place, row in read_rows(path, _COLUMNS, "preference"):
        try:
            rows.append(_read_row(place, row))
        except ValueError as error:
            raise ValueError(f"{path}, {place}: {error}") from error
    if not rows:
        raise ValueError(f"preference file is {str(path)!r}: it holds no pair")
    return rows


def write_preferences(path: str | Path, rows: Iterable[tuple[PromptExample, str, str]]) -> None:
    """Write (prompt, chosen text, rejected text) as JSONL that `read_preferences` reads."""
    with Path(path).open("w", encoding="utf-8") as file:
        for example, chosen, rejected in rows:
            row = {"prompt": example.messages, "chosen": chosen, "rejected": rejected}
            file.write(json.dumps(row, ensure_ascii=False) + "\n")


def split_prompt(
    prompt: Sequence[int], chosen: Sequence[int], rejected: Sequence[int]
) -> tuple[Sequence[int], Sequence[int], Sequence[int]]:
    """Find one prompt for two chats that were tokenised whole: the tokens with which both of them and the prompt alone
    begin. A token that spans the border belongs to the answers, so prompt + answer rebuilds each chat.

    Returns: the prompt and the two answers.
    """
    size = 0
    for tokens in zip(prompt, chosen, rejected, strict=False):
        if len(set(tokens)) > 1:
            break
        size += 1
    return prompt[:size], chosen[size:], rejected[size:]


def truncate(prompt: Tokens, answer: Tokens, max_tokens: int, truncation: Truncation) -> tuple[Tokens, Tokens]:
    """Cut prompt and answer, as one row, to `max_tokens` tokens; a shorter row stays as it is.

    `"keep_start"` cuts tokens off the end, perhaps the whole answer; `"keep_end"` off the start. If all of the prompt
    goes, the first token left is the prompt: nothing stands before it to predict it from.
    """
    row, excess = prompt + answer, len(prompt) + len(answer) - max_tokens
    if excess <= 0:
        return prompt, answer
    if truncation == "keep_start":
        return row[:max_tokens][: len(prompt)], row[len(prompt) : max_tokens]
    border = max(len(prompt), excess + 1)
    return row[excess:border], row[border:]


def _encode(tokenizer: Tokenizer, row: PreferenceRow, stop: int) -> PreferencePair:
    prompt = encode_prompt(tokenizer, row.prompt)
    texts = (row.chosen, row.rejected)
    if not row.are_chats:
        chosen, rejected = ((*tokenizer.encode(text, add_special_tokens=False), stop) for text in texts)
        return PreferencePair(tuple(prompt), chosen, rejected, row.margin)
    if tokenizer.chat_template is None:
        raise ValueError("chosen: got messages, allowed without a chat template in the tokenizer: text")
    chats = [[*row.prompt, {"role": "assistant", "content": text}] for text in texts]
    rendered = [tokenizer.apply_chat_template(chat, tokenize=True, return_dict=False) for chat in chats]
    common, *answers = split_prompt(prompt, *rendered)
    if not common:
        raise ValueError("chosen: the chat template gives both chats and their prompt no first token in common")
    chosen, rejected = (_end_with(answer, stop) for answer in answers)
    return PreferencePair(tuple(common), chosen, rejected, row.margin)


def _end_with(answer: Sequence[int], stop: int) -> Tokens:
    """The answer up to its last stop token, which is added if there is none."""
    if stop not in answer:
        return (*answer, stop)
    return tuple(answer[: len(answer) - answer[::-1].index(stop)])


def _read_row(place: str, row: Mapping[str, Any]) -> PreferenceRow:
    chosen, rejected, margin = row.get("chosen"), row.get("rejected"), _read_margin(row.get("margin"))
    if isinstance(chosen, str) and isinstance(rejected, str):
        return PreferenceRow(place, read_prompt(row.get("prompt")), chosen, rejected, margin, are_chats=False)
    for name, answer in (("chosen", chosen), ("rejected", rejected)):
        if not isinstance(answer, list):
            raise ValueError(f"{name}: got {answer!r}, allowed: text in both answers, or a list of messages in both")
    one, other = _read_chat(row, "chosen"), _read_chat(row, "rejected")
    if one[:-1] != other[:-1]:
        raise ValueError("rejected: got a chat that differs before its last message, allowed: in the last one only")
    return PreferenceRow(place, one[:-1], one[-1]["content"], other[-1]["content"], margin, are_chats=True)


def _read_chat(row: Mapping[str, Any], name: str) -> tuple[dict[str, str], ...]:
    messages = read_messages(name, row[name], last_role="assistant")
    if messages[0]["role"] == "assistant":
        messages = read_prompt(row.get("prompt")) + messages
    return messages


def _read_margin(value: Any) -> float:
    if value is None:
        return 0.0
    if type(value) not in (int, float) or not math.isfinite(value):
        raise ValueError(f"margin: got {value!r}, allowed: a finite number")
    return float(value)
