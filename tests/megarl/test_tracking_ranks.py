"""A whole run on several ranks has one wandb run, which ends once."""

import json
import sys
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import pytest

from megarl.config import PolicyConfig
from megarl.policy_run import train_policy
from parallel.mesh import Layout


@dataclass
class Calls:
    """What a process has told a module that stands for wandb, and for the run it starts."""

    starts: list[dict[str, Any]] = field(default_factory=list)
    records: list[dict[str, float]] = field(default_factory=list)
    exit_codes: list[int] = field(default_factory=list)

    def module(self) -> ModuleType:
        module = ModuleType("wandb")
        module.__spec__ = ModuleSpec("wandb", loader=None)
        module.init = self.init
        return module

    def init(self, **arguments: Any) -> "Calls":
        self.starts.append({name: str(value) for name, value in arguments.items()})
        return self

    @property
    def config(self) -> "Calls":
        return self

    summary = config

    def update(self, values: dict[str, Any], allow_val_change: bool = False) -> None:
        """Of config and summary."""

    def define_metric(self, name: str, step_metric: str | None = None) -> None:
        """Axes."""

    def log(self, record: dict[str, float]) -> None:
        self.records.append(record)

    def finish(self, exit_code: int) -> None:
        self.exit_codes.append(exit_code)


def train(world, config: PolicyConfig) -> tuple[Calls, str]:
    """Calls of this rank in a run, and how it failed."""
    calls = Calls()
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "wandb", calls.module())
        try:
            train_policy(config, config.check(world.world_size), world)
        except RuntimeError as error:
            return calls, str(error)
    return calls, ""


@pytest.mark.parametrize(
    ("world_size", "layout"), [(4, Layout(2)), (2, Layout(1, 2))], ids=["TP2 x DP2", "PP2: the loss is on rank 1"]
)
def test_rank_0_has_the_only_wandb_run_with_the_reduced_loss(small_run, tmp_path, workers, world_size, layout):
    config = small_run.config(tmp_path / "run", layout=layout, run={"wandb": "offline"})
    (first, failure), *others = workers.run(train, world_size, config)
    assert failure == ""
    assert [start["mode"] for start in first.starts] == ["offline"]
    assert first.exit_codes == [0]
    assert [other for other, _ in others] == [Calls()] * (world_size - 1)
    assert [record["step"] for record in first.records] == [1, 2]
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == first.records
    ((alone, _),) = workers.run(train, 1, small_run.config(tmp_path / "alone", run={"wandb": "offline"}))
    for record, expected in zip(first.records, alone.records, strict=True):
        for name in ("loss", "score", "response_tokens"):
            assert record[name] == pytest.approx(expected[name], abs=1e-5)


def test_the_wandb_run_of_a_failed_run_ends_once_too(small_run, tmp_path, workers):
    rule = tmp_path / "rule.py"
    rule.write_text("def rule(prompt, response, answer):\n    raise KeyError(prompt)\n")
    rollout = {"reward": f"{rule}:rule", "eval_prompts": None}
    config = small_run.config(tmp_path / "run", layout=Layout(1, 2), run={"wandb": "offline"}, rollout=rollout)
    (first, failure), (second, other_failure) = workers.run(train, 2, config)
    assert "the reward failed on a response to prompt" in failure
    assert other_failure == failure
    assert (len(first.starts), first.records, first.exit_codes) == (1, [], [1])
    assert second == Calls()
    assert json.loads((tmp_path / "run" / "status.json").read_text())["state"] == "failed"
