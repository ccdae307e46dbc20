"""Files of preference pairs -> token ids; where prompt and answer meet; truncation."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megarl.data.preferences import (
    PreferencePair,
    read_preferences,
    split_prompt,
    truncate,
    write_preferences,
)
from megarl.data.prompts import PromptExample, encode_prompt, user_message
from megarl.data.tokenizer import load_tokenizer

STOP = 319
ONE, TWO = 16, 17
"""Ids of "1" and "2": bytes counted from "!"."""


@pytest.fixture
def tiny(tiny_tokenizer_folder):
    return load_tokenizer(tiny_tokenizer_folder)


@pytest.fixture(scope="module")
def qwen(qwen_tokenizer_folder):
    return load_tokenizer(qwen_tokenizer_folder)


def prompt_of(tokenizer, text: str) -> tuple[int, ...]:
    return tuple(encode_prompt(tokenizer, user_message(text)))


def chat(*texts: str) -> list[dict[str, str]]:
    """Turns of user and assistant, by turns."""
    return [{"role": ("user", "assistant")[index % 2], "content": text} for index, text in enumerate(texts)]


def write_rows(path, *rows: dict):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_written_pairs_read_back_as_prompt_and_answers_with_the_stop_token(tmp_path, tiny):
    path = tmp_path / "pairs.jsonl"
    write_preferences(path, [(PromptExample(0, user_message("21>"), "12"), "12", "21")])
    expected = PreferencePair(prompt_of(tiny, "21>"), (ONE, TWO, STOP), (TWO, ONE, STOP))
    assert read_preferences(path, tiny, STOP) == [expected]


def test_the_same_pair_as_text_messages_and_chats_in_both_kinds_of_file(tmp_path, tiny):
    answer = [{"role": "assistant", "content": "12"}], [{"role": "assistant", "content": "2"}]
    rows = [
        {"prompt": "21>", "chosen": "12", "rejected": "2", "margin": 0.5},
        {"prompt": chat("21>"), "chosen": "12", "rejected": "2", "margin": 0.5, "score": 3},
        {"chosen": chat("21>", "12"), "rejected": chat("21>", "2"), "margin": 0.5},
        {"prompt": chat("21>"), "chosen": answer[0], "rejected": answer[1], "margin": 0.5},
        {"prompt": "21>", "chosen": chat("21>", "12"), "rejected": chat("21>", "2"), "margin": 0.5},
    ]
    expected = PreferencePair(prompt_of(tiny, "21>"), (ONE, TWO, STOP), (TWO, STOP), 0.5)
    assert read_preferences(write_rows(tmp_path / "pairs.jsonl", *rows), tiny, STOP) == [expected] * 5
    for number, row in enumerate(rows):
        pq.write_table(pa.Table.from_pylist([row]), tmp_path / f"{number}.parquet")
        assert read_preferences(tmp_path / f"{number}.parquet", tiny, STOP) == [expected]


def test_a_missing_margin_is_zero_and_an_empty_answer_is_a_stop_token(tmp_path, tiny):
    path = write_rows(tmp_path / "pairs.jsonl", {"prompt": "1", "chosen": "2", "rejected": "", "margin": None})
    assert read_preferences(path, tiny, STOP) == [PreferencePair(prompt_of(tiny, "1"), (TWO, STOP), (STOP,), 0.0)]


def test_one_prompt_is_found_where_both_chats_and_the_prompt_alone_still_agree():
    """RC32: full chats "xyab" and "xzab", prompt alone "xy"."""
    prompt, chosen, rejected = (list(map(ord, text)) for text in ("xy", "xyab", "xzab"))
    common, *answers = split_prompt(prompt, chosen, rejected)
    assert "".join(map(chr, common)) == "x"
    assert ["".join(map(chr, answer)) for answer in answers] == ["yab", "zab"]
    assert [common + answer for answer in answers] == [chosen, rejected]


def test_the_prompt_never_takes_tokens_of_answers_that_begin_alike():
    assert split_prompt([1, 2], [1, 2, 7, 8], [1, 2, 7, 9]) == ([1, 2], [7, 8], [7, 9])
    assert split_prompt([1, 2], [1, 2, 7], [1, 2, 7]) == ([1, 2], [7], [7])


@pytest.mark.parametrize("answers", [("12", "21"), ("is", "is it"), ("\n12", "12"), ("\n12", "\n21"), ("", "1")])
def test_chats_are_rebuilt_by_prompt_and_answer(tmp_path, qwen, answers):
    """RC32: with Qwen's vocabulary, where the line break before the answer may be one token with its first line
    breaks: then it belongs to the answers. The stop token is there once."""
    stop = qwen.eos_token_id
    chats = [chat("sort", "what?", "21>", answer) for answer in answers]
    path = write_rows(tmp_path / "pairs.jsonl", {"chosen": chats[0], "rejected": chats[1]})
    (pair,) = read_preferences(path, qwen, stop)
    for messages, answer in zip(chats, (pair.chosen, pair.rejected), strict=True):
        rendered = qwen.apply_chat_template(messages, tokenize=True, return_dict=False)
        row = list(pair.prompt + answer)
        assert row == rendered[: len(row)]
        assert qwen.decode(rendered[len(row) :]) == "\n"
        assert answer.count(stop) == 1
    alone = encode_prompt(qwen, tuple(chats[0][:-1]))
    assert list(pair.prompt) == (alone[:-1] if "\n" in "".join(answers) else alone)


def test_a_template_without_the_stop_token_gets_one(tmp_path, tiny):
    """A base model stops at <|endoftext|>, which the chat template does not write."""
    path = write_rows(tmp_path / "pairs.jsonl", {"chosen": chat("2", "1"), "rejected": chat("2", "2")})
    (pair,) = read_preferences(path, tiny, stop_token_id=317)
    assert tiny.decode(pair.chosen, skip_special_tokens=False) == "1<|im_end|>\n<|endoftext|>"


@pytest.mark.parametrize("mode", ["keep_start", "keep_end"])
def test_truncation_leaves_short_rows_alone_and_cuts_ids_and_answer_together(mode):
    """RC34: rows of 3 and 6 tokens, at most 4; then rows that all fit exactly."""
    assert truncate((1, 2), (3,), 4, mode) == ((1, 2), (3,))
    expected = {"keep_start": ((1, 2, 3), (4,)), "keep_end": ((3,), (4, 5, 6))}
    assert truncate((1, 2, 3), (4, 5, 6), 4, mode) == expected[mode]
    assert truncate((1, 2), (3, 4), 4, mode) == ((1, 2), (3, 4))


def test_an_answer_is_cut_away_or_keeps_one_token_to_be_predicted_from():
    """RC34: keep_start may leave nothing of an answer; keep_end turns its first token into the prompt."""
    assert truncate((1, 2, 3, 4), (5, 6), 4, "keep_start") == ((1, 2, 3, 4), ())
    assert truncate((1, 2, 3, 4, 5), (6,), 4, "keep_start") == ((1, 2, 3, 4), ())
    assert truncate((1,), (2, 3, 4, 5, 6), 4, "keep_end") == ((3,), (4, 5, 6))
    assert truncate((1, 2), (3, 4, 5, 6), 4, "keep_end") == ((3,), (4, 5, 6))


TEXT = {"prompt": "1", "chosen": "2", "rejected": "3"}
CHATS = {"chosen": chat("1", "2"), "rejected": chat("1", "3")}
BAD_ROWS = {
    "no prompt": ({**TEXT, "prompt": None}, "prompt is None; allowed: a list of messages, not empty, or text"),
    "empty prompt": ({**TEXT, "prompt": ""}, "prompt is ''; allowed: text, not empty"),
    "no rejected": ({**TEXT, "rejected": None}, "chosen: got '2', allowed: text in both answers, or a list of"),
    "one of each": ({**CHATS, "rejected": "3"}, "rejected: got '3', allowed: text in both answers"),
    "number": ({**TEXT, "chosen": 2}, "chosen: got 2, allowed: text in both answers"),
    "other chats": ({**CHATS, "rejected": chat("4", "3")}, "rejected: got a chat that differs before its last"),
    "user last": ({**CHATS, "chosen": chat("1")}, "the last role in chosen is 'user'; allowed: 'assistant'"),
    "no question": ({**CHATS, "chosen": chat("1", "2")[1:]}, "prompt is None; allowed: a list of messages"),
    "margin": ({**TEXT, "margin": "large"}, "margin: got 'large', allowed: a finite number"),
    "margin true": ({**TEXT, "margin": True}, "margin: got True, allowed: a finite number"),
}


@pytest.mark.parametrize(("row", "message"), BAD_ROWS.values(), ids=BAD_ROWS)
def test_bad_rows_are_named_with_file_line_field_and_what_is_allowed(tmp_path, tiny, row, message):
    path = write_rows(tmp_path / "pairs.jsonl", TEXT, row)
    with pytest.raises(ValueError, match=rf"pairs\.jsonl, line 2: {message}"):
        read_preferences(path, tiny, STOP)


def test_chats_without_a_chat_template_are_refused_and_text_is_not(tmp_path, tiny):
    tiny.chat_template = None
    assert read_preferences(write_rows(tmp_path / "text.jsonl", TEXT), tiny, STOP)[0].prompt == (ONE,)
    with pytest.raises(ValueError, match="line 1: chosen: got messages, allowed without a chat template"):
        read_preferences(write_rows(tmp_path / "chats.jsonl", CHATS), tiny, STOP)


def test_other_and_empty_files_are_refused(tmp_path, tiny):
    (tmp_path / "empty.jsonl").write_text("\n")
    for name, message in (
        ("empty.jsonl", "it holds no pair"),
        ("none.jsonl", "there is no such file"),
        ("pairs.csv", "allowed: files that end in .jsonl or .parquet"),
    ):
        with pytest.raises(ValueError, match=f"preference file is .*{name}.*{message}"):
            read_preferences(tmp_path / name, tiny, STOP)
