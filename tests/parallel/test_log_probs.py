"""Chunked, vocab-parallel log-probs and entropy against log_softmax of the whole logits, and their memory.

Shapes: N scored tokens, T tokens, V vocabulary, H hidden size.
"""

import weakref
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from parallel.log_probs import VocabShard, score_tokens, vocab_parallel_log_probs
from parallel.mesh import Layout, build_mesh
from parallel.model import build_model
from parallel.pack import Pack, pack_sequences
from parallel.qwen import QwenShape, padded_vocab_size
from parallel.rope import RopeSettings

H, V = 16, 150
LENGTHS = (7, 1, 12, 5)
GARBAGE = 50.0
"""In the padded rows of the output matrix: one of them inside a softmax would take all its mass."""


@dataclass(frozen=True)
class Case:
    """One way to call `score_tokens`, and which of its results the loss uses."""

    vocab_size: int = V
    temperature: float = 1.0
    rows_per_chunk: int = 1000
    use_log_probs: bool = True
    use_entropy: bool = True


CASES = {
    "one chunk": Case(),
    "one row in a chunk": Case(rows_per_chunk=1),
    "last chunk not full": Case(rows_per_chunk=4),
    "chunks of equal size": Case(rows_per_chunk=7),
    "temperature": Case(temperature=0.7, rows_per_chunk=4),
    "high temperature": Case(temperature=3.0),
    "no entropy gradient": Case(use_entropy=False),
    "no entropy gradient, chunks": Case(use_entropy=False, rows_per_chunk=4, temperature=0.7),
    "entropy gradient alone": Case(use_log_probs=False, rows_per_chunk=4),
    "second shard wholly padding": Case(vocab_size=100, rows_per_chunk=4, temperature=0.7),
    "no padding": Case(vocab_size=256, rows_per_chunk=4),
}
Result = tuple[Tensor, Tensor, Tensor, Tensor]
"""log_probs [N], entropy [N], gradient of the hidden states [T, H], gradient of the output matrix [V, H]."""


def shape_of(vocab_size: int) -> QwenShape:
    return QwenShape(
        family="qwen3",
        num_layers=1,
        hidden_size=H,
        num_attention_heads=2,
        num_query_groups=2,
        head_dim=8,
        ffn_hidden_size=16,
        vocab_size=vocab_size,
        tie_word_embeddings=False,
        rms_norm_eps=1e-6,
        max_position_embeddings=64,
        rope=RopeSettings("default", theta=1e4),
    )


def draw(vocab_size: int) -> tuple[Tensor, Tensor, Pack]:
    """Hidden states [T, H], output matrix [V, H] and a pack whose last token of the vocabulary is a target, too."""
    generator = torch.Generator().manual_seed(vocab_size)
    sequences = [torch.randint(vocab_size, (length,), generator=generator) for length in LENGTHS]
    sequences[0][1], sequences[0][2] = 0, vocab_size - 1
    pack = pack_sequences(sequences, [torch.arange(length) > 0 for length in LENGTHS])
    hidden = torch.randn(len(pack.tokens), H, generator=generator)
    return hidden, torch.randn(vocab_size, H, generator=generator), pack


def loss_of(log_probs: Tensor, entropy: Tensor, case: Case) -> Tensor:
    weights = torch.linspace(-1.0, 2.0, len(log_probs), dtype=log_probs.dtype)
    first = (log_probs * weights).sum() if case.use_log_probs else 0.0
    return first + ((entropy * weights.flip(0)).sum() if case.use_entropy else 0.0)


def whole_logits(case: Case) -> Result:
    """The definition, in fp64."""
    hidden, weight, pack = draw(case.vocab_size)
    hidden, weight = hidden.double().requires_grad_(), weight.double().requires_grad_()
    table = (hidden[pack.scored - 1] @ weight.T / case.temperature).log_softmax(-1)
    log_probs = table.gather(1, pack.tokens[pack.scored, None]).squeeze(1)
    entropy = -(table.exp() * table).sum(-1)
    gradients = torch.autograd.grad(loss_of(log_probs, entropy, case), (hidden, weight))
    return tuple(x.detach().float() for x in (log_probs, entropy, *gradients))


def run_cases(world, cases: list[Case]) -> list[Result]:
    mesh = build_mesh(Layout(world.world_size), world)
    return [run_case(mesh, case) for case in cases]


def model_with(mesh, weight: Tensor):
    """A model of one layer with this rank's rows of `weight [V, H]`, and garbage below them."""
    (model,) = build_model(shape_of(len(weight)), mesh, torch.float32)
    padded = torch.full((padded_vocab_size(len(weight), mesh.tensor_size), H), GARBAGE)
    padded[: len(weight)] = weight
    model.output_layer.weight.data = padded.chunk(mesh.tensor_size)[mesh.tensor_rank].clone()
    return model


def run_case(mesh, case: Case) -> Result:
    hidden, weight, pack = draw(case.vocab_size)
    model = model_with(mesh, weight)
    hidden = hidden[:, None].requires_grad_()
    chunk_bytes = case.rows_per_chunk * 4 * len(model.output_weight())
    log_probs, entropy = score_tokens(model, hidden, pack, case.temperature, chunk_bytes)
    loss_of(log_probs, entropy, case).backward()
    return log_probs.detach(), entropy.detach(), hidden.grad[:, 0], model.output_layer.weight.grad


@pytest.mark.parametrize("tensor_size", [1, 2])
def test_log_probs_entropy_and_gradients_equal_log_softmax_of_the_whole_logits(workers, tensor_size):
    """Vocabulary 150 and 100 in 256 rows: with two shards the second has 22 real rows, or none at all."""
    done = workers.run(run_cases, tensor_size, list(CASES.values()))
    for number, (name, case) in enumerate(CASES.items()):
        expected = whole_logits(case)
        for rank in done:
            for found, right in zip(rank[number][:3], expected[:3], strict=True):
                assert found.dtype == torch.float32
                torch.testing.assert_close(found, right, rtol=1e-5, atol=2e-5, msg=lambda text, name=name: name + text)
        weight_gradient = torch.cat([rank[number][3] for rank in done])
        torch.testing.assert_close(weight_gradient[: case.vocab_size], expected[3], rtol=1e-5, atol=2e-5)
        assert not weight_gradient[case.vocab_size :].any(), name


def test_shards_divide_the_real_vocabulary(workers):
    """150 of 256 rows on two ranks: 128 and 22; 100 of 256: 100 and 0."""
    assert workers.run(shards_of, 2, [150, 100]) == [[(0, 128), (0, 100)], [(128, 22), (128, 0)]]


def shards_of(world, vocab_sizes: list[int]) -> list[tuple[int, int]]:
    mesh = build_mesh(Layout(2), world)
    shards = [VocabShard.of(model_with(mesh, torch.zeros(size, H))) for size in vocab_sizes]
    return [(shard.first, shard.num_real) for shard in shards]


def test_chunk_size_does_not_change_log_probs(workers):
    """Old and new log-probs may be computed in packs of other sizes: 1e-6, whatever the chunks."""
    (done,) = workers.run(run_cases, 1, [Case(rows_per_chunk=rows) for rows in (1, 2, 5, 1000)])
    for log_probs, entropy, *_ in done[1:]:
        torch.testing.assert_close(log_probs, done[0][0], rtol=0, atol=2e-6)
        torch.testing.assert_close(entropy, done[0][1], rtol=0, atol=2e-6)


def test_no_scored_token_gives_empty_results_and_a_zero_gradient(workers):
    """RC13: a pack without trainable tokens takes part in the backward pass."""
    for log_probs, requires_grad, hidden_gradient, weight_gradient in workers.run(score_nothing, 2):
        assert log_probs.shape == (0,)
        assert requires_grad
        assert not hidden_gradient.any()
        assert not weight_gradient.any()


def score_nothing(world):
    mesh = build_mesh(Layout(2), world)
    model = model_with(mesh, torch.ones(V, H))
    pack = pack_sequences([torch.tensor([1, 2, 3])], [torch.tensor([False] * 3)])
    hidden = torch.ones(3, 1, H, requires_grad=True)
    log_probs, entropy = score_tokens(model, hidden, pack)
    (log_probs.sum() + entropy.sum()).backward()
    return log_probs.detach(), log_probs.requires_grad, hidden.grad, model.output_layer.weight.grad


@pytest.mark.parametrize("temperature", [0.0, -1.0, float("nan")])
def test_temperature_that_is_not_above_zero_is_refused(temperature):
    with pytest.raises(ValueError, match=f"temperature: got {temperature}, allowed: above 0"):
        vocab_parallel_log_probs(None, torch.zeros(1, H), torch.zeros(1, dtype=torch.int64), temperature)


class Memory(TorchDispatchMode):
    """Bytes of the storages made while it is entered: the largest, and the most alive at once."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[int, int] = {}
        self.largest = self.peak = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (list, tuple)) else [result]:
            if isinstance(tensor, Tensor):
                self.see(tensor.untyped_storage())
        return result

    def see(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self.sizes:
            return
        self.sizes[key] = storage.nbytes()
        weakref.finalize(storage, self.sizes.pop, key)
        self.largest = max(self.largest, storage.nbytes())
        self.peak = max(self.peak, sum(self.sizes.values()))


def test_memory_watch_counts_what_is_alive():
    with Memory() as memory:
        for _ in range(3):
            kept = torch.zeros(1000).add(1).mul_(2)
        del kept
    assert memory.largest == 4000
    assert 8000 <= memory.peak <= 12000
    assert memory.sizes == {}


@pytest.mark.parametrize("use_entropy", [True, False])
def test_memory_is_one_chunk_of_logits_forward_and_backward(workers, use_entropy):
    """The logits are 16 MiB. Beyond chunks of 2 MiB with their temporaries (a fifth) there are the inputs, their
    gradients, one chunk's share of the matrix gradient and a few numbers per row: 1.7 MiB."""
    ((largest, peak),) = workers.run(memory_of, 1, use_entropy)
    inputs_and_gradients = 4 * H * (3 * MEMORY_VOCAB + 2 * MEMORY_ROWS) + 4 * 20 * MEMORY_ROWS
    assert largest == MEMORY_CHUNK
    assert peak < 1.2 * MEMORY_CHUNK + inputs_and_gradients


MEMORY_ROWS, MEMORY_VOCAB, MEMORY_CHUNK = 512, 8192, 2**21


def memory_of(world, use_entropy: bool) -> tuple[int, int]:
    mesh = build_mesh(Layout(), world)
    model = model_with(mesh, torch.randn(MEMORY_VOCAB, H))
    rows = torch.randn(MEMORY_ROWS, H, requires_grad=True)
    targets = torch.arange(MEMORY_ROWS)
    with Memory() as memory:
        log_probs, entropy = vocab_parallel_log_probs(model, rows, targets, 0.9, MEMORY_CHUNK)
        loss = log_probs.sum() + entropy.sum() if use_entropy else log_probs.sum()
        loss.backward()
    return memory.largest, memory.peak
