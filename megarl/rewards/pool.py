"""`RewardPool`: threads that call reward rules. A call that hangs costs a thread, never the run or its end."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass, field

MAX_ABANDONED = 16
"""Threads left behind in hanging calls before the run is ended: each holds memory, and perhaps a processor."""


class RewardTimeout(Exception):
    """A call gave no answer in time."""


@dataclass(eq=False)
class _Call:
    function: Callable[[], float]
    future: Future[float] = field(default_factory=Future)
    deadline: float = math.inf  # until the call begins


class RewardPool:
    """Calls functions in a few threads, in the order they are submitted.

    A call that gives no answer in time gets the exception `RewardTimeout`; Python can't end its thread, which is left
    behind and replaced by a new one. Time counts from when a call begins, not from when it is submitted. Threads are
    daemons: none keeps the process from ending. They exist while there is something to call.

    Not caught: a call that hangs in C code without releasing Python's lock (a regular expression) stops all threads.

    Args:
        num_threads: 0: `submit` itself calls, in its caller's thread, without a limit of time.
        timeout_seconds: longest duration of a call.
        max_abandoned: so many threads left behind at a time are too many.
    """

    def __init__(self, num_threads: int = 1, timeout_seconds: float = math.inf, max_abandoned: int = MAX_ABANDONED):
        self.num_threads = num_threads
        self.timeout_seconds = timeout_seconds
        self.max_abandoned = max_abandoned
        self._lock = threading.Lock()  # of all that follows
        self._waiting: deque[_Call] = deque()
        self._running: dict[threading.Thread, _Call | None] = {}  # None: between two calls
        self._abandoned: list[threading.Thread] = []

    def submit(self, function: Callable[[], float]) -> Future[float]:
        """Call the function as soon as a thread is free; returns what will hold its result or exception."""
        call = _Call(function)
        if not self.num_threads:
            _answer(call.future, *_outcome(call))
            return call.future
        with self._lock:
            self._waiting.append(call)
            self._start_threads()
        return call.future

    def wait(self, future: Future[float], seconds: float) -> bool:
        """Wait for a call, but at most so long; returns whether it is done.

        Raises:
            RuntimeError: see `replace_hanging`.
        """
        until = time.monotonic() + seconds
        while True:
            look_again = self.replace_hanging()
            left = until - time.monotonic()
            if future.done() or left <= 0:
                return future.done()
            wait([future], min(left, max(look_again - time.monotonic(), 0.0)))

    def replace_hanging(self) -> float:
        """Give up the calls whose time is over; returns when to look again (`time.monotonic`).

        Raises:
            RuntimeError: too many threads were left behind in calls that still hang.
        """
        with self._lock:
            now = time.monotonic()
            for thread, call in list(self._running.items()):
                if call is not None and call.deadline <= now:
                    del self._running[thread]
                    self._abandoned.append(thread)
                    call.future.set_exception(RewardTimeout())
            self._abandoned = [thread for thread in self._abandoned if thread.is_alive()]
            if len(self._abandoned) >= self.max_abandoned:
                raise RuntimeError(
                    f"{len(self._abandoned)} calls of the reward hang in this process: each gave no answer within "
                    f"{self.timeout_seconds:g} s (reward_timeout_seconds) and can't be ended; let the reward limit its "
                    "own time"
                )
            self._start_threads()
            deadlines = [call.deadline for call in self._running.values() if call is not None]
            return min(deadlines, default=now + self.timeout_seconds)  # of one that begins from now on: no earlier

    def cancel(self) -> None:
        """Call nothing that hasn't begun."""
        with self._lock:
            for call in self._waiting:
                call.future.cancel()
            self._waiting.clear()

    def _start_threads(self) -> None:
        """Have as many threads as there is work for."""
        idle = sum(call is None for call in self._running.values())
        for _ in range(min(self.num_threads - len(self._running), len(self._waiting) - idle)):
            thread = threading.Thread(target=self._work, name="reward", daemon=True)
            self._running[thread] = None
            thread.start()

    def _work(self) -> None:
        """Body of a thread: make calls until none waits, or until the thread is given up."""
        thread = threading.current_thread()
        while True:
            with self._lock:
                if not self._waiting:
                    del self._running[thread]
                    return
                call = self._waiting.popleft()
                call.deadline = time.monotonic() + self.timeout_seconds
                self._running[thread] = call
            result, error = _outcome(call)
            with self._lock:
                if self._running.get(thread) is not call:
                    return  # given up meanwhile
                self._running[thread] = None
                if time.monotonic() >= call.deadline:  # as if it had been looked at just then
                    error = RewardTimeout()
                _answer(call.future, result, error)


def _outcome(call: _Call) -> tuple[float, BaseException | None]:
    try:
        return call.function(), None
    except BaseException as error:  # it is for whoever waits
        return math.nan, error


def _answer(future: Future[float], result: float, error: BaseException | None) -> None:
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)
