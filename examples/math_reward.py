"""Reward rule for mathematics whose responses end in a line "Answer: ...", as the prompts of DAPO-Math-17k ask for.

    --reward examples/math_reward.py:answer_line --no-require-finished

Source: arXiv 2503.14476, section 2.4: 1 for the right final answer, -1 for any other response. Deviation: answers are
compared as text after removing what typesets them, not as mathematical expressions.
"""

import re

LAST_LINE = re.compile(r"(?i)answer\s*:\s*([^\n]+)")


def answer_line(prompt: str, response: str, answer: str) -> float:
    """Return 1.0 if the last "Answer:" of the response is followed by the answer, else -1.0."""
    found = LAST_LINE.findall(response)
    return 1.0 if found and plain(found[-1]) == plain(answer) else -1.0


def plain(answer: str) -> str:
    """Return an answer without dollar signs, boxes, thousands separators, a final full stop and spaces; whole numbers
    without leading zeros."""
    text = answer.strip().strip("*").strip().rstrip(".").strip("$").strip()
    box = re.fullmatch(r"\\boxed\{(.*)\}", text)
    text = (box[1] if box else text).strip("$").replace("\\!", "").replace(" ", "")
    if re.fullmatch(r"-?\d{1,3}(,\d{3})+", text):
        text = text.replace(",", "")
    return str(int(text)) if re.fullmatch(r"[+-]?\d+", text) else text
