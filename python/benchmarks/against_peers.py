# SPDX-License-Identifier: Apache-2.0
"""Races winnow with the public kernels that can be imported, on this machine's GPU.

    python python/benchmarks/against_peers.py [--only forward backward index] [--json FILE]

flash_mla (sparse prefill), cudnn (the frontend's DSA: backward, bf16 scores, top-k) and deep_gemm
(fp8 scores): each is left out where its import fails. All contenders of a line get the same
tensors and take turns; ratio is the time of the fastest peer over winnow's. Lists of keys are
"selected", as an indexer over a smooth sequence selects them, or "random"; scores are of
independent keys, or of keys that forget over ten rows. Results are compared: out and gradients by
the norm of their difference, selections by the share of keys in both. Exit code 1: they disagree.
FILE also holds commit, date, device and versions; performance_tables.py makes a table of it.
"""

import argparse
import importlib
import importlib.metadata
import itertools
import json
import math
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import ModuleType

import torch
from origin import origin
from torch import Tensor
from turns import times_ms

import winnow
import winnow.ops

TOKENS = 4096
INDEX_TOPK = 2048
PACKAGES = {"flash_mla": "flash_mla", "cudnn": "nvidia-cudnn-frontend", "deep_gemm": "deep_gemm"}


@dataclass
class Race:
    """Contenders of one line; winnow is the first."""

    name: str
    flops: float
    calls: dict[str, Callable[[], Tensor]] = field(default_factory=dict)
    limit: float = 1e-2  # of the disagreement
    disagreement: Callable[[Tensor, Tensor], float] = lambda a, b: float(
        (a.float() - b.float()).norm() / b.float().norm()
    )


def imported() -> tuple[dict[str, ModuleType], dict[str, str]]:
    """The peers of this machine, and their versions."""
    peers, versions = {}, {}
    for name, package in PACKAGES.items():
        try:
            peers[name] = importlib.import_module(name)
        except Exception as error:  # a broken installation is left out like a missing one
            print(f"{name}: left out, {type(error).__name__}: {error}")
            continue
        try:
            versions[name] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = getattr(peers[name], "__version__", "of unknown version")
        print(f"{name} {versions[name]}")
    return peers, versions


# ---- Inputs.


def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, device="cuda").to(dtype)


def smooth(rows: int, dim: int, memory: int) -> Tensor:
    """[rows, dim] of unit variance that forgets over about `memory` rows."""
    keep = 1 - 1 / memory
    length = min(rows, 10 * memory)
    kernel = keep ** torch.arange(length, device="cuda") * math.sqrt(1 - keep * keep)
    size = 1 << (rows + length).bit_length()
    spectrum = torch.fft.rfft(torch.randn(rows, dim, device="cuda"), n=size, dim=0)
    product = spectrum * torch.fft.rfft(kernel, n=size)[:, None]
    return torch.fft.irfft(product, n=size, dim=0)[:rows].contiguous()


def lists(kind: str, keys: int, topk: int) -> Tensor:
    """[TOKENS, topk] int32, ascending, of the last rows of a document of `keys` rows."""
    if kind == "random":
        chosen = []
        for rows in torch.arange(TOKENS).split((1 << 28) // keys):
            noise = torch.rand(len(rows), keys, device="cuda")
            chosen.append(noise.topk(topk, sorted=False).indices.sort().values)
        return torch.cat(chosen).int()
    x = smooth(keys, 64, 300)
    q = (x[-TOKENS:] + 0.3 * torch.randn_like(x[-TOKENS:]))[:, None].bfloat16()
    weights = torch.ones(TOKENS, 1, device="cuda")
    packing, _ = last_rows(keys)
    return winnow.index_topk(q, x.bfloat16(), weights, packing, topk=topk).indices


def last_rows(keys: int) -> tuple[winnow.Packing, Tensor]:
    """The last rows of a document, and where the keys of each end."""
    rows = torch.arange(keys - TOKENS, keys, dtype=torch.int32, device="cuda")
    document = torch.tensor([0, keys], dtype=torch.int32, device="cuda")
    return winnow.Packing(document, query_rows=rows), rows + 1


# ---- Races.


@dataclass(frozen=True)
class Shape:
    heads: int
    qk_dim: int
    keys: int
    topk: int

    def __str__(self) -> str:
        return f"H {self.heads}, {self.qk_dim}/512, K {self.topk}, {self.keys} keys"

    def pairs(self) -> int:
        """Of a query's head and a key."""
        return TOKENS * self.heads * self.topk

    def inputs(self, kind: str) -> tuple[Tensor, Tensor, Tensor, Tensor | None, float]:
        """q, kv, indices, sink, scale; shapes of DeepSeek-V4 have a sink."""
        sink = normal(self.heads, dtype=torch.float32) if self.qk_dim == 512 else None
        q, kv = normal(TOKENS, self.heads, self.qk_dim), normal(self.keys, self.qk_dim)
        return q, kv, lists(kind, self.keys, self.topk), sink, self.qk_dim**-0.5


FORWARD = [
    Shape(64, 576, 4096, 2048),
    Shape(64, 576, 32768, 2048),
    Shape(64, 576, 131072, 2048),
    Shape(128, 576, 32768, 2048),
    Shape(64, 512, 10240, 512),
    Shape(64, 512, 10240, 640),
    Shape(128, 512, 10240, 1152),
    Shape(128, 512, 32768, 1152),
]
BACKWARD = [
    Shape(64, 576, 8192, 2048),
    Shape(64, 576, 32768, 2048),
    Shape(64, 576, 131072, 2048),
    Shape(128, 576, 8192, 2048),
    Shape(128, 512, 8192, 1152),
    Shape(128, 512, 32768, 1152),
    Shape(64, 512, 8192, 640),
    Shape(64, 512, 32768, 640),
]


def attention_forward(q, kv, indices, sink, scale) -> tuple[Tensor, Tensor]:
    out, lse, _ = torch.ops.winnow.sparse_attention_forward(
        q, kv, indices, None, sink, 512, scale, False
    )
    return out, lse


def winnow_forward(*given) -> Tensor:
    return attention_forward(*given)[0]


def flash_mla_forward(flash_mla: ModuleType, q, kv, indices, sink, scale) -> Tensor:
    return flash_mla.flash_mla_sparse_fwd(q, kv[:, None], indices[:, None], scale, 512, sink)[0]


def forward_races(peers: dict[str, ModuleType]) -> Iterator[Race]:
    for shape, kind in itertools.product(FORWARD, ("selected", "random")):
        given = shape.inputs(kind)
        race = Race(f"forward, {shape}, {kind}", 2 * shape.pairs() * (shape.qk_dim + 512))
        race.calls["winnow"] = partial(winnow_forward, *given)
        if "flash_mla" in peers:
            race.calls["flash_mla"] = partial(flash_mla_forward, peers["flash_mla"], *given)
        yield race


def winnow_backward(out, lse, d_out, q, kv, indices, sink, scale) -> Tensor:
    return torch.ops.winnow.sparse_attention_backward(
        q, kv, indices, None, sink, out, lse, d_out, None, scale, 0, False
    )[1]


def cudnn_backward(cudnn: ModuleType, out, lse, d_out, q, kv, indices, sink, scale) -> Tensor:
    return cudnn.DSA.sparse_attention_backward_wrapper(
        q, kv, out, d_out, lse, sink, indices, softmax_scale=scale
    )["dkv"]


def backward_races(peers: dict[str, ModuleType]) -> Iterator[Race]:
    for shape, kind in itertools.product(BACKWARD, ("selected", "random")):
        inputs = shape.inputs(kind)
        out, lse = attention_forward(*inputs)
        given = (out, lse, normal(*out.shape), *inputs)
        race = Race(f"backward, {shape}, {kind}", 2 * shape.pairs() * (3 * shape.qk_dim + 2 * 512))
        race.calls["winnow"] = partial(winnow_backward, *given)
        if "cudnn" in peers:
            *tensors, sink, scale = given
            if sink is None:  # it demands one
                sink = torch.full((shape.heads,), -math.inf, device="cuda")
            race.calls["cudnn"] = partial(cudnn_backward, peers["cudnn"], *tensors, sink, scale)
        yield race


def unshared(a: Tensor, b: Tensor) -> float:
    """The share of keys that one selection lacks of the other; every 64th row is compared."""
    rows = zip(a[::64].tolist(), b[::64].tolist(), strict=True)
    return 1 - sum(len(set(x) & set(y)) for x, y in rows) / a[::64].numel()


def winnow_index(q, k, weights, packing: winnow.Packing, k_scale: Tensor | None = None) -> Tensor:
    return winnow.index_topk(q, k, weights, packing, topk=INDEX_TOPK, k_scale=k_scale).indices


def cudnn_topk(cudnn: ModuleType, scores: Tensor, end: Tensor) -> Tensor:
    """`scores` is contiguous: others are copied first."""
    return cudnn.DSA.indexer_top_k_wrapper(
        scores, end, INDEX_TOPK, return_val=True, deterministic=True
    )["indices"]


def cudnn_index(cudnn: ModuleType, q, k, weights, first, end) -> Tensor:
    """`first`: the position of the first query."""
    scores = cudnn.DSA.indexer_forward_wrapper(
        q[None], k[None, :, None], weights[None], ratio=1, q_causal_offsets=first
    )["scores"][0]
    return cudnn_topk(cudnn, scores, end)


def deep_gemm_index(peers: dict[str, ModuleType], q, k, k_scale, weights, begin, end) -> Tensor:
    scores = peers["deep_gemm"].fp8_mqa_logits(
        q, (k, k_scale), weights, begin, end, clean_logits=False
    )
    whole_rows = scores.as_strided((len(scores), scores.stride(0)), (scores.stride(0), 1))
    return cudnn_topk(peers["cudnn"], whole_rows, end)


def index_races(peers: dict[str, ModuleType]) -> Iterator[Race]:
    for heads, keys, memory in itertools.product((32, 64), (32768, 131072), (1, 10)):
        packing, end = last_rows(keys)
        k = smooth(keys, 128, memory).bfloat16()
        q, weights = normal(TOKENS, heads, 128), normal(TOKENS, heads, dtype=torch.float32)
        kind = "independent" if memory == 1 else "smooth"
        name = f"{heads} x 128, {keys} keys, {kind}"
        flops = 2 * heads * 128 * float(end.double().sum())
        bf16 = Race(f"scores and top-k, bf16, {name}", flops, disagreement=unshared)
        bf16.calls["winnow"] = partial(winnow_index, q, k, weights, packing)
        if "cudnn" in peers:
            first = end[:1] - 1
            bf16.calls["cudnn"] = partial(cudnn_index, peers["cudnn"], q, k, weights, first, end)
        yield bf16
        fp8 = Race(f"scores and top-k, fp8, {name}", flops, disagreement=unshared)
        q8, k8 = winnow.quantize_fp8(q), winnow.quantize_fp8(k)
        folded = weights * q8.scale
        fp8.calls["winnow"] = partial(winnow_index, q8.values, k8.values, folded, packing, k8.scale)
        if "deep_gemm" in peers and "cudnn" in peers:
            begin = torch.zeros_like(end)
            fp8.calls["deep_gemm + cudnn"] = partial(
                deep_gemm_index, peers, q8.values, k8.values, k8.scale, folded, begin, end
            )
        yield fp8


RACES = {"forward": forward_races, "backward": backward_races, "index": index_races}


def run(race: Race, repeat: int) -> dict:
    ours = race.calls["winnow"]()
    worst = {
        name: race.disagreement(call(), ours)
        for name, call in race.calls.items()
        if name != "winnow"
    }
    times = times_ms(race.calls, repeat)
    taken = {name: statistics.median(each) for name, each in times.items()}
    peers = [ms for name, ms in taken.items() if name != "winnow"]
    return {
        "race": race.name,
        "ms": taken,
        "fastest_ms": {name: min(each) for name, each in times.items()},
        "slowest_ms": {name: max(each) for name, each in times.items()},
        "tflops": {name: race.flops / ms * 1e-9 for name, ms in taken.items()},
        "ratio": min(peers) / taken["winnow"] if peers else None,
        "disagreement": worst,
        "agree": all(value <= race.limit for value in worst.values()),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=RACES, default=list(RACES))
    parser.add_argument("--repeat", type=int, default=15)
    parser.add_argument("--json", type=Path, help="write the results to this file")
    given = parser.parse_args()
    torch.manual_seed(1)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, winnow {winnow.__version__}")
    peers, versions = imported()
    results = []
    raced = origin(torch.cuda.get_device_name()) | {
        "versions": {"torch": torch.__version__, **versions},
        "results": results,
    }
    for kind in given.only:
        for race in RACES[kind](peers):
            results.append(line := run(race, given.repeat))
            times = ", ".join(f"{name} {ms:.3f} ms" for name, ms in line["ms"].items())
            ratio = "" if line["ratio"] is None else f", ratio {line['ratio']:.3f}"
            print(f"{race.name}: {times}{ratio}{'' if line['agree'] else ', RESULTS DISAGREE'}")
            sys.stdout.flush()
            if given.json:  # what there is, if this race is the last one
                given.json.write_text(json.dumps(raced, indent=1) + "\n")
    return 0 if all(line["agree"] for line in results) else 1


if __name__ == "__main__":
    sys.exit(main())
