"""Layouts that fit and those that do not; coordinates, groups and collectives of a mesh."""

import re
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from parallel.mesh import Layout, Mesh, build_mesh
from parallel.qwen import QwenShape
from parallel.rope import RopeSettings

SHAPE = QwenShape(
    family="qwen2",
    num_layers=4,
    hidden_size=64,
    num_attention_heads=4,
    num_query_groups=2,
    head_dim=16,
    ffn_hidden_size=96,
    vocab_size=150,
    tie_word_embeddings=True,
    rms_norm_eps=1e-6,
    max_position_embeddings=128,
    rope=RopeSettings("default", theta=1e4),
)


def test_sizes_of_a_layout():
    layout = Layout(2, 4, 3)
    assert (layout.model_parallel_size, layout.num_chunks, layout.num_stages) == (8, 3, 12)
    assert (Layout().model_parallel_size, Layout().num_chunks, Layout().num_stages) == (1, 1, 1)
    assert layout.data_parallel_size(24) == 3


def test_world_that_is_no_multiple_of_one_copy_is_refused():
    message = "world size: got 6, allowed: multiples of tensor 2 x pipeline 2 x context 1 = 4"
    with pytest.raises(ValueError, match=message):
        Layout(2, 2).data_parallel_size(6)
    with pytest.raises(ValueError, match=message):
        Layout(2, 2).check(SHAPE, 6)


@pytest.mark.parametrize(
    ("layout", "world_size"),
    [
        (Layout(), 1),
        (Layout(), 3),
        (Layout(2, sequence_parallel=True), 2),
        (Layout(2, 2), 8),
        (Layout(1, 4), 4),
        (Layout(1, 2, 2), 2),
        (Layout(4), 4),
        (Layout(1, 2, num_layers_in_last_pipeline_stage=1), 2),
        (Layout(1, 3, num_layers_in_first_pipeline_stage=2), 3),
        (Layout(1, 3, num_layers_in_first_pipeline_stage=1, num_layers_in_last_pipeline_stage=1), 3),
        (Layout(1, 2, 2, num_layers_in_first_pipeline_stage=2, num_layers_in_last_pipeline_stage=2), 2),
    ],
)
def test_layout_that_fits_is_accepted(layout, world_size):
    layout.check(SHAPE, world_size)


VIRTUAL = "allowed: none, or at least 2 with at least 2 pipeline stages"


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        (Layout(tensor_model_parallel_size=0), "tensor_model_parallel_size: got 0, allowed: integers from 1"),
        (Layout(pipeline_model_parallel_size=-1), "pipeline_model_parallel_size: got -1, allowed: integers from 1"),
        (Layout(context_parallel_size=0), "context_parallel_size: got 0, allowed: integers from 1"),
        (Layout(context_parallel_size=2), "context_parallel_size: got 2, allowed: 1 ("),
        (
            Layout(sequence_parallel=True),
            "sequence_parallel: got True, allowed: False when tensor_model_parallel_size is 1",
        ),
        (
            Layout(tensor_model_parallel_size=3),
            "tensor_model_parallel_size: got 3, but num_attention_heads = 4 is no multiple of it; "
            "allowed for this model: [1, 2, 4]",
        ),
        (
            Layout(1, 1, 2),
            f"virtual_pipeline_model_parallel_size: got 2 with pipeline_model_parallel_size 1; {VIRTUAL}",
        ),
        (
            Layout(1, 2, 1),
            f"virtual_pipeline_model_parallel_size: got 1 with pipeline_model_parallel_size 2; {VIRTUAL}",
        ),
        (
            Layout(1, 2, 0),
            f"virtual_pipeline_model_parallel_size: got 0 with pipeline_model_parallel_size 2; {VIRTUAL}",
        ),
        (
            Layout(1, 3),
            "pipeline_model_parallel_size x virtual_pipeline_model_parallel_size: got 3 stages, but num_layers = 4 "
            "is no multiple of it; allowed: divisors of num_layers",
        ),
        (
            Layout(1, 2, 4),
            "pipeline_model_parallel_size x virtual_pipeline_model_parallel_size: got 8 stages, but num_layers = 4 "
            "is no multiple of it; allowed: divisors of num_layers",
        ),
    ],
)
def test_layout_that_does_not_fit_names_field_value_and_allowed_values(layout, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        layout.check(SHAPE, 12)


@pytest.mark.parametrize(
    ("sizes", "size", "message"),
    [
        ({"num_query_groups": 4}, 6, "num_query_groups = 4 is neither a multiple nor a divisor of it"),
        # 12 query heads, a key and a value head of 2 rows each: 28 rows.
        (
            {"num_query_groups": 1, "head_dim": 2},
            12,
            "the number of query, key and value rows = 28 is no multiple of it",
        ),
    ],
)
def test_key_value_heads_that_cannot_be_shared_are_refused(sizes, size, message):
    shape = replace(SHAPE, num_attention_heads=12, hidden_size=96, **sizes)
    with pytest.raises(
        ValueError, match=f"tensor_model_parallel_size: got {size}, but {message}; allowed for this model"
    ):
        Layout(size).check(shape, 12)


def test_key_value_heads_of_a_tensor_rank():
    """2 heads: both, one each, then one for two ranks."""
    assert [Layout(size).local_kv_heads(SHAPE) for size in (1, 2, 4)] == [2, 1, 1]


def coordinates(layout: Layout, world_size: int) -> list[tuple[int, int, int]]:
    """(tensor, data, pipeline) rank of every rank."""
    ranks = [Mesh(layout, rank, world_size, torch.device("cpu"), *[None] * 5) for rank in range(world_size)]
    return [(mesh.tensor_rank, mesh.data_rank, mesh.pipeline_rank) for mesh in ranks]


def test_tensor_index_changes_fastest_and_pipeline_index_slowest():
    expected = [(0, 0, 0), (1, 0, 0), (0, 1, 0), (1, 1, 0), (0, 0, 1), (1, 0, 1), (0, 1, 1), (1, 1, 1)]
    assert coordinates(Layout(2, 2), 8) == expected
    assert coordinates(Layout(), 3) == [(0, 0, 0), (0, 1, 0), (0, 2, 0)]
    assert coordinates(Layout(1, 3), 3) == [(0, 0, 0), (0, 0, 1), (0, 0, 2)]


def test_first_and_last_stage():
    ends = []
    for rank in range(3):
        mesh = Mesh(Layout(1, 3), rank, 3, torch.device("cpu"), *[None] * 5)
        ends.append((mesh.is_first_stage, mesh.is_last_stage))
    assert ends == [(True, False), (False, False), (False, True)]


@pytest.mark.parametrize("layout", [Layout(2, 2), Layout(2), Layout(1, 2)])
def test_groups_and_collectives_agree_with_the_coordinates(workers, layout):
    """Rank r contributes r + 1; each expectation is computed from the coordinates alone."""
    done = workers.run(use_collectives, 4, layout)
    where = coordinates(layout, 4)
    for (tensor, data, pipeline), found in zip(where, done, strict=True):
        ranks = {
            "tensor": [r for r in range(4) if where[r][1:] == (data, pipeline)],
            "data": [r for r in range(4) if where[r][0] == tensor and where[r][2] == pipeline],
            "pipeline": [r for r in range(4) if where[r][:2] == (tensor, data)],
            "model": [r for r in range(4) if where[r][1] == data],
        }
        last = ranks["pipeline"][-1]
        assert found == {
            "groups": ranks,
            "rank_of": where.index((tensor, data, pipeline)),
            "sum": sum(r + 1 for r in ranks["data"]),
            "max": max(ranks["data"]) + 1,
            "gathered": ranks["data"],
            "from_last_stage": last + 1,
            "object_from_last_stage": {"rank": last},
            "from_first_model_rank": {"rank": ranks["model"][0]},
        }


def use_collectives(world, layout: Layout) -> dict:
    mesh = build_mesh(layout, world)
    groups = (("tensor", mesh.tensor_group), ("data", mesh.data_group), ("pipeline", mesh.pipeline_group))
    own = {"tensor_rank": mesh.tensor_rank, "data_rank": mesh.data_rank, "pipeline_rank": mesh.pipeline_rank}
    return {
        "groups": {name: dist.get_process_group_ranks(group) for name, group in (*groups, ("model", mesh.model_group))},
        "rank_of": mesh.rank_of(**own),
        "sum": int(mesh.sum_over_data(torch.tensor([world.rank + 1]))),
        "max": int(mesh.max_over_data(torch.tensor([world.rank + 1]))),
        "gathered": mesh.gather_over_data(world.rank),
        "from_last_stage": int(mesh.from_last_stage(torch.tensor([world.rank + 1]))),
        "object_from_last_stage": mesh.object_from_last_stage({"rank": world.rank}),
        "from_first_model_rank": mesh.from_first_model_rank({"rank": world.rank}),
    }


def test_mesh_refuses_a_world_that_does_not_fit_on_every_rank(workers):
    messages = workers.run(refusal_of, 2, Layout(3))
    assert messages == ["world size: got 2, allowed: multiples of tensor 3 x pipeline 1 x context 1 = 3"] * 2


def refusal_of(world, layout: Layout) -> str:
    with pytest.raises(ValueError) as error:
        build_mesh(layout, world)
    return str(error.value)
