# SPDX-License-Identifier: Apache-2.0
"""The ops of the library as functions that allocate their outputs, filled with NaN."""

import torch
from torch import Tensor

from winnow import _lib

REFERENCE = _lib.execution(backend="reference")


def accumulator(x: Tensor) -> torch.dtype:
    """The dtype of lse, sink, weights and scores that belong to x."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def poison(*shape: int, dtype: torch.dtype) -> Tensor:
    if dtype == torch.int32:
        return torch.full(shape, -77777, dtype=dtype)
    return torch.full(shape, float("nan")).to(dtype)


def key_windows(cu_seqlens: Tensor, tokens: int, execution=REFERENCE, **options):
    begin, end = poison(tokens, dtype=torch.int32), poison(tokens, dtype=torch.int32)
    _lib.run("key_windows", execution, cu_seqlens=cu_seqlens, begin=begin, end=end, **options)
    return begin, end


def window_indices(cu_seqlens: Tensor, tokens: int, topk: int, execution=REFERENCE, **options):
    indices = poison(tokens, topk, dtype=torch.int32)
    lengths = poison(tokens, dtype=torch.int32)
    out = {"indices": indices, "lengths": lengths}
    _lib.run("window_indices", execution, cu_seqlens=cu_seqlens, **out, **options)
    return indices, lengths


def index_topk(q, k, weights, begin, end, topk: int, execution=REFERENCE, **options):
    tokens = q.shape[0]
    out = {
        "indices": poison(tokens, topk, dtype=torch.int32),
        "lengths": poison(tokens, dtype=torch.int32),
        "scores": poison(tokens, topk, dtype=weights.dtype),
    }
    arguments = {"q": q, "k": k, "weights": weights, "begin": begin, "end": end}
    _lib.run("index_topk_forward", execution, **arguments, **out, **options)
    return out["indices"], out["lengths"], out["scores"]


def index_replay(q, k, weights, begin, end, indices, execution=REFERENCE, **options):
    scores = poison(*indices.shape, dtype=weights.dtype)
    arguments = {"q": q, "k": k, "weights": weights, "begin": begin, "end": end}
    arguments |= {"indices": indices, "scores": scores, "replay": True}
    _lib.run("index_topk_forward", execution, **arguments, **options)
    return scores


def index_topk_backward(
    q, k, weights, begin, end, indices, d_scores, d_k=None, execution=REFERENCE, **options
):
    d_q, d_weights = poison(*q.shape, dtype=q.dtype), poison(*weights.shape, dtype=weights.dtype)
    d_k = torch.zeros(k.shape, dtype=weights.dtype) if d_k is None else d_k
    arguments = {"q": q, "k": k, "weights": weights, "begin": begin, "end": end}
    arguments |= {"indices": indices, "d_scores": d_scores}
    out = {"d_q": d_q, "d_weights": d_weights, "d_k": d_k}
    _lib.run("index_topk_backward", execution, **arguments, **out, **options)
    return d_q, d_weights, d_k


def sparse_attention(q, kv, indices, v_dim: int, execution=REFERENCE, **options):
    rows = q.shape[:-1]
    out = poison(*rows, v_dim, dtype=q.dtype)
    lse, max_logits = (poison(*rows, dtype=accumulator(q)) for _ in range(2))
    arguments = {"q": q, "kv": kv, "indices": indices}
    outputs = {"out": out, "lse": lse, "max_logits": max_logits}
    _lib.run("sparse_attention_forward", execution, **arguments, **outputs, **options)
    return out, lse, max_logits


def sparse_attention_backward(
    q, kv, indices, out, lse, d_out, d_kv=None, d_sink=None, execution=REFERENCE, **options
):
    """d_q, d_kv, d_sink; the last only if there is a sink."""
    d_q = poison(*q.shape, dtype=q.dtype)
    d_kv = torch.zeros(kv.shape, dtype=lse.dtype) if d_kv is None else d_kv
    if d_sink is None and options.get("sink") is not None:
        d_sink = torch.zeros_like(options["sink"])
    arguments = {"q": q, "kv": kv, "indices": indices, "out": out, "lse": lse, "d_out": d_out}
    outputs = {"d_q": d_q, "d_kv": d_kv, "d_sink": d_sink}
    _lib.run("sparse_attention_backward", execution, **arguments, **outputs, **options)
    return d_q, d_kv, d_sink


def value_projection(out, w_v, execution=REFERENCE):
    out_v = poison(*out.shape[:-1], w_v.shape[1], dtype=out.dtype)
    _lib.run("value_projection_forward", execution, out=out, w_v=w_v, out_v=out_v)
    return out_v


def value_projection_backward(out, w_v, d_out_v, d_w_v=None, execution=REFERENCE):
    d_out = poison(*out.shape, dtype=out.dtype)
    d_w_v = torch.zeros(w_v.shape, dtype=accumulator(out)) if d_w_v is None else d_w_v
    arguments = {"out": out, "w_v": w_v, "d_out_v": d_out_v, "d_out": d_out, "d_w_v": d_w_v}
    _lib.run("value_projection_backward", execution, **arguments)
    return d_out, d_w_v


def index_target(q, kv, indices, lse, execution=REFERENCE, **options):
    target = poison(*indices.shape, dtype=lse.dtype)
    arguments = {"q": q, "kv": kv, "indices": indices, "lse": lse, "target": target}
    _lib.run("index_target", execution, **arguments, **options)
    return target


def index_loss(scores, target, indices, execution=REFERENCE, **options):
    loss = poison(len(scores), dtype=scores.dtype)
    d_scores = poison(*scores.shape, dtype=scores.dtype)
    arguments = {"scores": scores, "target": target, "indices": indices}
    _lib.run("index_loss", execution, **arguments, loss=loss, d_scores=d_scores, **options)
    return loss, d_scores


_DENSE = ("q", "kv", "index_q", "index_k", "weights", "begin", "end")


def dense_index_loss(*tensors: Tensor, execution=REFERENCE, **options):
    arguments = dict(zip(_DENSE, tensors, strict=True))
    q, dtype = arguments["q"], arguments["weights"].dtype
    loss, lse = poison(len(q), dtype=dtype), poison(*q.shape[:2], dtype=dtype)
    _lib.run("dense_index_loss_forward", execution, **arguments, loss=loss, lse=lse, **options)
    return loss, lse


def dense_index_loss_backward(
    *tensors: Tensor, lse, d_loss, d_index_k=None, execution=REFERENCE, **options
):
    arguments = dict(zip(_DENSE, tensors, strict=True))
    index_q, index_k, weights = (arguments[name] for name in ("index_q", "index_k", "weights"))
    if d_index_k is None:
        d_index_k = torch.zeros(index_k.shape, dtype=weights.dtype)
    out = {
        "d_index_q": poison(*index_q.shape, dtype=index_q.dtype),
        "d_weights": poison(*weights.shape, dtype=weights.dtype),
        "d_index_k": d_index_k,
    }
    arguments |= {"lse": lse, "d_loss": d_loss}
    _lib.run("dense_index_loss_backward", execution, **arguments, **out, **options)
    return out["d_index_q"], out["d_weights"], d_index_k


def quantize_fp8(x: Tensor, execution=REFERENCE, **options):
    values = poison(*x.shape, dtype=torch.float8_e4m3fn)
    scale = poison(*x.shape[:-1], dtype=torch.float32)
    _lib.run("quantize_fp8", execution, x=x, values=values, scale=scale, **options)
    return values, scale
