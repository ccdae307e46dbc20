"""A rank that fails ends the job on all ranks soon, with its reason in its own log; run as users run it."""

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LIMIT_SECONDS = 60.0
FAILING = """
import os

def fail_on_rank_1(prompt, response, answer):
    if os.environ["RANK"] == "1":
        raise ArithmeticError("the rule is broken")
    return 0.0
"""


def run(small_run, output: Path, *flags: str) -> tuple[list[int], list[str], float]:
    """Run GRPO on two ranks, without a launcher that would end the other; returns status, output and seconds."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    command = [sys.executable, str(ROOT / "examples" / "train_grpo.py"), "--model", str(small_run.folder / "model")]
    command += ["--prompts", str(small_run.folder / "train.jsonl"), "--output", str(output), "--num-steps", "2"]
    command += ["--prompts-per-step", "4", "--group-size", "2", "--num-mini-batches", "2", "--no-require-finished"]
    command += ["--max-prompt-tokens", "16", "--max-new-tokens", "6", "--save-every", "1", *flags]
    common = {**os.environ, "PYTHONPATH": str(ROOT), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    processes = [
        subprocess.Popen(
            command,
            env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    started = time.monotonic()
    try:
        outputs = [process.communicate(timeout=LIMIT_SECONDS)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [process.returncode for process in processes], outputs, time.monotonic() - started


def test_a_reward_that_fails_on_one_rank_ends_both(small_run, tmp_path):
    reward = tmp_path / "reward.py"
    reward.write_text(FAILING)
    codes, _, seconds = run(small_run, tmp_path / "run", "--reward", f"{reward}:fail_on_rank_1")
    assert [code != 0 for code in codes] == [True, True]
    assert seconds < LIMIT_SECONDS
    log = (tmp_path / "run" / "logs" / "rank_1.log").read_text()
    assert "Traceback" in log
    assert "ArithmeticError: the rule is broken" in log
    assert all(" rank 1 " in line for line in log.splitlines() if " ERROR " in line)
    status = json.loads((tmp_path / "run" / "status.json").read_text())
    assert status["state"] == "failed"
    assert "the rule is broken" in status["reason"]
    assert not list((tmp_path / "run").glob("checkpoints/step_*"))


def test_a_clean_end_writes_shared_files_once_and_says_nothing_of_stores(small_run, tmp_path):
    reward = f"{small_run.reward_file}:right"
    codes, outputs, _ = run(small_run, tmp_path / "run", "--reward", reward)
    assert codes == [0, 0]
    assert outputs[1].strip() == ""
    assert not [word for word in ("Traceback", "TCPStore", "Broken pipe", "Error") if word in outputs[0]]
    names = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert names == ["latest", "step_000001", "step_000002"]


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk needs root")
def test_a_full_disk_ends_the_run_with_what_to_change_and_keeps_the_last_checkpoint(small_run, tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", str(disk)], check=False).returncode
    if mounted:
        pytest.skip("no small disk can be mounted here")
    try:
        reward = f"{small_run.reward_file}:right"
        codes, _, _ = run(small_run, disk / "run", "--reward", reward, "--num-steps", "6", "--keep-last", "6")
        assert [code != 0 for code in codes] == [True, True]
        log = (disk / "run" / "logs" / "rank_0.log").read_text()
        assert "keep_last" in log
        assert list((disk / "run" / "checkpoints").glob("step_*"))
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)
