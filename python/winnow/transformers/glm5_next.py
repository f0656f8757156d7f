# SPDX-License-Identifier: Apache-2.0
"""GLM-5.3: an indexer that selects pools of tokens, then the tokens of the incomplete pool."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from winnow.transformers.attention import latent_keys
from winnow.transformers.indexers import IndexInputs, learning, topk_slots


def replacements(module: nn.Module) -> Iterator[tuple[nn.Module, str, Callable]]:
    """Of an attention module."""
    yield module, "expand_kv", latent_keys
    yield module, "build_attention_mask_from_topk", _lists
    if module.indexer is not None:  # layers that share a selection have none
        yield module.indexer, "forward", _select


def model_replacements(model: nn.Module) -> Iterator[tuple[nn.Module, str, Callable]]:
    """Of the text model."""
    yield model, "forward", _forward


def _forward(self, *args: Any, **given: Any) -> Any:
    """The forward of the text model, which refuses packed batches.

    Only the model knows the position ids. Given together with a padding mask, or by generate,
    they never mean packed documents.
    """
    positions = given.get("position_ids")
    if positions is not None and given.get("attention_mask") is None:
        if not torch.compiler.is_compiling() and (positions.diff(dim=-1) != 1).any():
            raise ValueError(
                "winnow.transformers: position_ids start again within a row: packed documents are"
                " not supported by glm5_next, whose linear-attention layers mix them"
            )
    return type(self).forward(self, *args, **given)


def _lists(self, topk_indices: Tensor, query_states: Tensor, kv_length: int) -> Tensor:
    """Hands the list over in place of a mask; the model gives attention nothing else of it."""
    return topk_indices


def _select(
    self, hidden_states: Tensor, q_resid: Tensor, attention_mask: Tensor, past_key_values: Any
) -> Tensor:
    """The forward of an indexer: [batch, rows, topk + pool - 1] int32, slots of tokens, or -1."""
    with learning(self):
        hidden_states, q_resid = hidden_states.detach(), q_resid.detach()
        rows, size = hidden_states.shape[1], self.index_kpool
        q = self.wq_b(q_resid).unflatten(-1, (-1, self.head_dim))
        states = torch.cat(
            [
                self.k_norm(self.wk(hidden_states)),
                nn.functional.linear(hidden_states, self.index_kpool_compress_gate),
                attention_mask.to(hidden_states.dtype)[..., None],
            ],
            dim=-1,
        )
        length: int | Tensor = rows
        if past_key_values is not None:
            states = past_key_values.update_indexer(states, self.layer_idx)
            length = past_key_values.layers[self.layer_idx].get_seq_length()
        real = states[..., -1].bool()  # [batch, keys]
        slots = torch.arange(rows, device=q.device) + (length - rows)
        first = torch.where(real.any(-1), real.int().argmax(-1), real.shape[1])[:, None]

        keys, members, complete = self.get_pooled_states(packed_states=states)
        keys = keys.masked_fill(~complete[..., None], torch.nan)  # never selected
        end = ((slots - first + 1).clamp(min=0) // size).clamp(max=keys.shape[1])
        projected = self.weights_proj(hidden_states.to(self.weights_proj.weight.dtype))
        weights = projected.float() * (self.n_heads**-0.5 * self.softmax_scale)
        topk = self.index_topk // size
        inputs = IndexInputs(q, keys, weights)
        selected = topk_slots(self, inputs, torch.zeros_like(end), end, topk, size)
        indices = _tokens(members, selected)
        if self.index_kpool_always_select_tail:
            indices = torch.cat([indices, _tail(real, first, slots, size)], dim=-1)
        return indices.masked_fill(~attention_mask[..., None], -1)


def _tokens(members: Tensor, selected: Tensor) -> Tensor:
    """[batch, rows, topk * pool] int32: the tokens of the selected pools."""
    members = nn.functional.pad(members.int(), (0, 0, 0, 1), value=-1)  # slot -1: no tokens
    batch = torch.arange(len(members), device=members.device)[:, None, None]
    return members[batch, selected.long()].flatten(-2)


def _tail(real: Tensor, first: Tensor, slots: Tensor, size: int) -> Tensor:
    """[batch, rows, pool - 1] int32: the tokens after the last complete pool up to each row."""
    visible = real.cumsum(-1).index_select(1, slots)  # [batch, rows]
    count = visible % size
    offsets = torch.arange(size - 1, device=real.device)
    tokens = (first + visible - count)[..., None] + offsets
    return torch.where(offsets < count[..., None], tokens, -1).int()
