import json
import os
import socket
import subprocess
import sys
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest

from megarl.run_list import find_runs, read_run
from megarl.run_status import RunStatus

NOW = 2_000_000_000.0


def status(**changes: Any) -> dict[str, Any]:
    """Of a run of another machine."""
    values = {"state": "running", "reason": None, "name": "grpo", "step": 3, "num_steps": 9, "host": "elsewhere"}
    return {**values, "pid": 7, "started": "2033-05-18T00:00:00+00:00"} | changes


def make_run(folder: Path, age_seconds: float = 5.0, beat: bool = True, **files: Any) -> Path:
    """Write files (bytes, or a value as JSON; `metrics` are lines) whose time is so long before NOW."""
    folder.mkdir(parents=True)
    names = {"metrics": "metrics.jsonl", "status": "status.json", "config": "config.json", "summary": "summary.json"}
    for key, content in files.items():
        content = content if isinstance(content, bytes) else json.dumps(content).encode()
        (folder / names[key]).write_bytes(content)
    if beat:
        (folder / "heartbeat").touch()
    for path in folder.iterdir():
        os.utime(path, (NOW - age_seconds, NOW - age_seconds))
    return folder


def refuse(error: OSError) -> None:
    raise error


def test_a_run_has_a_status_or_config_and_metrics_and_may_lie_anywhere(tmp_path):
    make_run(tmp_path / "b", status=status())
    make_run(tmp_path / "b" / "nested", status=status())
    make_run(tmp_path / "a" / "deep" / "er", config={}, metrics=b"")
    make_run(tmp_path / "only config", config={})
    make_run(tmp_path / ".hidden", status=status())
    make_run(tmp_path / "b" / "checkpoints" / "step_1", status=status())
    (tmp_path / "link").symlink_to(tmp_path)
    found = [str(folder.relative_to(tmp_path)) for folder in find_runs(tmp_path, refuse)]
    assert found == ["a/deep/er", "b", "b/nested"]
    assert list(find_runs(tmp_path / "b" / "nested", refuse)) == [tmp_path / "b" / "nested"]


def test_a_running_run_tells_its_step_its_last_metrics_and_its_age(tmp_path):
    metrics = b'{"step": 1, "loss": 3.0}\n{"step": 2, "loss": "nan", "score": 0.5, "text": "x", "list": [1]}\n'
    run = read_run(make_run(tmp_path / "a", status=status(), metrics=metrics), stale_seconds=60, now=NOW)
    assert (run.name, run.state, run.reason, run.step, run.num_steps) == ("grpo", "running", None, 3, 9)
    assert run.metrics == {"step": 2, "loss": "nan", "score": 0.5}
    assert run.age_seconds == pytest.approx(5.0)
    assert run.notes == []


def test_a_run_without_a_sign_of_life_is_lost(tmp_path):
    """Whether its heartbeat is old or it has none and its status is."""
    for folder, beat in (("a", True), ("b", False)):
        make_run(tmp_path / folder, age_seconds=61, beat=beat, status=status())
        lost = read_run(tmp_path / folder, stale_seconds=60, now=NOW)
        assert (lost.state, lost.reason) == ("lost", "no sign of life")
        assert read_run(tmp_path / folder, stale_seconds=62, now=NOW).state == "running"


def test_a_run_whose_metrics_are_new_but_whose_heart_is_old_is_lost(tmp_path):
    """The heartbeat counts, not what else is written."""
    folder = make_run(tmp_path / "a", age_seconds=100, status=status(), metrics=b"")
    os.utime(folder / "metrics.jsonl", (NOW - 1, NOW - 1))
    run = read_run(folder, stale_seconds=60, now=NOW)
    assert (run.state, run.age_seconds) == ("lost", 1.0)


@pytest.mark.parametrize("state", ["stopped", "done", "failed"])
def test_a_run_that_has_ended_stays_what_it_is(tmp_path, state):
    folder = make_run(tmp_path / "a", age_seconds=1e6, status=status(state=state, reason="because"))
    run = read_run(folder, stale_seconds=60, now=NOW)
    assert (run.state, run.reason) == (state, "because")


def test_a_process_of_this_machine_is_looked_for(tmp_path):
    """One that lives, one that has ended, and another one that now has its number."""
    here, now = socket.gethostname(), datetime.now(timezone.utc).isoformat()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        mine = status(host=here, pid=process.pid, started=now)
        folder = make_run(tmp_path / "a", status=mine)
        assert read_run(folder, stale_seconds=60, now=NOW).state == "running"
        earlier = make_run(tmp_path / "b", status=mine | {"started": "2001-01-01T00:00:00+00:00"})
        assert read_run(earlier, stale_seconds=60, now=NOW).reason == "its process is gone"
        assert process.stdin is not None
        process.stdin.close()
        deadline = time.monotonic() + 30
        while read_run(folder, stale_seconds=60, now=NOW).state == "running":  # a zombie, then nothing
            assert time.monotonic() < deadline
            time.sleep(0.02)
    run = read_run(folder, stale_seconds=60, now=NOW)
    assert (run.state, run.reason) == ("lost", "its process is gone")


@pytest.mark.parametrize("pid", [None, True, "7", 0, -1, 2**31, 10**30, 7.0])
def test_no_process_has_such_a_number(tmp_path, pid):
    folder = make_run(tmp_path / "a", status=status(host=socket.gethostname(), pid=pid))
    assert read_run(folder, stale_seconds=60, now=NOW).state == "lost"


def test_what_a_run_writes_is_read(tmp_path):
    with RunStatus(tmp_path / "run", rank=0, name="dapo", num_steps=5) as run_status:
        run_status.at_step(2)
        run = read_run(tmp_path / "run", stale_seconds=60)
        assert (run.name, run.state, run.step, run.num_steps, run.notes) == ("dapo", "running", 2, 5, [])
        assert run.age_seconds < 60
        run_status.stop("asked to")
    run = read_run(tmp_path / "run", stale_seconds=60)
    assert (run.state, run.reason) == ("stopped", "asked to")


@pytest.mark.parametrize(
    ("summary", "state"),
    [({"status": "finished"}, "done"), ({"status": "failed"}, "failed"), ({}, "unknown"), ({"status": [1]}, "unknown")],
)
def test_a_run_from_before_there_was_a_status(tmp_path, summary, state):
    config = {"run": {"num_steps": 8}, "recipe": {"name": "ppo"}}
    folder = make_run(tmp_path / "a", config=config, metrics=b'{"step": 4}\n', summary=summary)
    run = read_run(folder, stale_seconds=60, now=NOW)
    assert (run.name, run.state, run.step, run.num_steps) == ("ppo", state, 4, 8)


@pytest.mark.parametrize(
    ("content", "note"),
    [
        (b"", "status.json: is empty"),
        (b'{"state": "runn', "status.json: is cut off or no JSON"),
        (b"\xff\xfe\x00", "status.json: is cut off or no JSON"),
        (b"[" * 100_000, "status.json: is cut off or no JSON"),
        (b"[1]", "status.json: is no JSON object"),
        (b" " * (2**20 + 1), "status.json: has 1048577 bytes"),
        (b'{"state": "fine"}', "status.json: its state is none"),
        (b'{"state": ["running"]}', "status.json: its state is none"),
    ],
)
def test_a_broken_status_gives_a_note(tmp_path, content, note):
    run = read_run(make_run(tmp_path / "a", status=content), stale_seconds=60, now=NOW)
    assert (run.state, run.notes) == ("unknown", [note])


def test_a_folder_and_a_pipe_in_place_of_files_give_notes(tmp_path):
    folder = make_run(tmp_path / "a", metrics=b"", config=[])
    (folder / "status.json").mkdir()
    (folder / "summary.json").symlink_to(folder / "nowhere")
    (folder / "metrics.jsonl").unlink()
    os.mkfifo(folder / "metrics.jsonl")
    run = read_run(folder, stale_seconds=60, now=NOW)
    assert run.notes == [
        "status.json: is no file",
        "config.json: is no JSON object",
        "metrics.jsonl: is no file",
    ]


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_a_file_that_may_not_be_read_gives_a_note(tmp_path):
    folder = make_run(tmp_path / "a", status=status())
    (folder / "status.json").chmod(0)
    assert read_run(folder, stale_seconds=60, now=NOW).notes == ["status.json: Permission denied"]


@pytest.mark.parametrize(
    ("content", "metrics", "notes"),
    [
        (b"", {}, []),
        (b'{"step": 1}\n{"step": 2, "lo', {"step": 1}, ["metrics.jsonl: its last line is broken"]),
        (b'{"step": 1}\n\0\0\0\n[]\n', {"step": 1}, ["metrics.jsonl: its last 2 lines are broken"]),
        (b"\xff\n", {}, ["metrics.jsonl: its last line is broken"]),
        (b'{"step": 1, "loss": NaN, "ratio": 1e999, "huge": ' + b"9" * 400 + b"}\n", {"step": 1}, []),
    ],
)
def test_the_last_record_that_is_whole_counts(tmp_path, content, metrics, notes):
    """What isn't JSON's numbers becomes text, or is left out."""
    run = read_run(make_run(tmp_path / "a", status=status(), metrics=content), stale_seconds=60, now=NOW)
    assert {name: value for name, value in run.metrics.items() if name == "step"} == metrics
    assert run.notes == notes
    if b"NaN" in content:
        assert run.metrics == {"step": 1, "loss": "nan", "ratio": "inf"}


def test_only_the_end_of_a_long_file_of_metrics_is_read(tmp_path):
    content = b"broken\n" * 200_000 + b'{"step": 5}\n'
    run = read_run(make_run(tmp_path / "a", status=status(), metrics=content), stale_seconds=60, now=NOW)
    assert (run.metrics, run.notes) == ({"step": 5}, [])


def test_the_future_of_another_clock_is_now(tmp_path):
    run = read_run(make_run(tmp_path / "a", age_seconds=-500, status=status()), stale_seconds=60, now=NOW)
    assert (run.state, run.age_seconds) == ("running", 0.0)
