"""Rotary position embedding: its settings as Hugging Face writes them, and its numbers.

The formulas are those of transformers' `modeling_rope_utils` (default, linear, and yarn: arXiv 2309.00071), in the same
order of operations, so that angles are equal to the last bit. Shapes: T tokens, D head size.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch

YARN_KEYS = (
    "original_max_position_embeddings",
    "attention_factor",
    "beta_fast",
    "beta_slow",
    "truncate",
    "mscale",
    "mscale_all_dim",
)
ALLOWED_KEYS = {"default": (), "linear": ("factor",), "yarn": ("factor", *YARN_KEYS)}


@dataclass(frozen=True)
class RopeSettings:
    """One rotary setting; the fields carry the names and meanings of Hugging Face's `rope_parameters`.

    `factor` stretches the context (linear, yarn); all later fields belong to yarn. `attention_factor` None means that
    the scale of cos and sin follows from `factor` (and from `mscale` and `mscale_all_dim` where both are given).

    Raises:
        ValueError: unknown type, number out of range, or yarn without its original context length.
    """

    rope_type: str
    theta: float
    factor: float = 1.0
    original_max_position_embeddings: int | None = None
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    mscale: float | None = None
    mscale_all_dim: float | None = None

    def __post_init__(self) -> None:
        if self.rope_type not in ALLOWED_KEYS:
            raise ValueError(f"rope_type is {self.rope_type!r}; allowed: {', '.join(ALLOWED_KEYS)}")
        if self.theta <= 1:
            raise ValueError(f"rope_theta is {self.theta}; allowed: numbers above 1")
        if self.factor < 1 or (self.rope_type == "default" and self.factor != 1):
            raise ValueError(
                f"rope factor is {self.factor} with rope_type {self.rope_type!r}; allowed: 1 or more, 1 for default"
            )
        if self.rope_type == "yarn" and not self.original_max_position_embeddings:
            raise ValueError(
                "rope_type 'yarn' needs original_max_position_embeddings, the context length before stretching"
            )
        if self.attention_factor is not None and self.attention_factor <= 0:
            raise ValueError(f"rope attention_factor is {self.attention_factor}; allowed: positive numbers or null")
        if not self.beta_fast >= self.beta_slow > 0:
            raise ValueError(
                f"rope beta_fast, beta_slow are {self.beta_fast}, {self.beta_slow}; allowed: fast >= slow > 0"
            )


def read_rope(config: dict[str, Any]) -> RopeSettings:
    """Return the settings of a config.json: `rope_theta`, `rope_scaling` (transformers 4), `rope_parameters` (5).

    Raises:
        ValueError: the base is stated nowhere, a value is stated twice differently, or a type or key is unknown
            (a guess would give a model that is silently wrong).
    """
    stated = [(name, config[name]) for name in ("rope_scaling", "rope_parameters") if config.get(name)]
    top_level = {name: config.get(name) for name in ("rope_theta", "partial_rotary_factor")}
    merged = _without_conflicts([("config.json", top_level), *stated])
    rope_type = merged.pop("rope_type", "default")
    if "rope_theta" not in merged:
        raise ValueError("rope_theta is missing; state it in config.json at top level or inside rope_parameters")
    theta = float(merged.pop("rope_theta"))
    if merged.pop("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError("partial_rotary_factor is not 1; Qwen2 and Qwen3 rotate the whole head")
    if rope_type == "yarn":
        merged = _with_yarn_defaults(merged, config)
    unknown = sorted(set(merged) - set(ALLOWED_KEYS.get(rope_type, merged)))
    if unknown:
        allowed = ", ".join(ALLOWED_KEYS[rope_type]) or "none besides rope_theta"
        raise ValueError(f"rope_parameters has {', '.join(unknown)} with rope_type {rope_type!r}; allowed: {allowed}")
    if rope_type == "linear" and "factor" not in merged:
        raise ValueError("rope_parameters with rope_type 'linear' needs factor, a number of 1 or more")
    return RopeSettings(rope_type, theta, **merged)


def rope_parameters(settings: RopeSettings) -> dict[str, Any]:
    """Return the `rope_parameters` that state these settings, without null values (inverse of `read_rope`)."""
    values = {key: getattr(settings, key) for key in ALLOWED_KEYS[settings.rope_type]}
    stated = {key: value for key, value in values.items() if value is not None}
    return {"rope_type": settings.rope_type, "rope_theta": settings.theta, **stated}


def inverse_frequencies(settings: RopeSettings, head_dim: int) -> torch.Tensor:
    """Return the angle per position of every pair of channels, `[D/2]` fp32 on the CPU."""
    wavelengths = settings.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float) / head_dim)
    if settings.rope_type == "yarn":
        return _yarn_frequencies(settings, wavelengths, head_dim)
    return 1.0 / wavelengths / settings.factor


def attention_scale(settings: RopeSettings) -> float:
    """Return the number that multiplies cos and sin: 1, or in yarn 0.1 ln(factor) + 1 unless stated (section 3.4)."""
    if settings.rope_type != "yarn":
        return 1.0
    if settings.attention_factor is not None:
        return settings.attention_factor
    if settings.mscale and settings.mscale_all_dim:
        return _mscale(settings.factor, settings.mscale) / _mscale(settings.factor, settings.mscale_all_dim)
    return _mscale(settings.factor, 1.0)


def _mscale(factor: float, weight: float) -> float:
    return 0.1 * weight * math.log(factor) + 1.0


def _yarn_frequencies(settings: RopeSettings, wavelengths: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Fast channels keep their frequency, slow ones are divided by the factor, with a linear ramp between."""
    low = _yarn_channel(settings, settings.beta_fast, head_dim)
    high = _yarn_channel(settings, settings.beta_slow, head_dim)
    if settings.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = high - low if high != low else 0.001  # an empty ramp would divide by zero
    slow = torch.clamp((torch.arange(head_dim // 2, dtype=torch.float32) - low) / width, 0, 1)
    fast = 1 - slow
    return 1.0 / (settings.factor * wavelengths) * (1 - fast) + 1.0 / wavelengths * fast


def _yarn_channel(settings: RopeSettings, rotations: float, head_dim: int) -> float:
    """The (fractional) channel pair that turns this number of times within the original context."""
    original = settings.original_max_position_embeddings
    assert original is not None  # checked by RopeSettings
    return head_dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(settings.theta))


def _without_conflicts(sources: list[tuple[str, dict[str, Any]]]) -> dict[str, Any]:
    """Return the union of the non-null values; the old key `type` counts as `rope_type`.

    Raises:
        ValueError: two sources differ.
    """
    merged: dict[str, Any] = {}
    for source, values in sources:
        for name, value in values.items():
            key = "rope_type" if name == "type" else name
            if value is not None and merged.setdefault(key, value) != value:
                raise ValueError(
                    f"{source} states {key} = {value!r} but {merged[key]!r} is stated elsewhere in config.json"
                )
    return merged


def _with_yarn_defaults(values: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    """Add what transformers fills in: the original length, else the context length; the factor, else their ratio."""
    length = config["max_position_embeddings"]
    original = (
        config.get("original_max_position_embeddings") or values.get("original_max_position_embeddings") or length
    )
    return {"factor": length / original, **values, "original_max_position_embeddings": original}
