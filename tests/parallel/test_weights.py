"""Import of Hugging Face folders on every layout, and the way back, against transformers."""

import json

import pytest
import torch
from safetensors.torch import save_file
from transformers import Qwen2Config, Qwen3Config

from parallel.mesh import Layout
from parallel.qwen import read_shape
from tests.parallel.hf_models import (
    CONFIGS,
    LAYOUTS,
    RC01_CONFIG,
    SIZES,
    Job,
    by_rank,
    check_consistent,
    check_equal,
    check_logits,
    check_strict_load,
    make_model,
    run_jobs,
    tensors_of,
)


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
