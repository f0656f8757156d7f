# SPDX-License-Identifier: Apache-2.0
"""The autograd Functions behind `winnow.functional`: one operator forward, one operator backward.

With keys sharded over ranks, a Function gets the keys of this rank, to which the gradient flows,
and a Keys object. So a single node reduces the gradient of all keys over ranks in fp32: between two
nodes, autograd would round it to the dtype of the keys.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from winnow import _lib
from winnow._once_differentiable import once_differentiable
from winnow.keys import Gathering, Keys

_ops = torch.ops.winnow


class Run(NamedTuple):
    """How the operators of a function are run."""

    backend: str | None  # None: automatic
    kernel: str | None  # of the forward operator; None: the best that can run
    deterministic: bool = False  # for backward


def forward_options(run: "Run | AttentionOptions") -> dict[str, Any]:
    """The options that are not default, since torch spends time on each keyword."""
    options: dict[str, Any] = {}
    if run.backend is not None:
        options["backend"] = run.backend
    if run.kernel:
        options["kernel_name"] = run.kernel
    return options


def _backward_options(run: "Run | AttentionOptions", operator: str) -> dict[str, Any]:
    """The same kernel if the operator has one of that name, else the best that can run."""
    if run.kernel not in _lib.KERNELS[operator]:
        run = run._replace(kernel=None)
    options = forward_options(run)
    if run.deterministic:
        options["deterministic"] = True
    return options


def _all_keys(local: Tensor, keys: Keys | None) -> tuple[Tensor, Tensor]:
    """Returns the keys that the operator reads and the keys to save for backward."""
    if keys is None or keys.gathering is None:
        return local, local
    return keys.values, keys.gathering.to_keep(local, keys.values)


def _restored(gathering: Gathering | None, kept: Tensor) -> Tensor:
    return kept if gathering is None else gathering.whole(kept)


def _local_gradient(ctx, argument: int, gathering: Gathering | None, d_keys: Tensor, kept: Tensor):
    if gathering is None:
        return d_keys
    return gathering.local_gradient(d_keys, kept.dtype) if ctx.needs_input_grad[argument] else None


def _index_topk_gradients(ctx, d_scores: Tensor) -> tuple[Tensor, Tensor | None, Tensor]:
    q, k, *others = ctx.saved_tensors
    d_q, d_k, d_weights = _ops.index_topk_backward(
        q,
        _restored(ctx.gathering, k),
        *others,
        d_scores.contiguous(),
        ctx.gathering is not None,
        **_backward_options(ctx.run, "index_topk_backward"),
    )
    return d_q, _local_gradient(ctx, 1, ctx.gathering, d_k, k), d_weights


class IndexTopk(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, q, k, weights, k_scale, begin, end, topk, order, run, keys
    ) -> tuple[Tensor, Tensor, Tensor]:
        k, kept = _all_keys(k, keys)
        indices, lengths, scores = _ops.index_topk_forward(
            q, k, weights, k_scale, begin, end, topk, order, True, **forward_options(run)
        )
        ctx.save_for_backward(q, kept, weights, begin, end, indices, lengths)
        ctx.mark_non_differentiable(indices, lengths)
        ctx.run = run
        ctx.gathering = None if keys is None else keys.gathering
        return indices, lengths, scores

    @staticmethod
    @once_differentiable
    def backward(ctx, d_indices, d_lengths, d_scores):
        return *_index_topk_gradients(ctx, d_scores), *[None] * 7


class IndexReplay(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, weights, k_scale, begin, end, indices, lengths, run, keys) -> Tensor:
        k, kept = _all_keys(k, keys)
        ctx.save_for_backward(q, kept, weights, begin, end, indices, lengths)
        ctx.run = run
        ctx.gathering = None if keys is None else keys.gathering
        return _ops.index_topk_replay(
            q, k, weights, k_scale, begin, end, indices, lengths, **forward_options(run)
        )

    @staticmethod
    @once_differentiable
    def backward(ctx, d_scores):
        return *_index_topk_gradients(ctx, d_scores), *[None] * 7


class AttentionOptions(NamedTuple):
    """Packed into one argument, since Function.apply spends time on each of its arguments."""

    v_dim: int
    scale: float
    with_max_logits: bool
    max_heads_per_pass: int
    backend: str | None  # from here on as in Run
    kernel: str | None
    deterministic: bool


class SparseAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, kv, indices, lengths, sink, options, keys) -> tuple[Tensor, ...]:
        kv, kept = _all_keys(kv, keys)
        v_dim, scale, with_max_logits, *_ = options
        out, lse, max_logits = _ops.sparse_attention_forward(
            q, kv, indices, lengths, sink, v_dim, scale, with_max_logits, **forward_options(options)
        )
        ctx.save_for_backward(q, kept, indices, lengths, sink, out, lse)
        ctx.set_materialize_grads(False)
        ctx.options = options
        ctx.gathering = None if keys is None else keys.gathering
        if not with_max_logits:
            return out, lse  # torch.compile of torch 2.6 fails if a Function returns None
        ctx.mark_non_differentiable(max_logits)
        return out, lse, max_logits

    @staticmethod
    @once_differentiable
    def backward(ctx, d_out, d_lse, *d_max_logits):
        options = ctx.options
        q, kv, *others, out, lse = ctx.saved_tensors
        d_q, d_kv, d_sink = _ops.sparse_attention_backward(
            q,
            _restored(ctx.gathering, kv),
            *others,
            out,
            lse,
            torch.zeros_like(out) if d_out is None else d_out.contiguous(),
            None if d_lse is None else d_lse.contiguous(),
            options.scale,
            options.max_heads_per_pass,
            ctx.gathering is not None,
            **_backward_options(options, "sparse_attention_backward"),
        )
        d_kv = _local_gradient(ctx, 1, ctx.gathering, d_kv, kv)
        return d_q, d_kv, None, None, d_sink, None, None


class ValueProjection(torch.autograd.Function):
    @staticmethod
    def forward(ctx, out, w_v, run) -> Tensor:
        ctx.save_for_backward(out, w_v)
        ctx.run = run
        return _ops.value_projection_forward(out, w_v, **forward_options(run))

    @staticmethod
    @once_differentiable
    def backward(ctx, d_out_v):
        d_out, d_w_v = _ops.value_projection_backward(
            *ctx.saved_tensors,
            d_out_v.contiguous(),
            **_backward_options(ctx.run, "value_projection_backward"),
        )
        return d_out, d_w_v, None


class _IndexLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, scores, no_scores, target, indices, lengths, run) -> Tensor:
        loss, d_scores = _ops.index_loss(indices, lengths, scores, target, **forward_options(run))
        ctx.save_for_backward(d_scores, no_scores)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx, d_loss):
        d_scores, _ = ctx.saved_tensors
        return d_loss[:, None] * d_scores, None, None, None, None, None


def index_loss(scores, target, indices, lengths, run) -> Tensor:
    """The loss of each row. Backward needs no scores: of none of them, which take no memory, it has
    the way back by which a second derivative is refused."""
    return _IndexLoss.apply(scores, scores[:0].clone(), target, indices, lengths, run)


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
        lse,
        scale,
        key_offset,
        run,
        keys,
        index_keys,
    ) -> Tensor | tuple[Tensor, Tensor]:
        kv, kept_kv = _all_keys(kv, keys)
        index_k, kept_index_k = _all_keys(index_k, index_keys)
        rest = (weights, begin, end)
        inputs = (q, kv, sink, index_q, index_k, *rest)
        options = (scale, key_offset)
        if given := lse is not None:
            loss = _ops.dense_index_loss_given_lse(*inputs, lse, *options, **forward_options(run))
        else:
            loss, lse = _ops.dense_index_loss_forward(*inputs, *options, **forward_options(run))
            ctx.mark_non_differentiable(lse)
        ctx.save_for_backward(q, kept_kv, sink, index_q, kept_index_k, *rest, lse)
        ctx.scale, ctx.key_offset = scale, key_offset
        ctx.run = run
        ctx.gathering = None if keys is None else keys.gathering
        ctx.index_gathering = None if index_keys is None else index_keys.gathering
        return loss if given else (loss, lse)

    @staticmethod
    @once_differentiable
    def backward(ctx, d_loss, *d_lse):
        q, kv, sink, index_q, index_k, *others = ctx.saved_tensors
        d_index_q, d_index_k, d_weights = _ops.dense_index_loss_backward(
            q,
            _restored(ctx.gathering, kv),
            sink,
            index_q,
            _restored(ctx.index_gathering, index_k),
            *others,
            d_loss.contiguous(),
            ctx.scale,
            ctx.key_offset,
            ctx.index_gathering is not None,
            **_backward_options(ctx.run, "dense_index_loss_backward"),
        )
        d_index_k = _local_gradient(ctx, 4, ctx.index_gathering, d_index_k, index_k)
        return None, None, None, d_index_q, d_index_k, d_weights, *[None] * 8
