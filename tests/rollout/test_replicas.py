"""Sharing out requests over data-parallel replicas, and moving late work."""

from pathlib import Path

import pytest

from parallel.launch import World
from parallel.mesh import Layout, build_mesh
from rollout.engine import Engine
from rollout.replicas import SharedRollout, plan_moves, share_out
from rollout.requests import Completion, Request
from rollout.sampling import SamplingParams
from tests.rollout.engine_calls import PROMPTS, load

PARAMS = SamplingParams(max_new_tokens=12, stop_token_ids=(3, 50, 77), seed=4)


def test_the_heaviest_items_go_first_to_whoever_has_least_to_do():
    assert share_out([3, 1, 7, 5, 2], [0, 0]) == [[2, 4], [0, 1, 3]]
    assert share_out([1, 1], [5, 0, 0]) == [[], [0], [1]]
    assert share_out([], [1.0]) == [[]]


@pytest.mark.parametrize(
    ("counts", "after"),
    [
        ([10, 0], [5, 5]),
        ([8, 7], [8, 7]),  # not worth it
        ([1, 0], [1, 0]),
        ([0, 0], [0, 0]),
        ([16, 0, 0, 0], [4, 4, 4, 4]),
        ([9, 9, 0], [6, 6, 6]),
    ],
)
def test_moves_leave_replicas_with_about_as_much(counts, after):
    left = list(counts)
    for source, target, number in plan_moves(counts):
        assert number >= 1
        left[source] -= number
        left[target] += number
    assert left == after


def run_shared(world: World, layout: Layout, folder: Path, long: set[int]) -> tuple[list[Completion], int]:
    """Prompts in `long` get 40 tokens and no stop token, the others few; every replica returns what it finished."""
    mesh = build_mesh(layout, world)
    engine = Engine(load(folder, mesh), mesh, context_length=64)
    requests = [
        Request(number, prompt, 2, max_new_tokens=40 if number in long else 3, stop_token_ids=())
        for number, prompt in enumerate(PROMPTS)
    ]
    completions: list[Completion] = []
    with SharedRollout(engine, PARAMS, border_steps=2) as shared:
        shared.add(requests)
        while shared.busy:
            completions += shared.run_to_border()
        shared.add([Request(9, PROMPTS[0])])  # more work after everything was done
        while shared.busy:
            completions += shared.run_to_border()
        return completions, shared.num_moved


def run_alone(world: World, folder: Path, long: set[int]) -> list[Completion]:
    return run_shared(world, Layout(), folder, long)[0]


@pytest.mark.parametrize("layout", [Layout(), Layout(2), Layout(1, 2)], ids=["DP2", "TP2 x DP2", "PP2 x DP2"])
def test_late_work_moves_to_the_replica_that_is_done_and_changes_no_token(workers, folder, layout):
    long = {0, 2, 4}  # all on replica 0: equal weights are dealt out in turn
    (alone,) = workers.run(run_alone, 1, folder, long)
    expected = {(c.prompt_id, c.sample_index): c.tokens for c in alone}
    ranks = workers.run(run_shared, 2 * layout.model_parallel_size, layout, folder, long)
    by_replica = {}
    for completions, num_moved in ranks:
        assert num_moved >= 2
        found = {(c.prompt_id, c.sample_index): c.tokens for c in completions}
        assert len(found) == len(completions)
        by_replica[tuple(sorted(found))] = found
    first, second = by_replica.values()  # all ranks of a replica return the same
    assert not set(first) & set(second)
    assert first | second == expected
    assert len(expected) == 11
