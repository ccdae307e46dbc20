"""Which prompts a step uses: dropped groups are replaced, and with oversampling unfinished ones go on in the next."""

from dataclasses import replace

import pytest

from megarl.batch import Sample
from megarl.config import PolicyConfig
from megarl.data.prompts import PromptExample, user_message
from megarl.groups import GroupCollector
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


def generate(world, config: PolicyConfig, num_steps: int) -> tuple[list, list, int]:
    """Groups of some steps without learning, what is then unfinished, and the prompts used."""
    trainer = PolicyTrainer(config, config.check(world.world_size), build_mesh(config.layout, world))
    trainer.responder = replace(trainer.responder, border_steps=1)
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
        [open_group.prompt.prompt_id for open_group in trainer.state.unfinished],
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
    assert all(len(groups) >= 2 for groups in steps)
    assert sorted(kept + unfinished) == list(range(num_used))
    assert 6 < num_used <= 14
    assert kept != sorted(kept), "no step ended before an earlier prompt was finished"
    for groups in steps:
        for sample in (sample for group in groups for sample in group):
            assert sample.response == tokens[sample.prompt_id, sample.sample_index]
            assert len(sample.rollout_log_probs) == len(sample.response) == len(sample.versions)
