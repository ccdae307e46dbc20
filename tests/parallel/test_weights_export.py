"""Export of Hugging Face folders: what is written, where, and in which dtype."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from parallel.mesh import Layout
from parallel.qwen import read_shape
from tests.parallel.hf_models import (
    CONFIGS,
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


def test_only_one_copy_of_the_model_is_written_by_data_parallel_ranks(tmp_path, workers):
    make_model(CONFIGS["Qwen2, tied"], tmp_path / "source")
    done = workers.run(run_jobs, 2, Layout(), [Job(tmp_path / "source", tmp_path / "target")])
    assert torch.equal(done[0][0].logits, done[1][0].logits)
    check_equal(tensors_of(tmp_path / "target"), tensors_of(tmp_path / "source"))


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


def test_a_model_card_replaces_that_of_the_source_which_is_kept(tmp_path, workers):
    make_model(CONFIGS["Qwen2, tied"], tmp_path / "source")
    (tmp_path / "source" / "README.md").write_bytes(b"the base\r\n")
    job = Job(tmp_path / "source", tmp_path / "with", card="ours\n")
    workers.run(run_jobs, 1, Layout(), [job, replace(job, target=tmp_path / "without", card="")])
    assert (tmp_path / "with" / "README.md").read_bytes() == b"ours\n"
    assert (tmp_path / "with" / "README.base.md").read_bytes() == b"the base\r\n"
    assert (tmp_path / "without" / "README.md").read_bytes() == b"the base\r\n"
    assert not (tmp_path / "without" / "README.base.md").exists()


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
