# SPDX-License-Identifier: Apache-2.0
"""gather_keys: gathers the keys of all ranks, and reduces their gradients in backward."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from winnow._arguments import Array, tensor
from winnow.packing import Packing
from winnow.parallel import Layout
from winnow.shards import Ratios, ratios_of


class Gathering(NamedTuple):
    """How the backward of an operator handles gathered keys."""

    layout: Layout
    again: bool  # save only the keys of this rank, and gather again in backward

    def to_keep(self, local: Tensor, whole: Tensor) -> Tensor:
        """Which of the two tensors to save for backward."""
        return local if self.again else whole

    def whole(self, kept: Tensor) -> Tensor:
        return self.layout.gather(kept).wait() if self.again else kept

    def local_gradient(self, d_whole: Tensor, dtype: torch.dtype) -> Tensor:
        """Sums over ranks in the accumulation type and rounds once."""
        return self.layout.sum_to_parts(d_whole).to(dtype)


class Keys:
    """Keys that are sharded over ranks; created by gather_keys.

    The operators accept it in place of a tensor of keys, and their gradients flow to `local`.
    """

    def __init__(self, local: Tensor, layout: Layout | None, regather: bool = False) -> None:
        self.local = local  # [rows of this rank, ...]
        self.gathering = None if layout is None else Gathering(layout, regather)
        self._under_way = None if layout is None else layout.gather(local)
        self._values = local  # until the gather is done

    @property
    def whole(self) -> Tensor:
        """[rows of all ranks, ...] in global order; the first use waits for the gather.

        Differentiable, but autograd rounds this gradient to the dtype of the keys before it is
        summed over ranks; operators that get the Keys object sum unrounded gradients.
        """
        return self.local if self.gathering is None else _Whole.apply(self.local, self)

    @property
    def values(self) -> Tensor:
        """The same as `whole`, without gradients."""
        if self.gathering is None:
            return self.local.detach()
        if self._under_way is not None:
            self._values, self._under_way = self._under_way.wait(), None
        return self._values


class _Whole(torch.autograd.Function):
    @staticmethod
    def forward(ctx, local, keys) -> Tensor:
        ctx.gathering = keys.gathering
        return keys.values.view_as(keys.values)

    @staticmethod
    @once_differentiable
    def backward(ctx, d_whole):
        wide = d_whole if d_whole.dtype == torch.float64 else d_whole.float()
        return ctx.gathering.local_gradient(wide, d_whole.dtype), None


def gather_keys(x: Array, packing: Packing, *, ratio: Ratios = 1, regather: bool = False) -> Keys:
    """Starts to gather the keys of all ranks, and returns at once.

    Work that does not need the keys, such as the query side of a layer, overlaps with the gather
    until an operator uses the Keys. Until then x is being read: do not write to it. All ranks of
    the group must call this in the same order. Without a group, or with one rank, nothing is copied
    and `whole` is `local`.

    Args:
        x: [rows of this rank, ...], in the order of packing.rows: keys, or their scales.
        packing: defines which rows this rank has.
        ratio: x holds pools of this many rows, in the order of packing.pool_rows(ratio). With
            (1, r) it holds rows followed by pools: `whole` is [rows | pools] of DeepSeek-V4.
        regather: save only the keys of this rank for backward, and gather the others again there:
            less memory, one more collective.
    """
    x = tensor("gather_keys", "x", x)
    if not isinstance(packing, Packing):
        raise TypeError(f"gather_keys: packing is a {type(packing).__name__}: must be a Packing")
    ratios = ratios_of("gather_keys", ratio)
    if not torch.is_grad_enabled():
        x = x.detach()  # so that an operator called later, with gradients enabled, finds none
    layout = packing.layout(ratios)
    wrong_rows = _wrong_rows(x, packing.own_keys(ratios))
    if layout is not None:
        gradient = "with" if x.requires_grad else "without"
        width = "".join(f", {n}" for n in x.shape[1:])
        kinds = " and ".join(map(str, ratios))
        signature = f"x {x.dtype} [rows{width}] of ratio {kinds} {gradient} gradient"
        layout.ranks.agree_on_keys(
            layout.function, x.device, signature, _mistake(x, layout) or wrong_rows
        )
    elif wrong_rows:
        raise ValueError(f"gather_keys: {wrong_rows}")
    return Keys(x, layout, regather)


def _mistake(x: Tensor, layout: Layout) -> str:
    """An error message for where the keys of this rank are; empty if valid."""
    if x.device != layout.device:
        return f"x on {x.device}: must be on {layout.device}, as cu_seqlens"
    if x.device.type not in layout.ranks.backends:
        return f"x on {x.device}: must be on {' or '.join(layout.ranks.backends)}, as the group"
    return ""


def _wrong_rows(x: Tensor, rows: int | None) -> str:
    """Likewise; any number of rows is right where it is not known."""
    if rows is None or (x.dim() and x.shape[0] == rows):
        return ""
    return (
        f"x {list(x.shape)}: must have {rows} rows, those of this rank"
        " (packing.shard takes them from a whole tensor)"
    )
