# SPDX-License-Identifier: Apache-2.0
"""The backward of an autograd Function that has no second derivative."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._C import _functions
from torch.autograd import function

Gradients = tuple[Tensor | None, ...]
_REFUSAL = (
    b"winnow has no second derivatives: trying to differentiate twice a function that was marked"
    b" with @once_differentiable"
)


def once_differentiable(backward: Callable[..., Gradients]) -> Callable[..., Gradients]:
    """torch's decorator of this name, for a backward that returns a tuple, which refuses second
    derivatives here in every case.

    torch's own does so only if an incoming gradient requires a gradient. That of `out.sum()` does
    not, and a gradient penalty or torch.autograd.functional.hessian would silently be 0.
    """
    once = function.once_differentiable(backward)

    @functools.wraps(backward)
    def refusing(ctx: Any, *gradients: Tensor | None) -> Gradients:
        if not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return once(ctx, *gradients)  # what AOTAutograd compiles is refused by itself
        ctx = _UnpackedOnce(ctx)
        with torch.no_grad():
            results = backward(ctx, *gradients)
        given = (*gradients, *ctx.saved_tensors)
        # Edges to these, since torch.autograd.grad runs only what lies on the way to its inputs.
        sources = [x for x in given if x is not None and x.requires_grad]
        leaves: list[Any] = [None if x is None else x.detach().requires_grad_() for x in results]
        # One output more than there may be, since of one alone it makes no tuple.
        error: Any = _functions.DelayedError(_REFUSAL, len(leaves) + len(sources) + 1)
        return error(*leaves, *sources, None)[: len(leaves)]

    return refusing


class _UnpackedOnce:
    """A context whose saved tensors are unpacked once, as torch.utils.checkpoint demands."""

    def __init__(self, ctx: Any) -> None:
        self._ctx = ctx

    @functools.cached_property
    def saved_tensors(self) -> Gradients:
        return self._ctx.saved_tensors

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ctx, name)
