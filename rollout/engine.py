"""`Engine.generate(requests) -> completions`, on the tensors that are trained.

Every rank of a model replica (tensor x pipeline) calls the engine with the same requests and gets the same completions,
in the same order; `rollout.replicas` spreads requests over data-parallel replicas.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence

from parallel.inference import build_stage
from parallel.mesh import Mesh
from parallel.model import QwenModel
from rollout.block_attention import choose_attention
from rollout.blocks import BLOCK_TOKENS, BlockPool, Blocks
from rollout.columns import FIRST_WIDTH, Columns, column_widths
from rollout.graphs import DecodeGraphs, check_graphs
from rollout.kv_cache import KVCache
from rollout.memory import cache_tokens
from rollout.paged_cache import PagedCache
from rollout.pipeline import Pipeline
from rollout.requests import Completion, Paused, Request
from rollout.sampling import SamplingParams
from rollout.scheduler import Scheduler, TierBook
from rollout.session import Rollout

logger = logging.getLogger(__name__)

PREFILL_PARTS = 4
"""With several lanes a step computes this part of a lane's share of prompt tokens: the stages behind wait for the
first step, and the stages before for the last one."""


class Engine:
    """Generates on this rank's model chunks.

    Args:
        models: the (unwrapped) chunks of `build_model`, of which training updates the same tensors.
        context_length: most tokens of prompt and response together.
        max_sequences: responses decoded at a time.
        max_prefill_tokens: prompt tokens computed in one step; longer prompts take several. With L > 1 lanes a
            step computes 1 / (4 L) of it.
        max_cache_tokens: bound of the KV cache; None takes what free memory allows at the first call, at most what
            `max_sequences` responses can need.
        cache_page_tokens: least tokens of cache that a prompt or a response reserves; None for 128 in columns, 256 in
            blocks. What is reserved in columns doubles; in blocks it grows by as much again.
        num_lanes: groups of responses in flight in the pipeline; None for one per pipeline rank.
        keep_cache: keep the cache's memory between calls.
        decode: token ids -> text, needed for stop strings only.
        paged: store keys and values in blocks, all memory taken at the start, not in columns that grow; None: on CUDA.
        cuda_graphs: replay decoding steps as CUDA graphs (not yet run on a GPU).
    """

    def __init__(
        self,
        models: Sequence[QwenModel],
        mesh: Mesh,
        context_length: int,
        max_sequences: int = 256,
        max_prefill_tokens: int = 8192,
        max_cache_tokens: int | None = None,
        cache_page_tokens: int | None = None,
        num_lanes: int | None = None,
        keep_cache: bool = False,
        decode: Callable[[Sequence[int]], str] | None = None,
        paged: bool | None = None,
        cuda_graphs: bool = False,
    ):
        sizes = {
            "context_length": context_length,
            "max_sequences": max_sequences,
            "max_prefill_tokens": max_prefill_tokens,
            "max_cache_tokens": max_cache_tokens,
            "cache_page_tokens": cache_page_tokens,
            "num_lanes": num_lanes,
        }
        for name, value in sizes.items():
            if value is not None and value < 1:
                raise ValueError(f"{name}: got {value}, allowed: from 1")
        self.models = list(models)
        self.mesh = mesh
        self.context_length = context_length
        self.max_sequences = max_sequences
        self.max_prefill_tokens = max_prefill_tokens
        self.max_cache_tokens = max_cache_tokens
        paged = mesh.device.type == "cuda" if paged is None else paged
        self.page_tokens = cache_page_tokens or (BLOCK_TOKENS if paged else FIRST_WIDTH)
        self.most_pages = -(-context_length // self.page_tokens)
        self.widths = column_widths(context_length, self.page_tokens)
        self.attention = choose_attention(self.models[0], self.page_tokens) if paged else None
        self.cuda_graphs = cuda_graphs
        if cuda_graphs:
            check_graphs(mesh, self.attention)
        self.num_lanes = num_lanes
        self.keep_cache = keep_cache
        self.decode = decode
        self.kept: Pipeline | None = None

    def generate(
        self, requests: Sequence[Request | Paused], params: SamplingParams, version: int = 0
    ) -> list[Completion]:
        """Generate all responses, in the order of the requests and their samples.

        Args:
            version: of the weights, recorded for each token.

        Raises:
            ValueError: a prompt is empty or longer than the context or holds an id outside the vocabulary, a count is
                out of range, a request needs more than the whole cache, or stop strings are given to an engine that
                cannot decode.
        """
        done: dict[int, Completion] = {}
        with self.start(params, version) as rollout:
            responses = rollout.add(requests)
            while rollout.busy:
                done |= {response.order: completion for response, completion in rollout.step()}
        return [done[response.order] for response in responses]

    def stream(
        self, requests: Sequence[Request | Paused], params: SamplingParams, version: int = 0
    ) -> Iterator[Completion]:
        """As `generate`, but yield each completion as soon as it is finished; closing the iterator ends the rollout."""
        with self.start(params, version) as rollout:
            rollout.add(requests)
            while rollout.busy:
                yield from (completion for _, completion in rollout.step())

    def start(self, params: SamplingParams, version: int = 0) -> Rollout:
        """Return a rollout without requests, to be stepped by the caller."""
        if params.stop_strings and self.decode is None:
            raise ValueError("stop_strings: got some, allowed with this engine: none (it has no `decode`)")
        lanes = self.num_lanes or self.mesh.pipeline_size
        max_rows = -(-self.max_sequences // lanes)
        if self.max_cache_tokens is None:
            widths = [self.page_tokens] * self.most_pages if self.attention else self.widths
            self.max_cache_tokens = cache_tokens(self.models, self.mesh, lanes * max_rows, widths)
            logger.info("KV cache: at most %d tokens of this rank's heads and layers", self.max_cache_tokens)
        scheduler = Scheduler(
            self._book_maker(lanes, self.max_cache_tokens // lanes),
            num_lanes=lanes,
            max_rows=max_rows,
            max_tokens=self.max_cache_tokens // lanes,
            max_prefill_tokens=self._prefill_tokens(lanes),
        )
        return Rollout(self, scheduler, params, version)

    def open_pipeline(self, scheduler: Scheduler, params: SamplingParams) -> Pipeline:
        """Return stages and caches for a rollout: those kept, or new ones."""
        kept, self.kept = self.kept, None
        if kept is not None:
            kept.reopen(params)
            return kept
        num_lanes, lane = len(scheduler.lanes), scheduler.lanes[0]
        if self.attention is None:
            columns = [
                [KVCache.of(model, self.widths, lane.max_tokens) for model in self.models] for _ in range(num_lanes)
            ]
            return Pipeline(self.models, self.mesh, params, columns)
        num_blocks = self._num_blocks(num_lanes, lane.max_tokens)
        blocks = [PagedCache.of(model, num_blocks, self.page_tokens, self.attention) for model in self.models]
        graphs = None
        if self.cuda_graphs:
            graphs = DecodeGraphs(build_stage(self.models[0]), blocks[0], lane.max_rows, self.most_pages)
        return Pipeline(self.models, self.mesh, params, [blocks] * num_lanes, graphs)

    def close_pipeline(self, pipeline: Pipeline) -> None:
        """End a rollout's use of its stages and caches."""
        pipeline.close()
        self.kept = pipeline if self.keep_cache else None

    def _prefill_tokens(self, num_lanes: int) -> int:
        """Return the most prompt tokens in one step of a lane."""
        if num_lanes == 1:
            return self.max_prefill_tokens
        return max(self.max_prefill_tokens // (PREFILL_PARTS * num_lanes), 1)

    def _book_maker(self, num_lanes: int, lane_tokens: int) -> Callable[[], TierBook]:
        """Return what gives an empty book of a cache tier; lanes share blocks, each within its own bound."""
        if self.attention is None:
            return lambda: Columns(self.widths)
        pool = BlockPool(self._num_blocks(num_lanes, lane_tokens), self.page_tokens)
        return lambda: Blocks(pool, self.most_pages)

    def _num_blocks(self, num_lanes: int, lane_tokens: int) -> int:
        return num_lanes * (lane_tokens // self.page_tokens)
