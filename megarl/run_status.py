"""`RunStatus`: what others can see of a run while it goes on, and after: `status.json` and `heartbeat`."""

from __future__ import annotations

import json
import logging
import os
import socket
import time
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

logger = logging.getLogger(__name__)

RunState = Literal["running", "stopped", "done", "failed"]
STATUS = "status.json"
HEARTBEAT = "heartbeat"
BEAT_SECONDS = 1.0


class RunStatus:
    """Keeps `status.json` and `heartbeat` of a run folder up to date; a context manager.

    Only rank 0 writes. A run that was killed stays "running", with a heartbeat that gets old. What can't be written is
    warned about and doesn't end the run: it is news for others.

    Files:
        status.json: {"state", "reason", "name", "step", "num_steps", "started", "updated", "host", "pid", "job",
            "restarts"}; times are ISO's in UTC, job and restarts are Slurm's. Written whole, by renaming.
        heartbeat: empty; its time is that of the last sign of life.

    Args:
        name: of the algorithm.
        clock: seconds, monotonic.
    """

    def __init__(
        self, folder: Path, *, rank: int, name: str, num_steps: int, clock: Callable[[], float] = time.monotonic
    ):
        self._folder = folder
        self._enabled = rank == 0
        self._clock = clock
        self._beaten_at: float | None = None
        self._stopped: str | None = None
        self._values: dict[str, Any] = {
            "state": "running",
            "reason": None,
            "name": name,
            "step": 0,
            "num_steps": num_steps,
            "started": _now(),
            "updated": _now(),
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "job": os.environ.get("SLURM_JOB_ID"),
            "restarts": int(os.environ.get("SLURM_RESTART_COUNT") or 0),
        }

    def __enter__(self) -> RunStatus:
        self._write()
        self.beat()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None:
            first = next(iter(str(error).splitlines()), "")
            self._end("failed", f"{type(error).__name__}: {first}" if first else type(error).__name__)
        elif self._stopped is not None:
            self._end("stopped", self._stopped)
        else:
            self._end("done", None)

    def at_step(self, step: int) -> None:
        """Note how many steps are done."""
        self._values["step"] = step
        self._write()
        self.beat()

    def beat(self) -> None:
        """Show that the run is alive; cheap enough to call anywhere."""
        now = self._clock()
        if not self._enabled or (self._beaten_at is not None and now - self._beaten_at < BEAT_SECONDS):
            return
        self._beaten_at = now
        try:
            (self._folder / HEARTBEAT).touch()
        except OSError as error:
            logger.warning("no sign of life could be left: %s", error)

    def stop(self, reason: str) -> None:
        """Let the run end as stopped, not as done."""
        self._stopped = reason

    def _end(self, state: RunState, reason: str | None) -> None:
        self._values |= {"state": state, "reason": reason}
        self._write()

    def _write(self) -> None:
        if not self._enabled:
            return
        self._values["updated"] = _now()
        partial = self._folder / f".{STATUS}.partial"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            partial.write_text(json.dumps(self._values, indent=2) + "\n", encoding="utf-8")
            partial.replace(self._folder / STATUS)
        except OSError as error:
            logger.warning("the run's status could not be written: %s", error)


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")
