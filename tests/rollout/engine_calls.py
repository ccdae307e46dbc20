"""Calls of `Engine.generate` on the ranks of a layout, for the tests of the engine."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from parallel.launch import World
from parallel.log_probs import score_tokens
from parallel.mesh import Layout, Mesh, build_mesh
from parallel.model import QwenModel, build_model
from parallel.pack import pack_sequences
from parallel.qwen import read_shape
from parallel.schedule import forward
from parallel.weights import import_hf
from rollout.engine import Engine
from rollout.kv_cache import KVCache
from rollout.requests import Completion, Paused, Request
from rollout.sampling import SamplingParams
from tests.tiny_model import draw_sequences

PROMPTS = [sequence.tolist() for sequence in draw_sequences([3, 5, 9, 1, 2])]


@dataclass(frozen=True)
class Call:
    """Arguments of one `Engine.generate`, and whether to score what came out with the training pass.

    `pause_after` pauses everything after so many steps and goes on in a second rollout.
    """

    requests: Sequence[Request | Paused]
    params: SamplingParams
    context_length: int = 64
    max_sequences: int = 256
    max_prefill_tokens: int = 8192
    max_cache_tokens: int | None = None
    cache_page_tokens: int = 128
    num_lanes: int | None = None
    pause_after: int = 0
    dtype: torch.dtype = torch.float32
    score: bool = False


@dataclass(frozen=True)
class Done:
    """Of one call: completions, training log-probs of each response (last stage), tokens written to the caches of each
    chunk, and responses that gave way."""

    completions: list[Completion]
    scored: list[Tensor] = field(default_factory=list)
    refusal: str | None = None
    written: list[int] = field(default_factory=list)
    num_preempted: int = 0
    paused: Sequence[Request | Paused] = ()

    @property
    def tokens(self) -> list[list[int]]:
        return [completion.tokens for completion in self.completions]

    @property
    def log_probs(self) -> Tensor:
        return torch.cat([completion.log_probs for completion in self.completions])


def run_calls(world: World, layout: Layout, folder: Path, calls: dict[str, Call]) -> dict[str, Done]:
    """Run on one rank of a worker pool."""
    mesh = build_mesh(layout, world)
    models = {dtype: load(folder, mesh, dtype) for dtype in sorted({call.dtype for call in calls.values()}, key=str)}
    return {name: run_call(models[call.dtype], mesh, call) for name, call in calls.items()}


def load(folder: Path, mesh: Mesh, dtype: torch.dtype = torch.float32) -> list[QwenModel]:
    """This rank's chunks with the folder's weights."""
    models = build_model(read_shape(folder), mesh, dtype)
    import_hf(folder, models, mesh)
    return models


def run_call(models: list[QwenModel], mesh: Mesh, call: Call) -> Done:
    engine = Engine(
        models,
        mesh,
        call.context_length,
        call.max_sequences,
        call.max_prefill_tokens,
        call.max_cache_tokens,
        call.cache_page_tokens,
        call.num_lanes,
        keep_cache=True,
    )
    completions: list[tuple[int, Completion]] = []
    paused: Sequence[Request | Paused] = ()
    try:
        with engine.start(call.params, version=1) as rollout:
            rollout.add(call.requests)
            steps = 0
            while rollout.busy and not (call.pause_after and steps == call.pause_after):
                completions += [(response.order, completion) for response, completion in rollout.step()]
                steps += 1
            if call.pause_after:
                paused = rollout.pause()
                completions += [(response.order, completion) for response, completion in rollout.step()]
            num_preempted = rollout.scheduler.num_preempted
    except ValueError as error:
        return Done([], refusal=str(error))
    done = [completion for _, completion in sorted(completions, key=lambda item: item[0])]
    if paused:
        done += engine.generate(paused, call.params, version=2)
        done.sort(key=lambda completion: (completion.prompt_id, completion.sample_index))
    scored = score(models, mesh, call, done) if call.score else []
    kept = engine.kept.caches if engine.kept else []
    return Done(done, scored, None, [written(cache) for caches in kept for cache in caches], num_preempted, paused)


def written(cache: KVCache) -> int:
    """Tokens whose keys were ever written: the memory starts as zeros."""
    columns = cache.prefix.columns + cache.suffix.columns
    return sum(int((column[0, 0, :, 0] != 0).any(-1).sum()) for column in columns)


def score(models: list[QwenModel], mesh: Mesh, call: Call, completions: list[Completion]) -> list[Tensor]:
    """Log-probs of the responses from the training pass, all in one pack; a pack per stage fills the pipeline."""
    prompts = {request.prompt_id: list(request.prompt) for request in call.requests}
    sequences = [torch.tensor(prompts[c.prompt_id] + c.tokens) for c in completions]
    masks = [torch.arange(len(s)) >= len(prompts[c.prompt_id]) for s, c in zip(sequences, completions, strict=True)]
    pack = pack_sequences(sequences, masks, mesh.tensor_size)
    temperature = call.params.score_temperature
    outputs = forward(models, [pack] * mesh.pipeline_size, lambda *given: score_tokens(*given, temperature)[0])
    return list(outputs[0].split([len(c.tokens) for c in completions])) if outputs else []


def run_one(workers, folder: Path, **calls: Call) -> dict[str, Done]:
    (done,) = workers.run(run_calls, 1, Layout(), folder, calls)
    return done
