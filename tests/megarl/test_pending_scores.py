"""Rewards that are slow, hang or fail: what is learnt from, and in which order, doesn't depend on their timing."""

from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch

from megarl.config import PolicyConfig
from megarl.recipes import DAPO
from megarl.responses import ExpectedLengths, Responder
from megarl.step_metrics import rollout_metrics
from megarl.trainer import PolicyTrainer
from parallel.mesh import Layout, build_mesh

LAYOUTS = {"DP2": Layout(), "TP2": Layout(2), "PP2": Layout(1, 2)}
RULES = """
import random, time

def parity(prompt, response, answer):
    return len(response) % 2

def at_random(prompt, response, answer):
    time.sleep(0.02 * random.SystemRandom().random())
    return parity(prompt, response, answer)

def slow(prompt, response, answer):
    time.sleep(0.02)
    return parity(prompt, response, answer)

def hangs(prompt, response, answer):
    time.sleep(1000 if prompt in ("t3", "t5") else 0)
    return 1.0

def hangs_always(prompt, response, answer):
    time.sleep(1000)

def fails(prompt, response, answer):
    if prompt == "t2":
        raise KeyError("no such answer")
    return 1.0
"""


@dataclass
class RecordedLengths(ExpectedLengths):
    """Knows which groups were complete together."""

    calls: list[list[int]] = field(default_factory=list)

    def learn(self, groups):
        self.calls.append([group[0].prompt_id for group in groups])
        super().learn(groups)


@pytest.fixture(scope="session")
def rules(tmp_path_factory) -> Path:
    """A file of slow, hanging and failing rules."""
    file = tmp_path_factory.mktemp("rules") / "rules.py"
    file.write_text(RULES)
    return file


def build_trainer(world, config: PolicyConfig) -> PolicyTrainer:
    return PolicyTrainer(config, config.check(world.world_size), build_mesh(config.layout, world))


def record(trainer: PolicyTrainer) -> RecordedLengths:
    """Let the trainer's responder record, with a border after each step."""
    lengths = RecordedLengths()
    trainer.responder = replace(trainer.responder, border_steps=1, expected=lengths)
    return lengths


def generate(world, config: PolicyConfig, num_steps: int) -> tuple[list[list[int]], list[torch.Tensor]]:
    """The groups that were complete together in some steps without learning, and the log-probs of all kept ones."""
    trainer = build_trainer(world, config)
    lengths = record(trainer)
    log_probs = []
    for step in range(num_steps):
        trainer.state.step = step
        groups, _ = trainer.generate_groups()
        log_probs += [sample.rollout_log_probs for group in groups for sample in group]
    return lengths.calls, log_probs


@pytest.mark.parametrize("settings", [{"recipe": DAPO}, {"oversampling": 2.0}], ids=["replacements", "oversampling"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_random_delays_of_rewards_change_nothing(small_run, tmp_path, workers, rules, world_size, settings):
    """Not even the last bits of log-probs, which depend on what runs together."""
    rollout = {"prompts_per_step": 3, "num_mini_batches": 1, "max_new_tokens": 8, "reward_threads": 2}
    recipe = {"recipe": settings["recipe"]} if "recipe" in settings else {}
    rollout |= {name: value for name, value in settings.items() if name != "recipe"}

    def outcome(rule: str) -> tuple[list[list[int]], list[torch.Tensor]]:
        config = small_run.config(tmp_path, rollout=rollout | {"reward": f"{rules}:{rule}"}, **recipe)
        first, *others = workers.run(generate, world_size, config, 3)
        assert all(calls == first[0] for calls, _ in others)
        return first

    calls, log_probs = outcome("parity")
    assert len(calls) > 3
    for _ in range(3):
        same_calls, same_log_probs = outcome("at_random")
        assert same_calls == calls
        assert all(torch.equal(one, other) for one, other in zip(log_probs, same_log_probs, strict=True))


def respond(world, config: PolicyConfig, steady: bool) -> list[list[int]]:
    trainer = build_trainer(world, config)
    lengths = record(trainer)
    prompts = trainer.prompts.take(0, 10, seed=0)
    trainer.responder.respond_until([], prompts, 2, trainer.sampling, lambda groups: (), steady=steady)
    return lengths.calls


def test_without_steadiness_slow_rewards_are_seen_later(small_run, tmp_path, workers, rules):
    """The test above would find it."""

    def calls(rule: str, steady: bool) -> list[list[int]]:
        config = small_run.config(tmp_path, rollout={"reward": f"{rules}:{rule}", "max_new_tokens": 8})
        return workers.run(respond, 1, config, steady)[0]

    assert calls("parity", steady=True) == calls("slow", steady=True) != calls("slow", steady=False)


def respond_counting(world, config: PolicyConfig) -> tuple[dict[int, list[tuple]], dict[str, float], int]:
    """For each prompt score and mark of its responses; metrics; how often there was a sign of life."""
    trainer = build_trainer(world, config)
    borders = []
    responder = replace(trainer.responder, on_border=lambda: borders.append(1))
    groups = responder.respond(trainer.prompts.rows[:6], 2, trainer.sampling)
    marks = {group[0].prompt_id: [(sample.score, sample.timed_out) for sample in group] for group in groups}
    return marks, rollout_metrics([sample for group in groups for sample in group]), len(borders)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_a_hanging_reward_scores_zero_on_all_ranks_and_the_run_goes_on(small_run, tmp_path, workers, rules, layout):
    """Ranks meet while they wait: no collective takes as long as the reward."""
    rollout = {"reward": f"{rules}:hangs", "reward_timeout_seconds": 2.5, "reward_threads": 4}
    config = small_run.config(tmp_path, layout=layout, rollout=rollout)
    first, second = workers.run(respond_counting, 2, config)
    marks, metrics, num_borders = first
    assert marks == {n: [(0.0, True)] * 2 if n in (3, 5) else [(1.0, False)] * 2 for n in range(6)}
    assert metrics["reward_timeouts"] == 4
    assert metrics["score"] == pytest.approx(8 / 12)
    assert num_borders >= 3  # one of decoding, and one a second
    assert second[0] == marks
    assert second[2] == num_borders


def test_a_hanging_reward_is_warned_about_with_its_prompt(small_run, tmp_path, single_world, rules, caplog):
    rollout = {"reward": f"{rules}:hangs", "reward_timeout_seconds": 0.2}
    respond_counting(single_world, small_run.config(tmp_path, rollout=rollout))
    for prompt_id in (3, 5):
        warning = f"the reward gave no answer on a response to prompt {prompt_id} within 0.2 s: it scores 0"
        assert caplog.text.count(warning) == 2


def test_too_many_hanging_rewards_end_the_run(small_run, tmp_path, single_world, rules):
    rollout = {"reward": f"{rules}:hangs_always", "reward_timeout_seconds": 0.2, "reward_threads": 8}
    trainer = build_trainer(single_world, small_run.config(tmp_path, rollout=rollout))
    with pytest.raises(RuntimeError, match=r"16 calls of the reward hang in this process.*reward_timeout_seconds"):
        trainer.responder.respond(trainer.prompts.rows, 2, trainer.sampling)


def error_of(world, config: PolicyConfig) -> tuple[str, str, str]:
    """What ends `respond` on this rank: its type, its text, and its cause."""
    trainer = build_trainer(world, config)
    responder: Responder = trainer.responder
    with pytest.raises(RuntimeError) as raised:
        responder.respond(trainer.prompts.rows[:6], 2, trainer.sampling)
    return type(raised.value).__name__, str(raised.value), repr(raised.value.__cause__)


@pytest.mark.parametrize("num_threads", [0, 1])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_a_rule_that_raises_ends_all_ranks(small_run, tmp_path, workers, rules, layout, num_threads):
    """With the rule's own error on the rank that called it."""
    rollout = {"reward": f"{rules}:fails", "reward_threads": num_threads}
    errors = workers.run(error_of, 2, small_run.config(tmp_path, layout=layout, rollout=rollout))
    text = "the reward failed on a response to prompt 2: KeyError('no such answer')"
    assert {error[:2] for error in errors} == {("RuntimeError", text)}
    assert sorted(error[2] for error in errors) == ["KeyError('no such answer')", "None"]
