"""Supervised fine-tuning on chats of several turns: which tokens the loss is made of."""

import json
from pathlib import Path

import pytest
import torch

from megarl.config import DemonstrationSettings, SFTConfig
from megarl.data.tokenizer import load_tokenizer
from megarl.sft import train_sft
from parallel.mesh import Layout
from parallel.optimizer import OptimizerSettings
from tests.tiny_model import load_transformers

CHATS = [
    [("system", "sort"), ("user", "21>"), ("assistant", "12"), ("user", "431>"), ("assistant", "134")],
    [("user", "6>"), ("assistant", "6")],
]


def train(world, config: SFTConfig) -> dict[str, float]:
    return train_sft(config, config.check(world.world_size), world)


def sft_config(small_run, folder: Path, *, last_turn_only: bool) -> SFTConfig:
    path = folder / "demonstrations.jsonl"
    rows = ([{"role": role, "content": content} for role, content in chat] for chat in CHATS)
    path.write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    run = small_run.config(folder / f"run {last_turn_only}", run={"num_steps": 1}).run
    data = DemonstrationSettings(path, batch_size=2, last_turn_only=last_turn_only)
    return SFTConfig(run, data, Layout(), OptimizerSettings(lr=1e-3))


@torch.no_grad()
def loss_of_transformers(folder: Path, last_turn_only: bool) -> float:
    """Mean negative log-likelihood of the assistant's turns in the chats as the template renders them."""
    tokenizer, model = load_tokenizer(folder), load_transformers(folder)
    losses = []
    for chat in CHATS:
        messages = [{"role": role, "content": content} for role, content in chat]
        tokens = torch.tensor(tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False))
        table = model(tokens[None]).logits[0].log_softmax(-1)
        turns = [index for index, (role, _) in enumerate(chat) if role == "assistant"]
        for index in turns[-1:] if last_turn_only else turns:
            start = len(
                tokenizer.apply_chat_template(
                    messages[:index], add_generation_prompt=True, tokenize=True, return_dict=False
                )
            )
            end = start + len(chat[index][1]) + 1  # digits are a token each, and the stop token
            losses.append(-table[start - 1 : end - 1].gather(1, tokens[start:end, None]).squeeze(1))
    return float(torch.cat(losses).mean())


@pytest.mark.parametrize("last_turn_only", [False, True])
def test_the_loss_is_the_mean_over_the_turns_of_the_assistant(small_run, tmp_path, workers, last_turn_only):
    """All of them, or on request the last one; never a token of user, system or template."""
    config = sft_config(small_run, tmp_path, last_turn_only=last_turn_only)
    expected = loss_of_transformers(config.run.model, last_turn_only)
    for summary in workers.run(train, 2, config):
        assert summary["final_loss"] == pytest.approx(expected, rel=1e-5)
