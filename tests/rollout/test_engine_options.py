"""What requests and engines can ask for: limits and stops of their own, stop strings, streams, a kept cache."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from parallel.launch import World
from parallel.mesh import Layout, build_mesh
from rollout.engine import Engine
from rollout.memory import cache_bytes_per_token, cache_tokens, most_cache_tokens
from rollout.requests import Completion, Paused, Request
from rollout.sampling import SamplingParams
from tests.rollout.engine_calls import PROMPTS, Call, load, run_calls, run_one

PARAMS = SamplingParams(max_new_tokens=9, seed=4)
ALL = [Request(number, prompt, 2) for number, prompt in enumerate(PROMPTS)]


def test_a_request_may_have_its_own_limit_and_stop_tokens(workers, folder):
    plain = run_one(workers, folder, plain=Call(ALL, PARAMS))["plain"].completions
    stop = plain[2].tokens[4]
    own = [
        replace(ALL[0], max_new_tokens=0),
        replace(ALL[1], stop_token_ids=(stop,)),
        replace(ALL[2], max_new_tokens=4),
    ]
    done = run_one(workers, folder, own=Call([*own, *ALL[3:]], PARAMS))["own"].completions
    assert [len(c.tokens) for c in done[:2]] == [0, 0]
    assert done[2].tokens == plain[2].tokens[: plain[2].tokens.index(stop) + 1]
    assert done[2].finish_reason == "stop"
    assert [c.tokens for c in done[4:6]] == [c.tokens[:4] for c in plain[4:6]]
    assert [c.finish_reason for c in done[4:6]] == ["length"] * 2
    assert [c.tokens for c in done[6:]] == [c.tokens for c in plain[6:]]


def test_a_negative_limit_is_refused(workers, folder):
    call = Call([replace(ALL[1], max_new_tokens=-1)], PARAMS)
    assert run_one(workers, folder, bad=call)["bad"].refusal == "prompt 1: max_new_tokens -1, allowed: integers from 0"


def test_a_request_larger_than_the_cache_is_refused_before_anything_runs(workers, folder):
    call = Call(ALL, replace(PARAMS, max_new_tokens=50), max_cache_tokens=40, cache_page_tokens=8)
    refusal = run_one(workers, folder, bad=call)["bad"].refusal
    assert "max_cache_tokens: got 40 per lane; allowed for a prompt of 3 tokens and a response of 50: from " in refusal


def spell(tokens: Sequence[int]) -> str:
    """Two letters for each id; id 7 has no text, as special tokens may."""
    return "".join("" if token == 7 else f"{chr(97 + token // 26)}{chr(97 + token % 26)}" for token in tokens)


def with_stop_strings(world: World, folder: Path, stop_strings: tuple[str, ...]) -> list[Completion]:
    mesh = build_mesh(Layout(), world)
    engine = Engine(load(folder, mesh), mesh, context_length=64, decode=spell)
    return engine.generate(ALL, replace(PARAMS, stop_strings=stop_strings))


def test_a_response_ends_with_the_token_that_completes_a_stop_string(workers, folder):
    (plain,) = workers.run(with_stop_strings, 1, folder, ())
    text = spell(plain[3].tokens)
    across = text[5:8]  # from the middle of a token on, over the border of two
    (done,) = workers.run(with_stop_strings, 1, folder, ("no such text", across))
    for completion, whole in zip(done, plain, strict=True):
        ends = [n for n in range(1, len(whole.tokens) + 1) if across in spell(whole.tokens[:n])]
        expected = whole.tokens[: ends[0]] if ends else whole.tokens
        assert completion.tokens == expected
        assert completion.finish_reason == ("stop" if ends else "length")
    assert done[3].finish_reason == "stop"
    assert len(done[3].tokens) < 9


def test_stop_strings_need_an_engine_that_can_decode(workers, folder):
    call = Call(ALL, replace(PARAMS, stop_strings=("x",)))
    refusal = run_one(workers, folder, bad=call)["bad"].refusal
    assert refusal == "stop_strings: got some, allowed with this engine: none (it has no `decode`)"


def test_entropies_and_sampling_log_probs_come_on_request(workers, folder):
    done = run_one(
        workers,
        folder,
        plain=Call(ALL, PARAMS),
        asked=Call(ALL, replace(PARAMS, entropies=True, top_k=2)),
    )
    for completion in done["plain"].completions:
        assert completion.entropies is None
        assert torch.equal(completion.sampling_log_probs, completion.log_probs)
    for completion in done["asked"].completions:
        assert completion.entropies.shape == completion.log_probs.shape
        assert (completion.entropies > 0).all()
        assert (completion.sampling_log_probs > completion.log_probs).all()  # two ids share what 150 had


def stream(world: World, folder: Path) -> tuple[list[Completion], list[Completion], list[int]]:
    """Everything streamed; the first completion of a stream that is then closed; cache bytes of three rollouts."""
    mesh = build_mesh(Layout(), world)
    models = load(folder, mesh)
    engine = Engine(models, mesh, context_length=64)
    requests = [replace(request, max_new_tokens=9 - 2 * number) for number, request in enumerate(ALL)]
    streamed = list(engine.stream(requests, PARAMS))
    broken_off = engine.stream(requests, PARAMS)
    first = [next(broken_off)]
    broken_off.close()
    keeping = Engine(models, mesh, context_length=64, keep_cache=True)
    sizes = []
    for _ in range(3):
        with keeping.start(PARAMS) as rollout:
            rollout.add(requests)
            first_size = rollout.cache_bytes
            while rollout.busy:
                rollout.step()
                first_size = first_size or rollout.cache_bytes
            sizes.append(first_size)
    again = engine.generate(requests, PARAMS)
    assert [c.tokens for c in again] == [
        c.tokens for c in sorted(streamed, key=lambda c: (c.prompt_id, c.sample_index))
    ]
    return streamed, first, sizes


def test_completions_stream_as_they_finish_and_a_stream_can_be_broken_off(workers, folder):
    ((streamed, first, sizes),) = workers.run(stream, 1, folder)
    assert [c.prompt_id for c in streamed] == [4, 4, 3, 3, 2, 2, 1, 1, 0, 0]
    assert first[0].prompt_id == 4
    assert sizes[0] < sizes[1] == sizes[2]  # a kept cache has its full size from the start


def measure(world: World, folder: Path, layout: Layout) -> tuple[int, int, int, int]:
    mesh = build_mesh(layout, world)
    models = load(folder, mesh)
    engine = Engine(models, mesh, context_length=64, max_sequences=8, keep_cache=True)
    engine.generate(ALL, PARAMS)
    (caches,) = engine.kept.caches
    tokens = sum(tier.tokens for tier in (caches[0].prefix, caches[0].suffix))
    num_layers = sum(len(model.decoder.layers) for model in models)
    per_token = cache_bytes_per_token(models[0].shape, layout, num_layers, 4)
    return sum(cache.num_bytes for cache in caches), tokens, per_token, cache_tokens(models, mesh, 8, [128])


@pytest.mark.parametrize("layout", [Layout(), Layout(2)], ids=["TP1", "TP2"])
def test_the_cache_is_as_large_as_predicted(workers, folder, layout):
    """A token costs keys and values of 4 layers, 2 heads of 16 numbers over the tensor ranks, 4 bytes each."""
    for used, tokens, per_token, most in workers.run(measure, layout.model_parallel_size, folder, layout):
        assert per_token == 2 * 4 * 2 * 16 * 4 // layout.tensor_model_parallel_size
        assert used == tokens * per_token
        assert most == most_cache_tokens(8, [128]) == 2 * 8 * 128
        assert tokens <= most


@pytest.mark.parametrize(
    ("request_", "refusal"),
    [
        (Request(0, [5, 150, 7]), "prompt 0: token id 150, allowed: integers from 0 to 149"),
        (Request(0, [5, -1, 7]), "prompt 0: token id -1, allowed: integers from 0 to 149"),
        (Request(0, [5, 1.5]), "prompt 0: token id 1.5, allowed: integers from 0 to 149"),
        (Request(0, [5], num_samples=0), "prompt 0: num_samples 0, allowed: integers from 1"),
        (Request(0, [5], max_new_tokens=1.5), "prompt 0: max_new_tokens 1.5, allowed: integers from 0"),
        (
            Paused(Request(0, [5]), 0, (200,), ((0.0, 0.0, 0.0),), (0,)),
            "prompt 0: token id 200, allowed: integers from 0 to 149",
        ),
        (
            Paused(Request(0, [5]), 0, (20, 21), ((0.0, 0.0, 0.0),), (0, 0)),
            "prompt 0: tokens, scores, versions of a pause: got 2, 1, 2; as many each",
        ),
    ],
)
def test_what_no_model_could_answer_is_refused_on_every_rank_before_anything_runs(workers, folder, request_, refusal):
    """An id outside the vocabulary would stop the first stage alone, and the others would wait."""
    calls = {"bad": Call([request_], PARAMS), "next": Call(ALL[:1], PARAMS)}
    for done in workers.run(run_calls, 2, Layout(1, 2), folder, calls):
        assert done["bad"].refusal == refusal
        assert [len(tokens) for tokens in done["next"].tokens] == [9, 9]


def break_off(world: World, folder: Path, keep_cache: bool) -> tuple[str, bool, str]:
    """Error of a rollout interrupted in a step, whether the next is right, and error of a step after the end."""
    mesh = build_mesh(Layout(), world)
    engine = Engine(load(folder, mesh), mesh, context_length=64, keep_cache=keep_cache)
    expected = [completion.tokens for completion in engine.generate(ALL, PARAMS)]
    rollout = engine.start(PARAMS)
    rollout.add(ALL)
    rollout.step()
    rollout._append = interrupt
    with pytest.raises(KeyboardInterrupt) as interrupted:
        rollout.step()
    rollout.close()
    with pytest.raises(RuntimeError) as closed:
        rollout.step()
    right = [completion.tokens for completion in engine.generate(ALL, PARAMS)] == expected
    return str(interrupted.value), right, str(closed.value)


def interrupt(*_: object) -> bool:
    raise KeyboardInterrupt("by hand")


@pytest.mark.parametrize("keep_cache", [False, True])
def test_an_error_in_a_step_is_reported_as_it_is_and_the_engine_goes_on(workers, folder, keep_cache):
    ((interrupted, right, closed),) = workers.run(break_off, 1, folder, keep_cache)
    assert (interrupted, right) == ("by hand", True)
    assert closed == "this rollout is closed; start another one with Engine.start"


@pytest.mark.parametrize(("max_sequences", "num_lanes", "page"), [(1, 2, 128), (2, 7, 128), (1, 1, 1000)])
def test_the_default_cache_holds_whatever_fits_into_the_context(workers, folder, max_sequences, num_lanes, page):
    few = Call(ALL, PARAMS, max_sequences=max_sequences, num_lanes=num_lanes, cache_page_tokens=page)
    done = run_one(workers, folder, few=few, plain=Call(ALL, PARAMS))
    assert done["few"].refusal is None
    assert done["few"].tokens == done["plain"].tokens


def test_prompt_log_probs_carry_no_graph(workers, folder):
    call = Call([*ALL, Request(9, [3])], replace(PARAMS, prompt_log_probs=True))
    for completion in run_one(workers, folder, scored=call)["scored"].completions:
        assert not completion.prompt_log_probs.requires_grad
