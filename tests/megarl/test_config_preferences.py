"""Settings of runs on preference pairs are checked, with their files, before anything is built."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from examples import train_dpo, train_reward_model
from megarl.cli import parse
from megarl.config import to_plain
from megarl.config_preferences import DPOSettings, PreferenceSettings
from megarl.losses import PreferenceLoss
from parallel.mesh import Layout
from tests.megarl.small_pairs import dpo_config, reward_config


def test_good_configs_return_the_shape_of_their_model(small_run, tmp_path):
    assert dpo_config(small_run, tmp_path).check(world_size=1).num_layers == 4
    assert (tmp_path / "cache").is_dir()
    assert reward_config(small_run, tmp_path).check(world_size=1).num_layers == 4


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("batch_size", 0, "batch_size: got 0, allowed: from 1"),
        ("eval_every", -1, "eval_every: got -1, allowed: from 0"),
        ("eval_max_pairs", 0, "eval_max_pairs: got 0, allowed: from 1"),
        ("max_tokens", 1, "max_tokens: got 1, allowed: 2 to 32, the model's limit or half of max_tokens_per_pack"),
        ("max_tokens", 33, "max_tokens: got 33, allowed: 2 to 32"),
        ("truncation", "keep", "truncation: got 'keep', allowed: keep_start, keep_end"),
        ("preferences", Path("no.jsonl"), r"^preferences: there is no file 'no\.jsonl'"),
        ("eval_preferences", Path("no.jsonl"), r"^eval_preferences: there is no file 'no\.jsonl'"),
    ],
)
def test_wrong_settings_of_the_data_are_named_with_what_is_allowed(small_run, tmp_path, field, value, message):
    for config in (dpo_config(small_run, tmp_path), reward_config(small_run, tmp_path)):
        with pytest.raises(ValueError, match=message):
            replace(config, data=replace(config.data, **{field: value})).check(world_size=1)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("loss", "logistic", "loss: got 'logistic', allowed: sigmoid, ipo, hinge"),
        ("beta", 0.0, "beta: got 0.0, allowed: above 0"),
        ("label_smoothing", 0.5, "label_smoothing: got 0.5, allowed: from 0 to below 0.5"),
        ("nll", -1.0, "nll: got -1.0, allowed: from 0"),
    ],
)
def test_wrong_settings_of_the_loss_are_named_with_what_is_allowed(small_run, tmp_path, field, value, message):
    with pytest.raises(ValueError, match=message):
        dpo_config(small_run, tmp_path, **{field: value}).check(world_size=1)


@pytest.mark.parametrize("loss", ["ipo", "hinge"])
def test_smoothing_is_refused_where_the_loss_has_none(small_run, tmp_path, loss):
    """RC37: not ignored."""
    config = dpo_config(small_run, tmp_path, loss=loss, label_smoothing=0.1)
    with pytest.raises(ValueError, match=f"label_smoothing: got 0.1, allowed with loss '{loss}': 0"):
        config.check(world_size=1)


def test_layout_and_pack_size_are_checked_against_the_model(small_run, tmp_path):
    config = reward_config(small_run, tmp_path, Layout(tensor_model_parallel_size=8))
    with pytest.raises(ValueError, match="tensor_model_parallel_size: got 8, but num_attention_heads = 4"):
        config.check(world_size=8)
    config = reward_config(small_run, tmp_path)
    with pytest.raises(ValueError, match="max_tokens_per_pack: got 3, allowed: from 4, the smallest pair"):
        replace(config, run=replace(config.run, max_tokens_per_pack=3)).check(world_size=1)


def test_a_bad_row_and_a_bad_cache_folder_are_refused_before_anything_is_built(small_run, tmp_path):
    config = dpo_config(small_run, tmp_path, reference_cache=tmp_path / "train.jsonl")
    with pytest.raises(ValueError, match=r"reference_cache: got .*train\.jsonl', allowed: a folder that can be made"):
        config.check(world_size=1)
    replace(config, dpo=replace(config.dpo, cache_reference=False)).check(world_size=1)
    with config.data.preferences.open("a") as file:
        file.write('{"prompt": "1", "chosen": "2"}\n')
    with pytest.raises(ValueError, match=r"train\.jsonl, line 11: chosen: got '2', allowed: text in both answers"):
        config.check(world_size=1)


def test_each_flag_reaches_its_field_and_the_loss():
    """RC37"""
    arguments = "--loss ipo --beta 0.2 --nll 0.5 --no-cache-reference --reference-cache kept --max-tokens 9"
    arguments += " --preferences a.jsonl --eval-preferences b.parquet --truncation keep_start"
    data, dpo = parse("A test.", (PreferenceSettings(), DPOSettings()), arguments.split())
    assert data == PreferenceSettings(Path("a.jsonl"), Path("b.parquet"), max_tokens=9, truncation="keep_start")
    assert dpo == DPOSettings("ipo", 0.2, nll=0.5, reference_cache=Path("kept"), cache_reference=False)
    assert dpo.preference_loss() == PreferenceLoss("ipo", 0.2, 0.0, 0.5)
    (smoothed,) = parse("A test.", (DPOSettings(),), ["--label-smoothing", "0.1"])
    assert smoothed.preference_loss() == PreferenceLoss("sigmoid", 0.1, 0.1)


@pytest.mark.parametrize(
    ("main", "arguments", "message"),
    [
        (train_dpo.main, "--beta 0", "error: beta: got 0.0, allowed: above 0"),
        (train_dpo.main, "--loss none", "argument --loss: invalid choice: 'none'"),
        (train_dpo.main, "--truncation none", "argument --truncation: invalid choice: 'none'"),
        (train_reward_model.main, "--batch-size 0", "error: batch_size: got 0, allowed: from 1"),
        (train_reward_model.main, "--beta 0.1", "unrecognized arguments: --beta 0.1"),
    ],
)
def test_examples_end_with_status_2_and_the_reason(small_run, tmp_path, capsys, monkeypatch, main, arguments, message):
    config = reward_config(small_run, tmp_path)
    paths = {"model": config.run.model, "output": config.run.output, "preferences": config.data.preferences}
    paths |= {"reference-cache": tmp_path / "cache"} if main is train_dpo.main else {}
    flags = [word for name, path in paths.items() for word in (f"--{name}", str(path))]
    monkeypatch.setattr(sys, "argv", ["train.py", *flags, *arguments.split()])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_plain_values_are_json(small_run, tmp_path):
    plain = json.loads(json.dumps(to_plain(dpo_config(small_run, tmp_path))))
    assert list(plain) == ["run", "data", "layout", "optimizer", "dpo", "checkpoints"]
    assert plain["dpo"]["reference_cache"] == str(tmp_path / "cache")
