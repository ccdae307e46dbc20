"""The files of a run's checkpoints: which there are, which are whole, which are kept.

checkpoints/
    latest                   name of the newest checkpoint that is whole and on the disk
    step_000020/             appears whole, by renaming
        policy/, critic/     weights and optimizer, see `parallel.stored_pieces` and `parallel.sharded_state`
        state.pt             what else the next step depends on
        info.json            metrics and position, for people and for what is kept
        SHA256SUMS           of all other files; also read by `sha256sum --check`
    .step_000040.partial/    being written, or left by a process that was killed
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from parallel.options import option
from parallel.whole_folder import flush

CHECKPOINTS = "checkpoints"
"""Name of the folder of a run's checkpoints."""
LATEST = "latest"
NAME = re.compile(r"step_\d{6,}(_update_\d{3,})?")
"""Of a checkpoint."""
STATE = "state.pt"
INFO = "info.json"
SUMS = "SHA256SUMS"


@dataclass(frozen=True)
class CheckpointSettings:
    """When checkpoints are written and which are kept."""

    save_every: int = option(20, "training steps between checkpoints; 0: only when the run is stopped")
    save_every_updates: int = option(0, "also after so many optimizer steps within a training step; 0: never")
    save_async: bool = option(True, "write in the background while training goes on")
    keep_last: int = option(2, "newest checkpoints to keep")
    keep_best: int = option(0, "further checkpoints to keep, those best by best_metric")
    best_metric: str = option("eval_accuracy", "metric of a step that keep_best compares")
    best_is: Literal["highest", "lowest"] = option("highest", "whether a higher or a lower best_metric is better")
    save_rollouts: bool = option(
        True, "save each step's responses, so that a restarted run need not generate them again"
    )

    def check(self) -> None:
        """Raise ValueError for a value that isn't allowed, naming field, value and allowed values."""
        for name, least in (("save_every", 0), ("save_every_updates", 0), ("keep_last", 1), ("keep_best", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name}: got {getattr(self, name)}, allowed: from {least}")
        if self.best_is not in ("highest", "lowest"):
            raise ValueError(f"best_is: got {self.best_is!r}, allowed: highest, lowest")


class CheckpointFolder:
    """A run's folder of checkpoints. Only one rank may write through it."""

    def __init__(self, root: Path):
        self.root = root

    def path(self, name: str) -> Path:
        """Return the folder of a checkpoint."""
        return self.root / name

    def names(self) -> list[str]:
        """Return the checkpoints that were written to their end, oldest first. Folders of other names, and links, are
        left alone."""
        found = [path.parent for path in self.root.glob(f"*/{SUMS}")]
        return sorted(path.name for path in found if NAME.fullmatch(path.name) and not path.is_symlink())

    def unfinished(self) -> list[str]:
        """Return the names of folders that a process has left half-written."""
        return sorted(path.name for path in self.root.glob(".*.partial") if path.is_dir())

    def info(self, name: str) -> dict[str, Any]:
        """Return what `info.json` tells of a checkpoint; nothing if it can't be read."""
        try:
            content = json.loads((self.path(name) / INFO).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return content if isinstance(content, dict) else {}

    def problem(self, name: str, part: int = 0, parts: int = 1) -> str | None:
        """Compare the files of a checkpoint with their checksums; returns what is wrong.

        Args:
            part, parts: look at every `parts`-th file, from number `part` on: ranks share the work.
        """
        folder = self.path(name)
        try:
            lines = (line.partition("  ") for line in (folder / SUMS).read_text(encoding="utf-8").splitlines())
            expected = {file: digits for digits, _, file in lines}
            different = sorted(set(expected) ^ (files_of(folder) - {SUMS}))
            if different:
                return f"{folder / different[0]} is missing, or not in {SUMS}"
            for file in sorted(expected)[part::parts]:
                if checksum(folder / file) != expected[file]:
                    return f"{folder / file} is not as it was written"
        except (OSError, ValueError) as error:
            return f"{folder}: {error}"
        if not isinstance(self.info(name).get("optimizer_steps"), dict):
            return f"{folder / INFO} doesn't say how many optimizer steps were taken"
        return None

    def set_aside(self, name: str) -> Path:
        """Rename a checkpoint that is not right, so that it counts as none; returns where it is."""
        aside = self.root / f"{name}.damaged"
        shutil.rmtree(aside, ignore_errors=True)
        self.path(name).rename(aside)
        return aside

    def move_latest(self, name: str) -> None:
        """Let `latest` name a checkpoint; a reader sees the old name or the new one."""
        partial = self.root / f".{LATEST}.partial"
        partial.write_text(name + "\n", encoding="utf-8")
        flush(partial)
        partial.replace(self.root / LATEST)
        flush(self.root)

    def retain(self, settings: CheckpointSettings) -> list[str]:
        """Remove all checkpoints but those to keep (`kept`) and what was left half-written; returns the removed."""
        names = self.names()
        found = {name: self.info(name).get("metrics") for name in names}
        metrics = {
            name: one.get(settings.best_metric) if isinstance(one, dict) else None for name, one in found.items()
        }
        keep = kept(names, metrics, settings)
        removed = [name for name in names if name not in keep]
        for name in removed:
            (self.path(name) / SUMS).unlink()  # from now on it is no checkpoint, if this process is killed
            shutil.rmtree(self.path(name))
        for name in self.unfinished():
            shutil.rmtree(self.path(name))
        return removed

    def check_room(self, needed: int, settings: CheckpointSettings) -> None:
        """Raise OSError if a checkpoint of so many bytes doesn't fit on the disk."""
        free = shutil.disk_usage(self.root).free
        if needed > free:
            raise OSError(
                errno.ENOSPC,
                f"a checkpoint needs {needed / 2**30:.2f} GiB, free are {free / 2**30:.2f} GiB: make room, keep fewer "
                f"(keep_last is {settings.keep_last}, keep_best {settings.keep_best}) or use another output folder",
                str(self.root),
            )


def kept(names: Sequence[str], metrics: Mapping[str, Any], settings: CheckpointSettings) -> set[str]:
    """Return which checkpoints to keep: the `keep_last` newest, and the `keep_best` best of all.

    Of equally good ones the newer counts as better. A checkpoint whose metric is missing or no number is never among
    the best. With `keep_best` 0 only the newest are kept; the newest one always is.

    Args:
        names: oldest first.
        metrics: the value of `best_metric` of each.
    """
    numbers = [name for name in names if isinstance(metrics[name], int | float) and math.isfinite(metrics[name])]
    sign = 1 if settings.best_is == "highest" else -1
    best = sorted(numbers, key=lambda name: (sign * metrics[name], names.index(name)), reverse=True)
    return {*names[-settings.keep_last :], *best[: settings.keep_best]}


def files_of(folder: Path) -> set[str]:
    """Return the files below a folder, as its checksums name them."""
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def checksum(path: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_whole(path: Path, content: bytes) -> None:
    """Write a file that appears whole and on the disk, or not at all."""
    partial = path.with_name(f".{path.name}.partial")
    with partial.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
    flush(path.parent)
