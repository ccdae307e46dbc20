"""TRL's PPO beside megarl's parts of it, for `loss_oracles.py`.

TRL computes PPO's rewards, advantages and losses within its training loop, not in functions: so the loop runs, for a
few steps with tiny models in float64, under an optimizer that looks at the loop's variables before each step.
Shapes: B responses padded to T tokens; N of the B T tokens count.
"""

import contextlib
import copy
import io
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from datasets import Dataset
from oracle_batches import Differences, Row, difference, slope_difference
from oracles_trl import PROMPT_TEXT, REFERENCE, SETTINGS, Models
from torch import Tensor
from transformers import AutoModelForSequenceClassification, PreTrainedModel
from trl.experimental.ppo import PPOConfig, PPOTrainer
from trl.experimental.ppo.ppo_trainer import forward

from megarl.advantages import GeneralizedAdvantages, TokenOutcomes, token_rewards, whiten
from megarl.aggregation import GlobalCounts, token_mean, weighted_sum
from megarl.losses import ClippedValueLoss, clipped

NUM_RESPONSES, LONGEST = 12, 20
NUM_STEPS = 3
GAMMA, LAM, KL, CLIP, VALUE_CLIP = 0.99, 0.9, 0.05, 0.2, 0.02
REASONS = {
    "PPO whitening": "TRL divides the variance by the count less one and adds 1e-8 to it",
    "PPO rewards, stopped": "TRL gives the score one place after the stop token, at a token that no loss counts",
}


class Watching(torch.optim.SGD):
    """Gradient descent that shows the variables of TRL's training loop before each step."""

    def __init__(self, parameters: Iterable[Tensor], look: Callable[[SimpleNamespace], None]):
        super().__init__(parameters, lr=0.3)
        self.look = look

    def step(self, closure: Any = None) -> Any:
        frame = sys._getframe()
        while frame.f_code is not PPOTrainer.train.__code__:
            assert frame.f_back is not None
            frame = frame.f_back
        self.look(SimpleNamespace(**frame.f_locals))
        return super().step(closure)


@dataclass
class Judge:
    """Compares what a step of TRL's loop holds; keeps the largest differences."""

    pad: int
    temperature: float
    found: dict[str, Differences] = field(default_factory=dict)

    def __call__(self, loop: SimpleNamespace) -> None:
        self.note("PPO rewards, not stopped", self.rewards(loop, stopped=False))
        self.note("PPO rewards, stopped", self.rewards(loop, stopped=True))
        raw = loop.returns - loop.values
        self.note("PPO advantages (GAE)", self.advantages(loop))
        counted = whiten(raw, ~loop.padding_mask, lambda sums: sums, epsilon=1e-12)[~loop.padding_mask]
        num, expected = len(counted), loop.advantages[~loop.padding_mask]
        self.note("PPO whitening", Differences(difference(counted, expected)))
        share = ((num - 1) / num) ** 0.5
        self.note("PPO whitening, by count less one", Differences(difference(counted * share, expected)))
        self.losses(loop)

    def note(self, quantity: str, differences: Differences) -> None:
        if quantity not in self.found or differences.largest > self.found[quantity].largest:
            self.found[quantity] = differences

    def rewards(self, loop: SimpleNamespace, stopped: bool) -> Differences:
        """Of the responses that have a stop token, or of the others."""
        width = loop.rewards.shape[1]
        rows = (loop.sequence_lengths < width - 1) == stopped
        lengths = loop.sequence_lengths[rows] + 1  # TRL's are places of the last token
        kept = torch.arange(width) < lengths[:, None]
        ours = token_rewards(loop.scores[rows], lengths, loop.kl[rows][kept], KL)
        return Differences(difference(ours, loop.rewards[rows][kept]))

    def advantages(self, loop: SimpleNamespace) -> Differences:
        """Of all places, those after a response included, as TRL's recursion runs over them."""
        nothing = torch.zeros(NUM_RESPONSES, dtype=torch.float64)
        lengths = torch.full((NUM_RESPONSES,), loop.rewards.shape[1])
        outcomes = TokenOutcomes(loop.rewards.flatten(), loop.values.flatten(), nothing, lengths, nothing.bool())
        advantages, returns = GeneralizedAdvantages(GAMMA, LAM, whiten=False)(outcomes)
        expected = loop.returns - loop.values
        return Differences(max(difference(advantages, expected), difference(returns, loop.returns)))

    def losses(self, loop: SimpleNamespace) -> None:
        """Compute the losses with the loop's models, whose gradients of TRL's losses are there."""
        start, rows = loop.context_length - 1, loop.micro_batch_inds
        output, values = forward(loop.model, loop.mb_query_responses, self.pad)
        log_softmax = (output.logits[:, start:-1] / self.temperature).log_softmax(-1)
        log_probs = log_softmax.gather(-1, loop.mb_responses[..., None]).squeeze(-1)
        old = loop.mb_logprobs.double()
        policy_loss, _ = clipped(CLIP, CLIP)(log_probs.flatten(), old.flatten(), loop.mb_advantage.flatten())
        ours = mean(policy_loss, ~loop.padding_mask[rows])
        self.note("PPO policy loss", judged(ours, loop.pg_loss, 1.0, loop.model.policy))
        values = values[:, start:-1].squeeze(-1).flatten()
        value_loss, _ = ClippedValueLoss(VALUE_CLIP)(values, loop.mb_values.flatten(), loop.mb_return.flatten())
        ours = mean(value_loss, ~loop.padding_mask_p1[rows])
        self.note("PPO value loss", judged(ours, loop.vf_loss, loop.args.vf_coef, loop.model.value_model))


def mean(loss: Tensor, counts: Tensor) -> Tensor:
    """Token mean of a loss `[B T]` where `counts [B, T]`."""
    mask = counts.flatten()
    num = int(mask.sum())
    return weighted_sum(loss, token_mean(torch.full(mask.shape, num), mask, GlobalCounts(num, 1)))


def judged(ours: Tensor, theirs: Tensor, coefficient: float, model: PreTrainedModel) -> Differences:
    """Compare a loss, and its gradient with that of `coefficient` times TRL's in `grad`."""
    named = [weights for weights in model.parameters() if weights.grad is not None]
    slopes = torch.autograd.grad(coefficient * ours, named)
    expected = torch.cat([weights.grad.flatten() for weights in named])
    mine = torch.cat([slope.flatten() for slope in slopes])
    return Differences(difference(ours, theirs), slope_difference(mine, expected))


def likely_token(models: Models) -> int:
    """Return the token that the policy draws most often after the prompt, to stop at."""
    tokens = torch.tensor([models.tokenizer(PROMPT_TEXT).input_ids])
    with torch.no_grad():
        return int(models.policy(tokens).logits[0, -1].argmax())


def scalar_model(models: Models, seed: int) -> PreTrainedModel:
    """Load the folder's model with a new head of one number, in float64."""
    torch.manual_seed(seed)
    return AutoModelForSequenceClassification.from_pretrained(models.folder, num_labels=1, dtype=torch.float64)


def ppo_rows(models: Models, seed: int) -> list[Row]:
    """Let TRL take a few steps of PPO, and compare all parts of them."""
    policy, critic, rewarder = copy.deepcopy(models.policy), scalar_model(models, seed), scalar_model(models, seed + 1)
    config = PPOConfig(
        output_dir=str(models.folder / "trl"),
        per_device_train_batch_size=NUM_RESPONSES,
        local_rollout_forward_batch_size=NUM_RESPONSES,
        total_episodes=NUM_RESPONSES,
        num_ppo_epochs=NUM_STEPS,
        num_mini_batches=1,
        gradient_accumulation_steps=1,
        num_sample_generations=0,
        response_length=LONGEST,
        stop_token_id=likely_token(models),
        missing_eos_penalty=None,
        kl_coef=KL,
        gamma=GAMMA,
        lam=LAM,
        cliprange=CLIP,
        cliprange_value=VALUE_CLIP,
        seed=seed,
        **SETTINGS,
    )
    judge = Judge(models.tokenizer.pad_token_id, config.temperature + 1e-7)  # as TRL's loop has it
    optimizer = Watching([*policy.parameters(), *critic.parameters()], judge)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    prompts = Dataset.from_dict({"input_ids": [models.tokenizer(PROMPT_TEXT).input_ids] * NUM_RESPONSES})
    trainer = PPOTrainer(
        args=config,
        processing_class=models.tokenizer,
        model=policy,
        ref_model=models.reference,
        reward_model=rewarder,
        value_model=critic,
        train_dataset=prompts,
        optimizers=(optimizer, scheduler),
    )
    with contextlib.redirect_stdout(io.StringIO()):
        trainer.train()
    return [Row(name, REFERENCE, found, REASONS.get(name, "")) for name, found in judge.found.items()]
