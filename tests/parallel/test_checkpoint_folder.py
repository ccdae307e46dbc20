"""Which checkpoints are whole, which are kept, and what a full disk says; all in one process."""

import errno
import json
import os
import re
import shutil

import pytest

from parallel.checkpoint_folder import CheckpointFolder, CheckpointSettings, checksum, kept, write_whole

NAMES = [f"step_{step:06d}" for step in range(1, 7)]
SCORES = {NAMES[1]: 0.5, NAMES[3]: 0.9, NAMES[5]: 0.9}
"""Every step is saved; only 2, 4 and 6 have the metric, and the last two are equally good."""


def steps(names) -> list[int]:
    return sorted(int(name.removeprefix("step_")) for name in names)


def metrics(scores) -> dict:
    return {name: scores.get(name) for name in NAMES}


def test_the_best_are_kept_with_the_newest_of_equals_first():
    assert steps(kept(NAMES, metrics(SCORES), CheckpointSettings(keep_last=1, keep_best=2))) == [4, 6]
    assert steps(kept(NAMES, metrics(SCORES), CheckpointSettings(keep_last=1, keep_best=1))) == [6]
    assert steps(kept(NAMES[:5], metrics(SCORES), CheckpointSettings(keep_last=1, keep_best=2))) == [2, 4, 5]


def test_keeping_no_best_leaves_the_newest_alone():
    assert steps(kept(NAMES, metrics(SCORES), CheckpointSettings(keep_last=1, keep_best=0))) == [6]
    assert steps(kept(NAMES, metrics(SCORES), CheckpointSettings(keep_last=3, keep_best=0))) == [4, 5, 6]


def test_the_lowest_can_be_the_best():
    settings = CheckpointSettings(keep_last=1, keep_best=1, best_is="lowest")
    assert steps(kept(NAMES, metrics(SCORES), settings)) == [2, 6]


@pytest.mark.parametrize("useless", [None, float("nan"), float("inf"), "0.99"])
def test_a_metric_that_is_no_number_never_counts_as_best(useless):
    scores = {**SCORES, NAMES[0]: useless}
    assert steps(kept(NAMES, metrics(scores), CheckpointSettings(keep_last=1, keep_best=2))) == [4, 6]


@pytest.mark.parametrize("number", [1, 2, 6, 7, 100])
def test_the_newest_is_always_kept(number):
    assert NAMES[-1] in kept(NAMES, metrics(SCORES), CheckpointSettings(keep_last=number))
    assert kept([], {}, CheckpointSettings(keep_last=number)) == set()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"save_every": -1}, "save_every: got -1, allowed: from 0"),
        ({"save_every_updates": -2}, "save_every_updates: got -2, allowed: from 0"),
        ({"keep_last": 0}, "keep_last: got 0, allowed: from 1"),
        ({"keep_best": -1}, "keep_best: got -1, allowed: from 0"),
        ({"best_is": "largest"}, "best_is: got 'largest', allowed: highest, lowest"),
    ],
)
def test_settings_without_meaning_are_refused(changes, message):
    with pytest.raises(ValueError, match=f"^{message}$"):
        CheckpointSettings(**changes).check()


def make(folder: CheckpointFolder, name: str, score: float | None = None) -> None:
    """Write a checkpoint of one file."""
    path = folder.path(name)
    (path / "policy").mkdir(parents=True)
    (path / "policy" / "weights").write_bytes(name.encode())
    metrics = {} if score is None else {"score": score}
    (path / "info.json").write_text(json.dumps({"step": 1, "optimizer_steps": {}, "metrics": metrics}))
    files = ["info.json", "policy/weights"]
    (path / "SHA256SUMS").write_text("".join(f"{checksum(path / file)}  {file}\n" for file in files))


def test_removing_keeps_what_the_settings_say_and_clears_what_is_half_written(tmp_path):
    folder = CheckpointFolder(tmp_path)
    for name in NAMES:
        make(folder, name, SCORES.get(name))
    make(folder, ".step_000009.partial")
    removed = folder.retain(CheckpointSettings(keep_last=1, keep_best=2, best_metric="score"))
    assert (steps(removed), steps(folder.names())) == ([1, 2, 3, 5], [4, 6])
    assert folder.unfinished() == []
    assert sorted(path.name for path in tmp_path.iterdir()) == [NAMES[3], NAMES[5]]


def test_a_half_written_folder_is_no_checkpoint(tmp_path):
    folder = CheckpointFolder(tmp_path)
    make(folder, NAMES[0])
    make(folder, ".step_000002.partial")
    (tmp_path / NAMES[2]).mkdir()  # as when a removal was cut short: its checksums go first
    assert folder.names() == [NAMES[0]]
    assert folder.unfinished() == [".step_000002.partial"]
    assert CheckpointFolder(tmp_path / "nothing").names() == []


@pytest.mark.parametrize("damage", ["a bit flipped", "cut short", "missing", "no checksums", "none listed", "a pipe"])
def test_damage_is_noticed_and_named(tmp_path, damage):
    folder = CheckpointFolder(tmp_path)
    make(folder, NAMES[0])
    assert folder.problem(NAMES[0]) is None
    weights = folder.path(NAMES[0]) / "policy" / "weights"
    if damage == "a bit flipped":
        weights.write_bytes(bytes([weights.read_bytes()[0] ^ 1]) + weights.read_bytes()[1:])
    elif damage == "cut short":
        weights.write_bytes(weights.read_bytes()[:-1])
    elif damage == "missing":
        weights.unlink()
    elif damage == "a pipe":
        weights.unlink()
        os.mkfifo(weights)
    else:
        (folder.path(NAMES[0]) / "SHA256SUMS").unlink()
        if damage == "none listed":
            (folder.path(NAMES[0]) / "SHA256SUMS").touch()
    problem = folder.problem(NAMES[0])
    assert problem is not None
    assert ("SHA256SUMS" if damage in ("no checksums", "none listed") else "policy/weights") in problem


def test_ranks_share_the_checking_and_one_of_them_notices(tmp_path):
    folder = CheckpointFolder(tmp_path)
    make(folder, NAMES[0])
    (folder.path(NAMES[0]) / "policy" / "weights").write_bytes(b"other")
    problems = [folder.problem(NAMES[0], part, 3) for part in range(3)]
    assert [problem is None for problem in problems].count(False) == 1


def test_a_checkpoint_that_does_not_fit_says_what_to_change(tmp_path):
    free = shutil.disk_usage(tmp_path).free
    CheckpointFolder(tmp_path).check_room(free // 2, CheckpointSettings())
    with pytest.raises(OSError, match=re.escape("keep fewer (keep_last is 2, keep_best 1)")) as caught:
        CheckpointFolder(tmp_path).check_room(free + 2**40, CheckpointSettings(keep_best=1))
    assert caught.value.errno == errno.ENOSPC


def test_a_file_that_is_replaced_is_old_or_new_but_never_half(tmp_path):
    path = tmp_path / "file"
    write_whole(path, b"old")
    write_whole(path, b"new and longer")
    assert path.read_bytes() == b"new and longer"
    assert list(tmp_path.iterdir()) == [path]


def test_what_is_not_named_as_a_checkpoint_is_neither_loaded_nor_removed(tmp_path):
    folder = CheckpointFolder(tmp_path / "checkpoints")
    for name in (*NAMES[:2], "my_best", "zzz_backup", "step_000001.old"):
        make(folder, name)
    make(CheckpointFolder(tmp_path), "step_000009")
    folder.path("step_000009").symlink_to(tmp_path / "step_000009")
    assert folder.names() == NAMES[:2]
    folder.retain(CheckpointSettings(keep_last=1))
    left = {path.name for path in folder.root.iterdir()}
    assert left == {NAMES[1], "my_best", "zzz_backup", "step_000001.old", "step_000009"}
    assert (tmp_path / "step_000009" / "SHA256SUMS").is_file()


def test_a_checkpoint_set_aside_counts_as_none(tmp_path):
    folder = CheckpointFolder(tmp_path)
    for name in NAMES[:2]:
        make(folder, name)
    assert folder.set_aside(NAMES[1]).name == f"{NAMES[1]}.damaged"
    assert folder.names() == NAMES[:1]
    folder.retain(CheckpointSettings(keep_last=1))
    assert folder.names() == NAMES[:1]
