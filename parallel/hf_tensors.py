"""Which Hugging Face tensors make up each megatron-core parameter, and how they are cut over tensor ranks and fused.

One table, `tensor_rules`, serves import (`fuse`) and export (`assemble`). A parameter holds the rank's slices of its
tensors, fused along dimension 0. Fused query, key and value follow megatron-core's order, group after group: the query
heads of group 0, its key head, its value head, then group 1. Where there are more tensor ranks than groups, each has an
even part of a group's rows.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from parallel.qwen import QwenShape

Head = Literal["lm", "scalar"]
SCORE = "score.weight"
"""Name of the matrix of a scalar head."""
Read = Callable[[str, tuple[slice, ...]], Tensor]
"""(tensor name, a slice per dimension) -> that part of the tensor."""

LAYER = re.compile(r"^decoder\.layers\.(?P<index>\d+)\.")
HF_LAYER = "model.layers.{layer}."


@dataclass(frozen=True)
class Rule:
    """How one parameter is made of Hugging Face tensors.

    `tensors` gives their names and full shapes in the order of fusing. `split_dim` is the dimension that tensor ranks
    share out (None: every rank has all of it). `groups` is how many blocks, each with a piece of every tensor, follow
    one another in the unsplit parameter (0: one block per rank). `padded` adds zero rows up to the parameter's size.
    """

    tensors: Mapping[str, tuple[int, ...]]
    split_dim: int | None = None
    groups: int = 0
    padded: bool = False

    def at(self, layer: int) -> "Rule":
        """Return the rule for one layer, counted from 0 over the whole model."""
        named = {name.format(layer=layer): shape for name, shape in self.tensors.items()}
        return Rule(named, self.split_dim, self.groups, self.padded)


def tensor_rules(shape: QwenShape, head: str) -> dict[str, Rule]:
    """Return the rule of every parameter; in names of layers the layer's number is left out.

    The norms before attention and MLP have two names: the torch spec's, and Transformer Engine's, which fuses them into
    the linear layer that follows. `head` is "lm" or "scalar"; a tied output matrix is read from the embedding.
    """
    hidden, ffn, head_dim, groups = shape.hidden_size, shape.ffn_hidden_size, shape.head_dim, shape.num_query_groups
    query, key = shape.num_attention_heads * head_dim, groups * head_dim
    rows = {"q": query, "k": key, "v": key}
    attention, mlp = HF_LAYER + "self_attn.", HF_LAYER + "mlp."
    qkv_weight = {f"{attention}{name}_proj.weight": (size, hidden) for name, size in rows.items()}
    qkv_bias = {f"{attention}{name}_proj.bias": (size,) for name, size in rows.items()}
    gate_up = {f"{mlp}{name}_proj.weight": (ffn, hidden) for name in ("gate", "up")}
    attention_norm = Rule({HF_LAYER + "input_layernorm.weight": (hidden,)})
    mlp_norm = Rule({HF_LAYER + "post_attention_layernorm.weight": (hidden,)})
    embedding = Rule({"model.embed_tokens.weight": (shape.vocab_size, hidden)}, split_dim=0, padded=True)
    rules = {
        "embedding.word_embeddings.weight": embedding,
        "decoder.layers.input_layernorm.weight": attention_norm,
        "decoder.layers.self_attention.linear_qkv.layer_norm_weight": attention_norm,
        "decoder.layers.self_attention.linear_qkv.weight": Rule(qkv_weight, split_dim=0, groups=groups),
        "decoder.layers.self_attention.linear_proj.weight": Rule({attention + "o_proj.weight": (hidden, query)}, 1),
        "decoder.layers.pre_mlp_layernorm.weight": mlp_norm,
        "decoder.layers.mlp.linear_fc1.layer_norm_weight": mlp_norm,
        "decoder.layers.mlp.linear_fc1.weight": Rule(gate_up, split_dim=0),
        "decoder.layers.mlp.linear_fc2.weight": Rule({mlp + "down_proj.weight": (hidden, ffn)}, split_dim=1),
        "decoder.final_layernorm.weight": Rule({"model.norm.weight": (hidden,)}),
        "output_layer.weight": _output_rule(shape, head, embedding),
    }
    if shape.qkv_bias:
        rules["decoder.layers.self_attention.linear_qkv.bias"] = Rule(qkv_bias, split_dim=0, groups=groups)
    if shape.qk_layernorm:
        for name in ("q", "k"):
            norm = Rule({f"{attention}{name}_norm.weight": (head_dim,)})
            rules[f"decoder.layers.self_attention.{name}_layernorm.weight"] = norm
    return rules


def _output_rule(shape: QwenShape, head: str, embedding: Rule) -> Rule:
    if head == "scalar":
        return Rule({SCORE: (1, shape.hidden_size)})
    if shape.tie_word_embeddings:
        return embedding
    return Rule({"lm_head.weight": (shape.vocab_size, shape.hidden_size)}, split_dim=0, padded=True)


def all_rules(shape: QwenShape, head: str) -> dict[tuple[str, ...], Rule]:
    """Return the rules of the whole model in a fixed order, each once, keyed by the names of its tensors."""
    rules = tensor_rules(shape, head)
    of_layers = [rule for name, rule in rules.items() if name.startswith("decoder.layers.")]
    first, *last = [rule for name, rule in rules.items() if not name.startswith("decoder.layers.")]
    layers = [rule.at(layer) for layer in range(shape.num_layers) for rule in of_layers]
    return {tuple(rule.tensors): rule for rule in (first, *layers, *last)}


def fuse(rule: Rule, read: Read, tensor_rank: int, tensor_size: int, like: Tensor) -> Tensor:
    """Return the value of a parameter on one tensor rank, of the shape of `like`, in the source's dtype.

    Args:
        rule: of this parameter (and layer).
        read: called once for each tensor, for the slice this rank needs.
        like: the parameter; its size tells how far a padded one is padded.
    """
    sharers = _sharers(rule, tensor_size)
    if sharers > 1:  # what a rank of a smaller tensor group would have, cut again
        block = fuse(rule, read, tensor_rank // sharers, rule.groups, like)
        return block.chunk(sharers)[tensor_rank % sharers]
    parts = []
    for name, full in rule.tensors.items():
        bounds = [slice(0, size) for size in full]
        if rule.split_dim is not None:
            size = full[rule.split_dim]
            step = like.shape[0] if rule.padded else size // tensor_size
            start = min(tensor_rank * step, size)
            bounds[rule.split_dim] = slice(start, min(start + step, size))
        parts.append(read(name, tuple(bounds)))
    if rule.padded:
        missing = like.shape[0] - parts[0].shape[0]
        parts.append(parts[0].new_zeros(missing, *parts[0].shape[1:]))
        return torch.cat(parts)
    blocks = _blocks(rule, tensor_size)
    return torch.cat([part.unflatten(0, (blocks, -1)) for part in parts], dim=1).flatten(0, 1)


def assemble(rule: Rule, shards: list[Tensor]) -> dict[str, Tensor]:
    """Return the whole Hugging Face tensors from a parameter's shards on all tensor ranks (inverse of `fuse`)."""
    if rule.split_dim is None:
        return dict(zip(rule.tensors, shards[:1], strict=True))
    sharers = _sharers(rule, len(shards))
    if sharers > 1:
        return assemble(rule, [torch.cat(shards[rank : rank + sharers]) for rank in range(0, len(shards), sharers)])
    blocks = _blocks(rule, len(shards))
    rows = [full[0] for full in rule.tensors.values()]
    if rule.padded or rule.split_dim != 0:
        pieces = [[shard] for shard in shards]
    else:
        sizes = [size // len(shards) // blocks for size in rows]
        pieces = [[p.flatten(0, 1) for p in shard.unflatten(0, (blocks, -1)).split(sizes, 1)] for shard in shards]
    whole = [torch.cat(parts, dim=rule.split_dim) for parts in zip(*pieces, strict=True)]
    return {name: tensor[:size] for name, tensor, size in zip(rule.tensors, whole, rows, strict=True)}


@dataclass(frozen=True)
class Run:
    """Rows `start` to `stop` of a whole parameter, which are rows of a tensor from `first` on (no name: zeros)."""

    name: str | None
    first: int
    start: int
    stop: int


def row_runs(rule: Rule, num_rows: int) -> list[Run]:
    """Return the rows of a whole parameter in order; what exceeds its tensors pads it."""
    runs = []
    end, blocks = 0, max(rule.groups, 1)
    for block in range(blocks):
        for name, size in rule.tensors.items():
            rows = size[0] // blocks
            runs.append(Run(name, block * rows, end, end + rows))
            end += rows
    return [*runs, Run(None, 0, end, num_rows)] if end < num_rows else runs


def cut_runs(runs: Iterable[Run], start: int, stop: int) -> Iterator[Run]:
    """Yield the parts of runs between two rows of the parameter."""
    for run in runs:
        low, high = max(run.start, start), min(run.stop, stop)
        if low < high:
            yield Run(run.name, run.first + low - run.start, low, high)


def _sharers(rule: Rule, tensor_size: int) -> int:
    """Return how many neighbouring tensor ranks share one block: each has an even part of its fused rows."""
    return max(1, tensor_size // rule.groups) if rule.groups else 1


def _blocks(rule: Rule, tensor_size: int) -> int:
    return rule.groups // tensor_size if rule.groups else 1
