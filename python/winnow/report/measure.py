# SPDX-License-Identifier: Apache-2.0
"""What a report shows beyond the tool's JSON: limits, cost over sequence length, a selection."""

import ctypes
import math
import os
import platform
import re
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import winnow

HEADS, DIM, INDEX_HEADS, INDEX_DIM, TOPK = 8, 128, 4, 32, 128
LENGTHS = {"cpu": (512, 1024, 2048, 4096), "cuda": (4096, 8192, 16384, 32768)}
REPEATS = 3
COPY_BYTES = {"cpu": 256 << 20, "cuda": 1 << 30}
DOCUMENTS, CELL = (192, 320, 96, 160), 8  # of the selection that is shown; rows and keys per cell


def measure(device: str, lengths: tuple[int, ...] | None = None) -> dict[str, Any]:
    """All of it, as a dictionary that JSON takes."""
    return {
        "machine": machine(device),
        "memory_bandwidth": bandwidth(device),
        "sweep": sweep(device, lengths or LENGTHS[device]),
        "selection": selection(device),
    }


def machine(device: str) -> dict[str, str]:
    told = {
        "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "system": f"{platform.system()} {platform.release()}",
        "processor": _processor(),
        "cpus of the process": str(len(os.sched_getaffinity(0))),
        "load before the run": f"{os.getloadavg()[0]:.1f}",
        "winnow": winnow.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    if device == "cuda":
        told["gpu"] = torch.cuda.get_device_name()
    return told | {f"backend {name}": text for name, text in winnow.backends().items()}


def bandwidth(device: str) -> dict[str, Any]:
    """Bytes per second of a copy that no cache holds, read and written bytes counted."""
    source = torch.ones(COPY_BYTES[device] // 4, device=device)
    target = torch.empty_like(source)
    seconds = _seconds(lambda: target.copy_(source), device)
    bytes_per_second = 2 * COPY_BYTES[device] / seconds
    return {
        "bytes_per_second": bytes_per_second,
        "what": f"torch copies {COPY_BYTES[device] >> 20} MiB on {device}",
    }


def sweep(device: str, lengths: tuple[int, ...]) -> dict[str, Any]:
    """Time and peak memory of a layer's forward and backward over sequences of one document."""
    points = []
    for length in lengths:
        for kind, step in (("sparse", _sparse_step), ("dense", _dense_step)):
            run = step(length, device)
            seconds = _seconds(run, device)
            points.append(
                {
                    "kind": kind,
                    "tokens": length,
                    "seconds": seconds,
                    "peak_bytes": _peak_bytes(run, device),
                }
            )
    return {
        "heads": HEADS,
        "dim": DIM,
        "index_heads": INDEX_HEADS,
        "index_dim": INDEX_DIM,
        "topk": TOPK,
        "points": points,
    }


def exponent(points: list[tuple[float, float]]) -> float:
    """The slope of the least-squares line through the logarithms of points (x, y)."""
    logs = [(math.log(x), math.log(y)) for x, y in points]
    mean_x, mean_y = (statistics.fmean(column) for column in zip(*logs, strict=True))
    over = sum((x - mean_x) * (y - mean_y) for x, y in logs)
    return over / sum((x - mean_x) ** 2 for x, _ in logs)


def selection(device: str) -> dict[str, Any]:
    """How many of the keys of a cell the rows of a cell selected, in a packed batch.

    Keys drift slowly and rows ask for what is like themselves, as in text; of independent random
    inputs there would be nothing to see.
    """
    generator = torch.Generator().manual_seed(1)
    cu_seqlens = torch.tensor([0, *DOCUMENTS]).cumsum(0).int()
    tokens = int(cu_seqlens[-1])
    topics = torch.randn(8, INDEX_DIM, generator=generator)
    topic = torch.repeat_interleave(
        torch.randint(8, (tokens // 16,), generator=generator), 16
    )  # passages of 16 rows
    keys = topics[topic] + 0.7 * torch.randn(tokens, INDEX_DIM, generator=generator)
    q = topics[topic][:, None] + 0.7 * torch.randn(tokens, 1, INDEX_DIM, generator=generator)
    packing = winnow.Packing(cu_seqlens.to(device))
    chosen = winnow.index_topk(
        q.to(device), keys.to(device), torch.ones(tokens, 1, device=device), packing, topk=48
    )
    cells = tokens // CELL
    rows = torch.arange(tokens)[:, None].expand_as(chosen.indices.cpu())
    valid = chosen.indices.cpu() >= 0
    flat = rows[valid] // CELL * cells + chosen.indices.cpu()[valid] // CELL
    counts = torch.bincount(flat, minlength=cells * cells).view(cells, cells)
    return {
        "documents": list(DOCUMENTS),
        "cell": CELL,
        "topk": 48,
        "counts": counts.tolist(),
    }


def _inputs(tokens: int, device: str):
    generator = torch.Generator().manual_seed(tokens)
    shapes = ((HEADS, DIM), (DIM,), (INDEX_HEADS, INDEX_DIM), (INDEX_DIM,), (INDEX_HEADS,))
    tensors = [torch.randn(tokens, *shape, generator=generator) for shape in shapes]
    *activations, weights = tensors
    made = [x.to(device, torch.bfloat16) for x in activations] + [weights.to(device)]
    cu_seqlens = torch.tensor([0, tokens], dtype=torch.int32, device=device)
    return [x.requires_grad_() for x in made], winnow.Packing(cu_seqlens, tokens=tokens)


def _sparse_step(tokens: int, device: str) -> Callable[[], None]:
    (q, kv, index_q, index_k, weights), packing = _inputs(tokens, device)

    def run() -> None:
        selected = winnow.index_topk(index_q, index_k, weights, packing, topk=TOPK)
        out, lse, _ = winnow.sparse_attention(q, kv, selected)
        loss = winnow.index_loss(selected, q, kv, lse, scale=DIM**-0.5)
        (out.float().square().mean() + loss).backward()

    return run


def _dense_step(tokens: int, device: str) -> Callable[[], None]:
    """All keys of the window are selected."""
    (q, kv, *_), packing = _inputs(tokens, device)

    def run() -> None:
        keys = winnow.window_indices(packing, window=tokens)
        winnow.sparse_attention(q, kv, keys).out.float().square().mean().backward()

    return run


def _seconds(run: Callable[[], Any], device: str) -> float:
    """The median of a few runs after one that is not counted."""
    times = []
    for _ in range(1 + REPEATS):
        start = time.perf_counter()
        run()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def _peak_bytes(run: Callable[[], None], device: str) -> int | None:
    """How much more memory there is at the most during a run than before it; None if unknown."""
    if device == "cuda":
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        run()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    try:
        ctypes.CDLL(None).malloc_trim(0)  # else memory that earlier runs freed would be used
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins at what there is now
        before = _resident("VmRSS")
        run()
        return max(_resident("VmHWM") - before, 0)
    except (OSError, AttributeError):
        return None


def _resident(name: str) -> int:
    status = Path("/proc/self/status").read_text()
    line = next(each for each in status.splitlines() if each.startswith(f"{name}:"))
    return int(line.split()[1]) << 10


def _processor() -> str:
    try:
        names = re.findall(r"model name\s*: (.+)", Path("/proc/cpuinfo").read_text())
    except OSError:
        names = []
    return names[0] if names else platform.machine()
