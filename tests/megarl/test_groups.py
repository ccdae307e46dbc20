"""Which prompts a step uses: dropped groups are replaced, and with oversampling unfinished ones go on in the next."""

from dataclasses import replace

import pytest

from megarl.batch import Sample
from megarl.config import PolicyConfig
from megarl.data.prompts import PromptExample, user_message
from megarl.groups import GroupCollector, observed_keep_rate
from megarl.recipes import DAPO
from megarl.trainer import PolicyTrainer
from parallel.mesh import Layout, build_mesh


def new_collector(**settings) -> GroupCollector:
    """Prompts are numbered; a group is kept if its scores differ."""
    numbers = iter(range(1000))
    return GroupCollector(
        lambda count: [PromptExample(next(numbers), user_message("?"), "") for _ in range(count)],
        lambda scores: len(set(scores)) > 1,
        **{"wanted": 3, "max_rounds": 4} | settings,
    )


def group(prompt: PromptExample, *scores: float) -> list[Sample]:
    return [Sample(prompt.prompt_id, index, (1,), [2], None, score, False) for index, score in enumerate(scores)]


def test_a_dropped_group_is_replaced_at_once_and_nothing_is_started_in_vain():
    collector = new_collector()
    first, second, third = collector.start()
    assert collector.judge([group(second, 0, 1)]) == []
    (fourth,) = collector.judge([group(first, 1, 1)])
    assert fourth.prompt_id == 3
    assert not collector.enough
    assert collector.judge([group(fourth, 0, 1), group(third, 0, 1)]) is None
    assert [kept[0].prompt_id for kept in collector.kept] == [1, 3, 2]
    assert (collector.num_started, collector.num_under_way, len(collector.everything)) == (4, 0, 8)
    assert collector.num_rounds == 2


def test_prompts_run_out_at_the_bound():
    """RC22: 3 rounds of 3 prompts, all of whose groups have equal scores."""
    collector = new_collector(max_rounds=3)
    waiting = collector.start()
    while waiting:
        prompt = waiting.pop()
        waiting += collector.judge([group(prompt, 1, 1)])
    assert (collector.num_started, collector.num_rounds, collector.kept) == (9, 3, [])


def test_groups_from_the_last_step_count_as_under_way():
    collector = new_collector(oversampling=2.0, num_under_way=2)
    assert len(collector.start()) == 4


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, True),  # dropped groups are replaced at once
        ({"keep": None}, False),
        ({"keep_rate": 0.5}, False),  # rounds wait for all of their groups
        ({"keep": None, "oversampling": 1.5}, True),  # the first that are complete are enough
        ({"oversampling": 1.5}, True),
    ],
)
def test_what_follows_complete_groups_at_once(settings, expected):
    collector = replace(new_collector(), **settings)
    assert collector.reacts_at_once == expected


def generate(world, config: PolicyConfig, num_steps: int) -> tuple[list, list, int]:
    """Groups of some steps without learning, what is then unfinished or left over, and the prompts used."""
    trainer = PolicyTrainer(config, config.check(world.world_size), build_mesh(config.layout, world))
    trainer.responder = replace(trainer.responder, border_steps=1)
    trainer.state.keep_rate = 0.3  # for adaptive rounds
    steps = []
    stale = []
    for step in range(num_steps):
        trainer.state.step = step
        groups, metrics = trainer.generate_groups()
        assert metrics["groups_paused"] == len(trainer.state.unfinished)
        steps.append(groups)
        stale.append(metrics["stale_tokens"])
    assert stale[0] == 0
    assert config.rollout.oversampling == 1 or 0 < max(stale) < 1
    return (
        steps,
        [open_group.prompt.prompt_id for open_group in trainer.state.unfinished]
        + [group[0].prompt_id for group in trainer.state.surplus],
        trainer.state.num_prompts_used,
    )


@pytest.mark.parametrize(("world_size", "layout"), [(1, Layout()), (2, Layout()), (2, Layout(1, 2))])
def test_with_oversampling_unfinished_groups_go_on_in_the_next_step(small_run, tmp_path, workers, world_size, layout):
    few = {"prompts_per_step": 2, "num_mini_batches": 1, "max_new_tokens": 8}
    config = small_run.config(tmp_path, layout=layout, rollout=few | {"oversampling": 3.0})
    everything = small_run.config(tmp_path, rollout={"prompts_per_step": 14, "max_new_tokens": 8})
    (((expected,), _, _),) = workers.run(generate, 1, everything, 1)
    tokens = {(s.prompt_id, s.sample_index): s.response for group in expected for s in group}
    ranks = workers.run(generate, world_size, config, 3)
    steps, unfinished, num_used = ranks[0]
    assert all(rank[1:] == (unfinished, num_used) for rank in ranks)
    kept = [group[0].prompt_id for groups in steps for group in groups]
    assert all(len(groups) == 2 for groups in steps)
    assert sorted(kept + unfinished) == list(range(num_used))
    assert 6 < num_used <= 14
    assert kept != sorted(kept), "no step ended before an earlier prompt was finished"
    for groups in steps:
        for sample in (sample for group in groups for sample in group):
            assert sample.response == tokens[sample.prompt_id, sample.sample_index]
            assert len(sample.rollout_log_probs) == len(sample.response) == len(sample.versions)


def test_rounds_start_what_the_keep_rate_calls_for_and_leave_a_surplus():
    """Half of the groups are expected to be kept, all of them are: 6 prompts for 3 groups, 3 are left over."""
    collector = new_collector(keep_rate=0.5)
    prompts = collector.start()
    assert len(prompts) == 6
    assert collector.judge([group(prompt, 0, 1) for prompt in reversed(prompts[:4])]) == []  # the round isn't over
    assert collector.judge([group(prompt, 0, 1) for prompt in prompts[4:]]) is None
    now, later = collector.split_surplus()
    assert [kept[0].prompt_id for kept in now] == [0, 1, 2]
    assert [kept[0].prompt_id for kept in later] == [3, 4, 5]
    following = new_collector(keep_rate=0.5, kept=later[:2])
    assert len(following.start()) == 2  # one is missing, half are kept


def test_a_round_that_keeps_too_few_is_followed_by_another_within_the_bound():
    collector = new_collector(keep_rate=0.5, max_rounds=3)
    first = collector.start()
    second = collector.judge([group(prompt, 1, 1) for prompt in first])
    assert len(second) == 3  # 6 are needed, 9 are allowed in all
    assert collector.judge([group(prompt, 1, 1) for prompt in second]) == []
    assert (collector.enough, collector.num_started) == (False, 9)


def test_the_keep_rate_follows_what_is_observed():
    assert observed_keep_rate(0.5, num_kept=3, num_judged=10) == pytest.approx(0.7 * 0.5 + 0.3 * 0.3)
    assert observed_keep_rate(0.05, num_kept=0, num_judged=10) == 0.05
    assert observed_keep_rate(0.5, num_kept=0, num_judged=0) == 0.5


@pytest.mark.parametrize(("world_size", "layout"), [(2, Layout()), (2, Layout(1, 2))])
def test_adaptive_rounds_use_the_same_groups_on_every_layout(small_run, tmp_path, workers, world_size, layout):
    """Mixed groups only; every prompt used is trained on once, dropped, or left over."""
    settings = {"prompts_per_step": 2, "num_mini_batches": 1, "adaptive_oversampling": True}

    def config(layout: Layout) -> PolicyConfig:
        return small_run.config(tmp_path, layout=layout, recipe=DAPO, rollout=settings)

    ((expected, left, num_used),) = workers.run(generate, 1, config(Layout()), 3)
    kept = [group[0].prompt_id for groups in expected for group in groups]
    assert len(kept) == 6 == len(set(kept))
    ((_, left_over, _),) = workers.run(generate, 1, config(Layout()), 2)
    assert left_over
    assert left_over == kept[4:]
    assert not set(left) & set(kept)
    for steps, also_left, used in workers.run(generate, world_size, config(layout), 3):
        assert [[group[0].prompt_id for group in groups] for groups in steps] == [kept[:2], kept[2:4], kept[4:]]
        assert (also_left, used) == (left, num_used)
