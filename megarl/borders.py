"""What a policy run saves between its phases: responses after a rollout, checkpoints between optimizer steps."""

from __future__ import annotations

import io
import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from megarl.keeper import Position, RunKeeper
from megarl.saved_state import from_plain, to_plain
from megarl.state import State
from megarl.trainer import PolicyTrainer
from parallel.checkpoint_folder import CHECKPOINTS, CheckpointFolder, write_whole
from parallel.mesh import Mesh

logger = logging.getLogger(__name__)

ROLLOUTS = "rollouts"
STEP = re.compile(r"step_(\d+)")


class RolloutFiles:
    """`rollouts/step_N.pt` in the run folder: the state of a run after the rollout of step N.

    A run that goes on from an older checkpoint comes to the same steps again, with the same weights: it takes these
    responses and does not generate them a second time. Only rank 0 reads and writes.

    Args:
        identity: of the settings (`RunKeeper.identity`): what was generated under others is left aside.
        keep_last: number of the newest checkpoints.
    """

    def __init__(self, output: Path, mesh: Mesh, identity: str, keep_last: int):
        self.keep_last = keep_last
        self.folder = output / ROLLOUTS
        self.checkpoints = CheckpointFolder(output / CHECKPOINTS)
        self.mesh = mesh
        self.identity = identity

    def write(self, state: State) -> None:
        """Save the state, whose rollout is done."""
        if self.mesh.rank == 0:
            self.folder.mkdir(exist_ok=True)
            buffer = io.BytesIO()
            torch.save({"identity": self.identity, "state": to_plain(state)}, buffer)
            write_whole(self._path(state.step), buffer.getvalue())

    def replay(self, state: State) -> State | None:
        """Return the state after the rollout of the step that `state` is about to begin, on all ranks; None if it has
        to be generated."""
        found = self.mesh.from_first_rank(self._read(state) if self.mesh.rank == 0 else None)
        if found is not None and self.mesh.rank == 0:
            logger.warning("step %d: its responses were generated before, %s", state.step + 1, self._path(state.step))
        return found

    def remove_old(self) -> None:
        """Remove what lies before the oldest of the newest checkpoints, from which a run would go on."""
        if self.mesh.rank != 0:
            return
        names = self.checkpoints.names()
        match = STEP.match(names[-self.keep_last :][0]) if names else None
        oldest = int(match[1]) if match else 0
        for path in self.folder.glob("step_*.pt"):
            match = STEP.match(path.name)
            if match and int(match[1]) <= oldest:
                path.unlink()

    def _path(self, step: int) -> Path:
        return self.folder / f"step_{step + 1:06d}.pt"

    def _read(self, state: State) -> State | None:
        path = self._path(state.step)
        if not path.is_file():
            return None
        try:
            record = torch.load(path, map_location="cpu", weights_only=True)
            found = from_plain(record["state"])
        except Exception as error:  # whatever is wrong with the file: it can be generated again
            logger.warning("%s can't be read and is generated again: %s", path, error)
            return None
        before = (state.step, state.optimizer_step, state.critic_step, state.fingerprint)
        if record["identity"] != self.identity or before != (
            *(found.step, found.optimizer_step, found.critic_step, found.fingerprint),
        ):
            logger.warning("%s was generated under other settings and is generated again", path)
            return None
        assert isinstance(found, State)
        return found


class PolicyBorders:
    """Saves a policy run: see `megarl.trainer.PolicyTrainer.step` for its phases."""

    def __init__(self, trainer: PolicyTrainer, keeper: RunKeeper, rollouts: RolloutFiles | None):
        self.trainer = trainer
        self.keeper = keeper
        self.rollouts = rollouts

    def within_step(self, phase: str) -> None:
        """Call it after each phase of a step."""
        state, every = self.trainer.state, self.keeper.settings.save_every_updates
        assert state.under_way is not None
        if self.rollouts is not None and (phase == "rollout" or (phase == "assessment" and self._assessment_is_work())):
            self.rollouts.write(state)
        done = len(state.under_way.updates)
        logger.info("step %d: %s%s done", state.step + 1, phase, f" {done}" if phase == "update" else "")
        due = phase == "update" and every > 0 and done % every == 0 and not self._step_follows_at_once(done)
        self.keeper.at_border(Position(state.step, done), self._plain, due)

    def after_step(self, metrics: Mapping[str, float]) -> None:
        """Call it when the step, its evaluation and its records are done."""
        step = self.trainer.state.step
        self.keeper.at_border(Position(step), self._plain, self.keeper.step_is_due(step), metrics)
        logger.info("step %d: done", step)
        if self.rollouts is not None:
            self.rollouts.remove_old()

    def save_now(self) -> None:
        """Save a run that is about to fail."""
        state = self.trainer.state
        done = None if state.under_way is None else len(state.under_way.updates)
        self.keeper.save(Position(state.step, done), self._plain, {}, at_once=True)

    def _plain(self) -> Any:
        return to_plain(self.trainer.state)

    def _assessment_is_work(self) -> bool:
        """Whether other models take part in it; otherwise it is done again in no time."""
        assessor = self.trainer.assessor
        return any(model is not None for model in (assessor.critic, assessor.reference, assessor.reward_model))

    def _step_follows_at_once(self, done: int) -> bool:
        """Whether the step ends here and is itself saved, with no evaluation in between."""
        state, rollout = self.trainer.state, self.trainer.config.rollout
        assert state.under_way is not None
        assert state.under_way.samples is not None
        last = done == len(self.trainer.split(state.under_way.samples)) * rollout.num_epochs
        evaluates = rollout.eval_every > 0 and (state.step + 1) % rollout.eval_every == 0
        return last and not evaluates and self.keeper.step_is_due(state.step + 1)
