"""Where a response's tokens come from and end: data ranks, the context limit, pauses, padded prompts."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from parallel.launch import World
from parallel.log_probs import score_tokens
from parallel.mesh import Layout, build_mesh
from parallel.pack import pack_sequences, unpad
from parallel.schedule import forward
from rollout.engine import Engine
from rollout.requests import Paused, Request
from rollout.sampling import SamplingParams
from tests.rollout.engine_calls import PROMPTS, Call, load, run_one
from tests.tiny_model import draw_sequences


def answers_of_rank(
    world: World, folder: Path, params: Sequence[SamplingParams], num_copies: int
) -> list[list[list[int]]]:
    """Copy `rank` (or copies 0 .. num_copies - 1) of one prompt, under each of the params."""
    mesh = build_mesh(Layout(), world)
    request = Request(7, PROMPTS[1], num_samples=num_copies, first_sample=mesh.data_rank)
    engine = Engine(load(folder, mesh), mesh, context_length=64)
    return [[completion.tokens for completion in engine.generate([request], each)] for each in params]


def test_copies_of_a_prompt_on_two_data_ranks_get_different_answers_that_the_seed_fixes(workers, folder):
    """RC38: the random numbers are a function of (seed, prompt id, sample index, position), not of the rank."""
    params = [SamplingParams(max_new_tokens=16, seed=seed) for seed in (1, 1, 2)]
    ranks = workers.run(answers_of_rank, 2, folder, params, 1)
    (together,) = workers.run(answers_of_rank, 1, folder, params, 2)
    (first, _), (again, _), (other, _) = ([rank[run][0] for rank in ranks] for run in range(3))
    assert len(first) == 16
    for run in range(3):
        assert ranks[0][run] != ranks[1][run]
        assert [ranks[0][run][0], ranks[1][run][0]] == together[run]
    assert first == again
    assert first != other


CONTEXT_16 = SamplingParams(max_new_tokens=8, seed=1)


def rc43_calls() -> dict[str, Call]:
    prompts = {length: draw_sequences([length], seed=length)[0].tolist() for length in (8, 10, 16, 17)}
    scored = replace(CONTEXT_16, prompt_log_probs=True)
    both = [Request(1, prompts[16]), Request(0, prompts[10])]
    calls = {f"{length} tokens": Call([Request(0, prompts[length])], CONTEXT_16) for length in (10, 16, 17)}
    calls["unbroken"] = Call([Request(0, prompts[8])], CONTEXT_16)
    calls["paused"] = Call([Request(0, prompts[8])], replace(CONTEXT_16, max_new_tokens=3))
    calls["scored only"] = Call(both, replace(scored, max_new_tokens=0))
    calls["scored"] = Call(both, scored)
    return {name: replace(call, context_length=16) for name, call in calls.items()}


def test_prompt_and_response_together_stay_within_the_context(workers, folder):
    """RC43: context 16, at most 8 new tokens."""
    done = run_one(workers, folder, **rc43_calls())
    assert len(done["10 tokens"].tokens[0]) == 6
    assert done["10 tokens"].completions[0].finish_reason == "length"
    assert done["16 tokens"].tokens == [[]]
    assert done["17 tokens"].refusal == "prompt 0: 17 tokens, allowed: 1 to context_length 16"
    assert len(done["unbroken"].tokens[0]) == 8
    written = {name: call.written for name, call in done.items()}
    # The last token is never fed back, so the prompt of 10 needs 15 places; that of 16 needs a pass only to be scored.
    assert written == {
        "10 tokens": [15],
        "16 tokens": [],
        "17 tokens": [],
        "unbroken": [15],
        "paused": [10],
        "scored only": [16 + 10],
        "scored": [10 + 15],  # the prompt of 16 is done at once; the other one takes its place
    }


def test_prompts_are_scored_whole_with_and_without_new_tokens(workers, folder):
    """RC43: max new tokens 0, prompt log-probs wanted."""
    done = run_one(workers, folder, **rc43_calls())
    assert done["scored only"].tokens == [[], []]
    assert done["scored"].tokens == [[], done["10 tokens"].tokens[0]]  # the first ends before any token is drawn
    for only, with_response, length in zip(
        *(done[n].completions for n in ("scored only", "scored")), (16, 10), strict=True
    ):
        assert only.log_probs.shape == (0,)
        assert only.prompt_log_probs.shape == (length - 1,)
        assert (only.prompt_log_probs < 0).all()
        torch.testing.assert_close(only.prompt_log_probs, with_response.prompt_log_probs, rtol=0, atol=1e-5)


def test_a_paused_response_goes_on_as_if_it_had_not_paused(workers, folder):
    """RC43: paused after 3 tokens, then 5 more: 8 in total."""
    call = rc43_calls()["unbroken"]
    done = run_one(workers, folder, unbroken=call, paused=replace(call, pause_after=3))
    (unbroken,), (resumed,) = done["unbroken"].completions, done["paused"].completions
    (paused,) = done["paused"].paused
    assert isinstance(paused, Paused)
    assert len(paused.tokens) == 3
    assert (len(resumed.tokens), resumed.versions) == (8, [1] * 3 + [2] * 5)
    assert resumed.tokens == unbroken.tokens
    torch.testing.assert_close(resumed.log_probs, unbroken.log_probs, rtol=0, atol=1e-5)
    assert done["paused"].written == [15]  # the prompt, 3 tokens and 4 of the next 5


def test_a_paused_response_at_its_limit_only_ends(workers, folder):
    call = rc43_calls()["unbroken"]
    request = call.requests[0]
    full = Paused(request, 0, tuple(range(8)), ((-1.0, -1.0, 0.0),) * 8, (0,) * 8)
    scored = replace(CONTEXT_16, prompt_log_probs=True)
    done = run_one(
        workers, folder, full=replace(call, requests=[full]), scored=replace(call, requests=[full], params=scored)
    )
    for name in ("full", "scored"):
        (completion,) = done[name].completions
        assert (completion.tokens, completion.finish_reason) == (list(range(8)), "length")
    assert done["full"].written == []
    assert done["scored"].completions[0].prompt_log_probs.shape == (7,)


def left_padded(sequences: Sequence[Sequence[int]], seed: int) -> tuple[Tensor, Tensor]:
    """Token ids `[B, S]` with random ids in the padding on the left, and their attention mask."""
    longest = max(len(sequence) for sequence in sequences)
    token_ids = torch.stack(draw_sequences([longest] * len(sequences), seed))
    mask = torch.zeros_like(token_ids)
    for row, sequence in enumerate(sequences):
        token_ids[row, longest - len(sequence) :] = torch.tensor(sequence)
        mask[row, longest - len(sequence) :] = 1
    return token_ids, mask


def score_padded(
    world: World, folder: Path, token_ids: Tensor, mask: Tensor, num_scored: int
) -> dict[str, list[Tensor]]:
    """Log-probs of the last `num_scored` tokens of each row: in one pack, in a padded pack, and each row alone."""
    mesh = build_mesh(Layout(), world)
    rows = [torch.tensor(row) for row in unpad(token_ids, mask)]
    masks = [torch.arange(len(row)) >= len(row) - num_scored for row in rows]
    packs = [pack_sequences(rows, masks), pack_sequences(rows, masks, pad_to_multiple=64)]
    packs += [pack_sequences([row], [wanted]) for row, wanted in zip(rows, masks, strict=True)]
    packed, padded, *alone = forward(load(folder, mesh), packs, lambda *given: score_tokens(*given)[0])
    return {"packed": packed, "padded": padded, "alone": torch.cat(alone)}


def test_left_padded_prompts_give_what_each_prompt_gives_alone(workers, folder):
    """RC44: prompts of 3, 5 and 9 tokens padded to 9, greedy 6 tokens; then all log-probs again."""
    greedy, prompts = SamplingParams(temperature=0.0, max_new_tokens=6), PROMPTS[:3]
    batches = {f"padded {seed}": unpad(*left_padded(prompts, seed)) for seed in (1, 2)}
    assert batches["padded 1"] == batches["padded 2"] == prompts
    calls = {name: Call([Request(n, p) for n, p in enumerate(batch)], greedy) for name, batch in batches.items()}
    calls |= {f"alone {number}": Call([Request(number, prompt)], greedy) for number, prompt in enumerate(prompts)}
    done = run_one(workers, folder, **calls)
    alone = [done[f"alone {number}"] for number in range(3)]
    tokens, log_probs = [each.tokens[0] for each in alone], torch.cat([each.log_probs for each in alone])
    for name in batches:
        assert done[name].tokens == tokens
        torch.testing.assert_close(done[name].log_probs, log_probs, rtol=0, atol=1e-5)
    for seed in (3, 4):
        sequences = [prompt + response for prompt, response in zip(prompts, tokens, strict=True)]
        (scored,) = workers.run(score_padded, 1, folder, *left_padded(sequences, seed), 6)
        for name, values in scored.items():
            torch.testing.assert_close(
                values, log_probs, rtol=0, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}"
            )
