"""Metrics of a run: `metrics.jsonl` and `summary.json` in the run folder, and Weights & Biases where asked for."""

from __future__ import annotations

import importlib.util
import json
import logging
import math
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, TextIO, get_args

logger = logging.getLogger(__name__)

WandbMode = Literal["disabled", "offline", "online"]
WANDB_MODES: tuple[str, ...] = get_args(WandbMode)


def check_wandb(mode: str) -> None:
    """Refuse a mode that cannot work, so that a run fails before models are loaded.

    Raises:
        ValueError: unknown mode, the package is missing, or "online" without WANDB_API_KEY in the environment.
    """
    if mode not in WANDB_MODES:
        raise ValueError(f"wandb mode must be one of {', '.join(WANDB_MODES)}, got {mode!r}")
    if mode == "disabled":
        return
    if importlib.util.find_spec("wandb") is None:
        raise ValueError(f"wandb mode {mode!r} needs the package wandb: pip install wandb")
    if mode == "online" and not os.environ.get("WANDB_API_KEY"):
        raise ValueError("wandb mode 'online' needs WANDB_API_KEY in the environment; 'offline' needs no key")


class Tracker:
    """Records the metrics of one run; a context manager.

    Only rank 0 writes files and starts a wandb run; on other ranks every method does nothing. So rank 0 must be given
    reduced metrics, also where the loss lives on the last pipeline stage.

    Files in the run folder:
        metrics.jsonl: one object per `log` call with "step" first, flushed at once. A resumed run appends. NaN and
            infinities, which JSON lacks, are the strings "nan", "inf" and "-inf" (`float` reads them back).
        summary.json: the last value of every metric, what `summarize` was given, and "status", "finished" or "failed".
        wandb/, wandb_id: only with wandb; by the id a resumed online run continues the same wandb run (offline, each
            process writes a wandb run of its own).

    Args:
        run_folder: created if missing.
        rank: global rank of this process.
        config: plain values, for wandb.
        wandb_mode: "disabled"; "offline" writes to the run folder, for `wandb sync` later; "online" needs a key.
        project: wandb project.
        resume_step: of a run that goes on after this step: records of later steps, which it will take again, are
            dropped, so that the file reads as if nothing had happened.

    Raises:
        ValueError: see `check_wandb`.
    """

    def __init__(
        self,
        run_folder: Path,
        *,
        rank: int,
        config: Mapping[str, Any],
        wandb_mode: WandbMode = "disabled",
        project: str = "megarl",
        resume_step: int | None = None,
    ) -> None:
        self._run_folder = run_folder
        self._summary: dict[str, Any] = {}
        self._file: TextIO | None = None  # open from start to finish on rank 0, else None
        self._wandb_run: Any = None
        if rank != 0:
            return
        check_wandb(wandb_mode)
        run_folder.mkdir(parents=True, exist_ok=True)
        if wandb_mode != "disabled":
            self._wandb_run = _start_wandb(run_folder, wandb_mode, project, config)
        if resume_step is not None:
            _drop_later(run_folder / "metrics.jsonl", resume_step)
        self._file = _open_for_appending(run_folder / "metrics.jsonl")

    def __enter__(self) -> Tracker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.finish("finished" if kind is None else "failed")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record metrics of a step, in any order of steps. Numbers, also one-element tensors.

        Raises:
            ValueError: a metric is named "step" or is not a number.
        """
        if self._file is None:
            return
        if "step" in metrics:
            raise ValueError('"step" is the axis of all metrics and cannot be the name of one')
        record = {"step": step} | {name: _number(name, value) for name, value in metrics.items()}
        self._file.write(json.dumps(_json_safe(record), allow_nan=False) + "\n")
        self._file.flush()
        self._summary |= record
        if self._wandb_run is not None:
            self._wandb_run.log(record)

    def summarize(self, values: Mapping[str, Any]) -> None:
        """Add results (plain JSON values) to the summary of the run, which is written at the end.

        Raises:
            TypeError: a value is no JSON value.
        """
        if self._file is None:
            return
        self._summary |= json.loads(json.dumps(_json_safe(values)))  # refuses here what would fail at the end
        if self._wandb_run is not None:
            self._wandb_run.summary.update(dict(values))

    def finish(self, status: str = "finished") -> None:
        """Write summary.json and end the wandb run. A second call does nothing."""
        if self._file is None:
            return
        self._file.close()
        self._file = None
        try:
            path = self._run_folder / "summary.json"
            partial = path.with_suffix(".json.partial")  # renamed when complete: a killed process leaves no half file
            text = json.dumps(_json_safe({**self._summary, "status": status}), indent=2, allow_nan=False)
            partial.write_text(text + "\n", encoding="utf-8")
            partial.replace(path)
        finally:
            if self._wandb_run is not None:
                self._wandb_run.finish(exit_code=0 if status == "finished" else 1)


def _start_wandb(run_folder: Path, mode: WandbMode, project: str, config: Mapping[str, Any]) -> Any:
    import wandb  # slow to import, and most runs do without it

    run_id = _stored_id(run_folder / "wandb_id") if mode == "online" else None
    run = wandb.init(
        project=project,
        name=run_folder.name,
        id=run_id,
        resume=None if run_id is None else "allow",
        dir=str(run_folder),
        mode=mode,
    )
    run.config.update(dict(config), allow_val_change=True)  # a resumed run may have another learning rate
    # wandb's own counter refuses to go backwards; "step" as the declared axis lets evaluation report on any step.
    run.define_metric("step")
    run.define_metric("*", step_metric="step")
    return run


def _stored_id(path: Path) -> str:
    if not path.exists():
        path.write_text(secrets.token_hex(4), encoding="utf-8")
    return path.read_text(encoding="utf-8")


def _drop_later(path: Path, step: int) -> None:
    """Remove the records after a step."""
    if not path.exists():
        return
    kept = [line for line in path.read_bytes().splitlines(keepends=True) if _step_of(line) <= step]
    partial = path.with_name(f".{path.name}.partial")
    partial.write_bytes(b"".join(kept))
    partial.replace(path)


def _step_of(line: bytes) -> float:
    """Return the step of a record; infinity for a line that a killed process left unfinished."""
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return math.inf


def _open_for_appending(path: Path) -> TextIO:
    """Open the metrics, first cutting off a last line that a killed process left unfinished."""
    if path.exists():
        content = path.read_bytes()
        complete = content.rfind(b"\n") + 1
        if complete < len(content):
            logger.warning("%s: dropped an unfinished last record of %d bytes", path, len(content) - complete)
            os.truncate(path, complete)
    return path.open("a", encoding="utf-8")


def _number(name: str, value: Any) -> float:
    if isinstance(value, int):
        return value
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError) as error:  # RuntimeError: a tensor of several elements
        raise ValueError(f"metric {name} must be a number, got {value!r}") from error


def _json_safe(value: Any) -> Any:
    """The same value with "nan", "inf" and "-inf" for the floats that JSON lacks."""
    if isinstance(value, Mapping):
        return {name: _json_safe(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_json_safe(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return repr(value)
    return value
