"""The scripts outside Slurm, where they print what a job would run: flags, layouts, refusals."""

import importlib
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = ("dapo_32b", "grpo_7b", "ppo_7b", "scaling_study")


def preview(script: str, **variables: str) -> subprocess.CompletedProcess[str]:
    kept = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    command = ["bash", str(ROOT / "slurm" / f"{script}.sh")]
    return subprocess.run(command, env=kept | variables, cwd="/", text=True, capture_output=True, check=False)


def flags(script: str, **variables: str) -> list[str]:
    """The program and its flags, as each rank gets them."""
    done = preview(script, **variables)
    assert done.returncode == 0, done.stderr
    return shlex.split(done.stdout.splitlines()[-1])[1:]


def value(arguments: list[str], flag: str) -> str:
    return arguments[arguments.index(flag) + 1]


@pytest.mark.parametrize("smoke", ["0", "1"])
@pytest.mark.parametrize(("script", "index"), [*((script, "0") for script in SCRIPTS), ("scaling_study", "4")])
def test_the_program_knows_every_flag(script, smoke, index, tmp_path, monkeypatch, capsys):
    """It accepts the command line as far as the model's folder, which is not there."""
    variables = {"SMOKE": smoke, "RUN": str(tmp_path / "run"), "EVAL_PROMPTS": "heldout.jsonl"}
    variables |= {"CRITIC_MODEL": "critic", "REWARD_MODEL": "reward", "SLURM_ARRAY_TASK_ID": index}
    program, *arguments = flags(script, MODEL=str(tmp_path / "no model"), **variables)
    monkeypatch.setattr(sys, "argv", [program, *arguments])
    with pytest.raises(SystemExit) as ended:
        importlib.import_module(f"examples.{Path(program).stem}").main()
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith("error: model: got ")


def test_dapo_has_all_its_ingredients():
    arguments = flags("dapo_32b")
    assert [value(arguments, flag) for flag in ("--clip-low", "--clip-high")] == ["0.2", "0.28"]
    assert "--adaptive-oversampling" in arguments
    assert "--overlong-filtering" in arguments
    assert value(arguments, "--overlong-cache-tokens") == "4096"
    assert value(arguments, "--max-new-tokens") == "20480"
    assert [value(arguments, flag) for flag in ("--prompts-per-step", "--group-size")] == ["512", "16"]
    assert value(arguments, "--num-mini-batches") == "16"


def test_data_parallel_ranks_follow_from_the_layout():
    assert "16 nodes x 8 ranks: TP 8 x PP 2 x DP 8" in preview("dapo_32b").stdout
    assert "16 nodes x 8 ranks: TP 4 x PP 4 x DP 8" in preview("dapo_32b", TP="4", PP="4").stdout
    assert "2 nodes x 4 ranks: TP 4 x PP 1 x DP 2" in preview("grpo_7b", RANKS_PER_NODE="4").stdout
    assert "--sequence-parallel" not in flags("grpo_7b", TP="1")


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"TP": "8", "PP": "3"}, "TP 8 x PP 3 = 24 does not divide 128 ranks (16 nodes x 8 ranks per node)"),
        ({"TP": "16", "PP": "1"}, "TP is 16, allowed: divisors of the 8 ranks per node"),
        ({"TP": "two"}, "TP is 'two', allowed: integers from 1"),
        ({"NODES": "0"}, "NODES is '0', allowed: integers from 1"),
        ({"LAUNCHER": "ssh"}, "LAUNCHER is 'ssh', allowed: srun, torchrun, mpirun"),
        ({"WANDB": "maybe"}, "WANDB is 'maybe', allowed: online, offline, disabled"),
        ({"LAUNCHER": "mpirun", "CONTAINER": "image.sqsh"}, "allowed with CONTAINER: srun, torchrun"),
        ({"MAX_RESTARTS": "many"}, "MAX_RESTARTS is 'many', allowed: integers from 0"),
    ],
)
def test_contradictions_are_refused_with_their_values(variables, message):
    done = preview("dapo_32b", **variables)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("error: ")
    assert message in done.stderr


def test_an_array_beyond_the_cases_is_refused():
    done = preview("scaling_study", SLURM_ARRAY_TASK_ID="5")
    assert done.returncode == 2
    assert "--array has 5, allowed: 0 to 4" in done.stderr


def test_wandb_is_online_with_a_key_only():
    assert value(flags("grpo_7b"), "--wandb") == "offline"
    assert value(flags("grpo_7b", WANDB_API_KEY="key"), "--wandb") == "online"
    assert value(flags("grpo_7b", WANDB_API_KEY="key", WANDB="disabled"), "--wandb") == "disabled"
    assert value(flags("grpo_7b", SMOKE="1"), "--wandb") == "disabled"


def test_paths_may_have_blanks(tmp_path):
    arguments = flags("dapo_32b", RUN=str(tmp_path / "a run"), MODEL="my models/Qwen")
    assert value(arguments, "--output") == str(tmp_path / "a run")
    assert value(arguments, "--model") == "my models/Qwen"


def test_flags_added_last_win():
    assert flags("ppo_7b", EXTRA_ARGS="--num-steps 7 --keep-best 1")[-4:] == ["--num-steps", "7", "--keep-best", "1"]


@pytest.mark.parametrize(("num_gpus", "good"), [(8, True), (7, False)])
def test_a_node_with_too_few_gpus_is_bad(num_gpus, good, tmp_path):
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\nseq {num_gpus}\n")
    tool.chmod(0o755)
    show_health = f'RUN=run; source "{ROOT}/slurm/job.sh"; printf %s "$HEALTH"'
    health = subprocess.run(["bash", "-c", show_health], text=True, capture_output=True, check=True).stdout
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "RANKS_PER_NODE": "8"}
    assert (subprocess.run(["bash", "-c", health], env=environment, check=False).returncode == 0) == good


@pytest.mark.parametrize("path", sorted((ROOT / "slurm").glob("*.sh")), ids=lambda path: path.name)
def test_bash_accepts_every_script(path):
    assert subprocess.run(["bash", "-n", str(path)], capture_output=True, text=True, check=False).stderr == ""
