"""The engine against transformers without a cache, against the training pass, and against itself on other layouts."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from parallel.mesh import Layout
from rollout.engine import Engine
from rollout.requests import Request
from rollout.sampling import SamplingParams
from tests.rollout.engine_calls import PROMPTS, Call, Done, run_calls, run_one
from tests.tiny_model import load_transformers

LAYOUTS = {
    "TP1": Layout(),
    "TP2": Layout(2),
    "TP2, sequence parallel": Layout(2, sequence_parallel=True),
    "PP2": Layout(1, 2),
    "PP2 with 2 virtual stages": Layout(1, 2, 2),
}
GREEDY = SamplingParams(temperature=0.0, max_new_tokens=6)
SAMPLED = SamplingParams(max_new_tokens=9, stop_token_ids=tuple(range(0, 150, 10)), seed=4)


def each_alone(requests: Sequence[Request], call: Call) -> dict[str, Call]:
    """One call per response."""
    alone = [
        replace(request, num_samples=1, first_sample=index)
        for request in requests
        for index in range(request.first_sample, request.first_sample + request.num_samples)
    ]
    return {f"alone {number}": replace(call, requests=[request]) for number, request in enumerate(alone)}


GROUPS = [Request(10 + number, prompt, num_samples=3) for number, prompt in enumerate(PROMPTS)]
CALLS = {
    "greedy": Call([Request(number, prompt) for number, prompt in enumerate(PROMPTS)], GREEDY, score=True),
    "sampled": Call(GROUPS, SAMPLED, score=True),
    "temperature 0.6, top-p 0.8": Call(
        GROUPS, replace(SAMPLED, temperature=0.6, top_p=0.8, prompt_log_probs=True), score=True
    ),
    "4 at a time": Call(GROUPS, SAMPLED, max_sequences=4),
    "shuffled": Call([GROUPS[number] for number in (3, 0, 4, 2, 1)], SAMPLED),
    # Responses reserve 2, 4, 8, 16 tokens as they grow, prompts 2, 4, 8, 16.
    "small cache": Call(
        GROUPS, SAMPLED, max_cache_tokens=48, cache_page_tokens=2, max_prefill_tokens=7, num_lanes=1, score=True
    ),
    "small cache, lanes": Call(GROUPS, SAMPLED, max_cache_tokens=96, cache_page_tokens=2, num_lanes=2),
    "one lane": Call(GROUPS, SAMPLED, num_lanes=1),
    "three lanes": Call(GROUPS, SAMPLED, num_lanes=3),
    "paused": Call(GROUPS, SAMPLED, pause_after=4, score=True),
    "small prefills": Call(GROUPS, SAMPLED, max_prefill_tokens=6),
    "prompt log-probs": Call(GROUPS, replace(SAMPLED, prompt_log_probs=True)),
    "nothing": Call([], SAMPLED),
    "no new token": Call(GROUPS, replace(SAMPLED, max_new_tokens=0)),
}


@pytest.fixture(scope="module")
def on_one_rank(workers, folder) -> dict[str, Done]:
    (done,) = workers.run(run_calls, 1, Layout(), folder, CALLS | each_alone(GROUPS, CALLS["sampled"]))
    return done


@pytest.fixture(scope="module", params=LAYOUTS.values(), ids=LAYOUTS)
def on_all_ranks(request, workers, folder) -> list[dict[str, Done]]:
    """What each rank of a layout has after CALLS."""
    return workers.run(run_calls, request.param.model_parallel_size, request.param, folder, CALLS)


@torch.no_grad()
def greedy_without_cache(model: torch.nn.Module, prompt: list[int], num_tokens: int) -> tuple[list[int], list[float]]:
    """Argmax of transformers' logits over the whole sequence, again for each token."""
    tokens, log_probs = list(prompt), []
    for _ in range(num_tokens):
        scores = model(torch.tensor([tokens])).logits[0, -1].log_softmax(-1)
        tokens.append(int(scores.argmax()))
        log_probs.append(float(scores.max()))
    return tokens[len(prompt) :], log_probs


def test_greedy_tokens_equal_transformers_without_a_cache(on_all_ranks, folder):
    expected = [greedy_without_cache(load_transformers(folder), prompt, 6) for prompt in PROMPTS]
    for rank in on_all_ranks:
        assert rank["greedy"].tokens == [tokens for tokens, _ in expected]
        log_probs = torch.tensor([value for _, values in expected for value in values])
        torch.testing.assert_close(rank["greedy"].log_probs, log_probs, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", [name for name, call in CALLS.items() if call.score])
def test_rollout_log_probs_equal_those_of_the_training_pass(on_all_ranks, name):
    last_stages = [rank[name] for rank in on_all_ranks if rank[name].scored]
    assert last_stages
    for done in last_stages:
        torch.testing.assert_close(done.log_probs, torch.cat(done.scored), rtol=0, atol=1e-5)
        assert done.log_probs.dtype == torch.float32


def test_every_layout_draws_the_tokens_of_one_rank(on_all_ranks, on_one_rank):
    for rank in on_all_ranks:
        for name in CALLS:
            assert rank[name].tokens == on_one_rank[name].tokens, name
    for name in ("sampled", "temperature 0.6, top-p 0.8"):
        lengths = {len(tokens) for tokens in on_one_rank[name].tokens}
        assert len(lengths) > 3, "responses of many lengths are needed to test what follows"


SCHEDULES = [
    "4 at a time",
    "small prefills",
    "prompt log-probs",
    "small cache",
    "small cache, lanes",
    "one lane",
    "three lanes",
    "paused",
]


@pytest.mark.parametrize("name", SCHEDULES)
def test_how_work_is_scheduled_changes_nothing(on_all_ranks, name):
    """4 at a time cut through groups of 3; prompts of 9 tokens take two prefills of 6."""
    for rank in on_all_ranks:
        assert rank[name].tokens == rank["sampled"].tokens
        torch.testing.assert_close(rank[name].log_probs, rank["sampled"].log_probs, rtol=0, atol=1e-5)


def test_the_order_of_requests_changes_nothing_but_the_order_of_responses(on_all_ranks):
    for rank in on_all_ranks:
        shuffled = {(c.prompt_id, c.sample_index): c for c in rank["shuffled"].completions}
        assert [c.prompt_id for c in rank["shuffled"].completions[::3]] == [13, 10, 14, 12, 11]
        for completion in rank["sampled"].completions:
            assert shuffled[completion.prompt_id, completion.sample_index].tokens == completion.tokens


def test_the_small_cache_makes_responses_give_way(on_all_ranks):
    for rank in on_all_ranks:
        assert rank["small cache"].num_preempted > 1
        assert rank["small cache, lanes"].num_preempted > 0
        assert rank["sampled"].num_preempted == 0


def test_paused_responses_record_which_weights_drew_each_token(on_all_ranks):
    for rank in on_all_ranks:
        assert rank["paused"].paused
        versions = {tuple(sorted(set(c.versions))) for c in rank["paused"].completions}
        assert versions == {(1,), (1, 2)}
        assert all(c.versions == sorted(c.versions) for c in rank["paused"].completions)
        assert all(c.versions == [1] * len(c.tokens) for c in rank["sampled"].completions)


def test_responses_that_end_at_different_times_are_what_each_is_alone(on_one_rank):
    """Finished sequences leave holes that the last ones fill, in the list and in the cache."""
    together = on_one_rank["sampled"].completions
    for number, completion in enumerate(together):
        (alone,) = on_one_rank[f"alone {number}"].completions
        assert (alone.prompt_id, alone.sample_index) == (completion.prompt_id, completion.sample_index)
        assert alone.tokens == completion.tokens
        assert alone.finish_reason == completion.finish_reason
        torch.testing.assert_close(alone.log_probs, completion.log_probs, rtol=0, atol=1e-5)
    assert {completion.finish_reason for completion in together} == {"stop", "length"}


def test_responses_come_in_the_order_of_requests_and_samples_and_end_where_they_should(on_one_rank):
    completions = on_one_rank["sampled"].completions
    assert [(c.prompt_id, c.sample_index) for c in completions] == [(10 + n, i) for n in range(5) for i in range(3)]
    for completion in completions:
        *before, last = completion.tokens
        assert not set(before) & set(SAMPLED.stop_token_ids)
        stopped = last in SAMPLED.stop_token_ids
        assert completion.finish_reason == ("stop" if stopped else "length")
        assert stopped or len(completion.tokens) == 9
        assert len(completion.log_probs) == len(completion.tokens)


def test_samples_of_a_group_differ(on_one_rank):
    tokens = on_one_rank["sampled"].tokens
    assert len({tuple(response) for response in tokens}) == len(tokens)


@pytest.mark.parametrize(("name", "temperature"), [("prompt log-probs", 1.0), ("temperature 0.6, top-p 0.8", 0.6)])
def test_prompt_log_probs_equal_transformers(on_all_ranks, folder, name, temperature):
    model = load_transformers(folder)
    for prompt, group in zip(PROMPTS, range(0, 15, 3), strict=True):
        with torch.no_grad():
            scores = (model(torch.tensor([prompt])).logits[0, :-1] / temperature).log_softmax(-1)
        expected = scores.gather(1, torch.tensor(prompt[1:], dtype=torch.int64)[:, None])[:, 0]
        for rank in on_all_ranks:
            for completion in rank[name].completions[group : group + 3]:
                torch.testing.assert_close(completion.prompt_log_probs, expected, rtol=0, atol=1e-5)
    assert all(c.prompt_log_probs is None for rank in on_all_ranks for c in rank["sampled"].completions)


def test_no_request_and_no_new_token_give_nothing(on_all_ranks):
    for rank in on_all_ranks:
        assert rank["nothing"].completions == []
        assert rank["no new token"].tokens == [[]] * 15
        assert {c.finish_reason for c in rank["no new token"].completions} == {"length"}
        assert rank["nothing"].written == rank["no new token"].written == []


def test_one_request_object_given_twice_gets_the_same_responses_in_both_places(workers, folder):
    first, second = GROUPS[2], GROUPS[1]
    done = run_one(workers, folder, twice=Call([first, second, first], SAMPLED), once=Call([first, second], SAMPLED))
    assert done["twice"].tokens == done["once"].tokens + done["once"].tokens[:3]


def test_log_probs_of_a_bf16_model_are_kept_in_fp32(workers, folder):
    """RC41"""
    done = run_one(workers, folder, bf16=Call(GROUPS, SAMPLED, dtype=torch.bfloat16))["bf16"]
    assert done.log_probs.dtype == torch.float32
    assert (done.log_probs != done.log_probs.bfloat16()).float().mean() > 0.9


@pytest.mark.parametrize(
    "field", ["context_length", "max_sequences", "max_prefill_tokens", "max_cache_tokens", "num_lanes"]
)
def test_senseless_sizes_are_refused(field):
    sizes = {"context_length": 8, "max_sequences": 1} | {field: 0}
    with pytest.raises(ValueError, match=f"{field}: got 0, allowed: from 1"):
        Engine([], None, **sizes)


@pytest.mark.parametrize(("num_lanes", "tokens"), [(1, 80), (2, 10), (4, 5), (64, 1)])
def test_lanes_compute_prompts_in_smaller_parts(num_lanes, tokens):
    """While the first lane computes its first prompts, the stages behind have nothing to do."""
    sizes = {"max_prefill_tokens": 80, "num_lanes": num_lanes, "max_cache_tokens": 128 * num_lanes}
    rollout = Engine([], None, context_length=8, paged=False, **sizes).start(SamplingParams())
    assert rollout.scheduler.max_prefill_tokens == tokens


def test_an_empty_prompt_is_refused_on_every_rank_before_anything_runs(workers, folder):
    call = Call([Request(0, PROMPTS[0]), Request(1, [])], SAMPLED)
    for done in workers.run(run_calls, 2, Layout(1, 2), folder, {"empty": call, "next": CALLS["greedy"]}):
        assert done["empty"].refusal == "prompt 1: 0 tokens, allowed: 1 to context_length 64"
        assert len(done["next"].tokens) == 5
