# SPDX-License-Identifier: Apache-2.0
"""Times index_topk on the scores of an indexer that was trained, beside independent ones.

    python python/benchmarks/trained_indexer.py [--keys 32768] [--tokens 4096]

Trains the decoder of examples/dense_to_sparse.py for some 20 s, with an indexer of 32 heads of 128
channels, on documents of up to 4096 rows; then one long document goes through it, of which the last
rows select. Prints median times of the calls in turns. A key is made of its symbol and the one
before, so that many keys are equal.
"""

import argparse
import dataclasses
import importlib.util
import sys
import time
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


@dataclasses.dataclass(frozen=True)
class Stage:
    name: str
    documents: int
    tokens: int  # of each document
    steps: int


# What is to be learned is the same in documents of any length, and sooner learned from short ones.
STAGES = (
    Stage("dense", 16, 256, 300),
    Stage("dense", 4, 1024, 60),
    Stage("dense", 1, 4096, 30),
    Stage("warm-up", 4, 1024, 150),
    Stage("warm-up", 1, 4096, 60),
)


def train(model, made, size, stage: Stage, text: torch.Generator) -> None:
    """A stage with a rate that rises for some steps and then falls to a tenth."""
    size = dataclasses.replace(size, documents=stage.documents, tokens=stage.tokens)
    model.attention.size = size
    parameters = model.trained_parameters(stage.name)
    optimizer = torch.optim.AdamW(parameters, lr=1e-3, betas=(0.9, 0.95), weight_decay=0)
    start = time.perf_counter()
    for step in range(stage.steps):
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * min((step + 1) / 20, 1 - 0.9 * step / stage.steps)
        measured = step == stage.steps - 1
        with torch.autocast("cuda", torch.bfloat16):
            batch = made.Batch(size, text, "cuda")
            loss, index_loss, recall = model(batch, stage.name, measured)
        optimizer.zero_grad()
        (index_loss if stage.name == "warm-up" else loss).backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1)
        optimizer.step()
    print(f"{stage.name}, documents of {stage.tokens}: loss of the text {loss.item():.3f}", end="")
    if recall is not None:
        print(f", KL {index_loss.item():.3f}, recall of mass {recall:.3f}", end="")
    print(f", {time.perf_counter() - start:.0f} s", flush=True)


def trained_indexer(keys: int) -> Indexer:
    """Of every row of a document with so many rows."""
    made = example()
    size = dataclasses.replace(
        made.WIDTHS["glm-5.2"], symbols=64, hidden=512, heads=16, head_dim=64, topk=512
    )
    torch.manual_seed(1)
    model = made.Decoder(size).cuda()
    text = torch.Generator().manual_seed(2)
    for stage in STAGES:
        train(model, made, size, stage, text)
    long = made.Batch(dataclasses.replace(size, documents=1, tokens=keys), text, "cuda")
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
