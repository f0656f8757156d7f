# SPDX-License-Identifier: Apache-2.0
"""The indexers of the models, by index_topk instead of scores [batch, rows, heads, keys].

What an indexer computes is the model's own: its modules and its rotary function are called here,
and only scores and selection are replaced.
"""

import sys
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from winnow import _autograd, ops  # noqa: F401  registers torch.ops.winnow
from winnow.transformers.rows import is_padding_mask, real_keys, windows
from winnow.transformers.teaching import teaching_of
from winnow.transformers.warn import OWN_MASK, warn_once


class IndexInputs(NamedTuple):
    q: Tensor  # [batch, rows, index_heads, index_dim]
    k: Tensor  # [batch, rows, index_dim]
    weights: Tensor  # [batch, rows, index_heads] float32, all scales folded in


def select(
    indexer: nn.Module,
    inputs: IndexInputs,
    mask: Tensor,
    position_ids: Tensor,
    past_key_values: Any,
) -> Tensor:
    """[batch, rows, topk] int32: the selected slots, ascending, then -1."""
    q, k, weights = inputs
    batch, rows = q.shape[:2]
    past: int | Tensor = 0
    if past_key_values is not None:
        k = past_key_values.update_indexer(k, indexer.layer_idx)
        past = _length(past_key_values.layers[indexer.layer_idx], k) - rows
    real = real_keys(mask)
    begin, end = windows(position_ids.expand(batch, rows), real, past)
    if real is not None:  # a NaN score is never selected
        k = k.masked_fill(~real[..., None], torch.nan)
    return topk_slots(indexer, IndexInputs(q, k, weights), begin, end, indexer.index_topk)


def topk_slots(
    indexer: nn.Module,
    inputs: IndexInputs,
    begin: Tensor,
    end: Tensor,
    topk: int,
    tokens_per_slot: int = 1,
) -> Tensor:
    """[batch, rows, topk] int32: the slots of the largest scores in [begin, end), then -1.

    Args:
        inputs: k is that of all slots, [batch, slots, index_dim].
        begin, end: [batch, rows].
        tokens_per_slot: the keys of attention that a slot stands for.
    """
    q, k, weights = inputs
    batch, slots = k.shape[:2]
    first_keys = torch.arange(batch, device=k.device)[:, None] * slots
    arguments = (
        _index_rows(q),
        _index_rows(k),
        weights.flatten(0, 1),
        None,
        (begin + first_keys).flatten().int(),
        (end + first_keys).flatten().int(),
        topk,
        "ascending",
    )
    teaching = teaching_of(indexer)
    if teaching is None:
        indices, _, scores = torch.ops.winnow.index_topk_forward(*arguments, False)
    else:
        run = _autograd.Run(None, None)
        indices, _, scores = _autograd.IndexTopk.apply(*arguments, run, None)
    indices = indices.view(batch, -1, topk)
    if batch > 1:
        indices = torch.where(indices < 0, indices, indices - first_keys[..., None].int())
    if teaching is not None:
        teaching.keep(indices, scores.view_as(indices), tokens_per_slot)
    return indices


def _index_rows(x: Tensor) -> Tensor:
    """The rows of all batches as index_topk takes them: of float64 in float32, in which eager
    computes all scores, and with zeros up to a multiple of 8 channels, which add nothing."""
    dtype = working_dtype(x)
    x = x.to(torch.float32 if dtype == torch.float64 else dtype).flatten(0, 1)
    return nn.functional.pad(x, (0, -x.shape[-1] % 8)) if x.shape[-1] % 8 else x


def learning(indexer: nn.Module) -> torch.set_grad_enabled:
    """Gradients only where the indexer is trained; it never trains what its inputs come from."""
    return torch.set_grad_enabled(teaching_of(indexer) is not None)


def modeling(module: nn.Module) -> ModuleType:
    """The file of transformers that defines a module, also where its class was wrapped."""
    names = (cls.__module__ for cls in type(module).__mro__)
    return sys.modules[next(name for name in names if name.startswith("transformers.models."))]


def working_dtype(x: Tensor) -> torch.dtype:
    """The dtype in which eager would multiply x."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def _length(layer: Any, k: Tensor) -> int | Tensor:
    """The slots of a cache layer that are filled; a static one returns all slots as keys."""
    filled = getattr(layer, "indexer_cumulative_length", None)
    return k.shape[1] if filled is None else filled


def _weights(indexer: nn.Module, hidden_states: Tensor) -> Tensor:
    projected = indexer.weights_proj(hidden_states.to(indexer.weights_proj.weight.dtype))
    return projected.float() * (indexer.n_heads**-0.5 * indexer.softmax_scale)


def _rotated(
    indexer: nn.Module, q: Tensor, k: Tensor, rotate: Callable, position_embeddings, last: bool
) -> tuple[Tensor, Tensor]:
    """q and k with their first channels rotated, or their last ones."""
    rope = indexer.qk_rope_head_dim
    sizes = [indexer.head_dim - rope, rope] if last else [rope, indexer.head_dim - rope]
    q_parts, k_parts = list(q.split(sizes, -1)), list(k.unsqueeze(2).split(sizes, -1))
    q_parts[last], k_parts[last] = rotate(
        q_parts[last], k_parts[last], *position_embeddings, unsqueeze_dim=2
    )
    return torch.cat(q_parts, -1), torch.cat(k_parts, -1).squeeze(2)


def _queries(indexer: nn.Module, projected: Tensor) -> Tensor:
    return projected.unflatten(-1, (indexer.n_heads, indexer.head_dim))


def _interleaved(self, hidden_states, q_resid, position_embeddings) -> tuple[Tensor, Tensor]:
    q, k = _queries(self, self.wq_b(q_resid)), self.k_norm(self.wk(hidden_states))
    rotate = modeling(self).apply_rotary_pos_emb_interleave
    return _rotated(self, q, k, rotate, position_embeddings, last=False)


def _half_split(self, hidden_states, q_resid, position_embeddings) -> tuple[Tensor, Tensor]:
    q, k = _queries(self, self.wq_b(q_resid)), self.k_norm(self.wk(hidden_states))
    rotate = modeling(self).apply_rotary_pos_emb
    return _rotated(self, q, k, rotate, position_embeddings, last=False)


def _half_split_last(self, hidden_states, q_resid, position_embeddings) -> tuple[Tensor, Tensor]:
    q, k = _queries(self, self.wq_b(q_resid)), self.wk(hidden_states)
    k = self.k_norm(k.to(self.k_norm.weight.dtype)).to(hidden_states.dtype)  # a norm in fp32
    rotate = modeling(self).apply_rotary_pos_emb
    return _rotated(self, q, k, rotate, position_embeddings, last=True)


def _low_rank(
    queries_and_keys: Callable,
    self,
    hidden_states: Tensor,
    q_resid: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    attention_mask: Tensor,
    position_ids: Tensor,
    past_key_values: Any = None,
) -> Tensor:
    """The forward of an indexer whose queries come from the attention's low-rank queries."""
    if not is_padding_mask(attention_mask):
        warn_once(OWN_MASK)
        return type(self).forward(
            self,
            hidden_states,
            q_resid,
            position_embeddings,
            attention_mask,
            position_ids,
            past_key_values,
        )
    with learning(self):
        hidden_states, q_resid = hidden_states.detach(), q_resid.detach()
        q, k = queries_and_keys(self, hidden_states, q_resid, position_embeddings)
        inputs = IndexInputs(q, k, _weights(self, hidden_states))
        return select(self, inputs, attention_mask, position_ids, past_key_values)


# No closures, which pickle does not take.
deepseek_v32 = axk2 = partial(_low_rank, _half_split)
glm_moe_dsa = partial(_low_rank, _interleaved)
hy_v4 = partial(_low_rank, _half_split_last)


def mistral_large4(
    self,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    attention_mask: Tensor,
    position_ids: Tensor,
    past_key_values: Any = None,
) -> Tensor:
    """The forward of an indexer with queries of its own, scaled by position, in some layers
    without rotary embeddings."""
    if not is_padding_mask(attention_mask):
        warn_once(OWN_MASK)
        return type(self).forward(
            self, hidden_states, position_embeddings, attention_mask, position_ids, past_key_values
        )
    with learning(self):
        hidden_states = hidden_states.detach()
        q = _queries(self, self.wq_b(self.q_input_norm(hidden_states)))
        q = self.softmax_scaling(q, position_ids, head_dim_first=False)
        k = self.k_norm(self.wk(hidden_states))
        if self.use_rope:
            rotate = modeling(self).apply_rotary_pos_emb_interleave
            q, k = _rotated(self, q, k, rotate, position_embeddings, last=False)
        inputs = IndexInputs(q, k, _weights(self, hidden_states))
        return select(self, inputs, attention_mask, position_ids, past_key_values)
