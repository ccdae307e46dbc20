from dataclasses import replace

import pytest

from megarl.config import PolicyConfig
from megarl.trainer import PolicyTrainer
from parallel.mesh import Layout, build_mesh
from rollout.random_numbers import derive_seed


def build_trainer(world, config: PolicyConfig) -> PolicyTrainer:
    return PolicyTrainer(config, config.check(world.world_size), build_mesh(config.layout, world))


def evaluate(world, config: PolicyConfig) -> dict[str, float]:
    return build_trainer(world, config).evaluator().run()


def by_length(small_run, output, **changes) -> PolicyConfig:
    """The score of a response is its number of letters, so that no two sets of responses look alike."""
    rollout = {"reward": f"{small_run.reward_file}:length"} | changes.pop("rollout", {})
    return small_run.config(output, rollout=rollout, **changes)


def test_accuracies_are_the_mean_scores_of_one_sampled_and_one_greedy_response(small_run, tmp_path, single_world):
    trainer = build_trainer(single_world, by_length(small_run, tmp_path))
    evaluator = trainer.evaluator()
    assert [prompt.text for prompt in evaluator.prompts] == ["h0", "h1", "h2"]
    found = evaluator.run()
    for name, params in (
        ("accuracy", replace(trainer.sampling, seed=derive_seed(3, 1))),
        ("greedy_accuracy", replace(trainer.sampling, temperature=0.0)),
    ):
        groups = trainer.responder.respond(evaluator.prompts, 1, params)
        assert found[name] == sum(group[0].score for group in groups) / 3
    assert trainer.evaluator().run() == found  # an evaluation leaves no trace


def test_evaluation_draws_other_numbers_than_training(small_run, tmp_path, single_world):
    trainer = build_trainer(single_world, by_length(small_run, tmp_path))
    prompts = trainer.evaluator().prompts
    training, evaluation = (
        [group[0].response for group in trainer.responder.respond(prompts, 1, replace(trainer.sampling, seed=seed))]
        for seed in (3, derive_seed(3, 1))
    )
    assert all(one != other for one, other in zip(training, evaluation, strict=True))


@pytest.mark.parametrize("layout", [Layout(), Layout(2)], ids=["DP2", "TP2"])
@pytest.mark.parametrize("num_prompts", [3, 1])
def test_every_layout_finds_the_same_on_every_rank(small_run, tmp_path, workers, layout, num_prompts):
    """3 prompts on 2 data ranks, then 1: a rank without any."""
    changes = {"eval_max_prompts": num_prompts}
    (alone,) = workers.run(evaluate, 1, by_length(small_run, tmp_path, rollout=changes))
    config = by_length(small_run, tmp_path, layout=layout, rollout=changes)
    assert workers.run(evaluate, 2, config) == [alone, alone]
    assert alone["greedy_accuracy"] > 0


def test_without_held_out_prompts_there_is_nothing_to_report(small_run, tmp_path, single_world):
    assert evaluate(single_world, small_run.config(tmp_path, rollout={"eval_prompts": None})) == {}
