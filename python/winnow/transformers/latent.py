# SPDX-License-Identifier: Apache-2.0
"""Latent attention over selected keys as one autograd Function, in chunks of rows.

The key half of kv_b_proj is folded into the queries, attention runs on the latents, and the value
half projects its output. Folded queries are over twice as wide as the queries and are
recomputed in backward, a chunk at a time; the latent output and lse of every chunk are saved.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from winnow import ops  # noqa: F401  registers torch.ops.winnow
from winnow._once_differentiable import once_differentiable

_ops = torch.ops.winnow
_CHUNK_BYTES = 512 << 20  # of folded queries and latent outputs


class Shape(NamedTuple):
    """What the widths of tensors do not tell."""

    nope: int  # channels of a query that meet the latent; the others meet the rope key
    scale: float


def latent_attention(
    q: Tensor,
    kv: Tensor,
    w: Tensor,
    sink: Tensor | None,
    indices: Tensor,
    shape: Shape,
    target: Tensor | None = None,
) -> Tensor:
    """[batch, rows, heads, v_head_dim], differentiable in q, kv, w and sink.

    Args:
        q: [batch, rows, heads, nope + rope].
        kv: [batch, keys, latent + rope], as q.
        w: [heads, nope + v_head_dim, latent], as q: the weight of kv_b_proj.
        sink: [heads] float32.
        indices: [batch, rows, topk] int32; -1: none.
        target: [batch, rows, topk] float32, is set to the attention to each key over all heads.
    """
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (q, kv, w, sink)):
        return LatentAttention.apply(q, kv, w, sink, indices, shape, target)
    return _forward(q, kv, w, sink, indices, shape, target, None)


class LatentAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, kv, w, sink, indices, shape, target) -> Tensor:
        saved: list[Tensor] = []
        out = _forward(q, kv, w, sink, indices, shape, target, saved)
        ctx.save_for_backward(q, kv, w, sink, indices, *saved)
        ctx.shape = shape
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, d_out):
        q, kv, w, sink, indices, *saved = ctx.saved_tensors
        nope, scale = ctx.shape
        latent = w.shape[-1]
        sums = torch.float64 if q.dtype == torch.float64 else torch.float32
        d_q = torch.empty_like(q, memory_format=torch.contiguous_format)
        d_kv = torch.zeros_like(kv, dtype=sums, memory_format=torch.contiguous_format)
        d_w = torch.zeros_like(w, dtype=sums, memory_format=torch.contiguous_format)
        d_sink = None if sink is None else torch.zeros_like(sink)
        d_out = d_out.contiguous()
        for n, (b, rows) in enumerate(_chunks(q, w)):
            out, lse = saved[2 * n : 2 * n + 2]
            d_latent, d_w_v = _ops.value_projection_backward(out, w[:, nope:], d_out[b, rows])
            d_folded, d_keys, d_sink_part = _ops.sparse_attention_backward(
                _folded(q[b, rows], w, nope),
                kv[b],
                indices[b, rows],
                None,
                sink,
                out,
                lse,
                d_latent,
                None,
                scale,
                0,
                True,
            )
            d_kv[b] += d_keys
            by_head = d_folded[..., :latent].transpose(0, 1)  # [heads, rows, latent]
            d_q[b, rows, :, :nope] = torch.bmm(by_head, w[:, :nope].mT).transpose(0, 1)
            d_q[b, rows, :, nope:] = d_folded[..., latent:]
            if ctx.needs_input_grad[2]:
                d_w[:, :nope] += torch.bmm(q[b, rows, :, :nope].permute(1, 2, 0), by_head)
                d_w[:, nope:] += d_w_v
            if sink is not None:
                d_sink += d_sink_part
        return d_q, d_kv.to(kv.dtype), d_w.to(w.dtype), d_sink, None, None, None


def _chunks(q: Tensor, w: Tensor) -> Iterator[tuple[int, slice]]:
    """Rows whose folded queries and latent outputs take at most _CHUNK_BYTES."""
    batch, rows, heads, _ = q.shape
    row_bytes = heads * (q.shape[-1] + 2 * w.shape[-1]) * q.element_size()
    size = max(_CHUNK_BYTES // row_bytes, 1)
    for b in range(batch):
        for first in range(0, rows, size):
            yield b, slice(first, min(first + size, rows))


def _folded(q: Tensor, w: Tensor, nope: int) -> Tensor:
    """[rows, heads, latent + rope]: the key half of w folded into q [rows, heads, nope + rope]."""
    latent = torch.bmm(q[..., :nope].transpose(0, 1), w[:, :nope])  # [heads, rows, latent]
    return torch.cat((latent.transpose(0, 1), q[..., nope:]), dim=-1)


def _forward(
    q: Tensor,
    kv: Tensor,
    w: Tensor,
    sink: Tensor | None,
    indices: Tensor,
    shape: Shape,
    target: Tensor | None,
    saved: list[Tensor] | None,
) -> Tensor:
    """The output; the latent output and the lse of every chunk are appended to `saved`."""
    out = q.new_empty(*q.shape[:3], w.shape[1] - shape.nope)
    for b, rows in _chunks(q, w):
        arguments = _folded(q[b, rows], w, shape.nope), kv[b], indices[b, rows], None, sink
        latent_out, lse, _ = _ops.sparse_attention_forward(*arguments, w.shape[-1], shape.scale)
        if target is not None:
            target[b, rows] = _ops.index_target(*arguments, lse, shape.scale)
        out[b, rows] = _ops.value_projection_forward(latent_out, w[:, shape.nope :])
        if saved is not None:
            saved += [latent_out, lse]
    return out
