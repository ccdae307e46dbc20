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
        score: what the reward rule said; `reward` is the score after shaping. In a preference pair the scores differ by
            its margin.
        truncated: the response ended at the length limit.
        in_loss: False: its tokens are masked out of the loss (truncated responses, if the recipe says so).
        loss_mask: for each response token whether it is learnt from (several turns in one response); None: all are.
        advantage: of every token of the response, or one for each, `[len(response)]`.
        old_log_probs, ref_log_probs, values, returns: `[len(response)]` fp32 each, once something has computed them: by
            the policy before its update (None: those of rollout), by the reference, by the critic, its targets.
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
    loss_mask: Sequence[bool] | None = None
    advantage: float | Tensor = 0.0
    old_log_probs: Tensor | None = None
    ref_log_probs: Tensor | None = None
    values: Tensor | None = None
    returns: Tensor | None = None
    versions: Sequence[int] = ()

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and response."""
        return len(self.prompt) + len(self.response)

    @property
    def num_in_loss(self) -> int:
        """Response tokens that are learnt from."""
        if not self.in_loss:
            return 0
        return len(self.response) if self.loss_mask is None else sum(self.loss_mask)


def _nothing() -> Tensor:
    return torch.empty(0)


@dataclass(frozen=True)
class TrainPack(Pack):
    """A pack with what the loss needs of each scored token, `[N]`, fp32 but for `sequence_ids`.

    `log_probs[i]` scores token `scored[i]` given the tokens before it in its own sequence; all fields align to it.
    Those with a default are empty where no sample has them.

    Attributes:
        rollout_log_probs: from the weights that sampled; `old_log_probs` from those before the update.
        sequence_ids: int64, the sequence of the pack that each token belongs to. Those not learnt from share an id of
            their own, the number of sequences: what is averaged over a response (GSPO's ratio) leaves them out.
        scores: `[S]`, of each sequence, padding excluded.
    """

    loss_weights: Tensor
    advantages: Tensor
    old_log_probs: Tensor
    rollout_log_probs: Tensor = field(default_factory=_nothing)
    ref_log_probs: Tensor = field(default_factory=_nothing)
    values: Tensor = field(default_factory=_nothing)
    returns: Tensor = field(default_factory=_nothing)
    sequence_ids: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    scores: Tensor = field(default_factory=_nothing)

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
    lengths = [sample.num_in_loss for sample in samples if sample.num_in_loss]
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
    return pack_units([[sample] for sample in samples], max_tokens, aggregation, counts, mesh)


def pack_units(
    units: Sequence[Sequence[Sample]], max_tokens: int, aggregation: Aggregation, counts: GlobalCounts, mesh: Mesh
) -> list[TrainPack]:
    """As `build_packs`, for units of samples that must share a pack, in their order (pairs of a preference)."""
    multiple = _token_multiple(mesh)
    plan = plan_packs([sum(sample.num_tokens for sample in unit) for unit in units], max_tokens)
    packs = [_pack([sample for i in indices for sample in units[i]], aggregation, counts, multiple) for indices in plan]
    missing = num_passes(len(packs), mesh) - len(packs)
    packs += [_empty_pack(multiple)] * missing
    return [pack.to(mesh.device) for pack in packs]


def lay_out(samples: Sequence[Sample], max_tokens: int, mesh: Mesh) -> tuple[list[list[int]], list[Pack]]:
    """Pack this rank's samples for a pass without a loss.

    Returns: the samples (indices) of each pack, and the packs; as many on every data rank, the last ones perhaps empty.
    """
    multiple = _token_multiple(mesh)
    plan = plan_packs([sample.num_tokens for sample in samples], max_tokens)
    packs = [_sequences([samples[i] for i in indices], multiple) for indices in plan]
    missing = num_passes(len(packs), mesh) - len(packs)
    return plan + [[]] * missing, [pack.to(mesh.device) for pack in packs + [_empty_sequence(multiple)] * missing]


def _token_multiple(mesh: Mesh) -> int:
    return mesh.tensor_size if mesh.layout.sequence_parallel else 1


def _sequences(samples: Sequence[Sample], multiple: int) -> Pack:
    """Lay prompts and responses end to end; the response tokens are scored."""
    masks = [torch.arange(sample.num_tokens) >= len(sample.prompt) for sample in samples]
    sequences = [torch.tensor([*sample.prompt, *sample.response]) for sample in samples]
    return pack_sequences(sequences, masks, multiple)


def _pack(samples: Sequence[Sample], aggregation: Aggregation, counts: GlobalCounts, multiple: int) -> TrainPack:
    responses = torch.tensor([len(sample.response) for sample in samples])

    def spread(values: list[int]) -> Tensor:
        """One value per sample -> one per scored token, `[N]`."""
        return torch.repeat_interleave(torch.tensor(values), responses)

    mask = torch.cat([_loss_mask(sample) for sample in samples])
    given = {}
    for name in ("ref_log_probs", "values", "returns"):
        columns = [getattr(sample, name) for sample in samples]
        if all(column is not None for column in columns):
            given[name] = torch.cat(columns)
    rollout = [sample.rollout_log_probs for sample in samples]
    old = [sample.old_log_probs for sample in samples]
    return TrainPack(
        **vars(_sequences(samples, multiple)),
        loss_weights=aggregation(spread([sample.num_in_loss for sample in samples]), mask, counts),
        advantages=torch.cat([_per_token(sample) for sample in samples]),
        old_log_probs=torch.cat([r if o is None else o for r, o in zip(rollout, old, strict=True)]),
        rollout_log_probs=torch.cat(rollout),
        sequence_ids=torch.where(mask, spread(list(range(len(samples)))), len(samples)),
        scores=torch.tensor([float(sample.score) for sample in samples]),
        **given,
    )


def _loss_mask(sample: Sample) -> Tensor:
    """Which response tokens are learnt from, `[len(response)]` bool."""
    if sample.in_loss and sample.loss_mask is not None:
        return torch.tensor(sample.loss_mask, dtype=torch.bool)
    return torch.full((len(sample.response),), sample.in_loss)


def _per_token(sample: Sample) -> Tensor:
    if isinstance(sample.advantage, Tensor):
        return sample.advantage.float()
    return torch.full((len(sample.response),), sample.advantage, dtype=torch.float32)


def _empty_sequence(multiple: int) -> Pack:
    """A pack without scored tokens."""
    tokens = torch.zeros(multiple, dtype=torch.int64)
    return pack_sequences([tokens], [tokens.bool()])


def _empty_pack(multiple: int) -> TrainPack:
    """A pack without scored tokens: it runs through every stage and adds exactly 0 to loss and gradient."""
    nothing = _nothing()
    return TrainPack(**vars(_empty_sequence(multiple)), loss_weights=nothing, advantages=nothing, old_log_probs=nothing)
