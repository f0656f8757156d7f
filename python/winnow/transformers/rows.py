# SPDX-License-Identifier: Apache-2.0
"""Which keys a row may see: from the padding mask and the position ids, without a dense mask."""

from typing import Any

import torch
from torch import Tensor


def padding_mask(
    batch_size: int,
    kv_length: int,
    kv_offset: int = 0,
    attention_mask: Tensor | None = None,
    device: torch.device | str = "cpu",
    **others: Any,
) -> Tensor:
    """The mask of a model: [batch, 1, 1, keys] bool, the same for all queries.

    It says which keys are real and nothing of causality, which the rows' windows have. So the
    padding reaches every layer as an argument, also when checkpointing runs a layer again.
    """
    if attention_mask is None:
        real = torch.ones((), dtype=torch.bool, device=device)
    else:
        missing = kv_offset + kv_length - attention_mask.shape[-1]
        if missing > 0:  # slots of a static cache that are still empty
            attention_mask = torch.nn.functional.pad(attention_mask, (0, missing))
        real = attention_mask[:, None, None, kv_offset : kv_offset + kv_length]
    return real.expand(batch_size, 1, 1, kv_length)


def is_padding_mask(mask: Any) -> bool:
    """Whether a mask [..., queries, keys] says no more than which keys are real."""
    return isinstance(mask, Tensor) and mask.dtype == torch.bool and mask.shape[-2] == 1


def real_keys(mask: Tensor) -> Tensor | None:
    """[batch, keys] bool of a padding mask [batch, 1, keys]; None: all keys are real."""
    return None if mask.shape[-1] > 1 and mask.stride(-1) == 0 else mask[:, 0]


def windows(position_ids: Tensor, real: Tensor | None, past: int | Tensor) -> tuple[Tensor, Tensor]:
    """The keys [begin, end) that each row may see, as slots of the cache: [batch, rows] each.

    Args:
        position_ids: [batch, rows]. A document begins where they do not go on by 1, as in
            transformers' packed batches. A document that begins before these rows, in the
            cache, has as many real keys there as its position says.
        real: [batch, keys] bool: False for padding, which sees nothing and whose positions say
            nothing.
        past: the slot of the first row.
    """
    rows = torch.arange(position_ids.shape[1], device=position_ids.device)
    slots = rows + past
    if real is None:
        before = (slots - position_ids).clamp(min=0)
    else:
        counts = real.cumsum(-1)
        wanted = counts.index_select(1, slots) - 1 - position_ids
        before = torch.searchsorted(counts, wanted, right=True)
    if len(rows) == 1:
        begin = before
    else:
        own = None if real is None else real.index_select(1, slots)
        begins = document_begins(position_ids, own, rows)
        latest = torch.where(begins, slots, -1).cummax(-1).values
        begin = torch.where(latest >= 0, latest, before)
    begin = torch.minimum(begin, slots)
    end = (slots + 1).expand_as(begin)
    return begin, end if real is None else torch.where(real.index_select(1, slots), end, begin)


def document_begins(position_ids: Tensor, real: Tensor | None, rows: Tensor) -> Tensor:
    """[batch, rows] bool: whether a document begins at a row, after another one of these rows.

    Args:
        position_ids: [batch, rows].
        real: [batch, rows] bool, False for padding; None: there is none.
        rows: [rows], 0, 1, ...
    """
    if real is None:
        begins = position_ids[:, 1:] != position_ids[:, :-1] + 1
    else:
        last_real = torch.where(real, rows, -1).cummax(-1).values[:, :-1]
        previous = position_ids.gather(1, last_real.clamp(min=0))
        begins = (position_ids[:, 1:] != previous + 1) & (last_real >= 0) & real[:, 1:]
    return torch.nn.functional.pad(begins, (1, 0))
