"""A state becomes plain values and is the same again."""

import io

import pytest
import torch

from megarl.batch import Sample
from megarl.data.prompts import PromptExample
from megarl.responses import ExpectedLengths, OpenGroup
from megarl.saved_state import from_plain, to_plain
from megarl.state import RowState, State, StepUnderWay
from rollout.requests import Paused, Request


def sample(index: int = 0, **changes) -> Sample:
    values = {"prompt_id": 7, "sample_index": index, "prompt": tuple(range(20)), "response": [5, 6], "score": 0.5}
    return Sample(**{**values, "rollout_log_probs": torch.tensor([-1.5, -0.25]), "truncated": True, **changes})


def through_a_file(value):
    buffer = io.BytesIO()
    torch.save(to_plain(value), buffer)
    buffer.seek(0)
    return from_plain(torch.load(buffer, weights_only=True))


def same(one, other) -> bool:
    """Equality of dataclasses that hold tensors."""
    return type(one) is type(other) and repr(to_plain(one)) == repr(to_plain(other))


def test_a_state_in_the_middle_of_a_step_comes_back():
    prompt = PromptExample(3, ({"role": "user", "content": "2 + 2"},), "4", tuple(range(40)))
    request = Request(3, prompt.tokens, num_samples=2, first_sample=1, stop_token_ids=(1, 2))
    paused = Paused(request, 1, (4, 5), ((-0.5, -0.25, float("nan")), (0.0, 0.0, 1.0)), (8, 9))
    assessed = [sample(advantage=torch.tensor([1.0, 2.0]), values=torch.zeros(2), loss_mask=[True, False])]
    state = State(
        step=8,
        unfinished=[OpenGroup(prompt, [sample(1)], [request, paused])],
        surplus=[[sample(2), sample(3)]],
        under_way=StepUnderWay([[sample()]], {"score": 0.5}, assessed, [{"loss": 1.0}], 0.25),
        expected=ExpectedLengths({123456789012: 3.5}, 3.5),
        summary={"accuracy_before": 0.125},
    )
    again = through_a_file(state)
    assert same(again, state)
    assert again.unfinished[0].rest[1].tokens == (4, 5)
    assert type(again.unfinished[0].prompt.tokens) is tuple
    assert again.unfinished[0].prompt.tokens == tuple(range(40))
    assert torch.equal(again.under_way.samples[0].advantage, torch.tensor([1.0, 2.0]))
    assert again.under_way.samples[0].loss_mask == [True, False]


@pytest.mark.parametrize("integers", [list(range(1000)), tuple(range(1000)), [2**62] * 16, [], (), [1, 2]])
def test_rows_of_integers_keep_type_and_values(integers):
    again = through_a_file(integers)
    assert again == integers
    assert type(again) is type(integers)


def test_rows_of_truth_values_and_mixed_rows_stay_as_they_are():
    for row in ([True] * 20, [1, 2.5] * 10, [1] * 20 + [None]):
        again = through_a_file(row)
        assert again == row
        assert [type(item) for item in again] == [type(item) for item in row]


def test_a_tensor_does_not_bring_what_it_is_a_view_of():
    whole = torch.zeros(1_000_000)
    buffer = io.BytesIO()
    torch.save(to_plain(RowState(summary={"x": whole[:2]})), buffer)
    assert len(buffer.getvalue()) < 10_000


def test_other_classes_are_refused():
    with pytest.raises(AssertionError, match="Exotic"):
        to_plain(_exotic())


def _exotic():
    from dataclasses import make_dataclass

    return make_dataclass("Exotic", ["x"])(1)
