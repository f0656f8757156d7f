# SPDX-License-Identifier: Apache-2.0
"""The attention function that the models call, and eager attention where it cannot run."""

from typing import Any

import torch
from torch import Tensor, nn

from winnow.transformers.indexers import modeling, working_dtype
from winnow.transformers.latent import Shape, latent_attention
from winnow.transformers.rows import is_padding_mask
from winnow.transformers.teaching import selection_of
from winnow.transformers.warn import warn_once


def latent_keys(module: nn.Module, latent: Tensor, rope: Tensor) -> tuple[Tensor, Tensor]:
    """`expand_kv` of an attention module: hands latents and rope keys over as they are."""
    return latent, rope


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    scaling: float,
    dropout: float = 0.0,
    indices: Tensor | None = None,
    s_aux: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attention of a layer over its selected keys: [batch, rows, heads, v_head_dim], None.

    Args:
        query: [batch, heads, rows, nope + rope].
        key, value: of latent_keys: the latents [batch, 1, keys, latent] and the rope keys
            [batch, 1, keys, rope].
        attention_mask: [batch, 1, rows, keys], of padding_mask or the user's own.
        indices: [batch, rows, topk] of the indexer.
        s_aux: [heads], the sink of models that have one.
    """
    if not hasattr(type(module), "expand_kv"):  # DeepSeek-V4, with a mask of the user's own
        eager = modeling(module).eager_attention_forward
        return eager(module, query, key, value, attention_mask, scaling, dropout)
    if "expand_kv" not in module.__dict__:
        raise RuntimeError(
            "winnow.transformers: this model was not enabled but shares its config with one that"
            " is: give it a config of its own (copy.deepcopy), or enable it too"
        )
    if indices is None:  # glm5_next hands its list over in place of a mask
        indices = attention_mask
    elif not is_padding_mask(attention_mask):  # the indexer has said so
        return _eager(module, query, key, value, attention_mask, indices, scaling, dropout)
    width = key.shape[-1] + value.shape[-1]
    if reason := why_eager(query, width, dropout) or _why_not_folded(module):
        warn_once(f"winnow.transformers: {reason}: attention runs as in eager, on the same keys")
        return _eager(module, query, key, value, None, indices, scaling, dropout)
    dtype = working_dtype(query)
    indices, selection = indices.to(query.device), selection_of(module)
    target = None if selection is None else torch.zeros(indices.shape, device=indices.device)
    out = latent_attention(
        query.transpose(1, 2).to(dtype),
        torch.cat((key.squeeze(1), value.squeeze(1)), dim=-1).to(dtype),
        _effective_weight(module, query.shape[1], key).to(dtype),
        None if s_aux is None else s_aux.float(),
        indices,
        Shape(module.qk_nope_head_dim, scaling),
        target,
    )
    if selection is not None:
        selection.add(target.to(selection.target.device))
    return out, None


def why_eager(query: Tensor, key_width: int, dropout: float) -> str:
    """Why a call cannot run sparse; empty if it can."""
    if dropout:
        return f"attention_dropout {dropout}: sparse attention has none"
    if query.device.type not in ("cpu", "cuda"):
        return f"tensors on {query.device.type}: must be on cpu or cuda"
    if key_width % 8 or key_width > 1024:
        return f"keys of {key_width} channels: must be a multiple of 8, at most 1024"
    return ""


def _why_not_folded(module: nn.Module) -> str:
    """Why the weight of kv_b_proj cannot be folded into the queries; empty if it can."""
    projection = module.kv_b_proj
    dropouts = getattr(projection, "lora_dropout", {}).values()
    if module.training and any(getattr(dropout, "p", 0) for dropout in dropouts):
        return "kv_b_proj has an adapter with dropout: its weight cannot be folded"
    if getattr(projection, "bias", None) is not None:
        return "kv_b_proj has a bias: its weight cannot be folded"
    return ""


def _effective_weight(module: nn.Module, heads: int, like: Tensor) -> Tensor:
    """[heads, nope + v_head_dim, latent] of kv_b_proj, whatever it is made of.

    The image of the unit vectors is the weight of every linear module: with adapters, quantised,
    sharded or moved by hooks. Gradients reach its parameters through it.
    """
    projection = module.kv_b_proj
    plain = type(projection) is nn.Linear and "forward" not in projection.__dict__
    if plain and not projection._forward_hooks and not projection._forward_pre_hooks:
        weight = projection.weight
    else:
        latent = module.kv_lora_rank
        weight = projection(torch.eye(latent, dtype=like.dtype, device=like.device)).mT.contiguous()
    return weight.unflatten(0, (heads, -1))


def _eager(
    module: nn.Module,
    query: Tensor,
    latent: Tensor,
    rope: Tensor,
    mask: Tensor | None,
    indices: Tensor,
    scaling: float,
    dropout: float,
) -> tuple[Tensor, Tensor]:
    """The model's own attention, with the selected keys as a dense mask."""
    key, value = type(module).expand_kv(module, latent, rope)
    dense = dense_mask(indices, key.shape[2], query.dtype, mask)
    eager = modeling(module).eager_attention_forward
    return eager(module, query, key, value, dense, scaling=scaling, dropout=dropout)


def dense_mask(
    indices: Tensor, keys: int, dtype: torch.dtype, mask: Tensor | None = None
) -> Tensor:
    """[batch, 1, rows, keys]: `mask`, or 0, at the selected keys, and the lowest number elsewhere.

    Args:
        mask: [batch, 1, rows, keys] bool, or to be added to logits.
    """
    selected = indices.new_zeros((*indices.shape[:2], keys + 1), dtype=torch.bool)
    selected.scatter_(-1, torch.where(indices < 0, keys, indices).long(), True)
    selected = selected[:, None, :, :keys]
    if mask is None or mask.dtype == torch.bool:
        selected = selected if mask is None else selected & mask
        mask = torch.zeros((), dtype=dtype, device=indices.device)
    return torch.where(selected, mask, torch.finfo(dtype).min)
