# SPDX-License-Identifier: Apache-2.0
"""The context-parallel helpers of Automodel's layers, implemented with winnow.

Before attention the keys of all ranks are gathered; winnow.automodel_batch shards the batch.
winnow.automodel exports these functions.
"""

import atexit
import math
from functools import lru_cache

import torch
import torch.distributed as dist
from torch import Tensor

from winnow.keys import Keys
from winnow.parallel import Layout, Ranks, check_group


def glm_dsa_cp_enabled(cp_group) -> bool:
    """Whether the group has more than one rank."""
    return _is_distributed(cp_group) and dist.get_world_size(cp_group) > 1


def _is_distributed(cp_group) -> bool:
    return cp_group is not None and dist.is_available() and dist.is_initialized()


def glm_dsa_cp_all_gather(tensor: Tensor, dim: int, cp_group) -> Tensor:
    """Concatenates the shards of all ranks along `dim`; returns the tensor itself with one rank.

    Differentiable: the gradients of all ranks are summed in fp32 and rounded once.
    """
    if _is_distributed(cp_group):
        check_group("glm_dsa_cp_all_gather", "cp_group", cp_group)
    if not glm_dsa_cp_enabled(cp_group):
        return tensor
    part = tensor.movedim(dim, 0)
    layout = _even_layout(cp_group, len(part), part.device)
    gradient = "with" if torch.is_grad_enabled() and tensor.requires_grad else "without"
    signature = f"tensor {tensor.dtype} {list(tensor.shape)}, dim {dim}, {gradient} gradient"
    layout.ranks.agree_on_keys(layout.function, part.device, signature, "")
    return Keys(part, layout).whole.movedim(0, dim)


@lru_cache(maxsize=16)  # all layers of a model use the same ones
def _even_layout(cp_group, rows: int, device: torch.device) -> Layout:
    """The layout in which every rank has `rows` rows."""
    ranks = Ranks(cp_group)
    begins = range(0, rows * ranks.size, rows) if rows else [0] * ranks.size
    parts = [torch.arange(begin, begin + rows, device="cpu") for begin in begins]
    return Layout(ranks, parts, device, "glm_dsa_cp_all_gather")


# Cached layouts hold a process group, which must not outlive the interpreter.
atexit.register(_even_layout.cache_clear)


def dsv4_cp_local_seq_multiple(model_or_config) -> int:
    """The multiple that the rows of a DeepSeek-V4 rank must be, so that no pool is split.

    Pools of ratio 4 overlap with their neighbours, so they count in pairs. 128 for the published
    models.

    Args:
        model_or_config: has `compress_ratios`, or a `config` that has them; 0 means no pools.
    """
    config = getattr(model_or_config, "config", model_or_config)
    ratios = (int(ratio) for ratio in getattr(config, "compress_ratios", None) or ())
    return math.lcm(*(2 * ratio if ratio == 4 else ratio for ratio in ratios if ratio > 0))
