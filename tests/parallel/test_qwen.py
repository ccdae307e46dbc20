"""config.json <-> QwenShape <-> TransformerConfig."""

import json
import math
from dataclasses import asdict, replace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, Qwen2Config, Qwen3Config

from parallel.mesh import Layout
from parallel.qwen import (
    SIZES,
    QwenShape,
    hf_config,
    num_parameters,
    override_rope,
    padded_vocab_size,
    read_shape,
    transformer_config,
)
from parallel.rope import RopeSettings

TINY = {
    "model_type": "qwen3",
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "vocab_size": 150,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 64,
    "rope_theta": 1e6,
}
CPU = torch.device("cpu")


def shape_of(folder, **settings) -> QwenShape:
    (folder / "config.json").write_text(json.dumps(TINY | settings))
    return read_shape(folder)


def test_head_dim_is_the_stated_one(tmp_path):
    """RC07: configuration A states 16, not 32 / 4."""
    assert shape_of(tmp_path, head_dim=16).head_dim == 16
    assert shape_of(tmp_path, model_type="qwen2", head_dim=16).head_dim == 16


def test_null_head_dim_is_hidden_size_by_heads(tmp_path):
    """RC07: configuration B, the key is present but null."""
    assert shape_of(tmp_path, head_dim=None).head_dim == 8
    assert shape_of(tmp_path, model_type="qwen2", head_dim=None).head_dim == 8


def test_missing_head_dim_is_what_transformers_assumes(tmp_path):
    for model_type, head_dim in (("qwen2", 8), ("qwen3", 128)):
        assert shape_of(tmp_path, model_type=model_type).head_dim == head_dim
        config = AutoConfig.from_pretrained(tmp_path)
        assert getattr(config, "head_dim", config.hidden_size // config.num_attention_heads) == head_dim


def test_null_key_value_heads_are_as_many_as_query_heads(tmp_path):
    assert shape_of(tmp_path, num_key_value_heads=None).num_query_groups == 4


@pytest.mark.parametrize("make", [Qwen2Config, Qwen3Config])
@pytest.mark.parametrize("tied", [True, False])
def test_every_field_is_read_from_what_transformers_writes(tmp_path, make, tied):
    sizes = {name: value for name, value in TINY.items() if name != "model_type"}
    more = {"head_dim": 16} if make is Qwen3Config else {}
    make(**sizes, **more, tie_word_embeddings=tied, initializer_range=0.1).save_pretrained(tmp_path)
    shape = read_shape(tmp_path)
    expected = QwenShape(
        family="qwen3" if more else "qwen2",
        num_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        num_query_groups=2,
        head_dim=16 if more else 8,
        ffn_hidden_size=48,
        vocab_size=150,
        tie_word_embeddings=tied,
        rms_norm_eps=1e-6,
        max_position_embeddings=64,
        rope=RopeSettings("default", 1e6),
        initializer_range=0.1,
    )
    assert shape == expected
    assert (shape.qkv_bias, shape.qk_layernorm) == ((False, True) if more else (True, False))


@pytest.mark.parametrize("name", ["Qwen2.5-7B", "Qwen3-4B"])
def test_written_config_reads_back_the_same(tmp_path, name):
    """RC08: rotary settings included, both here and in transformers."""
    for shape in (SIZES[name], override_rope(SIZES[name], rope_type="yarn", factor=4.0, attention_factor=1.5)):
        (tmp_path / "config.json").write_text(json.dumps(hf_config(shape, torch.bfloat16)))
        assert read_shape(tmp_path) == shape
        config = AutoConfig.from_pretrained(tmp_path)
        assert config.rope_parameters["rope_theta"] == 1e6
        assert config.rope_parameters["rope_type"] == shape.rope.rope_type
        assert (config.head_dim, config.vocab_size, config.dtype) == (128, shape.vocab_size, torch.bfloat16)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model_type": "llama"}, "model_type is 'llama'; allowed: qwen2, qwen3"),
        ({"model_type": "qwen3_moe"}, "allowed: qwen2, qwen3"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; allowed: 'silu'"),
        ({"use_sliding_window": True}, "use_sliding_window is True; allowed: False"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
        ({"attention_bias": True}, "attention_bias is true; allowed: false"),
        ({"attention_dropout": 0.1}, "attention_dropout is 0.1; allowed: 0.0"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ({"num_key_value_heads": 3}, "num_key_value_heads is 3; allowed: divisors of num_attention_heads = 4"),
        ({"head_dim": 7}, "head_dim is 7; allowed: even numbers"),
        ({"head_dim": None, "hidden_size": 30}, "hidden_size is 30"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0; allowed: positive int"),
        ({"num_hidden_layers": 2.0}, "num_hidden_layers is 2.0; allowed: positive int"),
        ({"rms_norm_eps": None}, "rms_norm_eps is None; allowed: positive float"),
    ],
)
def test_what_is_not_computed_exactly_is_refused(tmp_path, settings, message):
    with pytest.raises(ValueError, match=message):
        shape_of(tmp_path, **settings)


def test_missing_fields_and_files_are_named(tmp_path):
    with pytest.raises(ValueError, match=r"no config\.json"):
        read_shape(tmp_path)
    incomplete = {name: value for name, value in TINY.items() if name not in ("vocab_size", "num_key_value_heads")}
    (tmp_path / "config.json").write_text(json.dumps(incomplete))
    with pytest.raises(ValueError, match="missing: num_key_value_heads, vocab_size"):
        read_shape(tmp_path)


BILLIONS = {
    "Qwen2.5-0.5B": 0.494,
    "Qwen2.5-1.5B": 1.544,
    "Qwen2.5-3B": 3.086,
    "Qwen2.5-7B": 7.616,
    "Qwen2.5-14B": 14.770,
    "Qwen2.5-32B": 32.764,
    "Qwen3-0.6B": 0.596,
    "Qwen3-1.7B": 1.721,
    "Qwen3-4B": 4.022,
    "Qwen3-8B": 8.191,
    "Qwen3-14B": 14.768,
    "Qwen3-32B": 32.762,
}


@pytest.mark.parametrize(("name", "billions"), BILLIONS.items())
def test_published_sizes_have_the_published_parameter_counts(name, billions):
    assert round(num_parameters(SIZES[name]) / 1e9, 3) == billions
    assert set(SIZES) == set(BILLIONS)


@pytest.mark.parametrize("name", BILLIONS)
def test_parameter_count_equals_that_of_transformers(tmp_path, name):
    """Few layers and a small vocabulary: the count is linear in both."""
    shape = replace(SIZES[name], num_layers=2, vocab_size=10)
    (tmp_path / "config.json").write_text(json.dumps(hf_config(shape, torch.float32)))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path))
    assert model.num_parameters() == num_parameters(shape)


@pytest.mark.parametrize(
    ("vocab_size", "tensor_size", "padded"),
    [(151936, 1, 151936), (151936, 2, 152064), (151936, 4, 152064), (151936, 8, 152576), (150, 1, 256), (150, 2, 256)],
)
def test_vocabulary_is_padded_to_a_multiple_of_128_per_tensor_rank(vocab_size, tensor_size, padded):
    """RC04: vocabulary 150 has 256 rows inside at TP=1 and TP=2."""
    assert padded_vocab_size(vocab_size, tensor_size) == padded


def test_padding_multiple_can_be_chosen():
    """RC04: 150 rows and multiples of 64 give 192."""
    assert padded_vocab_size(150, 1, multiple=64) == 192


def test_transformer_config_states_the_model():
    shape = replace(SIZES["Qwen3-4B"], rms_norm_eps=1e-5, initializer_range=0.03)
    config = transformer_config(shape, Layout(), torch.float32, CPU)
    stated = {
        "num_layers": 36, "hidden_size": 2560, "num_attention_heads": 32, "num_query_groups": 8, "kv_channels": 128,
        "ffn_hidden_size": 9728, "normalization": "RMSNorm", "layernorm_epsilon": 1e-5, "init_method_std": 0.03,
        "gated_linear_unit": True, "add_bias_linear": False, "add_qkv_bias": False, "qk_layernorm": True,
        "hidden_dropout": 0.0, "attention_dropout": 0.0, "calculate_per_token_loss": True, "bf16": False,
    }  # fmt: skip
    assert {name: value for name, value in asdict(config).items() if name in stated} == stated
    assert config.softmax_scale == pytest.approx(1 / math.sqrt(128))
    qwen2 = transformer_config(SIZES["Qwen2.5-7B"], Layout(), torch.bfloat16, CPU)
    assert (qwen2.add_qkv_bias, qwen2.qk_layernorm) == (True, False)
    assert (qwen2.bf16, qwen2.params_dtype, qwen2.pipeline_dtype) == (True, torch.bfloat16, torch.bfloat16)


def test_yarn_scales_scores_by_its_scale_squared():
    """0.1 ln 4 + 1 = 1.138629; head size 128."""
    shape = override_rope(SIZES["Qwen2.5-7B"], rope_type="yarn", factor=4.0)
    config = transformer_config(shape, Layout(), torch.float32, CPU)
    assert config.softmax_scale == pytest.approx(1.138629**2 / math.sqrt(128), rel=1e-6)


def test_interleaved_stages_never_batch_their_messages():
    """megatron-core trains on wrong activations otherwise, without any error."""
    shape = SIZES["Qwen2.5-0.5B"]
    plain = transformer_config(shape, Layout(2, 2, sequence_parallel=True), torch.float32, CPU)
    assert (plain.overlap_p2p_comm, plain.batch_p2p_comm) == (False, True)
    assert (plain.tensor_model_parallel_size, plain.pipeline_model_parallel_size) == (2, 2)
    assert plain.sequence_parallel
    interleaved = transformer_config(shape, Layout(1, 2, 3), torch.float32, CPU)
    assert (interleaved.overlap_p2p_comm, interleaved.batch_p2p_comm) == (True, False)
    assert interleaved.virtual_pipeline_model_parallel_size == 3


def test_cuda_kernels_are_chosen_by_device():
    shape = SIZES["Qwen2.5-0.5B"]
    on_cpu = transformer_config(shape, Layout(), torch.float32, CPU)
    on_cuda = transformer_config(shape, Layout(), torch.float32, torch.device("cuda"))
    assert (on_cpu.use_cpu_initialization, on_cuda.use_cpu_initialization) == (True, False)
    assert (on_cpu.bias_activation_fusion, on_cuda.bias_activation_fusion) == (False, True)


def test_other_parameter_dtypes_are_refused():
    with pytest.raises(ValueError, match=r"params_dtype is torch\.float16; allowed: torch\.float32, torch\.bfloat16"):
        transformer_config(SIZES["Qwen2.5-0.5B"], Layout(), torch.float16, CPU)
