"""A tiny Qwen as a Hugging Face folder, and gradients under Hugging Face names, for the distributed tests."""

import logging
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor

from parallel.optimizer import Trainable
from parallel.weights import export_hf

SIZES = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "vocab_size": 150,
    "max_position_embeddings": 128,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
}


def write_tiny_qwens(folder: Path) -> SimpleNamespace:
    """Write `qwen2` (tied, biases) and `qwen3` (untied, head norms) below `folder`; returns their folders.

    Weights are of order 0.1 and at least 0.01 in size, norms are around 1, so that no gradient is near zero and one
    rounding step of bf16 (at least 3e-5) is far above a step of a small learning rate.
    """
    from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

    models = {
        "qwen2": Qwen2ForCausalLM(Qwen2Config(**SIZES, tie_word_embeddings=True)),
        "qwen3": Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=16, tie_word_embeddings=False)),
    }
    generator = torch.Generator().manual_seed(0)
    for family, model in models.items():
        for name, parameter in model.named_parameters():
            drawn = 0.1 * torch.randn(parameter.shape, generator=generator)
            drawn += torch.where(drawn < 0, -0.01, 0.01)
            parameter.data = drawn + (1.0 if "norm" in name else 0.0)
        model.save_pretrained(folder / family)
    return SimpleNamespace(**{family: folder / family for family in models})


def load_transformers(folder: Path) -> torch.nn.Module:
    """Return the model of a folder in transformers, fp32: the reference that knows nothing of this repository."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def draw_sequences(lengths: list[int], seed: int = 0) -> list[Tensor]:
    """Return token sequences `[length]` of the tiny vocabulary."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(SIZES["vocab_size"], (length,), generator=generator) for length in lengths]


def hf_gradients(trainable: Trainable, folder: Path) -> dict[str, Tensor]:
    """Return the whole gradient under Hugging Face names, the same on every rank: the export knows every layout.

    Call it between `forward_backward` and `step`, on every rank. `folder` is written for it and must not exist.
    """
    _gather_reduced_gradients(trainable)
    parameters = [parameter for model in trainable.models for parameter in model.parameters()]
    weights = [parameter.detach().clone() for parameter in parameters]
    for parameter in parameters:
        parameter.data.copy_(parameter.main_grad)
    export_hf(folder, trainable.models, trainable.mesh)
    for parameter, weight in zip(parameters, weights, strict=True):
        parameter.data.copy_(weight)
    return load_file(folder / "model.safetensors")


def _gather_reduced_gradients(trainable: Trainable) -> None:
    """Fill every data rank's gradient buffers: the distributed optimizer reduces only the rank's own part of them."""
    mesh = trainable.mesh
    for chunk in trainable.chunks:
        for bucket in (bucket for buffer in chunk.buffers for bucket in buffer.buckets):
            shards = list(bucket.grad_data.chunk(mesh.data_size))
            dist.all_gather(shards, shards[mesh.data_rank].clone(), group=mesh.data_group)


def all_parameters(trainable: Trainable) -> list[Tensor]:
    """Return copies of this rank's weights, then of the optimizer's master weights and of its state."""
    optimizers = [optimizer.optimizer for optimizer in trainable.optimizer.chained_optimizers]
    tensors = [parameter for model in trainable.models for parameter in model.parameters()]
    for optimizer in optimizers:
        tensors += [parameter for group in optimizer.param_groups for parameter in group["params"]]
        tensors += [value for state in optimizer.state.values() for value in state.values()]
    return [tensor.detach().clone() for tensor in tensors]


def assert_relatively_close(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    """Compare tensor by tensor: norm of the difference over the norm, which must not be zero."""
    assert sorted(found) == sorted(expected)
    errors = {name: float((found[name] - expected[name]).norm() / expected[name].norm()) for name in expected}
    too_large = {name: error for name, error in errors.items() if not error <= tolerance}
    assert not too_large, too_large


def whole_difference(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Return the norm of the difference over the norm, of all tensors as one vector."""
    difference = torch.stack([(found[name] - expected[name]).norm() for name in expected]).norm()
    return float(difference / torch.stack([tensor.norm() for tensor in expected.values()]).norm())


class Records(logging.Handler):
    """Keeps the messages of a logger while it is entered."""

    def __init__(self, logger_name: str):
        super().__init__()
        self.logger = logging.getLogger(logger_name)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())

    def __enter__(self) -> "Records":
        self.logger.addHandler(self)
        return self

    def __exit__(self, *exception: object) -> None:
        self.logger.removeHandler(self)
