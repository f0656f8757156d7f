# SPDX-License-Identifier: Apache-2.0
"""DeepSeek-V4's pools of rows, document by document, at fixed slots.

A pool of r rows whose last row is e has slot e // r. Within a document pools end every r rows, and
the pools of two documents never share a slot, so slots need no count of documents: nothing waits
for the device. Slots without a pool are never visible. A document that begins at a multiple of r
has its pools where the model itself puts them.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from winnow.transformers.indexers import modeling
from winnow.transformers.rows import document_begins


class Documents(NamedTuple):
    """The rows of a call and where their documents begin, in slots from the start of the cache."""

    position_ids: Tensor  # [batch, rows]
    slots: Tensor  # [rows]
    begin: Tensor  # [batch, rows]  padding before a document may lie before its begin
    past: int  # slots[0]

    @property
    def local(self) -> Tensor:
        """[batch, rows]: the rows of the document before each row; negative for padding."""
        return self.slots - self.begin

    def visible_pools(self, ratio: int) -> tuple[Tensor, Tensor]:
        """The slots [begin, end) of the pools that are complete at each row: [batch, rows] each."""
        first = (self.begin + ratio - 1) // ratio
        return first, first + (self.local + 1).clamp(min=0) // ratio


def documents(
    position_ids: Tensor, real: Tensor | None, past: int, last_begin: Tensor | None
) -> Documents:
    """
    Args:
        position_ids: [batch, rows]; a document begins where they do not go on by 1.
        real: [batch, rows] bool, False for padding; None: there is none.
        past: the rows of earlier calls.
        last_begin: [batch], where the document of the last row before these begins.
    """
    batch, count = position_ids.shape
    rows = torch.arange(count, device=position_ids.device)
    slots = rows + past
    if last_begin is not None:
        before = last_begin
    elif real is None:
        before = position_ids.new_zeros(batch)
    else:  # the first real row
        before = torch.where(real, rows, count).amin(-1)
    begins = document_begins(position_ids, real, rows)
    latest = torch.where(begins, slots, -1).cummax(-1).values
    begin = torch.where(latest >= 0, latest, before[:, None])
    return Documents(position_ids, slots, begin, past)


def pool(
    compressor: nn.Module,
    hidden_states: Tensor,
    rows: Documents,
    cache: Any,
    name: str,
) -> Tensor:
    """[batch, slots, head_dim]: the pools of all rows so far, of a compressor or an indexer.

    Pools with overlap also take the rows of the pool before, of the same document, by the first
    half of their channels.

    Args:
        cache: the layer of the cache, or None. Its buffer keeps the last rows that a pool may
            still need.
        name: of the buffer.
    """
    ratio, width = compressor.compress_rate, compressor.head_dim
    kv, gate = compressor.kv_proj(hidden_states), compressor.gate_proj(hidden_states)
    overlap = kv.shape[-1] == 2 * width
    history = 0
    if cache is not None:
        if cache.buffer_kv[name] is not None:
            history = cache.buffer_kv[name].shape[1]
            kv = torch.cat([cache.buffer_kv[name], kv], dim=1)
            gate = torch.cat([cache.buffer_gate[name], gate], dim=1)
        keep = (2 * ratio if overlap else ratio) - 1
        cache.buffer_kv[name], cache.buffer_gate[name] = kv[:, -keep:], gate[:, -keep:]

    found, last = _last_rows(rows, ratio)  # [batch, slots of these rows]
    local = rows.local.gather(1, (last - rows.past).clamp(0, len(rows.slots) - 1))
    members = last[..., None] - torch.arange(ratio - 1, -1, -1, device=last.device)
    kv_parts, gate_parts = [], []
    if overlap:
        before = _rows_of(kv, members - ratio, rows.past - history)[..., :width]
        its_gate = _rows_of(gate, members - ratio, rows.past - history)[..., :width]
        its_gate = its_gate + compressor.position_bias[:, :width]
        first = (local < 2 * ratio - 1)[..., None, None]
        kv_parts.append(before)
        gate_parts.append(its_gate.masked_fill(first, -torch.inf))
    kv_parts.append(_rows_of(kv, members, rows.past - history)[..., -width:])
    own_gate = _rows_of(gate, members, rows.past - history)[..., -width:]
    gate_parts.append(own_gate + compressor.position_bias[:, -width:])
    share = torch.cat(gate_parts, dim=2).softmax(dim=2, dtype=torch.float32).to(kv.dtype)
    pooled = compressor.kv_norm((torch.cat(kv_parts, dim=2) * share).sum(dim=2))

    positions = rows.position_ids.gather(1, (last - rows.past).clamp(0, len(rows.slots) - 1))
    cos, sin = compressor.rotary_emb(
        pooled, position_ids=positions - (ratio - 1), layer_type=compressor.rope_layer_type
    )
    rotate = modeling(compressor).apply_rotary_pos_emb
    pooled = rotate(pooled.unsqueeze(1), cos, sin).squeeze(1)
    if cache is None:
        return pooled
    old = cache.compressed_kv[name]
    if old is not None:
        first_slot = rows.past // ratio
        shared = old.shape[1] - first_slot  # 1 if the last call left its last slot open
        if shared:
            kept = torch.where(found[:, :shared, None], pooled[:, :shared], old[:, first_slot:])
            pooled = torch.cat([kept, pooled[:, shared:]], dim=1)
        pooled = torch.cat([old[:, :first_slot], pooled], dim=1)
    cache.compressed_kv[name] = pooled
    return pooled


def _last_rows(rows: Documents, ratio: int) -> tuple[Tensor, Tensor]:
    """Whether each slot that these rows reach gets a pool, and its last row: [batch, slots]."""
    first_slot = rows.past // ratio
    slots = (rows.past + len(rows.slots) - 1) // ratio - first_slot + 1
    ends = ((rows.local + 1) % ratio == 0) & (rows.local >= ratio - 1)
    before = rows.past - first_slot * ratio
    after = slots * ratio - before - len(rows.slots)
    by_slot = nn.functional.pad(ends, (before, after)).unflatten(1, (slots, ratio))
    first_rows = (torch.arange(slots, device=ends.device) + first_slot) * ratio
    return by_slot.any(-1), first_rows + by_slot.int().argmax(-1)


def _rows_of(x: Tensor, members: Tensor, first: int) -> Tensor:
    """[batch, slots, ratio, channels] of x [batch, rows, channels], whose first row is `first`."""
    at = (members - first).clamp(0, x.shape[1] - 1)
    return x[torch.arange(len(x), device=x.device)[:, None, None], at]
