"""List the runs below a folder: where each stands, why it ended, its last metrics and how old they are.

    megarl runs
    megarl runs /scratch/runs --state running --state lost
    megarl runs --json

A run that says it is running, but whose process on this machine is gone or whose heartbeat is old, is "lost". One from
before there was a status is "unknown" unless its summary tells its end.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megarl.commands import refusals, write
from megarl.run_list import STATES, Run, find_runs, read_run

SHOWN = ("score", "accuracy", "eval_accuracy", "loss", "response_tokens")
"""Metrics that the table has a column for, where a run has them."""
MAX_TEXT = 72
"""Longest text of a cell, in characters."""


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="megarl runs", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, nargs="?", default=Path("runs"), help="(default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="write a list of objects, with all metrics")
    parser.add_argument("--state", action="append", choices=STATES, help="only these; may be given several times")
    text = "silence after which a running run is lost (default: %(default)s)"
    parser.add_argument("--stale-seconds", type=float, default=1800.0, metavar="SECONDS", help=text)
    args = parser.parse_args(arguments)
    with refusals():
        if not 0 < args.stale_seconds < math.inf:
            raise ValueError(f"stale_seconds: got {args.stale_seconds}, allowed: above 0")
        if not args.folder.is_dir():
            raise ValueError(f"folder: got {str(args.folder)!r}, allowed: a folder")
        runs = [read_run(folder, args.stale_seconds) for folder in find_runs(args.folder, _say_refused)]
        runs = [run for run in runs if not args.state or run.state in args.state]
        write(_as_json(args.folder, runs) if args.json else table(args.folder, runs))


def table(root: Path, runs: Sequence[Run]) -> str:
    """Return the runs as aligned lines."""
    if not runs:
        return "no runs"
    shown = [name for name in SHOWN if any(name in run.metrics for run in runs)]
    rows = [["RUN", "ALGORITHM", "STATE", "STEP", *(name.upper() for name in shown), "AGE", "WHY"]]
    for run in runs:
        step = "-" if run.step is None else str(run.step)
        total = "" if run.num_steps is None else f"/{run.num_steps}"
        metrics = [_value(run.metrics.get(name)) for name in shown]
        why = "; ".join(filter(None, [run.reason, *run.notes]))
        rows.append([_path(root, run), run.name or "-", run.state, step + total, *metrics, _age(run.age_seconds), why])
    rows = [[_cell(text) for text in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    numbers = range(3, 5 + len(shown))  # step, metrics and age stand at the right
    lines = [
        "  ".join(
            text.rjust(width) if column in numbers else text.ljust(width)
            for column, (text, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
    return "\n".join(line.rstrip() for line in lines)


def harmless(text: str) -> str:
    """Return text with escapes for what isn't printable: it could move the cursor or hide other text."""
    return "".join(letter if letter.isprintable() else letter.encode("unicode_escape").decode() for letter in text)


def _as_json(root: Path, runs: Sequence[Run]) -> str:
    rows: list[dict[str, Any]] = [{**vars(run), "folder": str(run.folder), "run": _path(root, run)} for run in runs]
    return json.dumps(rows, indent=2, allow_nan=False)


def _path(root: Path, run: Run) -> str:
    return str(run.folder.relative_to(root)) if run.folder != root else str(root)


def _cell(text: str) -> str:
    text = harmless(text)
    return text if len(text) <= MAX_TEXT else text[: MAX_TEXT - 3] + "..."


def _value(value: float | str | None) -> str:
    return "-" if value is None else value if isinstance(value, str) else f"{value:.4g}"


def _age(seconds: float) -> str:
    """Return 45s, 12m, 3h07m or 5d02h."""
    minutes, hours, days = int(seconds // 60), int(seconds // 3600), int(seconds // 86400)
    if days:
        return f"{days}d{hours % 24:02d}h"
    if hours:
        return f"{hours}h{minutes % 60:02d}m"
    return f"{minutes}m" if minutes else f"{int(seconds)}s"


def _say_refused(error: OSError) -> None:
    sys.stderr.write(harmless(f"not read: {error}") + "\n")
