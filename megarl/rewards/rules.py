"""Reward rules: `rule(prompt, response, answer) -> float`, all three as text.

`prompt` is the user's last message, `response` the decoded response without the stop token. A rule sees only text;
whether the response had finished is the trainer's knowledge (its option to give unfinished responses 0).
"""

from collections.abc import Callable

Reward = Callable[[str, str, str], float]


def exact_match(prompt: str, response: str, answer: str) -> float:
    """Return 1.0 if the response is the answer, but for white space at both ends, else 0.0."""
    return float(response.strip() == answer.strip())


def sorted_digits(prompt: str, response: str, answer: str) -> float:
    """Return 1.0 if the response is the sorted digits of the prompt and nothing else, else 0.0; needs no answer."""
    digits = sorted(letter for letter in prompt if letter in "0123456789")
    return float(response == "".join(digits))
