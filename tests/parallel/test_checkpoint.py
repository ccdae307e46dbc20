"""Checkpoints: the next step after loading is that of the unbroken run, on the layout that saved and on any other."""

import json
import subprocess
from functools import partial
from pathlib import Path

import pytest
import torch
from megatron.core import dist_checkpointing
from safetensors.torch import load_file

from parallel.checkpoint import Checkpoints, Saved
from parallel.checkpoint_folder import CheckpointFolder, CheckpointSettings
from parallel.launch import World
from parallel.log_probs import score_tokens
from parallel.mesh import Layout, build_mesh
from parallel.model import build_model, token_values
from parallel.optimizer import OptimizerSettings, Trainable
from parallel.pack import pack_sequences
from parallel.qwen import read_shape
from parallel.schedule import forward_backward
from parallel.stored_weights import StoredWeights
from parallel.weights import export_hf
from tests.tiny_model import all_parameters, assert_relatively_close, draw_sequences

SETTINGS = OptimizerSettings(lr=1e-3, weight_decay=0.1, adam_eps=1e-3)
LAYOUTS = {
    "one process": (Layout(), 1),
    "TP2": (Layout(2), 2),
    "TP4": (Layout(4), 4),  # more tensor ranks than key/value heads
    "PP2": (Layout(1, 2), 2),
    "PP2xVP2": (Layout(1, 2, 2), 2),
    "DP2": (Layout(), 2),
    "DP3": (Layout(), 3),
    "TP2xPP2": (Layout(2, 2), 4),
    "TP2xSPxDP2": (Layout(2, sequence_parallel=True), 4),
}


def loss(model, hidden, pack, scalar=False):
    values = token_values(model, hidden) if scalar else score_tokens(model, hidden, pack)[0]
    return -values.mean(), {}


def build(world: World, layout: Layout, source: Path, dtype=torch.float32, head="lm") -> Trainable:
    mesh = build_mesh(layout, world)
    trainable = Trainable(build_model(read_shape(source), mesh, dtype, head), mesh, SETTINGS)
    trainable.load_hf(source)
    return trainable


def learn(trainable: Trainable, lr: float = 1e-3) -> None:
    packs = [
        pack_sequences([tokens], [torch.arange(len(tokens)) > 0]) for tokens in draw_sequences([10, 14, 6, 8, 8, 12])
    ]
    trainable.zero_grad()
    mesh, scalar = trainable.mesh, trainable.models[0].head == "scalar"
    forward_backward(trainable.chunks, packs[mesh.data_rank :: mesh.data_size], partial(loss, scalar=scalar))
    assert trainable.step(lr).applied


def checkpoints(trainable: Trainable, root: Path, source: Path, **settings) -> Checkpoints:
    return Checkpoints(root, trainable.mesh, {"policy": Saved(trainable, source)}, CheckpointSettings(**settings))


def save_in_between(world, layout, source: Path, root: Path, dtype=torch.float32, head="lm", save_async=True):
    """Two steps, a checkpoint, and one step more; returns this rank's parameters after it."""
    trainable = build(world, layout, source, dtype, head)
    learn(trainable)
    learn(trainable)
    owner = checkpoints(trainable, root, source, save_async=save_async)
    owner.save("step_000002", {"answer": [42, torch.arange(3)]}, {"metrics": {"score": 0.5}})
    learn(trainable)
    owner.close()
    export_hf(root.parent / "expected", trainable.models, trainable.mesh)
    return all_parameters(trainable)


def go_on(world, layout, source: Path, root: Path, dtype=torch.float32, head="lm"):
    """Load into another start, and take the third step."""
    trainable = build(world, layout, source, dtype, head)
    with torch.no_grad():
        for model in trainable.models:
            for parameter in model.parameters():
                parameter.normal_()
    trainable.weights_changed()
    loaded = checkpoints(trainable, root, source).load_latest()
    assert loaded is not None
    assert loaded.name == "step_000002"
    number, tensor = loaded.state["answer"]
    assert number == 42
    assert torch.equal(tensor, torch.arange(3))
    assert trainable.num_steps == 2
    learn(trainable)
    export_hf(
        root.parent / f"found {layout.tensor_model_parallel_size} {world.world_size}", trainable.models, trainable.mesh
    )
    return all_parameters(trainable)


def same(one, other) -> bool:
    return all(
        len(mine) == len(theirs) and all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))
        for mine, theirs in zip(one, other, strict=True)
    )


@pytest.mark.parametrize(("layout", "world_size"), LAYOUTS.values(), ids=LAYOUTS)
def test_the_same_layout_goes_on_bit_for_bit(workers, tiny_qwen, tmp_path, layout, world_size):
    source = tiny_qwen.qwen2 if world_size == 2 else tiny_qwen.qwen3
    unbroken = workers.run(save_in_between, world_size, layout, source, tmp_path / "checkpoints")
    assert same(workers.run(go_on, world_size, layout, source, tmp_path / "checkpoints"), unbroken)


@pytest.mark.parametrize(("layout", "world_size"), LAYOUTS.values(), ids=LAYOUTS)
def test_every_layout_goes_on_from_another(workers, tiny_qwen, tmp_path, layout, world_size):
    source, root = tiny_qwen.qwen2, tmp_path / "checkpoints"
    workers.run(save_in_between, 4, Layout(2, 2), source, root)
    workers.run(go_on, world_size, layout, source, root)
    expected = load_file(tmp_path / "expected" / "model.safetensors")
    found = load_file(tmp_path / f"found {layout.tensor_model_parallel_size} {world_size}" / "model.safetensors")
    assert_relatively_close(found, expected, 1e-6)


@pytest.mark.parametrize("save_async", [True, False])
def test_bf16_with_its_fp32_masters_goes_on_bit_for_bit(workers, tiny_qwen, tmp_path, save_async):
    source, root = tiny_qwen.qwen2, tmp_path / "checkpoints"
    unbroken = workers.run(save_in_between, 2, Layout(), source, root, torch.bfloat16, "lm", save_async)
    assert same(workers.run(go_on, 2, Layout(), source, root, torch.bfloat16), unbroken)


def test_a_critic_goes_on_bit_for_bit(workers, tiny_qwen, tmp_path):
    source, root = tiny_qwen.qwen2, tmp_path / "checkpoints"
    unbroken = workers.run(save_in_between, 4, Layout(2), source, root, torch.float32, "scalar")
    assert same(workers.run(go_on, 4, Layout(2), source, root, torch.float32, "scalar"), unbroken)


def load_with_megatron(world, layout, source: Path, folder: Path) -> bool:
    """Whether megatron-core loads what a rank of the same layout loads with us."""
    trainable = build(world, layout, source)
    checkpoints(trainable, folder.parent, source).load_latest()
    other = build_model(read_shape(source), trainable.mesh, torch.float32)
    wanted = {
        number: {name: item for name, item in chunk.sharded_state_dict().items() if "_extra_state" not in name}
        for number, chunk in enumerate(other)
    }
    found = dist_checkpointing.load(wanted, str(folder / "policy"))
    for number, chunk in enumerate(other):
        chunk.load_state_dict(found[number], strict=False)
    pairs = [zip(a.parameters(), b.parameters(), strict=True) for a, b in zip(trainable.models, other, strict=True)]
    return all(torch.equal(one, other) for pair in pairs for one, other in pair)


def test_megatron_core_loads_the_weights(workers, tiny_qwen, tmp_path):
    root = tmp_path / "checkpoints"
    workers.run(save_in_between, 4, Layout(2, 2), tiny_qwen.qwen3, root)
    assert workers.run(load_with_megatron, 2, Layout(2), tiny_qwen.qwen3, root / "step_000002") == [True, True]


def test_weights_are_read_as_hugging_face_tensors(workers, tiny_qwen, tmp_path):
    source, root = tiny_qwen.qwen3, tmp_path / "checkpoints"
    workers.run(save_and_export, 4, Layout(2), source, root)
    weights = StoredWeights(root / "step_000002" / "policy")
    expected = load_file(tmp_path / "exported" / "model.safetensors")
    assert set(weights.names) == set(expected)
    for name, tensor in expected.items():
        assert torch.equal(weights.rows(name, 0, len(tensor)), tensor)


def save_and_export(world, layout, source: Path, root: Path) -> None:
    trainable = build(world, layout, source)
    learn(trainable)
    checkpoints(trainable, root, source).save("step_000002", {}, {}, at_once=True)
    export_hf(root.parent / "exported", trainable.models, trainable.mesh)


def test_sha256sum_agrees_and_latest_names_it(workers, tiny_qwen, tmp_path):
    root = tmp_path / "checkpoints"
    workers.run(save_in_between, 2, Layout(), tiny_qwen.qwen2, root)
    assert (root / "latest").read_text() == "step_000002\n"
    assert CheckpointFolder(root).unfinished() == []
    info = json.loads((root / "step_000002" / "info.json").read_text())
    assert info == {"metrics": {"score": 0.5}, "optimizer_steps": {"policy": 2}}
    subprocess.run(["sha256sum", "--check", "--quiet", "SHA256SUMS"], cwd=root / "step_000002", check=True)
    listed = {line.split("  ")[1] for line in (root / "step_000002" / "SHA256SUMS").read_text().splitlines()}
    files = {
        str(path.relative_to(root / "step_000002")) for path in (root / "step_000002").rglob("*") if path.is_file()
    }
    assert listed == files - {"SHA256SUMS"}
