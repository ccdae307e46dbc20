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
        wandb/, wandb_run.json: only with wandb: its files; id and config of the wandb run, which a run that goes on
            continues. Online, steps that are taken again are there twice. Offline, each process writes a file of its
            own, all with that id; `wandb sync` uploads those of one id in order of their start (wandb 0.31; older ones
            may keep only the last).

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
        metrics = run_folder / "metrics.jsonl"
        for record in [] if resume_step is None else _drop_later(metrics, resume_step):
            self._summary |= record
        self._file = _open_for_appending(metrics)
        if wandb_mode != "disabled":
            self._wandb_run = _start_wandb(run_folder, wandb_mode, project, config)

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
            text = json.dumps(_json_safe({**self._summary, "status": status}), indent=2, allow_nan=False)
            _write_whole(self._run_folder / "summary.json", text.encode() + b"\n")
        finally:
            if self._wandb_run is not None:
                self._wandb_run.finish(exit_code=0 if status == "finished" else 1)


def _start_wandb(run_folder: Path, mode: WandbMode, project: str, config: Mapping[str, Any]) -> Any:
    import wandb  # slow to import, and most runs do without it

    run = wandb.init(
        project=project,
        name=run_folder.name,
        id=_same_id(run_folder / "wandb_run.json", config),
        resume="allow",  # the run of this id, or a new one
        dir=str(run_folder),
        mode=mode,
    )
    run.config.update(dict(config), allow_val_change=True)  # a resumed run may have another learning rate
    # wandb's own counter refuses to go backwards; "step" as the declared axis lets evaluation report on any step.
    run.define_metric("step")
    run.define_metric("*", step_metric="step")
    return run


def _same_id(path: Path, config: Mapping[str, Any]) -> str:
    """Return the id of the run folder's wandb run, a new one at first. Keeps it and the config in a file, and logs what
    has changed in the config since."""
    run_id, now = secrets.token_hex(4), _json_safe(config)
    if path.exists():
        stored = json.loads(path.read_text(encoding="utf-8"))
        run_id = stored["id"]
        for change in changes(stored["config"], now):
            logger.warning("the wandb run %s goes on with another config: %s", run_id, change)
    _write_whole(path, json.dumps({"id": run_id, "config": now}, indent=2).encode() + b"\n")
    return run_id


def changes(before: Any, after: Any, name: str = "") -> list[str]:
    """Return what differs between two plain values, by name: `run.seed: 0 -> 1`."""
    if isinstance(before, Mapping) and isinstance(after, Mapping):
        keys = dict.fromkeys([*before, *after])
        pairs = ((key, before.get(key), after.get(key)) for key in keys)
        return [line for key, old, new in pairs for line in changes(old, new, f"{name}.{key}" if name else str(key))]
    before, after = (list(value) if isinstance(value, tuple) else value for value in (before, after))
    return [] if before == after else [f"{name}: {before!r} -> {after!r}"]


def _write_whole(path: Path, content: bytes) -> None:
    """Write a file that appears when it is complete: a killed process leaves no half file."""
    partial = path.with_name(f".{path.name}.partial")
    partial.write_bytes(content)
    partial.replace(path)


def _drop_later(path: Path, step: int) -> list[dict[str, Any]]:
    """Remove the records after a step, and lines that aren't records; returns those that stay."""
    if not path.exists():
        return []
    content = path.read_bytes()
    lines = content.splitlines()
    kept = [line for line in lines if _step_of(line) <= step]
    if len(kept) < len(lines):
        logger.warning("%s: dropped %d records after step %d", path, len(lines) - len(kept), step)
    whole = b"".join(line + b"\n" for line in kept)
    if whole != content:
        _write_whole(path, whole)
    return [json.loads(line) for line in kept]


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
