"""Reading and writing of Hugging Face folders."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from parallel.hf_folder import ShardWriter, TensorInfo, copy_companions, open_source, plan_shards, write_shards

A, B = torch.arange(6.0).reshape(2, 3), torch.ones(4, dtype=torch.bfloat16)


def test_slices_are_read_from_all_files_without_an_index(tmp_path):
    save_file({"a": A}, tmp_path / "model-1.safetensors")
    save_file({"b": B}, tmp_path / "model-2.safetensors")
    with open_source(tmp_path) as source:
        assert source.names == {"a", "b"}
        assert source.read("a", (slice(0, 2), slice(1, 3))).tolist() == [[1, 2], [4, 5]]
        assert source.read("b", (slice(4, 4),)).shape == (0,)
        source.check({"a": (2, 3), "b": (4,)})


def test_index_decides_which_files_are_read_and_files_decide_what_is_in_them(tmp_path):
    """RC02: an index that lists a tensor which was never written is no obstacle."""
    save_file({"a": A}, tmp_path / "part.safetensors")
    save_file({"a": A + 1, "other": A}, tmp_path / "model.safetensors")
    index = {"weight_map": {"a": "part.safetensors", "lm_head.weight": "part.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with open_source(tmp_path) as source:
        assert source.names == {"a"}
        assert torch.equal(source.read("a", (slice(0, 2), slice(0, 3))), A)


def test_single_file_is_preferred_to_others_beside_it(tmp_path):
    save_file({"a": A}, tmp_path / "model.safetensors")
    save_file({"a": A, "lora": A + 1}, tmp_path / "adapter_model.safetensors")
    with open_source(tmp_path) as source:
        assert source.names == {"a"}


def test_folders_that_cannot_be_read_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"no \*.safetensors file"), open_source(tmp_path):
        pass
    save_file({"a": A}, tmp_path / "x.safetensors")
    save_file({"a": A}, tmp_path / "y.safetensors")
    with pytest.raises(ValueError, match="tensor a is in two files"), open_source(tmp_path):
        pass
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "z.safetensors"}}))
    with pytest.raises(ValueError, match=r"names z\.safetensors, but there is no such file"), open_source(tmp_path):
        pass


@pytest.mark.parametrize(
    ("expected", "message"),
    [
        ({"c": (2, 3)}, r"tensor c is missing; expected shape \[2, 3\]"),
        ({"a": (3, 3)}, r"tensor a has shape \[2, 3\]; expected \[3, 3\]"),
        ({"ids": (2,)}, "tensor ids has dtype I64; allowed: F32, BF16, F16"),
    ],
)
def test_unexpected_tensors_are_named_with_both_shapes(tmp_path, expected, message):
    """RC04: another row count than expected is an error."""
    save_file({"a": A, "ids": torch.tensor([1, 2])}, tmp_path / "model.safetensors")
    with open_source(tmp_path) as source, pytest.raises(ValueError, match=message):
        source.check(expected)


def test_shards_are_filled_in_order_up_to_the_limit():
    sizes = {"a": 15, "b": 10, "c": 1, "huge": 75, "d": 24}
    infos = [TensorInfo(name, (size,), torch.float32) for name, size in sizes.items()]
    names = [[info.name for info in shard] for shard in plan_shards(infos, 100)]
    assert names == [["a", "b"], ["c"], ["huge"], ["d"]]
    assert plan_shards(infos, 1000) == [infos]


def test_index_agrees_with_the_files(tmp_path):
    """RC02: every tensor is in the named file, every file's tensors are in the index, and the size is the sum."""
    tensors = {"a": A, "b": B, "c": A + 1}
    write_shards(tmp_path, iter(tensors.items()), [infos_of({"a": A, "b": B}), infos_of({"c": A})])
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    first, second = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    assert index == {"metadata": {"total_size": 24 + 8 + 24}, "weight_map": {"a": first, "b": first, "c": second}}
    written = {file: load_file(tmp_path / file) for file in (first, second)}
    assert {file: list(held) for file, held in written.items()} == {first: ["a", "b"], second: ["c"]}
    assert all(torch.equal(written[file][name], tensors[name]) for name, file in index["weight_map"].items())


def test_one_shard_is_one_file_without_index(tmp_path):
    write_shards(tmp_path, iter({"a": A}.items()), [infos_of({"a": A})])
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]


def infos_of(tensors: dict[str, torch.Tensor]) -> list[TensorInfo]:
    return [TensorInfo(name, tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_files_are_those_of_the_library(tmp_path, dtype):
    """Also of a tensor that isn't contiguous, a scalar and one without elements; the library reads the same back."""
    tensors = {"b": A.to(dtype).T, "scalar": torch.tensor(2.0, dtype=dtype), "none": torch.empty(0, 3, dtype=dtype)}
    write_shards(tmp_path, iter(tensors.items()), [infos_of(tensors)])
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, tmp_path / "theirs.safetensors")
    read = [load_file(tmp_path / name) for name in ("model.safetensors", "theirs.safetensors")]
    for name, tensor in tensors.items():
        assert torch.equal(read[0][name], tensor)
        assert torch.equal(read[0][name], read[1][name])


def test_tensors_that_come_otherwise_than_planned_stop_the_writing(tmp_path):
    with pytest.raises(AssertionError, match="not as planned: a"):
        write_shards(tmp_path, iter({"a": A}.items()), [infos_of({"a": B})])
    with pytest.raises(AssertionError, match="not as planned: rows of b are missing"):
        write_shards(tmp_path, iter({"a": A}.items()), [infos_of({"a": A, "b": B})])
    with pytest.raises(AssertionError, match="not as planned: rows of a are missing"):
        write_shards(tmp_path, iter([("a", A[:1]), ("b", B)]), [infos_of({"a": A, "b": B})])
    with pytest.raises(AssertionError, match="not as planned: too many rows of a"):
        write_shards(tmp_path, iter([("a", A[:1]), ("a", A)]), [infos_of({"a": A})])


def test_rows_are_written_and_read_in_pieces(tmp_path, monkeypatch):
    """Pieces of two rows of four, written in any order; the third one is short."""
    monkeypatch.setattr("parallel.hf_folder.PIECE_BYTES", 32)
    tensor = torch.arange(20.0).view(5, 4)
    (info,) = infos_of({"a": tensor})
    assert list(info.pieces()) == [(0, 2), (2, 4), (4, 5)]
    with ShardWriter(tmp_path, [[info]]) as writer:
        for start, stop in ((4, 5), (0, 2), (2, 4)):
            writer.write("a", start, tensor[start:stop])
    assert torch.equal(load_file(tmp_path / "model.safetensors")["a"], tensor)
    with open_source(tmp_path) as source:
        assert source.info("a") == info
        assert all(torch.equal(source.rows("a", *span), tensor[slice(*span)]) for span in info.pieces())
    (wide,) = infos_of({"a": torch.empty(3, 100)})
    assert list(wide.pieces()) == [(0, 1), (1, 2), (2, 3)]


def test_companion_files_are_copied_byte_for_byte(tmp_path):
    """RC10: tokenizer, template, generation settings with their stop ids, and a file nobody knows."""
    source, target = tmp_path / "source", tmp_path / "target"
    (source / "additional_chat_templates").mkdir(parents=True)
    (source / "checkpoint").mkdir()
    target.mkdir()
    companions = {
        "generation_config.json": b'{"eos_token_id": [11,12]}',
        "tokenizer.json": "{\u201c\r\n}".encode(),
        "chat_template.jinja": b"{{ x }}\n",
        "notes.txt": b"\xff\x00",
        "additional_chat_templates/tool.jinja": b"t",
    }
    weights = ["model.safetensors", "pytorch_model.bin", "model.safetensors.index.json", "pytorch_model.bin.index.json"]
    for name, content in companions.items():
        (source / name).write_bytes(content)
    for name in [*weights, "config.json", "checkpoint/state.txt"]:
        (source / name).write_bytes(b"weights")
    copy_companions(source, target)
    copied = {str(path.relative_to(target)): path.read_bytes() for path in target.rglob("*") if path.is_file()}
    assert copied == companions
