# SPDX-License-Identifier: Apache-2.0
"""One batch over many ranks: a layer of sparse attention, forward and backward.

    torchrun --nproc-per-node 4 examples/context_parallel.py [--device cuda]

Every rank holds a shard of the rows of two documents and computes the results of its queries. Then
rank 0 runs the same layer on the whole batch alone and compares.
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import Tensor

import winnow

TOKENS, HEADS, QK_DIM, V_DIM = 3001, 8, 576, 512
INDEX_HEADS, INDEX_DIM, TOPK = 4, 128, 64
SCALE = QK_DIM**-0.5


def inputs(device: str) -> dict[str, Tensor]:
    """Inputs of the whole batch, the same on every rank; a model would compute its own rows."""
    shapes = {
        "q": (TOKENS, HEADS, QK_DIM),
        "kv": (TOKENS, QK_DIM),
        "index_q": (TOKENS, INDEX_HEADS, INDEX_DIM),
        "index_k": (TOKENS, INDEX_DIM),
        "weights": (TOKENS, INDEX_HEADS),
    }
    torch.manual_seed(0)
    tensors = {name: torch.randn(shape) for name, shape in shapes.items()}
    return {
        name: x.to(device, torch.float32 if name == "weights" else torch.bfloat16)
        for name, x in tensors.items()
    }


def layer(packing: winnow.Packing, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Runs forward and backward; returns results and gradients for the rows of this rank."""
    own = {name: packing.shard(x).requires_grad_() for name, x in batch.items()}
    index_keys = winnow.gather_keys(own["index_k"], packing)
    keys = winnow.gather_keys(own["kv"], packing)  # overlaps with the indexer
    selection = winnow.index_topk(own["index_q"], index_keys, own["weights"], packing, topk=TOPK)
    out, lse, _ = winnow.sparse_attention(own["q"], keys, selection, v_dim=V_DIM, scale=SCALE)
    loss = winnow.index_loss(selection, own["q"], keys, lse, scale=SCALE, reduction="sum")
    (out.float().square().sum() + loss).backward()
    gradients = {f"gradient of {name}": x.grad for name, x in own.items()}
    return {"out": out.detach(), "indices": selection.indices} | gradients


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    device = parser.parse_args().device
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group({"cpu": "gloo", "cuda": "nccl"}[device])
    try:
        cu_seqlens = torch.tensor([0, 1000, TOKENS], dtype=torch.int32, device=device)
        packing = winnow.Packing(cu_seqlens, group=dist.group.WORLD)  # zigzag
        batch = inputs(device)
        results = layer(packing, batch)
        # Only for the comparison: gather the results of all ranks.
        whole = {name: winnow.gather_keys(x, packing).whole for name, x in results.items()}
        if dist.get_rank() == 0:
            print(f"{dist.get_world_size()} ranks, {packing.tokens} of {TOKENS} rows on rank 0")
            for name, alone in layer(winnow.Packing(cu_seqlens), batch).items():
                error = (whole[name].double() - alone.double()).norm() / alone.double().norm()
                print(f"{name:20} relative difference to one rank {error:.1e}")
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
