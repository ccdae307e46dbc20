"""`Sample`, one scored response, and packs: samples spread over data ranks and laid end to end under a token budget.

With `share_prompts` the prompt of several responses stands once in a pack, and is computed once.

Shapes: N scored (response) tokens of a pack.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby, pairwise

import torch
from torch import Tensor

from megarl.aggregation import GlobalCounts
from megarl.recipes import Aggregation
from parallel.mesh import Mesh
from parallel.pack import Pack, pack_groups, pack_sequences
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
        timed_out: the reward rule gave no answer in time; the score is 0.
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
    timed_out: bool = False

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
        scores: `[S]`, of each sample.
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

    @property
    def ends(self) -> Tensor:
        """Index of the last token of each sample, `[S]` on the CPU."""
        continues = self.parents != torch.arange(len(self.parents))
        ends = self.cu_seqlens[1:] - 1
        return ends[continues] if bool(continues.any()) else ends[: len(self.scores)]


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


def shares_prompts(setting: bool | None, mesh: Mesh) -> bool:
    """Return what the option `share_prompts` means on this device."""
    return mesh.device.type == "cpu" if setting is None else setting


def spread_samples(samples: Sequence[Sample], num_ranks: int, share_prompts: bool = False) -> list[list[int]]:
    """Spread samples over ranks by their tokens (`balance`); returns the indices of each rank, ascending.

    Args:
        share_prompts: keep responses to one prompt together, cut as often as makes the fullest rank's work least.
    """
    if not share_prompts:
        return balance([sample.num_tokens for sample in samples], num_ranks)
    groups, parts, best = _groups(samples), 1, None
    while True:
        units = [piece for group in groups for piece in _cut(group, parts)]
        costs = [_num_tokens([samples[index] for index in unit], share_prompts) for unit in units]
        spread = balance(costs, num_ranks)
        fullest = max(sum(costs[unit] for unit in mine) for mine in spread)
        if best is None or fullest < best[0]:
            best = fullest, [sorted(index for unit in mine for index in units[unit]) for mine in spread]
        if len(units) == len(samples):  # no group can be cut further
            return best[1]
        parts *= 2


def _groups(samples: Sequence[Sample]) -> list[list[int]]:
    """Return the indices of samples with the same prompt, in the order of their first."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for index, sample in enumerate(samples):
        groups.setdefault(tuple(sample.prompt), []).append(index)
    return list(groups.values())


def _cut(items: Sequence[int], parts: int) -> list[list[int]]:
    """Cut into `parts` of about equal size, none of them empty."""
    borders = [len(items) * part // parts for part in range(parts + 1)]
    return [list(items[start:end]) for start, end in pairwise(borders) if end > start]


def _num_tokens(unit: Sequence[Sample], share_prompts: bool) -> int:
    """Return the tokens that a unit takes in a pack."""
    prompts = by_prompt(unit) if share_prompts else [[sample] for sample in unit]
    return sum(len(one[0].prompt) + sum(len(sample.response) for sample in one) for one in prompts)


def by_prompt(unit: Sequence[Sample]) -> list[list[Sample]]:
    """Cut a row of samples where the prompt changes."""
    return [list(samples) for _, samples in groupby(unit, key=lambda sample: tuple(sample.prompt))]


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
    samples: Sequence[Sample],
    max_tokens: int,
    aggregation: Aggregation,
    counts: GlobalCounts,
    mesh: Mesh,
    share_prompts: bool = False,
) -> list[TrainPack]:
    """Pack this rank's samples; every data rank gets the same number of packs, filled up with packs of weight zero.

    Args:
        max_tokens: token budget of a pack.
        aggregation: gives each token its weight in the loss.
        counts: of the whole mini-batch (`count_globally`).
    """
    units = _units(samples, max_tokens, share_prompts)
    return pack_units(
        [[samples[i] for i in unit] for unit in units], max_tokens, aggregation, counts, mesh, share_prompts
    )


def pack_units(
    units: Sequence[Sequence[Sample]],
    max_tokens: int,
    aggregation: Aggregation,
    counts: GlobalCounts,
    mesh: Mesh,
    share_prompts: bool = False,
) -> list[TrainPack]:
    """As `build_packs`, for units of samples that must share a pack, in their order (pairs of a preference).

    Args:
        share_prompts: a prompt that samples of a unit have in common stands in the pack once.
    """
    multiple = _token_multiple(mesh)
    plan = plan_packs([_num_tokens(unit, share_prompts) for unit in units], max_tokens)
    packs = [_pack([units[i] for i in indices], aggregation, counts, multiple, share_prompts) for indices in plan]
    missing = num_passes(len(packs), mesh) - len(packs)
    packs += [_empty_pack(multiple)] * missing
    return [pack.to(mesh.device) for pack in packs]


def lay_out(
    samples: Sequence[Sample], max_tokens: int, mesh: Mesh, share_prompts: bool = False
) -> tuple[list[list[int]], list[Pack]]:
    """Pack this rank's samples for a pass without a loss.

    Returns: the samples (indices) of each pack, and the packs; as many on every data rank, the last ones perhaps empty.
    """
    multiple = _token_multiple(mesh)
    units = _units(samples, max_tokens, share_prompts)
    held = [[samples[i] for i in unit] for unit in units]
    plan = plan_packs([_num_tokens(unit, share_prompts) for unit in held], max_tokens)
    packs = [_sequences([held[i] for i in indices], multiple, share_prompts) for indices in plan]
    missing = num_passes(len(packs), mesh) - len(packs)
    order = [[sample for i in indices for sample in units[i]] for indices in plan]
    return order + [[]] * missing, [pack.to(mesh.device) for pack in packs + [_empty_sequence(multiple)] * missing]


def _units(samples: Sequence[Sample], max_tokens: int, share_prompts: bool) -> list[list[int]]:
    """Return the indices of samples that share a pack: each alone, or with others of its prompt, as many as fit."""
    if not share_prompts:
        return [[index] for index in range(len(samples))]
    units: list[list[int]] = []
    for group in _groups(samples):
        tokens = max_tokens  # full: the first sample of a group begins a unit
        for index in group:
            tokens += len(samples[index].response)
            if tokens > max_tokens:
                units.append([])
                tokens = samples[index].num_tokens
            units[-1].append(index)
    return units


def _token_multiple(mesh: Mesh) -> int:
    return mesh.tensor_size if mesh.layout.sequence_parallel else 1


def _sequences(units: Sequence[Sequence[Sample]], multiple: int, share_prompts: bool) -> Pack:
    """Lay prompts and responses end to end; the response tokens are scored."""
    if share_prompts:
        prompts = [one for unit in units for one in by_prompt(unit)]
        groups = [(torch.tensor(one[0].prompt), [torch.tensor(sample.response) for sample in one]) for one in prompts]
        return pack_groups(groups, multiple)
    samples = [sample for unit in units for sample in unit]
    masks = [torch.arange(sample.num_tokens) >= len(sample.prompt) for sample in samples]
    sequences = [torch.tensor([*sample.prompt, *sample.response]) for sample in samples]
    return pack_sequences(sequences, masks, multiple)


def _pack(
    units: Sequence[Sequence[Sample]],
    aggregation: Aggregation,
    counts: GlobalCounts,
    multiple: int,
    share_prompts: bool,
) -> TrainPack:
    samples = [sample for unit in units for sample in unit]
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
        **vars(_sequences(units, multiple, share_prompts)),
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
