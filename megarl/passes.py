"""Forward passes over the samples of a step: a number for each token of each sample, the same on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from megarl.batch import Sample, lay_out, spread_samples
from parallel.log_probs import score_tokens
from parallel.mesh import Mesh
from parallel.model import QwenModel, token_values
from parallel.pack import Pack
from parallel.schedule import forward


@dataclass(frozen=True)
class FrozenModel:
    """Model chunks that are never trained (reference, reward model); idle ones leave the GPU if `offload`."""

    chunks: Sequence[QwenModel]
    mesh: Mesh
    offload: bool = True

    def __post_init__(self) -> None:
        for chunk in self.chunks:
            chunk.requires_grad_(requires_grad=False)
        self._rest()

    @contextmanager
    def on_device(self) -> Iterator[Sequence[QwenModel]]:
        """Have the weights on this rank's device for a while."""
        for chunk in self.chunks:
            chunk.to(self.mesh.device)
        try:
            yield self.chunks
        finally:
            self._rest()

    def _rest(self) -> None:
        if self.offload:
            for chunk in self.chunks:
                chunk.to("cpu")


def response_log_probs(
    chunks: Sequence[QwenModel],
    samples: Sequence[Sample],
    max_tokens: int,
    mesh: Mesh,
    share_prompts: bool = False,
    *,
    temperature: float,
) -> list[Tensor]:
    """Score the response tokens of all samples with a language model: `[len(response)]` fp32 on the CPU for each.

    Args:
        samples: the same on every rank.
        max_tokens: token budget of a pack.
        share_prompts: compute a prompt once for its responses, see `megarl.batch`.
    """

    def head(model: QwenModel, hidden: Tensor, pack: Pack) -> Tensor:
        return score_tokens(model, hidden, pack, temperature)[0]

    return _over_samples(chunks, samples, max_tokens, mesh, head, share_prompts)


def state_values(
    chunks: Sequence[QwenModel], samples: Sequence[Sample], max_tokens: int, mesh: Mesh, share_prompts: bool = False
) -> list[Tensor]:
    """Value every state of a response with a scalar head: `[len(response) + 1]` fp32 on the CPU for each sample, from
    the one before its first token to the one after its last; arguments as in `response_log_probs`."""

    def head(model: QwenModel, hidden: Tensor, pack: Pack) -> Tensor:
        both = token_values(model, hidden, torch.cat([pack.sources, pack.scored]))
        return both.unflatten(0, (2, -1)).T

    values = _over_samples(chunks, samples, max_tokens, mesh, head, share_prompts)
    return [torch.cat([value[:, 0], value[-1:, 1]]) for value in values]


def _over_samples(
    chunks: Sequence[QwenModel],
    samples: Sequence[Sample],
    max_tokens: int,
    mesh: Mesh,
    head: Callable[[QwenModel, Tensor, Pack], Tensor],
    share_prompts: bool,
) -> list[Tensor]:
    """Run `head` over all samples, shared out over data ranks; it gives a row for each response token, in order."""
    share = spread_samples(samples, mesh.data_size, share_prompts)[mesh.data_rank]
    mine = [samples[index] for index in share]
    plan, packs = lay_out(mine, max_tokens, mesh, share_prompts)
    outputs = forward(chunks, packs, head)
    scored: list[tuple[int, Tensor]] = []
    for indices, output in zip(plan, outputs, strict=True) if mesh.is_last_stage else ():
        sizes = [len(mine[index].response) for index in indices]
        parts = output.float().cpu().split(sizes)
        scored += [(share[index], part.clone()) for index, part in zip(indices, parts, strict=True)]
    everywhere = dict(item for items in mesh.gather_over_data(mesh.object_from_last_stage(scored)) for item in items)
    return [everywhere[index] for index in range(len(samples))]
