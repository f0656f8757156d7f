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


def _calls(device: str, backend: str | None) -> dict[str, _Call]:
    size = _SIZES[device]
    tokens, heads = size["tokens"], size["heads"]
    generator = torch.Generator().manual_seed(1)

    def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype).requires_grad_()

    q, kv, w_v = normal(tokens, heads, 576), normal(tokens, 576), normal(heads, 256, 512)
    out = normal(tokens, heads, 512)
    index_q, index_k = normal(tokens, size["index_heads"], 128), normal(tokens, 128)
    weights = normal(tokens, size["index_heads"], dtype=torch.float32)
    packing = Packing(torch.tensor([0, tokens], dtype=torch.int32, device=device), tokens=tokens)
    indexer, options = (index_q, index_k, weights), {"backend": backend}

    def index_topk() -> Tensor:
        return functional.index_topk(*indexer, packing, topk=size["topk"], **options).scores

    # Index lists as an indexer would return them, for attention and the loss.
    rows = torch.arange(tokens)[:, None]
    slots = torch.rand(tokens, size["topk"], generator=generator)
    indices = (slots * (rows + 1)).int().sort(1).values.to(device)

    def sparse_attention() -> Tensor:
        return functional.sparse_attention(q, kv, indices, v_dim=512, scale=_SCALE, **options).out

    def value_projection() -> Tensor:
        return functional.value_projection(out, w_v, **options)

    def index_loss() -> Tensor:
        selection = functional.index_topk(*indexer, packing, indices=indices, **options)
        lse = torch.zeros(tokens, heads, device=device)
        return functional.index_loss(selection, q, kv, lse, scale=_SCALE, **options)

    def dense_index_loss() -> Tensor:
        return functional.dense_index_loss(q, kv, *indexer, packing, scale=_SCALE, **options)

    return {
        "index_topk": _Call(index_topk, indexer),
        "sparse_attention": _Call(sparse_attention, (q, kv)),
        "value_projection": _Call(value_projection, (out, w_v)),
        "index_loss": _Call(index_loss, indexer),
        "dense_index_loss": _Call(dense_index_loss, indexer),
    }


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


NAMES = (
    "index_topk",
    "sparse_attention",
    "value_projection",
    "index_loss",
    "dense_index_loss",
    "overhead",
)


def run(names: list[str], device: str, backend: str | None) -> None:
    """Prints one line per function."""
    size = _SIZES[device]
    if set(names) != {"overhead"}:
        print(f"{device}, bf16, {', '.join(f'{count} {name}' for name, count in size.items())}")
        calls = _calls(device, backend)
    for name in names:
        if name == "overhead":
            _overhead()
            continue
        function, inputs = calls[name]
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
