"""Train a Qwen policy with CISPO: a new algorithm is its loss and a recipe, here, with the packages as they are.

    torchrun --nproc-per-node 2 examples/train_cispo.py --model runs/sft/hf --output runs/cispo \\
        --prompts runs/data/train.jsonl --max-prompt-tokens 40 --max-new-tokens 8 --lr 7e-4

Source: MiniMax-M1, arXiv 2506.13585, eq. 4 and 5. The ratio is a weight without a gradient, so that no token loses its
gradient by clipping. Deviations: the paper gives no upper bound; 5 is that of ScaleRL, arXiv 2510.13786.
"""

from dataclasses import dataclass, replace

from torch import Tensor

from megarl.aggregation import token_mean
from megarl.cli import checked, parse
from megarl.config import PolicyConfig, RolloutSettings, RunSettings
from megarl.losses import MAX_EXPONENT
from megarl.policy_run import train_policy
from megarl.recipes import GRPO
from parallel.checkpoint_folder import CheckpointSettings
from parallel.launch import running
from parallel.mesh import Layout
from parallel.optimizer import OptimizerSettings


@dataclass(frozen=True)
class CISPOLoss:
    """-stop_gradient(clip(ratio, 1 - low, 1 + high)) * advantage * log_prob; with `low` 1 there is no lower bound."""

    low: float = 1.0
    high: float = 4.0

    def __call__(
        self, log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, sequence_ids: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss [N] with gradients to `log_probs`, and detached metrics [N]; all arguments are [N]."""
        log_ratio = (log_probs - old_log_probs).detach()
        ratio = log_ratio.clamp(max=MAX_EXPONENT).exp()
        weight = ratio.clamp(1.0 - self.low, 1.0 + self.high)
        metrics = {"ratio": ratio, "log_ratio": log_ratio, "approx_kl": ratio - 1.0 - log_ratio}
        return -weight * advantages * log_probs, metrics | {"clip_fraction": (weight != ratio).to(ratio.dtype)}


CISPO = replace(GRPO, name="cispo", policy_loss=CISPOLoss(), aggregation=token_mean)


def main() -> None:
    sections = [RunSettings(), RolloutSettings(), Layout(), OptimizerSettings(), CheckpointSettings()]
    run, rollout, layout, optimizer, checkpoints = parse(__doc__, sections)
    config = PolicyConfig(run, rollout, layout, optimizer, recipe=CISPO, checkpoints=checkpoints)
    world, shape = checked(config)
    with running(world, run.timeout_seconds):
        train_policy(config, shape, world)


if __name__ == "__main__":
    main()
