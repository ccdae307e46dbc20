"""Gradients of every parameter on every layout, against transformers; both heads."""

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from parallel.log_probs import score_tokens
from parallel.mesh import Layout, build_mesh
from parallel.model import build_model, scalar_values
from parallel.optimizer import OptimizerSettings, Trainable
from parallel.pack import pack_sequences
from parallel.qwen import read_shape
from parallel.schedule import forward, forward_backward
from tests.tiny_model import assert_relatively_close, draw_sequences, hf_gradients, load_transformers

ONE = Layout()
LAYOUTS = {
    "TP2": Layout(2),
    "TP2, sequence parallel": Layout(2, sequence_parallel=True),
    "PP2": Layout(1, 2),
    "DP2": Layout(),
    "PP2 with 2 virtual stages": Layout(1, 2, 2),
}
LENGTHS = [9, 4, 17, 2, 12, 5, 30, 3]
PACKS = [[0, 1], [2], [3, 4, 5], [6, 7]]
NUM_PROMPT_TOKENS = 1
ENTROPY_WEIGHT = 0.3
TARGET_VALUE = 0.5


@dataclass(frozen=True)
class Job:
    """A model folder, its head, and where its gradient is written."""

    source: Path
    target: Path
    head: str = "lm"


@dataclass(frozen=True)
class Done:
    """Loss summed over this rank's packs, whole gradient by name, and the norm that the optimizer sees."""

    loss: float
    gradients: dict[str, torch.Tensor]
    grad_norm: float


def run_jobs(world, layout: Layout, jobs: list[Job]) -> list[Done]:
    mesh = build_mesh(layout, world)
    return [run_job(mesh, job) for job in jobs]


def run_job(mesh, job: Job) -> Done:
    models = build_model(read_shape(job.source), mesh, torch.float32, job.head)
    trainable = Trainable(models, mesh, OptimizerSettings())
    trainable.load_hf(job.source, seed=7)
    trainable.zero_grad()
    packs = all_packs(mesh)[mesh.data_rank :: mesh.data_size]
    kept = forward_backward(trainable.chunks, packs, lm_loss if job.head == "lm" else scalar_loss)
    gradients = hf_gradients(trainable, job.target)
    return Done(sum(float(metrics["loss"]) for metrics in kept), gradients, trainable.step(0.0).grad_norm)


def all_packs(mesh) -> list:
    sequences = draw_sequences(LENGTHS)
    masks = [torch.arange(len(tokens)) >= NUM_PROMPT_TOKENS for tokens in sequences]
    multiple = mesh.tensor_size if mesh.layout.sequence_parallel else 1
    return [pack_sequences([sequences[i] for i in pack], [masks[i] for i in pack], multiple) for pack in PACKS]


def lm_loss(model, hidden, pack):
    log_probs, entropy = score_tokens(model, hidden, pack)
    loss = -log_probs.sum() - ENTROPY_WEIGHT * entropy.sum()
    return loss, {"loss": loss.detach().clone()}


def scalar_loss(model, hidden, pack):
    loss = (scalar_values(model, hidden, pack) - TARGET_VALUE).square().sum()
    return loss, {"loss": loss.detach().clone()}


def transformers_gradients(folder: Path) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradient of `lm_loss`, one sequence at a time."""
    model = load_transformers(folder)
    total = 0.0
    for tokens in draw_sequences(LENGTHS):
        log_probs = model(tokens[None]).logits[0, NUM_PROMPT_TOKENS - 1 : -1].log_softmax(-1)
        picked = log_probs.gather(1, tokens[NUM_PROMPT_TOKENS:, None])
        loss = -picked.sum() + ENTROPY_WEIGHT * (log_probs.exp() * log_probs).sum()
        loss.backward()
        total += loss.item()
    return total, {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.fixture(scope="module")
def one_process(workers, tiny_qwen, tmp_path_factory) -> dict[str, Done]:
    folder = tmp_path_factory.mktemp("one process")
    jobs = jobs_for(tiny_qwen, folder)
    (done,) = workers.run(run_jobs, 1, ONE, list(jobs.values()))
    return dict(zip(jobs, done, strict=True))


def jobs_for(tiny_qwen, folder: Path) -> dict[str, Job]:
    return {
        "qwen2": Job(tiny_qwen.qwen2, folder / "qwen2"),
        "qwen3": Job(tiny_qwen.qwen3, folder / "qwen3"),
        "critic": Job(tiny_qwen.qwen2, folder / "critic", head="scalar"),
    }


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_one_process_has_the_gradient_of_transformers(one_process, tiny_qwen, family):
    """Loss 1e-5, gradient of every parameter 1e-5: through packs, chunked log-probs, DDP and export."""
    loss, gradients = transformers_gradients(getattr(tiny_qwen, family))
    assert one_process[family].loss == pytest.approx(loss, rel=1e-5)
    assert_relatively_close(one_process[family].gradients, gradients, 1e-5)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_every_layout_has_the_gradient_of_one_process(workers, one_process, tiny_qwen, tmp_path, layout):
    jobs = jobs_for(tiny_qwen, tmp_path)
    done = workers.run(run_jobs, 2, layout, list(jobs.values()))
    for number, (name, expected) in enumerate(one_process.items()):
        ranks = [rank[number] for rank in done]
        losses = [rank.loss for rank in ranks]
        loss = max(losses) if layout.tensor_model_parallel_size == 2 else sum(losses)  # stages and data ranks add up
        assert loss == pytest.approx(expected.loss, rel=1e-5), name
        assert_relatively_close(ranks[0].gradients, expected.gradients, 1e-5)
        # The norm counts every parameter once: not the copies of norms, biases and heads on tensor ranks, nor the
        # output matrix tied to an embedding on another stage.
        norm = torch.stack([gradient.norm() for gradient in expected.gradients.values()]).norm()
        assert [rank.grad_norm for rank in ranks] == pytest.approx([float(norm)] * 2, rel=1e-5), name


def test_scalar_head_is_a_linear_map_of_the_hidden_state_before_each_scored_token(workers, tiny_qwen):
    (computed,) = workers.run(values_of, 1, tiny_qwen.qwen2)
    values, weight = computed
    hidden = load_transformers(tiny_qwen.qwen2).model(torch.tensor([[5, 6, 7, 8, 9]])).last_hidden_state[0]
    torch.testing.assert_close(values, (hidden[[1, 3]] @ weight[0]).detach(), rtol=1e-5, atol=1e-6)
    assert values.dtype == torch.float32


def values_of(world, folder: Path) -> tuple[torch.Tensor, torch.Tensor]:
    mesh = build_mesh(ONE, world)
    trainable = Trainable(build_model(read_shape(folder), mesh, torch.float32, "scalar"), mesh, OptimizerSettings())
    trainable.load_hf(folder)
    pack = pack_sequences([torch.tensor([5, 6, 7, 8, 9])], [torch.tensor([False, False, True, False, True])])
    (values,) = forward(trainable.models, [pack], scalar_values)
    return values, trainable.models[0].output_layer.weight.detach().clone()


def test_layout_that_does_not_fit_the_model_is_refused_on_every_rank(workers, tiny_qwen):
    """4 layers in 2 x 4 virtual stages."""
    messages = workers.run(refusal_of, 2, Layout(1, 2, 4), tiny_qwen.qwen2)
    assert ["got 8 stages, but num_layers = 4" in message for message in messages] == [True, True]


def refusal_of(world, layout: Layout, folder: Path) -> str:
    mesh = build_mesh(layout, world)
    with pytest.raises(ValueError) as error:
        build_model(read_shape(folder), mesh, torch.float32)
    return str(error.value)
