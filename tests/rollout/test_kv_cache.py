"""The cache, driven by the scheduler, against causal attention written out.

Shapes: Hq = 4 query heads, Hkv = 2 key/value heads, D = 8 head size, S tokens of a sequence.
"""

import random

import pytest
import torch
from torch import Tensor

from rollout.columns import Columns
from rollout.kv_cache import KVCache
from rollout.requests import Request
from rollout.scheduler import Scheduler
from rollout.steps import Response, Step

HQ, HKV, D, SCALE = 4, 2, 8, 0.3
LAYERS = 2
WIDTHS = [2, 2, 4, 8, 16, 16]


def vectors(sequence: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """Query `[S, Hq, D]`, key and value `[S, Hkv, D]`; those of a token depend on it and on all before it."""
    parts = []
    for end in range(1, len(sequence) + 1):
        generator = torch.Generator().manual_seed(hash(sequence[:end]) % 2**40)
        parts.append(torch.randn(HQ + 2 * HKV, D, generator=generator))
    whole = torch.stack(parts)
    return whole[:, :HQ], whole[:, HQ : HQ + HKV], whole[:, HQ + HKV :]


def last_attended(sequence: tuple[int, ...]) -> Tensor:
    """`[Hq * D]`: the last token looks at its predecessors and itself; head h reads key/value head h // 2."""
    query, key, value = vectors(sequence)
    heads = []
    for head in range(HQ):
        weights = (SCALE * key[:, head // 2] @ query[-1, head]).softmax(0)
        heads.append(weights @ value[:, head // 2])
    return torch.cat(heads)


def new_cache(max_tokens: int, widths: list[int] = WIDTHS, dtype: torch.dtype = torch.float32) -> KVCache:
    return KVCache(LAYERS, HKV, D, widths=widths, max_tokens=max_tokens, scale=SCALE, like=torch.empty(0, dtype=dtype))


def attend(cache: KVCache, step: Step, sequences: list[tuple[int, ...]], padding: int = 0) -> Tensor:
    """Run a step through all layers; returns the last one's result."""
    cache.begin(step)
    parts = [torch.stack([vectors(sequence)[part][-1] for sequence in sequences])[:, None] for part in range(3)]
    parts = [torch.nn.functional.pad(part, (0, 0, 0, 0, 0, 0, 0, padding)) for part in parts]
    return [cache.attend(layer, *parts) for layer in range(LAYERS)][-1]


class Play:
    """Runs random responses to their end; the tokens are drawn from a generator, the model is `vectors`."""

    def __init__(self, seed: int, max_tokens: int, max_rows: int, max_prefill_tokens: int):
        self.chance = random.Random(seed)
        self.cache = self.make_cache(max_tokens)
        self.scheduler = Scheduler(
            self.make_book,
            num_lanes=1,
            max_rows=max_rows,
            max_tokens=max_tokens,
            max_prefill_tokens=max_prefill_tokens,
        )
        self.done: list[Response] = []
        self.largest_error = 0.0
        self.most_tokens = 0
        self.num_together = 0

    def make_cache(self, max_tokens: int):
        return new_cache(max_tokens)

    def make_book(self):
        return Columns(WIDTHS)

    def tokens_held(self) -> int:
        return self.cache.prefix.tokens + self.cache.suffix.tokens

    def run(self, responses: list[Response]) -> None:
        for number, response in enumerate(responses):
            response.order = number
            self.scheduler.check_fits(len(response.request.prompt), response.limit)
        self.scheduler.add(responses)
        (lane,) = self.scheduler.lanes
        while self.scheduler.busy:
            before = {id(prefix): prefix.filled for prefix in lane.prefixes.keys}
            step = self.scheduler.plan(lane)
            assert step is not None
            self.check(lane, step, before)
            ended = []
            for _, response in step.draws:
                response.tokens.append(self.chance.randrange(9))
                ended.append(len(response.tokens) == response.limit)
            self.done += self.scheduler.finish(lane, step, ended)

    def check(self, lane, step: Step, before: dict[int, int]) -> None:
        sequences = []
        for _, response in step.draws[: len(step.suffix_lengths)]:
            sequences.append((*response.request.prompt, *response.tokens))
        for chunk in step.chunks:
            known = tuple(lane.prefixes.keys[chunk.row].tokens)
            sequences += [known[: chunk.start + number + 1] for number in range(chunk.length)]
        found = attend(self.cache, step, sequences, padding=3)
        assert found.shape == (len(sequences) + 3, 1, HQ * D)
        assert (found[len(sequences) :] == 0).all()
        expected = torch.stack([last_attended(sequence) for sequence in sequences])
        self.largest_error = max(self.largest_error, float((found[: len(sequences), 0] - expected).abs().max()))
        self.most_tokens = max(self.most_tokens, self.tokens_held())
        self.num_together = max(self.num_together, len(step.suffix_lengths))


def random_responses(seed: int) -> list[Response]:
    chance = random.Random(seed)
    responses = []
    for number in range(8):
        prompt = tuple(chance.randrange(9) for _ in range(chance.choice([1, 2, 3, 5, 9, 17])))
        request = Request(number, prompt, num_samples=chance.choice([1, 3, 4]))
        for sample in range(request.num_samples):
            responses.append(Response(request, sample, chance.randint(1, 14), frozenset()))
    return responses


@pytest.mark.parametrize(
    ("max_tokens", "max_rows", "max_prefill_tokens"), [(2000, 64, 1000), (2000, 5, 4), (100, 64, 7), (70, 3, 1000)]
)
@pytest.mark.parametrize("seed", range(3))
def test_every_row_attends_to_its_own_tokens_within_the_memory(seed, max_tokens, max_rows, max_prefill_tokens):
    """Long and short prompts in chunks, groups, responses that end, grow, give way and come back."""
    play = Play(seed, max_tokens, max_rows, max_prefill_tokens)
    responses = random_responses(seed)
    play.run(responses)
    assert play.largest_error < 1e-5
    assert play.most_tokens <= max_tokens
    assert sorted(response.order for response in play.done) == list(range(len(responses)))
    assert all(len(response.tokens) == response.limit for response in responses)
    assert 3 <= play.num_together <= max_rows
    if max_tokens == 100:
        assert play.scheduler.num_preempted > 0
    lane = play.scheduler.lanes[0]
    assert (lane.free, lane.prefixes.keys, lane.suffixes.keys) == (max_tokens, [], [])
