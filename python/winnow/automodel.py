# SPDX-License-Identifier: Apache-2.0
"""A drop-in replacement for the sparse-attention kernels of NeMo Automodel.

    winnow.automodel.install()

puts winnow behind the names of Automodel's own modules, and `uninstall` takes it back. Or one
import at a time:

    from winnow.automodel import tilelang_indexer_topk, tilelang_sparse_attention

replaces the import from ``nemo_automodel.components.models.glm_moe_dsa.optimized_kernels``, and
likewise that from ``nemo_automodel.components.models.deepseek_v4.kernels.sparse_attention`` and of
the context-parallel helpers of ``glm_moe_dsa.cp`` and ``deepseek_v4.cp``. Names, parameters and
layouts are those of Automodel, for CUDA and CPU tensors; docs/automodel.md lists the differences.
Backend names: "torch" is the caller's own path, "tilelang" and "cudnn" are winnow's fastest backend
for the tensors' device, "auto" is that backend if it can run.
"""

from winnow.automodel_batch import (  # noqa: F401
    ShardLayout,
    _contiguous_cp_indices,
    _slice_thd_chunk_for_cp,
    make_glm_dsa_packed_cp_batch_and_ctx,
    shard_glm_dsa_packed_cp_batch,
)
from winnow.automodel_cp import (  # noqa: F401
    dsv4_cp_local_seq_multiple,
    glm_dsa_cp_all_gather,
    glm_dsa_cp_enabled,
)
from winnow.automodel_cudnn import (  # noqa: F401
    CudnnDsaPackedMetadata,
    cudnn_indexer_topk,
    cudnn_sparse_attention,
    is_cudnn_dsa_available,
    prepare_cudnn_dsa_packed_metadata,
)
from winnow.automodel_glm import (  # noqa: F401
    DsaIndexerBackend,
    DsaSparseAttentionBackend,
    _all_cuda,
    _generate_padded_varlen_mask_params,
    is_dsa_kernel_available,
    should_use_tilelang,
    tilelang_indexer_topk,
    tilelang_sparse_attention,
)
from winnow.automodel_install import install, uninstall  # noqa: F401
from winnow.automodel_v4 import (  # noqa: F401
    DeepSeekV4SparseAttention,
    DeepSeekV4SparseAttentionHeadChunked,
    sparse_attn_tilelang,
    sparse_attn_tilelang_head_chunked,
)
