"""Who am I? Reads the launcher's environment, starts and ends the default process group.

Supported here: ``torchrun`` (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT) and a process started alone.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from parallel.cpu import adapt_megatron

TORCHRUN_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class World:
    """This process among all processes of the job."""

    rank: int
    world_size: int
    local_rank: int
    device: torch.device
    launcher: str


def detect_world(environment: Mapping[str, str] = os.environ) -> World:
    """Return rank, world size and device from the launcher's variables; starts nothing.

    Raises:
        ValueError: only a part of torchrun's variables is set, one is no integer, or the rank is outside the world.
    """
    present = [name for name in TORCHRUN_VARIABLES[:3] if name in environment]
    if not present:  # an address alone names no rank: shells and schedulers export it, too
        return World(0, 1, 0, _device(0), launcher="alone")
    missing = [name for name in TORCHRUN_VARIABLES if name not in environment]
    if missing:
        stated = ", ".join(f"{name}={environment[name]}" for name in present)
        raise ValueError(f"environment: {stated} is set but {', '.join(missing)} is not; use torchrun")
    rank, world_size, local_rank = (_integer(environment, name) for name in TORCHRUN_VARIABLES[:3])
    if not 0 <= rank < world_size:
        raise ValueError(f"environment: RANK={rank} must be at least 0 and below WORLD_SIZE={world_size}")
    return World(rank, world_size, local_rank, _device(local_rank), launcher="torchrun")


def _integer(environment: Mapping[str, str], name: str) -> int:
    try:
        return int(environment[name])
    except ValueError:
        raise ValueError(f"environment: {name}={environment[name]!r} is not an integer") from None


def _device(local_rank: int) -> torch.device:
    return torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")


def start(world: World, timeout_seconds: float = 600.0) -> None:
    """Start the default process group: NCCL on CUDA, gloo on CPU, where megatron-core is adapted first.

    Args:
        world: this process, from `detect_world`.
        timeout_seconds: longest wait of one collective before the job fails.
    """
    timeout = timedelta(seconds=timeout_seconds)
    if world.device.type == "cuda":
        torch.cuda.set_device(world.device)
        backend = "nccl"
    else:
        adapt_megatron()
        backend = "gloo"
    if world.launcher == "alone":
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
    else:
        dist.init_process_group(backend, rank=world.rank, world_size=world.world_size, timeout=timeout)


def stop() -> None:
    """Wait for all ranks, then end megatron-core's groups and the default process group."""
    from megatron.core import parallel_state

    dist.barrier()
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


@contextmanager
def running(world: World, timeout_seconds: float = 600.0) -> Iterator[World]:
    """`start` ... `stop`. After an exception groups are left to the dying process: others may hang in a collective."""
    start(world, timeout_seconds)
    yield world
    stop()
