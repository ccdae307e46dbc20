"""Rotary numbers against transformers, and the reading of rotary settings."""

import json
import math
from dataclasses import replace

import pytest
import torch
from transformers import AutoConfig
from transformers.models.qwen2.modeling_qwen2 import Qwen2RotaryEmbedding

from parallel.qwen import QwenShape, override_rope, read_shape, rope_attention_scale, rotary_angles
from parallel.rope import RopeSettings, read_rope, rope_parameters

CONFIG = {
    "model_type": "qwen2",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 128,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 256,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LINEAR = {"type": "linear", "factor": 2.0}
SETTINGS = {
    "theta at top level": {"rope_theta": 1e6},
    "theta in rope_parameters": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
    "yarn": {"rope_theta": 1e6, "rope_scaling": YARN},
    "yarn with a stated scale": {"rope_theta": 1e6, "rope_scaling": {**YARN, "attention_factor": 1.0}},
    "linear": {"rope_theta": 1e6, "rope_scaling": LINEAR},
}


def shape_of(folder, **settings) -> QwenShape:
    (folder / "config.json").write_text(json.dumps(CONFIG | settings))
    return read_shape(folder)


def check_equal_to_transformers(folder, shape: QwenShape) -> None:
    """Compare with the cos and sin that transformers computes from the same folder, at positions 0..255."""
    rotary = Qwen2RotaryEmbedding(AutoConfig.from_pretrained(folder))
    cos, sin = rotary(torch.zeros(1), torch.arange(256)[None])
    angles, scale = rotary_angles(shape, torch.arange(256))[:, 0, 0], rope_attention_scale(shape)
    assert torch.equal(angles.cos() * scale, cos[0])
    assert torch.equal(angles.sin() * scale, sin[0])


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_angles_and_scale_equal_transformers_at_every_position(tmp_path, settings):
    """RC08: and the base is always the stated one, never 10000."""
    shape = shape_of(tmp_path, **settings)
    assert shape.rope.theta == 1e6
    check_equal_to_transformers(tmp_path, shape)


@pytest.mark.parametrize(
    "more",
    [
        {"beta_fast": 16, "beta_slow": 2},
        {"truncate": False},
        {"mscale": 0.7, "mscale_all_dim": 0.4},
        {"mscale": 0.7},
        {"beta_fast": 1.5, "beta_slow": 1.5, "truncate": False},
    ],
    ids=str,
)
def test_every_yarn_setting_equals_transformers(tmp_path, more):
    """RC08: explicit settings are not ignored; the last one has a ramp of no width."""
    check_equal_to_transformers(tmp_path, shape_of(tmp_path, rope_theta=1e6, rope_scaling=YARN | more))


def test_yarn_scale_is_computed_unless_stated(tmp_path):
    """RC08: 0.1 ln 4 + 1 = 1.138629 by default, 1.0 when stated."""
    assert rope_attention_scale(shape_of(tmp_path, **SETTINGS["yarn"])) == pytest.approx(1.138629, abs=1e-6)
    assert rope_attention_scale(shape_of(tmp_path, **SETTINGS["yarn with a stated scale"])) == 1.0


def test_yarn_override_keeps_the_base(tmp_path):
    """RC08: a scaling override on top of a config changes nothing but the scaling."""
    plain = shape_of(tmp_path, rope_theta=1e6)
    overridden = override_rope(plain, rope_type="yarn", factor=4.0, original_max_position_embeddings=64)
    assert overridden == shape_of(tmp_path, rope_theta=1e6, rope_scaling=YARN)
    assert overridden.rope.theta == 1e6
    check_equal_to_transformers(tmp_path, overridden)


def test_yarn_override_takes_the_context_length_as_original(tmp_path):
    plain = shape_of(tmp_path, rope_theta=1e6)
    assert override_rope(plain, rope_type="yarn", factor=2.0).rope.original_max_position_embeddings == 256


def test_yarn_defaults_are_those_of_transformers(tmp_path):
    """The original length is taken from the top level, else from the context length; the factor from their ratio."""
    yarn = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e6}
    assert shape_of(tmp_path, rope_parameters=yarn).rope.original_max_position_embeddings == 256
    shape = shape_of(tmp_path, rope_parameters=yarn, original_max_position_embeddings=32)
    assert shape.rope.original_max_position_embeddings == 32
    check_equal_to_transformers(tmp_path, shape)
    null_factor = {**YARN, "factor": None, "rope_theta": 1e6}
    assert shape_of(tmp_path, rope_parameters=null_factor).rope.factor == 4.0


def test_angles_by_hand():
    """Base 100 and head size 4: the pairs turn by 1 and by 100 ** -0.5 = 0.1 per position."""
    shape = QwenShape("qwen2", 1, 8, 2, 1, 4, 16, 32, True, 1e-6, 64, RopeSettings("default", 100.0))
    angles = rotary_angles(shape, torch.tensor([0, 3, 1]))
    assert angles.shape == (3, 1, 1, 4)
    expected = torch.tensor([[0, 0, 0, 0], [3, 0.3, 3, 0.3], [1, 0.1, 1, 0.1]])
    torch.testing.assert_close(angles[:, 0, 0], expected, rtol=1e-6, atol=0)
    linear = replace(shape, rope=RopeSettings("linear", 100.0, factor=2.0))
    torch.testing.assert_close(rotary_angles(linear, torch.tensor([6])), angles[1:2], rtol=1e-6, atol=0)


def test_yarn_scale_by_hand():
    """0.1 ln(e) + 1 = 1.1."""
    shape = QwenShape("qwen2", 1, 8, 2, 1, 4, 16, 32, True, 1e-6, 64, RopeSettings("yarn", 100.0, math.e, 64))
    assert rope_attention_scale(shape) == pytest.approx(1.1)


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_written_settings_read_back_the_same(tmp_path, settings):
    """RC08: export writes the settings back."""
    rope = shape_of(tmp_path, **settings).rope
    assert read_rope(CONFIG | {"rope_parameters": rope_parameters(rope)}) == rope


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rope_theta": 1e6, "rope_scaling": {"type": "llama3", "factor": 8}}, "'llama3'; allowed: default, linear"),
        ({"rope_theta": 1e6, "rope_scaling": {"rope_type": "dynamic", "factor": 2}}, "'dynamic'; allowed"),
        ({}, "rope_theta is missing"),
        ({"rope_theta": 1e4, "rope_parameters": {"rope_theta": 1e6}}, "states rope_theta = 1000000.0 but 10000.0"),
        ({"rope_theta": 1e6, "rope_scaling": LINEAR, "rope_parameters": YARN}, "rope_type = 'yarn' but 'linear'"),
        ({"rope_theta": 1e6, "rope_scaling": {"rope_type": "linear"}}, "needs factor"),
        ({"rope_theta": 1e6, "rope_scaling": {"rope_type": "linear", "factor": 0.5}}, "factor is 0.5"),
        ({"rope_theta": 1e6, "rope_scaling": {"factor": 2.0}}, "has factor with rope_type 'default'"),
        ({"rope_theta": 1e6, "rope_scaling": {**YARN, "mrope_section": [1]}}, "has mrope_section"),
        ({"rope_theta": 1e6, "rope_scaling": {**YARN, "attention_factor": -1.0}}, "attention_factor is -1.0"),
        ({"rope_theta": 1e6, "rope_scaling": {**YARN, "beta_fast": 0.5}}, "beta_fast, beta_slow are 0.5"),
        ({"rope_theta": 1e6, "partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_theta": 0}, "rope_theta is 0"),
    ],
)  # fmt: skip
def test_unknown_or_contradictory_settings_are_refused(tmp_path, settings, message):
    """RC08: an unknown type is refused, and nothing falls back to a default silently."""
    with pytest.raises(ValueError, match=message):
        shape_of(tmp_path, **settings)
