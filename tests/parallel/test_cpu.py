"""megatron-core on the CPU: what is adapted, what is left alone, and that training gives the numbers of one process."""

import importlib.metadata
import sys
import zlib

import pytest
import torch
import torch.distributed as dist
from megatron.core import jit, parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, clip_grads, get_megatron_optimizer
from megatron.core.optimizer.grad_scaler import DynamicGradScaler
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module

from parallel.cpu import SUPPORTED_VERSIONS, _TritonLoader, adapt_megatron, prepare_import

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="megatron-core is adapted on machines without CUDA")

VOCABULARY, SEQUENCE, MICRO_BATCHES, STEPS = 64, 16, 4, 3


@pytest.mark.parametrize("version", ["0.15.3", "0.16.0", "0.20.0", "1.0"])
def test_an_unknown_version_is_refused_with_the_supported_range(monkeypatch, version):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    with pytest.raises(RuntimeError, match=f"megatron-core {version} is installed, .*{SUPPORTED_VERSIONS}"):
        adapt_megatron()


def test_a_machine_with_cuda_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(RuntimeError, match="without CUDA"):
        adapt_megatron()


def test_the_real_torch_still_knows_no_cuda():
    adapt_megatron()
    for use_cuda in (
        lambda: torch.zeros(1, device="cuda"),
        lambda: torch.zeros(1).cuda(),
        torch.cuda.current_device,
        torch.cuda.synchronize,
        torch.cuda.current_stream,
    ):
        with pytest.raises((AssertionError, RuntimeError)):
            use_cuda()
    assert torch.zeros(1).type() == "torch.FloatTensor"
    assert not {"cuda", "type"} & set(vars(torch.Tensor))
    assert torch.compile.__module__ == "torch"


def test_megatron_sees_the_cpu_where_it_asks_for_cuda():
    adapt_megatron()
    its_torch = tensor_parallel.layers.torch
    assert its_torch is not torch
    assert its_torch.Tensor is torch.Tensor
    assert its_torch.cuda.current_device() == torch.device("cpu")
    for device in ("cuda", "cuda:0", torch.device("cuda"), None):
        assert torch.equal(its_torch.full((2,), 3.0, device=device), torch.tensor([3.0, 3.0]))
    assert its_torch.empty(1, device="meta").device.type == "meta"


def test_adapting_twice_changes_nothing():
    adapt_megatron()
    its_torch, clip = tensor_parallel.layers.torch, clip_grads.clip_grad_by_total_norm_fp32
    finders = list(sys.meta_path)
    adapt_megatron()
    assert tensor_parallel.layers.torch is its_torch
    assert clip_grads.clip_grad_by_total_norm_fp32 is clip
    assert sys.meta_path == finders


def test_tensor_methods_change_only_while_megatron_runs():
    adapt_megatron()
    scaler = DynamicGradScaler(
        initial_scale=2.0, min_scale=1.0, growth_factor=2.0, backoff_factor=0.5, growth_interval=1, hysteresis=1
    )
    scaler.load_state_dict({"scale": torch.tensor([8.0]), "growth_tracker": 0, "hysteresis_tracker": 1})  # calls cuda()
    assert scaler.scale.item() == 8.0
    with pytest.raises(KeyError):
        scaler.load_state_dict({})
    assert not {"cuda", "type"} & set(vars(torch.Tensor))


def test_megatrons_functions_are_not_compiled():
    prepare_import()
    function = len
    assert jit.jit_fuser(function) is function


def test_the_stand_in_for_triton_is_gone_once_the_module_is_loaded(tmp_path):
    file = tmp_path / "kernels.py"
    file.write_text("import triton\nimport triton.language as tl\n@triton.jit\ndef kernel(x: tl.constexpr): ...\n")
    module = type(sys)("kernels")
    _TritonLoader("kernels", str(file)).exec_module(module)
    assert callable(module.kernel)
    assert not {"triton", "triton.language"} & set(sys.modules)


def draw_with_tracker(world):
    """Two numbers outside and two inside the tracker's stream of the tensor rank, drawn alternately."""
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=world.world_size)
    tensor_parallel.model_parallel_cuda_manual_seed(5)
    outside, inside = [torch.rand(1)], []
    for _ in range(2):
        with tensor_parallel.get_cuda_rng_tracker().fork():
            inside.append(torch.rand(1))
    outside.append(torch.rand(1))
    return torch.cat(outside), torch.cat(inside)


def test_random_streams_differ_between_tensor_ranks_only_inside_the_tracker(workers):
    (outside, inside), (other_outside, other_inside) = workers.run(draw_with_tracker, 2)
    torch.manual_seed(5)
    expected = torch.rand(2)  # drawing inside the tracker does not move the stream outside
    assert torch.equal(outside, expected)
    assert torch.equal(other_outside, expected)
    assert len({*inside.tolist(), *other_inside.tolist(), *expected.tolist()}) == 6


def transformer_config(tensor_size, pipeline_size, dtype):
    return TransformerConfig(
        num_layers=2,
        hidden_size=16,
        num_attention_heads=4,
        num_query_groups=2,
        ffn_hidden_size=32,
        use_cpu_initialization=True,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        tensor_model_parallel_size=tensor_size,
        pipeline_model_parallel_size=pipeline_size,
        pipeline_dtype=dtype,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
    )


@torch.no_grad()
def fill_by_name(model):
    """Give every parameter values that depend on its global name alone, not on how the model is split."""
    rank = parallel_state.get_tensor_model_parallel_rank()
    size = parallel_state.get_tensor_model_parallel_world_size()
    for name, parameter in model.named_parameters():
        if ".layers." in name:
            layer = int(name.split(".")[2])
            name = name.replace(f"layers.{layer}.", f"layers.{model.decoder.layers[layer].layer_number}.")
        name = name.replace("output_layer", "embedding.word_embeddings")  # tied, copied to the last stage
        dim = parameter.partition_dim if hasattr(parameter, "tensor_model_parallel") else None
        shape = [length * size if i == dim else length for i, length in enumerate(parameter.shape)]
        full = 0.2 * torch.randn(shape, generator=torch.Generator().manual_seed(zlib.crc32(name.encode())))
        full += "norm" in name
        blocks = full.chunk(2) if "linear_fc1" in name else [full]  # gate and up are split each by itself
        parameter.copy_(full if dim is None else torch.cat([block.chunk(size, dim)[rank] for block in blocks]))


def build(config, distributed):
    """The model under DDP, and its optimizer."""
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(normalization="RMSNorm"),
        vocab_size=VOCABULARY,
        max_sequence_length=SEQUENCE,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=True,
        position_embedding_type="rope",
    )
    fill_by_name(model)
    wrapped = DistributedDataParallel(
        config,
        DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=distributed),
        Float16Module(config, model) if config.bf16 else model,
    )
    settings = OptimizerConfig(
        optimizer="adam",
        lr=1e-2,
        bf16=config.bf16,
        params_dtype=config.params_dtype,
        use_distributed_optimizer=distributed,
        clip_grad=0.5,
    )
    return wrapped, get_megatron_optimizer(settings, [wrapped])


def forward_step(micro_batches, model):
    tokens = next(micro_batches)
    positions = torch.arange(SEQUENCE).expand_as(tokens)

    def loss(losses):
        mean = losses.float().mean()
        return mean, mean.detach().clone()

    return model(tokens, positions, None, labels=tokens.roll(-1, dims=1)), loss


def train(world, tensor_size, pipeline_size, dtype, distributed):
    """Mean loss and gradient norm of each step, on every rank the same."""
    parallel_state.initialize_model_parallel(tensor_size, pipeline_size)
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    config = transformer_config(tensor_size, pipeline_size, dtype)
    model, optimizer = build(config, distributed)
    config.finalize_model_grads_func = finalize_model_grads
    config.grad_scale_func = optimizer.scale_loss
    numbers = []
    for step in range(STEPS):
        tokens = torch.randint(VOCABULARY, (MICRO_BATCHES, 2, SEQUENCE), generator=torch.Generator().manual_seed(step))
        data_rank, data_size = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
        mine = tokens[data_rank::data_size]
        model.zero_grad_buffer()
        optimizer.zero_grad()
        losses = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iter(mine),
            model=[model],
            num_microbatches=len(mine),
            seq_length=SEQUENCE,
            micro_batch_size=2,
            forward_only=False,
        )
        _, grad_norm, _ = optimizer.step()
        total = sum(losses, torch.zeros(())) / tensor_size / MICRO_BATCHES
        dist.all_reduce(total)
        numbers.append((total.item(), float(grad_norm)))
    return numbers


@pytest.mark.parametrize(("world_size", "tensor_size", "pipeline_size"), [(4, 2, 2), (2, 1, 1)])
def test_ranks_train_like_one_process(workers, world_size, tensor_size, pipeline_size):
    (alone,) = workers.run(train, 1, 1, 1, torch.float32, True)
    assert alone[-1][0] < alone[0][0]
    assert min(norm for _, norm in alone) > 0.5  # clipping is at work
    for numbers in workers.run(train, world_size, tensor_size, pipeline_size, torch.float32, True):
        torch.testing.assert_close(torch.tensor(numbers), torch.tensor(alone), rtol=1e-4, atol=1e-5)


def test_bf16_trains_alike_with_both_optimizers_that_keep_fp32_masters(workers):
    distributed, replicated = (workers.run(train, 1, 1, 1, torch.bfloat16, flag)[0] for flag in (True, False))
    (exact,) = workers.run(train, 1, 1, 1, torch.float32, True)
    torch.testing.assert_close(torch.tensor(distributed), torch.tensor(replicated), rtol=1e-5, atol=0.0)
    torch.testing.assert_close(torch.tensor(distributed), torch.tensor(exact), rtol=3e-2, atol=0.0)
