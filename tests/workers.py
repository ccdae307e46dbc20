"""A pool of processes that run tests on several ranks.

Importing torch and megatron-core takes seconds: the processes are forked from one server that has imported them, and
live as long as the pytest session. Every job gets a fresh default process group (gloo).
"""

import contextlib
import faulthandler
import functools
import gc
import importlib.util
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

ROOT = Path(__file__).parents[1]

# Imported once, by the server that the workers are forked from.
PRELOADED = ("pytest", "parallel.model", "parallel.optimizer")

START_SECONDS = 180.0
STOP_SECONDS = 10.0
DUMP_SECONDS = 0.5


class RemoteTraceback(Exception):
    """Where an exception was raised in a worker: the cause of the exception that the test sees."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


class WorkerDied(Exception):
    """A worker ended without an answer."""


@dataclass(frozen=True)
class Job:
    """One call on all ranks. `call` is the pickled (function name, arguments), readable once the module is loaded."""

    module_file: str
    module_name: str
    call: bytes
    store_file: str
    world_size: int
    timeout_seconds: float


@dataclass(frozen=True)
class Worker:
    process: Any
    connection: Connection
    log_file: Path


class WorkerPool:
    """Up to `size` processes, started when a job first needs them."""

    def __init__(self, size: int = 8) -> None:
        self.size = size
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(list(PRELOADED))
        self._folder = tempfile.TemporaryDirectory(prefix="workers-")
        self._workers: list[Worker] = []
        self._count = 0

    def run(
        self, function: Callable[..., Any], world_size: int, *args: Any, timeout_seconds: float = 60.0
    ) -> list[Any]:
        """Call `function(world, *args)` on ranks 0 to world_size - 1, each with a fresh default process group.

        Args:
            function: defined at the top level of its module; it, `args` and the results are pickled.
            timeout_seconds: for the whole job, and for each of its collectives.

        Returns: the result of each rank.

        Raises:
            Exception: what the first rank to fail raised; its `__cause__` names the rank and shows the traceback.
            TimeoutError, WorkerDied: ranks gave no answer in time or ended; the message has the end of their logs.
        """
        if not 1 <= world_size <= self.size:
            raise ValueError(f"world_size: got {world_size}, allowed: 1 to {self.size}")
        workers = self._first_workers(world_size)
        job = self._job(function, world_size, args, timeout_seconds)
        try:
            for rank, worker in enumerate(workers):
                _send(worker.connection, (rank, job))
            return _results(workers, timeout_seconds)
        except BaseException:
            self._discard(workers)  # they may be anywhere in the job: the next one gets new processes
            raise

    def close(self) -> None:
        """End all workers."""
        for worker in self._workers:
            worker.connection.close()
        for worker in self._workers:
            worker.process.join(STOP_SECONDS)
        self._discard(self._workers)
        self._folder.cleanup()

    def _job(self, function: Callable[..., Any], world_size: int, args: tuple[Any, ...], timeout_seconds: float) -> Job:
        if "." in function.__qualname__:
            raise ValueError(f"function: got {function.__qualname__}, allowed: functions at the top level of a module")
        self._count += 1
        return Job(
            module_file=str(sys.modules[function.__module__].__file__),
            module_name=function.__module__,
            call=pickle.dumps((function.__name__, args)),
            store_file=str(Path(self._folder.name) / f"store-{self._count}"),
            world_size=world_size,
            timeout_seconds=timeout_seconds,
        )

    def _first_workers(self, world_size: int) -> list[Worker]:
        started = [self._start() for _ in range(world_size - len(self._workers))]
        self._workers += started
        try:
            for worker in started:
                _results([worker], START_SECONDS)
        except BaseException:
            self._discard(started)
            raise
        return self._workers[:world_size]

    def _start(self) -> Worker:
        self._count += 1
        log_file = Path(self._folder.name) / f"worker-{self._count}.log"
        connection, of_worker = self._context.Pipe()
        process = self._context.Process(target=_serve, args=(of_worker, log_file), daemon=True)
        # The server takes its environment from here. Threads that spin next to each other are slower than one.
        paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        with patch.dict(os.environ, OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="", PYTHONPATH=paths):
            process.start()
        of_worker.close()
        return Worker(process, connection, log_file)

    def _discard(self, workers: list[Worker]) -> None:
        for worker in workers:
            worker.process.kill()
            worker.process.join()
            worker.connection.close()
        self._workers = [worker for worker in self._workers if worker not in workers]


def _send(connection: Connection, message: object) -> None:
    """Plain pickle: `Connection.send` would share a tensor's memory, which ends with its process."""
    connection.send_bytes(pickle.dumps(message))


def _results(workers: list[Worker], timeout_seconds: float) -> list[Any]:
    """Wait for one answer, (result, error, traceback), of each worker; stop at the first error."""
    deadline = time.monotonic() + timeout_seconds
    results: list[Any] = [None] * len(workers)
    pending = {worker.connection: rank for rank, worker in enumerate(workers)}
    while pending:
        ready = wait(list(pending), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            raise TimeoutError(_describe_hang(workers, sorted(pending.values()), timeout_seconds))
        for connection in ready:
            rank = pending.pop(connection)
            try:
                results[rank], error, text = pickle.loads(connection.recv_bytes())
            except (EOFError, ConnectionError):
                raise WorkerDied(f"rank {rank} of {len(workers)} ended\n{_log_end(workers[rank])}") from None
            if error is not None:
                raise error from RemoteTraceback(f"rank {rank} of {len(workers)}:\n{text}")
    return results


def _describe_hang(workers: list[Worker], ranks: list[int], timeout_seconds: float) -> str:
    for rank in ranks:
        os.kill(workers[rank].process.pid, signal.SIGUSR1)  # writes the stacks to the log
    time.sleep(DUMP_SECONDS)
    logs = "\n".join(f"rank {rank}:\n{_log_end(workers[rank])}" for rank in ranks)
    return f"ranks {ranks} of {len(workers)} gave no answer within {timeout_seconds} s\n{logs}"


def _log_end(worker: Worker, num_characters: int = 4000) -> str:
    return worker.log_file.read_text(errors="replace")[-num_characters:]


def _serve(connection: Connection, log_file: Path) -> None:
    """Body of a worker: answer jobs until the pool closes the connection or its process ends."""
    with log_file.open("w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    threading.Thread(target=_exit_with_pool, daemon=True).start()
    faulthandler.register(signal.SIGUSR1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the pool decides
    from parallel.cpu import adapt_megatron

    adapt_megatron()
    gc.freeze()  # so that a collection looks only at what jobs have left
    _send(connection, (None, None, ""))
    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            _answer(connection, *pickle.loads(connection.recv_bytes()))
            gc.collect()  # groups in reference cycles: each has a thread and sockets


def _exit_with_pool() -> None:
    """Leave no process behind when pytest is killed during a job."""
    pool_process = multiprocessing.parent_process()
    assert pool_process is not None
    pool_process.join()
    os._exit(1)


def _answer(connection: Connection, rank: int, job: Job) -> None:
    """Run one job. A failure is reported before the group ends, so that it arrives before those that it causes."""
    with contextlib.ExitStack() as stack:
        try:
            result = _run(stack, rank, job)
            answer = pickle.dumps((result, None, ""))
        except Exception as error:
            answer = _failure(error)
        connection.send_bytes(answer)


def _run(stack: contextlib.ExitStack, rank: int, job: Job) -> Any:
    import torch
    import torch.distributed as dist
    from megatron.core import parallel_state

    from parallel.launch import World

    module = _load_module(job.module_file, job.module_name)
    name, args = pickle.loads(job.call)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(job.store_file, job.world_size),
        rank=rank,
        world_size=job.world_size,
        timeout=timedelta(seconds=job.timeout_seconds),
    )
    stack.callback(dist.destroy_process_group)
    stack.callback(parallel_state.destroy_model_parallel)
    world = World(rank, job.world_size, local_rank=rank, device=torch.device("cpu"), launcher="workers")
    result = vars(module)[name](world, *args)
    stack.callback(dist.barrier)  # before the groups end: other ranks may still be connecting to them
    return result


@functools.cache
def _load_module(file: str, name: str) -> ModuleType:
    """Import a test module by its path, under the name that pytest gave it: pickled classes refer to that name."""
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _failure(error: Exception) -> bytes:
    """The answer of a rank that failed. An exception that does not survive pickling is replaced by its text."""
    text = "".join(traceback.format_exception(error))
    try:
        answer = pickle.dumps((None, error, text))
        pickle.loads(answer)
    except Exception:
        answer = pickle.dumps((None, RuntimeError(repr(error)), text))
    return answer
