"""The CUDA path on one GPU: Transformer Engine's layer spec, packed attention, rollout. Not yet run on a GPU.

python -m pytest tests/gpu
"""

from pathlib import Path

import pytest
import torch

from parallel.launch import World, detect_world, running
from parallel.log_probs import score_tokens
from parallel.mesh import Layout, build_mesh
from parallel.model import build_model
from parallel.optimizer import OptimizerSettings, Trainable
from parallel.pack import pack_groups, pack_sequences
from parallel.qwen import read_shape
from parallel.schedule import forward, forward_backward
from rollout.engine import Engine
from rollout.requests import Request
from rollout.sampling import SamplingParams
from tests.tiny_model import draw_sequences, load_transformers, write_tiny_qwens

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


@pytest.fixture(scope="module")
def world() -> World:
    with running(detect_world({})) as started:
        yield started


@pytest.fixture(scope="module", params=["qwen2", "qwen3"])
def policy(request, world, tmp_path_factory) -> tuple[Trainable, Path]:
    """A bf16 model under DDP on the GPU, and its folder."""
    folder: Path = vars(write_tiny_qwens(tmp_path_factory.mktemp("tiny")))[request.param]
    mesh = request.getfixturevalue("mesh")
    trainable = Trainable(build_model(read_shape(folder), mesh, torch.bfloat16), mesh, OptimizerSettings(lr=1e-3))
    trainable.load_hf(folder)
    return trainable, folder


@pytest.fixture(scope="module")
def mesh(world):
    return build_mesh(Layout(), world)


def _pack(lengths: list[int]):
    sequences = draw_sequences(lengths)
    masks = [torch.arange(len(tokens)) >= 1 for tokens in sequences]
    return sequences, pack_sequences(sequences, masks).to(torch.device("cuda", 0))


def _score(trainable: Trainable, pack) -> torch.Tensor:
    return forward(trainable.chunks, [pack], lambda model, hidden, pack: score_tokens(model, hidden, pack)[0])[0]


def test_packed_log_probs_are_those_of_transformers(policy):
    trainable, folder = policy
    sequences, pack = _pack([7, 3, 12])
    reference = load_transformers(folder).to("cuda", torch.bfloat16)
    wanted = []
    for tokens in sequences:
        with torch.no_grad():
            logits = reference(tokens[None].cuda()).logits[0].float()
        wanted.append(logits[:-1].log_softmax(-1).gather(1, tokens[1:, None].cuda())[:, 0])
    torch.testing.assert_close(_score(trainable, pack), torch.cat(wanted), atol=0.1, rtol=0.0)


def test_shared_prompts_give_the_log_probs_and_gradients_of_repeated_ones(policy):
    trainable, _ = policy
    prompt, *responses = draw_sequences([9, 4, 7, 1])
    shared = pack_groups([(prompt, responses)]).to(torch.device("cuda", 0))
    masks = [torch.arange(len(prompt) + len(response)) >= len(prompt) for response in responses]
    repeated = pack_sequences([torch.cat([prompt, response]) for response in responses], masks)
    packs = (shared, repeated.to(torch.device("cuda", 0)))
    torch.testing.assert_close(_score(trainable, packs[0]), _score(trainable, packs[1]), atol=0.1, rtol=0.0)

    def loss(model, hidden, pack):
        total = -score_tokens(model, hidden, pack)[0].sum()
        return total, {"loss": total.detach().clone()}

    norms = []
    for pack in packs:
        trainable.zero_grad()
        forward_backward(trainable.chunks, [pack], loss)
        norms.append(trainable.step(1e-12).grad_norm)
    assert norms[0] == pytest.approx(norms[1], rel=0.03)


def test_three_steps_lower_the_loss(policy):
    trainable, _ = policy
    _, pack = _pack([7, 3, 12])

    def loss(model, hidden, pack):
        total = -score_tokens(model, hidden, pack)[0].mean()
        return total, {"loss": total.detach().clone()}

    losses = []
    for _ in range(3):
        trainable.zero_grad()
        losses.append(forward_backward(trainable.chunks, [pack], loss)[0]["loss"].item())
        assert trainable.step(1e-3).applied
    assert losses[2] < losses[1] < losses[0]


def test_rollout_log_probs_are_close_to_those_of_training(policy):
    trainable, _ = policy
    engine = Engine(trainable.models, trainable.mesh, context_length=32)
    prompts = [tokens.tolist() for tokens in draw_sequences([5, 9])]
    requests = [Request(index, prompt, num_samples=4) for index, prompt in enumerate(prompts)]
    completions = engine.generate(requests, SamplingParams(max_new_tokens=12))
    sequences = [torch.tensor(prompts[c.prompt_id] + c.tokens) for c in completions]
    masks = [torch.arange(len(s)) >= len(prompts[c.prompt_id]) for s, c in zip(sequences, completions, strict=True)]
    scored = _score(trainable, pack_sequences(sequences, masks).to(trainable.mesh.device)).cpu()
    rollout = torch.cat([completion.log_probs for completion in completions])
    torch.testing.assert_close(scored, rollout, atol=0.1, rtol=0.0)  # bf16: kernels of decoding and training differ
