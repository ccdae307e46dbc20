"""How ranks find each other under srun and mpirun: node lists, ports, strangers on them."""

import itertools
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from parallel.rendezvous import expand_nodes, step_ports, tcp_address

ROOT = Path(__file__).parents[2]
CLEAN = {
    name: value
    for name, value in os.environ.items()
    if not name.startswith(("SLURM", "PMI", "OMPI", "MASTER", "RANK", "WORLD", "LOCAL_RANK"))
}
SCRIPT = """
import os, sys, torch, torch.distributed as dist
from parallel.launch import detect_world, running

with running(detect_world(), timeout_seconds=60) as world:
    total = torch.ones(1) * (world.rank + 1)
    dist.all_reduce(total)
    text = f"{world.launcher} {world.rank} of {world.world_size}, {world.local_rank} here, sum {int(total)}"
    with open(f"{sys.argv[1]}/{os.environ.get('SLURM_JOB_ID')}.{world.rank}", "w") as file:
        file.write(text)
"""


@pytest.mark.parametrize(
    ("node_list", "hosts"),
    [
        ("nodeA,nodeB[1-3],nodeC", ["nodeA", "nodeB1", "nodeB2", "nodeB3", "nodeC"]),
        ("node[001-004]", ["node001", "node002", "node003", "node004"]),
        ("n[3,5-7]", ["n3", "n5", "n6", "n7"]),
        ("gpu-[01-02],cpu1", ["gpu-01", "gpu-02", "cpu1"]),
        ("a[1-2]b", ["a1b", "a2b"]),
        ("single", ["single"]),
        ("fe80::1", ["fe80::1"]),
        ("r[1-2]n[08-09]", ["r1n08", "r1n09", "r2n08", "r2n09"]),
    ],
)
def test_node_lists_are_expanded_in_order_with_their_zeros(node_list, hosts):
    """RC62: the first one is where rank 0 is."""
    assert expand_nodes(node_list) == hosts


@pytest.mark.parametrize("node_list", ["n[1-", "n[3-1]", "n[a-b]", "n]1["])
def test_broken_node_lists_are_refused(node_list):
    with pytest.raises(ValueError, match="allowed: names and ranges"):
        expand_nodes(node_list)


def test_addresses_of_ipv6_get_brackets():
    """RC62: a URL without them names another port."""
    assert tcp_address("fe80::1", 29500) == "tcp://[fe80::1]:29500"
    assert tcp_address("node001", 29500) == "tcp://node001:29500"


def test_jobs_steps_and_restarts_have_other_ports():
    assert len({tuple(step_ports(name)) for name in ("7.0.0", "7.1.0", "7.0.1", "8.0.0")}) == 4
    assert all(20000 <= port < 32000 for port in step_ports("7.0.0"))


def start_step(folder: Path, job: int, number: int, **more: str) -> list[subprocess.Popen]:
    """Start the tasks of a step as srun would."""
    script = folder / "script.py"
    script.write_text(SCRIPT)
    step = {"SLURM_JOB_ID": str(job), "SLURM_STEP_ID": "0", "SLURM_NTASKS": str(number)}
    common = CLEAN | step | {"SLURM_STEP_NODELIST": "localhost", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | more
    return [
        subprocess.Popen(
            [sys.executable, str(script), str(folder)],
            env=common | {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(number)
    ]


def finish(processes: list[subprocess.Popen], seconds: float = 60) -> list[tuple[int, str, str]]:
    """Return code, output and errors of each, within the time."""
    try:
        ended = [process.communicate(timeout=seconds) for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [(process.returncode, *texts) for process, texts in zip(processes, ended, strict=True)]


def test_two_jobs_on_one_node_never_mix_though_their_ports_are_taken(tmp_path):
    """RC61: the first port of one job is held by a stranger, and both start at the same moment."""
    with socket.create_server(("", step_ports("71.0.0")[0])):
        jobs = [start_step(tmp_path, job, 2) for job in (71, 72)]
        for job in jobs:
            ended = finish(job)
            assert [code for code, *_ in ended] == [0, 0], ended
            assert [errors for *_, errors in ended] == ["", ""]
    for job, rank in itertools.product((71, 72), range(2)):
        assert (tmp_path / f"{job}.{rank}").read_text() == f"srun {rank} of 2, {rank} here, sum 3"


def test_a_port_that_was_asked_for_and_is_taken_ends_all_ranks_within_30_seconds(tmp_path):
    """RC61: the message names the port and the setting."""
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        ended = finish(start_step(tmp_path, 73, 2, MASTER_PORT=str(port)), seconds=45)
    assert all(code not in (0, None) for code, *_ in ended)
    assert f"MASTER_PORT: got {port}, which is taken" in ended[0][2]
    assert f"was not met at tcp://localhost:{port} (MASTER_PORT) within" in ended[1][2]


@pytest.mark.skipif(
    shutil.which("mpirun", path=str(Path(sys.executable).parent)) is None, reason="no mpirun: megarl[mpi]"
)
def test_mpirun_with_mpi4py(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    mpirun = str(Path(sys.executable).parent / "mpirun")
    environment = CLEAN | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "FI_TCP_IFACE": "lo"}
    words = [mpirun, "-n", "2", sys.executable, str(script), str(tmp_path)]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        assert (tmp_path / f"None.{rank}").read_text() == f"mpirun {rank} of 2, {rank} here, sum 3"
