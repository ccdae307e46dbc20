"""Pictures of a run: its curves, from `metrics.jsonl`."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # no display on a cluster node
from matplotlib import pyplot as plt

PANELS = {
    "score": "mean score of the responses",
    "entropy": "entropy of the policy, nats per token",
    "loss": "loss",
    "grad_norm": "gradient norm before clipping",
    "response_tokens": "tokens per response",
    "on_policy_gap": "largest |rollout - training log-prob|",
}
PAIR_PANELS = {
    "loss": "loss",
    "accuracy": "pairs whose chosen answer has the higher reward",
    "margin": "mean reward, chosen - rejected",
    "chosen_log_prob": "mean log-prob of the chosen answer",
    "rejected_log_prob": "mean log-prob of the rejected answer",
    "grad_norm": "gradient norm before clipping",
}


def read_metrics(run_folder: Path) -> dict[int, dict[str, float]]:
    """Return step -> metrics; of a step that is recorded twice (a resumed run) the later record counts."""
    records = {}
    for line in (run_folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        record = {name: float(value) for name, value in json.loads(line).items()}
        records[int(record.pop("step"))] = record
    return dict(sorted(records.items()))


def draw_curves(run_folder: Path, title: str, panels: Mapping[str, str] = PANELS) -> Path:
    """Draw the metrics of a run over its steps into `curves.png`; returns the file.

    Panels (metric -> title) are drawn for the metrics the run has (supervised fine-tuning has no score).
    """
    records = read_metrics(run_folder)
    names = [name for name in panels if any(name in record for record in records.values())]
    columns = min(3, len(names))
    figure, axes = plt.subplots(
        math.ceil(len(names) / columns),
        columns,
        figsize=(4.2 * columns, 3.0 * math.ceil(len(names) / columns)),
        squeeze=False,
        constrained_layout=True,
    )
    for axis, name in zip(axes.flat, names, strict=False):
        steps = [step for step, record in records.items() if name in record]
        axis.plot(steps, [records[step][name] for step in steps], linewidth=1.2)
        axis.set_title(panels[name], fontsize=9)
        axis.set_xlabel("step", fontsize=8)
        axis.tick_params(labelsize=8)
        axis.grid(alpha=0.3)
        if name == "score" and all(0 <= record.get("score", 0) <= 1 for record in records.values()):
            axis.set_ylim(0, 1.02)
        if name == "on_policy_gap":
            axis.set_yscale("log")
    for axis in list(axes.flat)[len(names) :]:
        axis.set_visible(False)
    figure.suptitle(title, fontsize=11)
    path = run_folder / "curves.png"
    figure.savefig(path, dpi=130)
    plt.close(figure)
    return path
