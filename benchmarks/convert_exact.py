"""Part 1 of convert.py: is every layout's model that of the folder, and does it come back bit for bit?"""

from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from common import CASES, no_nan, on_layouts, print_table
from torch import Tensor
from transformers import PretrainedConfig, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from megarl.conversion import differences, to_hf, to_megatron
from parallel.mesh import Layout, Mesh
from parallel.model import QwenModel, build_model
from parallel.pack import Pack, pack_sequences
from parallel.qwen import read_shape
from parallel.schedule import forward
from parallel.weights import export_hf, import_hf

LAYOUTS = ("TP1", "TP2", "PP2", "TP2xPP2", "PP2xVP2", "PP3 1+2+1")
LOGITS_BAR = 1e-4
SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "vocab_size": 150,  # no multiple of what megatron-core's ranks want
    "max_position_embeddings": 64,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
}
FAMILIES: dict[str, PretrainedConfig] = {
    "Qwen2, tied": Qwen2Config(**SIZES, tie_word_embeddings=True),
    "Qwen2.5, untied": Qwen2Config(**SIZES, tie_word_embeddings=False),
    "Qwen3, head size 32": Qwen3Config(**SIZES, head_dim=32, tie_word_embeddings=False),  # not 64 / 4
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
TOKENS = torch.arange(0, 150, 5)


def make_models(folder: Path) -> dict[str, Tensor]:
    """Write a model of each family in each dtype; returns the logits [T, V] that transformers computes in fp32."""
    expected = {}
    for number, (family, config) in enumerate(FAMILIES.items()):
        make = Qwen3ForCausalLM if isinstance(config, Qwen3Config) else Qwen2ForCausalLM
        model = make(config).float().eval()
        generator = torch.Generator().manual_seed(number)
        for name, parameter in model.named_parameters():
            around = 1.0 if "norm" in name else 0.0
            parameter.data = around + 0.1 * torch.randn(parameter.shape, generator=generator)
        with torch.no_grad():
            expected[family] = model(TOKENS[None]).logits[0]
        for name, dtype in DTYPES.items():
            model.to(dtype).save_pretrained(folder / f"{number} {name}", max_shard_size="200KB")
    return expected


def logits(chunks: list[QwenModel], mesh: Mesh) -> Tensor | None:
    """Logits of TOKENS [T, V] on the last stage."""

    def head(model: QwenModel, hidden: Tensor, pack: Pack) -> Tensor:
        local = model.gather_sequence(hidden)[:, 0] @ model.output_weight().T
        shards = [torch.empty_like(local) for _ in range(mesh.tensor_size)]
        dist.all_gather(shards, local.contiguous(), group=mesh.tensor_group)
        return torch.cat(shards, dim=1)[:, : model.shape.vocab_size]

    pack = pack_sequences([TOKENS], [torch.zeros(len(TOKENS), dtype=torch.bool)])
    outputs = forward(chunks, [pack] * mesh.pipeline_size, head)
    return outputs[0] if outputs else None


def run(mesh: Mesh, models: Path, exported: Path) -> dict[str, Tensor | None]:
    """Import each model into this rank's layout and export it; returns the logits of those in fp32."""
    name = next(name for name in LAYOUTS if CASES[name].layout == mesh.layout)
    found = {}
    for source in sorted(models.iterdir()):
        dtype = DTYPES[source.name.split()[-1]]
        chunks = build_model(read_shape(source), mesh, dtype)
        import_hf(source, chunks, mesh)
        export_hf(exported / name / source.name, chunks, mesh, source, max_shard_bytes=100_000)
        if dtype == torch.float32:
            found[source.name] = logits(chunks, mesh)
    return found


def main(scratch: Path) -> tuple[str, bool, dict[str, Any]]:
    """Run the part; returns its figure, whether it passed, and its numbers."""
    models, exported = scratch / "models", scratch / "exported"
    expected = make_models(models)
    outcomes = on_layouts(run, LAYOUTS, scratch, models, exported)
    with redirect_stderr(StringIO()):  # progress of 78 little conversions
        return compare(models, exported, expected, outcomes, scratch)


def compare(
    models: Path,
    exported: Path,
    expected: dict[str, Tensor],
    outcomes: dict[str, list[dict[str, Tensor | None]]],
    scratch: Path,
) -> tuple[str, bool, dict[str, Any]]:
    """Compare all that was exported and computed; see `main`."""
    rows: list[list[object]] = []
    worst, num_unequal = 0.0, 0
    for layout in LAYOUTS:
        for number, family in enumerate(FAMILIES):
            computed = [rank[f"{number} fp32"] for rank in outcomes[layout]]
            found = [no_nan(float((each - expected[family]).abs().max())) for each in computed if each is not None]
            unequal = {
                dtype: len(list(differences(models / f"{number} {dtype}", exported / layout / f"{number} {dtype}")))
                for dtype in DTYPES
            }
            rows.append([f"{layout}, {family}", *(said(unequal[dtype]) for dtype in DTYPES), max(found)])
            worst, num_unequal = max(worst, *found), num_unequal + sum(unequal.values())
    for number, family in enumerate(FAMILIES):
        unequal = {dtype: through_checkpoint(models / f"{number} {dtype}", scratch) for dtype in DTYPES}
        rows.append([f"megarl convert, {family}", *(said(unequal[dtype]) for dtype in DTYPES), ""])
        num_unequal += sum(unequal.values())
    print_table(["there and back", *DTYPES, "logits"], rows)
    figure = f"{num_unequal} tensors come back changed, logits within {worst:.1e} of transformers' (bar {LOGITS_BAR})"
    return figure, num_unequal == 0 and worst < LOGITS_BAR, {"unequal": num_unequal, "logits": worst}


def through_checkpoint(source: Path, scratch: Path) -> int:
    """Convert to a checkpoint and back; returns how many tensors differ."""
    checkpoint, back = (scratch / part / source.name for part in ("checkpoints", "back"))
    to_megatron(source, checkpoint, Layout())
    to_hf(checkpoint, back, 100_000)
    return len(list(differences(source, back)))


def said(num_unequal: int) -> str:
    return f"{num_unequal} differ" if num_unequal else "equal"
