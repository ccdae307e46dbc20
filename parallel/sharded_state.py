"""Which boxes of a checkpoint's tensors this rank has: of its model chunks and of its distributed optimizer.

Keys and shapes are those of megatron-core: `decoder.layers.mlp.linear_fc1.weight` `[layers, rows, columns]` for the
weights, the same after `optimizer.state.exp_avg.` and so on for Adam's moments and, under bf16, the fp32 masters.
megatron-core's optimizer has of each parameter a range of its flat values: that is up to three boxes (the end of a row,
whole rows, the start of a row), so that each rank writes and reads its own part and nothing is gathered.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from parallel.hf_tensors import LAYER, Rule, tensor_rules
from parallel.mesh import Mesh
from parallel.optimizer import Trainable
from parallel.stored_weights import FUSED_INTO_LINEAR

MOMENTS = ("exp_avg", "exp_avg_sq")
MASTER = "fp32_param"
OPTIMIZER = "optimizer.state."


@dataclass(frozen=True)
class Box:
    """A box of a stored tensor that this rank has.

    Attributes:
        key, size, offsets: see `parallel.stored_pieces.Piece`.
        values: a view of what the rank has there, of the box's shape.
        writes: whether this rank is the one that writes it; others may have the same.
        pads: the tensor's last rows pad it to a size that depends on the layout.
    """

    key: str
    size: tuple[int, ...]
    offsets: tuple[int, ...]
    values: Tensor
    writes: bool
    pads: bool


@dataclass(frozen=True)
class _Place:
    """Where a parameter's rows lie in a stored tensor.

    Attributes:
        layer: index of the layer there, if it holds several.
        runs: (first row here, first row there, number of rows), in order; of vectors the rows are values.
        column: first column there.
    """

    key: str
    size: tuple[int, ...]
    layer: int | None
    runs: tuple[tuple[int, int, int], ...]
    column: int
    writes: bool
    pads: bool

    def boxes(self, prefix: str, row: int, column: int, values: Tensor, writes: bool) -> Iterator[Box]:
        """Yield the boxes of a block of the parameter that begins at (row, column)."""
        leading = () if self.layer is None else (self.layer,)
        for start, there, length in self.runs:
            low, high = max(start, row), min(start + length, row + len(values))
            if low < high:
                part = values[low - row : high - row]
                beyond = (self.column + column,) if part.dim() == 2 else ()
                offsets = (*leading, there + low - start, *beyond)
                yield Box(prefix + self.key, self.size, offsets, part[(None,) * len(leading)], writes, self.pads)


def weight_boxes(trainable: Trainable) -> list[Box]:
    """Return the boxes of this rank's weights. Data ranks have the same and take turns in writing."""
    mesh = trainable.mesh
    return [
        box
        for number, (parameter, place) in enumerate(_places(trainable))
        for box in place.boxes("", 0, 0, parameter.data, place.writes and number % mesh.data_size == mesh.data_rank)
    ]


def optimizer_boxes(trainable: Trainable) -> list[Box]:
    """Return the boxes of this rank's part of the optimizer, whose state must exist (`prepare_state`)."""
    boxes: list[Box] = []
    for parameter, place in _places(trainable):
        found = _owned(trainable, parameter)
        if found is None:
            continue
        start, states = found
        width = parameter.shape[-1] if parameter.dim() == 2 else 1
        for name, flat in states.items():
            for row, column, values in _blocks(start, flat, width, parameter.dim()):
                boxes += place.boxes(f"{OPTIMIZER}{name}.", row, column, values, place.writes)
    return boxes


def prepare_state(trainable: Trainable) -> None:
    """Give each of this rank's parameters Adam's moments, zero, where it has none: before the first step."""
    for optimizer in _optimizers(trainable):
        _set_adam_step(optimizer, trainable.num_steps)
        for group in optimizer.param_groups:
            for master in group["params"]:
                state = optimizer.state[master]
                for name in MOMENTS:
                    if name not in state:
                        state[name] = torch.zeros_like(master, requires_grad=False)


def _set_adam_step(optimizer: Any, step: int) -> None:
    """torch's Adam keeps the step for each parameter; those of Transformer Engine and Apex, for a group."""
    per_parameter = type(optimizer).__module__.startswith("torch.")
    for group in optimizer.param_groups:
        if not per_parameter:
            group["step"] = step
            continue
        for master in group["params"]:
            optimizer.state[master]["step"] = torch.tensor(float(step))


def set_step(trainable: Trainable, step: int) -> None:
    """Set the number of optimizer steps taken, on which Adam's bias correction depends."""
    trainable.num_steps = step
    for optimizer in _optimizers(trainable):
        _set_adam_step(optimizer, step)


def _optimizers(trainable: Trainable) -> list[Any]:
    """Return the optimizers below megatron-core's."""
    return [one.optimizer for one in trainable.optimizer.chained_optimizers if one.optimizer is not None]


def _places(trainable: Trainable) -> Iterator[tuple[nn.Parameter, _Place]]:
    """Yield this rank's parameters and where they are stored; of a tied matrix's copies all lie in the embedding."""
    mesh = trainable.mesh
    for chunk in trainable.models:
        rules = tensor_rules(chunk.shape, chunk.head)
        tied = chunk.shape.tie_word_embeddings and chunk.head == "lm"
        for name, parameter in chunk.named_parameters():
            match = LAYER.match(name)
            key = name if match is None else LAYER.sub("decoder.layers.", name)
            layer = None
            if match is not None:
                layer = chunk.decoder.layers[int(match["index"])].layer_number - 1
            is_copy = tied and key == "output_layer.weight"
            rule = rules[key]
            key = "embedding.word_embeddings.weight" if is_copy else FUSED_INTO_LINEAR.get(key, key)
            runs, column, full = _cut(rule, tuple(parameter.shape), mesh)
            size = full if layer is None else (chunk.shape.num_layers, *full)
            writes = not is_copy and (rule.split_dim is not None or mesh.tensor_rank == 0)
            yield parameter, _Place(key, size, layer, runs, column, writes, rule.padded)


def _cut(
    rule: Rule, shape: tuple[int, ...], mesh: Mesh
) -> tuple[tuple[tuple[int, int, int], ...], int, tuple[int, ...]]:
    """Return the runs of a parameter, its first column, and the whole parameter's size."""
    rank, size, rows = mesh.tensor_rank, mesh.tensor_size, shape[0]
    if rule.split_dim is None:
        return ((0, 0, rows),), 0, shape
    if rule.split_dim == 1:
        return ((0, 0, rows),), rank * shape[1], (rows, shape[1] * size)
    full = (rows * size, *shape[1:])
    if rule.padded or rule.groups:
        return ((0, rank * rows, rows),), 0, full
    length = rows // len(rule.tensors)  # one block of each tensor after the other, here and there
    runs = ((index * length, (index * size + rank) * length, length) for index in range(len(rule.tensors)))
    return tuple(runs), 0, full


def _owned(trainable: Trainable, parameter: nn.Parameter) -> tuple[int, dict[str, Tensor]] | None:
    """Return the first flat index that this rank's optimizer has of a parameter, and its state from there on."""
    for optimizer in trainable.optimizer.chained_optimizers:
        if parameter not in optimizer.model_param_gbuf_map:
            continue  # of another chunk, or all of it belongs to other data ranks
        owned = optimizer._get_model_param_range_map(parameter)["param"]
        group, order = optimizer.model_param_group_index_map[parameter]
        master = optimizer.optimizer.param_groups[group]["params"][order]
        states = {name: optimizer.optimizer.state[master][name] for name in MOMENTS}
        if master.data_ptr() != parameter.view(-1)[owned.start :].data_ptr():
            states[MASTER] = master.data
        return owned.start, states
    return None


def _blocks(start: int, flat: Tensor, width: int, dims: int) -> Iterator[tuple[int, int, Tensor]]:
    """Cut values that begin at flat index `start` into blocks of a matrix `width` wide: (row, column, values)."""
    if dims == 1:
        yield start, 0, flat
        return
    at, end = start, start + len(flat)
    while at < end:
        row, column = divmod(at, width)
        length = min(width - column, end - at) if column or end - at < width else (end - at) // width * width
        yield row, column, flat[at - start : at - start + length].view(-1, min(length, width))
        at += length
