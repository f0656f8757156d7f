# SPDX-License-Identifier: Apache-2.0
"""The sparse prefill of FlashMLA, with its name and conventions, implemented with winnow."""

import math

import torch
from torch import Tensor

from winnow._arguments import one_head
from winnow.functional import sparse_attention


def flash_mla_sparse_fwd(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    sm_scale: float,
    d_v: int = 512,
    attn_sink: Tensor | None = None,
    topk_length: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Sparse attention with the results of FlashMLA, for any number of heads and topk, also on CPU.

    Args:
        q: [s_q, h_q, d_qk].
        kv: [s_kv, 1, d_qk], as q; a value is the first d_v channels of its row.
        indices: [s_q, 1, topk] int32; those outside [0, s_kv) are ignored.
        sm_scale: the scale of the logits.
        d_v: the channels of a value.
        attn_sink: [h_q] fp32; affects only out.
        topk_length: [s_q] int32: the number of slots to use; others are not read.

    Returns:
        out [s_q, h_q, d_v] as q, max_logits [s_q, h_q] fp32 and lse [s_q, h_q] fp32, natural log,
        without the sink. A row without keys has 0, -inf and +inf. out and lse are differentiable.
    """
    out, lse, max_logits = sparse_attention(
        q,
        one_head("flash_mla_sparse_fwd", "kv", kv),
        one_head("flash_mla_sparse_fwd", "indices", indices),
        v_dim=d_v,
        scale=sm_scale,
        sink=attn_sink,
        lengths=topk_length,
        with_max_logits=True,
    )
    return out, max_logits, torch.where(lse == -math.inf, math.inf, lse)
