"""Models and samples of test size, for the tests of updates."""

from dataclasses import replace
from pathlib import Path

import torch

from megarl.aggregation import GlobalCounts, token_mean
from megarl.batch import Sample, TrainPack, build_packs, count_globally
from parallel.log_probs import score_tokens
from parallel.mesh import Mesh
from parallel.model import build_model
from parallel.optimizer import OptimizerSettings, Trainable
from parallel.qwen import read_shape
from parallel.schedule import forward
from tests.tiny_model import draw_sequences

UNCLIPPED = OptimizerSettings(clip_grad=1e9)  # clipping would change the gradients that are compared
PROMPT = 2
"""Prompt tokens of every sample."""


def build(mesh: Mesh, folder: Path, head: str = "lm") -> Trainable:
    """Return the model of a folder, fp32, in training."""
    trainable = Trainable(build_model(read_shape(folder), mesh, torch.float32, head), mesh, UNCLIPPED)
    trainable.load_hf(folder, seed=7)
    return trainable


def make_samples(lengths: list[int], seed: int, **changes) -> list[Sample]:
    """Samples of `length` tokens, the first two a prompt, with advantages 1, 2, 3 ..."""
    samples = []
    for number, tokens in enumerate(draw_sequences(lengths, seed)):
        prompt, response = tokens[:PROMPT].tolist(), tokens[PROMPT:].tolist()
        log_probs = torch.zeros(len(response))
        sample = Sample(number, 0, prompt, response, log_probs, score=0.0, truncated=False, advantage=number + 1.0)
        samples.append(replace(sample, **changes))
    return samples


def packs_and_counts(samples: list[Sample], trainable: Trainable) -> tuple[list[TrainPack], GlobalCounts]:
    """Return this rank's packs of at most 100 tokens, weighed by the token mean, and the counts of all ranks."""
    counts = count_globally(samples, trainable.mesh)
    return build_packs(samples, 100, token_mean, counts, trainable.mesh), counts


def score_packs(trainable: Trainable, packs: list[TrainPack]) -> list[torch.Tensor]:
    """Log-probs `[N]` of each pack on the last stage, an empty list elsewhere."""
    return forward(trainable.models, packs, lambda model, hidden, pack: score_tokens(model, hidden, pack)[0])
