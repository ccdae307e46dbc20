"""Folders and checkpoints that are odd, broken or meant to harm: refused with status 2 and a reason, or converted
whole, never in part."""

import io
import json
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.megarl.test_convert import convert, refused


def changed(source: Path, target: Path, tensors: dict | None = None, **config) -> Path:
    """Copy a folder with other tensors (None: left out) and settings."""
    shutil.copytree(source, target)
    kept = {**load_file(source / "model.safetensors"), **(tensors or {})}
    kept = {name: tensor for name, tensor in kept.items() if tensor is not None}
    save_file(kept, target / "model.safetensors", metadata={"format": "pt"})
    settings = json.loads((target / "config.json").read_text()) | config
    (target / "config.json").write_text(json.dumps(settings))
    return target


@pytest.fixture
def checkpoint(tiny_qwen, tmp_path) -> Path:
    convert("to-megatron", tiny_qwen.qwen3, tmp_path / "checkpoint")
    return tmp_path / "checkpoint"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_layers_of_different_dtypes_are_refused(tiny_qwen, tmp_path, capsys, dtype):
    """They lie in one stored tensor, which has one dtype: rounding would be silent."""
    layer = "model.layers.2."
    tensors = load_file(tiny_qwen.qwen3 / "model.safetensors")
    mixed = {name: tensor.to(dtype) for name, tensor in tensors.items() if name.startswith(layer)}
    source = changed(tiny_qwen.qwen3, tmp_path / "mixed", mixed)
    message = refused(capsys, "to-megatron", source, tmp_path / "out")
    assert "they differ in dtype, allowed: one" in message
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("tensors", "config", "named"),
    [
        ({}, {"num_hidden_layers": 3}, "model.layers.3."),
        ({"model.layers.0.self_attn.o_proj.bias": torch.zeros(64)}, {}, "model.layers.0.self_attn.o_proj.bias"),
        ({"score.weight": torch.zeros(1, 64)}, {}, "lm_head.weight"),
        ({}, {"tie_word_embeddings": True}, "lm_head.weight"),
        ({"evil\x1b[2J\nname": torch.zeros(1)}, {}, r"evil\x1b[2J\nname"),
    ],
)
def test_what_the_model_has_no_place_for_is_refused_and_named(tiny_qwen, tmp_path, capsys, tensors, config, named):
    source = changed(tiny_qwen.qwen3, tmp_path / "source", tensors, **config)
    message = refused(capsys, "to-megatron", source, tmp_path / "out")
    assert "that its config.json has no place for, allowed: none" in message
    assert named in message
    assert "\x1b" not in message


def test_a_tied_output_matrix_may_be_there_once_more(tiny_qwen, tmp_path, capsys):
    embedding = load_file(tiny_qwen.qwen2 / "model.safetensors")["model.embed_tokens.weight"]
    twice = changed(tiny_qwen.qwen2, tmp_path / "twice", {"lm_head.weight": embedding.clone()})
    convert("to-megatron", twice, tmp_path / "checkpoint")
    convert("verify", tiny_qwen.qwen2, tmp_path / "checkpoint")
    embedding[0, 0] += 1
    other = changed(tiny_qwen.qwen2, tmp_path / "other", {"lm_head.weight": embedding})
    assert "(lm_head.weight)" in refused(capsys, "to-megatron", other, tmp_path / "out")


def test_a_checkpoint_with_fewer_rows_than_its_vocabulary_is_refused(checkpoint, tmp_path, capsys):
    path = checkpoint / "huggingface" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"vocab_size": 500}))
    message = refused(capsys, "to-hf", checkpoint, tmp_path / "out")
    assert "has 256 rows; expected vocab_size 500 and more" in message
    assert not (tmp_path / "out").exists()


def test_a_checkpoint_that_holds_more_than_its_config_states_is_refused(checkpoint, tmp_path, capsys):
    path = checkpoint / "huggingface" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"tie_word_embeddings": True}))
    assert "no place for: output_layer.weight" in refused(capsys, "to-hf", checkpoint, tmp_path / "out")


@pytest.mark.parametrize("damage", ["zeros", "a dictionary", "a hostile class", "another dtype"])
def test_a_broken_piece_is_named(checkpoint, tmp_path, capsys, damage):
    """All pieces of a file are replaced by others of the same length."""
    index = pickle.loads((checkpoint / ".metadata").read_bytes())
    contents = {
        "zeros": b"",
        "a dictionary": saved({"a": torch.zeros(2)}),
        "a hostile class": pickle.dumps(Path.cwd),
        "another dtype": saved(torch.zeros(96, dtype=torch.float64)),
    }[damage]
    for info in index.storage_data.values():
        path = checkpoint / info.relative_path
        data = bytearray(path.read_bytes())
        data[info.offset : info.offset + info.length] = contents[: info.length].ljust(info.length, b"\0")
        path.write_bytes(bytes(data))
    message = refused(capsys, "to-hf", checkpoint, tmp_path / "out")
    assert ".distcp: a piece of " in message
    assert not (tmp_path / "out").exists()


def saved(value: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def test_files_outside_the_folder_are_refused(checkpoint, tmp_path, capsys):
    path = checkpoint / ".metadata"
    index = pickle.loads(path.read_bytes())
    for info in index.storage_data.values():
        object.__setattr__(info, "relative_path", f"../{checkpoint.name}/{info.relative_path}")
    path.write_bytes(pickle.dumps(index))
    assert "allowed: files of its own folder" in refused(capsys, "to-hf", checkpoint, tmp_path / "out")


@pytest.mark.parametrize("content", ["[]", "null", "[" * 100_000, "{}", '"torch_dist"'])
def test_broken_backend_files_are_refused(checkpoint, tmp_path, capsys, content):
    (checkpoint / "metadata.json").write_text(content)
    message = refused(capsys, "to-hf", checkpoint, tmp_path / "out")
    assert "sharded_backend of" in message or "is no checkpoint" in message or "torch_dist" in message


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("hidden_size", "64"),
        ("hidden_size", None),
        ("num_hidden_layers", 1_000_000_000),
        ("model_type", ["qwen3"]),
        ("rope_parameters", "yarn"),
        ("layer_types", 5),
    ],
)
def test_settings_of_wrong_types_or_sizes_are_refused_at_once(tiny_qwen, tmp_path, capsys, setting, value):
    source = changed(tiny_qwen.qwen3, tmp_path / "source", **{setting: value})
    assert "config.json: " in refused(capsys, "to-megatron", source, tmp_path / "out")


def test_a_link_as_target_leads_to_a_whole_folder(tiny_qwen, tmp_path, checkpoint):
    (tmp_path / "link").symlink_to(tmp_path / "real")
    convert("to-hf", checkpoint, tmp_path / "link")
    convert("verify", tiny_qwen.qwen3, tmp_path / "real")
