# SPDX-License-Identifier: Apache-2.0
"""The TileLang names of Automodel's GLM-5.2 layers, implemented with winnow.

winnow.automodel exports these functions.
"""

from typing import Literal

from torch import Tensor

from winnow import _lib, functional
from winnow._arguments import one_head, one_of
from winnow.automodel_arguments import batch_offsets, dense_rows, integers, offsets
from winnow.packing import Packing

DsaIndexerBackend = Literal["torch", "tilelang", "cudnn", "auto"]
DsaSparseAttentionBackend = Literal["torch", "tilelang", "cudnn", "auto"]


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
    """Whether to call the functions with "tilelang" in their names for these tensors.

    "torch" and "cudnn": never. "auto": if they can run. "tilelang": yes, and RuntimeError if they
    cannot run.
    """
    one_of("should_use_tilelang", "backend", backend, ("torch", "tilelang", "cudnn", "auto"))
    if backend in ("torch", "cudnn"):
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
    return _backend_why_not(kind)


def _backend_why_not(kind: str) -> str:
    return _lib.backend_why_not(kind)


# Dynamo cannot trace ctypes: it takes the answer as a constant, which it is within a process.
# torch.compiler.assume_constant_result sets this attribute too, but imports Dynamo, which takes
# seconds.
_backend_why_not._dynamo_marked_constant = True


def _generate_padded_varlen_mask_params(
    cu_seqlens: Tensor, cu_seqlens_padded: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns starts and ends, int32: the keys [start, end) of every row of a padded batch.

    Real rows never see padding; a padding row sees its document and at least one key.
    """
    name = "_generate_padded_varlen_mask_params"
    packing = Packing(
        offsets(name, "cu_seqlens", cu_seqlens),
        offsets(name, "cu_seqlens_padded", cu_seqlens_padded),
        padding_rows="see_document",
    )
    begin, end = packing.windows()
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
        query_indices: [tokens] or [1, tokens], the global rows of index_q.
        cu_seqlens_padded: [documents + 1], where documents begin if there is padding between them.

    Returns:
        [tokens, 1, index_topk] int32, ascending, followed by -1.
    """
    name = "tilelang_indexer_topk"
    packing = packing_of(
        name, index_q, index_k, cu_seqlens, query_indices, cu_seqlens_padded, "see_document"
    )
    return select(name, index_q, index_k, head_weights, index_topk, packing)


def tilelang_sparse_attention(
    q: Tensor, kv_latent: Tensor, topk_indices: Tensor, w_vc: Tensor, softmax_scale: float
) -> Tensor:
    """Attention over selected latent keys, then the value projection. Differentiable.

    Args:
        q: [tokens, heads, latent + rope], absorbed.
        kv_latent: [keys, 1, latent + rope], as q.
        topk_indices: [tokens, 1, topk] int32 or int64; invalid indices contribute nothing.
        w_vc: [heads, head_dim, latent]; converted to the dtype of q.
        softmax_scale: that of the model, mscale**2 / sqrt(qk_head_dim).

    Returns:
        [tokens, heads, head_dim], as q.
    """
    name = "tilelang_sparse_attention"
    if w_vc.shape[-1] > q.shape[-1]:
        raise ValueError(
            f"{name}: w_vc {list(w_vc.shape)}: its last dimension must be at most {q.shape[-1]},"
            " the channels of q"
        )
    out = attend(name, q, kv_latent, topk_indices, softmax_scale, w_vc.shape[-1], None)
    return functional.value_projection(out, dense_rows(w_vc.to(q.dtype)))


def packing_of(
    name: str,
    index_q: Tensor,
    index_k: Tensor,
    cu_seqlens: Tensor,
    query_indices: Tensor | None,
    cu_seqlens_padded: Tensor | None,
    padding_rows: str,
) -> Packing:
    device = index_q.device
    keys = index_q.shape[0] if query_indices is None else index_k.shape[0]
    return Packing(
        *batch_offsets(name, cu_seqlens, cu_seqlens_padded, device, keys),
        None
        if query_indices is None
        else integers(name, "query_indices", query_indices.flatten(), device),
        tokens=index_q.shape[0],
        padding_rows=padding_rows,
    )


def select(
    name: str,
    index_q: Tensor,
    index_k: Tensor,
    head_weights: Tensor,
    index_topk: int,
    packing: Packing,
) -> Tensor:
    if not hasattr(index_topk, "__index__"):
        raise TypeError(f"{name}: index_topk {index_topk}: must be an integer")
    selection = functional.index_topk(
        dense_rows(index_q),
        dense_rows(index_k),
        dense_rows(head_weights.float()),
        packing,
        topk=index_topk,
        with_scores=False,
    )
    return selection.indices[:, None]


def attend(
    name: str,
    q: Tensor,
    kv_latent: Tensor,
    topk_indices: Tensor,
    scale: float,
    v_dim: int,
    lengths: Tensor | None,
) -> Tensor:
    if scale is None:
        raise ValueError(f"{name}: softmax_scale None: must be given, it has no default")
    indices = one_head(name, "topk_indices", topk_indices)
    return functional.sparse_attention(
        dense_rows(q),
        dense_rows(one_head(name, "kv_latent", kv_latent)),
        dense_rows(integers(name, "topk_indices", indices)),
        v_dim=v_dim,
        scale=scale,
        lengths=lengths,
    ).out
