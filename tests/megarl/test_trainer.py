import json
import logging
import math
from dataclasses import replace

import pytest
import torch

from megarl.batch import Sample
from megarl.config import PolicyConfig
from megarl.data.prompts import PromptExample, user_message, write_prompts
from megarl.policy_run import train_policy
from megarl.recipes import DAPO, GRPO, KLTerm
from megarl.shaping import soft_overlong
from megarl.step_metrics import mean_metrics
from megarl.trainer import PolicyTrainer
from megarl.updates import MAX_SKIPPED_STEPS
from parallel.hf_folder import open_source
from parallel.mesh import Layout, build_mesh

LAYOUTS = {
    "DP2": (2, Layout()),
    "TP2, sequence parallel": (2, Layout(2, sequence_parallel=True)),
    "PP2": (2, Layout(1, 2)),
    "PP2 with 2 virtual stages": (2, Layout(1, 2, 2)),
    "DP2 x TP2": (4, Layout(2)),
}
TIMES = (
    *("rollout_seconds", "scoring_seconds", "train_seconds", "tokens_per_second", "rollout_tokens_per_second"),
    *("train_tokens_per_second", "memory_gib"),
)


def build_trainer(world, config: PolicyConfig) -> PolicyTrainer:
    return PolicyTrainer(config, config.check(world.world_size), build_mesh(config.layout, world))


def take_steps(world, config: PolicyConfig) -> list[dict[str, float]]:
    trainer = build_trainer(world, config)
    return [trainer.step() for _ in range(config.run.num_steps)]


def with_kl(small_run, output, layout: Layout | None = None, **run) -> PolicyConfig:
    """GRPO with a reference model, at a temperature and a nucleus of its own."""
    recipe = replace(GRPO, kl=KLTerm(0.04))
    return small_run.config(output, layout=layout, recipe=recipe, run=run, rollout={"temperature": 0.7})


@pytest.mark.parametrize(("world_size", "layout"), LAYOUTS.values(), ids=LAYOUTS)
def test_two_steps_are_the_same_on_every_layout_and_rank(small_run, tmp_path, workers, world_size, layout):
    (alone,) = workers.run(take_steps, 1, with_kl(small_run, tmp_path))
    assert alone[0]["grad_norm"] > 0.01
    assert alone[1]["ref_kl"] > 1e-6
    for rank in workers.run(take_steps, world_size, with_kl(small_run, tmp_path, layout)):
        for metrics, expected in zip(rank, alone, strict=True):
            found = {name: value for name, value in metrics.items() if name not in TIMES}
            assert found == pytest.approx({name: expected[name] for name in found}, rel=1e-3, abs=2e-5)


@pytest.mark.parametrize(
    ("world_size", "layout", "size"), [(2, Layout(1, 2), 1), (2, Layout(), 2), (4, Layout(2, 2), 2)]
)
def test_rollout_in_another_layout_changes_nothing(small_run, tmp_path, workers, world_size, layout, size):
    """PP2 trains and two copies generate; DP2 trains and TP2 generates; TP2 x PP2 trains, two copies of TP2 generate"""
    (alone,) = workers.run(take_steps, 1, with_kl(small_run, tmp_path))
    config = with_kl(small_run, tmp_path, layout)
    config = replace(config, rollout=replace(config.rollout, rollout_tensor_model_parallel_size=size))
    for rank in workers.run(take_steps, world_size, config):
        for metrics, expected in zip(rank, alone, strict=True):
            assert metrics["on_policy_gap"] < 1e-5
            found = {name: value for name, value in metrics.items() if name not in TIMES}
            assert found == pytest.approx({name: expected[name] for name in found}, rel=1e-3, abs=2e-5)


def test_before_any_update_training_finds_the_log_probs_of_the_rollout(small_run, tmp_path, workers):
    """RC41: at temperature 0.7 and top-p 0.9, and in every step, whose first mini-batch meets the sampling weights."""
    (steps,) = workers.run(take_steps, 1, with_kl(small_run, tmp_path, num_steps=3))
    assert all(metrics["on_policy_gap"] < 1e-5 for metrics in steps)
    assert all(metrics["max_log_ratio"] > 1e-4 for metrics in steps)  # that of the second mini-batch


def test_the_seed_of_the_run_reaches_the_sampler(small_run, tmp_path, workers):
    """RC38"""
    first, again, other = (
        workers.run(take_steps, 1, with_kl(small_run, tmp_path, seed=seed, num_steps=1))[0][0]["loss"]
        for seed in (1, 1, 2)
    )
    assert first == again
    assert first != other


def test_prompts_are_filtered_by_tokens_not_by_letters(small_run, tmp_path, single_world):
    """RC43: limit 16; a text of 30 letters and 12 tokens (8 of them the template's) stays, one of 17 tokens goes."""
    texts = ["assistantassistantsystemdigits", "123456789"]
    examples = [PromptExample(number, user_message(text), "") for number, text in enumerate(texts)]
    write_prompts(tmp_path / "prompts.jsonl", examples)
    config = small_run.config(tmp_path, rollout={"prompts": tmp_path / "prompts.jsonl"})
    (kept,) = build_trainer(single_world, config).prompts.rows
    assert (kept.text, len(kept.text), len(kept.tokens)) == (texts[0], 30, 12)


def weights(trainer: PolicyTrainer) -> list[torch.Tensor]:
    return [parameter.detach().clone() for model in trainer.policy.models for parameter in model.parameters()]


def all_equal(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


@pytest.mark.parametrize("shape_reward", [None, soft_overlong(max_length=6, cache_length=5)])
def test_groups_of_equal_scores_end_generation_after_the_allowed_rounds(
    small_run, tmp_path, single_world, caplog, shape_reward
):
    """RC22: the rule says 1 for all, 8 prompts, 3 rounds; a length penalty on top does not keep a group."""
    rollout = {"reward": f"{small_run.reward_file}:right", "prompts_per_step": 8, "max_generation_rounds": 3}
    recipe = replace(DAPO, shape_reward=shape_reward)
    trainer = build_trainer(single_world, small_run.config(tmp_path, recipe=recipe, rollout=rollout))
    before = weights(trainer)
    with caplog.at_level(logging.WARNING):
        metrics = trainer.step()
    assert (metrics["generation_rounds"], metrics["groups_kept"], metrics["score"]) == (3, 0, 1.0)
    assert "step 0: 0 of 8 groups kept after 3 rounds; training on those" in caplog.text
    assert (trainer.state.step, trainer.state.optimizer_step, trainer.state.num_prompts_used) == (1, 0, 24)
    assert all_equal(weights(trainer), before)


def test_generation_goes_on_with_new_prompts_until_enough_groups_are_kept(small_run, tmp_path, single_world):
    trainer = build_trainer(single_world, small_run.config(tmp_path, recipe=DAPO))
    groups, metrics = trainer.generate_groups()
    assert len(groups) == metrics["groups_kept"] == 4
    assert metrics["generation_rounds"] > 1
    ids = [group[0].prompt_id for group in groups]
    assert ids == sorted(set(ids))
    assert trainer.state.num_prompts_used > 4
    assert max(ids) < trainer.state.num_prompts_used
    assert all(sorted(sample.score for sample in group) == [0.0, 1.0] for group in groups)


def sample_of(prompt_id: int, score: float, length: int = 2, truncated: bool = False) -> Sample:
    return Sample(prompt_id, 0, (5, 6), [7] * length, torch.full((length,), -1.0), score, truncated)


def test_advantages_follow_shaped_rewards_and_truncated_responses_leave_the_loss(small_run, tmp_path, single_world):
    recipe = replace(DAPO, shape_reward=soft_overlong(max_length=6, cache_length=4))
    trainer = build_trainer(single_world, small_run.config(tmp_path, recipe=recipe))
    groups = [
        [sample_of(1, 1.0, length=2), sample_of(1, 0.0, length=4)],
        [sample_of(2, 1.0, length=6, truncated=True), sample_of(2, 0.0, length=2)],
    ]
    samples = trainer.assign_advantages(groups)
    # Punished from 2 tokens on by a quarter per token: rewards 1, -0.5; 0, 0.
    assert [sample.reward for sample in samples] == [1.0, -0.5, 0.0, 0.0]
    assert [sample.advantage for sample in samples] == pytest.approx([1.0, -1.0, 0.0, 0.0], abs=1e-5)
    assert [sample.in_loss for sample in samples] == [True, True, False, True]
    assert [sample.score for sample in samples] == [1.0, 0.0, 1.0, 0.0]
    assert trainer.assign_advantages([]) == []


def test_mini_batches_are_whole_groups_as_equal_as_can_be(small_run, tmp_path, single_world):
    trainer = build_trainer(single_world, small_run.config(tmp_path))
    samples = [sample_of(group, 0.0) for group in range(5) for _ in range(2)]
    for num_groups, expected in ((5, [[0, 0, 1, 1], [2, 2, 3, 3, 4, 4]]), (1, [[0, 0]]), (0, [])):
        pieces = trainer.split(samples[: 2 * num_groups])
        assert [[sample.prompt_id for sample in piece] for piece in pieces] == expected


@pytest.mark.parametrize("fault", [{"rollout_log_probs": torch.full((2,), math.nan)}, {"advantage": math.inf}])
def test_a_run_stops_after_too_many_steps_that_are_not_finite(small_run, tmp_path, single_world, fault):
    """NaN log-probs of the rollout make the loss NaN but its gradient zero; an infinite advantage spoils both."""
    trainer = build_trainer(single_world, small_run.config(tmp_path))
    before = weights(trainer)
    bad = [replace(sample_of(1, 1.0), **{"advantage": 1.0} | fault)]
    for count in range(1, MAX_SKIPPED_STEPS):
        assert trainer.learn(bad)["applied"] == 0.0
        assert trainer.state.num_skipped == count
    with pytest.raises(RuntimeError, match="10 optimizer steps in a row had a loss or gradient that was not finite"):
        trainer.learn(bad)
    assert all_equal(weights(trainer), before)
    assert trainer.state.optimizer_step == 0
    good = [replace(sample_of(1, 1.0), advantage=1.0)]
    assert trainer.learn(good)["applied"] == 1.0
    assert (trainer.state.num_skipped, trainer.state.optimizer_step) == (0, 1)
    assert not all_equal(weights(trainer), before)


def test_a_mini_batch_that_is_masked_out_whole_is_skipped_but_not_held_against_the_run(
    small_run, tmp_path, single_world
):
    trainer = build_trainer(single_world, small_run.config(tmp_path))
    before = weights(trainer)
    masked = [replace(sample_of(1, 1.0), advantage=1.0, in_loss=False)]
    for _ in range(MAX_SKIPPED_STEPS + 1):
        assert trainer.learn(masked)["applied"] == 0.0
    assert (trainer.state.num_skipped, trainer.state.optimizer_step) == (0, 0)
    assert all_equal(weights(trainer), before)


def train(world, config: PolicyConfig) -> dict[str, float]:
    return train_policy(config, config.check(world.world_size), world)


def test_a_run_leaves_config_metrics_summary_logs_and_a_trained_model(small_run, tmp_path, workers):
    config = small_run.config(tmp_path / "run", run={"num_steps": 3}, rollout={"eval_every": 2})
    first, second = workers.run(train, 2, config)
    assert {name: value for name, value in first.items() if name != "training_seconds"} == {
        name: value for name, value in second.items() if name != "training_seconds"
    }
    for name in ("accuracy_before", "greedy_accuracy_before", "accuracy_after", "greedy_accuracy_after"):
        assert 0 <= first[name] <= 1
    folder = config.run.output
    names = {path.name for path in folder.iterdir()}
    assert {"config.json", "metrics.jsonl", "summary.json", "logs", "hf", "curves.png"} <= names
    assert json.loads((folder / "config.json").read_text())["run"]["seed"] == 3
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == [1, 2, 3]
    assert ["eval_accuracy" in record for record in records] == [False, True, False]
    assert json.loads((folder / "summary.json").read_text())["status"] == "finished"
    assert sorted(path.name for path in (folder / "logs").iterdir()) == ["rank_0.log", "rank_1.log"]
    assert '"num_steps": ' in (folder / "hf" / "README.md").read_text()  # the card states the config
    with open_source(config.run.model) as source, open_source(folder / "hf") as trained:
        assert trained.names == source.names
    assert json.loads((folder / "hf" / "generation_config.json").read_text())["eos_token_id"] == list(range(60))


def test_metrics_of_a_step_are_those_of_all_mini_batches_also_when_the_first_was_skipped():
    updates = [{"applied": 0.0}, {"applied": 1.0, "loss": 2.0, "max_log_ratio": 0.5}, {"applied": 1.0, "loss": 4.0}]
    metrics = mean_metrics(updates)
    assert metrics["loss"] == 3.0
    assert metrics["max_log_ratio"] == 0.5
    assert "on_policy_gap" not in metrics  # the weights had changed, or nothing was scored with those that sampled
