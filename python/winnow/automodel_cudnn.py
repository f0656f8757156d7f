# SPDX-License-Identifier: Apache-2.0
"""The cuDNN names of Automodel's GLM-5.2 layers, implemented with winnow.

winnow.automodel exports these functions. They run the operators of the TileLang names; the one
difference is Automodel's too: padding rows see nothing, not their document.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from winnow._arguments import check_size
from winnow.automodel_arguments import batch_offsets, integers
from winnow.automodel_glm import attend, packing_of, select
from winnow.packing import Packing

_LATENT = 512  # the channels of a value, which cudnn_sparse_attention is not told


def is_cudnn_dsa_available() -> bool:
    """True: the names with "cudnn" need neither cuDNN nor FlashMLA."""
    return True


@dataclass(frozen=True)
class CudnnDsaPackedMetadata:
    """What prepare_cudnn_dsa_packed_metadata computes once for all layers of a pipeline stage."""

    packing: Packing
    causal_lengths: Tensor  # [tokens]  int32, the keys that every query sees
    valid_row_indices: Tensor | None  # int64, the queries that see any; None if all do
    all_rows_nonempty: bool


def prepare_cudnn_dsa_packed_metadata(
    cu_seqlens: Tensor,
    total_key_tokens: int,
    max_seqlen: int | Tensor | None = None,
    *,
    query_indices: Tensor | None = None,
    cu_seqlens_padded: Tensor | None = None,
    padding_mask: Tensor | None = None,
) -> CudnnDsaPackedMetadata:
    """Computes the windows of a batch once for all layers. On a GPU this synchronises.

    Args:
        cu_seqlens: [documents + 1], cumulative lengths; -1000 at its end is ignored.
        total_key_tokens: the number of keys of all ranks.
        max_seqlen: not used.
        query_indices: [tokens] or [1, tokens], the global rows of the queries; by default all.
        cu_seqlens_padded: [documents + 1], where documents begin if there is padding between them.
        padding_mask: [tokens] bool, True for padding, which sees nothing.
    """
    name = "prepare_cudnn_dsa_packed_metadata"
    check_size(name, "total_key_tokens", total_key_tokens, 1)
    device = cu_seqlens.device
    rows = torch.arange(total_key_tokens, device=device)
    if query_indices is not None:
        rows = query_indices.to(device)
    if padding_mask is not None:
        if padding_mask.dtype != torch.bool or padding_mask.numel() != rows.numel():
            raise ValueError(
                f"{name}: padding_mask {list(padding_mask.shape)} of {padding_mask.dtype}: must be"
                f" torch.bool with {rows.numel()} elements, one for each query"
            )
        rows = torch.where(padding_mask.flatten().to(device), -1, rows.flatten())
    packing = Packing(
        *batch_offsets(name, cu_seqlens, cu_seqlens_padded, device, total_key_tokens),
        integers(name, "query_indices", rows.flatten()),
    )
    begin, end = packing.windows()
    is_valid = end > begin
    all_valid = bool(is_valid.all())
    valid_rows = None if all_valid else is_valid.nonzero().flatten()
    return CudnnDsaPackedMetadata(packing, end - begin, valid_rows, all_valid)


def cudnn_indexer_topk(
    index_q: Tensor,
    index_k: Tensor,
    head_weights: Tensor,
    cu_seqlens: Tensor,
    index_topk: int,
    query_indices: Tensor | None = None,
    cu_seqlens_padded: Tensor | None = None,
    packed_metadata: CudnnDsaPackedMetadata | None = None,
) -> Tensor:
    """tilelang_indexer_topk, but padding rows select nothing.

    Args:
        packed_metadata: the result of prepare_cudnn_dsa_packed_metadata; cu_seqlens, query_indices
            and cu_seqlens_padded are then not used.
    """
    name = "cudnn_indexer_topk"
    if packed_metadata is None:
        packing = packing_of(
            name, index_q, index_k, cu_seqlens, query_indices, cu_seqlens_padded, "empty"
        )
    elif isinstance(packed_metadata, CudnnDsaPackedMetadata):
        packing = packed_metadata.packing
    else:
        raise TypeError(
            f"{name}: packed_metadata is a {type(packed_metadata).__qualname__} of"
            f" {type(packed_metadata).__module__}: must be made by"
            " winnow.automodel.prepare_cudnn_dsa_packed_metadata"
        )
    return select(name, index_q, index_k, head_weights, index_topk, packing)


def cudnn_sparse_attention(
    q: Tensor,
    kv_latent: Tensor,
    topk_indices: Tensor,
    softmax_scale: float,
    topk_length: Tensor | None = None,
    all_rows_nonempty: bool = False,
    valid_row_indices: Tensor | None = None,
) -> Tensor:
    """Attention over selected latent keys, without the value projection. Differentiable.

    Args:
        q: [tokens, heads, 576], or 512 channels: the latent's 512 come first.
        kv_latent: [keys, 1, 576], as q.
        topk_indices: [tokens, 1, topk] int32 or int64; invalid indices contribute nothing.
        softmax_scale: that of the model.
        topk_length: [tokens], the number of slots to use.
        all_rows_nonempty, valid_row_indices: not used: rows without keys cost nothing.

    Returns:
        [tokens, heads, 512], as q.
    """
    name = "cudnn_sparse_attention"
    if q.shape[-1] < _LATENT:
        raise ValueError(
            f"{name}: q {list(q.shape)}: must have at least {_LATENT} channels, those of the latent"
        )
    if topk_length is not None:
        topk_length = integers(name, "topk_length", topk_length)
    return attend(name, q, kv_latent, topk_indices, softmax_scale, _LATENT, topk_length)
