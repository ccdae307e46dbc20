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
from rollout.requests import Completion, Request
from rollout.sampling import SamplingParams
from tests.rollout.engine_calls import PROMPTS, Call, load, run_one

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
    assert run_one(workers, folder, bad=call)["bad"].refusal == "prompt 1: max_new_tokens -1, allowed: from 0"


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
    return sum(cache.num_bytes for cache in caches), tokens, per_token, cache_tokens(models, mesh, 8, 64)


@pytest.mark.parametrize("layout", [Layout(), Layout(2)], ids=["TP1", "TP2"])
def test_the_cache_is_as_large_as_predicted(workers, folder, layout):
    """A token costs keys and values of 4 layers, 2 heads of 16 numbers over the tensor ranks, 4 bytes each."""
    for used, tokens, per_token, most in workers.run(measure, layout.model_parallel_size, folder, layout):
        assert per_token == 2 * 4 * 2 * 16 * 4 // layout.tensor_model_parallel_size
        assert used == tokens * per_token
        assert most == most_cache_tokens(8, 64) == 2 * 8 * 128
        assert tokens <= most
