"""`Sample`, one scored response, and packs: samples spread over data ranks and laid end to end under a token budget.

Shapes: N scored (response) tokens of a pack.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from megarl.aggregation import GlobalCounts
from megarl.recipes import Aggregation
from parallel.mesh import Mesh
from parallel.pack import Pack, pack_sequences
from parallel.schedule import num_passes


@dataclass(frozen=True)
class Sample:
    """A prompt with one response.

    Attributes:
        prompt, response: token ids; the response includes its stop token.
        rollout_log_probs: `[len(response)]` fp32, from the weights that sampled it.
        score: what the reward rule said; `reward` is the score after shaping.
        truncated: the response ended at the length limit.
        in_loss: False: its tokens are masked out of the loss (truncated responses, if the recipe says so).
        advantage: of every token of the response.
        versions: of the weights (training steps) that drew each token.
    """

    prompt_id: int
    sample_index: int
    prompt: Sequence[int]
    response: Sequence[int]
    rollout_log_probs: Tensor
    score: float
    truncated: bool
    reward: float = 0.0
    in_loss: bool = True
    advantage: float = 0.0
    versions: Sequence[int] = ()

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and response."""
        return len(self.prompt) + len(self.response)


@dataclass(frozen=True)
class TrainPack(Pack):
    """A pack with what the loss needs of each scored token, all `[N]` fp32.

    `log_probs[i]` scores token `scored[i]` given the tokens before it in its own sequence; all fields align to it.
    """

    loss_weights: Tensor
    advantages: Tensor
    old_log_probs: Tensor
    ref_log_probs: Tensor = field(default_factory=lambda: torch.empty(0))

    def to(self, device: torch.device) -> TrainPack:
        """Copy to `device`; `cu_seqlens` stays on the CPU."""
        moved = {name: value.to(device) for name, value in vars(self).items() if name != "cu_seqlens"}
        return replace(self, **moved)


def balance(costs: Sequence[int], num_ranks: int) -> list[list[int]]:
    """Spread items over ranks: the dearest first, each to the rank with the smallest sum so far.

    Returns: the item indices of each rank, ascending. No rank is empty when there are at least as many items (of
        positive cost) as ranks.
    """
    ranks: list[list[int]] = [[] for _ in range(num_ranks)]
    sums = [(0, rank) for rank in range(num_ranks)]
    for index in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        total, rank = heapq.heappop(sums)
        ranks[rank].append(index)
        heapq.heappush(sums, (total + costs[index], rank))
    return [sorted(rank) for rank in ranks]


def plan_packs(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Group sequences into packs of at most `max_tokens` tokens (first fit, longest first).

    Raises:
        ValueError: a sequence is longer than `max_tokens`.
    """
    packs: list[list[int]] = []
    room: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        if lengths[index] > max_tokens:
            raise ValueError(f"max_tokens_per_pack: got {max_tokens}, but a sequence has {lengths[index]} tokens")
        fitting = next((i for i, free in enumerate(room) if free >= lengths[index]), None)
        if fitting is None:
            packs.append([])
            room.append(max_tokens)
            fitting = len(packs) - 1
        packs[fitting].append(index)
        room[fitting] -= lengths[index]
    return packs


def count_globally(samples: Sequence[Sample], mesh: Mesh) -> GlobalCounts:
    """Count unmasked response tokens and sequences of this rank's samples over all data ranks: the one all-reduce."""
    lengths = [len(sample.response) for sample in samples if sample.in_loss and sample.response]
    counts = mesh.sum_over_data(torch.tensor([sum(lengths), len(lengths)], device=mesh.device))
    num_tokens, num_sequences = counts.tolist()
    return GlobalCounts(num_tokens, num_sequences)


def build_packs(
    samples: Sequence[Sample], max_tokens: int, aggregation: Aggregation, counts: GlobalCounts, mesh: Mesh
) -> list[TrainPack]:
    """Pack this rank's samples; every data rank gets the same number of packs, filled up with packs of weight zero.

    Args:
        max_tokens: token budget of a pack.
        aggregation: gives each token its weight in the loss.
        counts: of the whole mini-batch (`count_globally`).
    """
    multiple = mesh.tensor_size if mesh.layout.sequence_parallel else 1
    plan = plan_packs([sample.num_tokens for sample in samples], max_tokens)
    packs = [_pack([samples[i] for i in indices], aggregation, counts, multiple) for indices in plan]
    missing = num_passes(len(packs), mesh) - len(packs)
    packs += [_empty_pack(multiple)] * missing
    return [pack.to(mesh.device) for pack in packs]


def _pack(samples: Sequence[Sample], aggregation: Aggregation, counts: GlobalCounts, multiple: int) -> TrainPack:
    responses = [len(sample.response) for sample in samples]
    masks = [torch.arange(sample.num_tokens) >= len(sample.prompt) for sample in samples]
    sequences = [torch.tensor([*sample.prompt, *sample.response]) for sample in samples]
    pack = pack_sequences(sequences, masks, multiple)

    def spread(values: list[float] | list[int] | list[bool]) -> Tensor:
        """One value per sample -> one per scored token, `[N]`."""
        return torch.repeat_interleave(torch.tensor(values), torch.tensor(responses))

    loss_weights = aggregation(spread(responses), spread([sample.in_loss for sample in samples]), counts)
    return TrainPack(
        **vars(pack),
        loss_weights=loss_weights,
        advantages=spread([sample.advantage for sample in samples]).float(),
        old_log_probs=torch.cat([sample.rollout_log_probs for sample in samples]),
    )


def _empty_pack(multiple: int) -> TrainPack:
    """A pack without scored tokens: it runs through every stage and adds exactly 0 to loss and gradient."""
    tokens = torch.zeros(multiple, dtype=torch.int64)
    pack = pack_sequences([tokens], [tokens.bool()])
    nothing = torch.empty(0)
    return TrainPack(**vars(pack), loss_weights=nothing, advantages=nothing, old_log_probs=nothing)
