"""PPO's step: critic, reference and reward model around the policy's, the same on every layout."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import Qwen2ForSequenceClassification

from megarl.advantages import GeneralizedAdvantages
from megarl.batch import Sample
from megarl.config import CriticSettings, PolicyConfig
from megarl.passes import response_log_probs, state_values
from megarl.policy_run import train_policy
from megarl.recipes import DAPO, GRPO, PPO, REINFORCE_PP, KLReward
from parallel.hf_folder import open_source
from parallel.mesh import Layout
from tests.megarl.test_trainer import TIMES, build_trainer, take_steps
from tests.tiny_model import load_transformers

LAYOUTS = {"DP2": Layout(), "TP2, sequence parallel": Layout(2, sequence_parallel=True), "PP2": Layout(1, 2)}
ADAPTIVE = replace(PPO, kl_reward=KLReward(0.1, target=1e-3, horizon=80))


def ppo(small_run, output: Path, layout: Layout | None = None, recipe=ADAPTIVE, **critic) -> PolicyConfig:
    rollout = {"group_size": 1, "prompts_per_step": 8, "num_epochs": 2}
    config = small_run.config(output, layout=layout, recipe=recipe, rollout=rollout)
    return replace(config, critic=CriticSettings(critic_lr=1e-3, **critic))


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_two_steps_of_ppo_are_the_same_on_every_layout_and_rank(small_run, tmp_path, workers, layout):
    (alone,) = workers.run(take_steps, 1, ppo(small_run, tmp_path))
    assert alone[0]["critic_grad_norm"] > 0.01
    assert alone[0]["advantage_std"] > 0.1
    assert alone[1]["reference_kl"] != 0.0
    assert alone[0]["kl_coefficient"] == 0.1
    # The first step's KL is 0, 1e-3 is wanted: the coefficient falls by the largest factor, 1 - 0.2 * 8 / 80.
    assert alone[1]["kl_coefficient"] == pytest.approx(0.1 * (1 - 0.2 * 8 / 80))
    for rank in workers.run(take_steps, 2, ppo(small_run, tmp_path, layout)):
        for metrics, expected in zip(rank, alone, strict=True):
            found = {name: value for name, value in metrics.items() if name not in TIMES}
            assert found == pytest.approx({name: expected[name] for name in found}, rel=1e-3, abs=3e-5)


def samples_of(folder_seed: int) -> list[Sample]:
    generator = torch.Generator().manual_seed(folder_seed)
    sizes = [(3, 4), (2, 1), (5, 7)]
    draw = [torch.randint(0, 100, (prompt + response,), generator=generator).tolist() for prompt, response in sizes]
    return [
        Sample(number, 0, tokens[:prompt], tokens[prompt:], torch.zeros(response), 0.0, truncated=False)
        for number, ((prompt, response), tokens) in enumerate(zip(sizes, draw, strict=True))
    ]


def passes(world, config: PolicyConfig) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    trainer = build_trainer(world, config)
    assert trainer.critic is not None
    samples, mesh = samples_of(1), trainer.mesh
    values = state_values(trainer.critic.models, samples, 16, mesh)
    return response_log_probs(trainer.policy.models, samples, 16, mesh, temperature=0.5), values


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_every_rank_gets_the_log_probs_and_values_of_all_samples_in_order(small_run, tmp_path, workers, layout):
    """RC26: against transformers, one sequence at a time; each response has a value more than tokens."""
    (alone,) = workers.run(passes, 1, ppo(small_run, tmp_path))
    model = load_transformers(small_run.folder / "model")
    for sample, log_probs, values in zip(samples_of(1), *alone, strict=True):
        logits = model(torch.tensor([[*sample.prompt, *sample.response]])).logits[0, len(sample.prompt) - 1 : -1]
        expected = (logits / 0.5).log_softmax(-1).gather(1, torch.tensor(sample.response)[:, None])[:, 0]
        torch.testing.assert_close(log_probs, expected, rtol=0, atol=1e-5)
        assert len(values) == len(sample.response) + 1
    for rank in workers.run(passes, 2, ppo(small_run, tmp_path, layout)):
        for found, wanted in zip(rank, alone, strict=True):
            for one, other in zip(found, wanted, strict=True):
                torch.testing.assert_close(one, other, rtol=0, atol=1e-5)


def test_advantages_of_a_step_by_hand(small_run, tmp_path, single_world):
    """RC25, RC28: gamma = lambda = 1 and a critic of zeros: every token of a response has its score as advantage, which
    sits on its last token, minus the KL from there on."""
    advantage = GeneralizedAdvantages(gamma=1.0, lam=1.0, whiten=False)
    recipe = replace(PPO, token_advantage=advantage, kl_reward=KLReward(0.5))
    trainer = build_trainer(single_world, ppo(small_run, tmp_path, recipe=recipe))
    assert trainer.critic is not None
    for parameter in trainer.critic.models[0].output_layer.parameters():
        parameter.data.zero_()
    sample = replace(samples_of(1)[0], score=1.0, rollout_log_probs=torch.tensor([-1.0, -2.0, -3.0, -4.0]))
    (found,) = trainer.assign_advantages([[sample]])
    kl = sample.rollout_log_probs - found.ref_log_probs
    expected = 1.0 - 0.5 * kl.flip(0).cumsum(0).flip(0)
    torch.testing.assert_close(found.advantage, expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(found.returns, expected, rtol=0, atol=1e-5)
    assert torch.equal(found.values, torch.zeros(4))


def test_the_critic_alone_learns_during_its_warm_up(small_run, tmp_path, single_world):
    trainer = build_trainer(single_world, ppo(small_run, tmp_path, critic_warmup_steps=1))
    before = [p.detach().clone() for p in trainer.policy.models[0].parameters()]
    critic = trainer.critic.models[0].output_layer.weight.detach().clone()
    metrics = trainer.step()
    assert "loss" not in metrics
    assert metrics["critic_applied"] == 1.0
    assert all(torch.equal(p, q) for p, q in zip(before, trainer.policy.models[0].parameters(), strict=True))
    assert not torch.equal(critic, trainer.critic.models[0].output_layer.weight)
    assert (trainer.state.optimizer_step, trainer.state.critic_step) == (0, 4)
    assert "loss" in trainer.step()


def train(world, config: PolicyConfig) -> dict[str, float]:
    return train_policy(config, config.check(world.world_size), world)


def assign(world, config: PolicyConfig, sample: Sample) -> tuple[Sample, torch.Tensor | None]:
    """The sample with reward and advantage, and the head of the critic."""
    trainer = build_trainer(world, config)
    (found,) = trainer.assign_advantages([[sample]])
    return found, None if trainer.critic is None else trainer.critic.models[0].output_layer.weight.detach().clone()


def test_a_run_exports_policy_and_critic(small_run, tmp_path, workers):
    """RC31: the critic's head comes back bit for bit, and transformers reads it."""
    workers.run(train, 1, ppo(small_run, tmp_path / "run"))
    with open_source(tmp_path / "run" / "critic") as source:
        assert "score.weight" in source.names
        assert "lm_head.weight" not in source.names
    model, info = Qwen2ForSequenceClassification.from_pretrained(tmp_path / "run" / "critic", output_loading_info=True)
    assert not info["missing_keys"]
    again = replace(ppo(small_run, tmp_path / "again"), critic=CriticSettings(critic_model=tmp_path / "run" / "critic"))
    ((_, head),) = workers.run(assign, 1, again, samples_of(1)[2])
    assert torch.equal(head, model.score.weight)


def test_a_reward_model_gives_the_reward_and_the_rule_the_accuracy(small_run, tmp_path, workers):
    workers.run(train, 1, ppo(small_run, tmp_path / "run"))
    config = ppo(small_run, tmp_path / "next", recipe=REINFORCE_PP)
    config = replace(config, rollout=replace(config.rollout, reward_model=tmp_path / "run" / "critic"))
    sample = replace(samples_of(1)[2], score=1.0)
    ((found, _),) = workers.run(assign, 1, config, sample)
    model = Qwen2ForSequenceClassification.from_pretrained(tmp_path / "run" / "critic").eval()
    tokens = torch.tensor([[*sample.prompt, *sample.response]])
    hidden = model.model(tokens).last_hidden_state[0, -1]
    assert found.reward == pytest.approx(model.score(hidden).item(), abs=1e-5)
    assert found.score == 1.0


def test_importance_weights_are_one_where_rollout_and_training_agree(small_run, tmp_path, workers):
    recipe = replace(GRPO, importance_cap=2.0)
    config = small_run.config(tmp_path, recipe=recipe, rollout={"num_mini_batches": 1})
    config = replace(config, run=replace(config.run, num_steps=1))
    ((metrics,),) = workers.run(take_steps, 1, config)
    assert metrics["importance_weight"] == pytest.approx(1.0, abs=1e-5)
    assert metrics["rollout_gap"] < 1e-5
    ((plain,),) = workers.run(take_steps, 1, replace(config, recipe=GRPO))
    assert metrics["grad_norm"] == pytest.approx(plain["grad_norm"], rel=1e-4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"critic_lr": 0.0}, "critic_lr: got 0.0, allowed: above 0"),
        ({"critic_warmup_steps": -1}, "critic_warmup_steps: got -1, allowed: from 0"),
        ({"critic_model": Path("nowhere")}, "critic_model: got 'nowhere', allowed: a folder with a config.json"),
    ],
)
def test_wrong_critic_settings_are_named(small_run, tmp_path, changes, message):
    config = replace(ppo(small_run, tmp_path), critic=replace(CriticSettings(), **changes))
    with pytest.raises(ValueError, match=message):
        config.check(1)


def test_the_run_stops_when_too_few_groups_are_kept_if_told_so(small_run, tmp_path, single_world):
    """RC22: constant rewards; the model is saved."""
    rollout = {"reward": f"{small_run.reward_file}:right", "max_generation_rounds": 2, "on_exhausted": "stop"}
    config = small_run.config(tmp_path / "run", recipe=DAPO, rollout=rollout)
    summary = train_policy(config, config.check(1), single_world)
    assert summary["stopped_at_step"] == 1
    assert (tmp_path / "run" / "hf" / "config.json").is_file()
    assert not math.isnan(summary["accuracy_after"])
