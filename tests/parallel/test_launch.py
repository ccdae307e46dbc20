"""Rank and world size from the environment; starting and ending the process group in processes of their own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from parallel.launch import World, detect_world

ROOT = Path(__file__).parents[2]
COMPLETE = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "node1", "MASTER_PORT": "29500"}
ON_CPU = pytest.mark.skipif(torch.cuda.is_available(), reason="names the CPU as device")


@ON_CPU
def test_process_without_a_launcher_is_alone():
    assert detect_world({}) == World(0, 1, 0, torch.device("cpu"), launcher="alone")


@ON_CPU
def test_torchrun_gives_rank_world_size_and_local_rank():
    assert detect_world(COMPLETE) == World(3, 8, 1, torch.device("cpu"), launcher="torchrun")


def test_address_alone_is_no_launcher():
    """Shells and schedulers export it for other programs."""
    assert detect_world({"MASTER_ADDR": "node1", "MASTER_PORT": "29500"}).launcher == "alone"


@pytest.mark.parametrize("missing", COMPLETE)
def test_environment_that_lacks_one_variable_is_refused(missing):
    environment = {name: value for name, value in COMPLETE.items() if name != missing}
    with pytest.raises(ValueError, match=f"is set but {missing} is not; use torchrun"):
        detect_world(environment)


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "LOCAL_RANK"])
def test_one_variable_alone_is_refused(name):
    """Else every process of a job would take itself for rank 0 of 1."""
    with pytest.raises(ValueError, match=f"environment: {name}=1 is set but .* is not"):
        detect_world({name: "1"})


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "LOCAL_RANK"])
def test_variable_that_is_no_integer_is_refused(name):
    with pytest.raises(ValueError, match=f"environment: {name}='one' is not an integer"):
        detect_world(COMPLETE | {name: "one"})


@pytest.mark.parametrize(("rank", "world_size"), [("8", "8"), ("-1", "8"), ("0", "0")])
def test_rank_outside_the_world_is_refused(rank, world_size):
    with pytest.raises(ValueError, match=f"RANK={rank} must be at least 0 and below WORLD_SIZE={world_size}"):
        detect_world(COMPLETE | {"RANK": rank, "WORLD_SIZE": world_size})


OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "8", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}
MPICH = {"PMI_RANK": "3", "PMI_SIZE": "8", "MPI_LOCALRANKID": "1"}
SRUN = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "5", "SLURM_NTASKS": "16", "SLURM_LOCALID": "2"}
BATCH_SCRIPT = {"SLURM_PROCID": "0", "SLURM_NTASKS": "16", "SLURM_LOCALID": "0"}
SRUN_WITH_PMI2 = SRUN | {"PMI_RANK": "5", "PMI_SIZE": "16"}


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        (OPEN_MPI, ("mpirun", 3, 8, 1)),
        (MPICH, ("mpirun", 3, 8, 1)),
        (SRUN, ("srun", 5, 16, 2)),
        (SRUN_WITH_PMI2, ("srun", 5, 16, 2)),
        (BATCH_SCRIPT, ("alone", 0, 1, 0)),
        (SRUN | MPICH, ("mpirun", 3, 8, 1)),  # MPICH's helpers are started by srun
        (SRUN | COMPLETE, ("torchrun", 3, 8, 1)),  # torchrun under srun
    ],
)
def test_launchers_are_told_apart_also_where_one_starts_another(environment, expected):
    world = detect_world(environment)
    assert (world.launcher, world.rank, world.world_size, world.local_rank) == expected


@pytest.mark.parametrize(("environment", "size"), [(OPEN_MPI, 8), (MPICH, 8), (SRUN, 16)])
def test_contradicting_sizes_are_refused_with_both_values(environment, size):
    with pytest.raises(ValueError, match=rf"={size} of \w+ and WORLD_SIZE=4 contradict"):
        detect_world(environment | {"WORLD_SIZE": "4"})


def run_script(folder: Path, script: str, num_processes: int) -> subprocess.CompletedProcess:
    """Run a script under torchrun, or alone for 0 processes, within 120 seconds."""
    path = folder / "script.py"
    path.write_text(script)
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_processes}"]
    inherited = {name: value for name, value in os.environ.items() if name not in COMPLETE}
    return subprocess.run(
        [sys.executable, *(launcher if num_processes else []), str(path)],
        env=inherited | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )


ALONE = """
import torch.distributed as dist
from parallel.launch import detect_world, running
from parallel.mesh import Layout, build_mesh

for _ in range(2):
    with running(detect_world(), timeout_seconds=30) as world:
        mesh = build_mesh(Layout(), world)
        print("world", dist.get_world_size(), dist.get_backend(), mesh.data_size)
    print("still running", dist.is_initialized())
"""


def test_groups_are_gone_after_a_clean_end_and_can_be_started_again(tmp_path):
    """RC64: a clean end prints no errors."""
    done = run_script(tmp_path, ALONE, num_processes=0)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == ["world 1 gloo 1", "still running False"] * 2


ONE_FAILS = """
import sys, torch
import torch.distributed as dist
from parallel.launch import detect_world, running

with running(detect_world(), timeout_seconds=100) as world:
    dist.all_reduce(torch.ones(1))
    if world.rank == 1:
        raise RuntimeError("the reward of rank 1 failed")
    dist.all_reduce(torch.ones(1))
    print("rank 0 went on")
"""


def test_failing_rank_ends_the_job_with_its_own_error(tmp_path):
    """RC64: rank 0 waits in a collective of up to 100 seconds, but the job ends when rank 1 has died."""
    done = run_script(tmp_path, ONE_FAILS, num_processes=2)
    assert done.returncode != 0
    assert "RuntimeError: the reward of rank 1 failed" in done.stderr
    assert "went on" not in done.stdout
