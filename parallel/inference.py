"""One model chunk without gradients, for rollout: on the parameters that are trained.

On a CPU the layers are restated as plain functions of those parameters: no autograd, no gathering and scattering of
sequence parallelism, and matrices laid out once per rollout as the CPU's kernels like them. Elsewhere, and where the
restatement doesn't apply, the trained modules themselves run.

Shapes: T tokens, H hidden size, Hq and Hkv heads of this tensor rank, r = Hq / Hkv, D head size.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from parallel.functions import rms_norm
from parallel.layers import Cache, bind_cache
from parallel.log_probs import VocabShard
from parallel.model import QwenModel
from parallel.qwen import QwenShape, rotary_angles

Linear = Callable[[Tensor], Tensor]
MIN_PACKED = 2**19
"""Elements from which a matrix gains by oneDNN's layout; below, its call costs more."""


class Stage(Protocol):
    """One model chunk: the next hidden states `[T, H]` from tokens and positions `[T]`, or from hidden states."""

    def __call__(self, tokens: Tensor, positions: Tensor, hidden: Tensor | None, cache: Cache) -> Tensor: ...

    def logits(self, rows: Tensor) -> Tensor:
        """Return logits `[C, real ids of this tensor rank]` of hidden states `[C, H]` (last chunk only), in fp32 or in
        the parameters' dtype, if the product rounds to it anyway."""


def build_stage(model: QwenModel) -> Stage:
    """Return the fastest exact stage for this chunk. It holds copies of matrices: build it anew when weights change."""
    mesh = model.mesh
    kv_heads_whole = model.config.num_query_groups % mesh.tensor_size == 0
    if mesh.device.type == "cpu" and kv_heads_whole:
        return FunctionalStage(model)
    return ModuleStage(model)


class ModuleStage:
    """The trained modules, in evaluation mode."""

    def __init__(self, model: QwenModel):
        self.model = model

    @torch.no_grad()
    def __call__(self, tokens: Tensor, positions: Tensor, hidden: Tensor | None, cache: Cache) -> Tensor:
        model, num = self.model, len(tokens)
        split = model.mesh.tensor_size if model.config.sequence_parallel else 1
        padding = -num % split
        tokens, positions = F.pad(tokens, (0, padding)), F.pad(positions, (0, padding))
        if hidden is not None:
            hidden = F.pad(hidden, (0, 0, 0, padding))[:, None]
            model.set_input_tensor(hidden.chunk(split)[model.mesh.tensor_rank] if split > 1 else hidden)
        model.eval()  # recomputation, which training may use, breaks on a cache
        bind_cache(model.decoder, cache)
        try:
            states = model.hidden_states(tokens, positions, None)
        finally:
            bind_cache(model.decoder, None)
        return model.gather_sequence(states)[:num, 0]

    def logits(self, rows: Tensor) -> Tensor:
        return VocabShard.of(self.model).logits(rows, self.model.output_weight())


class FunctionalStage:
    """Plain functions of the parameters of the torch layer spec."""

    def __init__(self, model: QwenModel):
        self.model = model
        self.eps = model.config.layernorm_epsilon
        self.eps_length = torch.tensor((self.eps * model.config.hidden_size) ** 0.5)
        self.kv_heads = model.config.num_query_groups // model.mesh.tensor_size
        self.layers = [_Layer(layer, model.shape.qk_layernorm) for layer in model.decoder.layers]
        norm = model.decoder.final_layernorm
        self.final_norm = None if norm is None else norm.weight.detach()
        if model.post_process and model.head == "lm":
            shard = VocabShard.of(model)
            self.output = linear(model.output_weight().detach()[: shard.num_real])

    @torch.no_grad()
    def __call__(self, tokens: Tensor, positions: Tensor, hidden: Tensor | None, cache: Cache) -> Tensor:
        states = self._embed(tokens) if hidden is None else hidden
        table = _rotations(self.model.shape, 1 << int(positions.max()).bit_length(), states.dtype)
        cosine, sine = table.index_select(1, positions)
        half = cosine.shape[-1] // 2
        for index, layer in enumerate(self.layers):
            heads = layer.qkv(self._norm(states, layer.input_norm)).view(
                len(states), self.kv_heads, -1, cosine.shape[-1]
            )
            turned = layer.norm_heads(heads[:, :, :-1], self.eps)  # queries and key of each group
            turned = torch.addcmul(turned * cosine, turned.roll(half, -1), sine)
            query, key, value = turned[:, :, :-1].flatten(1, 2), turned[:, :, -1], heads[:, :, -1]
            attended = cache.attend(index, query[:, None], key[:, None], value[:, None])[:, 0]
            states = states + self._sum(layer.proj(attended))
            gate, up = layer.fc1(self._norm(states, layer.mlp_norm)).chunk(2, -1)
            states = states + self._sum(layer.fc2(F.silu(gate).mul_(up)))
        return states if self.final_norm is None else self._norm(states, self.final_norm)

    def logits(self, rows: Tensor) -> Tensor:
        return self.output(rows)

    def _embed(self, tokens: Tensor) -> Tensor:
        embedding = self.model.embedding.word_embeddings
        if self.model.mesh.tensor_size == 1:
            return F.embedding(tokens, embedding.weight)
        local = tokens - embedding.vocab_start_index
        here = (local >= 0) & (local < len(embedding.weight))
        return self._sum(F.embedding(local * here, embedding.weight) * here[:, None])

    def _norm(self, states: Tensor, weight: Tensor) -> Tensor:
        """RMS norm; in fp32 by few operations, as x sqrt(H) / sqrt(|x|^2 + H eps)."""
        if states.dtype != torch.float32:
            return rms_norm(states, weight, self.eps)
        length = torch.linalg.vector_norm(states, dim=-1, keepdim=True).hypot_(self.eps_length)
        return torch.div(states, length.mul_(states.shape[-1] ** -0.5)).mul_(weight)

    def _sum(self, states: Tensor) -> Tensor:
        """Sum over the tensor group, in place."""
        if self.model.mesh.tensor_size > 1:
            dist.all_reduce(states, group=self.model.mesh.tensor_group)
        return states


@lru_cache(maxsize=2)
def _rotations(shape: QwenShape, num_positions: int, dtype: torch.dtype) -> Tensor:
    """Return cosine and signed sine of the rotary angles, `[2, positions, 1, 1, D]`: (left, right) halves of a head
    become (left cos - right sin, right cos + left sin)."""
    angles = rotary_angles(shape, torch.arange(num_positions))  # [positions, 1, 1, D]
    sine = angles.sin()
    sine[..., : sine.shape[-1] // 2].neg_()
    return torch.stack((angles.cos(), sine)).to(dtype)


class _Layer:
    """Parameters of one transformer layer."""

    def __init__(self, layer: Any, qk_layernorm: bool):
        attention, mlp = layer.self_attention, layer.mlp
        self.input_norm = layer.input_layernorm.weight.detach()
        self.mlp_norm = layer.pre_mlp_layernorm.weight.detach()
        self.qkv = linear(attention.linear_qkv.weight, attention.linear_qkv.bias)
        self.proj = linear(attention.linear_proj.weight)
        self.fc1 = linear(mlp.linear_fc1.weight)
        self.fc2 = linear(mlp.linear_fc2.weight)
        self.head_norms: tuple[Tensor, Tensor] | None = None
        if qk_layernorm:
            self.head_norms = attention.q_layernorm.weight.detach(), attention.k_layernorm.weight.detach()

    def norm_heads(self, heads: Tensor, eps: float) -> Tensor:
        """Normalise `[T, Hkv, r + 1, D]`, queries and key of each group, where the model does (Qwen3)."""
        if self.head_norms is None:
            return heads
        parts = heads.split([heads.shape[2] - 1, 1], 2)
        return torch.cat([rms_norm(part, norm, eps) for part, norm in zip(parts, self.head_norms, strict=True)], 2)


def linear(weight: Tensor, bias: Tensor | None = None) -> Linear:
    """Return x -> x weight^T + bias in the layout that is fastest on this CPU.

    A CPU without bf16 products multiplies bf16 matrices several times slower than fp32 ones; there the product is
    computed in fp32, exactly as bf16 hardware accumulates it, and rounded once.
    """
    weight, bias = weight.detach(), None if bias is None else bias.detach()
    dtype = weight.dtype
    if weight.numel() < MIN_PACKED or not torch.backends.mkldnn.is_available():
        transposed = weight.T.contiguous()
        return lambda x: x @ transposed if bias is None else torch.addmm(bias, x, transposed)
    if dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        weight, bias = weight.float(), None if bias is None else bias.float()
    packed, inner = torch.ops.mkldnn._reorder_linear_weight(weight, 64), weight.dtype
    return lambda x: torch.ops.mkldnn._linear_pointwise(x.to(inner), packed, bias, "none", [], "").to(dtype)
