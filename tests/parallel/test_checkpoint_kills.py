"""Who is killed while saving leaves a checkpoint to go on from, and nothing that looks like one and isn't."""

import logging
import os
import signal
import time
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

import parallel.checkpoint
from parallel.checkpoint import together
from parallel.checkpoint_folder import CheckpointFolder
from parallel.launch import World
from parallel.mesh import Layout
from tests.parallel.test_checkpoint import build, checkpoints, learn
from tests.workers import WorkerDied

MOMENTS = {
    "before the files": (parallel.checkpoint, "write_pieces", False),
    "after the big files": (parallel.checkpoint, "write_pieces", True),
    "before the last file": (parallel.checkpoint, "finish_checkpoint", False),
    "before the pointer": (CheckpointFolder, "move_latest", False),
    "after the pointer": (CheckpointFolder, "move_latest", True),
}


def die_while_saving(world, source: Path, root: Path, moment: str, save_async: bool) -> None:
    """Save step 2; die in the middle of saving step 4, which may go on while two more steps are taken."""
    trainable = build(world, Layout(), source)
    owner = checkpoints(trainable, root, source, keep_last=1, save_async=save_async)
    learn(trainable)
    owner.save("step_000002", {"step": 2}, {}, at_once=True)
    learn(trainable)
    place, name, after = MOMENTS[moment]
    original = getattr(place, name)

    def deadly(*arguments, **options):
        if after:
            original(*arguments, **options)
        os.kill(os.getpid(), signal.SIGKILL)

    with patch.object(place, name, deadly):
        owner.save("step_000004", {"step": 4}, {})
        learn(trainable)
        learn(trainable)
        owner.close()


def go_on(world, source: Path, root: Path) -> tuple[str, int]:
    """Return what is loaded; then save step 4 (again)."""
    trainable = build(world, Layout(), source)
    owner = checkpoints(trainable, root, source, keep_last=1)
    loaded = owner.load_latest()
    assert loaded is not None
    owner.save("step_000004", {"step": 4}, {})
    owner.close()
    return loaded.name, loaded.state["step"]


@pytest.mark.parametrize("save_async", [False, True], ids=["waiting", "background"])
@pytest.mark.parametrize("moment", MOMENTS)
def test_the_last_whole_checkpoint_is_loaded_and_the_other_can_be_written_again(
    workers, tiny_qwen, tmp_path, moment, save_async
):
    root = tmp_path / "checkpoints"
    with pytest.raises(WorkerDied):
        workers.run(die_while_saving, 1, tiny_qwen.qwen2, root, moment, save_async)
    whole = "pointer" in moment
    assert (root / "latest").read_text().strip() == ("step_000004" if moment == "after the pointer" else "step_000002")
    assert CheckpointFolder(root).unfinished() == ([] if whole else [".step_000004.partial"])
    expected = ("step_000004", 4) if whole else ("step_000002", 2)
    assert workers.run(go_on, 1, tiny_qwen.qwen2, root) == [expected]
    assert (root / "latest").read_text().strip() == "step_000004"
    assert CheckpointFolder(root).names() == ["step_000004"]
    assert CheckpointFolder(root).unfinished() == []


def save_while_training_goes_on(world, source: Path, root: Path) -> list[str]:
    """Save steps 2 and 4 in the background with two steps of training after each; returns the warnings of loading."""
    trainable = build(world, Layout(), source)
    owner = checkpoints(trainable, root, source)
    for step in (2, 4):
        learn(trainable)
        owner.save(f"step_{step:06d}", {"step": step}, {})
        learn(trainable)
    owner.close()
    assert (root / "latest").read_text() == "step_000004\n"
    damage = root / "step_000004" / "policy" / "__0_0.distcp"
    if world.rank == 0:
        damage.write_bytes(damage.read_bytes()[:-100] + bytes(100))
    together(trainable.mesh, lambda: None)
    warnings: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("parallel.checkpoint").addHandler(handler)
    loaded = owner.load_latest()
    assert loaded is not None
    assert (loaded.name, trainable.num_steps) == ("step_000002", 1)
    return warnings


def test_a_damaged_checkpoint_is_named_and_the_one_before_is_loaded(workers, tiny_qwen, tmp_path):
    first, second = workers.run(save_while_training_goes_on, 2, tiny_qwen.qwen2, tmp_path / "checkpoints")
    (warning,) = first
    assert "step_000004 is ignored" in warning
    assert "__0_0.distcp is not as it was written" in warning
    assert second == []


def fail_on_one_rank(world: World, source: Path, root: Path) -> tuple[str, float]:
    """Rank 1 finds no room for its part; returns the error of each rank."""
    trainable = build(world, Layout(), source)
    owner = checkpoints(trainable, root, source)
    owner.save("step_000002", {}, {}, at_once=True)

    def full(*arguments):
        raise OSError(28, "No space left on device")

    started = time.monotonic()
    with patch.object(parallel.checkpoint, "checksum", full if world.rank == 1 else parallel.checkpoint.checksum):
        try:
            owner.save("step_000004", {}, {})
            owner.close()
        except (OSError, RuntimeError) as error:
            return str(error), time.monotonic() - started
    return "no error", 0.0


def test_an_error_of_one_rank_ends_saving_on_all_at_once(workers, tiny_qwen, tmp_path):
    root = tmp_path / "checkpoints"
    errors, seconds = zip(*workers.run(fail_on_one_rank, 2, tiny_qwen.qwen2, root), strict=True)
    assert errors == ("rank 1: OSError: [Errno 28] No space left on device", "[Errno 28] No space left on device")
    assert max(seconds) < 30
    assert CheckpointFolder(root).names() == ["step_000002"]
    assert (root / "latest").read_text() == "step_000002\n"


def weights_from_outside(world, source: Path, lr: float) -> tuple[bool, float]:
    """bf16, and weights that come after the optimizer was made: one step without gradients, one with a tiny rate.

    Returns: whether the first changed nothing, and the largest change of the second in units of the last place.
    """
    trainable = build(world, Layout(), source, torch.bfloat16)
    (model,) = trainable.models
    before = [parameter.detach().clone() for parameter in model.parameters()]
    for group in trainable.optimizer.param_groups:
        group["wd_mult"] = 0.0
    trainable.zero_grad()
    assert trainable.step(lr).applied
    unchanged = all(torch.equal(one, other) for one, other in zip(before, model.parameters(), strict=True))
    learn(trainable, lr)
    steps = [
        (parameter.view(torch.int16).int() - old.view(torch.int16).int()).abs().max().item()
        for old, parameter in zip(before, model.parameters(), strict=True)
    ]
    return unchanged, max(steps)


def test_masters_follow_weights_that_are_loaded_after_the_optimizer_was_made(workers, tiny_qwen):
    assert workers.run(weights_from_outside, 1, tiny_qwen.qwen2, 1e-6) == [(True, pytest.approx(0, abs=1))]


def load_weights_alone(world, source: Path, root: Path) -> bool:
    """Whether a step without gradients after loading a checkpoint leaves its bf16 weights as they are."""
    trainable = build(world, Layout(), source, torch.bfloat16)
    learn(trainable)
    owner = checkpoints(trainable, root, source)
    owner.save("step_000001", {}, {}, at_once=True)
    saved = [parameter.detach().clone() for parameter in trainable.models[0].parameters()]
    learn(trainable)
    owner.load_latest()
    for optimizer in trainable.optimizer.chained_optimizers:
        for state in optimizer.optimizer.state.values():
            state["exp_avg"].zero_()  # so that a step without gradients moves nothing
    for group in trainable.optimizer.param_groups:
        group["wd_mult"] = 0.0
    trainable.zero_grad()
    assert trainable.step(1e-2).applied
    return all(torch.equal(one, other) for one, other in zip(saved, trainable.models[0].parameters(), strict=True))


def test_masters_follow_weights_that_a_checkpoint_brings(workers, tiny_qwen, tmp_path):
    assert workers.run(load_weights_alone, 2, tiny_qwen.qwen2, tmp_path / "checkpoints") == [True, True]


def load_other_model(world, source: Path, root: Path) -> str:
    trainable = build(world, Layout(), source)
    try:
        checkpoints(trainable, root, source).load_latest()
    except ValueError as error:
        return str(error)
    return "loaded"


def test_a_checkpoint_of_another_model_is_refused(workers, tiny_qwen, tmp_path):
    root = tmp_path / "checkpoints"
    workers.run(save_untrained, 1, tiny_qwen.qwen2, root)
    (message,) = workers.run(load_other_model, 1, tiny_qwen.qwen3, root)
    assert "is missing in" in message or "has shape" in message


def save_untrained(world, source: Path, root: Path) -> None:
    trainable = build(world, Layout(), source)
    owner = checkpoints(trainable, root, source)
    assert owner.load_latest() is None
    owner.save("step_000000", {}, {}, at_once=True)
