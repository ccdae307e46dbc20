"""The state of a run as plain values and tensors, which `torch.load(weights_only=True)` reads, and back."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from megarl.batch import Sample
from megarl.data.prompts import PromptExample
from megarl.responses import ExpectedLengths, OpenGroup
from megarl.state import RowState, State, StepUnderWay
from rollout.requests import Paused, Request

CLASSES = {
    kind.__name__: kind
    for kind in (
        *(ExpectedLengths, OpenGroup, Paused, PromptExample, Request, RowState),
        *(Sample, State, StepUnderWay),
    )
}
"""Dataclasses that a state may be made of."""
KIND = "dataclass"
INTEGERS = "integers"
MANY = 16
"""So many integers in a row are kept as a tensor: pickled one by one, the tokens of a large step take minutes."""


def to_plain(value: Any) -> Any:
    """Return a value made of `CLASSES`, containers, tensors and numbers as one without dataclasses."""
    if dataclasses.is_dataclass(value):
        kind = type(value).__name__
        assert kind in CLASSES, kind
        fields = {field.name: to_plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
        return {KIND: kind, **fields}
    if isinstance(value, list | tuple):
        if len(value) >= MANY and all(type(item) is int for item in value):
            return {INTEGERS: torch.tensor(value), "tuple": isinstance(value, tuple)}
        return type(value)([to_plain(item) for item in value])
    if isinstance(value, dict):
        return {name: to_plain(item) for name, item in value.items()}
    if isinstance(value, Tensor):
        return value.detach().clone().cpu()  # a view would bring all that it is a view of
    return value


def from_plain(value: Any) -> Any:
    """Return what `to_plain` was given."""
    if isinstance(value, dict):
        if KIND in value:
            fields = {name: from_plain(item) for name, item in value.items() if name != KIND}
            return CLASSES[value[KIND]](**fields)
        if INTEGERS in value:
            integers = value[INTEGERS].tolist()
            return tuple(integers) if value["tuple"] else integers
        return {name: from_plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)([from_plain(item) for item in value])
    return value
