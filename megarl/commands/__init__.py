"""Sub-commands of `megarl`, and what they share: how a wrong value ends them, and how they write."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def refusals() -> Iterator[None]:
    """End the process with status 2 and the reason when a value is refused in the block (on every rank), or when the
    system refuses a file: no room, no permission."""
    try:
        yield
    except (ValueError, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        raise SystemExit(2) from None


def write(text: str) -> None:
    """Write a line to stdout, at once."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
