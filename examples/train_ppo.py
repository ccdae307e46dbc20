"""Train a Qwen policy with PPO: a critic, advantages per token, the KL to the starting model in the reward.

    torchrun --nproc-per-node 2 examples/train_ppo.py --model runs/sft/hf --output runs/ppo \\
        --prompts runs/data/train.jsonl --max-prompt-tokens 40 --max-new-tokens 8 --lr 7e-4 --critic-lr 1e-3 --lam 1
    torchrun --nproc-per-node 8 examples/train_ppo.py --model DIR --prompts FILE --reward-model REWARD_DIR \\
        --dtype bf16 --tensor-model-parallel-size 2 --sequence-parallel --critic-lr 1e-5 --critic-warmup-steps 10

Source: arXiv 1707.06347, for language models arXiv 2203.02155. Deviations: see `megarl.recipes.PPO`.
"""

from dataclasses import dataclass, replace

from megarl.advantages import GeneralizedAdvantages
from megarl.cli import checked, parse, refusing_wrong_values
from megarl.config import CriticSettings, PolicyConfig, RolloutSettings, RunSettings
from megarl.losses import ClippedValueLoss, clipped
from megarl.policy_run import train_policy
from megarl.recipes import PPO, KLReward, Recipe
from parallel.checkpoint_folder import CheckpointSettings
from parallel.launch import running
from parallel.mesh import Layout
from parallel.optimizer import OptimizerSettings
from parallel.options import option


@dataclass(frozen=True)
class PPOSettings:
    """The numbers of the recipe."""

    gamma: float = option(1.0, "discount per token")
    lam: float = option(0.95, "lambda of generalised advantage estimation")
    clip: float = option(0.2, "the ratio of new to old probability is kept within 1 - clip .. 1 + clip")
    value_clip: float = option(0.2, "a value is kept this close to the old one; 0: no clipping")
    kl_coefficient: float = option(0.05, "of the KL to the starting model in the reward; 0: none, and no reference")
    kl_target: float = option(0.0, "KL per response, in nats, that the coefficient adapts to; 0: fixed coefficient")
    entropy_coefficient: float = option(0.0, "of the entropy bonus")
    bootstrap_truncated: bool = option(False, "a response cut off at the length limit is worth its last value, not 0")

    def recipe(self) -> Recipe:
        """Return PPO with these numbers. Raises ValueError for one that is out of range."""
        if self.kl_target and not self.kl_coefficient:
            raise ValueError(f"kl_target: got {self.kl_target}, allowed with kl_coefficient 0: 0")
        advantages = GeneralizedAdvantages(self.gamma, self.lam, bootstrap_truncated=self.bootstrap_truncated)
        return replace(
            PPO,
            token_advantage=advantages,
            policy_loss=clipped(self.clip, self.clip),
            value_loss=ClippedValueLoss(self.value_clip or None),
            kl_reward=KLReward(self.kl_coefficient, self.kl_target or None) if self.kl_coefficient else None,
            entropy_coefficient=self.entropy_coefficient,
        )


def main() -> None:
    sections = [RunSettings(), RolloutSettings(group_size=1), CriticSettings(), PPOSettings()]
    sections += [Layout(), OptimizerSettings(), CheckpointSettings()]
    run, rollout, critic, ppo, layout, optimizer, checkpoints = parse(__doc__, sections)
    with refusing_wrong_values():
        config = PolicyConfig(run, rollout, layout, optimizer, ppo.recipe(), critic, checkpoints)
    world, shape = checked(config)
    with running(world, run.timeout_seconds):
        train_policy(config, shape, world)


if __name__ == "__main__":
    main()
