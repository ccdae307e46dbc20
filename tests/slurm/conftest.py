"""A private Slurm cluster for the session, and jobs in it that run the scripts' smoke mode."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.slurm.cluster import Cluster, private_cluster, problem

ROOT = Path(__file__).parents[2]
JOB_SECONDS = 600.0
END_STATES = ("COMPLETED", "FAILED", "CANCELLED", "NODE_FAIL", "TIMEOUT", "OUT_OF_MEMORY")

Submit = Callable[..., "SmokeJob"]


@dataclass(frozen=True)
class SmokeJob:
    """A submitted job and its run folder."""

    cluster: Cluster
    id: str
    run: Path
    output: Path

    @property
    def fields(self) -> dict[str, str]:
        """Of `scontrol show job`; of a job array: of a task that hasn't ended, if there is one."""
        tasks = self.cluster.jobs(self.id)
        return next((task for task in tasks if task["JobState"] not in END_STATES), tasks[0])

    @property
    def status(self) -> dict:
        path = self.run / "status.json"
        return json.loads(path.read_text()) if path.exists() else {}

    @property
    def said(self) -> str:
        """What job.sh has said, in all attempts."""
        return self.output.read_text() if self.output.exists() else ""

    def logs(self, attempt: int) -> Path:
        return self.run / "logs" / f"{self.id}.{attempt}"

    def rank_logs(self, attempt: int) -> dict[str, str]:
        return {path.name: path.read_text() for path in sorted(self.logs(attempt).glob("rank_*.log"))}

    def metrics(self) -> list[dict]:
        return [json.loads(line) for line in (self.run / "metrics.jsonl").read_text().splitlines()]

    def wait(self, event: Callable[[], bool], what: str) -> None:
        """Wait for an event; a job that ends before it fails the test with all that it has said."""
        deadline = time.monotonic() + JOB_SECONDS
        while not event():
            state = self.fields["JobState"]
            if (state in END_STATES and not event()) or time.monotonic() > deadline:
                raise AssertionError(f"job is {state} before {what}:\n{self.said}\n{self._last_words()}")
            time.sleep(0.2)

    def wait_for_end(self) -> str:
        """Return the state it ends in."""
        self.wait(lambda: self.fields["JobState"] in END_STATES, "its end")
        return self.fields["JobState"]

    def stop(self) -> None:
        """What Slurm does some minutes before the time limit."""
        self.cluster.run("scancel", "--signal=USR1", "--batch", self.id)

    def _last_words(self) -> str:
        attempts = sorted((self.run / "logs").glob(f"{self.id}.*/rank_*.log"))
        return "\n".join(f"{path}:\n{path.read_text()[-1500:]}" for path in attempts)


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """16 nodes, for the largest script's header; skips where no private cluster can run."""
    reason = problem() if os.environ.get("SLURM_TESTS") else "they take ten minutes: make slurm-test runs them"
    if reason is not None:
        pytest.skip(reason)
    with private_cluster() as running:
        yield running


@pytest.fixture
def submit(cluster: Cluster, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Submit]:
    """`submit(script, *flags of sbatch, **variables)` submits a script in smoke mode; its paths have blanks."""
    jobs: list[SmokeJob] = []

    def submit_job(script: str, *flags: str, **variables: str) -> SmokeJob:
        run, output = tmp_path / f"run {len(jobs)}", tmp_path / f"job {len(jobs)}.out"
        files = tmp_path_factory.getbasetemp() / "smoke files"
        defaults = {"SMOKE": "1", "RUN": str(run), "SMOKE_FILES": str(files), "PYTHON": sys.executable}
        defaults |= {"POLL_SECONDS": "1", "DUMP_SECONDS": "2", "FIRST_HANG_SECONDS": "300", "HANG_SECONDS": "120"}
        defaults |= {"WANDB_API_KEY": "", "EXTRA_ARGS": "--progress-seconds 1"}
        command = ["sbatch", "--parsable", f"--chdir={ROOT}", f"--output={output}", *flags, f"slurm/{script}"]
        job_id = cluster.run(*command, cwd=ROOT, **(defaults | variables))
        jobs.append(SmokeJob(cluster, job_id, run, output))
        return jobs[-1]

    yield submit_job
    for job in jobs:
        if job.fields["JobState"] not in END_STATES:
            cluster.run("scancel", job.id)
