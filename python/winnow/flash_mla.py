# SPDX-License-Identifier: Apache-2.0
"""The sparse prefill of FlashMLA, with its name and conventions, implemented with winnow.

    winnow.flash_mla.install()

lets other libraries import it as `flash_mla` where FlashMLA itself is not installed.
"""

import importlib.util
import math
import re
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from winnow._arguments import check_size, number, one_head, optional_tensor, tensor
from winnow.functional import sparse_attention

_NAME = "flash_mla_sparse_fwd"
_ITS_WORDS = {  # for those of winnow
    "sink": "attn_sink",
    "lengths": "topk_length",
    "scale": "sm_scale",
    "tokens": "s_q",
    "heads": "h_q",
    "qk_dim": "d_qk",
    "v_dim": "d_v",
}
_installed: dict[str, ModuleType] = {}


def flash_mla_sparse_fwd(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    sm_scale: float,
    d_v: int = 512,
    attn_sink: Tensor | None = None,
    topk_length: Tensor | None = None,
    indexer_topk: int = 0,
    out: Tensor | None = None,
    **unknown: Any,
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
        indexer_topk: must be 0: there is no lse of the first slots alone.
        out: [s_q, h_q, d_v], as q: where to write the output, which is returned.
        unknown: arguments of other versions of FlashMLA are refused by name.

    Returns:
        out [s_q, h_q, d_v] as q, max_logits [s_q, h_q] fp32 and lse [s_q, h_q] fp32, natural log,
        without the sink. A row without keys has 0, -inf and +inf. out and lse are differentiable.
    """
    if unknown:
        raise TypeError(f"{_NAME}: {', '.join(unknown)}: not among the arguments that winnow knows")
    if indexer_topk != 0:
        raise NotImplementedError(f"{_NAME}: indexer_topk {indexer_topk}: must be 0")
    sm_scale = number(_NAME, "sm_scale", sm_scale)
    if sm_scale == 0:
        raise ValueError(f"{_NAME}: sm_scale {sm_scale}: must not be 0")
    check_size(_NAME, "d_v", d_v, 1)
    q, kv, indices = (
        tensor(_NAME, name, x) for name, x in (("q", q), ("kv", kv), ("indices", indices))
    )
    attn_sink, topk_length, out = (
        optional_tensor(_NAME, name, x)
        for name, x in (("attn_sink", attn_sink), ("topk_length", topk_length), ("out", out))
    )
    if q.dim() != 3:
        raise ValueError(f"{_NAME}: q {list(q.shape)}: must be [s_q, h_q, d_qk]")
    for name, x in (("indices", indices), ("topk_length", topk_length)):
        if x is not None and x.dtype != torch.int32:
            raise ValueError(f"{_NAME}: {name} has dtype {x.dtype}: must be int32")
    if d_v > q.shape[-1]:
        raise ValueError(f"{_NAME}: d_v {d_v}: must be at most {q.shape[-1]}, the channels of q")
    shape = (*q.shape[:-1], d_v)
    if out is not None and (out.shape != shape or out.dtype != q.dtype or out.device != q.device):
        raise ValueError(
            f"{_NAME}: out {list(out.shape)} of {out.dtype} on {out.device}: must be {list(shape)}"
            f" of {q.dtype} on {q.device}"
        )
    kv, indices = one_head(_NAME, "kv", kv), one_head(_NAME, "indices", indices)
    try:
        result, lse, max_logits = sparse_attention(
            q,
            kv,
            indices,
            v_dim=d_v,
            scale=sm_scale,
            sink=attn_sink,
            lengths=topk_length,
            with_max_logits=True,
        )
    except ValueError as error:
        said = re.sub(r"\w+", lambda word: _ITS_WORDS.get(word[0], word[0]), str(error))
        raise ValueError(f"{_NAME}: {said.partition(': ')[2]}") from None
    if out is not None:
        result = out.copy_(result)
    assert max_logits is not None  # as asked for
    return result, max_logits, torch.where(lse == -math.inf, math.inf, lse)


def install() -> bool:
    """Puts this function into sys.modules as `flash_mla`, where no package of that name is.

    Returns whether it is there; False means that there is such a package, which is left alone.
    """
    if _installed:
        return True
    if (
        sys.modules.get("flash_mla") is not None
        or importlib.util.find_spec("flash_mla") is not None
    ):
        return False
    for name in ("flash_mla", "flash_mla.flash_mla_interface"):
        module = ModuleType(name, "FlashMLA's sparse prefill, served by winnow.flash_mla.")
        # With a spec and a path the module is a package to find_spec and to import.
        module.__spec__, module.__path__ = ModuleSpec(name, None, is_package=True), []
        vars(module)["flash_mla_sparse_fwd"] = flash_mla_sparse_fwd
        _installed[name] = module
    vars(_installed["flash_mla"])["flash_mla_interface"] = _installed[
        "flash_mla.flash_mla_interface"
    ]
    sys.modules.update(_installed)
    return True


def uninstall() -> None:
    """Takes back what install did."""
    for name, module in _installed.items():
        if sys.modules.get(name) is module:
            del sys.modules[name]
    _installed.clear()
