"""Import and export of Hugging Face folders on every layout, against transformers."""

import json
import logging
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
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
            export_hf(job.target, chunks, mesh, source, job.max_shard_bytes)
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


def make_model(config, folder: Path, max_shard_size: str = "1GB") -> torch.nn.Module:
    """Save a random model with biases that are not zero and norms that are not one."""
    make = Qwen3ForCausalLM if isinstance(config, Qwen3Config) else Qwen2ForCausalLM
    model = make(config).float().eval()
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        around = 1.0 if "norm" in name else 0.0
        parameter.data = around + 0.2 * torch.randn(parameter.shape, generator=generator)
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


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_logits_equal_transformers_and_round_trip_is_bit_equal(tmp_path, workers, layout):
    """RC04: with 150 rows that are 256 inside. Small shards: the export is a stream of several files."""
    models, jobs = [], []
    for number, config in enumerate(CONFIGS.values()):
        models.append(make_model(config, tmp_path / f"source{number}"))
        jobs.append(Job(tmp_path / f"source{number}", tmp_path / f"target{number}", max_shard_bytes=30_000))
    done = workers.run(run_jobs, layout.model_parallel_size, layout, jobs)
    for number, (model, job) in enumerate(zip(models, jobs, strict=True)):
        check_logits(by_rank(done, number), model)
        check_equal(tensors_of(job.target), tensors_of(job.source))
        check_consistent(job.target)
        assert (job.target / "config.json").read_bytes() == (job.source / "config.json").read_bytes()


def test_only_one_copy_of_the_model_is_written_by_data_parallel_ranks(tmp_path, workers):
    make_model(CONFIGS["Qwen2, tied"], tmp_path / "source")
    done = workers.run(run_jobs, 2, Layout(), [Job(tmp_path / "source", tmp_path / "target")])
    assert torch.equal(done[0][0].logits, done[1][0].logits)
    check_equal(tensors_of(tmp_path / "target"), tensors_of(tmp_path / "source"))


@pytest.mark.parametrize("stages", [1, 2])
def test_tied_output_matrix_is_the_embedding_on_the_last_stage(tmp_path, workers, stages):
    """RC01: from one file without index and from two shards with an index, neither with an lm_head entry."""
    model = make_model(RC01_CONFIG, tmp_path / "one")
    make_model(RC01_CONFIG, tmp_path / "two", max_shard_size="40KB")
    assert len(list((tmp_path / "two").glob("*.safetensors"))) == 2
    assert "lm_head.weight" not in tensors_of(tmp_path / "one") | tensors_of(tmp_path / "two")
    jobs = [Job(tmp_path / "one"), Job(tmp_path / "two")]
    done = workers.run(run_jobs, stages, Layout(1, stages), jobs)
    for number in range(2):
        output = done[-1][number].output_weight
        assert torch.equal(output[:64], model.model.embed_tokens.weight)
        assert not output[64:].any()
        check_logits(by_rank(done, number), model)


@pytest.mark.parametrize("tensor_size", [1, 2])
def test_vocabulary_padding_is_zero_inside_and_absent_outside(tmp_path, workers, tensor_size):
    """RC04: 150 rows, 256 inside; the export has 150 again and the config says so."""
    model = make_model(CONFIGS["Qwen2.5, untied"], tmp_path / "source")
    done = workers.run(run_jobs, tensor_size, Layout(tensor_size), [Job(tmp_path / "source", tmp_path / "target")])
    for name, source in (
        ("embedding.word_embeddings.weight", model.model.embed_tokens.weight),
        ("output_layer.weight", model.lm_head.weight),
    ):
        inside = torch.cat([rank[0].parameters[name] for rank in done])
        assert inside.shape == (256, 32)
        assert torch.equal(inside[:150], source)
        assert not inside[150:].any()
    written = tensors_of(tmp_path / "target")
    assert torch.equal(written["model.embed_tokens.weight"], model.model.embed_tokens.weight)
    assert torch.equal(written["lm_head.weight"], model.lm_head.weight)
    assert read_shape(tmp_path / "target").vocab_size == 150


@pytest.mark.parametrize("head_dim", [16, None])
def test_head_size_and_head_norms_of_qwen3(tmp_path, workers, head_dim):
    """RC07: A states head size 16 with hidden / heads = 8, B states null; norms 1..D arrive and leave unswapped."""
    size = head_dim or 8
    model = make_model(Qwen3Config(**SIZES, head_dim=size), tmp_path / "source")
    for layer in model.model.layers:
        layer.self_attn.q_norm.weight.data = torch.arange(1.0, size + 1)
        layer.self_attn.k_norm.weight.data = torch.arange(1.0, size + 1).flip(0) / size
    model.save_pretrained(tmp_path / "source")
    config = json.loads((tmp_path / "source" / "config.json").read_text())
    (tmp_path / "source" / "config.json").write_text(json.dumps(config | {"head_dim": head_dim}))
    done = workers.run(run_jobs, 1, Layout(), [Job(tmp_path / "source", tmp_path / "target")])
    check_logits(by_rank(done, 0), model)
    written = tensors_of(tmp_path / "target")
    assert written["model.layers.0.self_attn.q_proj.weight"].shape == (4 * size, 32)
    assert written["model.layers.0.self_attn.k_proj.weight"].shape == (2 * size, 32)
    assert written["model.layers.0.self_attn.o_proj.weight"].shape == (32, 4 * size)
    for layer in range(4):
        assert written[f"model.layers.{layer}.self_attn.q_norm.weight"].tolist() == list(range(1, size + 1))
        assert written[f"model.layers.{layer}.self_attn.k_norm.weight"][0] == 1
    check_equal(written, tensors_of(tmp_path / "source"))


def test_yarn_model_equals_transformers(tmp_path, workers):
    """RC08: through the whole model, from a config and as an override, which the export writes back."""
    yarn = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 64}
    model = make_model(Qwen2Config(**(SIZES | {"rope_parameters": yarn})), tmp_path / "yarn")
    make_model(Qwen2Config(**SIZES), tmp_path / "plain")
    overridden = Job(tmp_path / "plain", tmp_path / "overridden", yarn_factor=4.0)
    done = workers.run(run_jobs, 1, Layout(), [Job(tmp_path / "yarn"), overridden])
    check_logits(by_rank(done, 0), model)
    check_logits(by_rank(done, 1), model)
    assert read_shape(tmp_path / "overridden").rope == read_shape(tmp_path / "yarn").rope
    check_logits(by_rank(done, 1), check_strict_load(tmp_path / "overridden"))


def test_export_agrees_with_itself_whatever_the_source(tmp_path, workers):
    """RC02: a tied source whose index lists lm_head; one file; three shards, one with a tensor the model lacks."""
    tied, single, three = tmp_path / "tied", tmp_path / "single", tmp_path / "three"
    make_model(CONFIGS["Qwen2, tied"], tied, max_shard_size="60KB")
    index = json.loads((tied / "model.safetensors.index.json").read_text())
    index["weight_map"]["lm_head.weight"] = next(iter(index["weight_map"].values()))
    (tied / "model.safetensors.index.json").write_text(json.dumps(index))
    make_model(CONFIGS["Qwen2.5, untied"], single)
    make_model(CONFIGS["Qwen2.5, untied"], three, max_shard_size="70KB")
    shards = sorted(three.glob("*.safetensors"))
    assert len(shards) == 3
    save_file(load_file(shards[1]) | {"visual.blocks.0": torch.ones(2)}, shards[1], metadata={"format": "pt"})
    jobs = [Job(source, tmp_path / f"{source.name} out", max_shard_bytes=50_000) for source in (tied, single, three)]
    (done,) = workers.run(run_jobs, 1, Layout(), jobs)
    for job in jobs:
        check_consistent(job.target)
    assert [len(job.warnings) for job in done] == [0, 0, 1]
    assert done[2].warnings[0].endswith("ignoring 1 tensors unknown to the model: visual.blocks.0")
    check_equal(tensors_of(jobs[2].target), tensors_of(single))


def test_lm_head_of_a_tied_source_is_ignored_silently(tmp_path, workers):
    """RC01: some tied checkpoints carry a copy of the embedding as lm_head."""
    model = make_model(CONFIGS["Qwen2, tied"], tmp_path)
    tensors = tensors_of(tmp_path)
    copied = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors | {"lm_head.weight": copied}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    done = workers.run(run_jobs, 1, Layout(), [Job(tmp_path)])
    assert done[0][0].warnings == []
    check_logits(by_rank(done, 0), model)


def test_wrong_sources_are_refused_on_every_rank_and_change_nothing(tmp_path, workers):
    """RC04: an unexpected row count is an error that names the tensor, not a reason to pad."""
    missing, wrong = tmp_path / "missing", tmp_path / "wrong"
    for folder in (missing, wrong):
        make_model(CONFIGS["Qwen2.5, untied"], folder)
    tensors = tensors_of(missing)
    del tensors["lm_head.weight"]
    save_file(tensors, missing / "model.safetensors")
    name = "model.layers.3.mlp.gate_proj.weight"
    save_file(tensors_of(wrong) | {name: torch.zeros(47, 32)}, wrong / "model.safetensors")
    done = workers.run(run_jobs, 2, Layout(1, 2), [Job(missing), Job(wrong)])
    for rank in done:
        assert rank[0].refusal.endswith("tensor lm_head.weight is missing; expected shape [150, 32]")
        assert rank[1].refusal.endswith(f"tensor {name} has shape [47, 32]; expected [48, 32]")


def test_export_refuses_bad_arguments_on_every_rank(tmp_path, workers):
    make_model(CONFIGS["Qwen2, tied"], tmp_path / "source")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "precious.txt").write_text("x")
    jobs = [
        Job(tmp_path / "source", tmp_path / "full"),
        Job(tmp_path / "source", tmp_path / "target", max_shard_bytes=0),
    ]
    done = workers.run(run_jobs, 2, Layout(2), jobs)
    for rank in done:
        assert "exists and is not empty" in rank[0].refusal
        assert rank[1].refusal == "max_shard_bytes is 0; allowed: 1 or more"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["full", "source"]


def test_killed_export_leaves_no_folder_and_does_not_disturb_the_next(tmp_path, workers):
    make_model(CONFIGS["Qwen2, tied"], tmp_path / "source")
    (tmp_path / ".target.partial").mkdir()
    (tmp_path / ".target.partial" / "model-00001-of-00009.safetensors").write_text("half")
    workers.run(run_jobs, 1, Layout(), [Job(tmp_path / "source", tmp_path / "target")])
    assert not (tmp_path / ".target.partial").exists()
    check_equal(tensors_of(tmp_path / "target"), tensors_of(tmp_path / "source"))


@pytest.mark.parametrize("source_dtype", [torch.bfloat16, torch.float16])
def test_weights_are_cast_to_the_parameters_dtype(tmp_path, workers, source_dtype):
    make_model(CONFIGS["Qwen2.5, untied"], tmp_path / "source").to(source_dtype).save_pretrained(tmp_path / "source")
    fp32 = Job(tmp_path / "source", tmp_path / "fp32")
    bf16 = replace(fp32, target=tmp_path / "bf16", dtype=torch.bfloat16)
    done = workers.run(run_jobs, 2, Layout(2), [fp32, bf16])
    exact = AutoModelForCausalLM.from_pretrained(tmp_path / "source", dtype=torch.float32).eval()
    check_logits(by_rank(done, 0), exact)
    source = tensors_of(tmp_path / "source")
    check_equal(tensors_of(fp32.target), {name: value.float() for name, value in source.items()})
    check_equal(tensors_of(bf16.target), {name: value.to(torch.bfloat16) for name, value in source.items()})
    assert check_strict_load(fp32.target).dtype == torch.float32
    assert check_strict_load(bf16.target).dtype == torch.bfloat16


def test_export_without_source_writes_its_own_config(tmp_path, workers):
    """RC10: works the same when the run was started from config only; companions come from a source alone."""
    model = make_model(CONFIGS["Qwen3, head size of its own"], tmp_path / "source")
    (tmp_path / "source" / "generation_config.json").write_bytes(b'{"eos_token_id": [11,12]}')
    with_source = Job(tmp_path / "source", tmp_path / "with")
    without = Job(tmp_path / "source", tmp_path / "without", copy_from_source=False)
    done = workers.run(run_jobs, 1, Layout(), [with_source, without])
    assert (tmp_path / "with" / "generation_config.json").read_bytes() == b'{"eos_token_id": [11,12]}'
    assert sorted(path.name for path in (tmp_path / "without").iterdir()) == ["config.json", "model.safetensors"]
    assert read_shape(tmp_path / "without") == read_shape(tmp_path / "source")
    check_equal(tensors_of(tmp_path / "without"), tensors_of(tmp_path / "source"))
    check_logits(by_rank(done, 0), model)
    check_logits(by_rank(done, 0), check_strict_load(tmp_path / "without"))


@pytest.mark.parametrize("name", ["Qwen2, tied", "Qwen2.5, untied"])
def test_new_scalar_head_is_random_and_equal_on_all_tensor_ranks(tmp_path, workers, name):
    model = make_model(CONFIGS[name], tmp_path / "source")
    critic = Job(tmp_path / "source", tmp_path / "critic", head="scalar")
    done = workers.run(run_jobs, 4, Layout(2, 2), [critic, Job(tmp_path / "critic", head="scalar")])
    heads = [rank[0].output_weight for rank in done[2:]]
    assert heads[0].shape == (1, 32)
    assert torch.equal(heads[0], heads[1])
    assert 0.01 < heads[0].std() < 0.03
    assert [len(rank[0].warnings) for rank in done] == [1, 0, 0, 0]
    assert "no score.weight; the scalar head starts from random values" in done[0][0].warnings[0]
    # Exported, it is a sequence classifier with one label to transformers, and a second import finds the head.
    loaded = check_strict_load(tmp_path / "critic", AutoModelForSequenceClassification)
    assert torch.equal(loaded.score.weight, heads[0])
    assert torch.equal(loaded.model.embed_tokens.weight, model.model.embed_tokens.weight)
    assert torch.equal(done[-1][1].output_weight, heads[0])
    assert [rank[1].warnings for rank in done] == [[], [], [], []]
