"""Qwen on megatron-core's `GPTModel`: this rank's pipeline stage(s), with a language-model or a scalar head."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from torch import Tensor, nn

from parallel.hf_tensors import Head
from parallel.layers import block_spec
from parallel.mesh import Mesh
from parallel.pack import Pack
from parallel.qwen import QwenShape, padded_vocab_size, rotary_angles, transformer_config


class QwenModel(GPTModel):
    """One pipeline stage (or virtual stage) of a Qwen model.

    `forward` ends at the hidden states: the head is applied by the loss (`parallel.log_probs`, `scalar_values`), which
    never needs the logits of all tokens at once.
    """

    def __init__(self, shape: QwenShape, mesh: Mesh, config: Any, head: Head, vp_stage: int | None):
        pre_process, post_process = _stage_ends(mesh, vp_stage)
        super().__init__(
            config=config,
            transformer_layer_spec=block_spec(shape, config, vp_stage, mesh.device),
            vocab_size=padded_vocab_size(shape.vocab_size, mesh.tensor_size),
            max_sequence_length=shape.max_position_embeddings,
            pre_process=pre_process,
            post_process=post_process,
            share_embeddings_and_output_weights=shape.tie_word_embeddings and head == "lm",
            position_embedding_type="none",  # `rotary_angles` serves ragged positions in training and rollout alike
            pg_collection=mesh.pg_collection,
            vp_stage=vp_stage,
        )
        self.shape = shape
        self.mesh = mesh
        self.head = head
        if head == "scalar" and post_process:
            self.output_layer = ScalarHead(config)

    def forward(self, pack: Pack) -> Tensor:
        """Run this stage over a pack of T tokens.

        Returns: hidden states `[T, 1, H]` (`[T / tensor_size, 1, H]` under sequence parallelism), after the final
            norm on the last stage.
        """
        return self.hidden_states(pack.tokens, pack.positions, pack.borders)

    def hidden_states(self, tokens: Tensor, positions: Tensor, borders: Tensor | None) -> Tensor:
        """As `forward`, for tokens `[T]` at any positions `[T]`; `borders` is None when a cache is bound."""
        hidden = self.embedding(tokens[None], None) if self.pre_process else None
        angles = rotary_angles(self.shape, positions)
        return self.decoder(hidden, attention_mask=borders, rotary_pos_emb=angles)

    def gather_sequence(self, hidden: Tensor, vocab_parallel: bool = False) -> Tensor:
        """Return hidden states of all tokens, `[T, 1, H]`, on every tensor rank.

        Args:
            vocab_parallel: each tensor rank computes a part of the loss from the result, so that gradients are
                summed over the tensor group; otherwise each computes the whole loss.
        """
        if self.config.sequence_parallel:
            return gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=vocab_parallel)
        return copy_to_tensor_model_parallel_region(hidden) if vocab_parallel else hidden

    def output_weight(self) -> Tensor:
        """Return this rank's rows of the output matrix, `[padded V / tensor_size, H]`."""
        shared = self.share_embeddings_and_output_weights
        return self.shared_embedding_or_output_weight() if shared else self.output_layer.weight


class ScalarHead(nn.Module):
    """Linear map from hidden states to one number, replicated on every tensor rank (critic, reward model)."""

    def __init__(self, config: Any):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, config.hidden_size, dtype=config.params_dtype))
        # Each tensor rank computes this gradient whole, from the gathered hidden states.
        self.weight.tensor_model_parallel = False  # type: ignore[attr-defined]


def scalar_values(model: QwenModel, hidden: Tensor, pack: Pack) -> Tensor:
    """Return the scalar head's output at the tokens before each scored one, `[N]` fp32."""
    return token_values(model, hidden, pack.sources)


def token_values(model: QwenModel, hidden: Tensor, tokens: Tensor | None = None) -> Tensor:
    """Return the scalar head's output at some tokens of the pack, `[k]` fp32 (None: at all, `[T]`)."""
    rows = model.gather_sequence(hidden)[:, 0]
    if tokens is not None:
        rows = rows.index_select(0, tokens)
    return (rows.float() @ model.output_layer.weight.float().T).squeeze(1)


def build_model(shape: QwenShape, mesh: Mesh, params_dtype: torch.dtype, head: Head = "lm") -> list[QwenModel]:
    """Build this rank's model chunks, one per virtual pipeline stage, with random weights.

    Raises:
        ValueError: the layout doesn't fit the model (`Layout.check`).
    """
    mesh.layout.check(shape, mesh.world_size)
    config = transformer_config(shape, mesh.layout, params_dtype, mesh.device)
    virtual = mesh.layout.virtual_pipeline_model_parallel_size
    stages = [None] if virtual is None else range(virtual)
    return [QwenModel(shape, mesh, config, head, stage).to(mesh.device) for stage in stages]


def _stage_ends(mesh: Mesh, vp_stage: int | None) -> tuple[bool, bool]:
    """Whether this stage holds the embedding, and whether it holds the output head."""
    chunk = vp_stage or 0
    return mesh.is_first_stage and chunk == 0, mesh.is_last_stage and chunk == mesh.layout.num_chunks - 1
