"""A reward model: one number per prompt and answer, learnt from preference pairs."""

from __future__ import annotations

from torch import Tensor

from megarl.batch import TrainPack
from megarl.config import DTYPES
from megarl.config_preferences import RewardModelConfig
from megarl.losses import bradley_terry
from megarl.preference import PairTrainer, load_pairs, reward_metrics, run_training
from megarl.run_folder import begin_run
from megarl.updates import Metrics
from parallel.launch import World
from parallel.model import QwenModel, build_model, token_values
from parallel.optimizer import Trainable
from parallel.qwen import QwenShape


def train_reward_model(config: RewardModelConfig, shape: QwenShape, world: World) -> dict[str, float]:
    """Train a reward model from a HF folder, of a language model or of a reward model, to a HF folder, which
    transformers loads as a sequence classifier with one label.

    Returns: the summary's numbers, on all ranks.
    """
    run = config.run
    mesh, plain = begin_run(config, world)
    data = load_pairs(config, shape)
    model = Trainable(build_model(shape, mesh, DTYPES[run.dtype], "scalar"), mesh, config.optimizer)
    model.load_hf(run.model, seed=run.seed)
    return run_training("reward model", PairTrainer(config, model, data, reward_head), plain)


def reward_head(model: QwenModel, hidden: Tensor, pack: TrainPack) -> tuple[Tensor, Metrics]:
    """Bradley-Terry loss of each pair, `[P]`, from the value at the last token of each of its sequences, and metrics
    `[P]`; see `megarl.preference.PairHead`."""
    rewards = token_values(model, hidden, pack.ends.to(hidden.device))
    chosen, rejected = rewards[0::2], rewards[1::2]
    losses = bradley_terry(chosen, rejected, pack.scores[0::2] - pack.scores[1::2])
    return losses, reward_metrics(chosen, rejected)
