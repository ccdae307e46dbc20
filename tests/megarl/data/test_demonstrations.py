import json

import pytest

from megarl.data.demonstrations import Demonstration, read_demonstrations, write_demonstrations
from megarl.data.prompts import PromptExample, encode_prompt, user_message
from megarl.data.tokenizer import load_tokenizer


@pytest.fixture
def tiny(tiny_tokenizer_folder):
    return load_tokenizer(tiny_tokenizer_folder)


def test_written_demonstrations_read_back_as_prompt_and_response_with_the_stop_token(tmp_path, tiny):
    path = tmp_path / "demonstrations.jsonl"
    write_demonstrations(path, [(PromptExample(0, user_message("21>"), "12"), "12")])
    # "1" and "2" are ids 16 and 17: bytes counted from "!".
    expected = Demonstration(prompt=tuple(encode_prompt(tiny, user_message("21>"))), response=(16, 17, 319))
    assert read_demonstrations(path, tiny, stop_token_id=319) == [expected]


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        (None, r"line 2: messages is None; allowed: a list of messages, not empty"),
        (["user"], r"line 2: the last role in messages is 'user'; allowed: 'assistant'"),
        (["assistant"], r"line 2: messages has 1 turn; allowed: the user's and the assistant's, or more"),
    ],
)
def test_bad_demonstration_error_names_line_field_and_what_is_allowed(tmp_path, tiny, messages, message):
    good = {"messages": [{"role": role, "content": "1"} for role in ("user", "assistant")]}
    bad = {"messages": messages and [{"role": role, "content": "1"} for role in messages]}
    path = tmp_path / "demonstrations.jsonl"
    path.write_text(f"{json.dumps(good)}\n{json.dumps(bad)}\n")
    with pytest.raises(ValueError, match=message):
        read_demonstrations(path, tiny, stop_token_id=319)


def test_file_without_demonstrations_is_refused(tmp_path, tiny):
    (tmp_path / "demonstrations.jsonl").write_text("\n")
    with pytest.raises(ValueError, match="holds none"):
        read_demonstrations(tmp_path / "demonstrations.jsonl", tiny, stop_token_id=319)
