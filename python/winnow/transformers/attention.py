# SPDX-License-Identifier: Apache-2.0
"""The attention function that the models call, and eager attention where it cannot run."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from winnow.transformers.indexers import modeling, working_dtype
from winnow.transformers.latent import Shape, latent_attention
from winnow.transformers.rows import is_padding_mask
from winnow.transformers.teaching import attention_to, selection_of
from winnow.transformers.warn import warn_once


def latent_keys(module: nn.Module, latent: Tensor, rope: Tensor) -> tuple[Tensor, Tensor]:
    """`expand_kv` of an attention module: hands latents and rope keys over as they are."""
    if (implementation := module.config._attn_implementation) != "winnow":
        raise RuntimeError(
            f"winnow.transformers: the attention implementation is {implementation!r}, but the"
            " model is enabled: it must be 'winnow' until the model is disabled"
        )
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
    own_mask = indices is not None and not is_padding_mask(attention_mask)
    if indices is None:  # glm5_next hands its list over in place of a mask
        indices = attention_mask
    indices = indices.to(query.device)  # layers that share a selection may be on several
    if own_mask:  # the indexer has said so
        return _eager(module, query, key, value, attention_mask, indices, scaling, dropout)
    selection = selection_of(module, dropout)
    split = query.shape[1] < module.config.num_attention_heads
    group = _head_group(module) if split else None
    unknown = ""
    if split and group is None:
        unknown = "heads are split over ranks, but kv_b_proj does not say which"
    if unknown and selection is not None:
        raise ValueError(f"winnow.transformers: train_indexer True: {unknown}")
    widths = key.shape[-1] + value.shape[-1], key.shape[-1]
    if reason := why_eager(query, widths, dropout) or unknown or _why_not_folded(module):
        warn_once(f"winnow.transformers: {reason}: attention runs as in eager, on the same keys")
        out, weights = _eager(module, query, key, value, None, indices, scaling, dropout)
        if selection is not None:
            selection.add(attention_to(indices, weights), group)
        return out, weights
    dtype = working_dtype(query)
    if group is not None:
        key = WholeGradients.apply(key, group)
        s_aux = s_aux.to_local() if hasattr(s_aux, "to_local") else s_aux
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
        selection.add(target, group)
    return out, None


def why_eager(query: Tensor, widths: tuple[int, int], dropout: float) -> str:
    """Why a call with keys and values of these widths cannot run sparse; empty if it can."""
    if dropout:
        return f"attention_dropout {dropout}: sparse attention has none"
    if query.device.type not in ("cpu", "cuda"):
        return f"tensors on {query.device.type}: must be on cpu or cuda"
    if working_dtype(query) == torch.float64:
        return "tensors of float64: must be float32, bfloat16 or float16"
    for what, width in zip(("keys", "values"), widths, strict=True):
        if width % 8 or width > 1024:
            return f"{what} of {width} channels: must be a multiple of 8, at most 1024"
    return ""


class WholeGradients(torch.autograd.Function):
    """Hands the latents on; their gradients are summed over the ranks that have the other heads.

    A tensor-parallel plan does so where the latents enter kv_b_proj, which folding passes by.
    """

    @staticmethod
    def forward(ctx, latent: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return latent.view_as(latent)

    @staticmethod
    def backward(ctx, d_latent: Tensor) -> tuple[Tensor, None]:
        total = d_latent.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        return total.to(d_latent.dtype), None


def _head_group(module: nn.Module) -> dist.ProcessGroup | None:
    """The ranks over which the heads of the module are split; None: nothing says which.

    A weight that FSDP has sharded too, outside its forward, is split over several dimensions of its
    mesh, and does not say which of them is that of the heads.
    """
    weight = module.kv_b_proj.weight
    placements = enumerate(getattr(weight, "placements", ()))
    split = [dim for dim, placement in placements if not placement.is_replicate()]
    return weight.device_mesh.get_group(split[0]) if len(split) == 1 else None


def _why_not_folded(module: nn.Module) -> str:
    """Why the weight of kv_b_proj cannot be folded into the queries; empty if it can."""
    projection = module.kv_b_proj
    dropouts = getattr(projection, "lora_dropout", {}).values()
    if module.training and any(getattr(dropout, "p", 0) for dropout in dropouts):
        return "kv_b_proj has an adapter with dropout: its weight cannot be folded"
    bias = getattr(projection, "bias", None)
    if (bias() if callable(bias) else bias) is not None:  # a method of torch's quantised layers
        return "kv_b_proj has a bias: its weight cannot be folded"
    return ""


def _effective_weight(module: nn.Module, heads: int, like: Tensor) -> Tensor:
    """[heads, nope + v_head_dim, latent] of kv_b_proj, whatever it is made of.

    The image of the unit vectors is the weight of every linear module: with adapters, quantised,
    sharded or moved by hooks. Gradients reach its parameters through it.
    """
    projection = module.kv_b_proj
    plain = type(projection) is nn.Linear and "forward" not in projection.__dict__
    hooked = projection._forward_hooks or projection._forward_pre_hooks
    if plain and not hooked and not is_traceable_wrapper_subclass(projection.weight):
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
