"""Folders that appear whole, or not at all."""

import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

FLUSH_SECONDS = 0.1
"""Between two rounds in which what is written is sent to the disk."""


@contextmanager
def appears_whole(target: Path) -> Iterator[Path]:
    """Give a hidden folder beside `target` to write into, which takes its name when all is written and on the disk. A
    process that is killed leaves only the hidden one, which the next attempt removes."""
    target = target.resolve()  # a link to an empty or a missing folder: that folder appears
    partial = partial_of(target)
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    with _flushing(partial):
        yield partial
    partial.replace(target)
    flush(target.parent)


def partial_of(target: Path) -> Path:
    """Return the hidden folder that becomes `target`."""
    return target.parent / f".{target.name}.partial"


@contextmanager
def _flushing(folder: Path) -> Iterator[None]:
    """Send what is written in a folder to the disk as it comes, so that the disk works while more is computed; at the
    end all is there."""
    ended = threading.Event()

    def run() -> None:
        while not ended.wait(FLUSH_SECONDS):
            for path in folder.iterdir():
                with suppress(OSError):  # renamed meanwhile; any other error comes back at the end
                    flush(path)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
    for path in [*folder.rglob("*"), folder]:
        flush(path)


def flush(path: Path) -> None:
    """Wait until a file or a folder is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
