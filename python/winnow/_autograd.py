# SPDX-License-Identifier: Apache-2.0
"""The autograd Functions behind `winnow.functional`: an operator forward, an operator backward."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

_ops = torch.ops.winnow


def _index_topk_gradients(ctx, d_scores: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return _ops.index_topk_backward(
        *ctx.saved_tensors,
        d_scores.contiguous(),
        backend=ctx.backend,
        deterministic=ctx.deterministic,
    )


class IndexTopk(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, q, k, weights, k_scale, begin, end, topk, order, deterministic, backend
    ) -> tuple[Tensor, Tensor, Tensor]:
        indices, lengths, scores = _ops.index_topk_forward(
            q, k, weights, k_scale, begin, end, topk, order, True, backend=backend
        )
        ctx.save_for_backward(q, k, weights, begin, end, indices, lengths)
        ctx.mark_non_differentiable(indices, lengths)
        ctx.deterministic, ctx.backend = deterministic, backend
        return indices, lengths, scores

    @staticmethod
    @once_differentiable
    def backward(ctx, d_indices, d_lengths, d_scores):
        return *_index_topk_gradients(ctx, d_scores), *[None] * 7


class IndexReplay(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, q, k, weights, k_scale, begin, end, indices, lengths, deterministic, backend
    ) -> Tensor:
        ctx.save_for_backward(q, k, weights, begin, end, indices, lengths)
        ctx.deterministic, ctx.backend = deterministic, backend
        return _ops.index_topk_replay(
            q, k, weights, k_scale, begin, end, indices, lengths, backend=backend
        )

    @staticmethod
    @once_differentiable
    def backward(ctx, d_scores):
        return *_index_topk_gradients(ctx, d_scores), *[None] * 7


class AttentionOptions(NamedTuple):
    """In one argument: Function.apply looks at each of its arguments in every call."""

    v_dim: int
    scale: float
    with_max_logits: bool
    max_heads_per_pass: int
    deterministic: bool
    backend: str


class SparseAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, kv, indices, lengths, sink, options) -> tuple[Tensor, ...]:
        v_dim, scale, with_max_logits, _, _, backend = options
        out, lse, max_logits = _ops.sparse_attention_forward(
            q, kv, indices, lengths, sink, v_dim, scale, with_max_logits, backend=backend
        )
        ctx.save_for_backward(q, kv, indices, lengths, sink, out, lse)
        ctx.set_materialize_grads(False)
        ctx.options = options
        if not with_max_logits:
            return out, lse  # torch 2.6 compiles no Function that returns None
        ctx.mark_non_differentiable(max_logits)
        return out, lse, max_logits

    @staticmethod
    @once_differentiable
    def backward(ctx, d_out, d_lse, *d_max_logits):
        _, scale, _, max_heads_per_pass, deterministic, backend = ctx.options
        *inputs, out, lse = ctx.saved_tensors
        d_q, d_kv, d_sink = _ops.sparse_attention_backward(
            *inputs,
            out,
            lse,
            torch.zeros_like(out) if d_out is None else d_out.contiguous(),
            None if d_lse is None else d_lse.contiguous(),
            scale,
            max_heads_per_pass,
            backend=backend,
            deterministic=deterministic,
        )
        return d_q, d_kv, None, None, d_sink, None


class ValueProjection(torch.autograd.Function):
    @staticmethod
    def forward(ctx, out, w_v, deterministic, backend) -> Tensor:
        ctx.save_for_backward(out, w_v)
        ctx.deterministic, ctx.backend = deterministic, backend
        return _ops.value_projection_forward(out, w_v, backend=backend)

    @staticmethod
    @once_differentiable
    def backward(ctx, d_out_v):
        d_out, d_w_v = _ops.value_projection_backward(
            *ctx.saved_tensors,
            d_out_v.contiguous(),
            backend=ctx.backend,
            deterministic=ctx.deterministic,
        )
        return d_out, d_w_v, None, None


class IndexLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, scores, target, indices, lengths, backend) -> Tensor:
        loss, d_scores = _ops.index_loss(indices, lengths, scores, target, backend=backend)
        ctx.save_for_backward(d_scores)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx, d_loss):
        (d_scores,) = ctx.saved_tensors
        return d_loss[:, None] * d_scores, None, None, None, None


class DenseIndexLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx,
        q,
        kv,
        sink,
        index_q,
        index_k,
        weights,
        begin,
        end,
        scale,
        key_offset,
        deterministic,
        backend,
    ) -> tuple[Tensor, Tensor]:
        inputs = (q, kv, sink, index_q, index_k, weights, begin, end)
        loss, lse = _ops.dense_index_loss_forward(*inputs, scale, key_offset, backend=backend)
        ctx.save_for_backward(*inputs, lse)
        ctx.mark_non_differentiable(lse)
        ctx.scale, ctx.key_offset = scale, key_offset
        ctx.deterministic, ctx.backend = deterministic, backend
        return loss, lse

    @staticmethod
    @once_differentiable
    def backward(ctx, d_loss, d_lse):
        gradients = _ops.dense_index_loss_backward(
            *ctx.saved_tensors,
            d_loss.contiguous(),
            ctx.scale,
            ctx.key_offset,
            backend=ctx.backend,
            deterministic=ctx.deterministic,
        )
        return None, None, None, *gradients, *[None] * 6
