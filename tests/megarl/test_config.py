import dataclasses
import json
import math
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from megarl.config import DemonstrationSettings, PolicyConfig, SFTConfig, check_vocabulary, to_plain
from megarl.recipes import DAPO
from parallel.mesh import Layout
from parallel.optimizer import OptimizerSettings


def test_a_good_config_returns_the_shape_of_its_model(small_run, tmp_path):
    shape = small_run.config(tmp_path).check(world_size=1)
    assert (shape.num_layers, shape.vocab_size) == (4, 320)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("num_steps", 0, "num_steps: got 0, allowed: from 1"),
        ("max_tokens_per_pack", 21, "max_tokens_per_pack: got 21, allowed: from .* = 22, the longest sequence"),
        ("dtype", "fp16", "dtype: got 'fp16', allowed: fp32, bf16"),
        ("wandb", "on", "wandb mode must be one of disabled, offline, online, got 'on'"),
        ("model", Path("no such folder"), "model: got 'no such folder', allowed: a folder with a config.json"),
        ("timeout_seconds", 0.0, "timeout_seconds: got 0.0, allowed: above 0"),
        ("progress_seconds", -1.0, "progress_seconds: got -1.0, allowed: from 0"),
    ],
)
def test_wrong_run_settings_are_named_with_what_is_allowed(small_run, tmp_path, field, value, message):
    with pytest.raises(ValueError, match=message):
        small_run.config(tmp_path, run={field: value}).check(world_size=1)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        *((name, 0, f"{name}: got 0, allowed: from 1") for name in ("prompts_per_step", "group_size", "max_sequences")),
        *((name, 0, f"{name}: got 0, allowed: from 1") for name in ("max_prompt_tokens", "max_new_tokens")),
        *(
            ("oversampling", value, f"oversampling: got {value}, allowed: 1 to 100")
            for value in (0.5, math.nan, math.inf)
        ),
        ("max_cache_tokens", 0, "max_cache_tokens: got 0, allowed: from 1"),
        ("reward_threads", -1, "reward_threads: got -1, allowed: from 0"),
        ("reward_timeout_seconds", 0.0, "reward_timeout_seconds: got 0.0, allowed: above 0"),
        ("reward_timeout_seconds", float("nan"), "reward_timeout_seconds: got nan, allowed: above 0"),
        *((name, 0, f"{name}: got 0, allowed: from 1") for name in ("max_generation_rounds", "eval_max_prompts")),
        ("eval_every", -1, "eval_every: got -1, allowed: from 0"),
        ("num_mini_batches", 0, "num_mini_batches: got 0, allowed: 1 to prompts_per_step 4"),
        ("num_mini_batches", 5, "num_mini_batches: got 5, allowed: 1 to prompts_per_step 4"),
        ("temperature", 0.0, "temperature: got 0.0, allowed in training: 0.01 to 100"),
        ("temperature", float("nan"), "temperature: got nan, allowed in training: 0.01 to 100"),
        ("group_size", 1, "group_size: got 1, not allowed by recipe grpo: a group needs at least 2 responses"),
        ("max_new_tokens", 497, r"max_prompt_tokens \+ max_new_tokens: got 513, allowed by the model: at most 512"),
        ("prompts", Path("no.jsonl"), "^prompts: there is no file 'no.jsonl'"),
        ("eval_prompts", Path("no.jsonl"), "^eval_prompts: there is no file 'no.jsonl'"),
        (
            "reward",
            "best",
            "reward is 'best'; allowed: exact_match, sorted_digits, module:function or file.py:function",
        ),
    ],
)
def test_wrong_rollout_settings_are_named_with_what_is_allowed(small_run, tmp_path, field, value, message):
    """RC41: temperature 0 is refused for training before anything is built."""
    with pytest.raises(ValueError, match=message):
        small_run.config(tmp_path, rollout={field: value}).check(world_size=1)


def test_a_cache_too_small_for_one_response_is_refused_before_anything_is_built(small_run, tmp_path):
    """A prompt and a response of at most 128 tokens take one column each, in each of two lanes."""
    config = small_run.config(tmp_path, layout=Layout(1, 2))
    tight = replace(config, rollout=replace(config.rollout, max_cache_tokens=512))
    tight.check(world_size=2)
    with pytest.raises(ValueError, match=r"max_cache_tokens: got 511, allowed for prompts of .*: from 512"):
        replace(tight, rollout=replace(tight.rollout, max_cache_tokens=511)).check(world_size=2)


def test_layout_is_checked_against_model_and_world(small_run, tmp_path):
    config = small_run.config(tmp_path, layout=Layout(tensor_model_parallel_size=2))
    assert config.check(world_size=4).num_layers == 4
    with pytest.raises(ValueError, match="world size: got 3, allowed: multiples of tensor 2"):
        config.check(world_size=3)
    with pytest.raises(ValueError, match=r"tensor_model_parallel_size: got 8, but num_attention_heads = 4"):
        small_run.config(tmp_path, layout=Layout(tensor_model_parallel_size=8)).check(world_size=8)


@pytest.mark.parametrize(
    ("size", "world_size", "message"),
    [
        (3, 3, "tensor_model_parallel_size: got 3, but num_attention_heads = 4"),
        (2, 1, "world size: got 1, allowed: multiples of tensor 2"),
        (4, 4, "tensor_model_parallel_size of the inference layout: got 4, allowed: up to num_query_groups = 2"),
    ],
)
def test_the_layout_of_rollout_is_checked_too(small_run, tmp_path, size, world_size, message):
    config = small_run.config(tmp_path, rollout={"rollout_tensor_model_parallel_size": size})
    with pytest.raises(ValueError, match=message):
        config.check(world_size)


def test_a_tokenizer_with_more_ids_than_the_model_has_rows_is_refused(small_run, tmp_path):
    shape = small_run.config(tmp_path).check(world_size=1)
    with pytest.raises(ValueError, match="has id 319, allowed by vocab_size: below 319"):
        check_vocabulary(small_run.folder / "model", replace(shape, vocab_size=319))


def test_a_folder_with_a_trained_model_is_not_overwritten(small_run, tmp_path):
    (tmp_path / "hf").mkdir()
    with pytest.raises(ValueError, match=r"output: .* already holds a run, allowed: another folder"):
        small_run.config(tmp_path).check(world_size=1)


def test_demonstrations_are_checked(small_run, tmp_path):
    run, layout = small_run.config(tmp_path).run, Layout()
    config = SFTConfig(run, DemonstrationSettings(small_run.folder / "train.jsonl"), layout, OptimizerSettings())
    assert config.check(world_size=1).num_layers == 4
    with pytest.raises(ValueError, match=r"demonstrations: there is no file 'no\.jsonl'"):
        replace(config, data=DemonstrationSettings(Path("no.jsonl"))).check(world_size=1)
    with pytest.raises(ValueError, match="batch_size: got 0, allowed: from 1"):
        replace(config, data=replace(config.data, batch_size=0)).check(world_size=1)


def test_plain_values_hold_every_field_and_are_json(small_run, tmp_path):
    config = small_run.config(tmp_path, recipe=DAPO)
    plain = json.loads(json.dumps(to_plain(config)))
    assert list(plain) == [field.name for field in dataclasses.fields(PolicyConfig)]
    for name in ("run", "rollout", "layout", "optimizer"):
        assert list(plain[name]) == [field.name for field in dataclasses.fields(getattr(config, name))]
    assert plain["run"]["output"] == str(tmp_path)
    assert plain["layout"]["virtual_pipeline_model_parallel_size"] is None
    assert plain["recipe"] == DAPO.describe()


def test_configs_are_frozen(small_run, tmp_path):
    with pytest.raises(dataclasses.FrozenInstanceError):
        small_run.config(tmp_path).run.seed = 1


@pytest.mark.parametrize("content", [b"", b"{broken\n", b'{"prompt": "1>"}\n', b'{"prompt": "\xff", "answer": "1"}\n'])
def test_broken_prompt_files_are_refused_before_anything_is_built(small_run, tmp_path, content):
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"prompts\.jsonl"):
        small_run.config(tmp_path / "run", rollout={"prompts": path}).check(world_size=1)


def test_a_lone_surrogate_in_a_prompt_is_refused_with_its_line(small_run, tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "\\ud800", "answer": "1"}\n')
    with pytest.raises(ValueError, match=r"prompts\.jsonl, line 1: "):
        small_run.config(tmp_path / "run", rollout={"prompts": path}).check(world_size=1)


def test_a_truncated_weight_file_is_named_before_anything_is_built(small_run, tmp_path):
    model = tmp_path / "model"
    shutil.copytree(small_run.folder / "model", model)
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(ValueError, match=r"model\.safetensors is broken"):
        small_run.config(tmp_path / "run", run={"model": model}).check(world_size=1)


@pytest.mark.parametrize("content", ["[]", '{"model_type": '])
def test_a_broken_model_config_is_named(small_run, tmp_path, content):
    model = tmp_path / "model"
    shutil.copytree(small_run.folder / "model", model)
    (model / "config.json").write_text(content)
    with pytest.raises(ValueError, match=r"model/config\.json: "):
        small_run.config(tmp_path / "run", run={"model": model}).check(world_size=1)


def test_an_output_that_cannot_be_a_folder_is_refused(small_run, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"output: got .*file.*, allowed: a folder that can be made"):
        small_run.config(tmp_path / "file").check(world_size=1)


def test_a_folder_with_the_metrics_of_another_run_is_refused(small_run, tmp_path):
    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(ValueError, match=r"output: .* already holds a run, allowed: another folder"):
        small_run.config(tmp_path).check(world_size=1)


def test_settings_that_are_not_finite_and_seeds_beyond_64_bits_are_refused(small_run, tmp_path):
    for field, value in (("timeout_seconds", float("inf")), ("seed", 2**63)):
        with pytest.raises(ValueError, match=f"{field}: got "):
            small_run.config(tmp_path, run={field: value}).check(world_size=1)
    for field in ("lr", "adam_eps", "weight_decay"):
        with pytest.raises(ValueError, match=f"{field}: got inf"):
            OptimizerSettings(**{field: float("inf")})
