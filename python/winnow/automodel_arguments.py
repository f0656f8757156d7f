# SPDX-License-Identifier: Apache-2.0
"""Conversions of the tensors that Automodel's layers pass to what winnow's operators take."""

import torch
from torch import Tensor

_FILL = -1000  # pads the offsets of stacked batches
_INT32 = torch.iinfo(torch.int32)


def dense_rows(x: Tensor) -> Tensor:
    """Copies a tensor whose last stride is not 1; the library accepts all other strides."""
    return x if x.stride(-1) == 1 else x.contiguous()


def integers(function: str, name: str, x: Tensor, device: torch.device | None = None) -> Tensor:
    """Converts to int32. Floats are refused: large ones are rounded, so they may be wrong."""
    if x.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"{function}: {name} has dtype {x.dtype}: must be int32 or int64")
    if x.dtype == torch.int64:  # without the bounds 2**32 would become 0, a valid index
        x = x.clamp(_INT32.min, _INT32.max)
    return x.to(device or x.device, torch.int32)


def offsets(function: str, name: str, x: Tensor, device: torch.device | None = None) -> Tensor:
    """int32 offsets in which the fill values at the end are replaced by empty documents.

    Dropping them would need a synchronisation with the device.
    """
    x = integers(function, name, x, device)
    if x.numel() == 0:
        return x  # refused by the library
    is_fill = (x == _FILL).flip(0).cumprod(0).flip(0).bool()
    return torch.where(is_fill, x.max(), x)


def batch_offsets(
    function: str,
    cu_seqlens: Tensor,
    cu_seqlens_padded: Tensor | None,
    device: torch.device,
    tokens: int,
) -> tuple[Tensor, Tensor | None]:
    """The offsets of a batch of `tokens` rows, without and with padding.

    Offsets in host memory that reach past the batch are refused. Those of a device are not read,
    and neither are those that Dynamo traces: the operator ignores what lies past the keys.
    """
    real = offsets(function, "cu_seqlens", cu_seqlens, device)
    padded = None
    if cu_seqlens_padded is not None:
        padded = offsets(function, "cu_seqlens_padded", cu_seqlens_padded, device)
    name, last = ("cu_seqlens", real) if padded is None else ("cu_seqlens_padded", padded)
    if last.is_cpu and last.numel() and not torch.compiler.is_compiling() and last[-1] > tokens:
        raise ValueError(
            f"{function}: {name} ends at {int(last[-1])}: must be at most {tokens}, the tokens of"
            " the batch"
        )
    return real, padded
