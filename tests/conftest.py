"""Fixtures of all tests: several ranks (`workers`) and one rank in pytest's own process (`single_world`)."""

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported: spinning threads slow down the other processes

import gc
import logging
from collections.abc import Iterator

import pytest

from parallel.launch import World, detect_world, running
from tests.workers import WorkerPool

logging.getLogger("megatron").setLevel(logging.ERROR)


@pytest.fixture(scope="session")
def workers() -> Iterator[WorkerPool]:
    """Processes for `workers.run(function, world_size, *args)`, where `function(world, *args)` runs on each rank."""
    pool = WorkerPool()
    yield pool
    pool.close()


@pytest.fixture
def single_world() -> Iterator[World]:
    """A world of one rank with its default process group, in this process."""
    with running(detect_world({})) as world:
        yield world
    gc.collect()  # groups in reference cycles: each has a thread and sockets
