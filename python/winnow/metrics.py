# SPDX-License-Identifier: Apache-2.0
"""How good a selection is, measured against dense attention: to be logged while indexers train.

`recall_of_mass` needs the lse of dense attention, which the warm-up stage has. Where attention is
sparse there is none; `on_rows` computes dense attention for a few rows, which it is enough to
sample. Without gradients, and never with a tensor of size tokens x keys.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from winnow._arguments import Array, check_size, tensor
from winnow._key_arguments import check_rows, check_selection, values_of
from winnow.functional import Selection, index_target, sparse_attention
from winnow.keys import Keys
from winnow.packing import Packing
from winnow.parallel import check_group

_SLOTS = 1 << 22  # of dense lists that exist at a time


class RowMetrics(NamedTuple):
    """The quality of the selection of some rows; NaN for a row that sees no key."""

    recall: Tensor  # [rows]  the share of attention that the selected keys have, in [0, 1]
    overlap: Tensor  # [rows]  the share of the best keys that are selected, in [0, 1]


def recall_of_mass(
    selection: Selection,
    q: Array,
    kv: Array | Keys,
    lse: Array,
    *,
    scale: float,
    key_offset: int = 0,
    head_group: Any = None,
    backend: str | None = None,
) -> Tensor:
    """The share of dense attention that the selected keys have, per row, as the mean over heads.

    A random selection of k from n keys has about k / n, one of all keys has 1. A sink has no part
    in it: the shares are those among the keys. Returns [tokens]: NaN for a row without keys.

    Args:
        selection: the result of index_topk; scores are not needed.
        q: [tokens, heads, qk_dim], as given to attention.
        kv: [keys, qk_dim], as given to attention.
        lse: [tokens, heads], of attention over all keys that the rows see, sink excluded.
        scale: as given to attention.
        key_offset: the row of kv at which the indexer's keys begin.
        head_group: a torch.distributed group over whose ranks the heads are split.
    """
    lse = tensor("recall_of_mass", "lse", lse).detach()
    if head_group is not None:
        check_group("recall_of_mass", "head_group", head_group)
    target = index_target(
        selection, q, kv, lse, scale=scale, key_offset=key_offset, backend=backend
    )
    sees_keys = (lse > -torch.inf).any(1)
    return _over_heads(target.sum(1), lse.shape[1], head_group).where(sees_keys, torch.nan)


def on_rows(
    selection: Selection,
    q: Array,
    kv: Array | Keys,
    packing: Packing,
    rows: Tensor,
    *,
    scale: float,
    ratio: int = 1,
    key_offset: int = 0,
    head_group: Any = None,
    backend: str | None = None,
) -> RowMetrics:
    """Recall of mass, and overlap with the exact top-k of dense attention, for some rows.

    Dense attention is that over the windows of the rows. The best keys of a row are the topk ones,
    or all if it sees fewer, with the largest sums of probabilities over heads; a key that ties with
    the last of them counts as one of them. The host waits for the device.

    Args:
        selection, q, kv, scale, key_offset, head_group: as for recall_of_mass.
        packing, ratio: as given to index_topk.
        rows: [n] integers, which rows of q to measure.
    """
    check_selection("on_rows", selection)
    q, kv = tensor("on_rows", "q", q).detach(), values_of("on_rows", "kv", kv).detach()
    check_rows("on_rows", packing, q)
    check_size("on_rows", "key_offset", key_offset, 0)
    if head_group is not None:
        check_group("on_rows", "head_group", head_group)
    rows = _row_numbers(tensor("on_rows", "rows", rows), len(q))
    begin, end = (x[rows] for x in packing.windows(ratio))
    width = max(int((end - begin).max()), 1) if rows.numel() else 1
    parts = []
    for part in torch.arange(len(rows), device=rows.device).split(max(_SLOTS // width, 1)):
        keys = begin[part, None] + torch.arange(width, dtype=torch.int32, device=begin.device)
        window = keys < end[part, None]
        seen = Selection(keys.masked_fill(~window, -1), None, None)
        attended = (keys + key_offset).masked_fill(~window, -1)
        q_part = q[rows[part]]
        options: dict[str, Any] = {"scale": scale, "backend": backend}
        lse = sparse_attention(q_part, kv, attended, v_dim=8, **options).lse
        target = index_target(seen, q_part, kv, lse, key_offset=key_offset, **options)
        target = _over_heads(target, q.shape[1], head_group)
        parts.append(_measure(selection, rows[part], begin[part], target, window))
    recalls, overlaps = zip(*parts, strict=True) if parts else ((q.new_empty(0),),) * 2
    return RowMetrics(torch.cat(recalls), torch.cat(overlaps))


def _row_numbers(rows: Tensor, tokens: int) -> Tensor:
    """int64; numbers in device memory are not read."""
    if rows.dim() != 1 or rows.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"on_rows: rows {list(rows.shape)} of {rows.dtype}: must be [n] of int32 or int64"
        )
    if rows.is_cpu and rows.numel() and not 0 <= int(rows.min()) <= int(rows.max()) < tokens:
        raise ValueError(
            f"on_rows: rows from {int(rows.min())} to {int(rows.max())}: must be from 0 to"
            f" {tokens - 1}"
        )
    return rows.long()


def _over_heads(target: Tensor, heads: int, head_group: Any) -> Tensor:
    """The mean over the heads of all ranks, which have equally many."""
    if head_group is None:
        return target / heads
    torch.distributed.all_reduce(target, group=head_group)
    return target / (heads * torch.distributed.get_world_size(head_group))


def _measure(
    selection: Selection, rows: Tensor, begin: Tensor, target: Tensor, window: Tensor
) -> tuple[Tensor, Tensor]:
    """Recall and overlap of rows whose window has the probabilities `target` [rows, width]."""
    slots = selection.indices[rows] - begin[:, None]
    valid = (slots >= 0) & (slots < window.sum(1, keepdim=True))
    if selection.lengths is not None:
        past = torch.arange(slots.shape[1], device=slots.device) >= selection.lengths[rows, None]
        valid = valid & ~past
    # One column more takes what is no key; a key that is listed twice counts once.
    columns = torch.where(valid, slots, window.shape[1]).long()
    selected = torch.zeros_like(torch.nn.functional.pad(window, (0, 1)))
    selected = selected.scatter(1, columns, True)[:, :-1]
    best = min(slots.shape[1], window.shape[1])
    ranked = target.masked_fill(~window, -1)
    is_best = selected & (ranked >= ranked.topk(best).values[:, -1:])
    count = window.sum(1)
    overlap = is_best.sum(1) / count.clamp(max=best)  # 0 / 0 where a row sees no key
    return (target * selected).sum(1).where(count > 0, torch.nan), overlap
