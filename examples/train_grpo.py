"""Train a Qwen policy with GRPO on prompts with verifiable answers.

    torchrun --nproc-per-node 2 examples/train_grpo.py --model runs/sft/hf --output runs/grpo \\
        --prompts runs/data/train.jsonl --max-prompt-tokens 40 --max-new-tokens 8 --lr 7e-4
    torchrun --nproc-per-node 8 examples/train_grpo.py --model DIR --prompts FILE --dtype bf16 \\
        --tensor-model-parallel-size 2 --sequence-parallel --lr 1e-6

Source: DeepSeekMath, arXiv 2402.03300. Deviations: no KL term (as DAPO and later work), so no reference model is
loaded; several optimizer steps per rollout step, each on its own groups.
"""

from megarl.cli import checked, parse
from megarl.config import PolicyConfig, RolloutSettings, RunSettings
from megarl.policy_run import train_policy
from megarl.recipes import GRPO
from parallel.checkpoint_folder import CheckpointSettings
from parallel.launch import running
from parallel.mesh import Layout
from parallel.optimizer import OptimizerSettings


def main() -> None:
    sections = [RunSettings(), RolloutSettings(), Layout(), OptimizerSettings(), CheckpointSettings()]
    run, rollout, layout, optimizer, checkpoints = parse(__doc__, sections)
    config = PolicyConfig(run, rollout, layout, optimizer, recipe=GRPO, checkpoints=checkpoints)
    world, shape = checked(config)
    with running(world, run.timeout_seconds):
        train_policy(config, shape, world)


if __name__ == "__main__":
    main()
