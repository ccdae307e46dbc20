"""`Engine.generate(requests) -> completions`, on the modules and tensors that are trained.

Every rank of a model replica (tensor x pipeline) calls `generate` with the same requests and gets the same
completions; data-parallel replicas work apart. Nothing but hidden states, sampled ids and their log-probs is sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from parallel.layers import bind_cache
from parallel.log_probs import VocabShard, vocab_parallel_log_probs
from parallel.mesh import Mesh
from parallel.model import QwenModel
from rollout.kv_cache import KVCache
from rollout.random_numbers import combine
from rollout.sampling import FinishReason, SamplingParams, response_length, sample


@dataclass(frozen=True)
class Request:
    """A prompt and how many responses it gets.

    Attributes:
        prompt_id: unique in the run; with the sample index it keys all random numbers.
        prompt: token ids, at least one.
        num_samples: responses wanted, with sample indices from `first_sample`.
        generated: tokens already produced for this response (a paused one goes on); they count against the limit.
    """

    prompt_id: int
    prompt: Sequence[int]
    num_samples: int = 1
    first_sample: int = 0
    generated: Sequence[int] = ()


@dataclass(frozen=True)
class Completion:
    """One response.

    Attributes:
        tokens: ids produced by this call, the stop token included.
        log_probs: `[len(tokens)]` fp32 on the CPU, under the sampling temperature over the whole vocabulary.
        finish_reason: "stop" after a stop token, "length" at the limit.
        prompt_log_probs: `[len(prompt) - 1]` fp32 of the prompt's tokens from the second on, if asked for.
    """

    prompt_id: int
    sample_index: int
    tokens: list[int]
    log_probs: Tensor
    finish_reason: FinishReason
    prompt_log_probs: Tensor | None = None


@dataclass
class _Sequence:
    """A response being generated; `length` counts its tokens in the cache."""

    request: Request
    sample_index: int
    budget: int
    length: int
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)

    @property
    def context(self) -> list[int]:
        return [*self.request.prompt, *self.request.generated]


class Engine:
    """Generates on this rank's model chunks.

    Args:
        models: the (unwrapped) chunks of `build_model`, of which training updates the same tensors.
        context_length: most tokens of prompt and response together.
        max_sequences: responses decoded at a time, which bounds the cache.
        max_prefill_tokens: prompt tokens of one prefill pass.
    """

    def __init__(
        self,
        models: Sequence[QwenModel],
        mesh: Mesh,
        context_length: int,
        max_sequences: int = 256,
        max_prefill_tokens: int = 8192,
    ):
        for name, value in (("context_length", context_length), ("max_sequences", max_sequences)):
            if value < 1:
                raise ValueError(f"{name}: got {value}, allowed: from 1")
        self.models = list(models)
        self.mesh = mesh
        self.context_length = context_length
        self.max_sequences = max_sequences
        self.max_prefill_tokens = max_prefill_tokens

    @torch.no_grad()
    def generate(self, requests: Sequence[Request], params: SamplingParams) -> list[Completion]:
        """Generate `num_samples` responses to each request, in the order of the requests.

        Raises:
            ValueError: a prompt is empty or longer than the context (generated tokens counted), or a paused request
                asks for several samples.
        """
        for model in self.models:
            model.eval()
        sequences = [s for request in requests for s in self._sequences(request, params)]
        prompt_log_probs: dict[int, Tensor] = {}
        for start in range(0, len(sequences), self.max_sequences):
            self._run_wave(sequences[start : start + self.max_sequences], params, prompt_log_probs)
        return [self._completion(s, params, prompt_log_probs) for s in sequences]

    def _sequences(self, request: Request, params: SamplingParams) -> list[_Sequence]:
        length = len(request.prompt) + len(request.generated)
        if not request.prompt or length > self.context_length:
            raise ValueError(
                f"prompt {request.prompt_id}: {length} tokens, allowed: 1 to context_length {self.context_length}"
            )
        if request.generated and request.num_samples != 1:
            raise ValueError(f"prompt {request.prompt_id}: num_samples {request.num_samples}, allowed when resumed: 1")
        limit = min(params.max_new_tokens, self.context_length - len(request.prompt))
        budget = limit - len(request.generated)
        indices = range(request.first_sample, request.first_sample + request.num_samples)
        return [_Sequence(request, index, max(budget, 0), length) for index in indices]

    @staticmethod
    def _completion(sequence: _Sequence, params: SamplingParams, prompt_log_probs: dict[int, Tensor]) -> Completion:
        return Completion(
            prompt_id=sequence.request.prompt_id,
            sample_index=sequence.sample_index,
            tokens=sequence.tokens,
            log_probs=torch.tensor(sequence.log_probs, dtype=torch.float32),
            finish_reason=response_length(sequence.tokens, params.stop_token_ids)[1],
            prompt_log_probs=prompt_log_probs.get(id(sequence.request)),
        )

    def _run_wave(self, wave: list[_Sequence], params: SamplingParams, prompt_log_probs: dict[int, Tensor]) -> None:
        active = [s for s in wave if s.budget > 0 or params.prompt_log_probs]
        if not active:
            return
        caches = self._bind_caches(len(active), max(s.length + max(s.budget - 1, 0) for s in active))
        try:
            rows = self._prefill(active, caches, params, prompt_log_probs)
            rows = rows[self._drop_finished(active, caches, params)]
            while active:
                self._append_samples(rows, active, params)
                self._drop_finished(active, caches, params)
                if active:
                    rows = self._decode(active, caches)
        finally:
            for model in self.models:
                bind_cache(model.decoder, None)

    def _bind_caches(self, num_slots: int, capacity: int) -> list[KVCache]:
        caches = []
        for model in self.models:
            config = model.config
            kv_heads = config.num_query_groups // self.mesh.tensor_size
            like = model.decoder.layers[0].self_attention.linear_qkv.weight
            scale = config.softmax_scale
            cache = KVCache(len(model.decoder.layers), num_slots, capacity, kv_heads, config.kv_channels, scale, like)
            bind_cache(model.decoder, cache)
            caches.append(cache)
        return caches

    def _prefill(
        self,
        active: list[_Sequence],
        caches: list[KVCache],
        params: SamplingParams,
        prompt_log_probs: dict[int, Tensor],
    ) -> Tensor:
        """Fill the slots of `active` (slot i for `active[i]`), each prompt once.

        Returns: hidden states `[len(active), H]` of the last prompt tokens (empty off the last stage).
        """
        slots: dict[int, list[int]] = {}
        for slot, sequence in enumerate(active):
            slots.setdefault(id(sequence.request), []).append(slot)
        rows: dict[int, Tensor] = {}
        for batch in self._prefill_batches(active, [members[0] for members in slots.values()]):
            contexts = [active[slot].context for slot in batch]
            lengths = [len(context) for context in contexts]
            for cache in caches:
                cache.begin_prefill(lengths, batch)
            hidden = self._forward(
                torch.tensor([token for context in contexts for token in context]),
                torch.cat([torch.arange(length) for length in lengths]),
            )
            for slot, length, states in zip(batch, lengths, hidden.split(lengths), strict=True):
                members = slots[id(active[slot].request)]
                for cache in caches:
                    cache.fork(slot, members[1:], length)
                rows |= dict.fromkeys(members, states[-1])
                if params.prompt_log_probs:
                    request = active[slot].request
                    prompt_log_probs[id(request)] = self._score_prompt(request, states, params)
        return torch.stack([rows[slot] for slot in range(len(active))])

    def _prefill_batches(self, active: list[_Sequence], slots: list[int]) -> list[list[int]]:
        """Split slots into batches of at most `max_prefill_tokens` tokens (a longer prompt goes alone)."""
        batches: list[list[int]] = [[]]
        used = 0
        for slot in slots:
            if batches[-1] and used + active[slot].length > self.max_prefill_tokens:
                batches.append([])
                used = 0
            batches[-1].append(slot)
            used += active[slot].length
        return batches

    def _score_prompt(self, request: Request, states: Tensor, params: SamplingParams) -> Tensor:
        num = len(request.prompt) - 1
        scores = torch.empty(num, dtype=torch.float32, device=self.mesh.device)
        if self.mesh.is_last_stage:
            targets = torch.tensor(request.prompt[1:], device=self.mesh.device)
            scores = vocab_parallel_log_probs(self.models[-1], states[:num], targets, params.score_temperature)[0]
        return self.mesh.from_last_stage(scores.contiguous()).cpu()

    def _decode(self, active: list[_Sequence], caches: list[KVCache]) -> Tensor:
        """Run the last token of each active sequence; returns hidden states `[len(active), H]`."""
        positions = torch.tensor([sequence.length for sequence in active])
        for cache in caches:
            cache.begin_decode(positions.to(self.mesh.device))
        hidden = self._forward(torch.tensor([sequence.tokens[-1] for sequence in active]), positions)
        for sequence in active:
            sequence.length += 1
        return hidden

    def _forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Run rows through all pipeline stages in turn.

        Args:
            tokens, positions: `[T]`.

        Returns: hidden states `[T, H]` on the last stage; `[T, 0]` elsewhere.
        """
        mesh, num = self.mesh, len(tokens)
        split = mesh.tensor_size if mesh.layout.sequence_parallel else 1
        padding = (0, -num % split)
        tokens, positions = (torch.nn.functional.pad(x, padding).to(mesh.device) for x in (tokens, positions))
        config = self.models[0].config
        empty = torch.empty(len(tokens) // split, 1, config.hidden_size, dtype=config.params_dtype, device=mesh.device)
        hidden = empty
        for stage in range(mesh.layout.num_stages):
            if stage % mesh.pipeline_size != mesh.pipeline_rank:
                continue
            if stage and mesh.pipeline_size > 1:
                hidden = torch.empty_like(empty)
                dist.recv(hidden, src=self._stage_rank(stage - 1), group=mesh.pipeline_group)
            model = self.models[stage // mesh.pipeline_size]
            model.set_input_tensor(hidden)
            hidden = model.hidden_states(tokens, positions, None)
            if stage + 1 < mesh.layout.num_stages and mesh.pipeline_size > 1:
                dist.send(hidden.contiguous(), dst=self._stage_rank(stage + 1), group=mesh.pipeline_group)
        if not mesh.is_last_stage:
            return hidden.new_empty(num, 0)
        return self.models[-1].gather_sequence(hidden)[:num, 0]

    def _stage_rank(self, stage: int) -> int:
        mesh = self.mesh
        return mesh.rank_of(
            tensor_rank=mesh.tensor_rank, pipeline_rank=stage % mesh.pipeline_size, data_rank=mesh.data_rank
        )

    def _append_samples(self, rows: Tensor, active: list[_Sequence], params: SamplingParams) -> None:
        """Draw the next token of every active sequence from `rows [len(active), H]` on the last stage; tell all."""
        drawn = torch.empty(2, len(active), dtype=torch.float64, device=self.mesh.device)
        if self.mesh.is_last_stage:
            model = self.models[-1]
            shard = VocabShard.of(model)
            logits = shard.logits(rows, model.output_weight())
            tokens, log_probs = sample(logits, self._keys(active, params.seed), params, shard)
            drawn[0], drawn[1] = tokens, log_probs
        tokens_list, log_prob_list = self.mesh.from_last_stage(drawn).tolist()
        for sequence, token, log_prob in zip(active, tokens_list, log_prob_list, strict=True):
            sequence.tokens.append(int(token))
            sequence.log_probs.append(log_prob)

    def _keys(self, active: list[_Sequence], seed: int) -> Tensor:
        """Hash (seed, prompt id, sample index, position) of each sequence's next token."""
        device = self.mesh.device
        columns = [
            [sequence.request.prompt_id for sequence in active],
            [sequence.sample_index for sequence in active],
            [len(sequence.request.generated) + len(sequence.tokens) for sequence in active],
        ]
        key = torch.full((len(active),), seed, dtype=torch.int64, device=device)
        for column in columns:
            key = combine(key, torch.tensor(column, dtype=torch.int64, device=device))
        return key

    @staticmethod
    def _drop_finished(active: list[_Sequence], caches: list[KVCache], params: SamplingParams) -> list[int]:
        """Remove finished sequences; the last active one fills the hole, in list and cache alike.

        Returns: the former index of each sequence kept, in its new order.
        """
        order = list(range(len(active)))
        for slot in reversed(range(len(active))):
            sequence = active[slot]
            stopped = bool(sequence.tokens) and sequence.tokens[-1] in params.stop_token_ids
            if not stopped and len(sequence.tokens) < sequence.budget:
                continue
            last, last_index = active.pop(), order.pop()
            if slot < len(active):
                for cache in caches:
                    cache.move(len(active), slot, last.length)
                active[slot], order[slot] = last, last_index
        return order
