"""Checkpoints of weights: written by one process, loaded by megatron-core on every layout, and read back exactly."""

import json
import multiprocessing
import os
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from megatron.core import dist_checkpointing
from safetensors.torch import load_file, save_file

from parallel.hf_folder import open_source
from parallel.launch import World
from parallel.mesh import Layout, build_mesh
from parallel.model import build_model
from parallel.qwen import read_shape
from parallel.stored_weights import HF_PART, StoredWeights
from parallel.stored_writer import write_checkpoint
from parallel.weights import import_hf

LAYOUTS = {
    "one process": (Layout(), 1),
    "TP2": (Layout(2), 2),
    "PP2": (Layout(1, 2), 2),
    "PP2xVP2": (Layout(1, 2, 2), 2),
}


@pytest.fixture(scope="module")
def checkpoints(tiny_qwen, tmp_path_factory) -> dict[str, tuple[Path, Path]]:
    """A checkpoint of each family: (its source, itself)."""
    folder = tmp_path_factory.mktemp("checkpoints")
    made = {}
    for name, source in vars(tiny_qwen).items():
        with open_source(source) as opened:
            write_checkpoint(folder / name, source, opened, read_shape(source), "lm", lambda _: None)
        made[name] = (source, folder / name)
    return made


def load_both(world: World, layout: Layout, source: Path, checkpoint: Path) -> bool:
    """Whether megatron-core loads the parameters that `import_hf` copies."""
    mesh = build_mesh(layout, world)
    shape = read_shape(source)
    imported, loaded = (build_model(shape, mesh, torch.float32) for _ in range(2))
    import_hf(source, imported, mesh)
    wanted = [
        {name: item for name, item in chunk.sharded_state_dict().items() if "_extra_state" not in name}
        for chunk in loaded
    ]
    found = dist_checkpointing.load(dict(enumerate(wanted)), str(checkpoint))  # all at once: each piece is asked for
    for number, chunk in enumerate(loaded):
        chunk.load_state_dict(found[number], strict=False)
    both = [[parameter for chunk in chunks for parameter in chunk.parameters()] for chunks in (imported, loaded)]
    return all(torch.equal(one, other) for one, other in zip(*both, strict=True))


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
@pytest.mark.parametrize(("layout", "world_size"), LAYOUTS.values(), ids=LAYOUTS)
def test_megatron_core_loads_it_on_every_layout(workers, checkpoints, layout, world_size, family):
    assert workers.run(load_both, world_size, layout, *checkpoints[family]) == [True] * world_size


def whole(weights: StoredWeights, name: str) -> torch.Tensor:
    return torch.cat([weights.rows(name, *span) for span in weights.info(name).pieces()])


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_it_is_read_back_exactly(checkpoints, family):
    source, checkpoint = checkpoints[family]
    weights = StoredWeights(checkpoint)
    read = {name: whole(weights, name) for name in weights.names}
    expected = load_file(source / "model.safetensors")
    assert set(read) == set(expected) - ({"lm_head.weight"} if weights.shape.tie_word_embeddings else set())
    assert all(torch.equal(tensor, expected[name]) for name, tensor in read.items())
    assert (checkpoint / HF_PART / "config.json").read_bytes() == (source / "config.json").read_bytes()


def save_trained(world: World, layout: Layout, source: Path, target: Path) -> None:
    """Save a running layout with megatron-core itself."""
    mesh = build_mesh(layout, world)
    (model,) = build_model(read_shape(source), mesh, torch.float32)
    import_hf(source, [model], mesh)
    multiprocessing.current_process()._config["daemon"] = False  # megatron-core writes in child processes
    dist_checkpointing.save(model.sharded_state_dict(), str(target))


@pytest.mark.parametrize("layout", [Layout(2), Layout(1, 2)], ids=["TP2", "PP2"])
def test_what_megatron_core_saves_is_read_exactly(workers, tiny_qwen, tmp_path, layout):
    """Parameters in pieces, put together by one process; cut embeddings are padded to another size."""
    target = tmp_path / "saved"
    target.mkdir()
    workers.run(save_trained, 2, layout, tiny_qwen.qwen3, target)
    (target / HF_PART).mkdir()
    shutil.copyfile(tiny_qwen.qwen3 / "config.json", target / HF_PART / "config.json")
    weights = StoredWeights(target)
    expected = load_file(tiny_qwen.qwen3 / "model.safetensors")
    for name in weights.names:
        assert torch.equal(whole(weights, name), expected[name]), name


class Evil:
    def __reduce__(self):
        return os.system, ("touch evil",)


def damaged(checkpoint: Path, folder: Path) -> Path:
    copy = folder / "copy"
    shutil.copytree(checkpoint, copy)
    return copy


def test_broken_checkpoints_are_refused_before_any_tensor_is_read(checkpoints, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    copy = damaged(checkpoints["qwen2"][1], tmp_path)
    data = copy / "__0_0.distcp"
    data.write_bytes(data.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"__0_0\.distcp is missing or cut off; expected \d+ bytes"):
        StoredWeights(copy)
    metadata = (copy / ".metadata").read_bytes()
    (copy / ".metadata").write_bytes(metadata[:100])
    with pytest.raises(ValueError, match=r"\.metadata can't be read"):
        StoredWeights(copy)
    (copy / ".metadata").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(ValueError, match=r"it holds \w+\.system, which no checkpoint needs"):
        StoredWeights(copy)
    assert not (tmp_path / "evil").exists()
    (copy / "metadata.json").write_text(json.dumps({"sharded_backend": "zarr"}))
    with pytest.raises(ValueError, match=r"sharded_backend of .*: got 'zarr', allowed: 'torch_dist'"):
        StoredWeights(copy)
    with pytest.raises(ValueError, match="is no checkpoint"):
        StoredWeights(tmp_path)


def test_a_checkpoint_of_another_shape_is_refused(checkpoints, tmp_path):
    copy = damaged(checkpoints["qwen2"][1], tmp_path)
    config = json.loads((copy / HF_PART / "config.json").read_text())
    for field in ("num_hidden_layers", "intermediate_size"):
        (copy / HF_PART / "config.json").write_text(json.dumps(config | {field: 2 * config[field]}))
        with pytest.raises(ValueError, match=r"tensor decoder\.layers\..* has shape \[.*\]; expected \["):
            StoredWeights(copy)


def test_tensors_of_one_parameter_have_one_dtype(tiny_qwen, tmp_path):
    shutil.copytree(tiny_qwen.qwen2, tmp_path / "mixed")
    tensors = load_file(tiny_qwen.qwen2 / "model.safetensors")
    name = "model.layers.0.self_attn.k_proj.weight"
    save_file(tensors | {name: tensors[name].bfloat16()}, tmp_path / "mixed" / "model.safetensors")
    with open_source(tmp_path / "mixed") as source, pytest.raises(ValueError, match="they differ in dtype, allowed: o"):
        write_checkpoint(
            tmp_path / "out", tmp_path / "mixed", source, read_shape(tiny_qwen.qwen2), "lm", lambda _: None
        )
    assert not (tmp_path / "out").exists()
