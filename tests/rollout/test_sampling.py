import math
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from parallel.log_probs import VocabShard, vocab_parallel_log_probs
from parallel.mesh import Layout, build_mesh
from parallel.model import build_model
from parallel.qwen import QwenShape, padded_vocab_size
from parallel.rope import RopeSettings
from rollout.sampling import Draws, SamplingParams, sample
from tests.rollout.sampling_calls import columns_of_rank, drawn_from, keys, random_logits, whole

PROBABILITIES = (0.5, 0.3, 0.2)

# With top-k 1 a tensor rank may be left without any id.
VARIANTS = {
    "greedy": SamplingParams(temperature=0.0, entropies=True),
    "temperature 1": SamplingParams(),
    "temperature 0.5": SamplingParams(temperature=0.5, entropies=True),
    "top-k 1": SamplingParams(top_k=1),
    "top-k 5": SamplingParams(top_k=5, entropies=True),
    "top-k 1000": SamplingParams(top_k=1000),
    "top-p 0.7": SamplingParams(top_p=0.7),
    "top-p 0.99, temperature 3": SamplingParams(top_p=0.99, temperature=3.0, entropies=True),
    "top-k 20, top-p 0.5, temperature 2": SamplingParams(top_k=20, top_p=0.5, temperature=2.0),
    "min-p 0.1": SamplingParams(min_p=0.1),
    "penalty 1.3": SamplingParams(repetition_penalty=1.3, entropies=True),
    "penalty 1.3, greedy": SamplingParams(repetition_penalty=1.3, temperature=0.0),
    "all": SamplingParams(temperature=1.5, top_k=50, top_p=0.9, min_p=0.02, repetition_penalty=0.7, entropies=True),
}


def seen_ids(num_rows: int, num_ids: int) -> torch.Tensor:
    """Eleven ids of each row, some of them twice, padded with -1 (a row sees from 1 to 11)."""
    generator = torch.Generator().manual_seed(2)
    seen = torch.randint(num_ids, (num_rows, 11), generator=generator)
    seen[:, 1] = seen[:, 0]
    return seen.where(torch.arange(11) <= torch.arange(num_rows)[:, None] % 11, -1)


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
        (SamplingParams(min_p=0.2, top_p=0.95), None),
    ],
)
def test_tokens_follow_the_restricted_and_renormalised_distribution(params, num_kept):
    logits = torch.randn(300, generator=torch.Generator().manual_seed(1))
    drawn = sample(logits.expand(10_000, -1), keys(10_000), params, whole(300))
    restricted = drawn_from(logits[None], params)[0]
    assert num_kept in (None, int((restricted > -torch.inf).sum()))
    check_distribution(drawn.tokens, restricted.exp())
    full = (logits.double() / params.temperature).log_softmax(0)
    torch.testing.assert_close(drawn.log_probs, full.float()[drawn.tokens], rtol=0, atol=1e-5)
    torch.testing.assert_close(drawn.sampling_log_probs, restricted.float()[drawn.tokens], rtol=0, atol=1e-5)
    assert (drawn.sampling_log_probs is drawn.log_probs) == (not params.truncates)


@pytest.mark.parametrize("name", VARIANTS)
def test_a_draw_is_a_function_of_key_and_logits_alone_not_of_its_neighbours(name):
    params, logits, seen = VARIANTS[name], random_logits(64, 300), seen_ids(64, 300)
    order = torch.randperm(64, generator=torch.Generator().manual_seed(3))[:50]
    before = logits.clone()
    drawn = sample(logits, keys(64), params, whole(300), seen=seen)
    shuffled = sample(logits[order], keys(64)[order], params, whole(300), seen=seen[order])
    assert torch.equal(logits, before)
    for field in ("tokens", "log_probs", "sampling_log_probs", "entropies"):
        if getattr(drawn, field) is not None:
            assert torch.equal(getattr(shuffled, field), getattr(drawn, field)[order]), field
    for row in (0, 17, 63):
        alone = sample(logits[row : row + 1], keys(64)[row : row + 1], params, whole(300), seen=seen[row : row + 1])
        assert alone.tokens == drawn.tokens[row]


@pytest.mark.parametrize("name", VARIANTS)
def test_draws_that_name_their_row_equal_draws_from_repeated_rows(name):
    params, rows = VARIANTS[name], torch.tensor([2, 0, 0, 2, 2, 4, 0, 2] * 5)
    logits, seen = random_logits(5, 300) / 3, seen_ids(5, 300)
    named = sample(logits, keys(40), params, whole(300), rows, seen)
    repeated = sample(logits[rows], keys(40), params, whole(300), seen=seen[rows])
    for field in ("tokens", "log_probs", "sampling_log_probs"):
        assert torch.equal(getattr(named, field), getattr(repeated, field)), field
    assert (named.entropies is None) == (not params.entropies)
    if params.entropies:
        assert torch.equal(named.entropies, repeated.entropies)
    only_one = params.temperature == 0 or params.top_k == 1
    assert (len(named.tokens[rows == 0].unique()) == 1) == only_one


def test_tokens_of_neighbouring_keys_are_independent():
    probabilities = torch.tensor(PROBABILITIES)
    stream = sample(probabilities.log()[None], keys(20_000), SamplingParams(), whole(3), torch.zeros(20_000).long())
    first, second = stream.tokens.view(-1, 2).T
    check_distribution(3 * first + second, torch.outer(probabilities, probabilities).flatten())


def test_greedy_takes_the_lowest_id_of_a_tie():
    logits = torch.zeros(3, 300)
    logits[0, [7, 130, 299]] = 1.0
    logits[1, [200, 201]] = 1.0
    drawn = sample(logits, keys(3), SamplingParams(temperature=0.0), whole(300))
    assert drawn.tokens.tolist() == [7, 200, 0]
    expected = [1 - math.log(297 + 3 * math.e), 1 - math.log(298 + 2 * math.e), -math.log(300)]
    assert drawn.log_probs.tolist() == pytest.approx(expected, abs=1e-5)
    assert drawn.sampling_log_probs.tolist() == [0.0] * 3


@pytest.mark.parametrize(
    ("params", "kept_mass"),
    [
        (SamplingParams(top_p=0.7), 0.8),
        (SamplingParams(top_k=2), 0.8),
        (SamplingParams(min_p=0.5), 0.8),
        (SamplingParams(min_p=0.61), 0.5),
        (SamplingParams(top_p=0.9), 1.0),
    ],
)
def test_the_distribution_drawn_from_is_renormalised(params, kept_mass):
    """RC41: top-p 0.7 of [0.5, 0.3, 0.2] gives token 0 the log-prob ln 0.5, drawn from ln 0.625."""
    drawn = sample(torch.tensor(PROBABILITIES).log().expand(200, -1), keys(200), params, whole(3))
    full = torch.tensor(PROBABILITIES)[drawn.tokens]
    assert drawn.tokens.max() == {0.5: 0, 0.8: 1, 1.0: 2}[kept_mass]
    torch.testing.assert_close(drawn.log_probs, full.log(), rtol=0, atol=1e-6)
    torch.testing.assert_close(drawn.sampling_log_probs, (full / kept_mass).log(), rtol=0, atol=1e-6)
    assert drawn.entropies is None


@pytest.mark.parametrize("temperature", [0.0, 0.5, 1.0, 3.0])
def test_entropies_are_those_of_the_full_distribution(temperature):
    logits = random_logits(40, 300)
    logits[5:10, 100:] = -torch.inf  # whole blocks, and parts of one
    logits[10:15] *= 3e3  # up to 1e4 apart
    logits[15:20] += 1e4
    logits[20] = 0.0
    params = SamplingParams(temperature=temperature, top_k=5, repetition_penalty=1.5, entropies=True)
    drawn = sample(logits, keys(40), params, whole(300), seen=seen_ids(40, 300))
    probabilities = (logits.double() / (temperature or 1.0)).softmax(-1)
    torch.testing.assert_close(drawn.entropies, torch.special.entr(probabilities).sum(-1).float(), rtol=0, atol=1e-5)
    assert drawn.entropies[20] == pytest.approx(math.log(300), abs=1e-6)
    assert drawn.entropies.dtype == torch.float32


@pytest.mark.parametrize("num_ids", [1, 3, 127, 129])
def test_logits_of_any_size_and_width_are_drawn_from(num_ids):
    for scale in (0.0, 1e-30, 1e4 / 9):
        logits = scale * random_logits(30, num_ids)
        for params in VARIANTS.values():
            drawn = sample(logits, keys(30), params, whole(num_ids), seen=seen_ids(30, num_ids))
            assert ((drawn.tokens >= 0) & (drawn.tokens < num_ids)).all()
            assert torch.isfinite(torch.stack([drawn.log_probs, drawn.sampling_log_probs])).all()
            expected = (logits.double() / params.score_temperature).log_softmax(-1).gather(1, drawn.tokens[:, None])
            torch.testing.assert_close(drawn.log_probs, expected[:, 0].float(), rtol=1e-6, atol=1e-6)


def test_ids_at_minus_infinity_are_never_drawn():
    logits = random_logits(200, 300)
    logits[:, ::2] = -torch.inf
    logits[:, 128:256] = -torch.inf
    for name, params in VARIANTS.items():
        tokens = sample(logits, keys(200), params, whole(300), seen=seen_ids(200, 300)).tokens
        assert (tokens % 2 == 1).all(), name
        assert ((tokens < 128) | (tokens >= 256)).all(), name


def test_a_row_of_nan_shows_in_its_log_probs_and_harms_no_other():
    logits, seen = random_logits(20, 300), seen_ids(20, 300)
    broken = logits.clone()
    broken[7] = torch.nan
    broken[8, 299] = torch.nan
    whole_rows = torch.tensor([row not in (7, 8) for row in range(20)])
    for name, params in VARIANTS.items():
        expected = sample(logits, keys(20), params, whole(300), seen=seen)
        drawn = sample(broken, keys(20), params, whole(300), seen=seen)
        assert torch.equal(drawn.tokens[whole_rows], expected.tokens[whole_rows]), name
        assert torch.equal(drawn.log_probs[whole_rows], expected.log_probs[whole_rows]), name
        assert ((drawn.tokens >= 0) & (drawn.tokens < 300)).all(), name
        assert drawn.log_probs[~whole_rows].isnan().all(), name


def sample_on_rank(world, num_ids: int) -> dict[str, Draws]:
    """Run on one tensor rank: its columns of `random_logits`, two draws from each row, in every variant."""
    logits = random_logits(100, num_ids)
    logits[:50, 3] = logits[:50, -1] = logits[:50].amax(1) + 0.5  # a tie between the first shard and the last
    mine, shard = columns_of_rank(logits, build_mesh(Layout(world.world_size), world))
    rows, seen = torch.arange(200) // 2, seen_ids(100, num_ids)
    return {name: sample(mine, keys(200), params, shard, rows, seen) for name, params in VARIANTS.items()}


@pytest.mark.parametrize(
    ("num_ids", "num_real"),
    [(300, [256, 44]), (512, [256, 256]), (257, [256, 1]), (256, [128, 128]), (100, [100, 0])],
    ids=["300", "512", "one id on rank 1", "256", "rank 1 all padding"],
)
def test_draws_do_not_depend_on_the_tensor_size(workers, num_ids, num_real):
    assert padded_vocab_size(num_ids, 2) == 2 * (256 if num_ids > 256 else 128)
    assert sum(num_real) == num_ids
    (alone,) = workers.run(sample_on_rank, 1, num_ids)
    for rank in workers.run(sample_on_rank, 2, num_ids):
        for name, drawn in rank.items():
            assert torch.equal(drawn.tokens, alone[name].tokens), name
            for field in ("log_probs", "sampling_log_probs", "entropies"):
                torch.testing.assert_close(
                    getattr(drawn, field), getattr(alone[name], field), rtol=0, atol=1e-6, msg=f"{name}: {field}"
                )
    assert set(alone["greedy"].tokens[:100].tolist()) == {3}
    assert len(alone["temperature 1"].tokens.unique()) > 30


def count_collectives(world) -> dict[str, tuple[int, int]]:
    """All-gathers and all-reduces of one step on a rank, by variant."""
    mine, shard = columns_of_rank(random_logits(4, 300), build_mesh(Layout(world.world_size), world))
    counts = {}
    for name, params in VARIANTS.items():
        with (
            patch.object(dist, "all_gather_into_tensor", wraps=dist.all_gather_into_tensor) as gathers,
            patch.object(dist, "all_reduce", wraps=dist.all_reduce) as reduces,
        ):
            sample(mine, keys(4), params, shard, seen=seen_ids(4, 300))
        counts[name] = gathers.call_count, reduces.call_count
    return counts


def test_a_step_takes_one_all_gather_and_few_more_collectives_if_it_truncates(workers):
    few = {"top-k 1": (3, 0), "top-k 5": (3, 0), "top-k 1000": (2, 0), "min-p 0.1": (2, 0), "all": (3, 0)}
    few |= {"top-p 0.7": (2, 4), "top-p 0.99, temperature 3": (2, 4), "top-k 20, top-p 0.5, temperature 2": (3, 0)}
    for rank in workers.run(count_collectives, 2):
        assert rank == {name: few.get(name, (1, 0)) for name in VARIANTS}


@pytest.mark.parametrize("name", ["penalty 1.3", "all", "top-p 0.99, temperature 3", "min-p 0.1"])
def test_the_distribution_drawn_from_is_that_of_transformers(name):
    """Its processors, in its order; every id seen is also drawn from."""
    from transformers.generation import logits_process

    params, logits, seen = VARIANTS[name], random_logits(30, 300), seen_ids(30, 300)
    logits.scatter_(1, seen.clamp(min=0), logits.amax(1, keepdim=True) - torch.rand(30, 11))
    processors = [logits_process.RepetitionPenaltyLogitsProcessor(params.repetition_penalty)]
    processors += [logits_process.TemperatureLogitsWarper(params.temperature)]
    processors += [logits_process.TopKLogitsWarper(params.top_k)] if params.top_k else []
    processors += [logits_process.TopPLogitsWarper(params.top_p)] if params.top_p < 1 else []
    processors += [logits_process.MinPLogitsWarper(params.min_p)] if params.min_p else []
    rows = torch.arange(30).repeat_interleave(200)
    drawn = sample(logits, keys(6000), params, whole(300), rows, seen)
    for row in range(30):
        scores = logits[row : row + 1].clone()
        for processor in processors:
            scores = processor(seen[row : row + 1, : row % 11 + 1], scores)
        tokens = drawn.tokens[rows == row]
        expected = scores[0].log_softmax(-1)[tokens]
        torch.testing.assert_close(drawn.sampling_log_probs[rows == row], expected, rtol=0, atol=1e-5)
    full = (logits / params.temperature).log_softmax(-1)[rows, drawn.tokens]
    torch.testing.assert_close(drawn.log_probs, full, rtol=0, atol=1e-5)


def test_a_penalty_divides_positive_and_multiplies_negative_logits():
    """CTRL: logits [2, -1, 1] of which 0 and 1 were seen become [1, -2, 1] under a penalty of 2."""
    logits, seen = torch.tensor([[2.0, -1.0, 1.0]]), torch.tensor([[1, 0, -1, 0]])
    rows, params = torch.zeros(300).long(), SamplingParams(repetition_penalty=2.0)
    drawn = sample(logits, keys(300), params, whole(3), rows, seen)
    assert set(drawn.tokens.tolist()) == {0, 1, 2}
    penalised, full = torch.tensor([1.0, -2.0, 1.0]).log_softmax(0), logits[0].log_softmax(0)
    torch.testing.assert_close(drawn.sampling_log_probs, penalised[drawn.tokens], rtol=0, atol=1e-6)
    torch.testing.assert_close(drawn.log_probs, full[drawn.tokens], rtol=0, atol=1e-6)
    greedy = SamplingParams(repetition_penalty=2.1, temperature=0.0)
    assert sample(logits, keys(1), greedy, whole(3), seen=seen).tokens.tolist() == [2]


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
    drawn = sample(shard.logits(rows, weight), keys(2000), params, shard)
    trained, _ = vocab_parallel_log_probs(model, rows, drawn.tokens, temperature)
    return {
        "tokens": drawn.tokens,
        "sampled": drawn.log_probs,
        "drawn from": drawn.sampling_log_probs,
        "trained": trained,
    }


@pytest.mark.parametrize("tensor_size", [1, 2])
@pytest.mark.parametrize(
    ("temperature", "expected"),
    [(1.0, [math.log(0.5), math.log(0.3)]), (0.5, [math.log(0.25 / 0.38), math.log(0.09 / 0.38)])],
)
def test_sampler_reports_the_log_probs_that_training_computes(workers, tensor_size, temperature, expected):
    """RC41: over the whole vocabulary on both sides; at temperature 0.5 the probabilities are squared: ln 0.6579.

    The distribution drawn from is the nucleus {0, 1}: at temperature 1 token 0 has 0.5 / 0.8 = 0.625 of it.
    """
    for rank in workers.run(both_sides, tensor_size, temperature, torch.float32):
        tokens, sampled, trained = rank["tokens"], rank["sampled"], rank["trained"]
        assert set(tokens.tolist()) == {0, 1}
        assert sampled.dtype == trained.dtype == torch.float32
        for token in (0, 1):
            torch.testing.assert_close(
                sampled[tokens == token], torch.full_like(sampled, expected[token])[tokens == token]
            )
        assert (trained - sampled).exp().tolist() == pytest.approx([1.0] * 2000, abs=1e-6)
        share = {1.0: 0.625, 0.5: 0.25 / 0.34}[temperature]
        expected_drawn = torch.tensor([math.log(share), math.log(1 - share)])[tokens]
        torch.testing.assert_close(rank["drawn from"], expected_drawn)
        assert abs(int((tokens == 0).sum()) - 2000 * share) < 5 * math.sqrt(2000 * share * (1 - share))


def test_stored_log_probs_are_fp32_also_in_a_bf16_model(workers):
    """RC41: the ln 0.3 of fp32 logits is not rounded to bf16's -1.203."""
    (rank,) = workers.run(both_sides, 1, 1.0, torch.bfloat16)
    assert rank["sampled"].dtype == torch.float32
    assert (rank["sampled"] != rank["sampled"].bfloat16()).all()
    assert (rank["trained"] - rank["sampled"]).abs().max() < 1e-6


def test_temperature_zero_is_argmax():
    """RC41"""
    greedy = SamplingParams(temperature=0.0, top_p=0.7)
    drawn = sample(torch.tensor(PROBABILITIES).log().expand(50, -1), keys(50), greedy, whole(3))
    assert drawn.tokens.tolist() == [0] * 50
    assert drawn.log_probs.tolist() == pytest.approx([math.log(0.5)] * 50)


@pytest.mark.parametrize("settings", [{}, {"temperature": 0.0}, {"top_k": 5}, {"top_p": 0.7}, {"min_p": 0.05}])
def test_rounded_logits_are_drawn_from_as_the_same_numbers_in_fp32(settings):
    """Conversion is exact, so nothing else may differ."""
    params = SamplingParams(seed=3, entropies=True, **settings)
    shard = whole(1000)
    rounded = torch.randn(40, 1000, generator=torch.Generator().manual_seed(1)).bfloat16()
    found, expected = (sample(logits, keys(40), params, shard) for logits in (rounded, rounded.float()))
    for name in ("tokens", "log_probs", "sampling_log_probs", "entropies"):
        assert torch.equal(getattr(found, name), getattr(expected, name)), name
