import dataclasses
import sys
from pathlib import Path

import pytest

from examples import train_grpo, train_sft
from megarl.cli import checked, parse
from megarl.config import DemonstrationSettings, RolloutSettings, RunSettings
from parallel.mesh import Layout
from parallel.optimizer import OptimizerSettings

SECTIONS = (RunSettings(), RolloutSettings(), Layout(), OptimizerSettings())


def refusal(capsys, *arguments: str) -> str:
    """What is written to stderr by a command line that ends the process with status 2."""
    with pytest.raises(SystemExit) as ended:
        parse("A test.", SECTIONS, arguments)
    assert ended.value.code == 2
    return " ".join(capsys.readouterr().err.split())


def test_no_flag_gives_the_defaults():
    assert parse("A test.", SECTIONS, []) == list(SECTIONS)


def test_each_flag_reaches_its_field():
    arguments = """--model models/a --seed 7 --dtype bf16 --timeout-seconds 1.5 --eval-prompts held.jsonl
        --temperature 0.9
        --no-require-finished --tensor-model-parallel-size 2 --virtual-pipeline-model-parallel-size 3
        --sequence-parallel --lr 3e-4 --lr-decay-style linear --lr-decay-steps 10"""
    run, rollout, layout, optimizer = parse("A test.", SECTIONS, arguments.split())
    assert run == RunSettings(model=Path("models/a"), seed=7, dtype="bf16", timeout_seconds=1.5)
    assert rollout == RolloutSettings(eval_prompts=Path("held.jsonl"), temperature=0.9, require_finished=False)
    assert layout == Layout(2, virtual_pipeline_model_parallel_size=3, sequence_parallel=True)
    assert optimizer == OptimizerSettings(lr=3e-4, lr_decay_style="linear", lr_decay_steps=10)


def test_help_shows_every_field_of_every_section_with_its_default(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as ended:
        parse("A test.", (*SECTIONS, DemonstrationSettings()), ["--help"])
    assert ended.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    for section in (*SECTIONS, DemonstrationSettings()):
        assert type(section).__name__ in text
        for field in dataclasses.fields(section):
            assert f"--{field.name.replace('_', '-')}" in text
            assert f"{field.metadata['help']} (default: {field.default})" in text


def test_unknown_flags_and_abbreviations_fail(capsys):
    assert "unrecognized arguments: --nonsense 3" in refusal(capsys, "--nonsense", "3")
    assert "unrecognized arguments: --temp 0.5" in refusal(capsys, "--temp", "0.5")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--num-steps many", "argument --num-steps: invalid int value: 'many'"),
        ("--num-steps 1.5", "argument --num-steps: invalid int value: '1.5'"),
        ("--dtype fp16", "argument --dtype: invalid choice: 'fp16' (choose from"),
        ("--lr 0", "lr: got 0.0, allowed: above 0"),
        ("--lr-decay-style linear", "lr_decay_steps: got 0, allowed: above lr_decay_start 0"),
    ],
)
def test_a_wrong_value_is_named_with_its_flag(capsys, arguments, message):
    assert message in refusal(capsys, *arguments.split())


@pytest.mark.parametrize(
    ("main", "arguments", "message"),
    [
        (train_grpo.main, "--temperature 0", "error: temperature: got 0.0, allowed in training: 0.01 to 100"),
        (train_grpo.main, "--group-size 0", "error: group_size: got 0, allowed: from 1"),
        (train_grpo.main, "--tensor-model-parallel-size 3", "error: world size: got 1, allowed: multiples of tensor 3"),
        (train_sft.main, "--batch-size 0", "error: batch_size: got 0, allowed: from 1"),
        (train_sft.main, "--temperature 1", "unrecognized arguments: --temperature 1"),
    ],
)
def test_examples_end_with_status_2_and_the_reason(small_run, tmp_path, capsys, monkeypatch, main, arguments, message):
    folders = ["--model", str(small_run.folder / "model"), "--output", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["train.py", *folders, *arguments.split()])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_a_wrong_config_or_environment_ends_with_status_2_and_the_reason(small_run, capsys, tmp_path, monkeypatch):
    config = small_run.config(tmp_path, rollout={"temperature": 0.0})
    with pytest.raises(SystemExit) as ended:
        checked(config)
    assert ended.value.code == 2
    assert capsys.readouterr().err == "error: temperature: got 0.0, allowed in training: 0.01 to 100\n"
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(SystemExit) as ended:
        checked(config)
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith("error: environment: RANK=1 is set but ")
