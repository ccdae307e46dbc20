import math

import pytest
import torch

from megarl.data.tokenizer import build_tiny_tokenizer, load_tokenizer, stop_token_ids
from parallel.log_probs import VocabShard, vocab_parallel_log_probs
from parallel.mesh import Layout, build_mesh
from parallel.model import build_model
from parallel.qwen import QwenShape, padded_vocab_size
from parallel.rope import RopeSettings
from rollout.random_numbers import combine
from rollout.sampling import SamplingParams, response_length, sample

WHOLE = VocabShard(first=0, num_real=300, group=None, group_size=1)
PROBABILITIES = (0.5, 0.3, 0.2)

# With top-k 1 a tensor rank may be left without any id.
VARIANTS = {
    "greedy": SamplingParams(temperature=0.0),
    "temperature 1": SamplingParams(),
    "temperature 0.5": SamplingParams(temperature=0.5),
    "top-k 1": SamplingParams(top_k=1),
    "top-k 5": SamplingParams(top_k=5),
    "top-p 0.7": SamplingParams(top_p=0.7),
    "top-k 20, top-p 0.5, temperature 2": SamplingParams(top_k=20, top_p=0.5, temperature=2.0),
}


def keys(number: int, seed: int = 0) -> torch.Tensor:
    return combine(torch.tensor(seed), torch.arange(number))


def whole(num_ids: int) -> VocabShard:
    return VocabShard(first=0, num_real=num_ids, group=None, group_size=1)


def random_logits(num_rows: int, num_ids: int) -> torch.Tensor:
    return 3 * torch.randn(num_rows, num_ids, generator=torch.Generator().manual_seed(0))


def chi_square(tokens: torch.Tensor, probabilities: torch.Tensor) -> tuple[float, int]:
    """Chi-square of the counts, and the degrees of freedom; impossible ids must not occur."""
    counts = torch.bincount(tokens, minlength=len(probabilities)).double()
    possible = probabilities > 0
    assert counts[~possible].sum() == 0
    expected = len(tokens) * probabilities[possible].double()
    return float(((counts[possible] - expected) ** 2 / expected).sum()), int(possible.sum()) - 1


def check_distribution(tokens: torch.Tensor, probabilities: torch.Tensor) -> None:
    """Within five standard deviations, sqrt(2 df), of the mean, df."""
    found, freedom = chi_square(tokens, probabilities)
    assert abs(found - freedom) < 5 * math.sqrt(2 * freedom)


@pytest.mark.parametrize(
    ("params", "num_kept"),
    [
        (SamplingParams(), 300),
        (SamplingParams(temperature=0.5), 300),
        (SamplingParams(top_k=7), 7),
        (SamplingParams(top_p=0.9), None),
        (SamplingParams(top_k=40, top_p=0.6, temperature=2.0), None),
    ],
)
def test_tokens_follow_the_restricted_and_renormalised_distribution(params, num_kept):
    logits = torch.randn(300, generator=torch.Generator().manual_seed(1))
    tokens, log_probs = sample(logits.expand(10_000, -1), keys(10_000), params, WHOLE)
    full = (logits.double() / params.temperature).softmax(0)
    sorted_probabilities, ids = full.sort(descending=True)
    if params.top_k:
        sorted_probabilities[params.top_k :] = 0
    within_k = sorted_probabilities / sorted_probabilities.sum()
    # The nucleus is the shortest head whose mass reaches top_p: an id is in if the mass before it falls short.
    kept = (within_k.cumsum(0) - within_k < params.top_p) & (within_k > 0)
    assert num_kept in (None, int(kept.sum()))
    restricted = torch.zeros(300, dtype=torch.float64)
    restricted[ids[kept]] = within_k[kept] / within_k[kept].sum()
    check_distribution(tokens, restricted)
    torch.testing.assert_close(log_probs, full.log().float()[tokens], rtol=0, atol=1e-5)


def test_sampling_is_a_function_of_the_key_alone_not_of_row_or_batch():
    logits, order = random_logits(64, 300), torch.randperm(64, generator=torch.Generator().manual_seed(3))
    tokens, log_probs = sample(logits, keys(64), SamplingParams(), WHOLE)
    shuffled = sample(logits[order], keys(64)[order], SamplingParams(), WHOLE)
    assert torch.equal(shuffled[0], tokens[order])
    assert torch.equal(shuffled[1], log_probs[order])
    for row in (0, 17, 63):
        assert sample(logits[row : row + 1], keys(64)[row : row + 1], SamplingParams(), WHOLE)[0] == tokens[row]


def test_tokens_of_neighbouring_keys_are_independent():
    probabilities = torch.tensor(PROBABILITIES)
    stream, _ = sample(probabilities.log().expand(20_000, -1), keys(20_000), SamplingParams(), whole(3))
    first, second = stream.view(-1, 2).T
    check_distribution(3 * first + second, torch.outer(probabilities, probabilities).flatten())


def test_greedy_takes_the_lowest_id_of_a_tie():
    logits = torch.zeros(3, 300)
    logits[0, [7, 130, 299]] = 1.0
    logits[1, [200, 201]] = 1.0
    greedy = SamplingParams(temperature=0.0)
    tokens, log_probs = sample(logits, keys(3), greedy, WHOLE)
    assert tokens.tolist() == [7, 200, 0]
    expected = [1 - math.log(297 + 3 * math.e), 1 - math.log(298 + 2 * math.e), -math.log(300)]
    assert log_probs.tolist() == pytest.approx(expected, abs=1e-5)


def test_top_k_keeps_exactly_k_ids_and_more_only_in_a_tie():
    logits = torch.tensor([3.0, -1.0, 2.0, -2.0, 2.5, 0.0]).expand(2000, -1)
    for top_k, ids in (
        (1, {0}),
        (2, {0, 4}),
        (3, {0, 2, 4}),
        (5, {0, 1, 2, 4, 5}),
        (6, set(range(6))),
        (99, set(range(6))),
    ):
        tokens, _ = sample(logits, keys(2000), SamplingParams(top_k=top_k, temperature=4.0), whole(6))
        assert set(tokens.tolist()) == ids
    # Neighbouring floats are told apart; equal ones at the border stay together.
    close = torch.tensor([1.0, 1.0 + 2.0**-23, -0.0, 0.0, -1.0]).expand(500, -1)
    for top_k, ids in ((1, {1}), (2, {0, 1}), (3, {0, 1, 2, 3})):
        assert set(sample(close, keys(500), SamplingParams(top_k=top_k), whole(5))[0].tolist()) == ids


def test_top_p_keeps_the_id_that_reaches_the_mass():
    logits = torch.tensor(PROBABILITIES).log().expand(2000, -1)
    for top_p, ids in ((1e-9, {0}), (0.49, {0}), (0.51, {0, 1}), (0.79, {0, 1}), (0.81, {0, 1, 2}), (1.0, {0, 1, 2})):
        tokens, _ = sample(logits, keys(2000), SamplingParams(top_p=top_p), whole(3))
        assert set(tokens.tolist()) == ids


def sample_on_rank(world, num_ids: int) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Run on one tensor rank: its columns of `random_logits`, in every variant."""
    mesh = build_mesh(Layout(world.world_size), world)
    columns = padded_vocab_size(num_ids, mesh.tensor_size) // mesh.tensor_size
    first = mesh.tensor_rank * columns
    logits = random_logits(200, num_ids)
    logits[:50, 3] = logits[:50, -1] = logits[:50].amax(1) + 0.5  # a tie between the first shard and the last
    logits = logits[:, first : first + columns]
    shard = VocabShard(first, logits.shape[1], mesh.tensor_group, mesh.tensor_size)
    return {name: sample(logits, keys(200), params, shard) for name, params in VARIANTS.items()}


@pytest.mark.parametrize(
    ("num_ids", "num_real"),
    [(300, [256, 44]), (512, [256, 256]), (257, [256, 1]), (256, [128, 128]), (100, [100, 0])],
    ids=["300", "512", "one id on rank 1", "256", "rank 1 all padding"],
)
def test_tokens_do_not_depend_on_the_tensor_size(workers, num_ids, num_real):
    assert padded_vocab_size(num_ids, 2) == 2 * (256 if num_ids > 256 else 128)
    assert sum(num_real) == num_ids
    (alone,) = workers.run(sample_on_rank, 1, num_ids)
    for rank in workers.run(sample_on_rank, 2, num_ids):
        for name, (tokens, log_probs) in rank.items():
            assert torch.equal(tokens, alone[name][0]), name
            torch.testing.assert_close(log_probs, alone[name][1], rtol=0, atol=1e-5)
    assert set(alone["greedy"][0][:50].tolist()) == {3}
    assert len(alone["temperature 1"][0].unique()) > 30


def rc41_shape() -> QwenShape:
    """A model of three ids, whose untied output matrix can hold any distribution."""
    rope = RopeSettings(rope_type="default", theta=10000.0)
    return QwenShape(
        family="qwen2",
        num_layers=1,
        hidden_size=8,
        num_attention_heads=2,
        num_query_groups=2,
        head_dim=4,
        ffn_hidden_size=8,
        vocab_size=len(PROBABILITIES),
        tie_word_embeddings=False,
        rms_norm_eps=1e-6,
        max_position_embeddings=16,
        rope=rope,
    )


@torch.no_grad()
def both_sides(world, temperature: float, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Sampler and trainer score the same tokens from hidden states whose logits are the logs of PROBABILITIES."""
    mesh = build_mesh(Layout(world.world_size), world)
    (model,) = build_model(rc41_shape(), mesh, dtype)
    weight = model.output_weight()
    weight.fill_(99.0)  # padding that would win if it were looked at
    if mesh.tensor_rank == 0:
        weight[:3] = torch.tensor(PROBABILITIES).log()[:, None]
    rows = torch.nn.functional.one_hot(torch.zeros(2000, dtype=torch.int64), 8).to(dtype)
    params, shard = SamplingParams(top_p=0.7, temperature=temperature), VocabShard.of(model)
    params.check_for_training()
    tokens, sampled = sample(shard.logits(rows, weight), keys(2000), params, shard)
    trained, _ = vocab_parallel_log_probs(model, rows, tokens, temperature)
    return {"tokens": tokens, "sampled": sampled, "trained": trained}


@pytest.mark.parametrize("tensor_size", [1, 2])
@pytest.mark.parametrize(
    ("temperature", "expected"),
    [(1.0, [math.log(0.5), math.log(0.3)]), (0.5, [math.log(0.25 / 0.38), math.log(0.09 / 0.38)])],
)
def test_sampler_reports_the_log_probs_that_training_computes(workers, tensor_size, temperature, expected):
    """RC41: over the whole vocabulary on both sides; at temperature 0.5 the probabilities are squared: ln 0.6579."""
    for rank in workers.run(both_sides, tensor_size, temperature, torch.float32):
        tokens, sampled, trained = rank["tokens"], rank["sampled"], rank["trained"]
        assert set(tokens.tolist()) == {0, 1}
        assert sampled.dtype == trained.dtype == torch.float32
        for token in (0, 1):
            torch.testing.assert_close(
                sampled[tokens == token], torch.full_like(sampled, expected[token])[tokens == token]
            )
        assert (trained - sampled).exp().tolist() == pytest.approx([1.0] * 2000, abs=1e-6)
        kept_mass = sum(p ** (1 / temperature) for p in PROBABILITIES[:2])
        share = 0.5 ** (1 / temperature) / kept_mass  # drawn from the nucleus: 0.625 at temperature 1
        assert abs(int((tokens == 0).sum()) - 2000 * share) < 5 * math.sqrt(2000 * share * (1 - share))


def test_stored_log_probs_are_fp32_also_in_a_bf16_model(workers):
    """RC41: the ln 0.3 of fp32 logits is not rounded to bf16's -1.203."""
    (rank,) = workers.run(both_sides, 1, 1.0, torch.bfloat16)
    assert rank["sampled"].dtype == torch.float32
    assert (rank["sampled"] != rank["sampled"].bfloat16()).all()
    assert (rank["trained"] - rank["sampled"]).abs().max() < 1e-6


def test_temperature_zero_is_argmax_for_evaluation_and_refused_for_training():
    """RC41"""
    greedy = SamplingParams(temperature=0.0, top_p=0.7)
    tokens, log_probs = sample(torch.tensor(PROBABILITIES).log().expand(50, -1), keys(50), greedy, whole(3))
    assert tokens.tolist() == [0] * 50
    assert log_probs.tolist() == pytest.approx([math.log(0.5)] * 50)
    with pytest.raises(ValueError, match=r"temperature: got 0, allowed in training: above 0"):
        greedy.check_for_training()


def mask(tokens: list[int], stop_token_ids: tuple[int, ...]) -> list[int]:
    length, _ = response_length(tokens, stop_token_ids)
    return [int(index < length) for index in range(len(tokens))]


def test_a_response_ends_with_its_first_stop_token_whichever_it_is():
    """RC40"""
    stops = (11, 12)
    sequences = [[5, 6, 12, 7, 8], [5, 11, 0, 0, 0], [5, 6, 7, 8, 9]]
    assert [mask(tokens, stops) for tokens in sequences] == [[1, 1, 1, 0, 0], [1, 1, 0, 0, 0], [1, 1, 1, 1, 1]]
    assert [response_length(tokens, stops)[1] for tokens in sequences] == ["stop", "stop", "length"]


def test_the_end_token_counts_where_padding_is_the_same_id():
    """RC40: pad = end = 0."""
    assert mask([5, 6, 0, 0, 0], (0,)) == [1, 1, 1, 0, 0]
    assert response_length([5, 6, 0, 0, 0], (0,)) == (3, "stop")
    assert response_length([], (0,)) == (0, "length")
    assert response_length([5, 6], ()) == (2, "length")


def test_stop_set_is_the_union_of_generation_config_and_tokenizer(tmp_path):
    """RC40: stop ids [11,12] of the model, end token 319 of the tokenizer."""
    build_tiny_tokenizer(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [11, 12]}')
    stops = stop_token_ids(load_tokenizer(tmp_path), tmp_path)
    assert stops == (11, 12, 319)
    assert [response_length([5, stop, 7], stops) for stop in stops] == [(2, "stop")] * 3


@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [
        ("temperature", -0.5, r"0 \(greedy\) or above"),
        ("temperature", math.nan, r"0 \(greedy\) or above"),
        ("top_p", 0.0, "above 0, at most 1"),
        ("top_p", 1.01, "above 0, at most 1"),
        ("top_k", -1, "0 or above"),
        ("max_new_tokens", -1, "0 or above"),
    ],
)
def test_senseless_settings_are_refused_with_what_is_allowed(field, value, allowed):
    with pytest.raises(ValueError, match=f"{field}: got {value}, allowed: {allowed}"):
        SamplingParams(**{field: value})
