# SPDX-License-Identifier: Apache-2.0
"""Checks and conversions of arguments that the C++ library does not see; it checks the others."""

import math
from numbers import Integral
from typing import Any, Protocol, SupportsFloat, TypeAlias

import torch
from torch import Tensor


class SupportsDLPack(Protocol):
    """An array of NumPy, CuPy, JAX or another library, on the CPU or a CUDA device."""

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any: ...


Array: TypeAlias = Tensor | SupportsDLPack


def tensor(function: str, name: str, value: Array) -> Tensor:
    """Returns a tensor as it is, or a view of the memory of another array."""
    if isinstance(value, Tensor):
        return value
    if hasattr(value, "__dlpack__"):
        strides = getattr(value, "strides", None)  # of NumPy and CuPy; others have no negative ones
        if isinstance(strides, tuple) and min(strides, default=0) < 0:  # torch would abort
            raise ValueError(
                f"{function}: {name} has strides of {strides} bytes: must not be negative"
            )
        try:
            return torch.from_dlpack(value)
        except BufferError as error:  # of the array's library: another byte order, strings
            raise ValueError(f"{function}: {name} cannot be exchanged: {error}") from None
    raise TypeError(
        f"{function}: {name} is a {type(value).__name__}: must be a tensor, or an array with "
        "__dlpack__"
    )


def optional_tensor(function: str, name: str, value: Array | None) -> Tensor | None:
    return None if value is None else tensor(function, name, value)


_LARGEST = 2**31 - 1  # the library has rows and keys as int32
MOST_TOPK = 2**30  # slots of a row, for the library


def check_size(function: str, name: str, value: int, least: int, most: int = _LARGEST) -> None:
    """Before outputs of that size are allocated."""
    if isinstance(value, Tensor):
        real = value.dtype != torch.bool and not value.is_complex()
        integer = value.numel() == 1 and real and not value.is_floating_point()
    else:
        integer = isinstance(value, (int, torch.SymInt, Integral)) and not isinstance(value, bool)
    if not integer:
        raise TypeError(f"{function}: {name} {value!r}: must be an integer")
    if value < least:
        raise ValueError(f"{function}: {name} {value}: must be at least {least}")
    if value > most:
        raise ValueError(f"{function}: {name} {value}: must be at most {most}")


def check_topk(function: str, topk: int) -> None:
    check_size(function, "topk", topk, 1, MOST_TOPK)


def number(function: str, name: str, value: float) -> float:
    """Returns a number of any type, or the only element of an array, as a number of Python."""
    if type(value) is float or isinstance(value, (torch.SymFloat, torch.SymInt)):
        return value
    kind = type(value).__name__
    if torch.compiler.is_dynamo_compiling():  # the values of arrays are not known
        if isinstance(value, int) and not isinstance(value, bool):
            return value
        raise TypeError(
            f"{function}: {name} is a {kind}: must be a Python number to be traced by torch.compile"
        )
    one = math.prod(getattr(value, "shape", ())) == 1
    if isinstance(value, Tensor) and one and torch.is_grad_enabled() and value.requires_grad:
        raise NotImplementedError(f"{function}: {name} requires gradients: there are none")
    scalar = value.item() if one and hasattr(value, "item") else value
    if not one or isinstance(scalar, bool) or not isinstance(scalar, SupportsFloat):
        raise TypeError(f"{function}: {name} {value!r}: must be a number")
    try:
        return float(scalar)
    except (OverflowError, ValueError):  # an int of 400 digits, a Decimal that is a signalling NaN
        raise ValueError(
            f"{function}: {name} is a {kind} that no float can hold: must be finite"
        ) from None


def check_dtype(function: str, name: str, value: Tensor, other: str, like: Tensor) -> None:
    """Refuses a floating-point dtype beside another; the library refuses all others."""
    if value.dtype != like.dtype and value.is_floating_point() and like.is_floating_point():
        given, allowed = (str(x.dtype).removeprefix("torch.") for x in (value, like))
        raise ValueError(f"{function}: {name} has dtype {given}: must be {allowed}, as {other}")


def check_not_batched(function: str, name: str, value: Tensor, dims: str) -> None:
    if value.dim() == 4:
        raise ValueError(
            f"{function}: {name} {list(value.shape)}: must be [tokens, {dims}], without a batch"
            " dimension: pack the batch into one row of tokens with a Packing of its lengths, or"
            " call once for each slice"
        )


def one_of(function: str, name: str, value: str, words: tuple[str, ...]) -> None:
    if value not in words:
        raise ValueError(f"{function}: {name} {value!r}: must be one of {', '.join(words)}")


def one_head(function: str, name: str, value: Tensor) -> Tensor:
    """Drops the dimension of the one shared head: [rows, 1, width] becomes [rows, width]."""
    if value.dim() != 3 or value.shape[1] != 1:
        raise ValueError(f"{function}: {name} {list(value.shape)}: must be [rows, 1, width]")
    return value[:, 0]
