"""What the responses of a step are worth: scored by reference, critic and reward model, then given advantages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megarl.advantages import TokenAdvantage, TokenOutcomes, token_rewards
from megarl.batch import Sample, shares_prompts
from megarl.config import DTYPES, PolicyConfig
from megarl.passes import FrozenModel, response_log_probs, state_values
from parallel.mesh import Mesh
from parallel.model import build_model
from parallel.optimizer import Trainable
from parallel.qwen import QwenShape, read_shape
from parallel.weights import import_hf


def build_critic(config: PolicyConfig, mesh: Mesh) -> Trainable | None:
    """Return the critic, if the recipe has one: from its own folder or the policy's."""
    if config.recipe.value_loss is None:
        return None
    folder = config.critic.critic_model or config.run.model
    settings = replace(config.optimizer, lr=config.critic.critic_lr)
    critic = Trainable(build_model(read_shape(folder), mesh, DTYPES[config.run.dtype], "scalar"), mesh, settings)
    critic.load_hf(folder, seed=config.run.seed)
    return critic


def build_reference(config: PolicyConfig, shape: QwenShape, mesh: Mesh) -> FrozenModel | None:
    """Return the starting model, if the recipe compares with it."""
    if not config.recipe.needs_reference:
        return None
    models = build_model(shape, mesh, DTYPES[config.run.dtype])
    import_hf(config.run.model, models, mesh)
    return FrozenModel(models, mesh)


def build_reward_model(config: PolicyConfig, mesh: Mesh) -> FrozenModel | None:
    """Return the reward model, if the config names one."""
    folder = config.rollout.reward_model
    if folder is None:
        return None
    models = build_model(read_shape(folder), mesh, DTYPES[config.run.dtype], "scalar")
    import_hf(folder, models, mesh)
    return FrozenModel(models, mesh)


@dataclass(frozen=True)
class Assessor:
    """Judges samples by the other models, as recipe and config say; it trains none of them."""

    config: PolicyConfig
    mesh: Mesh
    policy: Trainable
    critic: Trainable | None
    reference: FrozenModel | None
    reward_model: FrozenModel | None

    @property
    def _packing(self) -> tuple[int, Mesh, bool]:
        sharing = shares_prompts(self.config.rollout.share_prompts, self.mesh)
        return self.config.run.max_tokens_per_pack, self.mesh, sharing

    def assign_advantages(self, groups: Sequence[Sequence[Sample]], kl_coefficient: float) -> list[Sample]:
        """Score the samples with the other models, shape rewards, mask truncated responses and compute advantages, as
        the recipe says."""
        samples = [sample for group in groups for sample in group]
        if not samples:
            return []
        recipe = self.config.recipe
        samples = self._with_log_probs(samples)
        rewards = self._rewards(samples)
        if recipe.shape_reward is not None:
            rewards = recipe.shape_reward(rewards, torch.tensor([len(sample.response) for sample in samples]))
        samples = [
            replace(sample, reward=reward, in_loss=not (recipe.mask_truncated and sample.truncated))
            for sample, reward in zip(samples, rewards.tolist(), strict=True)
        ]
        if recipe.token_advantage is not None:
            return self._token_advantages(samples, recipe.token_advantage, kl_coefficient)
        assert recipe.advantage is not None
        advantages = recipe.advantage(rewards, torch.tensor([sample.prompt_id for sample in samples]))
        return [
            replace(sample, advantage=advantage) for sample, advantage in zip(samples, advantages.tolist(), strict=True)
        ]

    def _with_log_probs(self, samples: list[Sample]) -> list[Sample]:
        """Add the reference's log-probs and those of a training pass, where the recipe needs them."""
        temperature = self.config.rollout.temperature
        if self.reference is not None:
            with self.reference.on_device() as chunks:
                scored = response_log_probs(chunks, samples, *self._packing, temperature=temperature)
            samples = [replace(sample, ref_log_probs=one) for sample, one in zip(samples, scored, strict=True)]
        if self.config.recipe.importance_cap is not None:
            scored = response_log_probs(self.policy.models, samples, *self._packing, temperature=temperature)
            samples = [replace(sample, old_log_probs=one) for sample, one in zip(samples, scored, strict=True)]
        return samples

    def _rewards(self, samples: Sequence[Sample]) -> Tensor:
        """Return the reward of each response, `[B]` fp32: the rule's score, or the reward model's."""
        if self.reward_model is None:
            return torch.tensor([sample.score for sample in samples], dtype=torch.float32)
        with self.reward_model.on_device() as chunks:
            values = state_values(chunks, samples, *self._packing)
        return torch.stack([value[-1] for value in values])

    def _token_advantages(
        self, samples: Sequence[Sample], token_advantage: TokenAdvantage, kl_coefficient: float
    ) -> list[Sample]:
        """Compute values, rewards, advantages and returns of every token of every response."""
        lengths = torch.tensor([len(sample.response) for sample in samples])
        if self.critic is None:
            values = [torch.zeros(len(sample.response) + 1) for sample in samples]
        else:
            values = state_values(self.critic.models, samples, *self._packing)
        kl = None
        if self.config.recipe.kl_reward is not None:
            kl = torch.cat([reference_log_ratios(sample) for sample in samples])
        rewards = torch.tensor([sample.reward for sample in samples])
        outcomes = TokenOutcomes(
            rewards=token_rewards(rewards, lengths, kl, kl_coefficient),
            values=torch.cat([value[:-1] for value in values]),
            last_values=torch.stack([value[-1] for value in values]),
            lengths=lengths,
            truncated=torch.tensor([sample.truncated for sample in samples]),
            in_loss=torch.tensor([sample.in_loss for sample in samples]),
        )
        parts = (part.split(lengths.tolist()) for part in (*token_advantage(outcomes), outcomes.values))
        return [
            replace(sample, advantage=advantage, returns=returns, values=old)
            for sample, advantage, returns, old in zip(samples, *parts, strict=True)
        ]


def reference_log_ratios(sample: Sample) -> Tensor:
    """Return the log-ratio of policy to reference at each token, `[len(response)]`: the k1 estimate of their KL."""
    assert sample.ref_log_probs is not None
    old = sample.rollout_log_probs if sample.old_log_probs is None else sample.old_log_probs
    return old - sample.ref_log_probs


def next_kl_coefficient(config: PolicyConfig, coefficient: float, samples: Sequence[Sample]) -> float:
    """Return the coefficient of the KL in the reward after a step with these samples."""
    kl_reward = config.recipe.kl_reward
    if kl_reward is None or not samples:
        return coefficient
    mean = sum(float(reference_log_ratios(sample).sum()) for sample in samples) / len(samples)
    return kl_reward.next_coefficient(coefficient, mean, len(samples))
