"""Who am I? Reads the launcher's environment, starts and ends the default process group.

Launchers: ``torchrun``; ``mpirun`` of Open MPI or MPICH, with mpi4py; ``srun`` with one task per rank; and none, for a
process started alone. How the ranks find each other is in `rendezvous.py`.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from parallel.cpu import adapt_megatron
from parallel.rendezvous import end_mpi, mpi_store, slurm_store

logger = logging.getLogger(__name__)

TORCHRUN_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
MPIRUN_VARIABLES = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),  # Open MPI
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),  # MPICH
)
SRUN_VARIABLES = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID")
"""Rank, size and local rank."""


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

    Looked for in this order: torchrun, mpirun, srun. One may start another: torchrun runs under srun, and MPICH's
    mpirun starts its helpers by srun. A batch script, which has a SLURM_PROCID but no SLURM_STEP_ID, is alone.

    Raises:
        ValueError: only a part of a launcher's variables is set, one is no integer, the rank is outside the world, or
            WORLD_SIZE states another size than mpirun or srun.
    """
    if any(name in environment for name in TORCHRUN_VARIABLES[:1] + TORCHRUN_VARIABLES[2:3]):
        return _from_variables("torchrun", environment, TORCHRUN_VARIABLES)
    for names in MPIRUN_VARIABLES:
        if names[0] in environment and not _given_by_srun(names, environment):
            return _from_variables("mpirun", environment, names)
    if "SLURM_STEP_ID" in environment and "SLURM_PROCID" in environment:
        return _from_variables("srun", environment, SRUN_VARIABLES)
    if "WORLD_SIZE" in environment:
        return _from_variables("torchrun", environment, TORCHRUN_VARIABLES)  # says what is missing
    return World(0, 1, 0, _device(0), launcher="alone")  # an address alone names no rank: schedulers export it, too


def _from_variables(launcher: str, environment: Mapping[str, str], names: tuple[str, ...]) -> World:
    missing = [name for name in names if name not in environment]
    if missing:
        stated = ", ".join(f"{name}={environment[name]}" for name in names if name in environment)
        raise ValueError(f"environment: {stated} is set but {', '.join(missing)} is not; use {launcher}")
    rank, world_size, local_rank = (_integer(environment, name) for name in names[:3])
    if not 0 <= rank < world_size:
        raise ValueError(f"environment: {names[0]}={rank} must be at least 0 and below {names[1]}={world_size}")
    other = environment.get("WORLD_SIZE", str(world_size))
    if other != str(world_size) and launcher != "torchrun":
        raise ValueError(f"environment: {names[1]}={world_size} of {launcher} and WORLD_SIZE={other} contradict")
    return World(rank, world_size, local_rank, _device(local_rank), launcher)


def _given_by_srun(names: tuple[str, ...], environment: Mapping[str, str]) -> bool:
    """Whether srun itself has set these variables (``--mpi=pmi2``): then they agree with its own."""
    pairs = zip(names[:2], SRUN_VARIABLES[:2], strict=True)
    return all(name in environment and environment[name] == environment.get(own) for name, own in pairs)


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

    Raises:
        ValueError: a port that was asked for is taken, or mpirun without mpi4py or with one for another MPI.
    """
    timeout = timedelta(seconds=timeout_seconds)
    if world.device.type == "cuda":
        torch.cuda.set_device(world.device)
        backend = "nccl"
    else:
        adapt_megatron()
        backend = "gloo"
    if world.launcher == "torchrun":
        dist.init_process_group(backend, rank=world.rank, world_size=world.world_size, timeout=timeout)
        return
    store: dist.Store
    if world.launcher == "mpirun":
        store = mpi_store(world.rank, world.world_size, timeout)
    elif world.launcher == "srun":
        store = slurm_store(world.rank, world.world_size, os.environ, timeout)
    else:
        store = dist.HashStore()
    dist.init_process_group(backend, store=store, rank=world.rank, world_size=world.world_size, timeout=timeout)


def stop(world: World) -> None:
    """Wait for all ranks, then end megatron-core's groups, the default process group and MPI."""
    from megatron.core import parallel_state

    dist.barrier()
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
    if world.launcher == "mpirun":
        end_mpi()


@contextmanager
def running(world: World, timeout_seconds: float = 600.0) -> Iterator[World]:
    """`start` ... `stop`. After an exception, which is logged with the rank, groups are left to the dying process:
    others may hang in a collective. The launcher ends them (srun: with ``--kill-on-bad-exit=1``)."""
    start(world, timeout_seconds)
    try:
        yield world
    except Exception:
        logger.exception("rank %d of %d failed", world.rank, world.world_size)
        raise
    stop(world)
