import json
import logging
import math
import os
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from megarl.tracking import Tracker, check_wandb


class StubRun:
    """Stands for a wandb run and records what it is told; `log` takes no counter, which wandb lets go forwards only."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        self.arguments = arguments
        self.environment = dict(os.environ)
        self.logged: list[dict[str, float]] = []
        self.axes: list[tuple[str, str | None]] = []
        self.exit_codes: list[int] = []
        self.settings: dict[str, Any] = {}
        self.summary: dict[str, Any] = {}
        self.config = self

    def update(self, values: dict[str, Any], allow_val_change: bool = False) -> None:
        assert allow_val_change
        self.settings |= values

    def define_metric(self, name: str, step_metric: str | None = None) -> None:
        self.axes.append((name, step_metric))

    def log(self, record: dict[str, float]) -> None:
        self.logged.append(record)

    def finish(self, exit_code: int) -> None:
        self.exit_codes.append(exit_code)


@pytest.fixture
def wandb_runs(monkeypatch: pytest.MonkeyPatch) -> list[StubRun]:
    """The runs started through a stub of the wandb module."""
    runs: list[StubRun] = []

    def init(**arguments: Any) -> StubRun:
        runs.append(StubRun(arguments))
        return runs[-1]

    stub = ModuleType("wandb")
    stub.__spec__ = ModuleSpec("wandb", loader=None)
    stub.init = init
    monkeypatch.setitem(sys.modules, "wandb", stub)
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    return runs


def read_records(run_folder: Path) -> list[dict[str, Any]]:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    lines = (run_folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line, parse_constant=refuse) for line in lines]


def test_each_record_is_on_disk_at_once_with_its_step_and_a_loss_of_zero(tmp_path: Path):
    """RC67"""
    tracker = Tracker(tmp_path / "runs" / "a", rank=0, config={})
    tracker.log(2, {"loss": 0.0, "tokens": 17})
    assert read_records(tmp_path / "runs" / "a") == [{"step": 2, "loss": 0.0, "tokens": 17}]
    tracker.log(4, {"loss": torch.tensor(0.25)})
    assert read_records(tmp_path / "runs" / "a")[1] == {"step": 4, "loss": 0.25}
    tracker.finish()


def test_non_finite_metrics_are_valid_json_and_readable_as_floats(tmp_path: Path):
    with Tracker(tmp_path, rank=0, config={}) as tracker:
        tracker.log(1, {"loss": math.nan, "grad_norm": math.inf, "log_ratio": -math.inf})
        tracker.summarize({"accuracy": {"before": math.nan, "after": [0.5, math.inf]}})
    (record,) = read_records(tmp_path)
    assert record == {"step": 1, "loss": "nan", "grad_norm": "inf", "log_ratio": "-inf"}
    assert math.isnan(float(record["loss"]))
    assert float(record["log_ratio"]) == -math.inf
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["accuracy"] == {"before": "nan", "after": [0.5, "inf"]}


def test_a_resumed_run_appends_and_drops_a_record_that_was_cut_by_a_kill(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    with Tracker(tmp_path, rank=0, config={}) as tracker:
        tracker.log(1, {"loss": 1.0})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "lo')
    with caplog.at_level(logging.WARNING), Tracker(tmp_path, rank=0, config={}) as tracker:
        tracker.log(2, {"loss": 0.5})
    assert read_records(tmp_path) == [{"step": 1, "loss": 1.0}, {"step": 2, "loss": 0.5}]
    assert "dropped an unfinished last record of 15 bytes" in caplog.text


def test_summary_holds_last_values_results_and_status(tmp_path: Path):
    with Tracker(tmp_path, rank=0, config={}) as tracker:
        tracker.log(1, {"loss": 1.0, "reward": 0.1})
        tracker.log(2, {"loss": 0.5})
        tracker.summarize({"greedy_accuracy": 0.98})
    assert json.loads((tmp_path / "summary.json").read_text()) == {
        "step": 2,
        "loss": 0.5,
        "reward": 0.1,
        "greedy_accuracy": 0.98,
        "status": "finished",
    }
    assert sorted(path.name for path in tmp_path.iterdir()) == ["metrics.jsonl", "summary.json"]


def test_exactly_one_rank_starts_a_run_and_ends_it_once(tmp_path: Path, wandb_runs: list[StubRun]):
    """RC65"""
    for rank in range(4):
        with Tracker(tmp_path / f"rank_{rank}", rank=rank, config={"lr": 0.1}, wandb_mode="offline") as tracker:
            tracker.log(1, {"loss": 2.0})
            tracker.summarize({"accuracy": 1.0})
            tracker.finish()
    (run,) = wandb_runs
    assert run.arguments["mode"] == "offline"
    assert run.arguments["dir"] == str(tmp_path / "rank_0")
    assert run.logged == [{"step": 1, "loss": 2.0}]
    assert run.settings == {"lr": 0.1}
    assert run.summary == {"accuracy": 1.0}
    assert run.exit_codes == [0]
    assert [path.name for path in tmp_path.iterdir()] == ["rank_0"]


def test_run_is_ended_once_also_after_an_exception(tmp_path: Path, wandb_runs: list[StubRun]):
    """RC65"""

    def fail() -> None:
        with Tracker(tmp_path, rank=0, config={}, wandb_mode="offline") as tracker:
            tracker.log(1, {"loss": 2.0})
            raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        fail()
    assert wandb_runs[0].exit_codes == [1]
    assert json.loads((tmp_path / "summary.json").read_text()) == {"step": 1, "loss": 2.0, "status": "failed"}


def test_evaluation_may_report_on_an_earlier_step_and_its_own_count(tmp_path: Path, wandb_runs: list[StubRun]):
    """RC67"""
    with Tracker(tmp_path, rank=0, config={}, wandb_mode="offline") as tracker:
        tracker.log(2, {"loss": 1.0})
        tracker.log(4, {"loss": 0.0})
        tracker.log(6, {"loss": 0.5})
        tracker.log(4, {"eval/accuracy": 0.75, "eval/samples": 128})
    (run,) = wandb_runs
    assert run.axes == [("step", None), ("*", "step")]
    assert [record["step"] for record in run.logged] == [2, 4, 6, 4]
    assert run.logged == read_records(tmp_path)


def test_resumed_online_run_continues_the_same_wandb_run_with_a_changed_config(
    tmp_path: Path, wandb_runs: list[StubRun], monkeypatch: pytest.MonkeyPatch
):
    """RC67"""
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    for lr in (0.1, 0.2):
        with Tracker(tmp_path, rank=0, config={"lr": lr}, wandb_mode="online"):
            pass
    first, second = wandb_runs
    assert first.arguments["id"] == second.arguments["id"]
    assert second.arguments["resume"] == "allow"
    assert second.settings == {"lr": 0.2}


def test_environment_is_left_alone(tmp_path: Path, wandb_runs: list[StubRun]):
    """RC68"""
    before = dict(os.environ)
    for mode in ("disabled", "offline"):
        with Tracker(tmp_path / mode, rank=0, config={"note": None}, wandb_mode=mode) as tracker:
            tracker.log(1, {"loss": 1.0})
    assert dict(os.environ) == before == wandb_runs[0].environment
    assert len(wandb_runs) == 1


def test_online_without_a_key_fails_at_start_in_plain_words(
    tmp_path: Path, wandb_runs: list[StubRun], monkeypatch: pytest.MonkeyPatch
):
    """RC68"""
    monkeypatch.setenv("WANDB_BASE_URL", "http://localhost:1")
    with pytest.raises(ValueError, match="'online' needs WANDB_API_KEY in the environment; 'offline' needs no key"):
        Tracker(tmp_path / "run", rank=0, config={}, wandb_mode="online")
    assert wandb_runs == []
    assert not (tmp_path / "run").exists()


def test_missing_package_and_unknown_mode_are_refused_and_disabled_needs_neither(monkeypatch: pytest.MonkeyPatch):
    """RC68"""
    monkeypatch.setitem(sys.modules, "wandb", None)
    check_wandb("disabled")
    with pytest.raises(ValueError, match="'offline' needs the package wandb"):
        check_wandb("offline")
    with pytest.raises(ValueError, match="one of disabled, offline, online, got 'on'"):
        check_wandb("on")


def test_real_offline_run_writes_into_the_run_folder_without_a_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """RC68"""
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("WANDB_SILENT", "true")
    with Tracker(tmp_path, rank=0, config={"lr": 0.1}, wandb_mode="offline") as tracker:
        tracker.log(4, {"loss": 0.0})
        tracker.log(2, {"eval/accuracy": 0.5})
    (log,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    assert log.stat().st_size > 0
    assert json.loads((tmp_path / "summary.json").read_text())["status"] == "finished"


def test_metrics_that_are_no_numbers_and_results_that_are_no_json_are_refused(tmp_path: Path):
    tracker = Tracker(tmp_path, rank=0, config={})
    with pytest.raises(ValueError, match="metric loss must be a number, got None"):
        tracker.log(1, {"loss": None})
    with pytest.raises(ValueError, match="metric loss must be a number"):
        tracker.log(1, {"loss": torch.zeros(2)})
    with pytest.raises(ValueError, match='"step" is the axis'):
        tracker.log(1, {"step": 3})
    with pytest.raises(TypeError, match="not JSON serializable"):
        tracker.summarize({"path": tmp_path})
    tracker.finish()
    assert read_records(tmp_path) == []
