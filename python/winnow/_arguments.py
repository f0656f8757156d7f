# SPDX-License-Identifier: Apache-2.0
"""Checks and conversions of arguments that the C++ library does not see; it checks the others."""

from typing import Any, Protocol, TypeAlias

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
        return torch.from_dlpack(value)
    raise TypeError(
        f"{function}: {name} is a {type(value).__name__}: must be a tensor, or an array with "
        "__dlpack__"
    )


def optional_tensor(function: str, name: str, value: Array | None) -> Tensor | None:
    return None if value is None else tensor(function, name, value)


def at_least(function: str, name: str, value: int, least: int) -> None:
    if value < least:
        raise ValueError(f"{function}: {name} {value}: must be at least {least}")


def one_of(function: str, name: str, value: str, words: tuple[str, ...]) -> None:
    if value not in words:
        raise ValueError(f"{function}: {name} {value!r}: must be one of {', '.join(words)}")


def one_head(function: str, name: str, value: Tensor) -> Tensor:
    """Drops the dimension of the one shared head: [rows, 1, width] becomes [rows, width]."""
    if value.dim() != 3 or value.shape[1] != 1:
        raise ValueError(f"{function}: {name} {list(value.shape)}: must be [rows, 1, width]")
    return value[:, 0]
