"""`megarl convert`: Hugging Face folder <-> checkpoint, comparison and description."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForSequenceClassification

from megarl.__main__ import main
from megarl.commands.convert import parse_size
from megarl.conversion import compare
from parallel.hf_folder import open_source

FAMILIES = ["qwen2", "qwen3"]


def convert(*words: object) -> None:
    main(["convert", *map(str, words)])


def refused(capsys, *words: object) -> str:
    """Run a conversion that must be refused; returns what it says."""
    with pytest.raises(SystemExit) as end:
        convert(*words)
    assert end.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_there_and_back_is_the_same_bit_for_bit(tiny_qwen, tmp_path, capsys, family, dtype):
    """RC01: with every companion file, in several shards."""
    source, checkpoint, back = tmp_path / "source", tmp_path / "checkpoint", tmp_path / "back"
    shutil.copytree(vars(tiny_qwen)[family], source)
    tensors = {name: tensor.to(dtype) for name, tensor in load_file(source / "model.safetensors").items()}
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    (source / "generation_config.json").write_bytes(b'{"eos_token_id": [11,12]}')
    convert("to-megatron", source, checkpoint, "--tensor-model-parallel-size", 2)
    convert("to-hf", checkpoint, back, "--max-shard-size", "100KB")
    assert len(list(back.glob("*.safetensors"))) > 1
    kept = {path.name for path in source.iterdir()} - {"model.safetensors"}
    for name in kept:
        assert (back / name).read_bytes() == (source / name).read_bytes()
    for left, right in ((source, back), (source, checkpoint), (checkpoint, back)):
        capsys.readouterr()
        convert("verify", left, right)
        assert capsys.readouterr().out == "equal, bit for bit\n"


def test_verify_names_what_differs_and_by_how_much(tiny_qwen, tmp_path, capsys):
    other = tmp_path / "other"
    shutil.copytree(tiny_qwen.qwen2, other)
    tensors = load_file(other / "model.safetensors")
    tensors["model.norm.weight"][3] += 0.5
    tensors["extra"] = torch.ones(1)
    save_file(tensors, other / "model.safetensors")
    capsys.readouterr()
    with pytest.raises(SystemExit) as end:
        convert("verify", tiny_qwen.qwen2, other)
    assert end.value.code == 1
    lines = capsys.readouterr().out.splitlines()
    size = len(tensors["model.norm.weight"])
    assert lines == [
        f"extra: only in {other}",
        f"model.norm.weight: 1 of {size} values, by up to 0.5",
        "2 tensors differ",
    ]


def test_bits_are_compared_not_values(tmp_path, monkeypatch):
    """In pieces of two values; -0.0 is another bit pattern than 0, a NaN is equal to itself."""
    monkeypatch.setattr("parallel.hf_folder.PIECE_BYTES", 8)
    zeros, nans = torch.zeros(5), torch.full((5,), torch.nan)
    moved = torch.tensor([0, 0.5, 0, 0, -2])
    sides = {
        "left": {"sign": zeros, "nan": nans, "dtype": zeros, "shape": zeros, "values": zeros, "lost": zeros},
        "right": {
            "sign": -zeros,
            "nan": nans,
            "dtype": zeros.bfloat16(),
            "shape": torch.zeros(3),
            "values": moved,
            "lost": nans,
        },
    }
    for side, tensors in sides.items():
        (tmp_path / side).mkdir()
        separate = {name: tensor.clone() for name, tensor in tensors.items()}
        save_file(separate, tmp_path / side / "model.safetensors")
    with open_source(tmp_path / "left") as left, open_source(tmp_path / "right") as right:
        assert {name: compare(name, left, right) for name in sides["left"]} == {
            "sign": "5 of 5 values, by up to 0",
            "nan": "",
            "dtype": "dtype torch.float32 against torch.bfloat16",
            "shape": "shape [5] against [3]",
            "values": "2 of 5 values, by up to 2",
            "lost": "5 of 5 values, by up to inf",
        }


def test_inspect_says_what_it_is_and_which_layouts_fit(tiny_qwen, capsys):
    convert("inspect", tiny_qwen.qwen3)
    rows = dict(line.split("  ", 1) for line in capsys.readouterr().out.splitlines())
    rows = {name.strip(): value.strip() for name, value in rows.items()}
    config = json.loads((tiny_qwen.qwen3 / "config.json").read_text())
    assert rows["kind"] == "Hugging Face folder"
    assert rows["family"] == "qwen3"
    assert rows["layers"] == str(config["num_hidden_layers"])
    total = sum(tensor.numel() for tensor in load_file(tiny_qwen.qwen3 / "model.safetensors").values())
    assert rows["parameters"] == f"{total:,}"
    assert rows["tensor parallel sizes"].split(", ")[0] == "1"


@pytest.mark.parametrize(("text", "size"), [("5GB", 5 * 10**9), ("1.5 MiB", 3 * 2**19), ("300kb", 300_000), ("17", 17)])
def test_sizes_of_files(text, size):
    assert parse_size(text) == size


def test_wrong_values_are_refused_and_nothing_is_written(tiny_qwen, tmp_path, capsys):
    checkpoint, target = tmp_path / "checkpoint", tmp_path / "target"
    convert("to-megatron", tiny_qwen.qwen2, checkpoint)
    capsys.readouterr()
    for words, message in [
        (("to-megatron", tmp_path / "none", target), "allowed: a folder with a config.json, or a checkpoint"),
        (("to-megatron", tiny_qwen.qwen2, checkpoint), "which exists; allowed: a new folder"),
        (
            ("to-megatron", tiny_qwen.qwen2, target, "--tensor-model-parallel-size", 3),
            "tensor_model_parallel_size: got 3",
        ),
        (("to-hf", tiny_qwen.qwen2, target), "is no checkpoint"),
        (("to-hf", checkpoint, target, "--max-shard-size", "5 apples"), "max_shard_size: got '5 apples'"),
        (("to-hf", checkpoint, target, "--max-shard-size", "0"), "max_shard_size: got 0, allowed: from 1 byte"),
        (("verify", tiny_qwen.qwen2, target), "allowed: a folder with a config.json, or a checkpoint"),
    ]:
        assert message in refused(capsys, *words)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint"]


def test_a_full_disk_is_refused_before_anything_is_written(tiny_qwen, tmp_path, capsys, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
    message = refused(capsys, "to-megatron", tiny_qwen.qwen2, tmp_path / "out")
    assert "MB are needed at" in message
    assert not list(tmp_path.iterdir())


LIMITED = """
import resource, sys
from megarl.__main__ import main
from parallel import hf_folder

hf_folder.PIECE_BYTES = 999
resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, 60_000))
main(["convert", *sys.argv[1:]])
"""


@pytest.mark.parametrize("command", ["to-megatron", "to-hf"])
def test_a_disk_that_fills_up_meanwhile_ends_the_conversion(tiny_qwen, tmp_path, command):
    """A limit on the size of files stands in for the disk; also in a thread of torch's writer, which hides errors."""
    source, target = tmp_path / "source", tmp_path / "target"
    if command == "to-hf":
        convert("to-megatron", tiny_qwen.qwen2, source)
    else:
        source = tiny_qwen.qwen2
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    words = [sys.executable, "-c", LIMITED, command, str(source), str(target)]
    done = subprocess.run(words, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 2
    assert "File too large" in done.stderr.splitlines()[-1]
    assert not target.exists()


def test_a_reward_model_is_converted_with_its_head(tiny_qwen, tmp_path):
    """transformers loads what comes back, strictly."""
    config = AutoConfig.from_pretrained(tiny_qwen.qwen3, num_labels=1)
    model = AutoModelForSequenceClassification.from_config(config)
    model.save_pretrained(tmp_path / "reward")
    convert("to-megatron", tmp_path / "reward", tmp_path / "checkpoint")
    convert("to-hf", tmp_path / "checkpoint", tmp_path / "back")
    convert("verify", tmp_path / "reward", tmp_path / "back")
    back, info = AutoModelForSequenceClassification.from_pretrained(tmp_path / "back", output_loading_info=True)
    assert not any(info.values())
    assert torch.equal(back.score.weight, model.score.weight)


KILLED = """
import os, sys
from megarl import conversion
from megarl.__main__ import main
from parallel import hf_folder, stored_writer

original, calls = {owner}.{name}, []

def stopping(*arguments):
    calls.append(0)
    if len(calls) > {number}:
        os.write(1, b"half\\n")  # whole, whichever thread writes
        sys.stdin.read()
    return original(*arguments)

hf_folder.PIECE_BYTES = 999
{owner}.{name} = stopping
main(["convert", *sys.argv[1:]])
"""
MOMENTS = {  # command: owner and name of a function, and after how many calls of it
    "to-megatron, all tensors written": ("stored_writer", "copy_companions", 0),
    "to-megatron, in the midst of a tensor": ("hf_folder.Source", "fill", 7),
    "to-hf, all tensors written": ("conversion", "copy_companions", 0),
    "to-hf, in the midst of a tensor": ("hf_folder.ShardWriter", "write", 7),
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_killed_conversion_leaves_nothing_that_looks_whole(tiny_qwen, tmp_path, capsys, moment):
    """The next attempt takes no notice of what is left."""
    source, target = tmp_path / "source", tmp_path / "target"
    command = moment.split(",")[0]
    if command == "to-hf":
        convert("to-megatron", tiny_qwen.qwen2, source)
    else:
        source = tiny_qwen.qwen2
    owner, name, number = MOMENTS[moment]
    code = KILLED.format(owner=owner, name=name, number=number)
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    words = [sys.executable, "-c", code, command, str(source), str(target)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"half\n"
        process.send_signal(signal.SIGKILL)
    assert not target.exists()
    assert (tmp_path / ".target.partial").exists()
    convert(command, source, target)
    assert not (tmp_path / ".target.partial").exists()
    convert("verify", source, target)
