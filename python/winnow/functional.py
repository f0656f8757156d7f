# SPDX-License-Identifier: Apache-2.0
"""The operators as differentiable functions of tensors.

Tensors are on the CPU or on a CUDA device, where calls go to the current stream; forward calls also
take arrays of other libraries by DLPack. Results are torch tensors. What each operator means, edge
cases included, stands in docs/operators.md; shapes below: tokens query rows, keys key rows, topk
slots of a row.

Arguments that many functions have:
    backend: "automatic" (the default), "reference", "cpu" or "cuda".
    kernel: the name of the kernel that must run, for measurements and comparisons; by default the
        best that can. Backward takes its own kernel of that name, or the best if it has none.
        winnow.explain lists the names.
    k, kv, index_k: keys are a tensor, or what gather_keys made of keys that lie on many ranks.
    deterministic: backward gives the same bits in every run, at some cost. Implied by
        torch.use_deterministic_algorithms.
    reduction: of a loss per row: "mean" over the rows that count, "sum" or "none". Across ranks,
        add sums and counts and divide then: the mean of means is not the mean.

Errors are ValueError for a call that is wrong, NotImplementedError for one that the backend cannot
do, RuntimeError where the device failed, each with the library's sentence.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from winnow import _autograd
from winnow._arguments import Array, at_least, one_of, optional_tensor, tensor
from winnow.keys import Keys
from winnow.packing import Packing

__all__ = [
    "Attention",
    "IndexList",
    "Quantized",
    "Selection",
    "dense_index_loss",
    "index_loss",
    "index_topk",
    "quantize_fp8",
    "sparse_attention",
    "value_projection",
    "window_indices",
]

_ops = torch.ops.winnow
_REDUCTIONS = ("mean", "sum", "none")


class Selection(NamedTuple):
    """What index_topk chose; valid slots of a row stand first."""

    indices: Tensor  # [tokens, topk]  int32; -1 behind the valid slots
    scores: Tensor | None  # [tokens, topk]  as weights, differentiable; -inf where there is no key
    lengths: Tensor | None  # [tokens]  int32, valid slots


class Attention(NamedTuple):
    """What sparse_attention computed."""

    out: Tensor  # [tokens, heads, v_dim]
    lse: Tensor  # [tokens, heads]  natural log, keys only; -inf for a row without keys
    max_logits: Tensor | None  # [tokens, heads]  the largest logit, not differentiable


class IndexList(NamedTuple):
    """Keys of every row, valid ones first, then -1."""

    indices: Tensor  # [tokens, topk]  int32
    lengths: Tensor  # [tokens]  int32, valid entries


class Quantized(NamedTuple):
    """Rows of e4m3 numbers; row r stands for scale[r] * values[r]."""

    values: Tensor  # as x, float8_e4m3fn
    scale: Tensor  # x without its last dimension, float32


def index_topk(
    q: Array,
    k: Array | Keys,
    weights: Array,
    packing: Packing,
    *,
    topk: int | None = None,
    ratio: int = 1,
    k_scale: Array | Keys | None = None,
    indices: Array | None = None,
    lengths: Array | None = None,
    order: str = "ascending",
    with_scores: bool = True,
    deterministic: bool = False,
    backend: str | None = None,
    kernel: str | None = None,
) -> Selection:
    """The lightning indexer: scores of the keys that a row may see, and the topk largest of them.

    score[t,s] = sum_h weights[t,h] * max(q[t,h] . k[s], 0). Equal scores go to the smaller key, NaN
    and -inf are never chosen. Scores are differentiable in q, k and weights.

    Args:
        q: [tokens, index_heads, index_dim] bf16, fp16, fp32, float8_e4m3fn; fp64 on the reference.
        k: [keys, index_dim], as q.
        weights: [tokens, index_heads] fp32 (fp64 with fp64), all scales folded in.
        packing: gives every row its window of keys.
        topk: how many keys to choose, unless `indices` are given.
        ratio: keys are pools of this many rows.
        k_scale: [keys] fp32, with fp8 only; the scale of q belongs into the weights.
        indices: [tokens, topk] int32: score these instead of choosing (replay). A key outside the
            row's window has score -inf and gradient 0.
        lengths: [tokens] int32, with `indices` only: slots that count.
        order: of the slots: "ascending" by key, or "by_score", largest first.
        with_scores: False saves the memory of scores that nobody reads.
    """
    q, (k, keys) = tensor("index_topk", "q", q), _keys("index_topk", "k", k)
    weights = tensor("index_topk", "weights", weights)
    k_scale = None if k_scale is None else _values("index_topk", "k_scale", k_scale)
    indices = optional_tensor("index_topk", "indices", indices)
    lengths = optional_tensor("index_topk", "lengths", lengths)
    if (topk is None) == (indices is None):
        given = "is missing" if topk is None else f"{topk} and indices"
        raise ValueError(f"index_topk: topk {given}: one of topk and indices must be given")
    if lengths is not None and indices is None:
        raise ValueError("index_topk: lengths: must be absent without indices")
    _check_rows("index_topk", packing, q)
    if q.dtype == torch.float8_e4m3fn and with_scores and _needs_gradient(weights):
        raise NotImplementedError(
            "index_topk: weights require gradients: with q of float8_e4m3fn there are none"
        )
    windows = packing.windows(ratio)
    _check_keys("index_topk", "k", packing, ratio, k, keys)
    inputs = (q, k, weights, k_scale, *windows)
    run = _autograd.Run(backend, kernel, deterministic)
    if indices is not None:
        scores = _autograd.IndexReplay.apply(*inputs, indices, lengths, run, keys)
        return Selection(indices, scores, lengths)
    at_least("index_topk", "topk", topk, 1)
    if not with_scores:
        with torch.no_grad():
            k = k if keys is None else keys.values
            indices, lengths, scores = _ops.index_topk_forward(
                q, k, *inputs[2:], topk, order, False, **_autograd.forward_options(run)
            )
        return Selection(indices, scores, lengths)
    indices, lengths, scores = _autograd.IndexTopk.apply(*inputs, topk, order, run, keys)
    return Selection(indices, scores, lengths)


def sparse_attention(
    q: Array,
    kv: Array | Keys,
    indices: Array,
    *,
    v_dim: int | None = None,
    scale: float | None = None,
    sink: Array | None = None,
    lengths: Array | None = None,
    with_max_logits: bool = False,
    max_heads_per_pass: int | None = None,
    deterministic: bool = False,
    backend: str | None = None,
    kernel: str | None = None,
) -> Attention:
    """Attention over chosen key rows; the value of a key is the first v_dim channels of its row.

    s_j = scale * q[t,h] . kv[i_j];  p_j = exp(s_j) / (sum_j exp(s_j) + exp(sink[h]));
    out[t,h] = sum_j p_j * kv[i_j][:v_dim];  lse = log sum_j exp(s_j).
    An index that is no key contributes nothing; a row without keys gives 0. Differentiable in q, kv
    and sink, from the gradients of out and of lse.

    Args:
        q: [tokens, heads, qk_dim] bf16, fp16, fp32; fp64 on the reference. All tensors but sink may
            have one more leading dimension, the batch, each slice with its own kv.
        kv: [keys, qk_dim], as q: one head, shared by all of q's.
        indices: [tokens, topk] int32.
        v_dim: channels of a value; by default all, qk_dim.
        scale: by default 1 / sqrt(qk_dim) where v_dim is qk_dim; else it must be given.
        sink: [heads] fp32 (fp64 with fp64): a logit without a value.
        lengths: [tokens] int32: slots of a row that count.
        with_max_logits: compute the largest logit of every row and head too.
        max_heads_per_pass: backward works through heads in pieces of this many.
    """
    q, (kv, keys) = tensor("sparse_attention", "q", q), _keys("sparse_attention", "kv", kv)
    indices = tensor("sparse_attention", "indices", indices)
    sink = optional_tensor("sparse_attention", "sink", sink)
    lengths = optional_tensor("sparse_attention", "lengths", lengths)
    if v_dim is None:
        v_dim = q.shape[-1] if q.dim() else 1  # the library refuses a q without dimensions
    at_least("sparse_attention", "v_dim", v_dim, 1)
    if max_heads_per_pass is not None:
        at_least("sparse_attention", "max_heads_per_pass", max_heads_per_pass, 1)
    if scale == 0:  # what the library takes for "not given"
        raise ValueError("sparse_attention: scale 0: must not be 0")
    options = _autograd.AttentionOptions(
        v_dim,
        scale or 0.0,
        with_max_logits,
        max_heads_per_pass or 0,
        backend,
        kernel,
        deterministic,
    )
    out, lse, *max_logits = _autograd.SparseAttention.apply(
        q, kv, indices, lengths, sink, options, keys
    )
    return Attention(out, lse, max_logits[0] if with_max_logits else None)


def value_projection(
    out: Array,
    w_v: Array,
    *,
    deterministic: bool = False,
    backend: str | None = None,
    kernel: str | None = None,
) -> Tensor:
    """Latent attention's output lifted to each head's own values: w_v[h] @ out[t,h].

    Args:
        out: [tokens, heads, v_dim].
        w_v: [heads, head_dim, v_dim], as out.

    Returns:
        [tokens, heads, head_dim], as out; differentiable in both.
    """
    out, w_v = tensor("value_projection", "out", out), tensor("value_projection", "w_v", w_v)
    return _autograd.ValueProjection.apply(out, w_v, _autograd.Run(backend, kernel, deterministic))


def index_loss(
    selection: Selection,
    q: Array,
    kv: Array | Keys,
    lse: Array,
    *,
    scale: float,
    sink: Array | None = None,
    key_offset: int = 0,
    head_group: Any = None,
    reduction: str = "mean",
    backend: str | None = None,
) -> Tensor:
    """KL between what attention spends on the chosen keys and softmax of the indexer's scores.

    The target, attention's probabilities summed over heads, has no gradient: the loss trains the
    indexer alone, through selection.scores. Rows with fewer than two chosen keys, or on whose
    keys attention spends nothing, do not count and have loss 0.

    Args:
        selection: of index_topk, with scores.
        q: [tokens, heads, qk_dim], as attention had it.
        kv: [keys, qk_dim], as attention had it.
        lse: [tokens, heads], of sparse_attention over a list that holds the chosen keys.
        scale: as attention had it.
        sink: [heads], as attention had it.
        key_offset: where the indexer's keys begin in kv.
        head_group: a torch.distributed group over whose ranks the heads are split.
        reduction: of the loss per row, see above.
    """
    one_of("index_loss", "reduction", reduction, _REDUCTIONS)
    q, kv = tensor("index_loss", "q", q), _values("index_loss", "kv", kv)
    lse = tensor("index_loss", "lse", lse)
    sink = optional_tensor("index_loss", "sink", sink)
    indices, scores, lengths = selection
    if scores is None:
        raise ValueError("index_loss: selection without scores: must come with scores")
    run = _autograd.Run(backend, None)
    with torch.no_grad():
        target = _ops.index_target(
            q, kv, indices, lengths, sink, lse, scale, key_offset, **_autograd.forward_options(run)
        )
        if head_group is not None:
            torch.distributed.all_reduce(target, group=head_group)
    loss = _autograd.IndexLoss.apply(scores, target, indices, lengths, run)
    if reduction != "mean":
        return loss if reduction == "none" else loss.sum()
    valid = (indices >= 0) & (scores != -math.inf)
    if lengths is not None:
        valid = valid & (torch.arange(indices.shape[1], device=indices.device) < lengths[:, None])
    counts = (valid.sum(1) >= 2) & (valid & (target > 0)).any(1)
    return loss.sum() / counts.sum().clamp(min=1)


def dense_index_loss(
    q: Array,
    kv: Array | Keys,
    index_q: Array,
    index_k: Array | Keys,
    weights: Array,
    packing: Packing,
    *,
    scale: float,
    sink: Array | None = None,
    ratio: int = 1,
    key_offset: int = 0,
    reduction: str = "mean",
    deterministic: bool = False,
    backend: str | None = None,
    kernel: str | None = None,
) -> Tensor:
    """index_loss over the whole window of every row, against dense attention over that window.

    The warm-up form, without a buffer of size tokens x keys. Differentiable in index_q, index_k and
    weights.

    Args:
        q: [tokens, heads, qk_dim], all heads of attention.
        kv: [keys, qk_dim]; key s of the indexer is kv[key_offset + s].
        index_q: [tokens, index_heads, index_dim], as index_topk takes it, no fp8.
        index_k: [index_keys, index_dim].
        weights: [tokens, index_heads].
        packing, ratio: give every row its window of the indexer's keys.
        scale, sink: attention's.
        reduction: of the loss per row, see above. Rows with fewer than two keys do not count.
    """
    one_of("dense_index_loss", "reduction", reduction, _REDUCTIONS)
    named = {"q": q, "index_q": index_q, "weights": weights}
    q, index_q, weights = (tensor("dense_index_loss", name, x) for name, x in named.items())
    kv, keys = _keys("dense_index_loss", "kv", kv)
    index_k, index_keys = _keys("dense_index_loss", "index_k", index_k)
    sink = optional_tensor("dense_index_loss", "sink", sink)
    _check_rows("dense_index_loss", packing, q)
    begin, end = packing.windows(ratio)
    _check_keys("dense_index_loss", "index_k", packing, ratio, index_k, index_keys)
    loss, lse = _autograd.DenseIndexLoss.apply(
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
        _autograd.Run(backend, kernel, deterministic),
        keys,
        index_keys,
    )
    if reduction != "mean":
        return loss if reduction == "none" else loss.sum()
    counts = end - begin >= 2
    if sink is not None:  # a sink of inf leaves nothing for the keys
        counts = counts & (lse - torch.logaddexp(lse, sink.detach()) > -math.inf).any(1)
    return loss.sum() / counts.sum().clamp(min=1)


def window_indices(
    packing: Packing,
    *,
    window: int = 0,
    ratio: int = 0,
    key_offset: int = 0,
    pool_ids: Array | None = None,
    topk: int | None = None,
    backend: str | None = None,
    kernel: str | None = None,
) -> IndexList:
    """DeepSeek-V4's lists over the keys [rows | pools], from document offsets, without a mask.

    Every row lists the last `window` rows of its document up to itself, then pooled entries: those
    of pool_ids that it may see, in the order given, or all that it may see.

    Args:
        packing: of the rows.
        window: rows to list, the own one included.
        ratio: rows of a pool, at least 2; 0: no pools.
        key_offset: where pools begin, behind all rows.
        pool_ids: [tokens, pool_topk] int32, from index_topk with the same ratio; -1: none.
        topk: slots of a list; by default enough for every row of the packing. On a GPU longer lists
            are cut.
    """
    _check_packing("window_indices", packing)
    pool_ids = optional_tensor("window_indices", "pool_ids", pool_ids)
    tokens = packing.tokens
    if topk is None:
        pools = 0
        if ratio and pool_ids is None:
            if packing.batch_tokens is None:
                raise ValueError(
                    "window_indices: topk None: must be given where the packing has query_rows"
                )
            pools = packing.batch_tokens // ratio
        topk = window + (pools if pool_ids is None else pool_ids.shape[-1])
    at_least("window_indices", "topk", topk, 1)
    indices, lengths = _ops.window_indices(
        packing.cu_seqlens,
        packing.cu_seqlens_padded,
        packing.query_rows,
        pool_ids,
        tokens,
        topk,
        window,
        ratio,
        key_offset,
        **_autograd.forward_options(_autograd.Run(backend, kernel)),
    )
    return IndexList(indices, lengths)


def quantize_fp8(
    x: Array,
    *,
    power_of_two: bool = False,
    backend: str | None = None,
    kernel: str | None = None,
) -> Quantized:
    """Rows as e4m3 numbers with one scale each, as index_topk takes them. Not differentiable.

    Args:
        x: [rows, dim] or [tokens, heads, dim] bf16, fp16 or fp32.
        power_of_two: round scales up to powers of two.
    """
    x = tensor("quantize_fp8", "x", x)
    with torch.no_grad():
        values, scale = _ops.quantize_fp8(
            x, power_of_two, **_autograd.forward_options(_autograd.Run(backend, kernel))
        )
    return Quantized(values, scale)


def _check_packing(function: str, packing: Packing) -> None:
    if not isinstance(packing, Packing):
        raise TypeError(f"{function}: packing is a {type(packing).__name__}: must be a Packing")


def _check_rows(function: str, packing: Packing, q: Tensor) -> None:
    _check_packing(function, packing)
    if q.dim() and packing.tokens != q.shape[0]:
        raise ValueError(
            f"{function}: packing of {packing.tokens} rows: must have {q.shape[0]}, as q"
        )


def _check_keys(
    function: str, name: str, packing: Packing, ratio: int, local: Tensor, keys: Keys | None
) -> None:
    """Windows of a rank are those of the whole batch: they mean nothing in its own keys."""
    must_have = packing.keys(ratio)
    has = keys.gathering.layout.size if keys is not None else len(local) if local.dim() else 0
    if must_have is not None and has != must_have:
        raise ValueError(
            f"{function}: {name} of {has} rows: must have {must_have}, those of all ranks, as"
            " gather_keys brings them"
        )


def _keys(function: str, name: str, value: Array | Keys) -> tuple[Tensor, Keys | None]:
    """This rank's keys, and how to reach the others' if there are any."""
    if isinstance(value, Keys):
        return value.local, value if value.gathering is not None else None
    return tensor(function, name, value), None


def _values(function: str, name: str, value: Array | Keys) -> Tensor:
    return value.values if isinstance(value, Keys) else tensor(function, name, value)


def _needs_gradient(x: Tensor) -> bool:
    return torch.is_grad_enabled() and x.requires_grad
