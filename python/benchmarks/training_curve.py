# SPDX-License-Identifier: Apache-2.0
"""What the three stages of training the indexer cost in one layer: time and peak memory of a step.

    PYTHONPATH=python python python/benchmarks/training_curve.py --json curve.json
    PYTHONPATH=python python python/benchmarks/training_curve.py --json curve.json --plot curve.png

Attention of glm-5.2 in bf16 on a CUDA device, one document: 64 heads of 256 channels for dense
attention by SDPA, 64 heads of 576/512 over one latent head for winnow, 32 index heads of 128
channels, 2048 keys selected. Projections are not part of it. A step is forward and backward:

    dense          SDPA, gradients of q, k and v
    dense forward  the same without gradients, which a warm-up needs for the text
    warm-up        dense_index_loss with the lse given, gradients of the indexer
    sparse         index_topk, sparse_attention and index_loss, gradients of all

Memory is the peak above the inputs, gradients of inputs included. A call under a second is repeated
three times (median) after a first one; a longer one is timed once. A point that the file has is not
measured again, and the file is written after every point. With --plot nothing is measured.
"""

import argparse
import gc
import json
import math
import os
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import winnow

SIZES = [4096, 8192, 16384, 32768, 65536, 131072]
HEADS, HEAD_DIM, QK_DIM, LATENT = 64, 256, 576, 512
INDEX_HEADS, INDEX_DIM, TOPK = 32, 128, 2048


def normal(*shape: int, trained: bool = True) -> Tensor:
    x = torch.randn(*shape, device="cuda", dtype=torch.bfloat16)
    return x.requires_grad_(trained)


def dense(tokens: int, trained: bool = True) -> Callable[[], None]:
    q, k, v = (normal(1, HEADS, tokens, HEAD_DIM, trained=trained) for _ in range(3))
    d_out = torch.randn_like(q) if trained else None

    def step() -> None:
        out = scaled_dot_product_attention(q, k, v, is_causal=True)
        if trained:
            torch.autograd.grad(out, (q, k, v), d_out)

    return step


def indexer(tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    scale = 3 * (INDEX_HEADS * INDEX_DIM) ** -0.5
    weights = scale * torch.randn(tokens, INDEX_HEADS, device="cuda")
    q, k = normal(tokens, INDEX_HEADS, INDEX_DIM), normal(tokens, INDEX_DIM)
    return q, k, weights.requires_grad_()


def packed(tokens: int) -> winnow.Packing:
    cu_seqlens = torch.tensor([0, tokens], dtype=torch.int32, device="cuda")
    return winnow.Packing(cu_seqlens, tokens=tokens)


def warm_up(tokens: int) -> Callable[[], None]:
    q, kv = (normal(*x, trained=False) for x in ((tokens, HEADS, QK_DIM), (tokens, QK_DIM)))
    inputs, packing, scale = indexer(tokens), packed(tokens), QK_DIM**-0.5
    # The logits of these inputs are close to normal numbers of variance 1.
    lse = torch.arange(1, tokens + 1, device="cuda").log() + 0.5
    lse = lse[:, None].expand(tokens, HEADS).contiguous()

    def step() -> None:
        loss = winnow.dense_index_loss(q, kv, *inputs, packing, scale=scale, lse=lse)
        torch.autograd.grad(loss, inputs)

    return step


def sparse(tokens: int) -> Callable[[], None]:
    q, kv = normal(tokens, HEADS, QK_DIM), normal(tokens, QK_DIM)
    inputs, packing, scale = indexer(tokens), packed(tokens), QK_DIM**-0.5
    d_out = normal(tokens, HEADS, LATENT, trained=False)

    def step() -> None:
        selection = winnow.index_topk(*inputs, packing, topk=TOPK)
        out, lse, _ = winnow.sparse_attention(
            q, kv, selection.indices, v_dim=LATENT, scale=scale, lengths=selection.lengths
        )
        loss = winnow.index_loss(selection, q, kv, lse, scale=scale)
        torch.autograd.grad((out, loss), (q, kv, *inputs), (d_out, torch.ones_like(loss)))

    return step


STAGES = {
    "dense": dense,
    "dense forward": lambda tokens: dense(tokens, trained=False),
    "warm-up": warm_up,
    "sparse": sparse,
}


def timed(step: Callable[[], None]) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    step()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def measured(make: Callable[[int], Callable[[], None]], tokens: int) -> dict[str, float]:
    torch.manual_seed(0)
    gc.collect()
    torch.cuda.empty_cache()
    try:
        step = make(tokens)
        inputs = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        seconds = timed(step)
        if seconds < 1:
            seconds = statistics.median(timed(step) for _ in range(3))
    except torch.OutOfMemoryError:
        return {"ms": math.nan, "gib": math.nan, "inputs_gib": math.nan}
    peak = torch.cuda.max_memory_allocated()
    return {
        "ms": seconds * 1e3,
        "gib": (peak - inputs) / 2**30,
        "inputs_gib": inputs / 2**30,
    }


def plot(points: dict[str, dict[str, dict[str, float]]], path: str) -> None:
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, 2, figsize=(10, 4), layout="tight")
    for panel, unit, name in zip(panels, ("ms", "gib"), ("ms a step", "GiB"), strict=True):
        for stage, of_stage in points.items():
            sizes = sorted(of_stage, key=int)
            panel.plot(
                [int(x) for x in sizes], [of_stage[x][unit] for x in sizes], "o-", label=stage
            )
        panel.set_xscale("log", base=2)
        panel.set_yscale("log")
        panel.set(xlabel="tokens", ylabel=name)
        panel.grid(alpha=0.3)
    panels[0].legend()
    figure.savefig(path, dpi=100)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", required=True, help="read if it is there, written at each point")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    parser.add_argument("--stages", choices=STAGES, nargs="+", default=list(STAGES))
    parser.add_argument("--plot", help="draw the points of the file, as a picture")
    given = parser.parse_args()
    points: dict[str, dict[str, dict[str, float]]] = {}
    if os.path.exists(given.json):
        with open(given.json) as file:
            points = json.load(file)
    if given.plot:
        return plot(points, given.plot)
    for stage in given.stages:
        STAGES[stage](512)()  # loads libraries and kernels
    for tokens in given.sizes:
        for stage in given.stages:
            of_stage = points.setdefault(stage, {})
            if str(tokens) in of_stage:
                continue
            of_stage[str(tokens)] = measured(STAGES[stage], tokens)
            print(f"{stage:14} {tokens:7} {of_stage[str(tokens)]}", flush=True)
            with open(given.json, "w") as file:
                json.dump(points, file, indent=1)


if __name__ == "__main__":
    main()
