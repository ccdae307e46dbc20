"""Dense Qwen2, Qwen2.5, Qwen3: config.json <-> shape <-> TransformerConfig. Shapes: T tokens, D head size."""

import json
import math
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from parallel.rope import RopeSettings, attention_scale, inverse_frequencies, read_rope, rope_parameters

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig

    from parallel.mesh import Layout

FAMILIES = {"qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
QWEN3_HEAD_DIM = 128  # default of transformers' Qwen3Config when the key is missing
HF_NAMES = {
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "num_attention_heads": "num_attention_heads",
    "num_query_groups": "num_key_value_heads",
    "head_dim": "head_dim",
    "ffn_hidden_size": "intermediate_size",
    "vocab_size": "vocab_size",
    "tie_word_embeddings": "tie_word_embeddings",
    "rms_norm_eps": "rms_norm_eps",
    "max_position_embeddings": "max_position_embeddings",
    "initializer_range": "initializer_range",
}


MOST = {
    "num_layers": 10_000,
    **dict.fromkeys(
        ("hidden_size", "num_attention_heads", "num_query_groups", "head_dim", "ffn_hidden_size", "vocab_size"), 2**24
    ),
}
"""Largest sizes that are believed: a table is made of every layer before any file is read."""


@dataclass(frozen=True)
class QwenShape:
    """Everything that decides the parameters and the arithmetic of a dense Qwen, in megatron-core's names.

    `vocab_size` is the number of embedding rows of the Hugging Face model, without padding.

    Raises:
        ValueError: a size that no such model can have.
    """

    family: str
    num_layers: int
    hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    head_dim: int
    ffn_hidden_size: int
    vocab_size: int
    tie_word_embeddings: bool
    rms_norm_eps: float
    max_position_embeddings: int
    rope: RopeSettings
    initializer_range: float = 0.02

    def __post_init__(self) -> None:
        if self.family not in FAMILIES:
            raise ValueError(f"model_type is {self.family!r}; allowed: {', '.join(FAMILIES)}")
        for field in fields(self):
            kind, value = field.type, getattr(self, field.name)
            if kind in (int, float) and not (type(value) in (int, kind) and value > 0):
                raise ValueError(f"{HF_NAMES[field.name]} is {value!r}; allowed: positive {kind.__name__}")
        if self.num_attention_heads % self.num_query_groups:
            groups = f"num_key_value_heads is {self.num_query_groups}"
            raise ValueError(f"{groups}; allowed: divisors of num_attention_heads = {self.num_attention_heads}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim is {self.head_dim}; allowed: even numbers (rotary embedding turns pairs)")

    @property
    def qkv_bias(self) -> bool:
        """Qwen2 and Qwen2.5 add a bias to query, key and value (to nothing else); Qwen3 has none."""
        return self.family == "qwen2"

    @property
    def qk_layernorm(self) -> bool:
        """Qwen3 normalises each query and key head."""
        return self.family == "qwen3"


def read_shape(folder: str | Path) -> QwenShape:
    """Read the shape stated by `folder/config.json`.

    Raises:
        ValueError: a setting that this package does not compute exactly; names field, value and allowed values.
    """
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise ValueError(f"model folder is {str(folder)!r}: it holds no config.json")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(config, dict):
            raise ValueError(f"it holds {type(config).__name__}; allowed: a JSON object")
        _refuse_unsupported(config)
        return _shape_from(config)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    except (AttributeError, KeyError, RecursionError, TypeError) as error:
        raise ValueError(f"{path}: a setting is of a wrong type ({error})") from error


def hf_config(shape: QwenShape, torch_dtype: torch.dtype) -> dict[str, Any]:
    """Return the contents of a new config.json; readers of transformers 4 and 5 find the rotary settings."""
    rope = rope_parameters(shape.rope)
    scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
    return {
        "architectures": [FAMILIES[shape.family]],
        "model_type": shape.family,
        **{hf_name: getattr(shape, name) for name, hf_name in HF_NAMES.items()},
        "hidden_act": "silu",
        "rope_theta": shape.rope.theta,
        "rope_parameters": rope,
        "rope_scaling": None if shape.rope.rope_type == "default" else scaling,
        "torch_dtype": str(torch_dtype).removeprefix("torch."),
    }


def override_rope(
    shape: QwenShape,
    *,
    rope_type: str,
    factor: float = 1.0,
    original_max_position_embeddings: int | None = None,
    attention_factor: float | None = None,
) -> QwenShape:
    """Return the same model with other rotary scaling; the base stays.

    Yarn's `original_max_position_embeddings` defaults to the model's context length.

    Raises:
        ValueError: see `RopeSettings`.
    """
    original = original_max_position_embeddings
    if rope_type == "yarn":
        original = original or shape.max_position_embeddings
    return replace(shape, rope=RopeSettings(rope_type, shape.rope.theta, factor, original, attention_factor))


def padded_vocab_size(vocab_size: int, tensor_model_parallel_size: int, multiple: int = 128) -> int:
    """Return the vocabulary rows inside the model: the next multiple of `multiple` times the tensor ranks."""
    step = multiple * tensor_model_parallel_size
    return math.ceil(vocab_size / step) * step


def num_parameters(shape: QwenShape) -> int:
    """Count the parameters of the Hugging Face model: without padding, a tied output matrix counted once."""
    query, key = shape.num_attention_heads * shape.head_dim, shape.num_query_groups * shape.head_dim
    attention = shape.hidden_size * (2 * query + 2 * key)
    attention += (query + 2 * key) * shape.qkv_bias + 2 * shape.head_dim * shape.qk_layernorm
    layer = attention + 3 * shape.hidden_size * shape.ffn_hidden_size + 2 * shape.hidden_size
    vocab_matrices = 1 if shape.tie_word_embeddings else 2
    return vocab_matrices * shape.vocab_size * shape.hidden_size + shape.num_layers * layer + shape.hidden_size


def rope_inverse_frequencies(shape: QwenShape) -> torch.Tensor:
    """Return the angle per position of every pair of channels, `[D/2]` fp32."""
    return inverse_frequencies(shape.rope, shape.head_dim)


def rope_attention_scale(shape: QwenShape) -> float:
    """Return the number that multiplies cos and sin; its square is part of `softmax_scale`."""
    return attention_scale(shape.rope)


def rotary_angles(shape: QwenShape, positions: torch.Tensor) -> torch.Tensor:
    """Return the angles at positions `[T]`: `[T, 1, 1, D]` fp32 on the same device, both halves of D alike."""
    angles = positions.float()[:, None] * _frequencies(shape, positions.device)
    return torch.cat((angles, angles), dim=-1)[:, None, None, :]


@lru_cache(maxsize=8)
def _frequencies(shape: QwenShape, device: torch.device) -> torch.Tensor:
    """On a device: a copy from the host waits, and can't be part of a CUDA graph."""
    return rope_inverse_frequencies(shape).to(device)


def transformer_config(
    shape: QwenShape, layout: "Layout", params_dtype: torch.dtype, device: torch.device | None = None
) -> "TransformerConfig":
    """Return megatron-core's configuration of this model on this layout (0.16.1 to 0.19.x).

    `device` is where the model will live; None means CUDA where the machine has it, else the CPU.

    Raises:
        ValueError: `params_dtype` is neither fp32 nor bf16.
    """
    from megatron.core.transformer import TransformerConfig

    if params_dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"params_dtype is {params_dtype}; allowed: torch.float32, torch.bfloat16")
    return TransformerConfig(
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        num_attention_heads=shape.num_attention_heads,
        num_query_groups=shape.num_query_groups,
        kv_channels=shape.head_dim,
        ffn_hidden_size=shape.ffn_hidden_size,
        normalization="RMSNorm",
        layernorm_epsilon=shape.rms_norm_eps,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        add_qkv_bias=shape.qkv_bias,
        qk_layernorm=shape.qk_layernorm,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        # Scaling cos and sin of both query and key by a scales every score by a squared.
        softmax_scale=rope_attention_scale(shape) ** 2 / math.sqrt(shape.head_dim),
        init_method_std=shape.initializer_range,
        params_dtype=params_dtype,
        pipeline_dtype=params_dtype,
        bf16=params_dtype == torch.bfloat16,
        # Loss weights are per token and fixed before the forward pass: nothing else may divide.
        calculate_per_token_loss=True,
        **_layout_settings(layout),
        **_kernel_settings(torch.cuda.is_available() if device is None else device.type == "cuda"),
    )


def _layout_settings(layout: "Layout") -> dict[str, Any]:
    interleaved = layout.virtual_pipeline_model_parallel_size is not None
    first, last = layout.num_layers_in_first_pipeline_stage, layout.num_layers_in_last_pipeline_stage
    if layout.pipeline_model_parallel_size == 2 and last is not None:
        first = None  # it follows from the other; given both, megatron-core divides by zero when stages are interleaved
    return {
        "tensor_model_parallel_size": layout.tensor_model_parallel_size,
        "pipeline_model_parallel_size": layout.pipeline_model_parallel_size,
        "virtual_pipeline_model_parallel_size": layout.virtual_pipeline_model_parallel_size,
        "num_layers_in_first_pipeline_stage": first,
        "num_layers_in_last_pipeline_stage": last,
        "context_parallel_size": layout.context_parallel_size,
        "sequence_parallel": layout.sequence_parallel,
        # An interleaved schedule with batched messages trains on wrong activations without any error.
        "overlap_p2p_comm": interleaved,
        "batch_p2p_comm": not interleaved,
        # Packs differ in length; megatron-core allows that only with this dispatcher, even in a dense model.
        "variable_seq_lengths": True,
        "moe_token_dispatcher_type": "alltoall",
    }


def _kernel_settings(on_cuda: bool) -> dict[str, Any]:
    return {
        # Initialisation also marks parameters as tensor-parallel; without the marks the gradient norm is wrong.
        "perform_initialization": True,
        "use_cpu_initialization": not on_cuda,
        "deallocate_pipeline_outputs": on_cuda,
        "bias_activation_fusion": on_cuda,
        "use_te_activation_func": not on_cuda,  # the spec's own activation, which is ours on the CPU
        "bias_dropout_fusion": on_cuda,
        "apply_rope_fusion": False,  # the fused kernels count positions themselves; ours are given per token
    }


def _refuse_unsupported(config: dict[str, Any]) -> None:
    if config.get("model_type") not in FAMILIES:
        raise ValueError(f"model_type is {config.get('model_type')!r}; allowed: {', '.join(FAMILIES)}")
    for name, allowed in (("hidden_act", "silu"), ("use_sliding_window", False), ("attention_dropout", 0.0)):
        if config.get(name, allowed) != allowed:
            raise ValueError(f"{name} is {config[name]!r}; allowed: {allowed!r}")
    if "sliding_attention" in (config.get("layer_types") or ()):
        raise ValueError("layer_types contains 'sliding_attention'; allowed: 'full_attention' in every layer")
    if config["model_type"] == "qwen3" and config.get("attention_bias"):
        raise ValueError("attention_bias is true; allowed: false for qwen3")
    if config.get("quantization_config"):
        raise ValueError("quantization_config is set; allowed: float32, bfloat16 or float16 weights without it")


def _shape_from(config: dict[str, Any]) -> QwenShape:
    optional = ("head_dim", "tie_word_embeddings", "initializer_range")
    missing = [name for name in HF_NAMES.values() if name not in config and name not in optional]
    if missing:
        raise ValueError(f"required and missing: {', '.join(missing)}")
    values = {name: config[hf_name] for name, hf_name in HF_NAMES.items() if hf_name in config}
    values |= {"head_dim": _head_dim(config), "tie_word_embeddings": config.get("tie_word_embeddings") is True}
    if values["num_query_groups"] is None:
        values["num_query_groups"] = config["num_attention_heads"]
    for name, hf_name in HF_NAMES.items():
        number = values.get(name)
        if name in MOST and isinstance(number, int) and number > MOST[name]:
            raise ValueError(f"{hf_name} is {number!r}; allowed: whole numbers up to {MOST[name]}")
    return QwenShape(family=config["model_type"], rope=read_rope(config), **values)


def _head_dim(config: dict[str, Any]) -> int:
    if config.get("head_dim") is not None:
        return config["head_dim"]
    if config["model_type"] == "qwen3" and "head_dim" not in config:  # a null means hidden / heads
        return QWEN3_HEAD_DIM
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    if hidden % heads:
        raise ValueError(f"hidden_size is {hidden}; allowed without head_dim: multiples of the {heads} heads")
    return hidden // heads


def _published(name: str, row: tuple[int, ...]) -> QwenShape:
    """Return a published shape (of Qwen2.5: Instruct). A model's own config.json always has the last word."""
    family, context = ("qwen3", 40960) if name.startswith("Qwen3") else ("qwen2", 32768)
    sizes: dict[str, Any] = dict(zip(HF_NAMES, row, strict=False))  # rows hold the leading columns of HF_NAMES
    return QwenShape(family, **sizes, **_PUBLISHED, max_position_embeddings=context)


_PUBLISHED: dict[str, Any] = {"rms_norm_eps": 1e-6, "rope": RopeSettings("default", theta=1e6)}
_ROWS = {
    "Qwen2.5-0.5B": (24, 896, 14, 2, 64, 4864, 151936, True),
    "Qwen2.5-1.5B": (28, 1536, 12, 2, 128, 8960, 151936, True),
    "Qwen2.5-3B": (36, 2048, 16, 2, 128, 11008, 151936, True),
    "Qwen2.5-7B": (28, 3584, 28, 4, 128, 18944, 152064, False),
    "Qwen2.5-14B": (48, 5120, 40, 8, 128, 13824, 152064, False),
    "Qwen2.5-32B": (64, 5120, 40, 8, 128, 27648, 152064, False),
    "Qwen3-0.6B": (28, 1024, 16, 8, 128, 3072, 151936, True),
    "Qwen3-1.7B": (28, 2048, 16, 8, 128, 6144, 151936, True),
    "Qwen3-4B": (36, 2560, 32, 8, 128, 9728, 151936, True),
    "Qwen3-8B": (36, 4096, 32, 8, 128, 12288, 151936, False),
    "Qwen3-14B": (40, 5120, 40, 8, 128, 17408, 151936, False),
    "Qwen3-32B": (64, 5120, 64, 8, 128, 25600, 151936, False),
}
SIZES = {name: _published(name, row) for name, row in _ROWS.items()}
