"""`megarl COMMAND ...`, also `python -m megarl COMMAND ...`; under torchrun: `torchrun ... -m megarl COMMAND ...`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence


def generate(arguments: Sequence[str]) -> None:
    """Generate responses to prompts with a model folder."""
    from megarl.commands.generate import main

    main(arguments)


def convert(arguments: Sequence[str]) -> None:
    """Convert weights between Hugging Face folders and checkpoints, compare and describe them."""
    from megarl.commands.convert import main

    main(arguments)


def runs(arguments: Sequence[str]) -> None:
    """List runs: where they stand, why they ended, their last metrics."""
    from megarl.commands.runs import main

    main(arguments)


COMMANDS = (generate, convert, runs)
"""The first line of each docstring is the command's help; modules are imported only by the command that needs them."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the sub-command that the first argument names with the other arguments."""
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(
        prog="megarl", description="Reinforcement learning of Qwen models.", epilog="megarl COMMAND --help: its flags"
    )
    chosen = parser.add_subparsers(metavar="COMMAND", required=True, title="commands")
    for command in COMMANDS:
        text = (command.__doc__ or "").split("\n")[0]
        chosen.add_parser(command.__name__, help=text, add_help=False).set_defaults(command=command)
    parser.parse_args(arguments[:1]).command(arguments[1:])


if __name__ == "__main__":
    main()
