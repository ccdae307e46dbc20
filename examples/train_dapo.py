"""Train a Qwen policy with DAPO: clip-higher, dynamic sampling, token-level loss, soft overlong punishment, overlong
filtering; no KL term, no reference model.

    torchrun --nproc-per-node 2 examples/train_dapo.py --model runs/sft/hf --output runs/dapo \\
        --prompts runs/data/train.jsonl --max-prompt-tokens 40 --max-new-tokens 8 --lr 7e-4
    torchrun --nproc-per-node 8 examples/train_dapo.py --model DIR --prompts FILE --dtype bf16 --max-new-tokens 20480 \\
        --overlong-cache-tokens 4096 --tensor-model-parallel-size 2 --sequence-parallel --lr 1e-6

Source: arXiv 2503.14476. Deviations: see `megarl.recipes.DAPO`; over-sampling adapts to the observed share of groups
that are kept (the paper: a fixed factor of 3), and what is kept beyond a step's groups is trained on in the next.
"""

from dataclasses import dataclass, replace

from megarl.cli import checked, parse, refusing_wrong_values
from megarl.config import PolicyConfig, RolloutSettings, RunSettings
from megarl.losses import clipped
from megarl.policy_run import train_policy
from megarl.recipes import DAPO, Recipe
from megarl.shaping import soft_overlong
from parallel.checkpoint_folder import CheckpointSettings
from parallel.launch import running
from parallel.mesh import Layout
from parallel.optimizer import OptimizerSettings
from parallel.options import option


@dataclass(frozen=True)
class DAPOSettings:
    """The numbers of the recipe."""

    clip_low: float = option(0.2, "the ratio of new to old probability is kept above 1 - clip_low")
    clip_high: float = option(0.28, "and below 1 + clip_high")
    dual_clip: float = option(0.0, "most times its advantage that a token of a bad response costs; 0: no bound")
    overlong_cache_tokens: int = option(
        0, "punish the last tokens before max_new_tokens, so many, growing to -1; 0: no punishment"
    )
    overlong_filtering: bool = option(True, "no loss on responses cut off at max_new_tokens")

    def recipe(self, max_new_tokens: int) -> Recipe:
        """Return DAPO with these numbers. Raises ValueError for one that is out of range."""
        cache = self.overlong_cache_tokens
        return replace(
            DAPO,
            policy_loss=clipped(self.clip_low, self.clip_high, self.dual_clip or None),
            shape_reward=soft_overlong(max_new_tokens, cache) if cache else None,
            mask_truncated=self.overlong_filtering,
        )


def main() -> None:
    sections = [RunSettings(), RolloutSettings(adaptive_oversampling=True), DAPOSettings()]
    sections += [Layout(), OptimizerSettings(), CheckpointSettings()]
    run, rollout, dapo, layout, optimizer, checkpoints = parse(__doc__, sections)
    with refusing_wrong_values():
        recipe = dapo.recipe(rollout.max_new_tokens)
        config = PolicyConfig(run, rollout, layout, optimizer, recipe, checkpoints=checkpoints)
    world, shape = checked(config)
    with running(world, run.timeout_seconds):
        train_policy(config, shape, world)


if __name__ == "__main__":
    main()
