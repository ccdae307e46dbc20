"""What flash-attn's two functions do with block tables, in torch and after their documentation (2.6 to 2.8).

Their kernels need a GPU; here the arguments that the cache passes are checked as the kernels check them.
"""

import torch
from torch import Tensor


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cache_seqlens: Tensor,
    block_table: Tensor,
    softmax_scale: float,
    causal: bool,
    return_softmax_lse: bool,
) -> tuple[Tensor, Tensor]:
    """`q [batch, q, heads, D]` -> output of its shape, log-sum-exp `[batch, heads, q]` fp32."""
    assert not causal
    assert return_softmax_lse
    assert cache_seqlens.shape == (len(q),)
    parts = []
    for query, table, length in zip(q, *check_tables(q, block_table, cache_seqlens), strict=True):
        parts.append(attend(query, k_cache, v_cache, table, length, softmax_scale, causal))
    return torch.stack([output for output, _ in parts]), torch.stack([log_sum for _, log_sum in parts])


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float,
    causal: bool,
    block_table: Tensor,
) -> Tensor:
    """`q [tokens, heads, D]` -> output of its shape."""
    assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
    assert max_seqlen_q == cu_seqlens_q.diff().max()
    assert max_seqlen_k == cu_seqlens_k.diff().max()
    queries = q.split(cu_seqlens_q.diff().tolist())
    lengths = cu_seqlens_k.diff()
    return torch.cat(
        [
            attend(query, k, v, table, length, softmax_scale, causal)[0]
            for query, table, length in zip(queries, *check_tables(lengths, block_table, lengths), strict=True)
        ]
    )


def check_tables(batch: Tensor, tables: Tensor, lengths: Tensor) -> tuple[Tensor, list[int]]:
    assert tables.dtype == lengths.dtype == torch.int32
    assert (len(batch), tables.stride(-1)) == (len(tables), 1)
    assert (lengths > 0).all(), "without keys the log-sum-exp is plus infinity"
    return tables, lengths.tolist()


def attend(
    query: Tensor, keys: Tensor, values: Tensor, table: Tensor, length: int, scale: float, causal: bool
) -> tuple[Tensor, Tensor]:
    """One sequence: `query [q, heads, D]`; each key/value head serves as many query heads in a row."""
    assert length <= len(table) * keys.shape[1]
    assert query.stride(-1) == keys.stride(-1) == 1
    key, value = (
        torch.cat([cache[block] for block in table.tolist()])[:length].repeat_interleave(
            query.shape[1] // keys.shape[2], 1
        )
        for cache in (keys, values)
    )
    scores = scale * torch.einsum("qhd,khd->hqk", query.double(), key.double())
    if causal:  # the last query sees all keys
        place = torch.arange(length) - (length - len(query))
        scores = scores.masked_fill(place > torch.arange(len(query))[:, None], -torch.inf)
    log_sum = scores.logsumexp(-1)
    output = torch.einsum("hqk,khd->qhd", (scores - log_sum[..., None]).exp(), value.double())
    return output.to(query.dtype), log_sum.float()
