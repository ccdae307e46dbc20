"""Progress on the terminal: steps done, rate, time left and the latest metrics."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import TextIO

LIVE_INTERVAL_SECONDS = 0.1  # a terminal redrawn for every step of a tiny model would cost more than the step


class Progress:
    """Reports the steps of one phase; a context manager.

    On a terminal one line is rewritten in place. Elsewhere (log files, CI) plain lines appear: the first step, then at
    most one per `interval_seconds`, and the last step. Only rank 0 writes.

        with Progress("grpo", num_steps=120, rank=mesh.rank) as progress:
            for step in range(120):
                progress.update(step + 1, {"reward": 0.5})

    Args:
        name: of the phase, begins each line.
        num_steps: steps of the whole phase.
        rank: global rank of this process.
        first_step: steps done before this process began (resume); they do not count for the rate.
        interval_seconds: between plain lines.
        stream: where to write; None is stderr, which keeps stdout free for results.
        clock: seconds, monotonic.

    Raises:
        ValueError: first_step outside 0..num_steps, or interval_seconds below 0.
    """

    def __init__(
        self,
        name: str,
        num_steps: int,
        *,
        rank: int,
        first_step: int = 0,
        interval_seconds: float = 10.0,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not 0 <= first_step <= num_steps:
            raise ValueError(f"first_step must be within 0..{num_steps} (num_steps), got {first_step}")
        if interval_seconds < 0.0:
            raise ValueError(f"interval_seconds must be at least 0, got {interval_seconds}")
        self._name, self._num_steps, self._first_step = name, num_steps, first_step
        self._stream, self._clock = stream or sys.stderr, clock
        self._enabled = rank == 0
        self._live = self._stream.isatty()
        self._interval_seconds = LIVE_INTERVAL_SECONDS if self._live else interval_seconds
        self._started = clock()
        self._shown_at: float | None = None
        self._pending: str | None = None  # the latest line, while it has not been shown

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def update(self, step: int, metrics: Mapping[str, float]) -> None:
        """Report that `step` steps of the phase are done."""
        if not self._enabled:
            return
        now = self._clock()
        self._pending = self._line(step, now - self._started, metrics)
        if self._shown_at is None or step >= self._num_steps or now - self._shown_at >= self._interval_seconds:
            self._show(now)

    def close(self) -> None:
        """Show the last update if it was held back, and leave the live line."""
        if self._pending is not None:
            self._show(self._clock())
        if self._live and self._shown_at is not None:
            self._stream.write("\n")
            self._stream.flush()
        self._shown_at = None  # a second close writes nothing

    def _show(self, now: float) -> None:
        assert self._pending is not None
        if self._live:
            width = shutil.get_terminal_size().columns - 1  # a wrapped line could not be rewritten in place
            self._stream.write(f"\r{self._pending[:width]}\x1b[K")
        else:
            self._stream.write(self._pending + "\n")
        self._stream.flush()
        self._shown_at, self._pending = now, None

    def _line(self, step: int, elapsed_seconds: float, metrics: Mapping[str, float]) -> str:
        num_done = step - self._first_step
        parts = [f"{self._name} {step}/{self._num_steps}"]
        if num_done > 0 and elapsed_seconds > 0.0:
            seconds_per_step = elapsed_seconds / num_done
            parts.append(_rate(seconds_per_step))
            parts.append(f"{_duration(seconds_per_step * (self._num_steps - step))} left")
        parts += [f"{name} {value:.4g}" for name, value in metrics.items()]
        return "  ".join(parts)


def _rate(seconds_per_step: float) -> str:
    """The form that is above 1, so that three digits say something."""
    if seconds_per_step >= 1.0:
        return f"{seconds_per_step:.3g} s/step"
    return f"{1.0 / seconds_per_step:.3g} steps/s"


def _duration(seconds: float) -> str:
    """45s, 2m05s or 3h07m."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}h{minutes:02d}m"
    return f"{minutes}m{rest:02d}s" if minutes else f"{rest}s"
