"""Does the checkpoint that a run would go on from belong to it? Asked before anything is built."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from parallel.checkpoint_folder import CHECKPOINTS, CheckpointFolder
from parallel.qwen import QwenShape, read_shape
from parallel.stored_weights import HF_PART

if TYPE_CHECKING:
    from megarl.config import RunSettings


def check_checkpoint(run: RunSettings, kind: str, models: Sequence[str], shape: QwenShape) -> None:
    """Check the checkpoint that a run would go on from, by what it says of itself.

    Args:
        kind: of the run; another kind's checkpoint has another state.
        models: names of those that are trained.

    Raises:
        ValueError: it is of another kind of run or another model, or further than this run is to go.
    """
    folder = CheckpointFolder(run.output / CHECKPOINTS)
    newest = folder.names()[-1:] if run.resume else []
    for name in newest:
        info = folder.info(name)
        found = info.get("kind"), sorted(info.get("optimizer_steps") or {})
        if found != (kind, sorted(models)):
            stated = f"{found[0]} run of {', '.join(found[1])}"
            raise ValueError(f"output: holds the checkpoints of a {stated}, allowed: those of a {kind} run of {models}")
        if isinstance(info.get("step"), int) and run.num_steps < info["step"]:
            step = info["step"]
            raise ValueError(f"num_steps: got {run.num_steps}, allowed for a run that is at step {step}: from there on")
        if read_shape(folder.path(name) / "policy" / HF_PART) != shape:
            raise ValueError(
                f"model: {str(run.model)!r} is of another shape than the run's checkpoint, allowed: the same"
            )
