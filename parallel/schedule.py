"""The only caller of megatron-core's pipeline schedules.

Losses are weighted per token before the forward pass and summed: nothing here divides, so the gradient is the same for
every split into packs and over ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from parallel.mesh import Mesh
from parallel.model import QwenModel
from parallel.pack import Pack

P = TypeVar("P", bound=Pack)
Output = TypeVar("Output")
LossHead = Callable[[QwenModel, Tensor, P], tuple[Tensor, dict[str, Tensor]]]
"""(last stage, hidden states, pack) -> (scalar loss to sum over packs and data ranks, metrics to keep)."""
OutputHead = Callable[[QwenModel, Tensor, P], Output]


def num_passes(num_packs: int, mesh: Mesh) -> int:
    """Return how many micro-batches every data rank must run: the largest count of the data group, rounded up to a
    multiple of the pipeline size when stages are interleaved (megatron-core's schedule asks for it).

    Every rank of the data group must call it. Ranks with fewer packs fill up with packs of weight zero.
    """
    most = mesh.max_over_data(torch.tensor([num_packs], device=mesh.device))
    multiple = mesh.pipeline_size if mesh.layout.num_chunks > 1 else 1
    return -(-int(most) // multiple) * multiple


def forward(chunks: Sequence[nn.Module], packs: Sequence[P], head: OutputHead[P, Output]) -> list[Output]:
    """Run a forward pass without gradients.

    Args:
        chunks: this rank's model chunks, wrapped by DDP or not.
        packs: the same number on every rank of the pipeline (`num_passes`).
        head: called on the last stage only.

    Returns: the head's output for each pack on the last pipeline stage, an empty list elsewhere.
    """

    def loss(model: QwenModel, hidden: Tensor, pack: P) -> tuple[Tensor, Output]:
        return hidden.new_zeros(()), head(model, hidden, pack)

    return _run(chunks, packs, loss, forward_only=True)


def forward_backward(chunks: Sequence[nn.Module], packs: Sequence[P], loss: LossHead[P]) -> list[dict[str, Tensor]]:
    """Run forward and backward passes; gradients are added to `main_grad` and summed over all data ranks.

    Args:
        chunks: this rank's model chunks, wrapped by DDP (`parallel.optimizer`).
        packs: the same number on every rank (`num_passes`); may differ in size.
        loss: called on the last stage only.

    Returns: the metrics of each pack on the last pipeline stage, an empty list elsewhere.
    """
    return _run(chunks, packs, loss, forward_only=False)


def _run(chunks: Sequence[nn.Module], packs: Sequence[P], head: Callable[..., Any], forward_only: bool) -> list[Any]:
    from megatron.core.pipeline_parallel import get_forward_backward_func

    for chunk in chunks:
        chunk.train(not forward_only)
    with torch.set_grad_enabled(not forward_only):
        return get_forward_backward_func()(
            forward_step_func=partial(_forward_step, head=head),
            data_iterator=[iter(packs) for _ in chunks] if len(chunks) > 1 else iter(packs),
            model=list(chunks),
            num_microbatches=len(packs),
            seq_length=1,  # packs differ in size: stages exchange shapes (`variable_seq_lengths`)
            micro_batch_size=1,
            forward_only=forward_only,
        )


def _forward_step(packs: Iterator[P], chunk: nn.Module, head: Callable[..., Any]) -> tuple[Tensor, Callable[..., Any]]:
    pack = next(packs)
    return chunk(pack), partial(_apply_head, head=head, model=unwrap(chunk), pack=pack)


def _apply_head(hidden: Tensor, head: Callable[..., Any], model: QwenModel, pack: Pack) -> tuple[Tensor, Tensor, Any]:
    loss, kept = head(model, hidden, pack)
    # With three values megatron-core divides by nothing; the count goes unused (see `parallel.optimizer`).
    return loss, torch.ones((), dtype=torch.int, device=loss.device), kept


def unwrap(chunk: nn.Module) -> QwenModel:
    """Return the model inside DDP."""
    return chunk if isinstance(chunk, QwenModel) else chunk.module  # type: ignore[return-value]
