# SPDX-License-Identifier: Apache-2.0
"""winnow: the operators of DeepSeek-style sparse attention for PyTorch, forward and backward.

    packing = winnow.Packing(cu_seqlens)
    selection = winnow.index_topk(index_q, index_k, weights, packing, topk=2048)
    out, lse, _ = winnow.sparse_attention(q, kv, selection, v_dim=512, scale=scale)
    loss = winnow.index_loss(selection, q, kv, lse, scale=scale)

The functions are differentiable and accept CPU and CUDA tensors; docs/python.md is the guide.
``winnow.reference`` has their formulas in plain torch, ``torch.ops.winnow`` the raw operators.
"""

import importlib.util

__version__ = "0.1.0"

if importlib.util.find_spec("torch") is not None:  # without torch only winnow._lib is usable
    from winnow import automodel, flash_mla, functional, megatron, metrics, reference, rollout
    from winnow._dump import dump, dump_call
    from winnow._lib import backends
    from winnow.checkpointing import keep_selections
    from winnow.functional import *  # noqa: F403
    from winnow.keys import Keys, gather_keys
    from winnow.ops import explain, why_not
    from winnow.packing import Packing, Windows

    __all__ = [
        "Keys",
        "Packing",
        "Windows",
        "automodel",
        "backends",
        "dump",
        "dump_call",
        "explain",
        "flash_mla",
        "gather_keys",
        "keep_selections",
        "megatron",
        "metrics",
        "reference",
        "rollout",
        "why_not",
        *functional.__all__,
    ]
else:

    def __getattr__(name: str):
        if name.startswith("_"):  # the import system asks for submodules
            raise AttributeError(f"module 'winnow' has no attribute {name!r}")
        raise ImportError(f"winnow.{name}: winnow needs PyTorch from 2.6 on: pip install torch")
