# SPDX-License-Identifier: Apache-2.0
"""Times index_topk on the scores of an indexer that was trained, beside independent ones.

    python python/benchmarks/trained_indexer.py [--keys 32768] [--tokens 4096]

Trains the decoder of examples/dense_to_sparse.py for a minute, with an indexer of 32 heads of 128
channels, on documents of 4096 rows; then one long document goes through it, of which the last rows
select. Prints median times of the calls in turns.
"""

import argparse
import dataclasses
import importlib.util
import sys
from pathlib import Path

import torch
from torch import Tensor
from turns import median_ms

import winnow

EXAMPLE = Path(__file__).parents[2] / "examples" / "dense_to_sparse.py"
Indexer = tuple[Tensor, Tensor, Tensor]  # q, k, weights


def example():
    spec = importlib.util.spec_from_file_location("dense_to_sparse", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look for it there
    spec.loader.exec_module(module)
    return module


def trained_indexer(keys: int) -> Indexer:
    """Of every row of a document with so many rows."""
    made = example()
    size = dataclasses.replace(
        made.WIDTHS["glm-5.2"],
        tokens=4096,
        symbols=64,
        hidden=512,
        heads=16,
        head_dim=64,
        topk=512,
    )
    torch.manual_seed(1)
    model = made.Decoder(size).cuda()
    text = torch.Generator().manual_seed(2)
    for stage, steps in (("dense", 60), ("warm-up", 100)):
        optimizer = torch.optim.AdamW(model.trained_parameters(stage), lr=1e-3)
        for step in range(steps):
            measured = step == steps - 1
            with torch.autocast("cuda", torch.bfloat16):
                batch = made.Batch(size, text, "cuda")
                loss, index_loss, recall = model(batch, stage, measured)
            optimizer.zero_grad()
            (index_loss if stage == "warm-up" else loss).backward()
            optimizer.step()
        print(f"{stage}: loss of the text {loss.item():.3f}, KL {index_loss.item():.3f}", end="")
        print("" if recall is None else f", recall of mass {recall:.3f}")
    long = made.Batch(dataclasses.replace(size, tokens=keys), text, "cuda")
    with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
        x = model.norms[0](model.symbols(long.symbols) + model.previous(long.previous))
        q, k, weights = model.attention.indexer(x)
    return q.bfloat16(), k.bfloat16(), weights


def independent_indexer(like: Indexer) -> Indexer:
    return tuple(torch.randn_like(x) for x in like)


def selection(q: Tensor, k: Tensor, weights: Tensor, packing: winnow.Packing, topk: int, **fp8):
    return lambda: winnow.index_topk(q, k, weights, packing, topk=topk, **fp8)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--keys", type=int, default=32768)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--topk", type=int, default=2048)
    given = parser.parse_args()
    trained = trained_indexer(given.keys)
    rows = torch.arange(given.keys - given.tokens, given.keys, dtype=torch.int32, device="cuda")
    cu_seqlens = torch.tensor([0, given.keys], dtype=torch.int32, device="cuda")
    packing = winnow.Packing(cu_seqlens, query_rows=rows)
    calls = {}
    for name, (q, k, weights) in {
        "trained": trained,
        "independent": independent_indexer(trained),
    }.items():
        q, weights = q[-given.tokens :].contiguous(), weights[-given.tokens :].contiguous()
        calls[f"{name}, bf16"] = selection(q, k, weights, packing, given.topk)
        q8, k8 = winnow.quantize_fp8(q), winnow.quantize_fp8(k)
        calls[f"{name}, fp8"] = selection(
            q8.values, k8.values, weights * q8.scale, packing, given.topk, k_scale=k8.scale
        )
    for name, ms in median_ms(calls, repeat=15).items():
        print(f"{name:20} {ms:.3f} ms")


if __name__ == "__main__":
    main()
