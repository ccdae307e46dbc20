"""Runs the steps of several lanes through this rank's pipeline stages, so that all stages work at the same time.

While one lane is in the last stage, another is in the first: with as many lanes as pipeline ranks none waits. Every
rank takes its turns in the same order (for each chunk, for each lane), so messages match without negotiation. Only
hidden states go forward, and drawn tokens with their scores go back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from parallel.inference import build_stage
from parallel.layers import Cache
from parallel.log_probs import VocabShard, vocab_parallel_log_probs
from parallel.mesh import Mesh
from parallel.model import QwenModel
from rollout.graphs import DecodeGraphs
from rollout.random_numbers import draw
from rollout.sampling import SamplingParams, sample
from rollout.steps import Response, Step

HIDDEN, DRAWN = 0, 1  # message tags


@dataclass(frozen=True)
class Drawn:
    """What a step has drawn.

    Attributes:
        tokens: for each draw its token, log-prob, sampling log-prob and entropy.
        prompt_log_probs: `[t]` fp32 for each scored part of a prompt.
    """

    tokens: list[tuple[int, float, float, float]]
    prompt_log_probs: list[Tensor]


class StepCache(Cache, Protocol):
    """A cache that is told the rows of each step (`rollout.kv_cache`, `rollout.paged_cache`)."""

    @property
    def num_bytes(self) -> int: ...
    def begin(self, step: Step) -> None: ...


class Pipeline:
    """This rank's stages with a cache for each lane.

    Args:
        caches: for each lane and chunk; lanes may share them.
        graphs: runs steps that only decode, if given.
    """

    def __init__(
        self,
        models: Sequence[QwenModel],
        mesh: Mesh,
        params: SamplingParams,
        caches: Sequence[Sequence[StepCache]],
        graphs: DecodeGraphs | None = None,
    ):
        self.models = models
        self.mesh = mesh
        self.params = params
        self.stages = [build_stage(model) for model in models]
        self.caches = caches
        self.graphs = graphs
        self.steps: list[Step | None] = [None] * len(caches)
        self._flat: list[Tensor | None] = [None] * len(caches)
        self._sends: list[tuple[dist.Work, Tensor]] = []

    @property
    def cache_bytes(self) -> int:
        """Memory that the caches hold now."""
        return sum(cache.num_bytes for cache in {cache for caches in self.caches for cache in caches})

    def reopen(self, params: SamplingParams) -> None:
        """Use the kept caches for another rollout, with the weights of now."""
        self.params = params
        self.stages = [build_stage(model) for model in self.models]

    @torch.no_grad()
    def advance(self, next_step: Callable[[int, tuple[Step, Drawn] | None], Step | None]) -> None:
        """Take one turn for each lane and chunk; `next_step(lane, what its former step drew)` plans the next."""
        try:
            for chunk in range(len(self.models)):
                for lane in range(len(self.steps)):
                    if chunk == 0:
                        self.steps[lane] = next_step(lane, self._collect(lane))
                    step = self.steps[lane]
                    if step is not None:
                        self._run(lane, chunk, step)
        except BaseException:
            self._forget()  # waiting for messages of a broken step would hide what broke it
            raise

    def _forget(self) -> None:
        """Drop the steps and messages under way."""
        self.steps = [None] * len(self.steps)
        self._flat = [None] * len(self._flat)
        self._sends.clear()

    def drain(self, finish: Callable[[int, Step, Drawn], None]) -> None:
        """Take in the steps under way without starting new ones."""
        for lane in range(len(self.steps)):
            finished = self._collect(lane)
            if finished is not None:
                finish(lane, *finished)

    def close(self) -> None:
        """Wait until all messages are taken; forget steps under way and what was made for one rollout."""
        self.drain(lambda *_: None)
        for work, _ in self._sends:
            work.wait()
        self._sends.clear()
        self.stages = []

    def _run(self, lane: int, chunk: int, step: Step) -> None:
        mesh, device = self.mesh, self.mesh.device
        stage = chunk * mesh.pipeline_size + mesh.pipeline_rank
        config = self.models[0].config
        hidden = None
        if stage > 0:
            hidden = torch.empty(len(step.tokens), config.hidden_size, dtype=config.params_dtype, device=device)
            dist.recv(hidden, src=self._rank(stage - 1), group=mesh.pipeline_group, tag=HIDDEN)
        if self.graphs is not None and not step.chunks:
            hidden = self.graphs.run(step)
        else:
            tokens, positions = torch.tensor([step.tokens, step.positions]).to(device)
            cache = self.caches[lane][chunk]
            cache.begin(step)
            hidden = self.stages[chunk](tokens, positions, hidden, cache)
        if stage + 1 < mesh.layout.num_stages:
            self._send(hidden.contiguous(), self._rank(stage + 1), mesh.pipeline_group, HIDDEN)
            return
        flat = self._draw(step, hidden)
        for other in range(mesh.pipeline_size - 1):
            self._send(flat, self._rank(other), mesh.pipeline_cpu_group, DRAWN)
        self._flat[lane] = flat

    def _collect(self, lane: int) -> tuple[Step, Drawn] | None:
        """Return a lane's step under way with what it drew; None if there is none."""
        step, self.steps[lane] = self.steps[lane], None
        if step is None:
            return None
        flat, self._flat[lane] = self._flat[lane], None
        if flat is None:
            flat = torch.empty(_num_drawn(step), dtype=torch.float64)
            last = self._rank(self.mesh.pipeline_size - 1)
            dist.recv(flat, src=last, group=self.mesh.pipeline_cpu_group, tag=DRAWN)
        self._sends = [(work, tensor) for work, tensor in self._sends if not work.is_completed()]
        num = len(step.draws)
        columns = flat[: 4 * num].view(4, num).tolist()
        tokens = list(zip(map(int, columns[0]), *columns[1:], strict=True))
        lengths = [len(scored.targets) for scored in step.scored]
        return step, Drawn(tokens, list(flat[4 * num :].float().split(lengths)) if lengths else [])

    def _draw(self, step: Step, hidden: Tensor) -> Tensor:
        """Return `[4 draws + prompt scores]` float64 on the CPU; see `Drawn`."""
        model, device = self.models[-1], self.mesh.device
        parts = []
        if step.draws:
            drawn_from, responses = zip(*step.draws, strict=True)
            states, fan_out = hidden, None
            if drawn_from != tuple(range(len(hidden))):  # a step that only decodes draws once from each row
                places = sorted(set(drawn_from))
                states = hidden[torch.tensor(places, device=device)]
                if len(places) < len(drawn_from):
                    index = {row: number for number, row in enumerate(places)}
                    fan_out = torch.tensor([index[row] for row in drawn_from], device=device)
            logits = self.stages[-1].logits(states)
            keys = draw_keys(responses, device)
            seen = self._seen(step) if self.params.repetition_penalty != 1 else None
            drawn = sample(logits, keys, self.params, VocabShard.of(model), fan_out, seen)
            entropies = drawn.entropies
            if entropies is None:
                entropies = torch.full_like(drawn.log_probs, torch.nan)
            scores = (drawn.tokens, drawn.log_probs, drawn.sampling_log_probs, entropies)
            parts.append(torch.stack([score.double() for score in scores]).flatten())
        for scored in step.scored:
            states = hidden[scored.first : scored.first + len(scored.targets)]
            targets = torch.tensor(scored.targets, dtype=torch.int64, device=device)
            parts.append(vocab_parallel_log_probs(model, states, targets, self.params.score_temperature)[0].double())
        return torch.cat(parts).cpu() if parts else torch.empty(0, dtype=torch.float64)

    def _seen(self, step: Step) -> Tensor:
        """Ids of prompt and response for each row drawn from, `[U, longest]`, padded with -1."""
        texts = {row: [*r.request.prompt, *r.tokens] for row, r in step.draws}
        ordered = [torch.tensor(texts[row]) for row in sorted(texts)]
        return torch.nn.utils.rnn.pad_sequence(ordered, batch_first=True, padding_value=-1).to(self.mesh.device)

    def _send(self, tensor: Tensor, target: int, group: dist.ProcessGroup, tag: int) -> None:
        work = dist.isend(tensor, dst=target, group=group, tag=tag)
        assert work is not None, "this rank is not in the group"
        self._sends.append((work, tensor))

    def _rank(self, stage: int) -> int:
        mesh = self.mesh
        return mesh.rank_of(
            tensor_rank=mesh.tensor_rank, pipeline_rank=stage % mesh.pipeline_size, data_rank=mesh.data_rank
        )


def draw_keys(responses: Sequence[Response], device: torch.device) -> Tensor:
    """Hash (seed, prompt id, sample index, position) of each response's next token."""
    numbers = [[response.stream for response in responses], [len(response.tokens) for response in responses]]
    return draw(*torch.tensor(numbers, dtype=torch.int64).to(device))


def _num_drawn(step: Step) -> int:
    return 4 * len(step.draws) + sum(len(scored.targets) for scored in step.scored)
