"""Command lines from config dataclasses: one flag per field, with its help and default; unknown flags fail."""

from __future__ import annotations

import argparse
import dataclasses
import sys
import types
import typing
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from megarl.run_folder import RunConfig
from parallel.launch import World, detect_world
from parallel.qwen import QwenShape

Settings = TypeVar("Settings")


def add_flags(parser: argparse.ArgumentParser, defaults: Any) -> None:
    """Add a flag for each simple field of a dataclass instance, whose values are the defaults.

    Fields that hold other dataclasses are left out: call this for each of them.
    """
    hints = typing.get_type_hints(type(defaults))
    group = parser.add_argument_group(type(defaults).__name__)
    for field in dataclasses.fields(defaults):
        default = getattr(defaults, field.name)
        if "help" not in field.metadata:
            continue
        flag = "--" + field.name.replace("_", "-")
        kind, choices = _kind(hints[field.name])
        text = f"{field.metadata['help']} (default: {default})".replace("%", "%%")
        if kind is bool:
            group.add_argument(flag, action=argparse.BooleanOptionalAction, default=default, help=text)
        else:
            metavar = None if choices else kind.__name__.upper()
            group.add_argument(flag, type=kind, choices=choices, default=default, metavar=metavar, help=text)


def read_flags(arguments: argparse.Namespace, defaults: Settings) -> Settings:
    """Return the dataclass instance with the values of the flags that `add_flags` added for it."""
    values = vars(arguments)
    fields = [field.name for field in dataclasses.fields(defaults) if "help" in field.metadata]  # type: ignore[arg-type]
    return dataclasses.replace(defaults, **{name: values[name] for name in fields})  # type: ignore[type-var]


def parse(description: str, sections: Sequence[Any], arguments: Sequence[str] | None = None) -> list[Any]:
    """Parse a command line into the given dataclass instances, whose values are the defaults.

    Returns: one instance per section, in order. Wrong flags or values end the process with status 2 and the reason.
    """
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=description, allow_abbrev=False, formatter_class=raw)
    for section in sections:
        add_flags(parser, section)
    parsed = parser.parse_args(arguments)
    try:
        return [read_flags(parsed, section) for section in sections]
    except ValueError as error:
        parser.error(str(error))


def checked(config: RunConfig) -> tuple[World, QwenShape]:
    """Find this process's world and check a config for it, before any process group exists.

    A wrong value ends the process with status 2; every rank prints the reason, since the launcher ends the others as
    soon as one has ended.
    """
    with refusing_wrong_values():
        world = detect_world()
        return world, config.check(world.world_size)


@contextmanager
def refusing_wrong_values() -> Iterator[None]:
    """End the process with status 2 and the reason when a ValueError comes out of the block."""
    try:
        yield
    except ValueError as error:
        sys.stderr.write(f"error: {error}\n")
        raise SystemExit(2) from None


def _kind(hint: Any) -> tuple[Any, tuple[str, ...] | None]:
    """Return (type, choices) of a field's annotation: T, T | None or Literal."""
    if typing.get_origin(hint) is typing.Literal:
        return str, typing.get_args(hint)
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        (inner,) = (part for part in typing.get_args(hint) if part is not type(None))
        return _kind(inner)
    return hint, None
