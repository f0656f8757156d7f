# SPDX-License-Identifier: Apache-2.0
"""DeepSeek-V4: a sliding window and pools, by one sparse attention over [rows | pools]."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from winnow import functional
from winnow.transformers.attention import dense_mask, why_eager
from winnow.transformers.indexers import IndexInputs, learning, modeling, topk_slots, working_dtype
from winnow.transformers.pools import Documents, documents, pool
from winnow.transformers.rows import is_padding_mask, real_keys
from winnow.transformers.teaching import attention_to, selection_of
from winnow.transformers.warn import OWN_MASK, warn_once


def replacements(module: nn.Module) -> Iterator[tuple[nn.Module, str, Callable]]:
    yield module, "forward", _attend
    if module.compressor is not None:
        indexer = getattr(module.compressor, "indexer", None)
        # No closures, which pickle does not take.
        compress = _compress_all if indexer is None else _compress
        yield module.compressor, "forward", partial(_given_rows, compress)
        if indexer is not None:
            yield indexer, "forward", partial(_given_rows, _select)


def _attend(
    self,
    hidden_states: Tensor,
    position_embeddings: dict[str, tuple[Tensor, Tensor]],
    position_ids: Tensor,
    attention_mask: Tensor,
    past_key_values: Any = None,
    **others: Any,
) -> tuple[Tensor, Tensor | None]:
    """The forward of an attention module."""
    if not is_padding_mask(attention_mask):
        warn_once(OWN_MASK)
        return type(self).forward(
            self,
            hidden_states,
            position_embeddings,
            position_ids,
            attention_mask,
            past_key_values,
            **others,
        )
    batch, count = hidden_states.shape[:2]
    cos, sin = position_embeddings[self.rope_layer_type]
    rotate = modeling(self).apply_rotary_pos_emb
    q_residual = self.q_a_norm(self.q_a_proj(hidden_states))
    q = self.q_b_norm(self.q_b_proj(q_residual).unflatten(-1, (-1, self.head_dim)))
    q = rotate(q, cos, sin, unsqueeze_dim=2)  # [batch, rows, heads, head_dim]
    kv = self.kv_norm(self.kv_proj(hidden_states))[:, None]
    kv = rotate(kv, cos, sin)
    cache, past, last_begin = None, 0, None
    if past_key_values is not None:
        cache = past_key_values.layers[self.layer_idx]
        past = cache.get_seq_length()
        last_begin = getattr(cache, "winnow_last_begin", None) if past else None
        kv = past_key_values.update(kv, kv, self.layer_idx)[0]
    kv = kv.squeeze(1)  # [batch, keys, head_dim]: the last keys before these rows, and theirs

    real = real_keys(attention_mask[:, 0])
    own = None if real is None else real[:, -count:]
    rows = documents(position_ids.expand(batch, count), own, past, last_begin)
    if cache is not None:
        cache.winnow_last_begin = rows.begin[:, -1]
    indices = _window(rows, self.sliding_window, kv.shape[1], real)
    if self.compressor is not None:
        pools, pool_ids = self.compressor(
            hidden_states, q_residual, position_ids, past_key_values, self.layer_idx, rows=rows
        )
        key_offset = kv.shape[1]
        keys = torch.where(pool_ids < 0, pool_ids, pool_ids + key_offset)
        indices = torch.cat([indices, keys], dim=-1)
        kv = torch.cat([kv, pools], dim=1)

    dropout = self.attention_dropout if self.training else 0.0
    selection = selection_of(self, dropout) if hasattr(self.compressor, "indexer") else None
    if reason := why_eager(q, (self.head_dim, self.head_dim), dropout):
        warn_once(f"winnow.transformers: {reason}: attention runs as in eager, on the same keys")
        mask = dense_mask(indices, kv.shape[1], q.dtype)
        out, weights = modeling(self).eager_attention_forward(
            self, q.transpose(1, 2), kv[:, None], kv[:, None], mask, self.scaling, dropout
        )
        if selection is not None:
            selection.add(attention_to(keys, weights))
    else:
        dtype, weights = working_dtype(q), None
        q, kv, sink = q.to(dtype), kv.to(dtype), self.sinks.float()
        out, lse, _ = functional.sparse_attention(q, kv, indices, scale=self.scaling, sink=sink)
        if selection is not None:
            with torch.no_grad():
                parts = zip(q, kv, pool_ids, lse, strict=True)
                targets = [
                    torch.ops.winnow.index_target(
                        *part[:3], None, sink, part[3], self.scaling, key_offset
                    )
                    for part in parts
                ]
                selection.add(torch.stack(targets))
    out = rotate(out, cos, -sin, unsqueeze_dim=2)
    grouped = self.o_a_proj(out.reshape(batch, count, self.config.o_groups, -1)).flatten(2)
    return self.o_b_proj(grouped), weights


def _window(rows: Documents, window: int, keys: int, real: Tensor | None) -> Tensor:
    """[batch, rows, window] int32: the last rows of each row's document up to itself, or -1."""
    dropped = rows.past + len(rows.slots) - keys  # slots that the cache no longer has
    slots = rows.slots[:, None] - torch.arange(window - 1, -1, -1, device=rows.slots.device)
    seen = (slots >= rows.begin[..., None]) & (slots >= dropped)
    if real is not None:
        seen &= real[:, (slots - dropped).clamp(min=0)]
    return torch.where(seen, slots - dropped, -1).int()


def _given_rows(
    own: Callable,
    self,
    hidden_states,
    q_residual,
    position_ids,
    past_key_values,
    layer_idx,
    rows=None,
) -> Any:
    """A forward that takes rows and the layer of the cache; without rows, that of the class."""
    given = hidden_states, q_residual, position_ids, past_key_values, layer_idx
    if rows is None:  # attention runs as in eager
        return type(self).forward(self, *given)
    cache = None if past_key_values is None else past_key_values.layers[layer_idx]
    return own(self, *given, rows, cache)


def _compress(
    self, hidden_states, q_residual, position_ids, past_key_values, layer_idx, rows, cache
) -> tuple[Tensor, Tensor]:
    """The forward of a compressor with an indexer: pools, and the selected slots of each row."""
    pools = pool(self, hidden_states, rows, cache, "compressor")
    selected = self.indexer(
        hidden_states, q_residual, position_ids, past_key_values, layer_idx, rows=rows
    )
    return pools, selected


def _compress_all(
    self, hidden_states, q_residual, position_ids, past_key_values, layer_idx, rows, cache
) -> tuple[Tensor, Tensor]:
    """The forward of a compressor without one: pools, and the visible slots of each row."""
    pools = pool(self, hidden_states, rows, cache, "compressor")
    begin, end = (x[..., None] for x in rows.visible_pools(self.compress_rate))
    slots = begin + torch.arange(pools.shape[1], device=pools.device)
    return pools, torch.where(slots < end, slots, -1).int()


def _select(
    self, hidden_states, q_residual, position_ids, past_key_values, layer_idx, rows, cache
) -> Tensor:
    """The forward of an indexer: [batch, rows, topk] int32, the selected slots, then -1."""
    with learning(self):
        hidden_states, q_residual = hidden_states.detach(), q_residual.detach()
        k = pool(self, hidden_states, rows, cache, "indexer")
        embedding = self.rotary_emb(
            hidden_states, position_ids=position_ids, layer_type=self.rope_layer_type
        )
        q = self.q_b_proj(q_residual).unflatten(-1, (-1, self.head_dim))
        q = modeling(self).apply_rotary_pos_emb(q, *embedding, unsqueeze_dim=2)
        scale = self.scorer.weights_scaling * self.scorer.softmax_scale
        weights = self.scorer.weights_proj(hidden_states).float() * scale
        windows = rows.visible_pools(self.compress_rate)
        return topk_slots(self, IndexInputs(q, k, weights), *windows, self.index_topk)
