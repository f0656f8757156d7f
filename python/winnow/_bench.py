# SPDX-License-Identifier: Apache-2.0
"""python -m winnow bench: times of calls through PyTorch, and their host overhead."""

import statistics
import time
import timeit
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from winnow import functional
from winnow.ops import why_not
from winnow.packing import Packing

# The dimensions of GLM-5.2, with fewer heads, rows and keys on a CPU.
_SIZES = {
    "cpu": {"tokens": 1024, "heads": 8, "index_heads": 8, "topk": 256},
    "cuda": {"tokens": 4096, "heads": 64, "index_heads": 32, "topk": 2048},
}
_SCALE = 1 / 16
_SECONDS = 1.0  # per measurement


def _milliseconds(call: Callable[[], object], device: str) -> float:
    """The median time of a call, including synchronisation with the device."""
    times: list[float] = []
    while len(times) < 3 or sum(times) < _SECONDS:
        start = time.perf_counter()
        call()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e3


class _Call(NamedTuple):
    function: Callable[[], Tensor]
    inputs: tuple[Tensor, ...]  # the differentiable ones


class _Batch:
    """One document and inputs of every function."""

    def __init__(self, device: str, backend: str | None) -> None:
        size = _SIZES[device]
        self.tokens, self.heads, self.topk = size["tokens"], size["heads"], size["topk"]
        self.device, self.options = device, {"backend": backend}
        generator = torch.Generator().manual_seed(1)

        def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
            return torch.randn(shape, generator=generator).to(device, dtype).requires_grad_()

        self.q, self.kv = normal(self.tokens, self.heads, 576), normal(self.tokens, 576)
        self.w_v = normal(self.heads, 256, 512)
        self.out = normal(self.tokens, self.heads, 512)
        index_q = normal(self.tokens, size["index_heads"], 128)
        index_k = normal(self.tokens, 128)
        weights = normal(self.tokens, size["index_heads"], dtype=torch.float32)
        self.indexer = (index_q, index_k, weights)
        cu_seqlens = torch.tensor([0, self.tokens], dtype=torch.int32, device=device)
        self.packing = Packing(cu_seqlens, tokens=self.tokens)
        # Index lists as an indexer would return them, for attention and the loss.
        rows = torch.arange(self.tokens)[:, None]
        slots = torch.rand(self.tokens, self.topk, generator=generator)
        self.indices = (slots * (rows + 1)).int().sort(1).values.to(device)


_CALLS: dict[str, Callable[[_Batch], _Call]] = {}  # in the order in which they are measured


def _measured(make: Callable[[_Batch], _Call]) -> Callable[[_Batch], _Call]:
    _CALLS[make.__name__] = make
    return make


@_measured
def index_topk(x: _Batch) -> _Call:
    def call() -> Tensor:
        return functional.index_topk(*x.indexer, x.packing, topk=x.topk, **x.options).scores

    return _Call(call, x.indexer)


@_measured
def sparse_attention(x: _Batch) -> _Call:
    def call() -> Tensor:
        return functional.sparse_attention(
            x.q, x.kv, x.indices, v_dim=512, scale=_SCALE, **x.options
        ).out

    return _Call(call, (x.q, x.kv))


@_measured
def value_projection(x: _Batch) -> _Call:
    return _Call(lambda: functional.value_projection(x.out, x.w_v, **x.options), (x.out, x.w_v))


@_measured
def index_loss(x: _Batch) -> _Call:
    def call() -> Tensor:
        selection = functional.index_topk(*x.indexer, x.packing, indices=x.indices, **x.options)
        lse = torch.zeros(x.tokens, x.heads, device=x.device)
        return functional.index_loss(selection, x.q, x.kv, lse, scale=_SCALE, **x.options)

    return _Call(call, x.indexer)


@_measured
def dense_index_loss(x: _Batch) -> _Call:
    def call() -> Tensor:
        return functional.dense_index_loss(
            x.q, x.kv, *x.indexer, x.packing, scale=_SCALE, **x.options
        )

    return _Call(call, x.indexer)


def _overhead() -> None:
    """Times calls with zero rows: six tensors, four of them present, and no work."""
    q, kv = torch.zeros(0, 2, 16), torch.zeros(4, 16)
    indices, lengths = torch.zeros(0, 4, dtype=torch.int32), torch.zeros(0, dtype=torch.int32)
    operator = torch.ops.winnow.sparse_attention_forward

    def fastest(call: Callable[[], object]) -> float:
        """The minimum over many short runs, to exclude other load on the machine."""
        return min(timeit.repeat(call, number=100, repeat=int(200 * _SECONDS))) / 100 * 1e6

    ops = fastest(lambda: operator(q, kv, indices, lengths, None, 16, 0.25))
    print(f"{'host, torch.ops':18} {ops:9.1f} us a call")
    q.requires_grad_()
    function = fastest(lambda: functional.sparse_attention(q, kv, indices, lengths=lengths))
    print(f"{'host, function':18} {function:9.1f} us a call, with its autograd node")


NAMES = (*_CALLS, "overhead")


def run(names: list[str], device: str, backend: str | None) -> None:
    """Prints one line per function."""
    size = _SIZES[device]
    if set(names) != {"overhead"}:
        print(f"{device}, bf16, {', '.join(f'{count} {name}' for name, count in size.items())}")
        batch = _Batch(device, backend)
    for name in names:
        if name == "overhead":
            _overhead()
            continue
        function, inputs = _CALLS[name](batch)
        if reason := why_not(function):
            print(f"{name:18} not here: {reason}")
            continue
        forward = f"{name:18} {_milliseconds(function, device):9.2f} ms forward"
        if reason := why_not(lambda *_, function=function: function(), *inputs):
            print(f"{forward}, backward not here: {reason}")
            continue
        result = function()
        d_result = torch.ones_like(result)

        def backward(result=result, inputs=inputs, d_result=d_result) -> object:
            return torch.autograd.grad(result, inputs, d_result, retain_graph=True)

        print(f"{forward} {_milliseconds(backward, device):9.2f} ms backward")
