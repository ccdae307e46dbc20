import pytest

from megarl.rewards.rules import exact_match, sorted_digits


@pytest.mark.parametrize(
    ("response", "answer", "reward"),
    [
        ("123456", "123456", 1.0),
        (" 123456\n", "123456", 1.0),
        ("123456", "123465", 0.0),
        ("1234567", "123456", 0.0),
        ("123 456", "123456", 0.0),
        ("the answer is 123456", "123456", 0.0),
        ("", "123456", 0.0),
        ("", "", 1.0),
        ("0.50", "0.5", 0.0),  # text, not numbers
    ],
)
def test_exact_match_compares_text_but_for_white_space_at_the_ends(response, answer, reward):
    assert exact_match("prompt", response, answer) == reward


@pytest.mark.parametrize(
    ("response", "reward"),
    [("123456", 1.0), ("314256", 0.0), ("12345", 0.0), ("1234566", 0.0), ("123456>", 0.0), (" 123456", 0.0), ("", 0.0)],
)
def test_sorted_digits_needs_exactly_the_prompts_digits_in_order(response, reward):
    assert sorted_digits("314256>", response, answer="") == reward


def test_sorted_digits_keeps_repeated_digits():
    assert sorted_digits("909101>", "001199", answer="") == 1.0
    assert sorted_digits("909101>", "019", answer="") == 0.0


@pytest.mark.parametrize("rule", [exact_match, sorted_digits])
def test_rules_return_floats(rule):
    assert type(rule("1>", "1", "1")) is float
    assert type(rule("1>", "2", "1")) is float
