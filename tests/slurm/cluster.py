"""A private Slurm cluster on this machine: its own daemons on free ports of the loopback device, its own keys.

It needs the programs of Slurm and munge, and no privileges. All its nodes are this machine: they have as many CPUs and
GPUs as the job scripts ask for, on paper.
"""

from __future__ import annotations

import getpass
import os
import secrets
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol")
SEARCH_PATH = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"
START_SECONDS = 40.0
CPUS, GPUS = 128, 8

CONFIG = """\
ClusterName=private
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={control_port}
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.sock,cred_expire=5
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=0,sched_min_interval=0
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=5
MailProg=/bin/true
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
GresTypes=gpu
NodeName=n[0-{last}] NodeHostname={host} NodeAddr=127.0.0.1 Port={ports} CPUs={cpus} RealMemory=4000 Gres=gpu:{gpus}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def missing_programs() -> list[str]:
    """Return the programs that a cluster needs and this machine lacks."""
    return [name for name in PROGRAMS if shutil.which(name, path=SEARCH_PATH) is None]


@dataclass(frozen=True)
class Cluster:
    """A running cluster, and commands on it."""

    folder: Path

    @property
    def environment(self) -> dict[str, str]:
        """With it, Slurm's commands talk to this cluster, and ranks meet on the loopback device."""
        loopback = {"UCX_NET_DEVICES": "lo", "FI_TCP_IFACE": "lo", "GLOO_SOCKET_IFNAME": "lo"}
        config = {"SLURM_CONF": str(self.folder / "slurm.conf"), "PATH": SEARCH_PATH}
        outer = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
        return {**outer, **loopback, **config}

    def run(self, *command: str, check: bool = True, **variables: str) -> str:
        """Run a command with further environment variables; returns what it prints."""
        environment = {**self.environment, **variables}
        done = subprocess.run(command, env=environment, text=True, capture_output=True, timeout=120, check=False)
        if check and done.returncode:
            raise RuntimeError(f"{' '.join(command)}: {done.stderr or done.stdout}")
        return done.stdout.strip()

    def state(self, job: str) -> str:
        """Return the state of a job, such as RUNNING; empty once Slurm has forgotten it."""
        words = self.run("scontrol", "show", "job", "-o", job, check=False).split()
        return next((word.partition("=")[2] for word in words if word.startswith("JobState=")), "")


@contextmanager
def private_cluster(folder: Path, num_nodes: int = 16) -> Iterator[Cluster]:
    """Start a cluster with its files in `folder`; everything it started is ended at the end.

    Raises:
        RuntimeError: it doesn't come up; with the end of the controller's log.
    """
    cluster = Cluster(folder)
    _write_files(folder, num_nodes)
    try:
        names = ("--socket=munge.sock", "--pid-file=munged.pid", "--log-file=munged.log", "--seed-file=seed")
        options = [f"{name.partition('=')[0]}={folder / name.partition('=')[2]}" for name in names]
        cluster.run("munged", "--force", f"--key-file={folder / 'munge.key'}", *options)
        cluster.run("slurmctld", "-f", str(folder / "slurm.conf"))
        for number in range(num_nodes):
            cluster.run("slurmd", "-f", str(folder / "slurm.conf"), "-N", f"n{number}")
        _wait_for_nodes(cluster, num_nodes)
        yield cluster
    finally:
        cluster.run("scancel", "--user", getpass.getuser(), check=False)
        _wait_for_no_jobs(cluster)
        _end([int(file.read_text()) for file in folder.glob("*.pid") if file.read_text().strip()])


def _write_files(folder: Path, num_nodes: int) -> None:
    host, port = socket.gethostname().split(".")[0], _free_ports(num_nodes + 1)
    for name in ("state", *(f"n{number}" for number in range(num_nodes))):
        (folder / name).mkdir(parents=True, exist_ok=True)
    text = CONFIG.format(
        folder=folder,
        host=host,
        user=getpass.getuser(),
        control_port=port,
        ports=f"[{port + 1}-{port + num_nodes}]",
        last=num_nodes - 1,
        cpus=CPUS,
        gpus=GPUS,
    )
    (folder / "slurm.conf").write_text(text)
    for number in range(GPUS):
        (folder / f"gpu{number}").touch()
    (folder / "gres.conf").write_text(f"Name=gpu File={folder}/gpu[0-{GPUS - 1}]\n")
    (folder / "munge.key").write_bytes(secrets.token_bytes(128))
    (folder / "munge.key").chmod(0o600)
    folder.chmod(0o755)  # munge refuses a socket in a folder that others can't enter


def _free_ports(number: int) -> int:
    """Return the first of so many free ports in a row."""
    for _ in range(100):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            first = probe.getsockname()[1]
        taken = []
        try:
            taken = [socket.create_server(("127.0.0.1", first + index)) for index in range(number)]
        except (OSError, OverflowError):
            continue
        finally:
            for server in taken:
                server.close()
        return first
    raise RuntimeError(f"found no {number} free ports in a row")


def _wait_for_nodes(cluster: Cluster, num_nodes: int) -> None:
    deadline = time.monotonic() + START_SECONDS
    while cluster.run("sinfo", "-h", "-t", "idle", "-o", "%D", check=False) != str(num_nodes):
        if time.monotonic() > deadline:
            log = (cluster.folder / "slurmctld.log").read_text()[-2000:]
            raise RuntimeError(f"the nodes of the private cluster don't come up:\n{log}")
        time.sleep(0.2)


def _wait_for_no_jobs(cluster: Cluster) -> None:
    deadline = time.monotonic() + 15.0
    while cluster.run("squeue", "-h", check=False) and time.monotonic() < deadline:
        time.sleep(0.2)


def _end(pids: Sequence[int]) -> None:
    """End processes: asked first, then killed."""
    for sent, seconds in ((signal.SIGTERM, 5.0), (signal.SIGKILL, 1.0)):
        for pid in filter(_runs, pids):
            os.kill(pid, sent)
        deadline = time.monotonic() + seconds
        while any(map(_runs, pids)) and time.monotonic() < deadline:
            time.sleep(0.05)


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False
