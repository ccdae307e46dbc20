"""Jobs in a private Slurm cluster: stopped and resumed, hung, crashed, refused, on bad nodes."""

import re

import pytest

pytestmark = pytest.mark.timeout(1200)

LAUNCHERS = ("srun", "torchrun", "mpirun")

STUCK_RANK = '''
import os, time
from pathlib import Path
from megarl.rewards.rules import sorted_digits

calls = 0

def score(prompt, response, answer):
    """The first rank to score its 150th response hangs, once and for all attempts."""
    global calls
    calls += 1
    if calls == 150 and first():
        this_rank_is_stuck()
    return sorted_digits(prompt, response, answer)

def first():
    try:
        os.close(os.open(Path(__file__).with_name("stuck"), os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True

def this_rank_is_stuck():
    while True:
        time.sleep(1)
'''

FAILING = """
def score(prompt, response, answer):
    raise ArithmeticError("the rule is broken")
"""


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_stopped_run_saves_is_requeued_and_goes_on(submit, launcher):
    job = submit("dapo_32b.sh", LAUNCHER=launcher, NUM_STEPS="12", SAVE_EVERY="0")
    job.wait(lambda: job.status.get("step", 0) >= 2, "step 2")
    job.stop()
    job.wait(lambda: job.fields["Restarts"] == "1", "the requeue")
    assert job.wait_for_end() == "COMPLETED", job.said
    assert "requeue: stopped and saved" in job.said
    assert job.status["state"] == "done"
    assert job.status["restarts"] == 1
    assert [record["step"] for record in job.metrics()] == list(range(1, 13))
    logs = [job.rank_logs(attempt) for attempt in (0, 1)]
    assert [sorted(one) for one in logs] == [[f"rank_{rank}.log" for rank in range(4)]] * 2
    assert [re.findall(r"rank \d on node (n\d)", log) for log in logs[0].values()] == [["n0"], ["n0"], ["n1"], ["n1"]]
    came_to = re.search(r"goes on from checkpoint step_0*(\d+)", logs[1]["rank_0.log"])
    assert came_to is not None, logs[1]["rank_0.log"]
    assert 2 <= int(came_to[1]) < 12
    assert not (job.run / "stop").exists()


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_hung_rank_shows_its_stack_and_the_job_is_requeued(submit, tmp_path, launcher):
    reward = tmp_path / "stuck_rank.py"
    reward.write_text(STUCK_RANK)
    settings = {"REWARD": f"{reward}:score", "RANKS_PER_NODE": "1", "TP": "1"}
    settings["EXTRA_ARGS"] = "--reward-threads 0"  # in the main thread, where no limit of its time ends it
    job = submit("dapo_32b.sh", LAUNCHER=launcher, NUM_STEPS="6", SAVE_EVERY="1", HANG_SECONDS="45", **settings)
    job.wait(lambda: job.fields["Restarts"] == "1", "the requeue")
    assert (tmp_path / "stuck").exists()
    assert job.wait_for_end() == "COMPLETED", job.said
    assert re.search(r"no heartbeat for \d+ s \(limit 45\)", job.said), job.said
    assert "requeue: hung" in job.said
    by_program = [path.name for path in (job.run / "logs").glob("rank_*.log") if is_stuck(path.read_text())]
    by_python = [name for name, text in job.rank_logs(0).items() if is_stuck(text)]
    assert len(by_program) == 1
    assert by_python == by_program
    others = {"rank_0.log", "rank_1.log"} - set(by_program)
    assert all("Current thread" in (job.run / "logs" / name).read_text() for name in others)
    assert [record["step"] for record in job.metrics()] == list(range(1, 7))


def is_stuck(log: str) -> bool:
    return "in this_rank_is_stuck" in log


def test_a_bad_node_is_excluded(submit):
    health = '[ "$SLURMD_NODENAME" != n0 ]'
    settings = {"RANKS_PER_NODE": "1", "TP": "1", "NUM_STEPS": "2"}
    job = submit("dapo_32b.sh", "--nodes=2", "--exclude=n15", HEALTH=health, **settings)
    assert job.wait_for_end() == "COMPLETED", job.said
    assert "requeue: bad nodes: n0" in job.said
    assert job.fields["ExcNodeList"] == "n15,n0"  # that of sbatch, then the bad one
    assert job.fields["NodeList"] == "n[1-2]"
    assert job.rank_logs(0) == {}
    assert sorted(job.rank_logs(1)) == ["rank_0.log", "rank_1.log"]
    assert job.status["state"] == "done"


def test_a_health_command_that_fails_everywhere_ends_the_job(submit):
    job = submit("dapo_32b.sh", "--nodes=2", HEALTH="nvidia-smi-that-is-not-installed")
    assert job.wait_for_end() == "FAILED"
    assert "HEALTH fails on every node" in job.said
    assert job.fields["Restarts"] == "0"


def test_restarts_are_capped(submit):
    job = submit("dapo_32b.sh", "--nodes=2", HEALTH='[ "$SLURMD_NODENAME" = n1 ]', MAX_RESTARTS="0")
    assert job.wait_for_end() == "FAILED"
    assert "MAX_RESTARTS is 0, and bad nodes: n0" in job.said
    assert job.fields["Restarts"] == "0"


def test_crashes_without_progress_end_the_job_after_two(submit, tmp_path):
    reward = tmp_path / "failing.py"
    reward.write_text(FAILING)
    job = submit("dapo_32b.sh", REWARD=f"{reward}:score", RANKS_PER_NODE="1", TP="1")
    assert job.wait_for_end() == "FAILED", job.said
    assert job.fields["Restarts"] == "1"
    assert "requeue: crashed: rank_" in job.said
    assert "2 attempts in a row failed without a step beyond 0" in job.said
    assert any("the rule is broken" in log for log in job.rank_logs(1).values())


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_wrong_settings_are_not_tried_again(submit, launcher):
    job = submit("dapo_32b.sh", LAUNCHER=launcher, RANKS_PER_NODE="1", TP="1", NUM_MINI_BATCHES="99")
    assert job.wait_for_end() == "FAILED", job.said
    assert job.fields["Restarts"] == "0"
    assert job.fields["ExitCode"] == "2:0"
    assert "error: num_mini_batches: got 99, allowed: 1 to prompts_per_step 8" in job.said


def test_a_run_stopped_by_hand_is_not_requeued(submit):
    job = submit("dapo_32b.sh", RANKS_PER_NODE="1", TP="1", NUM_STEPS="200")
    job.wait(lambda: job.status.get("step", 0) >= 1, "step 1")
    (job.run / "stop").touch()
    assert job.wait_for_end() == "COMPLETED", job.said
    assert job.status["state"] == "stopped"
    assert "not requeued" in job.said


@pytest.mark.parametrize("script", ["grpo_7b.sh", "ppo_7b.sh"])
def test_the_other_scripts_train_too(submit, script):
    job = submit(script, NUM_STEPS="2")
    assert job.wait_for_end() == "COMPLETED", job.said
    assert [record["step"] for record in job.metrics()] == [1, 2]


def test_the_scaling_study_runs_each_case_in_a_folder_of_its_own(submit, tmp_path):
    job = submit("scaling_study.sh", "--array=0-1", "--output=" + str(tmp_path / "%a.out"), RUN="", NUM_STEPS="1",
                 RUNS=str(tmp_path / "scaling"), RANKS_PER_NODE="1", TP="1")  # fmt: skip
    job.wait_for_end()
    cases = {path.parent.name: path.read_text() for path in (tmp_path / "scaling").glob("*/status.json")}
    assert sorted(cases) == ["0_1.5B_tp1_pp1", "1_3B_tp2_pp1"], [path.read_text() for path in tmp_path.glob("*.out")]
    assert all('"state": "done"' in text for text in cases.values())
