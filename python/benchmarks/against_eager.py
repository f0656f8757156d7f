# SPDX-License-Identifier: Apache-2.0
"""The cpu backend against eager PyTorch on the CPU, doing the same work on the same threads.

    PYTHONPATH=python .venv/bin/python python/benchmarks/against_eager.py [--json FILE]

Eager PyTorch gathers the keys of some rows, multiplies, takes the softmax and multiplies again, or
scores all keys of some rows and takes the top k; autograd does the rest. Inputs are bf16, softmax,
sums over heads and the sum of d_kv are fp32. How many rows at a time it takes is tried out, and its
best counts. Both run in turns; times are medians. Exit code 1: results do not agree.

Where the CPU has BF16 dot instructions both multiply with them, PyTorch with denormals flushed to
zero. --without-bf16-instructions keeps both from them, as on a CPU that has none.
"""

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from origin import origin
from torch import Tensor

from winnow import _lib

CHUNKS = (1, 2, 4, 8, 16, 32, 64)
MOST_CHUNK_BYTES = 2 << 30  # of the largest tensor that eager PyTorch makes
LARGEST_ERROR = 2e-2  # relative, of two results that both round to bf16 on their way
LEAST_OVERLAP = 0.97  # of two selections, by scores of which one has been rounded to bf16


def chunks(rows: int, size: int) -> Iterator[slice]:
    return (slice(first, min(first + size, rows)) for first in range(0, rows, size))


def relative_error(actual: Tensor, expected: Tensor) -> float:
    difference = actual.double() - expected.double()
    return float(difference.norm() / expected.double().norm())


class Attention:
    """Sparse attention over random lists of different keys."""

    def __init__(self, rows: int, keys: int, heads: int, qk_dim: int, v_dim: int, topk: int,
                 sink: bool) -> None:  # fmt: skip
        self.rows, self.keys, self.v_dim = rows, keys, v_dim
        self.scale = qk_dim**-0.5
        self.q = torch.randn(rows, heads, qk_dim, dtype=torch.bfloat16)
        self.kv = torch.randn(keys, qk_dim, dtype=torch.bfloat16)
        self.d_out = torch.randn(rows, heads, v_dim, dtype=torch.bfloat16)
        self.sink = torch.randn(heads) if sink else None
        lists = [torch.randperm(keys)[:topk].sort().values for _ in range(rows)]
        self.indices = torch.stack(lists).to(torch.int32)
        self.row_bytes = topk * qk_dim * 2

    def eager_rows(self, q: Tensor, kv: Tensor, indices: Tensor) -> Tensor:
        rows, topk = indices.shape
        gathered = kv.index_select(0, indices.flatten()).view(rows, topk, -1)
        scores = torch.matmul(q, gathered.transpose(1, 2)).float() * self.scale
        if self.sink is not None:
            sink = self.sink[:, None].expand(rows, -1, 1)
            p = torch.cat([scores, sink], dim=-1).softmax(-1)[..., :-1]
        else:
            p = scores.softmax(-1)
        return torch.matmul(p.to(torch.bfloat16), gathered[..., : self.v_dim])

    def eager_forward(self, size: int) -> list[Tensor]:
        with torch.no_grad():
            parts = chunks(self.rows, size)
            out = [self.eager_rows(self.q[c], self.kv, self.indices[c]) for c in parts]
        return [torch.cat(out)]

    def eager_both(self, size: int) -> list[Tensor]:
        out, d_q = [], []
        d_kv = torch.zeros(self.kv.shape)
        for c in chunks(self.rows, size):
            q, kv = self.q[c].detach().requires_grad_(), self.kv.detach().requires_grad_()
            out.append(self.eager_rows(q, kv, self.indices[c]))
            out[-1].backward(self.d_out[c])
            out[-1] = out[-1].detach()
            d_q.append(q.grad)
            d_kv += kv.grad
        return [torch.cat(out), torch.cat(d_q), d_kv]

    def winnow_forward(self, execution: bytes) -> list[Tensor]:
        self.out = torch.empty_like(self.d_out)
        self.lse = torch.empty(self.q.shape[:2])
        self.inputs = {"q": self.q, "kv": self.kv, "indices": self.indices, "sink": self.sink}
        self.inputs["scale"] = self.scale
        outputs = {"out": self.out, "lse": self.lse}
        _lib.run("sparse_attention_forward", execution, **self.inputs, **outputs)
        return [self.out]

    def winnow_both(self, execution: bytes) -> list[Tensor]:
        self.winnow_forward(execution)
        d_q, d_kv = torch.empty_like(self.q), torch.zeros(self.kv.shape)
        given = {"out": self.out, "lse": self.lse, "d_out": self.d_out}
        outputs = {"d_q": d_q, "d_kv": d_kv}
        _lib.run("sparse_attention_backward", execution, **self.inputs, **given, **outputs)
        return [self.out, d_q, d_kv]

    @staticmethod
    def agreement(ours: list[Tensor], theirs: list[Tensor]) -> tuple[bool, str]:
        errors = [relative_error(a, b) for a, b in zip(ours, theirs, strict=True)]
        text = "error " + " ".join(f"{error:.1e}" for error in errors)
        return max(errors) <= LARGEST_ERROR, text


class Indexer:
    """Selection by the last rows of one document."""

    def __init__(self, rows: int, keys: int, heads: int, dim: int, topk: int) -> None:
        self.rows, self.topk = rows, topk
        self.q = torch.randn(rows, heads, dim, dtype=torch.bfloat16)
        self.k = torch.randn(keys, dim, dtype=torch.bfloat16)
        self.weights = torch.randn(rows, heads) * (heads * dim) ** -0.5
        self.begin = torch.zeros(rows, dtype=torch.int32)
        self.end = torch.arange(keys - rows + 1, keys + 1, dtype=torch.int32)
        self.row_bytes = heads * keys * 4

    def eager(self, size: int) -> list[Tensor]:
        indices, scores = [], []
        positions = torch.arange(len(self.k))
        with torch.no_grad():
            for c in chunks(self.rows, size):
                products = torch.matmul(self.q[c], self.k.T).relu_()
                row_scores = torch.bmm(self.weights[c, None], products.float())[:, 0]
                row_scores.masked_fill_(positions >= self.end[c, None], -torch.inf)
                best = row_scores.topk(self.topk, sorted=False)
                indices.append(best.indices)
                scores.append(best.values)
        return [torch.cat(indices), torch.cat(scores)]

    def winnow(self, execution: bytes) -> list[Tensor]:
        indices = torch.empty(self.rows, self.topk, dtype=torch.int32)
        scores = torch.empty(self.rows, self.topk)
        inputs = {"q": self.q, "k": self.k, "weights": self.weights}
        inputs |= {"begin": self.begin, "end": self.end}
        _lib.run("index_topk_forward", execution, **inputs, indices=indices, scores=scores)
        return [indices, scores]

    def agreement(self, ours: list[Tensor], theirs: list[Tensor]) -> tuple[bool, str]:
        chosen = torch.zeros(2, self.rows, len(self.k))
        for dense, (indices, scores) in zip(chosen, (ours, theirs), strict=True):
            dense.scatter_(1, indices.long(), scores)
        both = (chosen != 0).all(0)
        overlap = float(both.sum()) / (self.rows * self.topk)
        error = relative_error(chosen[0][both], chosen[1][both])
        text = f"{overlap:.1%} of keys the same, error {error:.1e}"
        return overlap >= LEAST_OVERLAP and error <= LARGEST_ERROR, text


@dataclass
class Race:
    name: str
    work: Attention | Indexer
    ours: Callable[[bytes], list[Tensor]]
    theirs: Callable[[int], list[Tensor]]
    wanted: float  # times faster


def races(rows: int) -> Iterator[Race]:
    """One after another: each takes its memory alone."""
    geometries = {
        "glm-5.2": (8192, 64, 576, 512, 2048, False),
        "deepseek-v4-flash": (8192, 64, 512, 512, 640, True),
    }
    for name, geometry in geometries.items():
        work = Attention(rows, *geometry)
        ours, theirs = work.winnow_forward, work.eager_forward
        yield Race(f"attention forward, {name}", work, ours, theirs, 3.2)
        ours, theirs = work.winnow_both, work.eager_both
        yield Race(f"attention forward + backward, {name}", work, ours, theirs, 3.0)
    for keys in (4096, 32768):
        work = Indexer(rows, keys, 32, 128, 2048)
        yield Race(f"indexer, {keys} keys", work, work.winnow, work.eager, 4.0)


def seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rows", type=int, default=128, help="query rows")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--without-bf16-instructions", action="store_true")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures")
    options = parser.parse_args()
    if options.without_bf16_instructions:  # oneDNN reads it before its first product
        os.environ["ONEDNN_MAX_CPU_ISA"] = "AVX512_CORE_VNNI"
    torch.manual_seed(1)
    torch.set_num_threads(options.threads)
    kernel = "simd" if options.without_bf16_instructions else ""
    execution = _lib.execution(backend="cpu", kernel=kernel, threads=options.threads)
    without = ", without BF16 instructions" if options.without_bf16_instructions else ""
    print(f"PyTorch {torch.__version__}{without}; winnow {_lib.backends()['cpu']}")
    print(f"{options.rows} query rows, bf16, {options.threads} threads, medians of", options.repeat)
    print()
    print(f"{'':47} {'winnow':>9} {'eager':>9} {'rows':>5} {'faster':>7} {'wanted':>7}  agreement")
    all_agree = True
    results = []
    for race in races(options.rows):
        sizes = [n for n in CHUNKS if n == 1 or n * race.work.row_bytes <= MOST_CHUNK_BYTES]
        race.theirs(sizes[0])  # warms up
        size = min(sizes, key=lambda n: seconds(lambda: race.theirs(n)))  # noqa: B023
        agree, text = race.work.agreement(race.ours(execution), race.theirs(size))
        all_agree = all_agree and agree
        samples = [
            (seconds(lambda: race.ours(execution)), seconds(lambda: race.theirs(size)))  # noqa: B023
            for _ in range(options.repeat)
        ]
        columns = dict(zip(("winnow", "eager PyTorch"), zip(*samples, strict=True), strict=True))
        kinds = {"ms": statistics.median, "fastest_ms": min, "slowest_ms": max}
        figures = {
            kind: {who: function(column) * 1e3 for who, column in columns.items()}
            for kind, function in kinds.items()
        }
        results.append({"race": race.name} | figures)
        ours, theirs = (each * 1e-3 for each in figures["ms"].values())
        print(
            f"{race.name:47} {ours * 1e3:6.0f} ms {theirs * 1e3:6.0f} ms {size:5}"
            f" {theirs / ours:6.2f}x {race.wanted:6.1f}x  {'' if agree else 'DISAGREE, '}{text}",
            flush=True,
        )
    if options.json is not None:
        versions = {"torch": torch.__version__ + without}
        figures = origin(_lib.backends()["cpu"]) | {"versions": versions, "results": results}
        options.json.write_text(json.dumps(figures, indent=1) + "\n")
    return 0 if all_agree else 1


if __name__ == "__main__":
    sys.exit(main())
