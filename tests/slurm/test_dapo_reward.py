"""The reward of slurm/dapo_reward.py, loaded as `--reward` does."""

from pathlib import Path

import pytest

from megarl.rewards.scoring import load_reward

SCORE = load_reward(f"{Path(__file__).parents[2] / 'slurm' / 'dapo_reward.py'}:score")


@pytest.mark.parametrize(
    "response",
    [
        "So it is.\nAnswer: 1234",
        "Answer: 5\nNo, wait.\nAnswer: $1234$.",
        "answer : \\boxed{1234}",
        "Answer: **1,234**\nDone.",
        "**Answer: 01234**",
        "Answer: \\(1234\\)",
    ],
)
def test_the_last_answer_counts_however_it_is_wrapped(response):
    assert SCORE("prompt", response, "1234") == 1.0


@pytest.mark.parametrize(
    "response",
    ["1234", "Answer: 1234\nAnswer: 5", "Answer: -1234", "Answer:", "", "Answer: 1234 or 5"],
)
def test_anything_else_is_wrong(response):
    assert SCORE("prompt", response, "1234") == -1.0


def test_other_answers_are_compared_as_text():
    assert SCORE("prompt", "Answer: $\\frac{1}{2}$", "\\frac{1}{2}") == 1.0
    assert SCORE("prompt", "Answer: 0.5", "\\frac{1}{2}") == -1.0
    assert SCORE("prompt", "Answer: -7", "-7") == 1.0
