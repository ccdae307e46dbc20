"""Decisions of the scheduler, step by step; no model: tests give the drawn tokens."""

import pytest

from rollout.columns import Columns
from rollout.requests import Paused, Request
from rollout.scheduler import Scheduler
from rollout.steps import Response, Step

WIDTHS = [4, 4, 8, 16, 32]


def new_scheduler(
    max_tokens: int = 1000, max_rows: int = 8, max_prefill_tokens: int = 100, num_lanes: int = 1
) -> Scheduler:
    return Scheduler(
        lambda: Columns(WIDTHS),
        num_lanes=num_lanes,
        max_rows=max_rows,
        max_tokens=max_tokens,
        max_prefill_tokens=max_prefill_tokens,
    )


def responses_to(*requests: Request, limit: int = 5) -> list[Response]:
    return [
        Response(request, index, limit, frozenset())
        for request in requests
        for index in range(request.first_sample, request.first_sample + request.num_samples)
    ]


def queue(scheduler: Scheduler, responses: list[Response]) -> list[Response]:
    for number, response in enumerate(responses):
        response.order = number
    scheduler.add(responses)
    return responses


def advance(scheduler: Scheduler, lane: int = 0) -> Step:
    """One step whose draws are all token 1."""
    step = scheduler.plan(scheduler.lanes[lane])
    assert step is not None
    for _, response in step.draws:
        response.tokens.append(1)
    scheduler.finish(scheduler.lanes[lane], step, [len(r.tokens) == r.limit for _, r in step.draws])
    return step


def prompt(number: int, length: int) -> tuple[int, ...]:
    return tuple(range(number, number + length))


def test_a_group_computes_its_prompt_once_and_then_decodes_together():
    scheduler = new_scheduler()
    queue(scheduler, responses_to(Request(0, prompt(10, 3), 2), Request(1, prompt(20, 2))))
    first = advance(scheduler)
    assert first.tokens == [10, 11, 12, 20, 21]
    assert first.positions == [0, 1, 2, 0, 1]
    assert [row for row, _ in first.draws] == [2, 2, 4]
    second = advance(scheduler)
    assert (second.tokens, second.positions) == ([1, 1, 1], [3, 3, 2])
    assert (second.suffix_lengths, second.prefix_of_row, second.prefix_lengths) == ([0, 0, 0], [0, 0, 1], [3, 2])
    third = advance(scheduler)
    assert (third.positions, third.suffix_lengths) == ([4, 4, 3], [1, 1, 1])


def test_equal_prompts_of_several_requests_share_a_prefix():
    scheduler = new_scheduler()
    queue(scheduler, responses_to(Request(0, prompt(10, 3)), Request(1, prompt(10, 3)), Request(2, prompt(20, 3))))
    assert advance(scheduler).tokens == [10, 11, 12, 20, 21, 22]
    assert advance(scheduler).prefix_of_row == [0, 0, 1]


def test_a_long_prompt_is_computed_in_chunks_while_others_decode_and_nobody_overtakes_it():
    scheduler = new_scheduler(max_prefill_tokens=4)
    queue(scheduler, responses_to(Request(0, prompt(10, 2)), Request(1, prompt(30, 9)), Request(2, prompt(20, 1))))
    steps = [advance(scheduler) for _ in range(4)]
    assert [step.tokens for step in steps] == [
        [10, 11, 30, 31],
        [1, 32, 33, 34, 35],
        [1, 36, 37, 38, 20],
        [1, 1, 1],
    ]
    assert [[(chunk.start, chunk.length) for chunk in step.chunks] for step in steps[:3]] == [
        [(0, 2), (0, 2)],
        [(2, 4)],
        [(6, 3), (0, 1)],
    ]
    assert [[r.request.prompt_id for _, r in step.draws] for step in steps] == [[0], [0], [0, 1, 2], [0, 1, 2]]


def test_finished_responses_make_room_for_waiting_ones_at_once():
    scheduler = new_scheduler(max_rows=2)
    responses = queue(scheduler, responses_to(*(Request(n, prompt(10 * n, 2)) for n in range(4)), limit=2))
    responses[0].limit = 1
    served = []
    while scheduler.busy:
        served.append([r.request.prompt_id for _, r in advance(scheduler).draws])
    assert served == [[0, 1], [1, 2], [2, 3], [3]]


def test_the_youngest_gives_way_and_comes_back_with_all_its_tokens():
    scheduler = new_scheduler(max_tokens=24)
    old, young = queue(scheduler, responses_to(Request(0, prompt(10, 3)), Request(1, prompt(20, 3)), limit=7))
    for _ in range(5):
        advance(scheduler)  # each holds 4 tokens of prompt and 4 of response
    assert (scheduler.num_preempted, len(young.tokens)) == (0, 5)
    step = advance(scheduler)  # the next token of both takes another column of 4: 24 tokens in all, which is the limit
    assert (len(step.draws), scheduler.num_preempted) == (2, 0)
    tight = new_scheduler(max_tokens=23)
    old, young = queue(tight, responses_to(Request(0, prompt(10, 3)), Request(1, prompt(20, 3)), limit=7))
    for _ in range(5):
        advance(tight)
    step = advance(tight)
    assert [response for _, response in step.draws] == [old]
    assert tight.num_preempted == 1
    assert len(young.tokens) == 5
    advance(tight)
    assert len(old.tokens) == 7
    step = advance(tight)
    assert (step.tokens, [r for _, r in step.draws]) == ([20, 21, 22, 1, 1, 1, 1, 1], [young])
    assert step.positions == list(range(8))
    step = advance(tight)
    assert (step.positions, len(young.tokens), tight.busy) == ([8], 7, False)


def test_a_response_that_cannot_fit_alone_is_refused_with_what_would_do():
    scheduler = new_scheduler(max_tokens=20, num_lanes=2)
    assert scheduler.check_fits(3, 6) == 12  # 4 for the prompt, 8 for all tokens but the last; with two tokens 8 and 4
    with pytest.raises(ValueError) as caught:
        scheduler.check_fits(3, 17)
    assert "max_cache_tokens: got 20 per lane" in str(caught.value)
    assert "a prompt of 3 tokens and a response of 17: from 36 per lane, 2 lanes" in str(caught.value)


@pytest.mark.parametrize(("prompt_length", "limit"), [(1, 1), (3, 9), (5, 20), (16, 16), (1, 60)])
def test_what_fits_runs_to_its_end_however_small_the_cache(prompt_length, limit):
    """Two responses in a cache that holds just one: they give way to each other without end or crash."""
    need = new_scheduler().check_fits(prompt_length, limit)
    scheduler = new_scheduler(max_tokens=need)
    requests = [Request(number, prompt(10 * number, prompt_length), 2) for number in range(2)]
    responses = queue(scheduler, responses_to(*requests, limit=limit))
    steps = 0
    while scheduler.busy:
        advance(scheduler)
        steps += 1
        assert steps < 100 * limit
    assert [len(response.tokens) for response in responses] == [limit] * 4


def test_lanes_share_one_queue():
    scheduler = new_scheduler(num_lanes=2, max_rows=1)
    queue(scheduler, responses_to(*(Request(n, prompt(10 * n, 2)) for n in range(3)), limit=2))
    served = []
    for turn in range(4):
        served.append([r.request.prompt_id for _, r in advance(scheduler, turn % 2).draws])
    assert served == [[0], [1], [0], [1]]
    assert [r.request.prompt_id for _, r in advance(scheduler, 1).draws] == [2]
    assert scheduler.plan(scheduler.lanes[0]) is None


def test_lanes_share_what_there_is_evenly():
    """5 prompts with 2 responses each, room for all in one lane: the first takes no more than half of the 10."""
    scheduler = new_scheduler(num_lanes=2, max_rows=16)
    queue(scheduler, responses_to(*(Request(n, prompt(10 * n, 2), 2) for n in range(5)), limit=3))
    for lane in (0, 1):
        advance(scheduler, lane)
    assert [len(lane.members) for lane in scheduler.lanes] == [4, 6]
    one_group = new_scheduler(num_lanes=2, max_rows=16)
    queue(one_group, responses_to(Request(0, prompt(0, 2), 8)))
    assert len(advance(one_group).draws) == 8  # a group shares its prompt: it isn't torn apart


def test_withdrawn_responses_come_out_in_order_and_can_be_queued_again():
    scheduler = new_scheduler(max_rows=3)
    everyone = queue(scheduler, responses_to(*(Request(n, prompt(10 * n, 2), 2) for n in range(3))))
    advance(scheduler)
    advance(scheduler)
    kept, out = everyone[:1], scheduler.withdraw(keep=1)
    assert out == everyone[1:]
    # Both prompts' first tokens were drawn together; the fourth response still waits for a row.
    assert [len(response.tokens) for response in everyone] == [2, 2, 2, 1, 0, 0]
    assert scheduler.num_unfinished == 1
    scheduler.add(out)
    while scheduler.busy:
        advance(scheduler)
    assert [len(response.tokens) for response in kept + out] == [5] * 6
    lane = scheduler.lanes[0]
    assert (lane.free, lane.members, list(lane.ready), lane.filling) == (1000, {}, [], [])


def test_a_pause_holds_all_that_is_needed_to_go_on():
    (response,) = responses_to(Request(4, (1, 2)))
    response.tokens, response.scores, response.versions = [7, 8], [(-1.0, -1.0, 0.5)] * 2, [3, 4]
    assert response.pause() == Paused(Request(4, (1, 2)), 0, (7, 8), ((-1.0, -1.0, 0.5),) * 2, (3, 4))
