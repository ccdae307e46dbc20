"""DAPO's reward (arXiv 2503.14476, eq. 7): +1 if the answer after the last "Answer:" is the right one, else -1.

    --reward slurm/dapo_reward.py:score --no-require-finished

Answers of DAPO-Math-17k are integers. Deviation: what is no integer is compared as text, without blanks and dollars.
"""

import re

LAST_ANSWER = re.compile(r".*answer\s*:\s*([^\n]*)", re.IGNORECASE | re.DOTALL)
WRAPPING = re.compile(r"\\boxed\{(.*)\}")


def score(prompt: str, response: str, answer: str) -> float:
    """Return 1.0 or -1.0."""
    found = LAST_ANSWER.match(response)
    return 1.0 if found is not None and _plain(found[1]) == _plain(answer) else -1.0


def _plain(text: str) -> str:
    text = text.strip().strip("$*. ").removeprefix("\\(").removesuffix("\\)")
    boxed = WRAPPING.fullmatch(text.strip())
    text = re.sub(r"[\s$*]|(?<=\d),(?=\d{3})", "", boxed[1] if boxed else text).rstrip(".")
    try:
        return str(int(text))
    except ValueError:
        return text
