"""`RunKeeper`: what lets a run survive: checkpoints at phase borders, the file that stops it, going on where it was."""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from megarl.faults import explaining_faults
from megarl.progress import Progress
from megarl.run_folder import RunConfig
from megarl.run_list import METRICS
from megarl.run_status import RunStatus
from megarl.saved_state import from_plain, to_plain
from megarl.state import RowState
from megarl.tracking import Tracker
from megarl.updates import NotFinite
from parallel.checkpoint import Checkpoints, Loaded, Saved
from parallel.checkpoint_folder import CHECKPOINTS, CheckpointSettings
from parallel.mesh import Mesh
from parallel.weights import export_hf

logger = logging.getLogger(__name__)

STOP = "stop"
LAST_WRITE_SECONDS = 10.0
"""What a failing run gives to a checkpoint that is being written."""
FREE_TO_CHANGE = {
    "run": ("output", "num_steps", "wandb", "timeout_seconds", "progress_seconds", "resume"),
    "rollout": (
        "eval_prompts",
        "eval_every",
        "eval_max_prompts",
        "reward_threads",
        "reward_timeout_seconds",
        "keep_cache",
    ),
    "layout": None,
    "checkpoints": None,
}
"""What may differ between two parts of a run without changing what it computes (None: the whole section)."""


class RunStopped(Exception):
    """The run was asked to stop; its state is on the disk."""


@dataclass(frozen=True)
class Position:
    """Steps that are done, and optimizer steps of the one under way (None: none is)."""

    step: int
    updates: int | None = None

    @property
    def name(self) -> str:
        """Of a checkpoint; names are in the order of positions."""
        return f"step_{self.step:06d}" + ("" if self.updates is None else f"_update_{self.updates:03d}")


class RunKeeper:
    """Keeps a run's records and saves it; a context manager. Every rank must make the same calls.

    Entering it loads the newest checkpoint into the models where the run is to go on from one: see `loaded`.

    Args:
        name: of the algorithm.
        plain: the config as plain values.
        models: those that are trained.
    """

    def __init__(self, config: RunConfig, mesh: Mesh, plain: Mapping[str, Any], name: str, models: Mapping[str, Saved]):
        self.settings: CheckpointSettings = config.checkpoints
        self.run = config.run
        self.mesh = mesh
        self.plain = plain
        self.name = name
        self.kind = config.kind
        self.checkpoints = Checkpoints(self.run.output / CHECKPOINTS, mesh, models, self.settings)
        self.loaded: Loaded | None = None
        self._saved: Position | None = None
        self._stack = ExitStack()

    def __enter__(self) -> RunKeeper:
        run, rank = self.run, self.mesh.rank
        with ExitStack() as stack:
            stack.push(self._close_checkpoints)
            self.loaded = self.checkpoints.load_latest() if run.resume else None
            step = self.loaded.info["step"] if self.loaded else 0
            metrics = run.output / METRICS
            if run.resume and self.loaded is None and metrics.is_file() and rank == 0:
                metrics.replace(metrics.with_name("metrics.before_restart.jsonl"))
            self.progress = stack.enter_context(
                Progress(self.name, run.num_steps, rank=rank, first_step=step, interval_seconds=run.progress_seconds)
            )
            tracker = Tracker(
                run.output,
                rank=rank,
                config=self.plain,
                wandb_mode=run.wandb,
                resume_step=step if run.resume else None,
            )
            self.tracker = stack.enter_context(tracker)
            self.status = stack.enter_context(RunStatus(run.output, rank=rank, name=self.name, num_steps=run.num_steps))
            self.status.at_step(step)
            stack.enter_context(explaining_faults())  # last, so that status and log tell what to change
            self._stack = stack.pop_all()
        if rank == 0:
            (run.output / STOP).unlink(missing_ok=True)  # obeyed by the process before, or too late for it
        if run.resume and rank == 0:
            where = f"checkpoint {self.loaded.name}" if self.loaded else "the start: there is no checkpoint"
            logger.warning("%s goes on from %s", run.output, where)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, traceback)

    def _close_checkpoints(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.checkpoints.close(None if error is None else LAST_WRITE_SECONDS)

    def accept_config(self) -> None:
        """Write the config to the run folder, once it is known to go with what was loaded."""
        if self.mesh.rank == 0:
            text = json.dumps(self.plain, indent=2)
            (self.run.output / "config.json").write_text(text + "\n", encoding="utf-8")

    @property
    def identity(self) -> str:
        """A hash of all settings that a run's numbers depend on, layout and schedule of saving left aside."""
        return hashlib.sha256(json.dumps(_essential(self.plain), sort_keys=True).encode()).hexdigest()

    def log(self, step: int, metrics: Mapping[str, float], shown: Mapping[str, float]) -> None:
        """Record the metrics of a step that is done, and show some."""
        self.tracker.log(step, metrics)
        self.progress.update(step, shown)
        self.status.at_step(step)

    def at_border(
        self, position: Position, state: Callable[[], Any], due: bool, metrics: Mapping[str, float] | None = None
    ) -> None:
        """Save the run if that is due or if it is to stop.

        Args:
            state: returns plain values; called only where they are saved.

        Raises:
            RunStopped: the file `stop` was there.
        """
        self.status.beat()
        stop = self.mesh.from_first_rank((self.run.output / STOP).exists())
        if (due or stop) and position != self._saved:
            self.save(position, state, metrics or {}, at_once=stop)
        if stop:
            self.checkpoints.wait()
            self.status.stop(f"asked to by the file {STOP}")
            if self.mesh.rank == 0:
                (self.run.output / STOP).unlink(missing_ok=True)
            raise RunStopped(f"stopped after checkpoint {position.name}; --resume goes on from there")

    def step_is_due(self, step: int) -> bool:
        """Whether a checkpoint is to be written after this step."""
        every = self.settings.save_every
        return every > 0 and (step % every == 0 or step == self.run.num_steps)

    def export(self, folder: Path, saved: Saved, card: str = "") -> None:
        """Export a trained model as a Hugging Face folder; a run that goes on replaces what it exported before."""
        self.checkpoints.wait()
        if self.run.resume and self.mesh.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
        export_hf(folder, saved.trainable.models, self.mesh, source_folder=saved.source, card=card)

    def save(self, position: Position, state: Callable[[], Any], metrics: Mapping[str, float], at_once: bool) -> None:
        """Write a checkpoint; see `Checkpoints.save`."""
        info = {
            "step": position.step,
            "updates": position.updates,
            "metrics": {name: value for name, value in metrics.items() if isinstance(value, int | float)},
            "kind": self.kind,
            "layout": self.plain["layout"],
            "world_size": self.mesh.world_size,
        }
        plain = state() if self.mesh.rank == 0 else None
        self.checkpoints.save(position.name, plain, info, at_once=at_once)
        self._saved = position

    def row_state(self, fresh: RowState) -> RowState:
        """Return the state a run on a fixed set of rows begins with: that of the checkpoint, or `fresh`.

        Raises:
            ValueError: the rows are others than the checkpoint's.
        """
        if self.loaded is None:
            self.accept_config()
            return fresh
        state = from_plain(self.loaded.state)
        if state.fingerprint != fresh.fingerprint:
            raise ValueError(
                "data: the rows are not those of the run's checkpoint, allowed: the same, or a new run from the "
                "exported model"
            )
        state.num_skipped = 0
        assert isinstance(state, RowState)
        self.accept_config()
        return state

    def after_row_step(self, state: RowState, metrics: Mapping[str, float]) -> None:
        """`at_border` after a step of such a run."""
        self.at_border(Position(state.step), lambda: to_plain(state), self.step_is_due(state.step), metrics)

    @contextmanager
    def saving_rows(self, state: RowState) -> Iterator[None]:
        """Save such a run when it ends for too many skipped steps."""
        try:
            yield
        except NotFinite:
            self.save(Position(state.step), lambda: to_plain(state), {}, at_once=True)
            raise


def _essential(plain: Mapping[str, Any]) -> dict[str, Any]:
    kept = {}
    for section, values in plain.items():
        free = FREE_TO_CHANGE.get(section, ())
        if free is not None and isinstance(values, Mapping):
            kept[section] = {name: value for name, value in values.items() if name not in free}
        elif free is not None:
            kept[section] = values
    return kept
