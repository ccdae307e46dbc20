import json
import logging
import math
import os
import socket
import struct
import sys
import time
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from megarl.tracking import Tracker, WandbMode, changes, check_wandb


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


def test_a_run_that_goes_on_after_a_step_drops_the_records_after_it(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """Killed in the middle of a record of step 4; goes on after step 2: all reads as if nothing had happened."""
    with Tracker(tmp_path / "unbroken", rank=0, config={}) as tracker:
        for step in range(1, 6):
            tracker.log(step, {"loss": 1 / step} | ({"eval_accuracy": 0.5} if step == 2 else {}))
    content = (tmp_path / "unbroken" / "metrics.jsonl").read_bytes()
    broken = tmp_path / "broken" / "metrics.jsonl"
    broken.parent.mkdir()
    broken.write_bytes(content[: content.index(b'"step": 4') + 20])
    with caplog.at_level(logging.WARNING), Tracker(broken.parent, rank=0, config={}, resume_step=2) as tracker:
        assert broken.read_bytes() == content[: content.index(b'{"step": 3')]
        for step in range(3, 6):
            tracker.log(step, {"loss": 1 / step})
    for name in ("metrics.jsonl", "summary.json"):
        assert (broken.parent / name).read_bytes() == (tmp_path / "unbroken" / name).read_bytes()
    assert sorted(path.name for path in broken.parent.iterdir()) == ["metrics.jsonl", "summary.json"]
    assert f"{broken}: dropped 2 records after step 2" in caplog.messages


@pytest.mark.parametrize(
    ("content", "kept"),
    [
        (b"", b""),
        (b'{"step": 0}\n{"step": 2}\n{"step": 1}\n', b'{"step": 0}\n{"step": 2}\n{"step": 1}\n'),
        (b'{"step": 2, "loss": 1.0}', b'{"step": 2, "loss": 1.0}\n'),  # whole, but for its end of line
        (b'{"step": 1}\n\0\0\0\n[]\n{"loss": 1}\n{"step": 2}\n{"step": 3}\n', b'{"step": 1}\n{"step": 2}\n'),
    ],
)
def test_records_up_to_the_step_stay(tmp_path: Path, content: bytes, kept: bytes):
    (tmp_path / "metrics.jsonl").write_bytes(content)
    with Tracker(tmp_path, rank=1, config={}, resume_step=2):
        assert (tmp_path / "metrics.jsonl").read_bytes() == content  # another rank
    with Tracker(tmp_path, rank=0, config={}, resume_step=2):
        assert (tmp_path / "metrics.jsonl").read_bytes() == kept


def test_a_run_that_goes_on_from_its_beginning_has_no_records(tmp_path: Path):
    with Tracker(tmp_path, rank=0, config={}, resume_step=0) as tracker:
        tracker.log(1, {"loss": 2.0})
    with Tracker(tmp_path, rank=0, config={}, resume_step=0):
        assert read_records(tmp_path) == []
    assert json.loads((tmp_path / "summary.json").read_text()) == {"status": "finished"}


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


@pytest.mark.parametrize("mode", ["online", "offline"])
def test_a_resumed_run_continues_the_same_wandb_run_and_notes_a_changed_config(
    tmp_path: Path,
    wandb_runs: list[StubRun],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    mode: WandbMode,
):
    """With another learning rate; without a folder of checkpoints."""
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    for lr in (0.1, 0.2, 0.2):
        with Tracker(tmp_path, rank=0, config={"optimizer": {"lr": lr}, "seed": 3}, wandb_mode=mode) as tracker:
            tracker.log(1, {"loss": 0.0})
    first, second, third = wandb_runs
    assert len(first.arguments["id"]) == 8
    assert first.arguments["id"] == second.arguments["id"] == third.arguments["id"]
    assert {run.arguments["resume"] for run in wandb_runs} == {"allow"}
    assert second.settings == {"optimizer": {"lr": 0.2}, "seed": 3}
    notes = [message for message in caplog.messages if "another config" in message]
    assert notes == [f"the wandb run {first.arguments['id']} goes on with another config: optimizer.lr: 0.1 -> 0.2"]
    with Tracker(tmp_path / "other", rank=0, config={}, wandb_mode=mode):
        pass
    assert wandb_runs[3].arguments["id"] != first.arguments["id"]


def test_changes_are_named_however_deep_and_also_what_is_new_or_gone():
    before = {"run": {"seed": 0, "model": "a"}, "layers": [1, 2], "lr": math.inf, "same": {"x": None}}
    after = {"run": {"seed": 1, "model": "a", "resume": True}, "layers": (1, 3), "lr": 0.5, "same": {"x": None}}
    assert changes(before, after) == [
        "run.seed: 0 -> 1",
        "run.resume: None -> True",
        "layers: [1, 2] -> [1, 3]",
        "lr: inf -> 0.5",
    ]
    assert changes(before, before) == []


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
    monkeypatch.delenv("WANDB_BASE_URL")
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    check_wandb("online")  # wandb's own address


def test_missing_package_and_unknown_mode_are_refused_and_disabled_needs_neither(monkeypatch: pytest.MonkeyPatch):
    """RC68"""
    monkeypatch.setitem(sys.modules, "wandb", None)
    check_wandb("disabled")
    with pytest.raises(ValueError, match="'offline' needs the package wandb"):
        check_wandb("offline")
    with pytest.raises(ValueError, match="one of disabled, offline, online, got 'on'"):
        check_wandb("on")


def wandb_records(file: Path) -> list[Any]:
    """The records of a wandb file: blocks of 32 KiB after 7 bytes, in them pieces of (checksum, length, kind)."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, position, piece, records = file.read_bytes(), 7, b"", []
    while position < len(data):
        left_in_block = 2**15 - position % 2**15
        if left_in_block < 7:
            position += left_in_block
            continue
        _, length, kind = struct.unpack_from("<IHB", data, position)
        piece += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # a whole record, or the last piece of one
            records.append(Record.FromString(piece))
            piece = b""
    return records


def values_of(items: Any) -> dict[str, Any]:
    """Named values of a wandb record, without wandb's own."""
    named = {item.nested_key[0] if item.nested_key else item.key: json.loads(item.value_json) for item in items}
    return {name: value for name, value in named.items() if not name.startswith("_")}


def test_real_offline_runs_continue_one_run_without_key_or_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Two processes of one run, the second with another learning rate, from its step 2 on; the first fails."""
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("WANDB_SILENT", "true")

    def part(lr: float, steps: tuple[int, ...], error: Exception | None = None) -> list[Any]:
        before = set(tmp_path.glob("wandb/offline-run-*/run-*.wandb"))
        with Tracker(tmp_path, rank=0, config={"lr": lr}, wandb_mode="offline", resume_step=2) as tracker:
            for step in steps:
                tracker.log(step, {"loss": 0.0})
            tracker.log(2, {"eval/accuracy": 0.5})
            if error:
                raise error
        return list(set(tmp_path.glob("wandb/offline-run-*/run-*.wandb")) - before)

    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{server.getsockname()[1]}")
        with pytest.raises(RuntimeError, match="out of memory"):
            part(0.1, (2, 4, 6), RuntimeError("out of memory"))
        (first_file,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
        time.sleep(1.1)  # wandb names its folders by the second
        (second_file,) = part(0.2, (4, 6, 8))
        server.setblocking(False)
        with pytest.raises(BlockingIOError):  # nobody has called
            server.accept()
    for file, lr, steps, status in ((first_file, 0.1, (2, 4, 6), 1), (second_file, 0.2, (4, 6, 8), 0)):
        records = wandb_records(file)
        (run,) = [record.run for record in records if record.HasField("run")]
        assert run.run_id == json.loads((tmp_path / "wandb_run.json").read_text())["id"]
        (config,) = [record.config for record in records if record.HasField("config")]
        assert values_of(config.update) == {"lr": lr}
        history = [values_of(record.history.item) for record in records if record.HasField("history")]
        expected = [{"step": step, "loss": 0.0} for step in steps] + [{"step": 2, "eval/accuracy": 0.5}]
        assert history == expected
        axes = [record.metric for record in records if record.HasField("metric")]
        assert [(axis.name, axis.glob_name, axis.step_metric) for axis in axes] == [("step", "", ""), ("", "*", "step")]
        assert [record.exit.exit_code for record in records if record.HasField("exit")] == [status]
    assert [record["step"] for record in read_records(tmp_path)] == [2, 2, 4, 6, 8, 2]


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
