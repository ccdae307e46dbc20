"""Tiny Hugging Face models, and what a rank of a worker pool does with them: for the tests of `parallel.weights`."""

import json
import logging
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from parallel.mesh import Layout, build_mesh
from parallel.model import build_model
from parallel.pack import pack_sequences
from parallel.qwen import override_rope, read_shape
from parallel.schedule import forward
from parallel.weights import export_hf, import_hf

SIZES = {
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "vocab_size": 150,
    "max_position_embeddings": 64,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
}
CONFIGS = {
    "Qwen2, tied": Qwen2Config(**SIZES, tie_word_embeddings=True),
    "Qwen2.5, untied": Qwen2Config(**SIZES, tie_word_embeddings=False),
    "Qwen3, head size of its own": Qwen3Config(**SIZES, head_dim=16, tie_word_embeddings=False),
}
RC01_CONFIG = Qwen2Config(**(SIZES | {"vocab_size": 64, "num_hidden_layers": 2}), tie_word_embeddings=True)
LAYOUTS = {
    "TP1": Layout(),
    "TP2": Layout(2),
    "TP2, sequence parallel": Layout(2, sequence_parallel=True),
    "PP2": Layout(1, 2),
    "TP2 x PP2": Layout(2, 2),
    "PP2 with 2 virtual stages": Layout(1, 2, 2),
}
TOKENS = torch.tensor([3, 1, 4, 1, 5, 9, 2, 6])


@dataclass(frozen=True)
class Job:
    """What one rank does with one folder: build, import, compute logits, and export where a target is named."""

    source: Path
    target: Path | None = None
    dtype: torch.dtype = torch.float32
    head: str = "lm"
    yarn_factor: float | None = None
    copy_from_source: bool = True
    max_shard_bytes: int = 5 * 10**9
    card: str = ""


@dataclass(frozen=True)
class Done:
    """What a rank saw: logits [T, V] and output matrix on the last stage, parameters by name, warnings, refusal."""

    logits: torch.Tensor | None
    output_weight: torch.Tensor | None
    parameters: dict[str, torch.Tensor]
    warnings: list[str]
    refusal: str | None = None


def run_jobs(world, layout: Layout, jobs: list[Job]) -> list[Done]:
    """Run on one rank of a worker pool."""
    mesh = build_mesh(layout, world)
    return [run_job(mesh, job) for job in jobs]


def run_job(mesh, job: Job) -> Done:
    shape = read_shape(job.source)
    if job.yarn_factor is not None:
        shape = override_rope(shape, rope_type="yarn", factor=job.yarn_factor)
    chunks = build_model(shape, mesh, job.dtype, job.head)
    records = Records()
    logging.getLogger("parallel.weights").addHandler(records)
    try:
        import_hf(job.source, chunks, mesh, seed=7)
        if job.target is not None:
            source = job.source if job.copy_from_source else None
            export_hf(job.target, chunks, mesh, source, job.max_shard_bytes, job.card)
    except ValueError as error:
        return Done(None, None, {}, records.messages, str(error))
    finally:
        logging.getLogger("parallel.weights").removeHandler(records)
    parameters = {name: value.detach().clone() for chunk in chunks for name, value in chunk.named_parameters()}
    output = chunks[-1].output_weight().detach().clone() if mesh.is_last_stage else None
    logits = logits_of(chunks, mesh) if job.head == "lm" else None
    return Done(logits, output, parameters, records.messages)


class Records(logging.Handler):
    """Keeps the messages of a logger."""

    def __init__(self):
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record):
        self.messages.append(record.getMessage())


def logits_of(chunks, mesh) -> torch.Tensor | None:
    """Logits of TOKENS over the unpadded vocabulary, on the last stage."""

    def head(model, hidden, pack):
        local = model.gather_sequence(hidden)[:, 0] @ model.output_weight().T
        shards = [torch.empty_like(local) for _ in range(mesh.tensor_size)]
        dist.all_gather(shards, local.contiguous(), group=mesh.tensor_group)
        return torch.cat(shards, dim=1)[:, : model.shape.vocab_size].float()

    pack = pack_sequences([TOKENS], [torch.zeros(len(TOKENS), dtype=torch.bool)])
    outputs = forward(chunks, [pack] * mesh.pipeline_size, head)
    return outputs[0] if outputs else None


def make_model(config, folder: Path, max_shard_size: str = "1GB", scale: float = 0.2) -> torch.nn.Module:
    """Save a random model with biases that are not zero and norms that are not one; `scale` is the deviation."""
    make = Qwen3ForCausalLM if isinstance(config, Qwen3Config) else Qwen2ForCausalLM
    model = make(config).float().eval()
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        around = 1.0 if "norm" in name else 0.0
        parameter.data = around + scale * torch.randn(parameter.shape, generator=generator)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return model


@torch.no_grad()
def check_logits(done: list[Done], model: torch.nn.Module) -> None:
    """Compare the last stage's logits, which are of order 1, with transformers' within 1e-5."""
    expected = model(TOKENS[None]).logits[0].float()
    computed = [rank.logits for rank in done if rank.logits is not None]
    assert computed
    for logits in computed:
        assert expected.abs().max() > 1
        torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5)


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: value for path in folder.glob("*.safetensors") for name, value in load_file(path).items()}


def check_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert sorted(found) == sorted(expected)
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


def check_consistent(folder: Path) -> None:
    """RC02: index, files and a strict load in transformers agree."""
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    held = {path.name: load_file(path) for path in folder.glob("*.safetensors")}
    assert index["weight_map"] == {name: file for file, tensors in held.items() for name in tensors}
    assert index["metadata"]["total_size"] == sum(t.nbytes for tensors in held.values() for t in tensors.values())
    check_strict_load(folder)


def check_strict_load(folder: Path, auto=AutoModelForCausalLM) -> torch.nn.Module:
    model, info = auto.from_pretrained(folder, output_loading_info=True)
    problems = {key: value for key, value in info.items() if value}
    assert problems == {}
    return model.eval()


def by_rank(done: list[list[Done]], job: int) -> list[Done]:
    return [rank[job] for rank in done]
