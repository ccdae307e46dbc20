"""A private Slurm cluster on this host: munged, slurmctld and several slurmd on loopback, without systemd.

    python tests/slurm/cluster.py                     # starts one, prints how to use it, ends it on Ctrl-C
    python tests/slurm/cluster.py sbatch --wait FILE  # runs a command in one, ends it with the command

Nodes are called n0, n1, ... (names that resolve nowhere) and claim CPUs and GPUs that do not exist: Slurm hands out
what it was told about, so headers written for large nodes are accepted.
"""

from __future__ import annotations

import argparse
import contextlib
import getpass
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "squeue", "scancel")
INSTALL = "apt-get install -y --no-install-recommends slurmctld slurmd slurm-client munge"
START_SECONDS = 30.0
POLL_SECONDS = 0.2
LOOPBACK_VARIABLES = ("GLOO_SOCKET_IFNAME", "FI_TCP_IFACE", "UCX_NET_DEVICES", "HYDRA_IFACE")

CONFIG = """\
ClusterName=private
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock,cred_expire=5
CredType=cred/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=0,sched_min_interval=0
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=5
MpiDefault=none
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
TmpFS={folder}
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
GresTypes=gpu
NodeName=n[0-{last}] NodeHostname={host} NodeAddr=127.0.0.1 Port={first_port}-{last_port} \
CPUs=128 RealMemory=4000 Gres=gpu:8 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def problem() -> str | None:
    """Return why no private cluster can run here, or None."""
    missing = [name for name in PROGRAMS if shutil.which(name, path=_path()) is None]
    if missing:
        return f"no Slurm here: {', '.join(missing)} not found ({INSTALL})"
    if os.geteuid() != 0:
        return "a private Slurm cluster is started as root only"
    return None


class Cluster:
    """Runs from `start` to `stop`; also a context manager.

    Args:
        folder: of its configuration, state and logs; must be new or empty, on a path without spaces (Slurm's limit).
        num_nodes: 16 are the nodes of the largest script in `slurm/`.
    """

    def __init__(self, folder: Path, num_nodes: int = 16):
        self.folder = folder
        self.num_nodes = num_nodes
        self.environment = {
            **os.environ,
            "PATH": _path(),
            "SLURM_CONF": str(folder / "slurm.conf"),
            # Everything stays on loopback: the ranks' gloo, MPI, and hydra's proxies.
            **dict.fromkeys(LOOPBACK_VARIABLES, "lo"),
        }

    def __enter__(self) -> Cluster:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def start(self) -> None:
        """Write the configuration, start the daemons and wait until every node is idle."""
        self._configure()
        munge = {"key-file": "munge.key", "socket": "munge.sock", "pid-file": "munged.pid"}
        munge |= {"log-file": "munged.log", "seed-file": "munge.seed"}
        self.run("munged", "--force", *(f"--{flag}={self.folder / name}" for flag, name in munge.items()))
        self.run("slurmctld", "-f", str(self.folder / "slurm.conf"))
        for name in self.nodes:
            self.run("slurmd", "-f", str(self.folder / "slurm.conf"), "-N", name)
        self.wait_for(self._idle, START_SECONDS, "all nodes to be idle")

    def stop(self) -> None:
        """Cancel all jobs, then end the daemons that `start` started; whatever a step has left behind, too."""
        if (self.folder / "slurmctld.pid").exists():
            with contextlib.suppress(subprocess.SubprocessError, TimeoutError):
                self.run("scancel", "--user", getpass.getuser(), timeout=10)
                self.wait_for(lambda: not self.run("squeue", "--noheader", timeout=10), 20, "jobs to end")
        pids = [int(path.read_text()) for path in self.folder.glob("*.pid") if path.read_text().strip()]
        for number, seconds in ((signal.SIGTERM, 10.0), (signal.SIGKILL, 2.0)):
            for pid in filter(_runs, pids):
                os.kill(pid, number)
            deadline = time.monotonic() + seconds
            while any(map(_runs, pids)) and time.monotonic() < deadline:
                time.sleep(POLL_SECONDS)

    @property
    def nodes(self) -> list[str]:
        return [f"n{number}" for number in range(self.num_nodes)]

    def run(self, *command: str, timeout: float = 60.0, cwd: Path | None = None, **variables: str) -> str:
        """Run a command in the cluster's environment, with further variables; returns its output, stripped.

        Raises:
            RuntimeError: it failed; holds what it said.
        """
        done = subprocess.run(
            command,
            cwd=cwd,
            env={**self.environment, **variables},
            text=True,
            capture_output=True,
            timeout=timeout,
            check=False,
            stdin=subprocess.DEVNULL,
        )
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)} ended with status {done.returncode}: {done.stdout}{done.stderr}")
        return done.stdout.strip()

    def wait_for(self, event: Callable[[], bool], seconds: float, what: str) -> None:
        """Wait until `event()` is true.

        Raises:
            TimeoutError: it wasn't in time; holds the end of the controller's log.
        """
        deadline = time.monotonic() + seconds
        while not event():
            if time.monotonic() > deadline:
                log = self.folder / "slurmctld.log"
                end = log.read_text(errors="replace")[-2000:] if log.exists() else "no slurmctld.log"
                raise TimeoutError(f"waited {seconds:.0f} s for {what}; slurmctld said last:\n{end}")
            time.sleep(POLL_SECONDS)

    def jobs(self, job_id: str) -> list[dict[str, str]]:
        """Return the fields of `scontrol show job`, as text; for a job array, of each task."""
        lines = self.run("scontrol", "show", "job", "--oneliner", job_id).splitlines()
        return [dict(word.split("=", 1) for word in line.split() if "=" in word) for line in lines if line]

    def _idle(self) -> bool:
        try:
            return self.run("sinfo", "--noheader", "--states=idle", "--format=%D", timeout=5) == str(self.num_nodes)
        except (RuntimeError, subprocess.TimeoutExpired):
            return False  # the controller isn't up yet

    def _configure(self) -> None:
        for name in ("state", *self.nodes):
            (self.folder / name).mkdir(parents=True)
        for number in range(8):
            (self.folder / f"gpu{number}").touch()
        port = _free_ports(1 + self.num_nodes)
        config = CONFIG.format(
            folder=self.folder,
            host=socket.gethostname().split(".")[0],
            user=getpass.getuser(),
            port=port,
            first_port=port + 1,
            last_port=port + self.num_nodes,
            last=self.num_nodes - 1,
        )
        (self.folder / "slurm.conf").write_text(config)
        (self.folder / "gres.conf").write_text(f"Name=gpu File={self.folder}/gpu[0-7]\n")
        key = self.folder / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(secrets.token_bytes(128))


@contextlib.contextmanager
def private_cluster(num_nodes: int = 16) -> Iterator[Cluster]:
    """A cluster in a temporary folder."""
    with tempfile.TemporaryDirectory(prefix="slurm-") as name, Cluster(Path(name), num_nodes) as cluster:
        yield cluster


def _path() -> str:
    return f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin"


def _free_ports(count: int) -> int:
    """Return the first of `count` ports in a row that are free now."""
    for port in range(20000 + os.getpid() % 8000, 32000):
        with contextlib.ExitStack() as stack:
            try:
                for number in range(port, port + count):
                    stack.enter_context(socket.create_server(("127.0.0.1", number)))
            except OSError:
                continue
            return port
    raise OSError(f"no {count} free ports in a row")


def _runs(pid: int) -> bool:
    """Whether a process is there and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--nodes", type=int, default=16, help="number of nodes (default: %(default)s)")
    parser.add_argument("--check", action="store_true", help="only say whether one can run here, by the exit status")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="command to run in the cluster (default: wait)")
    args = parser.parse_args()
    reason = problem()
    if reason is not None:
        sys.exit(f"error: {reason}")
    if args.check:
        return
    with private_cluster(args.nodes) as cluster:
        if args.command:
            sys.exit(subprocess.run(args.command, env=cluster.environment, check=False).returncode)
        for name in ("SLURM_CONF", *LOOPBACK_VARIABLES):
            sys.stdout.write(f"export {name}={cluster.environment[name]}\n")
        sys.stdout.write("# runs until Ctrl-C\n")
        sys.stdout.flush()
        with contextlib.suppress(KeyboardInterrupt):
            signal.pause()


if __name__ == "__main__":
    main()
