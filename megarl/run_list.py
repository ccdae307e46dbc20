"""The runs below a folder and where they stand, from the files they leave; imports no torch."""

from __future__ import annotations

import json
import math
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import psutil

from megarl.run_status import HEARTBEAT, STATUS

METRICS = "metrics.jsonl"
MAX_BYTES = 2**20
"""Of a file that is read: longer ones are none of ours."""
CLOCK_SECONDS = 5.0
"""What two clocks of one machine may differ by."""
STATES = ("running", "lost", "stopped", "done", "failed", "unknown")
FINISHED = {"finished": "done", "failed": "failed"}
"""What `summary.json` says of a run without a status."""
OWN_FOLDERS = {"checkpoints", "critic", "hf", "logs", "rollouts", "wandb"}
"""Folders of a run that hold no other runs."""


class Unreadable(Exception):
    """A file doesn't hold what it should."""


@dataclass
class Run:
    """A run folder.

    Attributes:
        name: of the algorithm.
        state: one of `STATES`. "lost": it says running, but shows no sign of life. "unknown": nothing says.
        step, num_steps: None where nothing tells.
        metrics: numbers of the last valid record; "nan", "inf" and "-inf" for those that JSON lacks.
        age_seconds: since anything was written.
        notes: what is wrong with its files.
    """

    folder: Path
    name: str | None = None
    state: str = "unknown"
    reason: str | None = None
    step: int | None = None
    num_steps: int | None = None
    metrics: dict[str, float | str] = field(default_factory=dict)
    age_seconds: float = 0.0
    notes: list[str] = field(default_factory=list)


def find_runs(root: Path, refused: Callable[[OSError], None]) -> Iterator[Path]:
    """Yield the run folders at and below a folder, in order; hidden folders and links aren't entered.

    Args:
        refused: is told of folders that can't be read.
    """
    for folder, below, files in os.walk(root, onerror=refused):
        is_run = STATUS in files or {"config.json", METRICS} <= set(files)
        below[:] = sorted(name for name in below if not name.startswith(".") and not (is_run and name in OWN_FOLDERS))
        if is_run:
            yield Path(folder)


def read_run(folder: Path, stale_seconds: float, now: float | None = None) -> Run:
    """Return what the files of a run tell; whatever is in them, this doesn't fail.

    Args:
        stale_seconds: a running run that showed no sign of life for so long is lost.
        now: seconds since the epoch; None: the clock's.
    """
    run = Run(folder)
    now = time.time() if now is None else now
    status = _read(run, STATUS)
    config, summary = _read(run, "config.json"), _read(run, "summary.json")
    settings, recipe = config.get("run"), config.get("recipe")
    _read_metrics(run)
    run.name = _text(status.get("name")) or (_text(recipe.get("name")) if isinstance(recipe, Mapping) else None)
    run.reason = _text(status.get("reason"))
    run.step = _integer(status.get("step"))
    if run.step is None:
        run.step = _integer(run.metrics.get("step"))
    run.num_steps = _integer(status.get("num_steps"))
    if run.num_steps is None and isinstance(settings, Mapping):
        run.num_steps = _integer(settings.get("num_steps"))
    state = status.get("state") if status else FINISHED.get(str(summary.get("status")), "unknown")
    run.state = state if state in STATES else "unknown"
    if status and run.state != state:
        run.notes.append(f"{STATUS}: its state is none")
    ages = {name: _age_seconds(folder / name, now) for name in (HEARTBEAT, STATUS, METRICS, "config.json")}
    run.age_seconds = min((age for age in ages.values() if age is not None), default=0.0)
    if run.state == "running":
        _look_for_life(run, status, ages, stale_seconds)
    return run


def _look_for_life(run: Run, status: Mapping[str, Any], ages: Mapping[str, float | None], stale_seconds: float) -> None:
    """Turn "running" into "lost" for a run whose process is gone or silent."""
    beat = ages[HEARTBEAT] if ages[HEARTBEAT] is not None else ages[STATUS]
    if status.get("host") == socket.gethostname() and not lives(status.get("pid"), status.get("started")):
        run.state, run.reason = "lost", "its process is gone"
    elif beat is not None and beat > stale_seconds:
        run.state, run.reason = "lost", "no sign of life"


def process_of(folder: Path) -> int | None:
    """Return the process on this machine that a run is going on in; None if there is none, as far as can be told."""
    run = Run(folder)
    status = _read(run, STATUS)
    pid = _integer(status.get("pid"))
    here = status.get("state") == "running" and status.get("host") == socket.gethostname()
    return pid if here and lives(pid, status.get("started")) else None


def lives(pid: Any, started: Any) -> bool:
    """Whether this machine has the process that began a run then; another may have its number meanwhile."""
    if type(pid) is not int or not 0 < pid < 2**31:
        return False
    try:
        process = psutil.Process(pid)
        if process.status() == psutil.STATUS_ZOMBIE:
            return False
        begun = datetime.fromisoformat(started).timestamp()
        return process.create_time() <= begun + CLOCK_SECONDS
    except psutil.NoSuchProcess:
        return False
    except (psutil.Error, TypeError, ValueError, OverflowError):
        return True  # there is one, and nothing says that it is another


def _read(run: Run, name: str) -> dict[str, Any]:
    """Return the object in a file of the run; nothing, and perhaps a note, if there is none."""
    path = run.folder / name
    if not path.exists():
        return {}
    try:
        return _parse(_content(path))
    except (Unreadable, OSError) as error:
        run.notes.append(f"{name}: {_why(error)}")
        return {}


def _read_metrics(run: Run) -> None:
    """Take the numbers of the last record that is one; note what comes after it."""
    path = run.folder / METRICS
    if not path.exists():
        return
    try:
        lines = _content(path, end_only=True).splitlines()
    except (Unreadable, OSError) as error:
        run.notes.append(f"{METRICS}: {_why(error)}")
        return
    num_broken = 0
    for line in reversed(lines):
        try:
            record = _parse(line)
        except Unreadable:
            num_broken += 1
            continue
        numbers = {name: _number(value) for name, value in record.items()}
        run.metrics = {name: number for name, number in numbers.items() if number is not None}
        break
    if num_broken:
        run.notes.append(f"{METRICS}: its last {'line is' if num_broken == 1 else f'{num_broken} lines are'} broken")


def _content(path: Path, end_only: bool = False) -> bytes:
    """Return the content of a regular file, or the whole lines at its end."""
    if not path.is_file():
        raise Unreadable("is no file")
    size = path.stat().st_size
    if size > MAX_BYTES and not end_only:
        raise Unreadable(f"has {size} bytes")
    with path.open("rb") as file:
        if size <= MAX_BYTES:
            return file.read()
        file.seek(size - MAX_BYTES)
        return file.read().partition(b"\n")[2]


def _parse(content: bytes) -> dict[str, Any]:
    try:
        value = json.loads(content)
    except (ValueError, RecursionError):
        raise Unreadable("is cut off or no JSON" if content.strip() else "is empty") from None
    if not isinstance(value, dict):
        raise Unreadable("is no JSON object")
    return value


def _why(error: Exception) -> str:
    return error.strerror or "can't be read" if isinstance(error, OSError) else str(error)


def _text(value: Any) -> str | None:
    """Return a text that isn't empty."""
    return value if isinstance(value, str) and value else None


def _integer(value: Any) -> int | None:
    return value if type(value) is int and abs(value) < 2**63 else None


def _number(value: Any) -> float | str | None:
    """Return a number, as text if JSON has none such; None for anything else."""
    if value in ("nan", "inf", "-inf"):
        return str(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else repr(value)
    return _integer(value)


def _age_seconds(path: Path, now: float) -> float | None:
    """Return how long ago a file was written; 0 for the future of another machine's clock."""
    try:
        return max(now - path.stat().st_mtime, 0.0)
    except OSError:
        return None
