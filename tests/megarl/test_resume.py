"""Runs that are stopped anywhere and go on are the unbroken run, to the last bit."""

import json
import os
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
from safetensors.torch import load_file

from examples.make_tiny_qwen import main as make_tiny_qwen
from megarl.config import CriticSettings, DemonstrationSettings, PolicyConfig, SFTConfig
from megarl.keeper import Position, RunKeeper
from megarl.policy_run import train_policy
from megarl.recipes import DAPO, GRPO, PPO
from megarl.report import read_metrics
from megarl.sft import train_sft
from megarl.updates import MAX_SKIPPED_STEPS, NotFinite
from parallel.checkpoint_folder import CheckpointFolder, CheckpointSettings
from parallel.mesh import Layout
from parallel.optimizer import OptimizerSettings

IGNORED = ("seconds", "per_second", "memory")


def train(world, config: PolicyConfig, stop: Position | None = None) -> None:
    """Train; with `stop` the file that asks for it is there at this position."""
    at_border = RunKeeper.at_border

    def asked(self, position, *arguments):
        if position == stop and world.rank == 0:
            (config.run.output / "stop").touch()
        at_border(self, position, *arguments)

    with patch.object(RunKeeper, "at_border", asked):
        train_policy(config, config.check(world.world_size), world)


def state_of(config: PolicyConfig) -> str:
    return json.loads((config.run.output / "status.json").read_text())["state"]


def outcome(output: Path):
    """Weights and metrics without times."""
    weights = {name: tensor.tolist() for name, tensor in load_file(output / "hf" / "model.safetensors").items()}
    records = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    kept = [
        {name: value for name, value in row.items() if not any(part in name for part in IGNORED)} for row in records
    ]
    return weights, kept


def resumed(config: PolicyConfig) -> PolicyConfig:
    return replace(config, run=replace(config.run, resume=True))


PLACES = {
    "after rollout": Position(1, 0),
    "between mini-batches": Position(1, 1),
    "before the end of a step": Position(1, 2),
    "after a step": Position(2),
}
RUNS = {
    "GRPO, TP2": (Layout(2), 2, {}, {}),
    "GRPO, DP2": (Layout(), 2, {}, {}),
    "DAPO, surplus": (Layout(), 2, {"recipe": DAPO}, {"adaptive_oversampling": True}),
    "GRPO, paused groups": (Layout(), 1, {}, {"oversampling": 2.0}),
    "PPO": (Layout(1, 2), 2, {"recipe": PPO}, {"num_epochs": 2}),
}


def make_config(small_run, output: Path, name: str, **checkpoints) -> PolicyConfig:
    layout, _, settings, rollout = RUNS[name]
    config = small_run.config(
        output,
        layout=layout,
        run={"num_steps": 4},
        rollout={"eval_every": 2, **rollout},
        recipe=settings.get("recipe", GRPO),
    )
    return replace(config, critic=CriticSettings(), checkpoints=CheckpointSettings(**checkpoints))


@pytest.mark.parametrize("name", RUNS)
def test_a_run_that_is_stopped_goes_on_bit_for_bit(small_run, tmp_path, workers, name):
    """Four steps at once; and stopped once in each kind of place, with new groups of processes every time."""
    world_size = RUNS[name][1]
    unbroken, stopped = (make_config(small_run, tmp_path / run, name) for run in ("unbroken", "stopped"))
    workers.run(train, world_size, unbroken)
    assert state_of(unbroken) == "done"
    current = stopped
    for place in PLACES.values():
        workers.run(train, world_size, current, place)
        assert state_of(stopped) == "stopped"
        assert not (stopped.run.output / "stop").exists()
        assert CheckpointFolder(stopped.run.output / "checkpoints").names()[-1] == place.name
        current = resumed(stopped)
    workers.run(train, world_size, current)
    assert state_of(stopped) == "done"
    assert outcome(stopped.run.output) == outcome(unbroken.run.output)
    summaries = [json.loads((one.run.output / "summary.json").read_text()) for one in (unbroken, stopped)]
    assert summaries[0]["accuracy_before"] == summaries[1]["accuracy_before"]


def test_another_layout_goes_on_with_the_same_losses(small_run, tmp_path, workers):
    name = "GRPO, TP2"
    unbroken, stopped = (make_config(small_run, tmp_path / run, name) for run in ("unbroken", "stopped"))
    for config in (unbroken, stopped):
        object.__setattr__(config, "layout", Layout(2, 2))
    workers.run(train, 4, unbroken)
    workers.run(train, 4, stopped, Position(1, 1))
    workers.run(train, 2, replace(resumed(stopped), layout=Layout()))
    losses = [[row["loss"] for row in read_metrics(one.run.output).values()] for one in (unbroken, stopped)]
    assert losses[1] == pytest.approx(losses[0], abs=1e-6)


def test_responses_of_a_step_are_not_generated_twice(small_run, tmp_path, workers):
    """The run dies after the rollout of step 2, of which only the responses are on the disk."""
    config = make_config(small_run, tmp_path / "run", "GRPO, DP2", save_every=1)
    with pytest.raises(ZeroDivisionError):
        workers.run(train_until, 1, config, Position(1, 0))
    calls = small_run.reward_file.with_suffix(".calls")
    assert (config.run.output / "rollouts" / "step_000002.pt").is_file()
    before = len(calls.read_text())
    workers.run(train, 1, resumed(replace(config, run=replace(config.run, num_steps=2))))
    assert state_of(config) == "done"
    evaluations = 2 * 2 * 3  # after step 2 and at the end, sampled and greedy, of 3 prompts
    assert len(calls.read_text()[before:].splitlines()) == evaluations
    unbroken = make_config(small_run, tmp_path / "unbroken", "GRPO, DP2")
    workers.run(train, 1, replace(unbroken, run=replace(unbroken.run, num_steps=2)))
    assert outcome(config.run.output) == outcome(unbroken.run.output)


def train_until(world, config: PolicyConfig, end: Position) -> None:
    """Train up to a position, then fail."""
    at_border = RunKeeper.at_border

    def failing(self, position, *arguments):
        if position == end:
            raise ZeroDivisionError("the end")
        at_border(self, position, *arguments)

    with patch.object(RunKeeper, "at_border", failing):
        train_policy(config, config.check(world.world_size), world)


def test_responses_of_other_settings_are_left_aside(small_run, tmp_path, workers):
    config = make_config(small_run, tmp_path / "run", "GRPO, DP2", save_every=1)
    with pytest.raises(ZeroDivisionError):
        workers.run(train_until, 1, config, Position(1, 0))
    calls = small_run.reward_file.with_suffix(".calls")
    before = len(calls.read_text().splitlines())
    changed = replace(config, run=replace(config.run, num_steps=2), optimizer=OptimizerSettings(lr=5e-4))
    workers.run(train, 1, resumed(changed))
    assert state_of(config) == "done"
    assert len(calls.read_text().splitlines()) - before == 2 * 2 * 3 + 4 * 2  # evaluations, and a step's responses
    assert read_metrics(config.run.output)[2]["lr"] == 5e-4
    assert json.loads((config.run.output / "config.json").read_text())["optimizer"]["lr"] == 5e-4


def test_a_run_that_fails_says_why_and_goes_on_from_its_last_checkpoint(small_run, tmp_path, workers):
    config = make_config(small_run, tmp_path / "run", "GRPO, DP2", save_every=1)
    with pytest.raises(ZeroDivisionError):
        workers.run(train_until, 1, config, Position(2, 1))
    status = json.loads((config.run.output / "status.json").read_text())
    assert (status["state"], status["reason"], status["step"]) == ("failed", "ZeroDivisionError: the end", 2)
    workers.run(train, 2, resumed(config))
    assert state_of(config) == "done"


def test_other_prompts_are_refused(small_run, tmp_path, workers):
    config = make_config(small_run, tmp_path / "run", "GRPO, DP2")
    workers.run(train, 1, config, Position(1))
    other = tmp_path / "other.jsonl"
    other.write_text("".join((small_run.folder / "train.jsonl").read_text().splitlines(keepends=True)[:-1]))
    changed = replace(config, rollout=replace(config.rollout, prompts=other))
    with pytest.raises(ValueError, match=r"prompts: .* are not those of the run's checkpoint, allowed: the same"):
        workers.run(train, 1, resumed(changed))


def test_without_resume_a_folder_that_holds_a_run_is_refused(small_run, tmp_path, workers):
    config = make_config(small_run, tmp_path / "run", "GRPO, DP2")
    workers.run(train, 1, config, Position(0, 0))
    with pytest.raises(ValueError, match=r"output: .* already holds a run, allowed: another folder, or resume"):
        config.check(1)


def test_fewer_steps_than_are_done_are_refused(small_run, tmp_path, workers):
    config = make_config(small_run, tmp_path / "run", "GRPO, DP2", save_every=1)
    workers.run(train, 1, config, Position(3))
    shorter = replace(config, run=replace(config.run, num_steps=2, resume=True))
    with pytest.raises(ValueError, match="num_steps: got 2, allowed for a run that is at step 3: from there on"):
        shorter.check(1)


def test_another_kind_of_run_and_another_model_are_refused_before_anything_starts(small_run, tmp_path, workers):
    config = make_config(small_run, tmp_path / "run", "GRPO, DP2", save_every=1)
    workers.run(train, 1, config, Position(1))
    before = (config.run.output / "config.json").read_bytes()
    with pytest.raises(ValueError, match="output: holds the checkpoints of a policy run of policy, allowed: those of"):
        resumed(replace(config, recipe=PPO)).check(1)
    rows = sft_config(small_run, tmp_path, "run", 10, 15)
    with pytest.raises(ValueError, match="allowed: those of a sft run of"):
        replace(rows, run=replace(rows.run, resume=True)).check(1)
    make_tiny_qwen(["--out", str(tmp_path / "other"), "--num-layers", "2"])
    with pytest.raises(ValueError, match=r"model: .* is of another shape than the run's checkpoint"):
        replace(config, run=replace(config.run, resume=True, model=tmp_path / "other")).check(1)
    assert (config.run.output / "config.json").read_bytes() == before


def test_a_run_that_is_going_on_is_left_alone(small_run, tmp_path, workers):
    config = make_config(small_run, tmp_path / "run", "GRPO, DP2", save_every=1)
    workers.run(train, 1, config, Position(1))
    path = config.run.output / "status.json"
    status = json.loads(path.read_text()) | {"state": "running", "pid": os.getppid()}
    path.write_text(json.dumps(status | {"started": "2100-01-01T00:00:00+00:00"}))
    with pytest.raises(ValueError, match=r"output: a run is going on in .* \(process \d+\), allowed: another folder"):
        resumed(config).check(1)


def test_damaged_checkpoints_are_set_aside_and_cost_no_good_one(small_run, tmp_path, workers):
    config = make_config(small_run, tmp_path / "run", "GRPO, DP2", save_every=1, keep_last=3)
    workers.run(train, 1, config)
    folder = CheckpointFolder(config.run.output / "checkpoints")
    assert folder.names() == ["step_000002", "step_000003", "step_000004"]
    for name in folder.names()[1:]:
        with (folder.path(name) / "state.pt").open("ab") as file:
            file.write(b"x")
    workers.run(train, 1, resumed(config))
    assert folder.names() == ["step_000002", "step_000003", "step_000004"]
    assert (folder.root / "latest").read_text() == "step_000004\n"
    aside = sorted(path.name for path in folder.root.glob("*.damaged"))
    assert aside == ["step_000003.damaged", "step_000004.damaged"]


def test_a_finished_run_can_be_prolonged(small_run, tmp_path, workers):
    short = make_config(small_run, tmp_path / "run", "GRPO, DP2")
    longer = make_config(small_run, tmp_path / "longer", "GRPO, DP2")
    workers.run(train, 2, replace(short, run=replace(short.run, num_steps=2)))
    workers.run(train, 2, resumed(short))
    assert state_of(short) == "done"
    workers.run(train, 2, longer)
    assert outcome(short.run.output) == outcome(longer.run.output)


def break_weights(world, config: PolicyConfig) -> None:
    """From step 2 on every loss is NaN."""
    from megarl import trainer

    original = trainer.update

    def broken(trainable, packs, *arguments, **options):
        if trainable.num_steps >= 2:
            for pack in packs:
                pack.advantages.fill_(float("nan"))
        return original(trainable, packs, *arguments, **options)

    with patch.object(trainer, "update", broken):
        train_policy(config, config.check(world.world_size), world)


def test_a_run_that_gives_up_is_saved_first(small_run, tmp_path, workers):
    """Two mini-batches a step: the limit of skipped steps is met in step 6, whose state is kept."""
    config = make_config(small_run, tmp_path / "run", "GRPO, DP2")
    config = replace(config, run=replace(config.run, num_steps=20))
    with pytest.raises(NotFinite, match=f"{MAX_SKIPPED_STEPS} optimizer steps in a row"):
        workers.run(break_weights, 1, config)
    assert CheckpointFolder(config.run.output / "checkpoints").names() == ["step_000005_update_001"]
    assert json.loads((config.run.output / "status.json").read_text())["state"] == "failed"
    workers.run(train, 1, resumed(replace(config, run=replace(config.run, num_steps=6))))
    assert state_of(config) == "done"


def sft(world, config: SFTConfig) -> None:
    train_sft(config, config.check(world.world_size), world)


def sft_config(small_run, folder: Path, output: str, num_rows: int, num_steps: int) -> SFTConfig:
    """Rows of which each has a loss of its own."""
    path = folder / f"{num_rows} rows.jsonl"
    chats = [
        [{"role": "user", "content": "1" * (row + 1)}, {"role": "assistant", "content": str(row) * (row + 1)}]
        for row in range(num_rows)
    ]
    path.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    run = small_run.config(folder / output, run={"num_steps": num_steps}).run
    data = DemonstrationSettings(path, batch_size=2)
    return SFTConfig(run, data, Layout(), OptimizerSettings(lr=1e-3))


@pytest.mark.parametrize("world_size", [1, 2])
def test_rows_go_on_in_the_order_of_the_unbroken_run(small_run, tmp_path, workers, world_size):
    """10 rows, 2 a step, 3 epochs; stopped after step 7, in the middle of the second."""
    workers.run(sft, 1, sft_config(small_run, tmp_path, "unbroken", 10, 15))
    workers.run(sft, 1, sft_config(small_run, tmp_path, "stopped", 10, 7))
    longer = sft_config(small_run, tmp_path, "stopped", 10, 15)
    workers.run(sft, world_size, replace(longer, run=replace(longer.run, resume=True)))
    losses = [[row["loss"] for row in read_metrics(tmp_path / one).values()] for one in ("unbroken", "stopped")]
    assert len(set(losses[0])) == 15
    assert losses[1] == (losses[0] if world_size == 1 else pytest.approx(losses[0], abs=1e-6))


def test_other_rows_are_refused(small_run, tmp_path, workers):
    workers.run(sft, 1, sft_config(small_run, tmp_path, "run", 10, 7))
    changed = sft_config(small_run, tmp_path, "run", 12, 15)
    with pytest.raises(ValueError, match="data: the rows are not those of the run's checkpoint"):
        workers.run(sft, 1, replace(changed, run=replace(changed.run, resume=True)))
