"""RMS norm and SwiGLU of the CPU's layer spec, with backward passes that keep no more than their inputs.

Composed of torch's own operations they would keep three to five tensors of the size of their input, half of a layer's
activations.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """Root-mean-square norm (arXiv 1910.07467) that marks its weight for sequence parallelism.

    megatron-core's torch norm refuses sequence parallelism; a weight marked `sequence_parallel` has its gradient
    summed over the tensor group when gradients are finalised.
    """

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-6):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden: Tensor) -> Tensor:
        """Normalise the last dimension."""
        return _RMSNorm.apply(hidden, self.weight, self.eps)


def rms_norm(hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm of the last dimension, computed in fp32."""
    if hidden.dtype == torch.float32:
        return F.rms_norm(hidden, weight.shape, weight, eps)
    return weight * F.rms_norm(hidden.float(), weight.shape, None, eps).to(hidden.dtype)


class _RMSNorm(torch.autograd.Function):
    """`rms_norm`; with n = x / rms(x), dx = (w g - n mean(w g n)) / rms(x) and dw = sum of g n."""

    @staticmethod
    def forward(ctx, hidden, weight, eps):
        ctx.save_for_backward(hidden, weight)
        ctx.eps = eps
        return rms_norm(hidden, weight, eps)

    @staticmethod
    def backward(ctx, grad):
        hidden, weight = ctx.saved_tensors
        wide = hidden.float()
        inverse = wide.square().mean(-1, keepdim=True).add_(ctx.eps).rsqrt_()
        normal = wide * inverse
        grad_weight = torch.mul(grad, normal).flatten(0, -2).sum(0).to(weight.dtype)
        grad_normal = (grad * weight).float()
        along = torch.mul(grad_normal, normal).mean(-1, keepdim=True)
        grad_hidden = grad_normal.sub_(normal.mul_(along)).mul_(inverse)
        return grad_hidden.to(hidden.dtype), grad_weight, None


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up of the two halves of the last dimension (arXiv 2002.05202): `[..., 2 F]` -> `[..., F]`."""
    return _SwiGLU.apply(gate_up)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate_up):
        ctx.save_for_backward(gate_up)
        gate, up = gate_up.chunk(2, -1)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx, grad):
        (gate_up,) = ctx.saved_tensors
        gate, up = gate_up.chunk(2, -1)
        grad_gate_up = torch.empty_like(gate_up)
        grad_gate, grad_up = grad_gate_up.chunk(2, -1)
        torch.mul(grad, F.silu(gate), out=grad_up)
        grad_gate.copy_(torch.ops.aten.silu_backward(grad * up, gate))
        return grad_gate_up
