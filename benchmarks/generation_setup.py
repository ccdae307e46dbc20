"""What is generated in `benchmarks/rollout.py`: model shapes, random weights, prompts, lengths; and by whom.

A side is one way to generate: our engine or `transformers.generate`, on the weights of the same Hugging Face folder.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor
from transformers import Qwen2Config, Qwen2ForCausalLM

from megarl.config import DTYPES
from megarl.data.tokenizer import build_tiny_tokenizer
from parallel.mesh import Mesh
from parallel.model import QwenModel, build_model
from parallel.qwen import read_shape
from parallel.weights import import_hf
from rollout.engine import Engine
from rollout.requests import Request
from rollout.sampling import SamplingParams

SHAPES = {
    "tiny": {
        "hidden_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "intermediate_size": 1024,
        "vocab_size": 1024,
    },
    "Qwen2.5-0.5B": {
        "hidden_size": 896,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "intermediate_size": 4864,
        "vocab_size": 151936,
    },
}
"""Sizes of two Qwen2 models, in the words of their config.json; both with a tied output matrix."""


@dataclass(frozen=True)
class Case:
    """What is generated: `num_samples` responses to each prompt, each of its own length.

    Attributes:
        prompt_length, new_tokens: of every prompt and (at most) of every response.
        bar: how many times faster than transformers, in CPU time, we must be.
        ragged: lengths of responses differ; transformers then runs batches of 8 prompts, each to its longest.
        gemm_bar: least share of the bare matrix products' time in ours; None: not measured.
    """

    shape: str
    prompt_length: int
    new_tokens: int
    bar: float
    num_prompts: int = 8
    num_samples: int = 8
    ragged: bool = False
    gemm_bar: float | None = None
    show_memory: bool = False

    @property
    def num_rows(self) -> int:
        """Responses that are decoded at a time, on both sides."""
        return BATCH_PROMPTS * self.num_samples

    def prompts(self) -> list[tuple[int, ...]]:
        """Random token ids, the same for all sides."""
        generator = torch.Generator().manual_seed(1)
        size = (self.num_prompts, self.prompt_length)
        drawn = torch.randint(1, SHAPES[self.shape]["vocab_size"], size, generator=generator)
        return [tuple(prompt) for prompt in drawn.tolist()]

    def lengths(self) -> list[list[int]]:
        """Tokens of each response, one list per prompt; ragged ones are log-normal (median 36, sigma 0.7), clipped."""
        size = (self.num_prompts, self.num_samples)
        if not self.ragged:
            return torch.full(size, self.new_tokens).tolist()
        drawn = torch.randn(size, generator=torch.Generator().manual_seed(2))
        return (math.log(36) + 0.7 * drawn).exp().round().clamp(8, self.new_tokens).long().tolist()


BATCH_PROMPTS = 8
CASES = {
    "tiny": Case("tiny", 64, 128, bar=1.5),
    "long": Case("tiny", 512, 64, bar=5.0, show_memory=True),
    "ragged": Case("tiny", 64, 128, bar=3.0, num_prompts=32, ragged=True),
    "large": Case("Qwen2.5-0.5B", 64, 128, bar=2.3, gemm_bar=0.85, show_memory=True),
}


@torch.no_grad()
def write_model(folder: Path, shape: str, dtype: str) -> None:
    """Write a random Qwen2 and a tokenizer: logits of order one, no zero bias, no norm of ones."""
    config = Qwen2Config(**SHAPES[shape], tie_word_embeddings=True, max_position_embeddings=4096)
    config.eos_token_id = config.bos_token_id = None
    with torch.device("meta"):
        model = Qwen2ForCausalLM(config)
    model = model.to_empty(device="cpu").to(DTYPES[dtype])
    model.tie_weights()
    generator = torch.Generator().manual_seed(0)
    for name, parameter in sorted(model.named_parameters()):
        around = 1.0 if "norm" in name else 0.0
        scale = 0.2 if parameter.dim() == 1 else 1.0 / math.sqrt(config.hidden_size)
        parameter.normal_(around, scale, generator=generator)
    build_tiny_tokenizer(folder)
    model.save_pretrained(folder)


@dataclass
class Megarl:
    """Our engine; `seed` makes every run another one."""

    folder: Path
    case: Case
    dtype: str
    mesh: Mesh
    seed: int = 0
    models: list[QwenModel] = field(init=False)
    engine: Engine = field(init=False)

    def __post_init__(self) -> None:
        self.models = build_model(read_shape(self.folder), self.mesh, DTYPES[self.dtype])
        import_hf(self.folder, self.models, self.mesh)
        context_length = self.case.prompt_length + self.case.new_tokens
        self.engine = Engine(self.models, self.mesh, context_length, max_sequences=self.case.num_rows)

    def generate(self, temperature: float = 1.0) -> list[list[int]]:
        """Return the tokens of all responses, in the order of prompts and samples."""
        self.seed += 1
        params = SamplingParams(temperature=temperature, max_new_tokens=self.case.new_tokens, seed=self.seed)
        return [completion.tokens for completion in self.engine.generate(self._requests(), params)]

    def _requests(self) -> list[Request]:
        prompts, lengths = self.case.prompts(), self.case.lengths()
        if not self.case.ragged:
            return [Request(number, prompt, self.case.num_samples) for number, prompt in enumerate(prompts)]
        return [
            Request(number, prompt, first_sample=sample, max_new_tokens=length)
            for number, prompt in enumerate(prompts)
            for sample, length in enumerate(lengths[number])
        ]

    def bare_products(self, hidden: Tensor) -> None:
        """Run the matrix products of one decoding step alone, over the weights of all layers.

        Args:
            hidden: `[rows, H]`, in the dtype of the weights.
        """
        linear = torch.nn.functional.linear
        for layer in self.models[0].decoder.layers:
            attention, mlp = layer.self_attention, layer.mlp
            linear(hidden, attention.linear_qkv.weight)
            linear(hidden, attention.linear_proj.weight)  # attention is as wide as the model in both shapes
            gated = linear(hidden, mlp.linear_fc1.weight)
            linear(gated[:, : mlp.linear_fc2.weight.shape[1]].contiguous(), mlp.linear_fc2.weight)
        linear(hidden, self.models[0].output_weight())


@dataclass
class Transformers:
    """`transformers.generate` with a dynamic cache and SDPA attention: its defaults."""

    folder: Path
    case: Case
    dtype: str
    seed: int = 0

    def __post_init__(self) -> None:
        kind = DTYPES[self.dtype]
        self.model = Qwen2ForCausalLM.from_pretrained(self.folder, dtype=kind, attn_implementation="sdpa").eval()

    def generate(self, temperature: float = 1.0) -> list[list[int]]:
        """As `Megarl.generate`; a batch runs to its longest response, of which the others are given the start."""
        self.seed += 1
        torch.manual_seed(self.seed)
        prompts, lengths = self.case.prompts(), self.case.lengths()
        tokens: list[list[int]] = []
        for start in range(0, len(prompts), BATCH_PROMPTS):
            wanted = [length for row in lengths[start : start + BATCH_PROMPTS] for length in row]
            new = self._generate(prompts[start : start + BATCH_PROMPTS], max(wanted), temperature)
            tokens += [row[:length] for row, length in zip(new.tolist(), wanted, strict=True)]
        return tokens

    def _generate(self, prompts: Sequence[Sequence[int]], num_tokens: int, temperature: float) -> Tensor:
        tokens = torch.tensor(prompts).repeat_interleave(self.case.num_samples, 0)
        sampled = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
        sequences = self.model.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            min_new_tokens=num_tokens,
            max_new_tokens=num_tokens,
            eos_token_id=None,
            pad_token_id=0,
            **(sampled if temperature else {"do_sample": False}),
        )
        return sequences[:, tokens.shape[1] :]
