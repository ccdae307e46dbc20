"""Logging of a run: each rank to its own file in the run folder, rank 0 also to the terminal."""

from __future__ import annotations

import logging
import sys
from pathlib import Path


def log_to(folder: Path, rank: int) -> None:
    """Send log lines to `folder/logs/rank_N.log` (from INFO) and, on rank 0, to stderr (from WARNING)."""
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    form = logging.Formatter(f"%(asctime)s rank {rank} %(levelname)s %(name)s: %(message)s")
    to_file = logging.FileHandler(folder / "logs" / f"rank_{rank}.log", encoding="utf-8")
    handlers: list[logging.Handler] = [to_file]
    if rank == 0:
        to_terminal = logging.StreamHandler(sys.stderr)
        to_terminal.setLevel(logging.WARNING)
        handlers.append(to_terminal)
    for handler in handlers:
        handler.setFormatter(form)
    logging.basicConfig(level=logging.INFO, handlers=handlers, force=True)
