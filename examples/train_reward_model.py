"""Train a reward model on preference pairs: a Qwen with one number in place of the next token, read at the last token.

    torchrun --nproc-per-node 2 examples/train_reward_model.py --model runs/sft/hf --output runs/reward_model \\
        --preferences runs/data/preferences.jsonl --eval-preferences runs/data/heldout_preferences.jsonl --lr 5e-4
    torchrun --nproc-per-node 8 examples/train_reward_model.py --model DIR --preferences FILE --dtype bf16 \\
        --tensor-model-parallel-size 2 --sequence-parallel --lr 5e-6

The trained folder is a `...ForSequenceClassification` of transformers, and the --reward-model of the other examples.

Source: the Bradley-Terry loss of arXiv 2203.02155, eq. 1, with the margin of arXiv 2307.09288, section 3.2.2, where
rows have one. Deviations: pairs instead of all comparisons within a ranking; rewards are not shifted to a mean of 0.
"""

from megarl.cli import checked, parse
from megarl.config import RunSettings
from megarl.config_preferences import PreferenceSettings, RewardModelConfig
from megarl.reward_model import train_reward_model
from parallel.checkpoint_folder import CheckpointSettings
from parallel.launch import running
from parallel.mesh import Layout
from parallel.optimizer import OptimizerSettings


def main() -> None:
    sections = [RunSettings(), PreferenceSettings(), Layout(), OptimizerSettings(), CheckpointSettings()]
    run, data, layout, optimizer, checkpoints = parse(__doc__, sections)
    config = RewardModelConfig(run, data, layout, optimizer, checkpoints=checkpoints)
    world, shape = checked(config)
    with running(world, run.timeout_seconds):
        train_reward_model(config, shape, world)


if __name__ == "__main__":
    main()
