# SPDX-License-Identifier: Apache-2.0
"""The formulas of winnow's operators in plain torch: documentation, and an oracle for the tests.

Written for readability, not for speed: masks are dense [tokens, keys]. The functions compute in the
dtype of their inputs (float64 for an oracle), and autograd gives their gradients. Inputs must be
finite: unlike the library, a dense sum includes the NaN of a key that no row selected.

t query row, s key row, h head, d and c channels, j slot of an index list.
"""

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

_INF = math.inf


def key_windows(
    cu_seqlens: Tensor,
    tokens: int | None = None,
    *,
    cu_seqlens_padded: Tensor | None = None,
    query_rows: Tensor | None = None,
    ratio: int = 1,
    padding_rows: str = "empty",
) -> tuple[Tensor, Tensor]:
    """begin, end: the keys that a query row sees, which are the rows of its document up to itself.

    With ratio r > 1 keys are pools of r real rows; a pool is visible once its last row is.
    """
    slots = (cu_seqlens if cu_seqlens_padded is None else cu_seqlens_padded).long()
    lengths = torch.cat([cu_seqlens.long().diff(), torch.zeros(1, dtype=torch.long)])
    if query_rows is None:
        assert tokens is not None, "one of tokens and query_rows must be given"
        rows = torch.arange(tokens)
    else:
        rows = query_rows.long()

    inside = (rows >= 0) & (rows < slots[-1])
    document = torch.where(inside, torch.searchsorted(slots, rows, right=True) - 1, len(slots) - 1)
    position, real = rows - slots[document], lengths[document]
    seen = torch.minimum(position + 1, real) // ratio
    if padding_rows == "empty":
        seen = torch.where(position < real, seen, 0)
    elif ratio == 1:
        seen = seen.clamp(min=1)
    pools = lengths // ratio
    begin = slots[document] if ratio == 1 else (pools.cumsum(0) - pools)[document]
    begin, seen = (torch.where(inside, x, 0) for x in (begin, seen))
    return begin.int(), (begin + seen).int()


def window_indices(
    cu_seqlens: Tensor,
    tokens: int,
    topk: int,
    *,
    cu_seqlens_padded: Tensor | None = None,
    query_rows: Tensor | None = None,
    window: int = 0,
    ratio: int = 0,
    key_offset: int = 0,
    pool_ids: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """indices, lengths: the last `window` rows up to the own one, then pools, of [rows | pools]."""
    documents: dict[str, Any] = {
        "cu_seqlens_padded": cu_seqlens_padded,
        "query_rows": query_rows,
    }
    windows = torch.stack(key_windows(cu_seqlens, tokens, **documents), 1).tolist()
    lists = [list(range(max(b, e - window), e)) for b, e in windows]
    if ratio:
        windows = torch.stack(key_windows(cu_seqlens, tokens, **documents, ratio=ratio), 1).tolist()
        for t, (b, e) in enumerate(windows):
            pools = range(b, e) if pool_ids is None else pool_ids[t].tolist()
            lists[t] += [key_offset + pool for pool in pools if b <= pool < e]
    indices = torch.tensor([row + [-1] * (topk - len(row)) for row in lists])
    return indices.int().reshape(-1, topk), torch.tensor([len(row) for row in lists]).int()


def index_scores(
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    begin: Tensor,
    end: Tensor,
    *,
    k_scale: Tensor | None = None,
) -> Tensor:
    """I[t,s] = sum_h weights[t,h] * max(q[t,h] . k[s], 0) inside the window, -inf outside."""
    if k_scale is not None:
        k = k * k_scale[:, None]
    scores = torch.einsum("th,ths->ts", weights, torch.einsum("thd,sd->ths", q, k).relu())
    return torch.where(_in_window(begin, end, len(k)), scores, -_INF)


def index_topk(
    scores: Tensor, topk: int, *, order: str = "ascending"
) -> tuple[Tensor, Tensor, Tensor]:
    """indices, lengths and scores of the topk largest of a row of dense scores.

    Ties go to the smaller key; NaN and -inf are never selected; rows are padded with -1.
    """
    keys = scores.shape[1]
    ranked = torch.where(scores.isnan(), -_INF, scores)
    best, indices = ranked.sort(dim=1, descending=True, stable=True)
    indices = torch.where(best > -_INF, indices, -1)[:, :topk]
    indices = pad(indices, (0, max(topk - keys, 0)), value=-1)
    if order == "ascending":
        by_key = torch.where(indices < 0, keys, indices).sort(dim=1).values
        indices = torch.where(by_key < keys, by_key, -1)
    return indices.int(), (indices >= 0).sum(1).int(), index_replay(scores, indices)


def index_replay(scores: Tensor, indices: Tensor, lengths: Tensor | None = None) -> Tensor:
    """The dense scores at given indices; -inf in invalid slots."""
    return _at_slots(scores, indices, _valid(indices, lengths, scores.shape[1]), -_INF)


def sparse_attention(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    *,
    v_dim: int,
    scale: float | None = None,
    sink: Tensor | None = None,
    lengths: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """out, lse, max_logits of attention over the key rows in `indices`.

    s_j = scale * q[t,h] . kv[i_j];  lse = log sum_j exp(s_j);
    out = sum_j exp(s_j) * kv[i_j][:v_dim] / (sum_j exp(s_j) + exp(sink[h])).
    """
    if q.dim() == 4:
        no_lengths = [None] * len(q)
        slices = zip(q, kv, indices, no_lengths if lengths is None else lengths, strict=True)
        outs = [
            sparse_attention(q, kv, i, v_dim=v_dim, scale=scale, sink=sink, lengths=lengths)
            for q, kv, i, lengths in slices
        ]
        out, lse, max_logits = (torch.stack(x) for x in zip(*outs, strict=True))
        return out, lse, max_logits
    if scale is None:
        assert v_dim == kv.shape[1], "latent attention has no default scale"
        scale = kv.shape[1] ** -0.5
    valid = _valid(indices, lengths, len(kv))
    count = (valid[:, :, None] & (indices[:, :, None] == torch.arange(len(kv)))).sum(1)[:, None]
    any_key = count.any(-1)  # [tokens, 1]

    s = scale * torch.einsum("thd,sd->ths", q, kv)
    # A key that appears n times in a list counts n times: n * exp(s) = exp(s + log n).
    logits = torch.where(count > 0, s + count.clamp(min=1).to(s.dtype).log(), -_INF)
    logits = torch.where(any_key[..., None], logits, 0)  # avoids -inf - -inf in rows without keys
    lse = logits.logsumexp(-1)
    p = torch.where(any_key[..., None], (logits - _total(lse, sink)[..., None]).exp(), 0)
    out = torch.einsum("ths,sc->thc", p, kv[:, :v_dim])
    max_logits = pad(torch.where(count > 0, s, -_INF), (0, 1), value=-_INF).amax(-1)
    return out, torch.where(any_key, lse, -_INF), max_logits


def value_projection(out: Tensor, w_v: Tensor) -> Tensor:
    """out_v[t,h] = w_v[h] @ out[t,h]."""
    return torch.einsum("thc,hdc->thd", out, w_v)


@torch.no_grad()
def index_target(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    lse: Tensor,
    *,
    scale: float,
    sink: Tensor | None = None,
    lengths: Tensor | None = None,
    key_offset: int = 0,
) -> Tensor:
    """target[t,j] = sum_h p[t,h,j], the attention probabilities of the call that gave `lse`."""
    kv = kv[key_offset:]
    s = scale * torch.einsum("thd,sd->ths", q, kv)
    p = (s - _total(lse, sink)[..., None]).exp()
    return _at_slots(p.sum(1), indices, _valid(indices, lengths, len(kv)), 0)


def index_loss(
    scores: Tensor, target: Tensor, indices: Tensor, lengths: Tensor | None = None
) -> Tensor:
    """loss[t] = KL(target / sum target || softmax(scores)) over the valid slots."""
    return _divergence(scores, target, _valid(indices, lengths))


def dense_index_loss(
    q: Tensor,
    kv: Tensor,
    index_q: Tensor,
    index_k: Tensor,
    weights: Tensor,
    begin: Tensor,
    end: Tensor,
    *,
    scale: float,
    sink: Tensor | None = None,
    key_offset: int = 0,
) -> tuple[Tensor, Tensor]:
    """index_loss over the whole window instead of selected slots, and the lse of attention."""
    window = _in_window(begin, end, len(index_k))
    with torch.no_grad():
        s = scale * torch.einsum("thd,sd->ths", q, kv[key_offset : key_offset + len(index_k)])
        s = torch.where(window[:, None], s, -_INF)
        lse = s.logsumexp(-1)
        target = (s - _total(lse, sink)[..., None]).exp().sum(1)
    scores = index_scores(index_q, index_k, weights, begin, end)
    return _divergence(scores, target, window), lse


def quantize_fp8(x: Tensor, *, power_of_two: bool = False) -> tuple[Tensor, Tensor]:
    """values, scale: rows quantised to e4m3 with one fp32 scale per row."""
    x = x.float()
    amax = torch.where(x.isfinite(), x.abs(), 0).amax(-1).clamp(min=1e-4)
    scale = amax / 448
    if power_of_two:
        mantissa, exponent = scale.frexp()  # mantissa in [0.5, 1)
        scale = torch.ldexp(torch.ones_like(scale), exponent - (mantissa == 0.5).int())
    return (x / scale[..., None]).clamp(-448, 448).to(torch.float8_e4m3fn), scale


def _in_window(begin: Tensor, end: Tensor, keys: int) -> Tensor:
    s = torch.arange(keys)
    return (begin[:, None] <= s) & (s < end[:, None])  # [tokens, keys]


def _valid(indices: Tensor, lengths: Tensor | None, keys: int | None = None) -> Tensor:
    valid = indices >= 0
    if keys is not None:
        valid = valid & (indices < keys)
    if lengths is not None:
        valid = valid & (torch.arange(indices.shape[1]) < lengths[:, None])
    return valid  # [tokens, topk]


def _at_slots(dense: Tensor, indices: Tensor, valid: Tensor, other: float) -> Tensor:
    keys = dense.shape[1]
    return pad(dense, (0, 1), value=other).gather(1, torch.where(valid, indices, keys).long())


def _total(lse: Tensor, sink: Tensor | None) -> Tensor:
    return lse if sink is None else torch.logaddexp(lse, sink)  # [tokens, heads]


def _divergence(scores: Tensor, target: Tensor, valid: Tensor) -> Tensor:
    """KL of a row over its valid entries; 0 if there are fewer than two or the target is 0."""
    valid = valid & (scores != -_INF)
    target = torch.where(valid, target, 0)
    total = target.sum(1, keepdim=True)
    counts = (valid.sum(1, keepdim=True) >= 2) & (total > 0)
    share = target / torch.where(counts, total, 1)
    log_p = torch.where(counts, torch.where(valid, scores, -_INF), 0).log_softmax(1)
    terms = torch.xlogy(share, share) - share * log_p
    return torch.where(valid & counts, terms, 0).sum(1)
