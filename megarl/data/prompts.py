"""Prompt files (JSONL, parquet) -> tokenised prompts in an order that is a function of (seed, epoch).

There is no position and no generator to save: prompt number `p` of a run is row `order(N, seed, p // N)[p % N]`.
"""

import hashlib
import json
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import pyarrow.parquet
import torch

from megarl.data.tokenizer import Tokenizer
from rollout.random_numbers import combine, derive_seed

logger = logging.getLogger(__name__)

FILE_TYPES = (".jsonl", ".parquet")
ROLES = ("system", "user", "assistant")
_COLUMNS = ("prompt", "messages", "answer", "reward_model")


@dataclass(frozen=True)
class PromptExample:
    """A question and what its reward rule compares with.

    Attributes:
        prompt_id: the number of the row, or, from `PromptSource.take`, the position in the run (unique in it).
        messages: chat turns `{"role": ..., "content": ...}`; the last one is the user's.
        answer: the right answer, as text.
        tokens: ids of the whole prompt; empty until a `PromptSource` has tokenised it.
    """

    prompt_id: int
    messages: tuple[dict[str, str], ...]
    answer: str
    tokens: tuple[int, ...] = ()

    @property
    def text(self) -> str:
        """The user's last message: what a reward rule gets as `prompt`."""
        return self.messages[-1]["content"]


def user_message(text: str) -> tuple[dict[str, str], ...]:
    """Return the chat of one user turn."""
    return ({"role": "user", "content": text},)


def encode_prompt(tokenizer: Tokenizer, messages: tuple[dict[str, str], ...]) -> list[int]:
    """Return the ids of a prompt: through the chat template up to the assistant's turn, or as plain text without one.

    Raises:
        ValueError: several messages, and the tokenizer has no chat template.
    """
    if tokenizer.chat_template is not None:
        return tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
    if len(messages) > 1:
        raise ValueError(f"messages has {len(messages)} turns; allowed without a chat template in the tokenizer: 1")
    return tokenizer.encode(messages[0]["content"])


def fingerprint(rows: Sequence[Any]) -> str:
    """Return a hash of rows of JSON values: another one where a file has changed."""
    return hashlib.blake2b(json.dumps(rows).encode(), digest_size=16).hexdigest()


@lru_cache(maxsize=4)
def order(num_prompts: int, seed: int, epoch: int) -> tuple[int, ...]:
    """Return the order of an epoch: a permutation of `range(num_prompts)`, a pure function of its arguments."""
    keys = combine(torch.tensor(derive_seed(seed, epoch)), torch.arange(num_prompts))
    return tuple(torch.argsort(keys, stable=True).tolist())


def rows_at(positions: range, num_rows: int, seed: int) -> list[int]:
    """Return the row at each position of a run: position `p` lies in epoch `p // num_rows`, which holds each row
    once."""
    placed = (divmod(position, num_rows) for position in positions)
    return [order(num_rows, seed, epoch)[offset] for epoch, offset in placed]


class PromptSource:
    """The prompts of one file, tokenised; those longer than `max_prompt_tokens` are left out, counted and logged.

    Attributes:
        rows: the kept prompts in file order.
        num_too_long: how many were left out.
        fingerprint: a hash of the kept prompts. Save it with a checkpoint: the same (seed, position) names other
            prompts once it has changed.

    Raises:
        ValueError: an unreadable file (with line or row, field and allowed values), or no prompt left.
    """

    def __init__(self, path: str | Path, tokenizer: Tokenizer, max_prompt_tokens: int) -> None:
        if max_prompt_tokens < 1:
            raise ValueError(f"max_prompt_tokens is {max_prompt_tokens}; allowed: 1 or more")
        examples = read_prompts(path)
        examples = [replace(row, tokens=tuple(encode_prompt(tokenizer, row.messages))) for row in examples]
        empty = next((number for number, row in enumerate(examples) if not row.tokens), None)
        if empty is not None:
            raise ValueError(f"{path}: prompt {empty} has no tokens; allowed: 1 or more (is the tokenizer whole?)")
        self.rows = tuple(row for row in examples if len(row.tokens) <= max_prompt_tokens)
        self.num_too_long = len(examples) - len(self.rows)
        longest = max(len(row.tokens) for row in examples)
        if not self.rows:
            raise ValueError(f"{path}: every prompt is longer than max_prompt_tokens = {max_prompt_tokens} tokens")
        level = logging.WARNING if self.num_too_long else logging.INFO
        summary = "%s: %d of %d prompts left out, longer than max_prompt_tokens = %d (the longest has %d tokens)"
        logger.log(level, summary, path, self.num_too_long, len(examples), max_prompt_tokens, longest)
        self.fingerprint = fingerprint([(row.messages, row.answer, row.tokens) for row in self.rows])

    def __len__(self) -> int:
        return len(self.rows)

    def take(self, start: int, count: int, seed: int) -> list[PromptExample]:
        """Return prompts `start` to `start + count - 1` of the run; `prompt_id` is that position.

        Position `p` lies in epoch `p // len(self)`; an epoch holds each prompt once, and a batch may cross its end.
        """
        positions = range(start, start + count)
        rows = zip(positions, rows_at(positions, len(self), seed), strict=True)
        return [replace(self.rows[row], prompt_id=position) for position, row in rows]

    def batch(self, step: int, batch_size: int, seed: int) -> list[PromptExample]:
        """Return the prompts of a step (counted from 0) where every step takes `batch_size` of them."""
        return self.take(step * batch_size, batch_size, seed)


def write_prompts(path: str | Path, examples: Iterable[PromptExample]) -> None:
    """Write a JSONL prompt file that `read_prompts` reads back: one object with `messages` and `answer` per line."""
    lines = (json.dumps({"messages": row.messages, "answer": row.answer}, ensure_ascii=False) for row in examples)
    Path(path).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def read_prompts(path: str | Path) -> list[PromptExample]:
    """Read a prompt file; `prompt_id` is the row number, from 0.

    Each row has the question, as `prompt` (text, or a list of messages) or as `messages`, and the right answer, as
    `answer` (text or a whole number) or, in the layout of DAPO-Math-17k, as `reward_model.ground_truth`.

    Raises:
        ValueError: names the file, the line or row (from 1), the field, its value and what is allowed.
    """
    examples: list[PromptExample] = []
    for place, row in read_rows(path, _COLUMNS, "prompt"):
        try:
            examples.append(PromptExample(len(examples), _read_messages(row), _read_answer(row)))
        except ValueError as error:
            raise ValueError(f"{path}, {place}: {error}") from error
    if not examples:
        raise ValueError(f"prompt file is {str(path)!r}: it holds no prompt")
    return examples


def read_rows(path: str | Path, columns: Sequence[str], kind: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield (place, object) for each row of a JSONL or parquet file, for example ("row 1", {...}).

    Args:
        columns: read from a parquet file, as far as it has them.
        kind: what the file is, for messages.

    Raises:
        ValueError: no such file, another kind of file, or an unreadable row.
    """
    path = Path(path)
    if path.suffix not in FILE_TYPES:
        raise ValueError(f"{kind} file is {str(path)!r}; allowed: files that end in {' or '.join(FILE_TYPES)}")
    if not path.is_file():
        raise ValueError(f"{kind} file is {str(path)!r}: there is no such file")
    yield from read_json_lines(path) if path.suffix == ".jsonl" else _parquet_rows(path, columns)


def read_json_lines(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield (place, object) for each line that is not blank, for example ("line 1", {...})."""
    with path.open("rb") as lines:
        for number, raw in enumerate(lines, start=1):
            line = raw.decode("utf-8", errors="replace")
            if not line.strip():
                continue
            try:
                row = json.loads(raw)
                json.dumps(row, ensure_ascii=False).encode("utf-8")  # refuses halves of surrogate pairs
            except ValueError as error:
                raise ValueError(
                    f"{path}, line {number}: {line.strip()[:80]!r} is not JSON in UTF-8: {error}"
                ) from error
            if not isinstance(row, dict):
                raise ValueError(f"{path}, line {number}: the line is {line.strip()[:80]!r}; allowed: a JSON object")
            yield f"line {number}", row


def _parquet_rows(path: Path, wanted: Sequence[str]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    try:
        file = pyarrow.parquet.ParquetFile(path)
    except pyarrow.ArrowInvalid as error:
        raise ValueError(f"{path}: not a parquet file: {error}") from error
    columns = [name for name in wanted if name in file.schema_arrow.names]
    rows = (row for batch in file.iter_batches(columns=columns) for row in batch.to_pylist())
    yield from ((f"row {number}", row) for number, row in enumerate(rows, start=1))


def _read_messages(row: Mapping[str, Any]) -> tuple[dict[str, str], ...]:
    given = [name for name in ("prompt", "messages") if row.get(name) is not None]
    if len(given) != 1:
        found = " and ".join(given) or f"{', '.join(row) or 'no field'}"
        raise ValueError(f"fields are {found}; allowed: one of prompt (text or messages) and messages")
    return read_prompt(row[given[0]]) if given[0] == "prompt" else read_messages("messages", row["messages"], "user")


def read_prompt(value: Any) -> tuple[dict[str, str], ...]:
    """Return the chat of a row's field `prompt`, which is text or messages that end with the user's.

    Raises:
        ValueError: it is something else.
    """
    if isinstance(value, str):
        if not value:
            raise ValueError("prompt is ''; allowed: text, not empty, or a list of messages")
        return user_message(value)
    return read_messages("prompt", value, last_role="user")


def read_messages(field: str, value: Any, last_role: str) -> tuple[dict[str, str], ...]:
    """Return the chat turns of a row's field.

    Raises:
        ValueError: not a list of `{"role": ..., "content": ...}`, or the last role is another one.
    """
    if not isinstance(value, list) or not value:
        allowed = "a list of messages, not empty" + (", or text, not empty" if field == "prompt" else "")
        raise ValueError(f"{field} is {value!r}; allowed: {allowed}")
    messages = tuple(_read_message(f"{field}[{index}]", message) for index, message in enumerate(value))
    if messages[-1]["role"] != last_role:
        raise ValueError(f"the last role in {field} is {messages[-1]['role']!r}; allowed: {last_role!r}")
    return messages


def _read_message(field: str, message: Any) -> dict[str, str]:
    present = {key: value for key, value in message.items() if value is not None} if isinstance(message, dict) else {}
    if set(present) != {"role", "content"}:
        raise ValueError(f"{field} is {message!r}; allowed: an object with role and content")
    if present["role"] not in ROLES:
        raise ValueError(f"{field}.role is {present['role']!r}; allowed: {', '.join(ROLES)}")
    if not isinstance(present["content"], str):
        raise ValueError(f"{field}.content is {present['content']!r}; allowed: text")
    return {"role": present["role"], "content": present["content"]}


def _read_answer(row: Mapping[str, Any]) -> str:
    field, value = "answer", row.get("answer")
    if value is None and isinstance(row.get("reward_model"), dict):
        field, value = "reward_model.ground_truth", row["reward_model"].get("ground_truth")
    if type(value) not in (str, int):
        raise ValueError(f"{field} is {value!r}; allowed: text or a whole number")
    return str(value)
