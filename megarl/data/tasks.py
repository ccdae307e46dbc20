"""Procedural tasks with verifiable answers: every example is a pure function of (seed, index)."""

import hashlib
from dataclasses import dataclass
from itertools import count

from megarl.data.prompts import PromptExample, user_message

SPLITS = ("train", "heldout")
_HELDOUT_SHARE = 10  # one digit string in ten is held out


def _draw(*key: object) -> int:
    """Return a 64-bit hash of `key`. One number at a time this is much faster than the tensor hash of `rollout`."""
    return int.from_bytes(hashlib.blake2b("/".join(map(str, key)).encode(), digest_size=8).digest(), "big")


@dataclass(frozen=True)
class SortDigits:
    """Sort the digits of a string: `314256>` asks for `123456`.

    A hash of the digits alone decides whether a string is held out (one in ten), so no seed can put a held-out prompt
    into training. Sorted answers do recur in both splits: six digits have only 5,005 of them.

    Raises:
        ValueError: `num_digits` outside 2 to 18.
    """

    num_digits: int = 6

    def __post_init__(self) -> None:
        if not 2 <= self.num_digits <= 18:
            raise ValueError(f"num_digits is {self.num_digits}; allowed: 2 to 18")

    def example(self, seed: int, index: int, split: str = "train") -> PromptExample:
        """Return example `index` (also its `prompt_id`) of a split; digits are uniform over the strings of the split.

        Raises:
            ValueError: `split` is neither "train" nor "heldout".
        """
        if split not in SPLITS:
            raise ValueError(f"split is {split!r}; allowed: {', '.join(SPLITS)}")
        numbers = (_draw(split, seed, index, attempt) % 10**self.num_digits for attempt in count())
        strings = (f"{number:0{self.num_digits}d}" for number in numbers)
        digits = next(string for string in strings if self._is_heldout(string) == (split == "heldout"))
        return PromptExample(index, user_message(f"{digits}>"), "".join(sorted(digits)))

    def demonstration(self, example: PromptExample, seed: int, right_fraction: float = 0.5) -> str:
        """Return a response for the warm start: right with probability `right_fraction`, else shuffled digits.

        A shuffle comes out sorted now and then (about once in 720, more often when digits repeat).

        Raises:
            ValueError: `right_fraction` outside 0 to 1.
        """
        if not 0 <= right_fraction <= 1:
            raise ValueError(f"right_fraction is {right_fraction}; allowed: 0 to 1")
        key = ("demonstration", seed, example.prompt_id)
        if _draw(*key) < right_fraction * 2**64:
            return example.answer
        return self._shuffle(example, *key)

    def wrong_answer(self, example: PromptExample, seed: int) -> str:
        """Return the digits in a wrong order, or, where all are the same, with the last one changed."""
        if len(set(example.answer)) == 1:
            return example.answer[:-1] + str((int(example.answer[-1]) + 1) % 10)
        shuffles = (self._shuffle(example, "wrong", seed, example.prompt_id, attempt) for attempt in count())
        return next(shuffle for shuffle in shuffles if shuffle != example.answer)

    def _shuffle(self, example: PromptExample, *key: object) -> str:
        places = sorted(range(self.num_digits), key=lambda place: _draw(*key, place))
        return "".join(example.text[place] for place in places)

    def _is_heldout(self, digits: str) -> bool:
        return _draw("split", digits) % _HELDOUT_SHARE == 0
