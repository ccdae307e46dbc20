"""How the ranks of a job find each other when no torchrun tells them: a `TCPStore` on rank 0, at any free port.

Under mpirun rank 0 tells the others its port by MPI. Under srun there is nothing to tell it by: all ranks know a row of
ports made from the job's ids. Rank 0 listens at the first free one and answers who names its job; the others ask at
each of them until they get an answer. So neither a stranger on a port nor another job on the node does any harm.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import re
import socket
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist

FIRST_PORT, NUM_PORTS = 20000, 12000
"""Below the range from which systems give ports to outgoing connections."""
NUM_TRIES = 16
MEETING_SECONDS = 25.0
"""Until ranks have met at a port that was asked for: a busy one is somebody else's."""
ANSWER_SECONDS = 2.0
GREETING = "megarl"


def expand_nodes(node_list: str) -> list[str]:
    """Return the hosts of a Slurm node list in order: ``nodeA,node[001-003,7]`` -> nodeA, node001, ... node7.

    Raises:
        ValueError: a bracket isn't closed, or a range isn't one.
    """
    hosts = []
    for item in re.findall(r"(?:[^,\[]|\[[^\]]*\]|\[)+", node_list):
        if item.count("[") != len(re.findall(r"\[[^\[\]]+\]", item)) or item.count("]") != item.count("["):
            raise ValueError(f"node list: got {node_list!r}, allowed: names and ranges like node[001-004,7]")
        parts = re.split(r"\[([^\]]+)\]", item)
        choices = [_expand_range(part, node_list) if number % 2 else [part] for number, part in enumerate(parts)]
        hosts += ["".join(each) for each in itertools.product(*choices)]
    return hosts


def _expand_range(text: str, node_list: str) -> list[str]:
    numbers = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        last = last or first
        if not (first.isdigit() and last.isdigit() and int(first) <= int(last)):
            raise ValueError(f"node list: got {node_list!r}, allowed: names and ranges like node[001-004,7]")
        numbers += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    return numbers


def tcp_address(host: str, port: int) -> str:
    """Return the URL of a host and port; an IPv6 address gets brackets."""
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def mpi_store(rank: int, world_size: int, timeout: timedelta) -> dist.Store:
    """Return a store that all ranks of an MPI job share.

    Raises:
        ValueError: mpi4py is missing, or sees another number of ranks than the launcher's variables state.
    """
    comm = _mpi().COMM_WORLD
    if (comm.rank, comm.size) != (rank, world_size):
        raise ValueError(
            f"mpirun: its variables state rank {rank} of {world_size}, mpi4py rank {comm.rank} of {comm.size}; "
            "mpi4py is built for another MPI than this mpirun"
        )
    if rank != 0:
        host, port = comm.bcast(None)
        return dist.TCPStore(host, port, world_size, is_master=False, timeout=timeout)
    store = dist.TCPStore("localhost", 0, world_size, is_master=True, timeout=timeout, wait_for_workers=False)
    comm.bcast((os.environ.get("MASTER_ADDR") or socket.gethostname(), store.port))
    return store


def end_mpi() -> None:
    """End MPI. Not done after an error: a failing rank would wait there for the others, which wait for it."""
    _mpi().Finalize()


def _mpi() -> Any:
    try:
        import mpi4py
    except ImportError as error:
        raise ValueError(f"launcher: got mpirun, allowed with mpi4py: pip install 'megarl[mpi]' ({error})") from None
    mpi4py.rc.finalize = False
    from mpi4py import MPI

    return MPI


def slurm_store(rank: int, world_size: int, environment: Mapping[str, str], timeout: timedelta) -> dist.Store:
    """Return a store that all ranks of a Slurm step share: on MASTER_ADDR, else the first node, at MASTER_PORT, else at
    the first free one of the step's ports.

    Raises:
        ValueError: MASTER_PORT is taken, none of the ports is free or leads to rank 0, or the host has no address.
    """
    host = environment.get("MASTER_ADDR") or expand_nodes(environment["SLURM_STEP_NODELIST"])[0]
    _check_resolves(host)
    name = ".".join(environment.get(part, "0") for part in ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"))
    asked = environment.get("MASTER_PORT")
    ports = [int(asked)] if asked else step_ports(name)
    if rank != 0:
        port = _ask(host, ports, name, rank, MEETING_SECONDS if asked else timeout.total_seconds())
        return dist.TCPStore(host, port, world_size, is_master=False, timeout=timeout)
    listener = _listen(ports, asked)
    store = dist.TCPStore("localhost", 0, world_size, is_master=True, timeout=timeout, wait_for_workers=False)
    threading.Thread(target=_answer, args=(listener, name, store.port, world_size), daemon=True).start()
    return store


def _check_resolves(host: str) -> None:
    try:
        socket.getaddrinfo(host, None)
    except OSError as error:
        raise ValueError(
            f"MASTER_ADDR: no address is known for {host!r} ({error}); set it to that of the step's first node, which "
            "`scontrol show node` states as NodeAddr"
        ) from None


def step_ports(name: str) -> list[int]:
    """Return the ports of a job, in the order in which they are tried."""
    digest = hashlib.sha256(name.encode()).digest()
    return [FIRST_PORT + int.from_bytes(digest[2 * i : 2 * i + 2], "big") % NUM_PORTS for i in range(NUM_TRIES)]


def _listen(ports: list[int], asked: str | None) -> socket.socket:
    both = socket.has_dualstack_ipv6()
    for port in ports:
        with suppress(OSError):
            family = socket.AF_INET6 if both else socket.AF_INET
            return socket.create_server(("", port), family=family, dualstack_ipv6=both)
    if asked:
        raise ValueError(f"MASTER_PORT: got {asked}, which is taken; allowed: a free port, or unset to have one found")
    raise ValueError(f"none of the ports {ports} is free")


def _answer(listener: socket.socket, name: str, port: int, world_size: int) -> None:
    """Tell the store's port to every other rank of the job."""
    missing = set(range(1, world_size))
    with listener:
        while missing:
            connection, _ = listener.accept()
            with connection, suppress(OSError, ValueError):
                connection.settimeout(ANSWER_SECONDS)
                greeting, job, rank = connection.recv(1000).decode().split()
                if (greeting, job) == (GREETING, name):
                    connection.sendall(f"{GREETING} {port}".encode())
                    missing.discard(int(rank))


def _ask(host: str, ports: list[int], name: str, rank: int, seconds: float) -> int:
    """Ask at the ports in turn until rank 0 of the job tells its store's."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        for port in ports:
            with suppress(OSError, ValueError), socket.create_connection((host, port), ANSWER_SECONDS) as connection:
                connection.sendall(f"{GREETING} {name} {rank}".encode())
                greeting, answer = connection.recv(1000).decode().split()
                if greeting == GREETING:
                    return int(answer)
        time.sleep(0.1)
    where = tcp_address(host, ports[0]) + (" (MASTER_PORT)" if len(ports) == 1 else " and its other ports")
    raise ValueError(f"rank 0 of job {name} was not met at {where} within {seconds:.0f} s")
