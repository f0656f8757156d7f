# SPDX-License-Identifier: Apache-2.0
"""A drop-in replacement for the sparse-attention kernels of NeMo Automodel.

    from winnow.automodel import tilelang_indexer_topk, tilelang_sparse_attention

replaces the import from ``nemo_automodel.components.models.glm_moe_dsa.optimized_kernels``, and
likewise that from ``nemo_automodel.components.models.deepseek_v4.kernels.sparse_attention`` and of
the context-parallel helpers of ``glm_moe_dsa.cp`` and ``deepseek_v4.cp``. Names, parameters and
layouts are those of Automodel, for CUDA and CPU tensors; docs/automodel.md lists the differences.
Backend names: "torch" is the caller's own path, "tilelang" is winnow's fastest backend for the
tensors' device, "auto" is that backend if it can run.
"""

from typing import Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from winnow import _lib, functional
from winnow._arguments import check_size, one_head, one_of
from winnow.automodel_cp import (  # noqa: F401
    _contiguous_cp_indices,
    _slice_thd_chunk_for_cp,
    dsv4_cp_local_seq_multiple,
    glm_dsa_cp_all_gather,
    glm_dsa_cp_enabled,
    make_glm_dsa_packed_cp_batch_and_ctx,
)
from winnow.packing import Packing

DsaIndexerBackend = Literal["torch", "tilelang", "auto"]
DsaSparseAttentionBackend = Literal["torch", "tilelang", "auto"]

_FILL = -1000  # pads the offsets of stacked batches


def is_dsa_kernel_available(name: Literal["indexer", "sparse_attn"]) -> bool:
    """True for every kernel name of Automodel; ValueError for another name."""
    one_of("is_dsa_kernel_available", "name", name, ("indexer", "sparse_attn"))
    return True


def _all_cuda(*tensors: Tensor) -> bool:
    return all(tensor.is_cuda for tensor in tensors)


def should_use_tilelang(
    backend: str,
    available: bool,
    kernel_name: str,
    tensors: tuple[Tensor, ...],
    require_bf16: bool = False,
) -> bool:
    """Whether to call winnow's kernel for these tensors.

    "torch": never. "auto": if it can run. "tilelang": yes, and RuntimeError if it cannot run.
    """
    one_of("should_use_tilelang", "backend", backend, ("torch", "tilelang", "auto"))
    if backend == "torch":
        return False
    reason = _why_not(available, tensors, require_bf16)
    if reason and backend == "tilelang":
        raise RuntimeError(f"{kernel_name}: backend 'tilelang' cannot run: {reason}")
    return not reason


def _why_not(available: bool, tensors: tuple[Tensor, ...], require_bf16: bool) -> str:
    if not available:
        return "the kernel is said to be unavailable"
    devices = sorted({str(tensor.device) for tensor in tensors})
    if len(devices) > 1:
        return f"tensors are on {', '.join(devices)}: must be on one device"
    if require_bf16:
        others = sorted({str(tensor.dtype) for tensor in tensors} - {"torch.bfloat16"})
        if others:
            return f"tensors have dtype {', '.join(others)}: must be torch.bfloat16"
    kind = devices[0].partition(":")[0] if devices else "cpu"
    if kind not in ("cpu", "cuda"):
        return f"tensors are on {kind}: must be on cpu or cuda"
    return _lib.backend_why_not(kind)


def _generate_padded_varlen_mask_params(
    cu_seqlens: Tensor, cu_seqlens_padded: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns starts and ends, int32: the keys [start, end) of every row of a padded batch.

    Real rows never see padding; a padding row sees its document and at least one key.
    """
    offsets = _offsets(cu_seqlens), _offsets(cu_seqlens_padded)
    begin, end = Packing(*offsets, padding_rows="see_document").windows()
    return begin, end


def tilelang_indexer_topk(
    index_q: Tensor,
    index_k: Tensor,
    head_weights: Tensor,
    cu_seqlens: Tensor,
    index_topk: int,
    query_indices: Tensor | None = None,
    cu_seqlens_padded: Tensor | None = None,
) -> Tensor:
    """Selects the keys with the largest indexer scores of every row. No gradient.

    Args:
        index_q: [tokens, index_heads, index_dim].
        index_k: [keys, index_dim], as index_q.
        head_weights: [tokens, index_heads], all scales folded in; signed.
        cu_seqlens: [documents + 1], cumulative lengths; -1000 at its end is ignored.
        index_topk: the number of keys to select.
        query_indices: [tokens], the global rows of index_q.
        cu_seqlens_padded: [documents + 1], where documents begin if there is padding between them.

    Returns:
        [tokens, 1, index_topk] int32, ascending, followed by -1.
    """
    device = index_q.device
    packing = Packing(
        _offsets(cu_seqlens, device),
        None if cu_seqlens_padded is None else _offsets(cu_seqlens_padded, device),
        None if query_indices is None else query_indices.to(device, torch.int32),
        tokens=index_q.shape[0],
        padding_rows="see_document",
    )
    selection = functional.index_topk(
        _dense_rows(index_q),
        _dense_rows(index_k),
        _dense_rows(head_weights.float()),
        packing,
        topk=index_topk,
        with_scores=False,
    )
    return selection.indices[:, None]


def tilelang_sparse_attention(
    q: Tensor, kv_latent: Tensor, topk_indices: Tensor, w_vc: Tensor, softmax_scale: float
) -> Tensor:
    """Attention over selected latent keys, then the value projection. Differentiable.

    Args:
        q: [tokens, heads, latent + rope], absorbed.
        kv_latent: [keys, 1, latent + rope], as q.
        topk_indices: [tokens, 1, topk]; invalid indices contribute nothing.
        w_vc: [heads, head_dim, latent]; converted to the dtype of q.
        softmax_scale: that of the model, mscale**2 / sqrt(qk_head_dim).

    Returns:
        [tokens, heads, head_dim], as q.
    """
    name = "tilelang_sparse_attention"
    out = functional.sparse_attention(
        _dense_rows(q),
        _dense_rows(one_head(name, "kv_latent", kv_latent)),
        _dense_rows(one_head(name, "topk_indices", topk_indices).to(torch.int32)),
        v_dim=w_vc.shape[-1],
        scale=softmax_scale,
    ).out
    return functional.value_projection(out, _dense_rows(w_vc.to(q.dtype)))


class DeepSeekV4SparseAttention(torch.autograd.Function):
    """Sparse MQA with a sink; `apply` has the arguments of `forward`."""

    @staticmethod
    def forward(
        ctx,
        q: Tensor,
        kv: Tensor,
        attn_sink: Tensor,
        topk_idxs: Tensor,
        sm_scale: float | None = None,
    ) -> Tensor:
        return _forward(ctx, q, kv, attn_sink, topk_idxs, 0, sm_scale)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_output: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        return *_backward(ctx, grad_output), None, None


class DeepSeekV4SparseAttentionHeadChunked(torch.autograd.Function):
    """The same, with a backward over groups of heads that accumulates KV gradients in fp32."""

    @staticmethod
    def forward(
        ctx,
        q: Tensor,
        kv: Tensor,
        attn_sink: Tensor,
        topk_idxs: Tensor,
        max_heads_per_kernel: int,
        sm_scale: float | None = None,
    ) -> Tensor:
        name = "sparse_attn_tilelang_head_chunked"
        check_size(name, "max_heads_per_kernel", max_heads_per_kernel, 1)
        return _forward(ctx, q, kv, attn_sink, topk_idxs, max_heads_per_kernel, sm_scale)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_output: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None, None]:
        return *_backward(ctx, grad_output), None, None, None


def sparse_attn_tilelang(
    q: Tensor,
    kv: Tensor,
    attn_sink: Tensor,
    topk_idxs: Tensor,
    sm_scale: float | None = None,
) -> Tensor:
    """DeepSeek-V4's sparse MQA with a sink. Differentiable in q, kv and attn_sink.

    Args:
        q: [batch, tokens, heads, dim].
        kv: [batch, keys, dim], as q; key and value of the one shared head.
        attn_sink: [heads].
        topk_idxs: [batch, tokens, topk]; invalid indices contribute nothing.
        sm_scale: dim ** -0.5 by default.

    Returns:
        [batch, tokens, heads, dim], as q.
    """
    return DeepSeekV4SparseAttention.apply(q, kv, attn_sink, topk_idxs, sm_scale)


def sparse_attn_tilelang_head_chunked(
    q: Tensor,
    kv: Tensor,
    attn_sink: Tensor,
    topk_idxs: Tensor,
    max_heads_per_kernel: int,
    sm_scale: float | None = None,
) -> Tensor:
    """sparse_attn_tilelang with at most `max_heads_per_kernel` heads per pass of backward."""
    return DeepSeekV4SparseAttentionHeadChunked.apply(
        q, kv, attn_sink, topk_idxs, max_heads_per_kernel, sm_scale
    )


def _forward(
    ctx,
    q: Tensor,
    kv: Tensor,
    attn_sink: Tensor,
    topk_idxs: Tensor,
    max_heads_per_pass: int,
    sm_scale: float | None,
) -> Tensor:
    if sm_scale == 0:  # 0 means "not given" to the library
        raise ValueError("sparse_attn_tilelang: sm_scale 0: must not be 0")
    ctx.scale, ctx.max_heads_per_pass = sm_scale or 0.0, max_heads_per_pass
    ctx.sink_dtype = attn_sink.dtype
    q, kv, indices = _dense_rows(q), _dense_rows(kv), _dense_rows(topk_idxs.to(torch.int32))
    sink = attn_sink.to(torch.float64 if q.dtype == torch.float64 else torch.float32)
    out, lse, _ = torch.ops.winnow.sparse_attention_forward(
        q, kv, indices, None, sink, q.shape[-1], ctx.scale
    )
    ctx.save_for_backward(q, kv, indices, sink, out, lse)
    return out


def _backward(ctx, grad_output: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    q, kv, indices, sink, out, lse = ctx.saved_tensors
    d_q, d_kv, d_sink = torch.ops.winnow.sparse_attention_backward(
        q,
        kv,
        indices,
        None,
        sink,
        out,
        lse,
        grad_output.contiguous(),
        None,
        ctx.scale,
        ctx.max_heads_per_pass,
    )
    return d_q, d_kv, d_sink.to(ctx.sink_dtype)


def _dense_rows(x: Tensor) -> Tensor:
    """Copies a tensor whose last stride is not 1; the library accepts all other strides."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _offsets(cu_seqlens: Tensor, device: torch.device | None = None) -> Tensor:
    """int32 offsets in which the fill values at the end are replaced by empty documents.

    Dropping them would need a synchronisation with the device.
    """
    offsets = cu_seqlens.to(device or cu_seqlens.device, torch.int32)
    if offsets.numel() == 0:
        return offsets  # refused by the library
    is_fill = (offsets == _FILL).flip(0).cumprod(0).flip(0).bool()
    return torch.where(is_fill, offsets.max(), offsets)
