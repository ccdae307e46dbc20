import json
import logging
import os
import signal
import socket
import subprocess
import sys
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest

from megarl.run_status import RunStatus


def read_status(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "status.json").read_text())


def make_old(path: Path) -> None:
    """Set a file's time to 1,000 seconds after the epoch."""
    os.utime(path, (1000.0, 1000.0))


def test_a_run_shows_where_it_stands_and_ends_as_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    monkeypatch.delenv("SLURM_RESTART_COUNT", raising=False)
    with RunStatus(tmp_path / "a" / "b", rank=0, name="grpo", num_steps=7) as status:
        begun = read_status(tmp_path / "a" / "b")
        status.at_step(3)
        assert read_status(tmp_path / "a" / "b")["step"] == 3
    ended = read_status(tmp_path / "a" / "b")
    assert begun["state"] == "running"
    assert {**begun, "state": "done", "step": 3, "updated": ended["updated"]} == ended
    for name in ("started", "updated"):
        age = datetime.now(timezone.utc) - datetime.fromisoformat(ended.pop(name))
        assert 0 <= age.total_seconds() < 60
    assert ended == {
        "state": "done",
        "reason": None,
        "name": "grpo",
        "step": 3,
        "num_steps": 7,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "job": None,
        "restarts": 0,
    }
    assert sorted(path.name for path in (tmp_path / "a" / "b").iterdir()) == ["heartbeat", "status.json"]


def test_slurm_tells_the_job_and_how_often_it_began_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "2")
    with RunStatus(tmp_path, rank=0, name="grpo", num_steps=1):
        pass
    assert (read_status(tmp_path)["job"], read_status(tmp_path)["restarts"]) == ("4711", 2)


def test_a_run_that_was_asked_to_stop_is_not_done(tmp_path: Path):
    with RunStatus(tmp_path, rank=0, name="grpo", num_steps=1) as status:
        status.stop("asked to by the file stop")
        assert read_status(tmp_path)["state"] == "running"
    assert read_status(tmp_path)["state"] == "stopped"
    assert read_status(tmp_path)["reason"] == "asked to by the file stop"


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ValueError("lr: got 0\nallowed: above 0"), "ValueError: lr: got 0"),
        (KeyboardInterrupt(), "KeyboardInterrupt"),
        (SystemExit(3), "SystemExit: 3"),
    ],
)
def test_a_run_that_fails_says_why_in_one_line(tmp_path: Path, error: BaseException, reason: str):
    def fail() -> None:
        with RunStatus(tmp_path, rank=0, name="grpo", num_steps=1) as status:
            status.stop("asked to")  # the failure is what counts
            raise error

    with pytest.raises(type(error)):
        fail()
    assert (read_status(tmp_path)["state"], read_status(tmp_path)["reason"]) == ("failed", reason)


def test_the_heartbeat_is_touched_at_most_once_a_second(tmp_path: Path):
    seconds = [50.0]
    with RunStatus(tmp_path, rank=0, name="grpo", num_steps=1, clock=lambda: seconds[0]) as status:
        heartbeat = tmp_path / "heartbeat"
        assert heartbeat.read_bytes() == b""
        make_old(heartbeat)
        seconds[0] += 0.9
        status.beat()
        status.at_step(1)
        assert heartbeat.stat().st_mtime == 1000.0
        seconds[0] += 0.2
        status.beat()
        assert heartbeat.stat().st_mtime > 1000.0


def test_other_ranks_write_nothing(tmp_path: Path):
    with RunStatus(tmp_path / "run", rank=1, name="grpo", num_steps=1) as status:
        status.at_step(1)
        status.beat()
        status.stop("asked to")
    assert not (tmp_path / "run").exists()


def test_a_killed_run_stays_running_and_the_next_one_takes_over(tmp_path: Path):
    code = (
        "import os, signal, sys; from pathlib import Path; from megarl.run_status import RunStatus\n"
        "with RunStatus(Path(sys.argv[1]), rank=0, name='grpo', num_steps=9) as status:\n"
        "    status.at_step(4)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    ended = subprocess.run([sys.executable, "-c", code, str(tmp_path)], cwd=Path(__file__).parents[2], timeout=60)
    assert ended.returncode == -signal.SIGKILL
    killed = read_status(tmp_path)
    assert (killed["state"], killed["step"]) == ("running", 4)
    with RunStatus(tmp_path, rank=0, name="grpo", num_steps=9):
        assert read_status(tmp_path)["pid"] == os.getpid() != killed["pid"]
    assert read_status(tmp_path)["state"] == "done"


def test_what_cannot_be_written_is_warned_about_and_hides_no_error(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """A disk without room for the status is modelled by a file where the folder should be."""
    (tmp_path / "run").write_text("")

    def fail() -> None:
        with RunStatus(tmp_path / "run", rank=0, name="grpo", num_steps=1) as status:
            status.at_step(1)
            raise RuntimeError("the run's own error")

    with caplog.at_level(logging.WARNING), pytest.raises(RuntimeError, match="the run's own error"):
        fail()
    assert "the run's status could not be written" in caplog.text
    assert "no sign of life could be left" in caplog.text
