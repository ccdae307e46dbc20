from dataclasses import replace

import pytest
import torch

from megarl.batch import Sample
from megarl.config import PolicyConfig
from megarl.responses import ExpectedLengths
from megarl.trainer import PolicyTrainer
from parallel.mesh import Layout, build_mesh
from rollout.requests import Paused, Request
from tests.megarl.small_run import STOPS

LAYOUTS = {"DP2": Layout(), "TP2": Layout(2), "PP2": Layout(1, 2)}


def build_trainer(world, config: PolicyConfig) -> PolicyTrainer:
    return PolicyTrainer(config, config.check(world.world_size), build_mesh(config.layout, world))


def respond(world, config: PolicyConfig, num_prompts: list[int]) -> list[list[list[Sample]]]:
    """Groups of 2 responses to the first prompts of the run, once for each number of prompts."""
    trainer = build_trainer(world, config)
    batches = [trainer.prompts.take(0, number, seed=0) for number in num_prompts]
    return [trainer.responder.respond(batch, 2, trainer.sampling) for batch in batches]


def flat(groups: list[list[Sample]]) -> list[Sample]:
    return [sample for group in groups for sample in group]


def plain(groups: list[list[Sample]]) -> list[tuple]:
    """All but the log-probs, which carry rounding errors."""
    return [tuple(replace(sample, rollout_log_probs=None) for sample in group) for group in groups]


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_every_rank_gets_all_groups_in_the_order_of_the_prompts_whatever_the_layout(
    small_run, tmp_path, workers, layout
):
    """With 3 prompts, 1 and none: fewer than data ranks."""
    numbers = [3, 1, 0]
    (alone,) = workers.run(respond, 1, small_run.config(tmp_path), numbers)
    assert [[group[0].prompt_id for group in groups] for groups in alone] == [[0, 1, 2], [0], []]
    assert len({tuple(sample.response) for group in alone[0] for sample in group}) == 6
    for rank in workers.run(respond, 2, small_run.config(tmp_path, layout=layout), numbers):
        for groups, expected in zip(rank, alone, strict=True):
            assert plain(groups) == plain(expected)
            for sample, other in zip(flat(groups), flat(expected), strict=True):
                torch.testing.assert_close(sample.rollout_log_probs, other.rollout_log_probs, rtol=0, atol=1e-5)


def sample_of(prompt: tuple[int, ...], length: int) -> Sample:
    return Sample(0, 0, prompt, [1] * length, torch.zeros(length), score=0.0, truncated=False)


def test_expected_lengths_are_those_seen_last_and_the_mean_for_new_prompts():
    expected = ExpectedLengths()
    long, short, new = Request(0, (1, 2)), Request(1, (3,)), Request(2, (4,))
    assert expected.relative([long, new]) == [1.0, 1.0]
    expected.learn([[sample_of((1, 2), 50)], [sample_of((3,), 10)]])
    expected.learn([[sample_of((1, 2), 20), sample_of((1, 2), 40)]])  # means are 30 and 10 now, 20 together
    assert expected.relative([long, short, new]) == [1.5, 0.5, 1.0]
    begun = Paused(long, 0, tokens=(7,) * 10, scores=(), versions=())
    late = Paused(long, 0, tokens=(7,) * 90, scores=(), versions=())
    assert expected.relative([begun, late]) == [1.0, 1 / 20]


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_the_rule_is_asked_once_per_response(small_run, tmp_path, workers, layout):
    calls = small_run.reward_file.with_suffix(".calls")
    calls.unlink(missing_ok=True)
    workers.run(respond, 2, small_run.config(tmp_path, layout=layout), [3])
    lines = calls.read_text().splitlines()
    assert len(lines) == 6
    assert all(line == f"t{answer}|{answer}" for line, answer in ((line, line.split("|")[1]) for line in lines))
    assert sorted(lines) == sorted(2 * list(set(lines)))  # 2 responses to each of 3 prompts


def test_any_stop_id_ends_a_response_and_the_rule_does_not_see_it(small_run, tmp_path, single_world):
    """RC40: the set of the model's settings and the tokenizer for sampler, metrics and reward alike."""
    config = small_run.config(tmp_path, rollout={"reward": f"{small_run.reward_file}:length"})
    trainer = build_trainer(single_world, config)
    assert trainer.sampling.stop_token_ids == STOPS
    prompts = trainer.prompts.take(0, 10, seed=0)
    samples = flat(trainer.responder.respond(prompts, 8, trainer.sampling))
    ended = [sample for sample in samples if not sample.truncated]
    assert len({sample.response[-1] for sample in ended}) > 10
    assert 20 < len(ended) < 80
    for sample in samples:
        *before, last = sample.response
        assert not set(before) & set(STOPS)
        assert sample.truncated == (last not in STOPS)
        seen = before if last in STOPS else sample.response
        assert sample.score == len(trainer.tokenizer.decode(seen, skip_special_tokens=True))
        assert len(sample.rollout_log_probs) == len(sample.response)


def test_unfinished_responses_score_zero_where_the_config_says_so(small_run, tmp_path, single_world):
    config = small_run.config(tmp_path, rollout={"reward": f"{small_run.reward_file}:right", "require_finished": True})
    trainer = build_trainer(single_world, config)
    samples = flat(trainer.responder.respond(trainer.prompts.take(0, 4, seed=0), 8, trainer.sampling))
    assert {sample.truncated for sample in samples} == {True, False}
    assert [sample.score for sample in samples] == [0.0 if sample.truncated else 1.0 for sample in samples]


def test_a_rule_that_fails_names_the_prompt(small_run, tmp_path, single_world):
    rule = tmp_path / "rule.py"
    rule.write_text("def rule(prompt, response, answer):\n    return None if prompt == 't3' else 0.0\n")
    trainer = build_trainer(single_world, small_run.config(tmp_path, rollout={"reward": f"{rule}:rule"}))
    prompts = [replace(row, prompt_id=100 + row.prompt_id) for row in trainer.prompts.rows]
    with pytest.raises(ValueError, match="the reward of a response to prompt 103 is None; allowed: a finite number"):
        trainer.responder.respond(prompts, 2, trainer.sampling)


def test_after_a_reward_has_failed_no_other_is_called(small_run, tmp_path, single_world):
    rule = tmp_path / "rule.py"
    rule.write_text(
        "import time\ncalls = []\ndef rule(prompt, response, answer):\n    calls.append(prompt)\n"
        "    time.sleep(0.05)\n    return None\n"
    )
    trainer = build_trainer(single_world, small_run.config(tmp_path, rollout={"reward": f"{rule}:rule"}))
    with pytest.raises(ValueError, match="allowed: a finite number"):
        trainer.responder.respond(trainer.prompts.rows, 8, trainer.sampling)
    assert len(trainer.responder.reward.__globals__["calls"]) < 40  # of 80: one was running, and the error was noticed
