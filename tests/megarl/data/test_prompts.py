import json
import logging

import pyarrow
import pyarrow.parquet
import pytest

from megarl.data.prompts import (
    PromptExample,
    PromptSource,
    encode_prompt,
    order,
    read_prompts,
    user_message,
    write_prompts,
)
from megarl.data.tokenizer import load_tokenizer


@pytest.fixture
def tiny(tiny_tokenizer_folder):
    return load_tokenizer(tiny_tokenizer_folder)


class LettersTokenizer:
    """One token per letter and no chat template."""

    chat_template = None

    def encode(self, text):
        return [ord(letter) for letter in text]


def write_lines(path, *rows):
    path.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows))
    return path


def numbered_prompts(path, number):
    write_prompts(path, [PromptExample(i, user_message(f"question {i}"), str(i)) for i in range(number)])
    return path


def test_jsonl_rows_may_hold_text_messages_or_the_dapo_layout(tmp_path):
    chat = [{"role": "system", "content": "Sort."}, {"role": "user", "content": "21>"}]
    path = write_lines(
        tmp_path / "prompts.jsonl",
        {"prompt": "314256>", "answer": "123456"},
        {"messages": chat, "answer": 12, "source": "made up"},
        "",
        {"prompt": chat[1:], "reward_model": {"ground_truth": "34", "style": "rule"}, "ability": "MATH"},
    )
    assert read_prompts(path) == [
        PromptExample(0, ({"role": "user", "content": "314256>"},), "123456"),
        PromptExample(1, tuple(chat), "12"),
        PromptExample(2, ({"role": "user", "content": "21>"},), "34"),
    ]


def test_parquet_in_the_dapo_layout_reads_as_the_same_jsonl(tmp_path):
    rows = [
        {
            "data_source": "math_dapo",
            "prompt": [{"content": f"What is {i} + {i}?", "role": "user"}],
            "reward_model": {"ground_truth": str(2 * i), "style": "rule-lighteval/MATH_v2"},
        }
        for i in range(3)
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "prompts.parquet")
    examples = read_prompts(tmp_path / "prompts.parquet")
    assert [(row.prompt_id, row.text, row.answer) for row in examples] == [
        (0, "What is 0 + 0?", "0"),
        (1, "What is 1 + 1?", "2"),
        (2, "What is 2 + 2?", "4"),
    ]
    assert examples == read_prompts(write_lines(tmp_path / "prompts.jsonl", *rows))


def test_written_prompts_read_back_equal(tmp_path):
    examples = [
        PromptExample(0, user_message("naïve 北京\n\u2028two"), "1"),
        PromptExample(1, ({"role": "system", "content": ""}, *user_message("x")), "2"),
    ]
    write_prompts(tmp_path / "prompts.jsonl", examples)
    assert read_prompts(tmp_path / "prompts.jsonl") == examples


GOOD = {"prompt": "1+1=", "answer": "2"}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("{broken", r"line 2: '\{broken' is not JSON"),
        ('"text"', r"line 2: .*allowed: a JSON object"),
        ({"answer": "2"}, r"line 2: fields are answer; allowed: one of prompt .* and messages"),
        ({**GOOD, "messages": [{"role": "user", "content": "x"}]}, r"line 2: fields are prompt and messages; allowed"),
        ({"prompt": "", "answer": "2"}, r"line 2: prompt is ''; allowed: .*not empty"),
        ({"prompt": 7, "answer": "2"}, r"line 2: prompt is 7; allowed"),
        ({"messages": "x", "answer": "2"}, r"line 2: messages is 'x'; allowed: a list of messages, not empty$"),
        ({"messages": [], "answer": "2"}, r"line 2: messages is \[\]; allowed"),
        ({"messages": [{"role": "user"}], "answer": "2"}, r"line 2: messages\[0\] is .*allowed: .*role and content"),
        (
            {"prompt": [{"role": "bot", "content": "x"}], "answer": "2"},
            r"line 2: prompt\[0\]\.role is 'bot'; allowed: system, user, assistant",
        ),
        ({"messages": [{"role": "user", "content": 5}], "answer": "2"}, r"messages\[0\]\.content is 5; allowed: text"),
        (
            {"messages": [{"role": "assistant", "content": "x"}], "answer": "2"},
            r"line 2: the last role in messages is 'assistant'; allowed: 'user'",
        ),
        ({"prompt": "x"}, r"line 2: answer is None; allowed: text or a whole number"),
        ({"prompt": "x", "answer": 0.5}, r"line 2: answer is 0\.5; allowed: text or a whole number"),
        ({"prompt": "x", "answer": True}, r"line 2: answer is True; allowed"),
        ({"prompt": "x", "reward_model": {}}, r"line 2: reward_model\.ground_truth is None; allowed"),
    ],
)
def test_bad_row_error_names_file_line_field_value_and_what_is_allowed(tmp_path, row, message):
    path = write_lines(tmp_path / "prompts.jsonl", GOOD, row)
    with pytest.raises(ValueError, match=message) as error:
        read_prompts(path)
    assert str(path) in str(error.value)


def test_bad_parquet_row_is_counted_from_one(tmp_path):
    rows = [{"prompt": "a", "answer": "1"}, {"prompt": "b", "answer": None}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "prompts.parquet")
    with pytest.raises(ValueError, match=r"prompts\.parquet, row 2: answer is None"):
        read_prompts(tmp_path / "prompts.parquet")


def test_unreadable_files_are_refused_with_what_is_allowed(tmp_path):
    with pytest.raises(ValueError, match=r"prompts\.csv.*allowed: files that end in \.jsonl or \.parquet"):
        read_prompts(tmp_path / "prompts.csv")
    with pytest.raises(ValueError, match="there is no such file"):
        read_prompts(tmp_path / "prompts.jsonl")
    with pytest.raises(ValueError, match="holds no prompt"):
        read_prompts(write_lines(tmp_path / "empty.jsonl", ""))
    with pytest.raises(ValueError, match="not a parquet file"):
        read_prompts(write_lines(tmp_path / "text.parquet", GOOD))


def test_chat_template_is_used_where_there_is_one_and_plain_text_otherwise(tiny):
    assert tiny.decode(encode_prompt(tiny, user_message("21>"))) == (
        "<|im_start|>user\n21><|im_end|>\n<|im_start|>assistant\n"
    )
    assert encode_prompt(LettersTokenizer(), user_message("21>")) == [50, 49, 62]
    with pytest.raises(ValueError, match="messages has 2 turns; allowed without a chat template in the tokenizer: 1"):
        encode_prompt(LettersTokenizer(), user_message("a") + user_message("b"))


def test_order_is_a_permutation_fixed_by_seed_and_epoch():
    first = order(10, seed=1, epoch=0)
    assert sorted(first) == list(range(10))
    assert order(10, seed=1, epoch=0) == first
    assert len({order(10, seed, epoch) for seed in (1, 2) for epoch in (0, 1, 2)}) == 6
    # Pinned, so that no change gives a resumed run another order without notice.
    assert first == (5, 4, 3, 1, 2, 9, 0, 6, 8, 7)


def test_epochs_cover_each_prompt_once_and_batches_cross_their_borders(tmp_path):
    """RC47"""
    source = PromptSource(numbered_prompts(tmp_path / "ten.jsonl", 10), LettersTokenizer(), max_prompt_tokens=100)
    batches = [source.batch(step, batch_size=4, seed=3) for step in range(15)]  # 60 prompts: 6 epochs, borders inside
    examples = [example for batch in batches for example in batch]
    assert [example.prompt_id for example in examples] == list(range(60))
    answers = [int(example.answer) for example in examples]
    epochs = [tuple(answers[start : start + 10]) for start in range(0, 60, 10)]
    assert epochs == [order(10, seed=3, epoch=epoch) for epoch in range(6)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert len(set(epochs)) == 6


def test_a_new_source_goes_on_at_any_step_as_the_old_one_would(tmp_path):
    """RC47"""
    path = numbered_prompts(tmp_path / "ten.jsonl", 10)
    unbroken = PromptSource(path, LettersTokenizer(), max_prompt_tokens=100)
    expected = [unbroken.batch(step, batch_size=2, seed=5) for step in range(15)]
    resumed = PromptSource(path, LettersTokenizer(), max_prompt_tokens=100)
    assert [resumed.batch(step, batch_size=2, seed=5) for step in range(7, 15)] == expected[7:]
    assert resumed.take(13, 4, seed=5) == [*expected[6][1:], *expected[7], expected[8][0]]


def test_a_batch_larger_than_the_file_holds_several_epochs(tmp_path):
    source = PromptSource(numbered_prompts(tmp_path / "three.jsonl", 3), LettersTokenizer(), max_prompt_tokens=100)
    answers = [int(example.answer) for example in source.batch(1, batch_size=7, seed=0)]
    stream = [row for epoch in range(5) for row in order(3, seed=0, epoch=epoch)]
    assert answers == stream[7:14]


def test_fingerprint_changes_with_the_prompts_and_only_with_them(tmp_path):
    """RC47"""
    ten = PromptSource(numbered_prompts(tmp_path / "ten.jsonl", 10), LettersTokenizer(), max_prompt_tokens=100)
    same = PromptSource(numbered_prompts(tmp_path / "copy.jsonl", 10), LettersTokenizer(), max_prompt_tokens=50)
    twelve = PromptSource(numbered_prompts(tmp_path / "twelve.jsonl", 12), LettersTokenizer(), max_prompt_tokens=100)
    assert ten.fingerprint == same.fingerprint != twelve.fingerprint


def test_prompt_limit_counts_tokens_and_the_cut_is_logged(tmp_path, tiny, caplog):
    """RC43: a limit in tokens must not drop a text whose letters alone exceed it."""
    # The template has 8 tokens; the texts have 29 letters in 3 words and 2 line ends, 40 digits, 8 digits.
    write_prompts(
        tmp_path / "prompts.jsonl",
        [
            PromptExample(0, user_message("assistant\nassistant\nassistant"), "a"),
            PromptExample(1, user_message("7" * 40), "b"),
            PromptExample(2, user_message("12345678"), "c"),
        ],
    )
    with caplog.at_level(logging.INFO):
        source = PromptSource(tmp_path / "prompts.jsonl", tiny, max_prompt_tokens=16)
    assert [len(row.tokens) for row in source.rows] == [13, 16]
    assert [row.answer for row in source.rows] == ["a", "c"]
    assert source.num_too_long == 1
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "1 of 3 prompts left out, longer than max_prompt_tokens = 16 (the longest has 48 tokens)" in record.message


def test_nothing_left_and_senseless_limits_are_refused(tmp_path, tiny):
    path = numbered_prompts(tmp_path / "prompts.jsonl", 2)
    with pytest.raises(ValueError, match=r"every prompt is longer than max_prompt_tokens = 8 tokens"):
        PromptSource(path, tiny, max_prompt_tokens=8)
    with pytest.raises(ValueError, match="max_prompt_tokens is 0; allowed: 1 or more"):
        PromptSource(path, tiny, max_prompt_tokens=0)
