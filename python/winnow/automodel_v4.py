# SPDX-License-Identifier: Apache-2.0
"""The sparse attention of Automodel's DeepSeek-V4 layers, implemented with winnow.

winnow.automodel exports these functions. `reference_rounding`, with which DeepSeek-V4.1 asks for
the roundings of the released inference kernel, is accepted and changes nothing: the bounds on the
error hold either way.
"""

import torch
from torch import Tensor

from winnow._arguments import check_size
from winnow._once_differentiable import once_differentiable
from winnow.automodel_arguments import dense_rows, integers


class DeepSeekV4SparseAttention(torch.autograd.Function):
    """Sparse MQA with a sink; `apply` has the arguments of `forward`."""

    @staticmethod
    def forward(
        ctx,
        q: Tensor,
        kv: Tensor,
        attn_sink: Tensor,
        topk_idxs: Tensor,
        sm_scale: float | None = None,
        reference_rounding: bool = False,
    ) -> Tensor:
        return _forward(ctx, q, kv, attn_sink, topk_idxs, 0, sm_scale)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        return _gradients(ctx, grad_output, 5)


class DeepSeekV4SparseAttentionHeadChunked(torch.autograd.Function):
    """The same, with a backward over groups of heads that accumulates KV gradients in fp32."""

    @staticmethod
    def forward(
        ctx,
        q: Tensor,
        kv: Tensor,
        attn_sink: Tensor,
        topk_idxs: Tensor,
        max_heads_per_kernel: int,
        sm_scale: float | None = None,
        reference_rounding: bool = False,
    ) -> Tensor:
        name = "sparse_attn_tilelang_head_chunked"
        check_size(name, "max_heads_per_kernel", max_heads_per_kernel, 1)
        return _forward(ctx, q, kv, attn_sink, topk_idxs, max_heads_per_kernel, sm_scale)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        return _gradients(ctx, grad_output, 6)


def sparse_attn_tilelang(
    q: Tensor,
    kv: Tensor,
    attn_sink: Tensor,
    topk_idxs: Tensor,
    sm_scale: float | None = None,
    reference_rounding: bool = False,
) -> Tensor:
    """DeepSeek-V4's sparse MQA with a sink. Differentiable in q, kv and attn_sink.

    Args:
        q: [batch, tokens, heads, dim].
        kv: [batch, keys, dim], as q; key and value of the one shared head.
        attn_sink: [heads].
        topk_idxs: [batch, tokens, topk] int32 or int64; invalid indices contribute nothing.
        sm_scale: dim ** -0.5 by default.
        reference_rounding: changes nothing.

    Returns:
        [batch, tokens, heads, dim], as q.
    """
    return DeepSeekV4SparseAttention.apply(
        q, kv, attn_sink, topk_idxs, sm_scale, reference_rounding
    )


def sparse_attn_tilelang_head_chunked(
    q: Tensor,
    kv: Tensor,
    attn_sink: Tensor,
    topk_idxs: Tensor,
    max_heads_per_kernel: int,
    sm_scale: float | None = None,
    reference_rounding: bool = False,
) -> Tensor:
    """sparse_attn_tilelang with at most `max_heads_per_kernel` heads per pass of backward."""
    return DeepSeekV4SparseAttentionHeadChunked.apply(
        q, kv, attn_sink, topk_idxs, max_heads_per_kernel, sm_scale, reference_rounding
    )


def _forward(
    ctx,
    q: Tensor,
    kv: Tensor,
    attn_sink: Tensor,
    topk_idxs: Tensor,
    max_heads_per_pass: int,
    sm_scale: float | None,
) -> Tensor:
    if sm_scale == 0:  # 0 means "not given" to the library
        raise ValueError("sparse_attn_tilelang: sm_scale 0: must not be 0")
    ctx.scale, ctx.max_heads_per_pass = sm_scale or 0.0, max_heads_per_pass
    ctx.sink_dtype = attn_sink.dtype
    indices = integers("sparse_attn_tilelang", "topk_idxs", topk_idxs)
    q, kv, indices = dense_rows(q), dense_rows(kv), dense_rows(indices)
    sink = attn_sink.to(torch.float64 if q.dtype == torch.float64 else torch.float32)
    out, lse, _ = torch.ops.winnow.sparse_attention_forward(
        q, kv, indices, None, sink, q.shape[-1], ctx.scale
    )
    ctx.save_for_backward(q, kv, indices, sink, out, lse)
    return out


def _gradients(ctx, grad_output: Tensor, least: int) -> tuple[Tensor | None, ...]:
    """Those of q, kv and attn_sink, then None for every further argument, `least` in all."""
    q, kv, indices, sink, out, lse = ctx.saved_tensors
    d_q, d_kv, d_sink = torch.ops.winnow.sparse_attention_backward(
        q,
        kv,
        indices,
        None,
        sink,
        out,
        lse,
        grad_output.contiguous(),
        None,
        ctx.scale,
        ctx.max_heads_per_pass,
    )
    others = max(least, len(ctx.needs_input_grad)) - 3
    return d_q, d_kv, d_sink.to(ctx.sink_dtype), *[None] * others
