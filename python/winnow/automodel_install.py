# SPDX-License-Identifier: Apache-2.0
"""Puts winnow's functions behind the names of Automodel's own modules, and takes them back.

Automodel's modules import kernels from each other by name, one of them by a string. So a function
is replaced wherever a module of Automodel refers to it, and modules imported later find winnow's.
"""

import importlib
import sys
from collections.abc import Callable
from typing import Any

from torch import Tensor

from winnow import automodel_batch, automodel_cp, automodel_cudnn, automodel_glm, automodel_v4

_MODELS = "nemo_automodel.components.models."
_V4_KERNELS = "deepseek_v4.optimized_kernels"
_V4_GATE = "_should_use_tilelang"

# The functions of each module that are replaced where this version has them, and winnow's module.
_REPLACED = {
    "glm_moe_dsa.optimized_kernels": (
        (
            automodel_glm,
            "is_dsa_kernel_available",
            "should_use_tilelang",
            "tilelang_indexer_topk",
            "tilelang_sparse_attention",
            "_generate_padded_varlen_mask_params",
        ),
        (
            automodel_cudnn,
            "is_cudnn_dsa_available",
            "prepare_cudnn_dsa_packed_metadata",
            "cudnn_indexer_topk",
            "cudnn_sparse_attention",
        ),
    ),
    "glm_moe_dsa.cp": (
        (automodel_cp, "glm_dsa_cp_enabled", "glm_dsa_cp_all_gather"),
        (
            automodel_batch,
            "_contiguous_cp_indices",
            "_slice_thd_chunk_for_cp",
            "make_glm_dsa_packed_cp_batch_and_ctx",
            "shard_glm_dsa_packed_cp_batch",
        ),
    ),
    "deepseek_v4.kernels.sparse_attention": (
        (
            automodel_v4,
            "DeepSeekV4SparseAttention",
            "DeepSeekV4SparseAttentionHeadChunked",
            "sparse_attn_tilelang",
            "sparse_attn_tilelang_head_chunked",
        ),
    ),
    "deepseek_v4.cp": ((automodel_cp, "dsv4_cp_local_seq_multiple"),),
    _V4_KERNELS: (),  # only its gate
}

_replacements: list[tuple[Any, Any]] = []  # pairs of Automodel's function and winnow's


def install() -> list[str]:
    """Replaces the kernels of Automodel by winnow's in this process; returns the modules served.

    Imports those modules. One that cannot be imported, or that this version of Automodel does not
    have, is left out; ImportError if none can. Calling it again has the same effect.
    """
    uninstall()
    modules, reasons = {}, {}
    for name in _REPLACED:
        try:
            modules[name] = importlib.import_module(_MODELS + name)
        except ImportError as error:
            reasons[str(error)] = None
    if not modules:
        raise ImportError(
            f"winnow.automodel.install: Automodel cannot be imported: {', '.join(reasons)}"
        )
    for name, module in modules.items():
        for source, *functions in _REPLACED[name]:
            for function in functions:
                if hasattr(module, function):
                    pair = getattr(module, function), getattr(source, function)
                    _replacements.append(pair)
    if _V4_KERNELS in modules:
        module = modules[_V4_KERNELS]
        gate = getattr(module, _V4_GATE, None)
        if gate is not None:
            has_tilelang = getattr(module, "HAS_TILELANG", False)
            _replacements.append((gate, _v4_gate(gate, has_tilelang)))
    _rebind(_replacements)
    return [_MODELS + name for name in modules]


def uninstall() -> None:
    """Puts Automodel's own functions back, also in modules that were imported since install."""
    _rebind([(ours, original) for original, ours in _replacements])
    _replacements.clear()


def _rebind(pairs: list[tuple[Any, Any]]) -> None:
    """Replaces the first of each pair by the second wherever a module of Automodel refers to it."""
    new = {id(old): new for old, new in pairs}
    for name, module in list(sys.modules.items()):
        if new and name.partition(".")[0] == "nemo_automodel":
            for key, value in list(vars(module).items()):
                if id(value) in new:
                    setattr(module, key, new[id(value)])


def _v4_gate(gate: Callable[..., bool], has_tilelang: bool) -> Callable[..., bool]:
    """The function by which DeepSeek-V4 decides whether to run a kernel.

    Attention is winnow's wherever winnow can run, of any dtype, also on the CPU. Of the others
    Automodel decides, except that its torch path runs where its own kernels cannot.
    """

    def _should_use_tilelang(
        backend: str,
        *,
        available: bool,
        kernel_name: str,
        tensors: tuple[Tensor, ...],
        require_bf16: bool = False,
    ) -> bool:
        if backend in ("torch", "sparse_torch"):
            return False
        if kernel_name == "sparse attention":
            return automodel_glm.should_use_tilelang(backend, True, kernel_name, tensors)
        return gate(
            "auto",
            available=available and has_tilelang,
            kernel_name=kernel_name,
            tensors=tensors,
            require_bf16=require_bf16,
        )

    return _should_use_tilelang
