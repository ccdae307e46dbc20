"""Convert weights between Hugging Face folders and megatron-core checkpoints, compare and describe them.

    megarl convert to-megatron HF_DIR CHECKPOINT --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2
    megarl convert to-hf CHECKPOINT HF_DIR --max-shard-size 5GB
    megarl convert verify A B
    megarl convert inspect DIR

One process without torchrun; one parameter is in memory at a time. A checkpoint is the same for every layout: the sizes
given to to-megatron are only checked to fit the model.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from pathlib import Path

from megarl.commands import refusals, write
from megarl.conversion import describe, differences, to_hf, to_megatron
from parallel.mesh import Layout

UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def parse_size(text: str) -> int:
    """Return the bytes of `5GB`, `300MiB` or `1000`.

    Raises:
        ValueError: it is no such size.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text.strip())
    if match is None or match[2].upper() not in UNITS:
        raise ValueError(f"max_shard_size: got {text!r}, allowed: bytes, or a number with KB, MB, GB, KiB, MiB, GiB")
    return int(float(match[1]) * UNITS[match[2].upper()])


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="megarl convert",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    _add_to_megatron(commands.add_parser("to-megatron", allow_abbrev=False, help="Hugging Face folder -> checkpoint"))
    _add_to_hf(commands.add_parser("to-hf", allow_abbrev=False, help="checkpoint -> Hugging Face folder"))
    verify = commands.add_parser("verify", help="are two models equal, bit for bit? Status 1 if not")
    for name in ("left", "right"):
        verify.add_argument(name, type=Path, help="a Hugging Face folder or a checkpoint")
    inspect = commands.add_parser("inspect", help="what is it, and which layouts fit?")
    inspect.add_argument("path", type=Path, help="a Hugging Face folder or a checkpoint")
    args = parser.parse_args(arguments)
    with refusals():
        RUN[args.command](args)


def _add_to_megatron(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", type=Path, help="a Hugging Face folder")
    parser.add_argument("target", type=Path, help="a new folder")
    for axis in ("tensor", "pipeline"):
        flag = f"--{axis}-model-parallel-size"
        parser.add_argument(flag, type=int, default=1, metavar="N", help="must fit the model (default: %(default)s)")


def _add_to_hf(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", type=Path, help="a checkpoint")
    parser.add_argument("target", type=Path, help="a new folder")
    parser.add_argument("--max-shard-size", default="5GB", metavar="SIZE", help="of a file (default: %(default)s)")


def _to_megatron(args: argparse.Namespace) -> None:
    to_megatron(args.source, args.target, Layout(args.tensor_model_parallel_size, args.pipeline_model_parallel_size))
    write(f"{args.target}: whole; megarl convert verify {args.source} {args.target} compares them")


def _to_hf(args: argparse.Namespace) -> None:
    to_hf(args.source, args.target, parse_size(args.max_shard_size))
    write(f"{args.target}: whole; megarl convert verify {args.source} {args.target} compares them")


def _verify(args: argparse.Namespace) -> None:
    number = 0
    for difference in differences(args.left, args.right):
        number += 1
        write(f"{difference.name}: {difference.what}")
    write(f"{number} tensors differ" if number else "equal, bit for bit")
    if number:
        raise SystemExit(1)


def _inspect(args: argparse.Namespace) -> None:
    rows = describe(args.path)
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        write(f"{name.ljust(width)}  {value}")


RUN = {"to-megatron": _to_megatron, "to-hf": _to_hf, "verify": _verify, "inspect": _inspect}
