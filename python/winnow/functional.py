# SPDX-License-Identifier: Apache-2.0
"""The operators as differentiable functions of tensors.

Tensors are on the CPU or on a CUDA device, where calls are enqueued on the current stream; forward
calls also accept arrays of other libraries through DLPack. Results are torch tensors.
docs/operators.md defines each operator, including edge cases. In the shapes below, tokens are query
rows, keys are key rows, and topk are the slots of a row.

k, kv and index_k are tensors of keys, or the results of gather_keys for keys sharded over ranks.
With torch.use_deterministic_algorithms every call is deterministic.

Errors are ValueError for an invalid call, NotImplementedError for one that the backend does not
support, RuntimeError if the device failed, each with the message of the library.
"""

import math
from collections.abc import Callable
from typing import Any, Literal, overload

import torch
from torch import Tensor

from winnow import _autograd
from winnow._arguments import (
    MOST_TOPK,
    Array,
    check_dtype,
    check_not_batched,
    check_size,
    check_topk,
    number,
    one_of,
    optional_tensor,
    tensor,
)
from winnow._key_arguments import (
    check_keys,
    check_packing,
    check_rows,
    check_selected_keys,
    local_and_keys,
    rows_of,
    values_of,
)
from winnow.keys import Keys
from winnow.packing import Packing
from winnow.parallel import check_group
from winnow.results import Attention, CountedLoss, IndexList, Quantized, Selection

__all__ = [
    "Attention",
    "CountedLoss",
    "IndexList",
    "Quantized",
    "Selection",
    "dense_index_loss",
    "index_loss",
    "index_target",
    "index_topk",
    "quantize_fp8",
    "sparse_attention",
    "value_projection",
    "window_indices",
]

_ops = torch.ops.winnow
_REDUCTIONS = ("mean", "sum", "none")


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
    """The lightning indexer: scores the keys in the window of a row and selects the topk largest.

    score[t,s] = sum_h weights[t,h] * max(q[t,h] . k[s], 0). Ties go to the smaller key; NaN and
    -inf are never selected. Scores are differentiable in q, k and weights.

    Args:
        q: [tokens, index_heads, index_dim] bf16, fp16, fp32, float8_e4m3fn; fp64 on the reference.
        k: [keys, index_dim], as q.
        weights: [tokens, index_heads] fp32 (fp64 with fp64), all scales folded in.
        packing: defines the key window of every row.
        topk: the number of keys to select, unless `indices` is given.
        ratio: keys are pools of this many rows.
        k_scale: [keys] fp32, with fp8 only; fold the scale of q into the weights.
        indices: [tokens, topk] int32: score these keys instead of selecting (replay). A key outside
            the window of the row has score -inf and gradient 0.
        lengths: [tokens] int32, with `indices` only: the number of slots to use.
        order: of the slots: "ascending" by key, or "by_score", largest first.
        with_scores: False saves the memory of the scores.
        deterministic: backward is bitwise reproducible, at some cost.
        backend: "automatic" (the default), "reference", "cpu" or "cuda".
        kernel: the name of the kernel to run; by default the best one that can. winnow.explain
            lists them.
    """
    q, (k, keys) = tensor("index_topk", "q", q), local_and_keys("index_topk", "k", k)
    weights = tensor("index_topk", "weights", weights)
    k_scale = None if k_scale is None else values_of("index_topk", "k_scale", k_scale)
    indices = optional_tensor("index_topk", "indices", indices)
    lengths = optional_tensor("index_topk", "lengths", lengths)
    if (topk is None) == (indices is None):
        given = "is missing" if topk is None else f"{topk} and indices"
        raise ValueError(f"index_topk: topk {given}: one of topk and indices must be given")
    if lengths is not None and indices is None:
        raise ValueError("index_topk: lengths: must be absent without indices")
    check_not_batched("index_topk", "q", q, "index_heads, index_dim")
    check_rows("index_topk", packing, q)
    check_dtype("index_topk", "k", k, "q", q)
    if q.dtype == torch.float8_e4m3fn and with_scores and _needs_gradient(weights):
        raise NotImplementedError(
            "index_topk: weights require gradients: with q of float8_e4m3fn there are none"
        )
    if topk is not None:
        check_topk("index_topk", topk)
    windows = packing.windows(ratio)
    check_keys("index_topk", "k", packing, ratio, k, keys)
    inputs = (q, k, weights, k_scale, *windows)
    run = _autograd.Run(backend, kernel, deterministic)
    key_rows = rows_of(k, keys)
    if indices is not None:
        scores = _autograd.IndexReplay.apply(*inputs, indices, lengths, run, keys)
        return Selection(indices, scores, lengths, key_rows)
    if not with_scores:
        with torch.no_grad():
            k = k if keys is None else keys.values
            selected, counts, scores = _ops.index_topk_forward(
                q, k, *inputs[2:], topk, order, False, **_autograd.forward_options(run)
            )
        return Selection(selected, scores, counts, key_rows)
    selected, counts, scores = _autograd.IndexTopk.apply(*inputs, topk, order, run, keys)
    return Selection(selected, scores, counts, key_rows)


def sparse_attention(
    q: Array,
    kv: Array | Keys,
    indices: Array | Selection | IndexList,
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
    """Attention over selected key rows; the value of a key is the first v_dim channels of its row.

    s_j = scale * q[t,h] . kv[i_j];  p_j = exp(s_j) / (sum_j exp(s_j) + exp(sink[h]));
    out[t,h] = sum_j p_j * kv[i_j][:v_dim];  lse = log sum_j exp(s_j).
    Invalid indices contribute nothing; a row without keys has output 0. Differentiable in q, kv and
    sink, through out and lse.

    Args:
        q: [tokens, heads, qk_dim] bf16, fp16, fp32; fp64 on the reference. All tensors except sink
            may have one more leading dimension, the batch, of which each slice has its own kv.
        kv: [keys, qk_dim], as q: one head, shared by all heads of q.
        indices: [tokens, topk] int32; or the selection of index_topk or the list of
            window_indices, with their lengths. A selection knows how many keys it was made from, so
            that the kv of one rank alone is refused.
        v_dim: the channels of a value; qk_dim by default.
        scale: 1 / sqrt(qk_dim) by default if v_dim is qk_dim; else it must be given.
        sink: [heads] fp32 (fp64 with fp64): a logit whose value is 0.
        lengths: [tokens] int32: the number of slots to use; with indices as a tensor only.
        with_max_logits: also compute the largest logit of every row and head.
        max_heads_per_pass: backward processes at most this many heads at a time.
        deterministic: backward is bitwise reproducible, at some cost.
        backend: "automatic" (the default), "reference", "cpu" or "cuda".
        kernel: the name of the kernel to run; by default the best one that can. winnow.explain
            lists them.
    """
    q, (kv, keys) = tensor("sparse_attention", "q", q), local_and_keys("sparse_attention", "kv", kv)
    check_dtype("sparse_attention", "kv", kv, "q", q)
    if isinstance(indices, Selection | IndexList):
        if lengths is not None:
            raise ValueError("sparse_attention: lengths: must be absent, the selection has its own")
        if isinstance(indices, Selection):
            check_selected_keys("sparse_attention", indices, rows_of(kv, keys), exact=True)
        lengths, indices = indices.lengths, indices.indices
    indices = tensor("sparse_attention", "indices", indices)
    sink = optional_tensor("sparse_attention", "sink", sink)
    lengths = optional_tensor("sparse_attention", "lengths", lengths)
    if v_dim is None:
        v_dim = q.shape[-1] if q.dim() else 1  # the library refuses a q without dimensions
    check_size("sparse_attention", "v_dim", v_dim, 1)
    if q.dim() and v_dim > q.shape[-1]:
        raise ValueError(
            f"sparse_attention: v_dim {v_dim}: must be at most {q.shape[-1]}, the channels of q"
        )
    if max_heads_per_pass is not None:
        check_size("sparse_attention", "max_heads_per_pass", max_heads_per_pass, 1)
    if scale is not None:
        scale = number("sparse_attention", "scale", scale)
    if scale == 0:  # 0 means "not given" to the library
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
    """Projects the output of latent attention to the values of each head: w_v[h] @ out[t,h].

    Args:
        out: [tokens, heads, v_dim].
        w_v: [heads, head_dim, v_dim], as out.
        deterministic: backward is bitwise reproducible, at some cost.
        backend: "automatic" (the default), "reference", "cpu" or "cuda".
        kernel: the name of the kernel to run; by default the best one that can. winnow.explain
            lists them.

    Returns:
        [tokens, heads, head_dim], as out; differentiable in both.
    """
    out, w_v = tensor("value_projection", "out", out), tensor("value_projection", "w_v", w_v)
    check_dtype("value_projection", "w_v", w_v, "out", out)
    return _autograd.ValueProjection.apply(out, w_v, _autograd.Run(backend, kernel, deterministic))


def index_target(
    selection: Selection,
    q: Array,
    kv: Array | Keys,
    lse: Array,
    *,
    scale: float,
    sink: Array | None = None,
    key_offset: int = 0,
    target: Array | None = None,
    backend: str | None = None,
    kernel: str | None = None,
) -> Tensor:
    """The attention probabilities of the selected keys, summed over heads; not differentiable.

    Returns [tokens, topk], as lse: not normalised, and 0 in slots without a key. Layers that share
    one selection sum theirs: each passes the result on as `target`, and the last layer passes it to
    index_loss, which normalises once.

    Args:
        selection: the result of index_topk, with or without scores.
        q: [tokens, heads, qk_dim], as given to attention.
        kv: [keys, qk_dim], as given to attention.
        lse: [tokens, heads], of sparse_attention over a list that contains the selected keys.
        scale, sink: as given to attention.
        key_offset: the row of kv at which the indexer's keys begin.
        target: [tokens, topk], as lse: the result is added to it. The tensor itself stays as it is.
        backend: "automatic" (the default), "reference", "cpu" or "cuda".
        kernel: the name of the kernel to run; by default the best one that can. winnow.explain
            lists them.
    """
    q, kv = tensor("index_target", "q", q), values_of("index_target", "kv", kv)
    check_dtype("index_target", "kv", kv, "q", q)
    check_selected_keys("index_target", selection, rows_of(kv), key_offset)
    lse = tensor("index_target", "lse", lse)
    sink = optional_tensor("index_target", "sink", sink)
    target = optional_tensor("index_target", "target", target)
    scale = number("index_target", "scale", scale)
    check_size("index_target", "key_offset", key_offset, 0)
    run = _autograd.Run(backend, kernel)
    with torch.no_grad():
        return _index_target(selection, q, kv, lse, sink, target, scale, key_offset, run)


def _index_target(
    selection: Selection,
    q: Tensor,
    kv: Tensor,
    lse: Tensor,
    sink: Tensor | None,
    target: Tensor | None,
    scale: float,
    key_offset: int,
    run: _autograd.Run,
) -> Tensor:
    inputs = (q, kv, selection.indices, selection.lengths, sink, lse)
    options = _autograd.forward_options(run)
    if target is None:
        return _ops.index_target(*inputs, scale, key_offset, **options)
    return _ops.index_target_added(*inputs, target, scale, key_offset, **options)


# The overloads of the losses tell their results apart; their arguments stand in the definitions.
@overload
def index_loss(*args: Any, with_count: Literal[True], **options: Any) -> CountedLoss: ...


@overload
def index_loss(*args: Any, **options: Any) -> Tensor: ...


def index_loss(  # type: ignore[misc]
    selection: Selection,
    q: Array,
    kv: Array | Keys,
    lse: Array,
    *,
    scale: float,
    sink: Array | None = None,
    key_offset: int = 0,
    target: Array | None = None,
    head_group: Any = None,
    reduction: str = "mean",
    with_count: bool = False,
    backend: str | None = None,
) -> Tensor | CountedLoss:
    """KL divergence between attention over the selected keys and softmax of the indexer's scores.

    The target, the attention probabilities summed over heads, has no gradient: the loss trains only
    the indexer, through selection.scores. Rows with fewer than two selected keys, or whose keys
    have attention probability 0, do not count and have loss 0.

    Args:
        selection: the result of index_topk, with scores.
        q: [tokens, heads, qk_dim], as given to attention.
        kv: [keys, qk_dim], as given to attention.
        lse: [tokens, heads], of sparse_attention over a list that contains the selected keys.
        scale: as given to attention.
        sink: [heads], as given to attention.
        key_offset: the row of kv at which the indexer's keys begin.
        target: [tokens, topk], the sum of index_target over the other layers that use this
            selection; the target of this layer is added to it.
        head_group: a torch.distributed group over whose ranks the heads are split.
        reduction: of the loss per row: "mean" over the rows that count, "sum" or "none".
        with_count: return a CountedLoss, with the number of rows that count. For a mean across
            ranks, add the sums and the counts of all ranks, then divide: the mean of means is not
            the mean.
        backend: "automatic" (the default), "reference", "cpu" or "cuda".
    """
    one_of("index_loss", "reduction", reduction, _REDUCTIONS)
    scale = number("index_loss", "scale", scale)
    check_size("index_loss", "key_offset", key_offset, 0)
    q, kv = tensor("index_loss", "q", q), values_of("index_loss", "kv", kv)
    check_dtype("index_loss", "kv", kv, "q", q)
    check_selected_keys("index_loss", selection, rows_of(kv), key_offset)
    lse = tensor("index_loss", "lse", lse)
    sink = optional_tensor("index_loss", "sink", sink)
    target = optional_tensor("index_loss", "target", target)
    indices, scores, lengths, _ = selection
    if scores is None:
        raise ValueError("index_loss: selection without scores: must come with scores")
    if head_group is not None:
        check_group("index_loss", "head_group", head_group)
    run = _autograd.Run(backend, None)
    with torch.no_grad():
        target = _index_target(selection, q, kv, lse, sink, target, scale, key_offset, run)
        if head_group is not None:
            torch.distributed.all_reduce(target, group=head_group)
    loss = _autograd.index_loss(scores, target, indices, lengths, run)

    def rows_that_count() -> Tensor:
        valid = (indices >= 0) & (scores != -math.inf)
        if lengths is not None:
            slots = torch.arange(indices.shape[1], device=indices.device)
            valid = valid & (slots < lengths[:, None])
        return (valid.sum(1) >= 2) & (valid & (target > 0)).any(1)

    return _reduced(loss, reduction, with_count, rows_that_count)


@overload
def dense_index_loss(*args: Any, with_count: Literal[True], **options: Any) -> CountedLoss: ...


@overload
def dense_index_loss(*args: Any, **options: Any) -> Tensor: ...


def dense_index_loss(  # type: ignore[misc]
    q: Array,
    kv: Array | Keys,
    index_q: Array,
    index_k: Array | Keys,
    weights: Array,
    packing: Packing,
    *,
    scale: float,
    sink: Array | None = None,
    lse: Array | None = None,
    ratio: int = 1,
    key_offset: int = 0,
    reduction: str = "mean",
    with_count: bool = False,
    deterministic: bool = False,
    backend: str | None = None,
    kernel: str | None = None,
) -> Tensor | CountedLoss:
    """KL divergence between dense attention over the window of a row and softmax of all its scores.

    The loss of the warm-up stage, without a buffer of size tokens x keys. Differentiable in
    index_q, index_k and weights.

    Args:
        q: [tokens, heads, qk_dim], all heads of attention.
        kv: [keys, qk_dim]; key s of the indexer is kv[key_offset + s].
        index_q: [tokens, index_heads, index_dim], as for index_topk, but not fp8.
        index_k: [index_keys, index_dim].
        weights: [tokens, index_heads].
        packing, ratio: define the window of every row in the indexer's keys.
        scale, sink: as given to attention.
        lse: [tokens, heads], as sink, natural log: of the keys of the attention that the model
            computed, if it has it; without it, it is computed first.
        reduction: of the loss per row: "mean" over the rows that count, "sum" or "none". Rows with
            fewer than two keys do not count.
        with_count: return a CountedLoss, with the number of rows that count. For a mean across
            ranks, add the sums and the counts of all ranks, then divide: the mean of means is not
            the mean.
        deterministic: backward is bitwise reproducible, at some cost.
        backend: "automatic" (the default), "reference", "cpu" or "cuda".
        kernel: the name of the kernel to run; by default the best one that can. winnow.explain
            lists them.
    """
    one_of("dense_index_loss", "reduction", reduction, _REDUCTIONS)
    named = {"q": q, "index_q": index_q, "weights": weights}
    q, index_q, weights = (tensor("dense_index_loss", name, x) for name, x in named.items())
    kv, keys = local_and_keys("dense_index_loss", "kv", kv)
    index_k, index_keys = local_and_keys("dense_index_loss", "index_k", index_k)
    sink = optional_tensor("dense_index_loss", "sink", sink)
    lse = optional_tensor("dense_index_loss", "lse", lse)
    check_not_batched("dense_index_loss", "q", q, "heads, qk_dim")
    check_rows("dense_index_loss", packing, q)
    check_dtype("dense_index_loss", "kv", kv, "q", q)
    check_dtype("dense_index_loss", "index_k", index_k, "index_q", index_q)
    scale = number("dense_index_loss", "scale", scale)
    check_size("dense_index_loss", "key_offset", key_offset, 0)
    begin, end = packing.windows(ratio)
    check_keys("dense_index_loss", "index_k", packing, ratio, index_k, index_keys)
    given = None if lse is None else lse.detach()
    results = _autograd.DenseIndexLoss.apply(
        q,
        kv,
        sink,
        index_q,
        index_k,
        weights,
        begin,
        end,
        given,
        scale,
        key_offset,
        _autograd.Run(backend, kernel, deterministic),
        keys,
        index_keys,
    )
    loss, lse = results if given is None else (results, given)

    def rows_that_count() -> Tensor:
        counts = end - begin >= 2
        if sink is not None:  # with a sink of inf all probabilities are 0
            counts = counts & (lse - torch.logaddexp(lse, sink.detach()) > -math.inf).any(1)
        return counts

    return _reduced(loss, reduction, with_count, rows_that_count)


def _reduced(
    loss: Tensor, reduction: str, with_count: bool, rows_that_count: Callable[[], Tensor]
) -> Tensor | CountedLoss:
    if reduction != "none":
        loss = loss.sum()
    if reduction != "mean" and not with_count:
        return loss
    rows = rows_that_count().sum()
    if reduction == "mean":
        loss = loss / rows.clamp(min=1)
    return CountedLoss(loss, rows) if with_count else loss


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
    """The index lists of DeepSeek-V4 over the keys [rows | pools], from document offsets.

    The list of a row has the last `window` rows of its document up to itself, then pool entries:
    those of pool_ids that are visible to it, in the order given, or all visible ones.

    Args:
        packing: defines the documents.
        window: the number of rows, including the own one.
        ratio: rows per pool, at least 2; 0: no pools.
        key_offset: the key at which the pools begin, after all rows.
        pool_ids: [tokens, pool_topk] int32, from index_topk with the same ratio; -1: none.
        topk: slots of a list; by default enough for every row of the packing. On a GPU longer lists
            are truncated.
        backend: "automatic" (the default), "reference", "cpu" or "cuda".
        kernel: the name of the kernel to run; by default the best one that can. winnow.explain
            lists them.
    """
    check_packing("window_indices", packing)
    pool_ids = optional_tensor("window_indices", "pool_ids", pool_ids)
    sizes = {"window": window, "ratio": ratio, "key_offset": key_offset}
    for name, size in sizes.items():
        check_size("window_indices", name, size, 0)
    tokens = packing.tokens
    if topk is None:
        pools = 0
        if pool_ids is not None:
            pools = pool_ids.shape[-1] if pool_ids.dim() else 0  # the library refuses no dimensions
        elif ratio:
            if packing.batch_tokens is None:
                raise ValueError(
                    "window_indices: topk None: must be given where the packing has query_rows"
                )
            pools = packing.batch_tokens // ratio
        check_size("window_indices", "window", window, 0, MOST_TOPK - pools)
        topk = window + pools
    check_topk("window_indices", topk)
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
    """Quantises rows to fp8 (e4m3) with one scale per row, for index_topk. Not differentiable.

    Args:
        x: [rows, dim] or [tokens, heads, dim] bf16, fp16 or fp32.
        power_of_two: round scales up to powers of two.
        backend: "automatic" (the default), "reference", "cpu" or "cuda".
        kernel: the name of the kernel to run; by default the best one that can. winnow.explain
            lists them.
    """
    x = tensor("quantize_fp8", "x", x)
    with torch.no_grad():
        values, scale = _ops.quantize_fp8(
            x, power_of_two, **_autograd.forward_options(_autograd.Run(backend, kernel))
        )
    return Quantized(values, scale)


def _needs_gradient(x: Tensor) -> bool:
    return torch.is_grad_enabled() and x.requires_grad
