"""RMS norm and SwiGLU of the CPU's layer spec against torch."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parallel.functions import RMSNorm, rms_norm, swiglu


def make_norm(dtype: torch.dtype, sequence_parallel: bool = False) -> RMSNorm:
    norm = RMSNorm(SimpleNamespace(params_dtype=dtype, sequence_parallel=sequence_parallel), 16, eps=1e-3)
    norm.weight.data = torch.linspace(0.5, 2.0, 16, dtype=dtype)
    return norm


def test_norm_by_hand():
    """[3, 4] has mean square 12.5: without epsilon the result is [3, 4] / sqrt(12.5), times the weight."""
    norm = RMSNorm(SimpleNamespace(params_dtype=torch.float32, sequence_parallel=False), 2, eps=0.0)
    norm.weight.data = torch.tensor([1.0, 2.0])
    expected = torch.tensor([[3 / 12.5**0.5, 8 / 12.5**0.5]])
    torch.testing.assert_close(norm(torch.tensor([[3.0, 4.0]])), expected)


def test_norm_and_its_gradients_equal_torch():
    norm, reference = make_norm(torch.float32), nn.RMSNorm(16, eps=1e-3)
    reference.weight.data = norm.weight.data.clone()
    results = []
    for module in (norm, reference):
        hidden = torch.linspace(-3, 3, 5 * 16).reshape(5, 1, 16).requires_grad_()
        output = module(hidden)
        output.square().sum().backward()
        results.append((output, hidden.grad, module.weight.grad))
    torch.testing.assert_close(results[0], results[1])


def test_norm_in_bf16_rounds_the_normalised_value_then_the_product():
    """As Qwen does in transformers: statistics in fp32, whatever the weights' dtype."""
    norm = make_norm(torch.bfloat16)
    hidden = torch.linspace(-300, 300, 5 * 16).reshape(5, 16).to(torch.bfloat16)
    wide = hidden.float()
    normed = (wide * (wide.square().mean(-1, keepdim=True) + 1e-3).rsqrt()).to(torch.bfloat16)
    assert torch.equal(norm(hidden), norm.weight * normed)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_norm_marks_its_weight_for_sequence_parallelism(sequence_parallel):
    assert make_norm(torch.float32, sequence_parallel).weight.sequence_parallel is sequence_parallel


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_of_the_norm_are_those_of_its_own_formula(dtype):
    """Of heads `[T, 1, H, D]`; in bf16 up to one rounding of the larger terms."""
    generator = torch.Generator().manual_seed(0)
    hidden, grad = (torch.randn(7, 1, 3, 16, generator=generator).mul(3).to(dtype) for _ in range(2))
    norm = make_norm(dtype)
    gradients = []
    for function in (norm, lambda x: rms_norm(x, norm.weight, norm.eps)):
        x = hidden.clone().requires_grad_()
        gradients.append(torch.autograd.grad(function(x), (x, norm.weight), grad))
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
    for ours, theirs in zip(*gradients, strict=True):
        assert ours.dtype == dtype
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance * float(theirs.abs().max()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_swiglu_and_its_gradient_equal_torch(dtype):
    generator = torch.Generator().manual_seed(0)
    gate_up, grad = torch.randn(5, 1, 12, generator=generator), torch.randn(5, 1, 6, generator=generator)
    results = []
    for function in (swiglu, composed_swiglu):
        x = gate_up.to(dtype).requires_grad_()
        output = function(x)
        results.append((output, *torch.autograd.grad(output, x, grad.to(dtype))))
    torch.testing.assert_close(results[0], results[1])


def composed_swiglu(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate) * up


def test_only_inputs_are_kept_for_the_backward_pass():
    kept = []
    x = torch.randn(4, 1, 16, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor.shape) or tensor, lambda t: t):
        make_norm(torch.float32)(x)
        swiglu(x)
    assert kept == [x.shape, (16,), x.shape]
