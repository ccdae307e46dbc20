"""Chats become demonstrations whose turns stand after the tokens that generation would see."""

import json

import pytest

from megarl.data.demonstrations import Demonstration, encode_chat, read_demonstrations, write_demonstrations
from megarl.data.prompts import PromptExample, encode_prompt, user_message
from megarl.data.tokenizer import load_tokenizer


@pytest.fixture
def tiny(tiny_tokenizer_folder):
    return load_tokenizer(tiny_tokenizer_folder)


def test_written_demonstrations_read_back_as_prompt_and_response_with_the_stop_token(tmp_path, tiny):
    path = tmp_path / "demonstrations.jsonl"
    write_demonstrations(path, [(PromptExample(0, user_message("21>"), "12"), "12")])
    # "1" and "2" are ids 16 and 17: bytes counted from "!".
    prompt = tuple(encode_prompt(tiny, user_message("21>")))
    expected = Demonstration(prompt, response=(16, 17, 319), mask=(True, True, True))
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


STOP = 319
TURNS = (
    ("system", "sort"),
    ("user", "21>"),
    ("assistant", "12"),
    ("user", "is it 21?"),
    ("user", "or not"),
    ("assistant", ""),
    ("user", "43>"),
    ("assistant", "34 "),
)


def chat(*turns: tuple[str, str]) -> tuple[dict[str, str], ...]:
    return tuple({"role": role, "content": content} for role, content in turns)


def tokens_in_loss(demonstration: Demonstration) -> list[int]:
    return [token for token, kept in zip(demonstration.response, demonstration.mask, strict=True) if kept]


def test_every_turn_of_the_assistant_is_in_the_loss_and_stands_after_its_prompt_at_inference(tiny):
    messages = chat(*TURNS)
    (one,) = encode_chat(tiny, messages, STOP)
    row = one.prompt + one.response
    assert one.prompt == tuple(encode_prompt(tiny, messages[:2]))
    assert len(one.mask) == len(one.response)
    texts = ("12", "", "34 ")
    turns = [[*tiny.encode(text), STOP] for text in texts]
    assert tokens_in_loss(one) == [token for turn in turns for token in turn]
    for index, turn in zip((2, 5, 7), turns, strict=True):
        prompt = encode_prompt(tiny, messages[:index])
        assert list(row[: len(prompt)]) == prompt
        assert list(row[len(prompt) : len(prompt) + len(turn)]) == turn
    rendered = tiny.apply_chat_template(messages, tokenize=True, return_dict=False)
    assert list(row) == rendered[: len(row)]  # what is left is the line break after the last stop token
    assert tiny.decode(rendered[len(row) :]) == "\n"


def test_the_last_turn_alone_is_learnt_from_on_request(tmp_path, tiny):
    path = tmp_path / "demonstrations.jsonl"
    path.write_text(json.dumps({"messages": chat(*TURNS)}) + "\n")
    (one,) = read_demonstrations(path, tiny, STOP, last_turn_only=True)
    assert one.prompt == tuple(encode_prompt(tiny, chat(*TURNS[:-1])))
    assert one.response == (*tiny.encode("34 "), STOP)
    assert all(one.mask)


def test_a_template_that_rewrites_earlier_turns_gives_one_demonstration_per_turn(tiny):
    """As Qwen3's, which leaves the thoughts of earlier turns out: no row holds all turns as inference sees them."""
    tiny.chat_template = tiny.chat_template.replace("message['content']", "message['content'].split('think')[-1]")
    messages = chat(("user", "21>"), ("assistant", "2 1 think12"), ("user", "43>"), ("assistant", "4 3 think34"))
    first, second = encode_chat(tiny, messages, STOP)
    for demonstration, index in ((first, 1), (second, 3)):
        assert demonstration.prompt == tuple(encode_prompt(tiny, messages[:index]))
        assert demonstration.response == (*tiny.encode(messages[index]["content"]), STOP)
        assert all(demonstration.mask)
    assert tiny.decode(second.prompt).count("2 1") == 0


def test_a_turn_that_opens_the_chat_is_context(tiny):
    messages = chat(("assistant", "what?"), ("user", "21>"), ("assistant", "12"))
    (one,) = encode_chat(tiny, messages, STOP)
    assert one.prompt == tuple(encode_prompt(tiny, messages[:2]))
    assert tokens_in_loss(one) == [16, 17, STOP]


def test_another_stop_token_than_the_templates_starts_a_new_demonstration(tiny):
    """A base model stops at <|endoftext|>, which no chat holds after a turn."""
    first, second = encode_chat(tiny, chat(("user", "1"), ("assistant", "1"), ("user", "2"), ("assistant", "2")), 317)
    assert first.response == (16, 317)
    assert second.response == (17, 317)
    assert 317 not in second.prompt


def test_several_turns_without_a_chat_template_are_refused_with_their_line(tmp_path, tiny):
    tiny.chat_template = None
    path = tmp_path / "demonstrations.jsonl"
    path.write_text(json.dumps({"messages": chat(*TURNS[1:4], ("assistant", "no"))}) + "\n")
    with pytest.raises(ValueError, match="line 1: messages has 3 turns; allowed without a chat template"):
        read_demonstrations(path, tiny, STOP)
