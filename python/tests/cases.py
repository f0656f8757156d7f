# SPDX-License-Identifier: Apache-2.0
"""Shared by the tests: inputs, strategies for random shapes, and comparisons."""

import math
from typing import Any, NamedTuple

import torch
from hypothesis import strategies as st
from torch import Tensor

import winnow

f64, f32, bf16, f16 = torch.float64, torch.float32, torch.bfloat16, torch.float16
f8 = torch.float8_e4m3fn
LOW = (bf16, f16, f32)

# Relative error against the oracle on the same rounded inputs.
OUT_LIMIT = {bf16: 4e-3, f16: 4e-3, f32: 1e-5, f64: 1e-10}
GRAD_LIMIT = {bf16: 1e-2, f16: 1e-2, f32: 1e-5, f64: 1e-10}

SCALE = 0.3125  # exact in fp32

seeds = st.integers(0, 2**31 - 1)
heads = st.integers(1, 3)
dims = st.sampled_from([8, 16, 24])
topks = st.sampled_from([1, 2, 5, 12])


class Random:
    """Reproducible tensors."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int, dtype: torch.dtype = f64) -> Tensor:
        return torch.randn(shape, generator=self.generator, dtype=f64).to(dtype)

    def integers(
        self, low: int, high: int, *shape: int, dtype: torch.dtype = torch.int32
    ) -> Tensor:
        """Random integers from low to high, inclusive."""
        return torch.randint(low, high + 1, shape, generator=self.generator).to(dtype)

    def lists(self, tokens: int, topk: int, keys: int) -> Tensor:
        """Index lists with gaps, duplicates, invalid indices, and some rows without keys."""
        indices = self.integers(-2, keys + 1, tokens, topk)
        empty = self.integers(0, 4, tokens, 1) == 0
        return torch.where(empty, -1, indices).int()


class Packing(NamedTuple):
    cu_seqlens: Tensor
    cu_seqlens_padded: Tensor | None
    tokens: int  # including rows after the last document

    @property
    def options(self) -> dict[str, Any]:
        return {"cu_seqlens_padded": self.cu_seqlens_padded}


@st.composite
def packings(draw, least_tokens: int = 0) -> Packing:
    """Random documents, some empty, some with padding, and rows after the last one."""
    real = draw(st.lists(st.integers(0, 9), max_size=4))
    padded = draw(st.booleans())
    slots = [n + draw(st.integers(0, 3)) if padded else n for n in real]
    tokens = max(sum(slots) + draw(st.integers(0, 2)), least_tokens)
    return Packing(offsets(real), offsets(slots) if padded else None, tokens)


def offsets(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def oracle_inputs(*tensors: Tensor | None) -> list[Tensor | None]:
    """The same values in float64, as leaves for autograd."""
    return [None if x is None else x.detach().to(f64).requires_grad_() for x in tensors]


def gradients(outputs: list[tuple[Tensor, Tensor]], inputs: list[Tensor]) -> list[Tensor]:
    """d sum(output * its gradient) / d inputs, by autograd; zeros for inputs without a gradient."""
    total = sum((x.double() * d.double()).sum() for x, d in outputs)
    return list(torch.autograd.grad(total, inputs, allow_unused=True, materialize_grads=True))


def assert_equal(actual: Tensor, expected: Tensor) -> None:
    """Asserts equal dtypes and values; NaN equals NaN."""
    if actual.dtype == f8:
        actual, expected = actual.view(torch.uint8), expected.view(torch.uint8)
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


def assert_near(actual: Tensor, expected: Tensor, limit: float = 1e-10) -> None:
    """Asserts that every element is within the limit; infinities must be in the same places."""
    torch.testing.assert_close(actual.to(f64), expected.detach(), rtol=limit, atol=limit)


def assert_within(actual: Tensor, expected: Tensor, limit: float) -> None:
    """Asserts a limit on the relative error in the 2-norm."""
    error = (actual.to(f64) - expected).norm().item()
    norm = expected.norm().item()
    assert error <= limit * norm, f"relative error {error / norm if norm else error}"


def assert_rounded(actual: Tensor, sums: Tensor) -> None:
    """Asserts that `actual` is the sums, which are rounded to fp32 themselves, rounded once."""
    kind = torch.finfo(actual.dtype)
    error = (actual.to(f64) - sums.to(f64)).abs()
    assert (error <= sums.abs().to(f64) * (kind.eps / 2 * 1.001) + kind.tiny).all()


def make_sink(random: Random, kind, n: int, dtype=f64):
    if kind is None or kind == "normal":
        return None if kind is None else random.normal(n, dtype=dtype)
    return torch.full((n,), kind, dtype=dtype)


def leaves(*tensors):
    return [None if x is None else x.clone().requires_grad_() for x in tensors]


def backward(outputs, d_outputs, inputs):
    """Gradients of inputs: zeros if the output does not depend on one, None for absent ones."""
    present = [x for x in inputs if x is not None]
    found = iter(
        torch.autograd.grad(outputs, present, d_outputs, allow_unused=True, materialize_grads=True)
    )
    return [None if x is None else next(found) for x in inputs]


def finite(lse):
    return torch.where(lse > -math.inf, lse, 0)


@st.composite
def indexers(draw):
    """A packing and the indexer's q, k and weights for it."""
    packing = draw(packings())
    random = Random(draw(seeds))
    tokens, n, dim = packing.tokens, draw(heads), draw(dims)
    keys = tokens + draw(st.integers(0, 2))
    tensors = random.normal(tokens, n, dim), random.normal(keys, dim), random.normal(tokens, n)
    made = winnow.Packing(packing.cu_seqlens, tokens=tokens, **packing.options)
    return random, made, tensors
