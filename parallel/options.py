"""`option`: a dataclass field with its one-line help: command lines show every setting and its default."""

from __future__ import annotations

from dataclasses import field
from typing import Any


def option(default: Any, help: str) -> Any:
    """Return a dataclass field with a default and a help text (name the unit in it)."""
    return field(default=default, metadata={"help": help})
