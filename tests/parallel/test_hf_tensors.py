"""Cutting and fusing of Hugging Face tensors, on rows with labels."""

import pytest
import torch

from parallel.hf_tensors import Rule, all_rules, assemble, fuse, tensor_rules
from parallel.qwen import QwenShape
from parallel.rope import RopeSettings

QKV_WEIGHT = "decoder.layers.self_attention.linear_qkv.weight"
QKV_BIAS = "decoder.layers.self_attention.linear_qkv.bias"
FUSED_ROWS = [0, 1, 2, 3, 100, 101, 200, 201, 4, 5, 6, 7, 102, 103, 202, 203]


def tiny(family: str = "qwen2", **sizes) -> QwenShape:
    """4 heads, 2 groups, head size 2, hidden 8."""
    values = {
        "num_layers": 2, "hidden_size": 8, "num_attention_heads": 4, "num_query_groups": 2, "head_dim": 2,
        "ffn_hidden_size": 6, "vocab_size": 150, "tie_word_embeddings": False, "rms_norm_eps": 1e-6,
        "max_position_embeddings": 64, "rope": RopeSettings("default", 1e6),
    }  # fmt: skip
    return QwenShape(family, **(values | sizes))


def labelled(rule: Rule, first_labels: list[int]) -> dict[str, torch.Tensor]:
    """Full tensors whose rows all hold their own label: first_labels[i], first_labels[i] + 1, ... in tensor i."""
    tensors = {}
    for (name, size), first in zip(rule.tensors.items(), first_labels, strict=True):
        rows = torch.arange(first, first + size[0], dtype=torch.float32)
        tensors[name] = rows.reshape(-1, *[1] * (len(size) - 1)).expand(size).contiguous()
    return tensors


def cut(rule: Rule, tensors: dict[str, torch.Tensor], tensor_size: int, like: torch.Tensor) -> list[torch.Tensor]:
    def read(name, bounds):
        return tensors[name][bounds]

    return [fuse(rule, read, rank, tensor_size, like) for rank in range(tensor_size)]


@pytest.mark.parametrize("name", [QKV_WEIGHT, QKV_BIAS])
@pytest.mark.parametrize("tensor_size", [1, 2])
def test_query_key_value_are_fused_group_after_group(name, tensor_size):
    """RC05: query rows 0-7, key rows 100-103, value rows 200-203, weight and bias; TP rank 0 has the first eight."""
    rule = tensor_rules(tiny(), "lm")[name].at(1)
    tensors = labelled(rule, [0, 100, 200])
    size = 16 // tensor_size
    shards = cut(rule, tensors, tensor_size, torch.empty(size))
    labels = [shard.reshape(size, -1)[:, 0].tolist() for shard in shards]
    assert labels == [FUSED_ROWS[start : start + size] for start in range(0, 16, size)]
    split = assemble(rule, shards)
    assert list(split) == list(tensors)
    assert all(torch.equal(split[name], tensors[name]) for name in tensors)


@pytest.mark.parametrize("name", [QKV_WEIGHT, QKV_BIAS])
@pytest.mark.parametrize("tensor_size", [4, 8])
def test_tensor_ranks_that_share_a_group_have_even_parts_of_its_rows(name, tensor_size):
    """Of 2 groups, rows 0-3, 100-101, 200-201 and 4-7, 102-103, 202-203: 4 ranks have 4 rows each, 8 ranks 2."""
    rule = tensor_rules(tiny(), "lm")[name].at(1)
    tensors = labelled(rule, [0, 100, 200])
    size = 16 // tensor_size
    shards = cut(rule, tensors, tensor_size, torch.empty(size))
    labels = [shard.reshape(size, -1)[:, 0].tolist() for shard in shards]
    assert labels == [FUSED_ROWS[start : start + size] for start in range(0, 16, size)]
    assert all(torch.equal(whole, tensors[name]) for name, whole in assemble(rule, shards).items())


def test_model_without_qkv_bias_uses_the_same_weights_rule():
    """RC05: Qwen3 goes through the same code untouched."""
    qwen2, qwen3 = tensor_rules(tiny(), "lm"), tensor_rules(tiny("qwen3"), "lm")
    assert qwen3[QKV_WEIGHT] == qwen2[QKV_WEIGHT]
    assert QKV_BIAS in qwen2
    assert QKV_BIAS not in qwen3


def test_norms_have_the_same_tensors_under_both_specs():
    """The torch spec has norms of their own, Transformer Engine fuses them into the next linear layer."""
    rules = tensor_rules(tiny(), "lm")
    layer = "decoder.layers."
    attention, mlp = rules[layer + "input_layernorm.weight"], rules[layer + "pre_mlp_layernorm.weight"]
    assert rules[layer + "self_attention.linear_qkv.layer_norm_weight"] == attention
    assert rules[layer + "mlp.linear_fc1.layer_norm_weight"] == mlp
    assert list(attention.at(3).tensors) == ["model.layers.3.input_layernorm.weight"]
    assert list(mlp.at(3).tensors) == ["model.layers.3.post_attention_layernorm.weight"]


@pytest.mark.parametrize("tensor_size", [1, 2])
def test_gate_and_up_are_fused_on_every_rank(tensor_size):
    rule = tensor_rules(tiny(), "lm")["decoder.layers.mlp.linear_fc1.weight"].at(0)
    tensors = labelled(rule, [0, 100])
    shards = cut(rule, tensors, tensor_size, torch.empty(12 // tensor_size, 8))
    expected = {
        1: [[0, 1, 2, 3, 4, 5, 100, 101, 102, 103, 104, 105]],
        2: [[0, 1, 2, 100, 101, 102], [3, 4, 5, 103, 104, 105]],
    }
    assert [shard[:, 0].tolist() for shard in shards] == expected[tensor_size]
    assert all(torch.equal(whole, tensors[name]) for name, whole in assemble(rule, shards).items())


def test_row_parallel_matrices_are_cut_by_columns():
    rule = tensor_rules(tiny(), "lm")["decoder.layers.mlp.linear_fc2.weight"].at(0)
    whole = torch.arange(48.0).reshape(8, 6)
    shards = cut(rule, {"model.layers.0.mlp.down_proj.weight": whole}, 2, torch.empty(8, 3))
    assert torch.equal(shards[0], whole[:, :3])
    assert torch.equal(shards[1], whole[:, 3:])
    assert torch.equal(assemble(rule, shards)["model.layers.0.mlp.down_proj.weight"], whole)


@pytest.mark.parametrize(("tensor_size", "rows"), [(1, 256), (2, 128), (4, 128), (1, 192)])
def test_vocabulary_rows_are_padded_with_zeros_and_cut_off_again(tensor_size, rows):
    """RC04: 150 rows inside 256 (TP=1, TP=2), also where the last rank holds nothing but padding, and inside 192."""
    rule = tensor_rules(tiny(), "lm")["embedding.word_embeddings.weight"]
    whole = torch.arange(1.0, 150 * 8 + 1).reshape(150, 8)
    shards = cut(rule, {"model.embed_tokens.weight": whole}, tensor_size, torch.empty(rows, 8))
    inside = torch.cat(shards)
    assert inside.shape == (tensor_size * rows, 8)
    assert torch.equal(inside[:150], whole)
    assert not inside[150:].any()
    assert torch.equal(assemble(rule, shards)["model.embed_tokens.weight"], whole)


def test_vocabulary_cut_for_two_ranks_fits_one_rank_with_another_padding():
    """RC04: saved at TP=2 with multiples of 128, read again at TP=1 with multiples of 64."""
    rule = tensor_rules(tiny(), "lm")["output_layer.weight"]
    whole = torch.arange(1.0, 150 * 8 + 1).reshape(150, 8)
    saved = assemble(rule, cut(rule, {"lm_head.weight": whole}, 2, torch.empty(128, 8)))
    (again,) = cut(rule, saved, 1, torch.empty(192, 8))
    assert torch.equal(again[:150], whole)
    assert not again[150:].any()


def test_replicated_tensors_are_whole_on_every_rank():
    rule = tensor_rules(tiny("qwen3"), "lm")["decoder.layers.self_attention.q_layernorm.weight"].at(0)
    shards = cut(rule, {"model.layers.0.self_attn.q_norm.weight": torch.tensor([1.0, 2.0])}, 2, torch.empty(2))
    assert [shard.tolist() for shard in shards] == [[1, 2], [1, 2]]
    assert assemble(rule, shards[:1])["model.layers.0.self_attn.q_norm.weight"].tolist() == [1, 2]


def test_tied_output_matrix_is_the_embedding():
    """RC01: a tied checkpoint has no output matrix of its own, an untied one does."""
    tied, untied = tensor_rules(tiny(tie_word_embeddings=True), "lm"), tensor_rules(tiny(), "lm")
    assert tied["output_layer.weight"] == tied["embedding.word_embeddings.weight"]
    assert list(untied["output_layer.weight"].tensors) == ["lm_head.weight"]
    assert list(tensor_rules(tiny(), "scalar")["output_layer.weight"].tensors) == ["score.weight"]


@pytest.mark.parametrize(
    ("family", "tied", "count"), [("qwen2", True, 2 + 12), ("qwen2", False, 3 + 12), ("qwen3", True, 2 + 11)]
)
def test_every_tensor_of_the_model_has_one_rule(family, tied, count):
    """One layer: q, k, v, o, gate, up, down, 2 norms; and 3 biases (Qwen2) or 2 head norms (Qwen3)."""
    rules = all_rules(tiny(family, num_layers=1, tie_word_embeddings=tied), "lm")
    names = [name for key in rules for name in key]
    assert len(names) == len(set(names)) == count
    assert names[0] == "model.embed_tokens.weight"
