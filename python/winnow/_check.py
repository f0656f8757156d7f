# SPDX-License-Identifier: Apache-2.0
"""python -m winnow check: compares every function, forward and backward, with torch in fp64."""

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from winnow import functional, reference
from winnow.ops import why_not
from winnow.packing import Packing

# Limits of the relative error in the 2-norm by input type (docs/operators.md).
_LIMITS = {torch.bfloat16: (4e-3, 1e-2), torch.float32: (1e-5, 1e-5)}  # of outputs, of gradients
_EXACT = 0.0
_SCALE = 0.0625


class Comparison(NamedTuple):
    name: str
    actual: Tensor
    expected: Tensor
    limit: float

    @property
    def error(self) -> float:
        """||actual - expected|| / ||expected||; infinite if inf or NaN are in different places."""
        actual, expected = self.actual.detach().cpu().double(), self.expected.detach().double()
        if not torch.equal(actual.isfinite(), expected.isfinite()):
            return math.inf
        actual, expected = (torch.where(x.isfinite(), x, 0) for x in (actual, expected))
        norm = expected.norm().item()
        return (actual - expected).norm().item() / (norm or 1.0)


class Batch:
    """Two packed documents and inputs of every function; `exact` has the same values in fp64."""

    def __init__(self, dtype: torch.dtype, device: str, backend: str | None) -> None:
        self.dtype, self.backend = dtype, backend
        self.limit, self.gradient_limit = _LIMITS[dtype]
        generator = torch.Generator().manual_seed(1)

        def normal(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
            return torch.randn(shape, generator=generator).to(dtype)

        tokens, heads, dim, latent = 96, 4, 576, 512
        cpu = {
            "q": normal(tokens, heads, dim),
            "kv": normal(tokens, dim),
            "sink": normal(heads, dtype=torch.float32),
            "index_q": normal(tokens, 8, 128),
            "index_k": normal(tokens, 128),
            "weights": normal(tokens, 8, dtype=torch.float32),
            "w_v": normal(heads, 64, latent),
            "latent": normal(tokens, heads, latent),
            "d_out": normal(tokens, heads, latent),
            "d_out_v": normal(tokens, heads, 64),
        }
        self.inputs = {name: x.to(device).requires_grad_() for name, x in cpu.items()}
        self.exact = {name: x.double().requires_grad_() for name, x in cpu.items()}
        self.cu_seqlens = torch.tensor([0, 37, tokens - 1], dtype=torch.int32)
        self.packing = Packing(self.cu_seqlens.to(device), tokens=tokens, backend=backend)
        self.windows = reference.key_windows(self.cu_seqlens, tokens)
        dense = reference.index_scores(*self.exact_of("index_q index_k weights"), *self.windows)
        self.indices, self.lengths, _ = reference.index_topk(dense, 24)
        self.chosen = {"indices": self.indices.to(device), "lengths": self.lengths.to(device)}

    def of(self, names: str) -> list[Tensor]:
        return [self.inputs[name] for name in names.split()]

    def exact_of(self, names: str) -> list[Tensor]:
        return [self.exact[name] for name in names.split()]

    def gradients(
        self, names: str, actual: Tensor, expected: Tensor, d_output: str | None = None
    ) -> Iterator[Comparison]:
        """Compares gradients of inputs, from the output gradient `d_output` (default: ones)."""
        d_actual, d_expected = torch.ones_like(actual), torch.ones_like(expected)
        if d_output is not None:
            d_actual, d_expected = self.inputs[d_output], self.exact[d_output]
        found = torch.autograd.grad(actual, self.of(names), d_actual)
        exact = torch.autograd.grad(expected, self.exact_of(names), d_expected)
        for name, a, b in zip(names.split(), found, exact, strict=True):
            yield Comparison(f"d_{name}", a, b, self.gradient_limit)


CHECKS: dict[str, Callable[[Batch], Iterator[Comparison]]] = {}  # in the order of their definitions


def _checked(compare: Callable[[Batch], Iterator[Comparison]]):
    CHECKS[compare.__name__] = compare
    return compare


@_checked
def key_windows(x: Batch) -> Iterator[Comparison]:
    names = ("begin", "end")
    for name, a, b in zip(names, x.packing.windows(), x.windows, strict=True):
        yield Comparison(name, a, b, _EXACT)


@_checked
def window_indices(x: Batch) -> Iterator[Comparison]:
    options = {"window": 16, "ratio": 4, "key_offset": x.packing.tokens}
    indices, lengths = functional.window_indices(x.packing, **options, backend=x.backend)
    expected = reference.window_indices(x.cu_seqlens, x.packing.tokens, indices.shape[1], **options)
    yield Comparison("indices", indices, expected[0], _EXACT)
    yield Comparison("lengths", lengths, expected[1], _EXACT)


@_checked
def index_topk(x: Batch) -> Iterator[Comparison]:
    """Replays the exact selection, since rounding may swap keys whose scores are close."""
    names = "index_q index_k weights"
    selection = functional.index_topk(*x.of(names), x.packing, **x.chosen, backend=x.backend)
    dense = reference.index_scores(*x.exact_of(names), *x.windows)
    expected = reference.index_replay(dense, x.indices, x.lengths)
    yield Comparison("scores", selection.scores, expected, 1e-5)
    finite = [torch.where(s > -math.inf, s, 0) for s in (selection.scores, expected)]
    yield from x.gradients(names, *finite)
    # The scores of its own selection must be as large as those of the exact one.
    own = functional.index_topk(
        *x.of(names), x.packing, topk=x.indices.shape[1], order="by_score", backend=x.backend
    )
    yield Comparison("chosen scores", own.scores, expected.sort(1, descending=True).values, 1e-5)


@_checked
def sparse_attention(x: Batch) -> Iterator[Comparison]:
    for names, v_dim, width in (("q kv", 512, 576), ("q kv sink", 512, 512)):
        q, kv, *sink = x.of(names)
        exact_q, exact_kv, *exact_sink = x.exact_of(names)
        options = {"v_dim": v_dim, "scale": _SCALE}
        out, lse, _ = functional.sparse_attention(
            q[..., :width],
            kv[..., :width],
            x.chosen["indices"],
            sink=sink[0] if sink else None,
            backend=x.backend,
            **options,
        )
        expected_out, expected_lse, _ = reference.sparse_attention(
            exact_q[..., :width],
            exact_kv[..., :width],
            x.indices,
            sink=exact_sink[0] if sink else None,
            **options,
        )
        yield Comparison("out", out, expected_out, x.limit)
        yield Comparison("lse", lse, expected_lse, min(x.limit, 1e-4))
        yield from x.gradients(names, out, expected_out, "d_out")


@_checked
def value_projection(x: Batch) -> Iterator[Comparison]:
    names = "latent w_v"
    actual = functional.value_projection(*x.of(names), backend=x.backend)
    expected = reference.value_projection(*x.exact_of(names))
    yield Comparison("out_v", actual, expected, x.limit)
    yield from x.gradients(names, actual, expected, "d_out_v")


@_checked
def index_loss(x: Batch) -> Iterator[Comparison]:
    names = "index_q index_k weights"
    q, kv = x.of("q kv")
    exact_q, exact_kv = x.exact_of("q kv")
    options = {"scale": _SCALE}
    _, exact_lse, _ = reference.sparse_attention(exact_q, exact_kv, x.indices, v_dim=512, **options)
    selection = functional.index_topk(*x.of(names), x.packing, **x.chosen, backend=x.backend)
    lse = exact_lse.detach().to(x.inputs["weights"])
    actual = functional.index_loss(
        selection, q, kv, lse, reduction="sum", backend=x.backend, **options
    )
    target = reference.index_target(exact_q, exact_kv, x.indices, exact_lse, **options)
    dense = reference.index_scores(*x.exact_of(names), *x.windows)
    scores = reference.index_replay(dense, x.indices, x.lengths)
    expected = reference.index_loss(scores, target, x.indices, x.lengths).sum()
    yield Comparison("loss", actual, expected, 1e-4)
    yield from x.gradients(names, actual, expected)


@_checked
def dense_index_loss(x: Batch) -> Iterator[Comparison]:
    names = "index_q index_k weights"
    options = {"scale": _SCALE, "reduction": "sum", "backend": x.backend}
    inputs = (*x.of(f"q kv {names}"), x.packing)
    actual = functional.dense_index_loss(*inputs, **options)
    rows, lse = reference.dense_index_loss(*x.exact_of(f"q kv {names}"), *x.windows, scale=_SCALE)
    expected = rows.sum()
    yield Comparison("loss", actual, expected, 1e-4)
    yield from x.gradients(names, actual, expected)
    given = functional.dense_index_loss(*inputs, lse=lse.to(x.inputs["weights"]), **options)
    yield Comparison("loss, given lse", given, expected, 1e-4)


@_checked
def quantize_fp8(x: Batch) -> Iterator[Comparison]:
    values, scale = functional.quantize_fp8(x.inputs["kv"], backend=x.backend)
    expected, expected_scale = reference.quantize_fp8(x.exact["kv"])
    yield Comparison("values", values.float(), expected.float(), _EXACT)
    yield Comparison("scale", scale, expected_scale, _EXACT)


def run(names: list[str], device: str, backend: str | None) -> bool:
    """Prints one line per comparison; returns whether all were within their limits."""
    failed = compared = 0
    for dtype in _LIMITS:
        batch = Batch(dtype, device, backend)
        for name in names:
            if reason := why_not(lambda name=name, batch=batch: (*CHECKS[name](batch),)):
                print(f"{name:18} {dtype}: not here: {reason}")
                continue
            for comparison in CHECKS[name](batch):
                error = comparison.error
                ok = error <= comparison.limit
                compared += 1
                failed += not ok
                print(
                    f"{name:18} {str(dtype).removeprefix('torch.'):9} {comparison.name:14} "
                    f"error {error:.1e}  limit {comparison.limit:.1e}  {'ok' if ok else 'FAILED'}"
                )
    print(f"{compared} compared, {failed} failed")
    return not failed
