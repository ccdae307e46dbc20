"""`RunStatus`: what others can see of a run while it goes on, and after: `status.json` and `heartbeat`."""

from __future__ import annotations

import json
import os
import socket
import time
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

RunState = Literal["running", "stopped", "done", "failed"]
STATUS = "status.json"
HEARTBEAT = "heartbeat"
BEAT_SECONDS = 1.0


class RunStatus:
    """Keeps `status.json` and `heartbeat` of a run folder up to date; a context manager.

    Only rank 0 writes. A run that was killed stays "running", with a heartbeat that gets old.

    Files:
        status.json: {"state", "reason", "name", "step", "num_steps", "started", "updated", "host", "pid", "job",
            "restarts"}; job and restarts are Slurm's. Written whole, by renaming.
        heartbeat: empty; its time is that of the last sign of life.

    Args:
        name: of the algorithm.
    """

    def __init__(self, folder: Path, *, rank: int, name: str, num_steps: int):
        self._folder = folder
        self._enabled = rank == 0
        self._beaten = 0.0
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
            "restarts": int(os.environ.get("SLURM_RESTART_COUNT", "0")),
        }

    def __enter__(self) -> RunStatus:
        self._write()
        self.beat()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None:
            first = (str(error).splitlines() or [""])[0]
            self._end("failed", f"{type(error).__name__}: {first}")
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
        now = time.monotonic()
        if self._enabled and now - self._beaten >= BEAT_SECONDS:
            self._beaten = now
            (self._folder / HEARTBEAT).touch()

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
        self._folder.mkdir(parents=True, exist_ok=True)
        partial = self._folder / f".{STATUS}.partial"
        partial.write_text(json.dumps(self._values, indent=2) + "\n", encoding="utf-8")
        partial.replace(self._folder / STATUS)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
