# SPDX-License-Identifier: Apache-2.0
"""Attention layers of Automodel's DeepSeek-V4 and V4.1, its torch path against winnow.

    PYTHONPATH=python:AUTOMODEL python python/benchmarks/automodel_v4_layer.py [--tokens 2048 4096]

AUTOMODEL is a folder with nemo-automodel and what it imports, as python/tests/
test_automodel_layers.py makes one. The layers have the widths of their default configs, in bf16,
one row without padding; "v4/4" has pools of 4 with an indexer, "v4/128" pools of 128, "v4/0" the
window alone, and "v4.1" is three layers one of which selects for another. The torch path is the
one of `attn: sdpa`. Times are medians of forward and backward, memory is the peak above what is
allocated before. Errors are relative, of the output, the gradient of the input and the parameter
whose gradient differs most. Exits with 1 if one of them is above a limit.
"""

import argparse
import statistics
import sys
import time
from pathlib import Path

import torch
from torch import Tensor, nn

sys.path.append(str(Path(__file__).resolve().parent.parent / "tests"))
import automodel_v4

from winnow import automodel

LIMIT = 3e-2  # both paths round to bf16 between operators, at different places
LAYERS = ("v4/4", "v4/128", "v4/0", "v4.1")


def made(name: str, attn: str, device: str) -> tuple[nn.Module, automodel_v4.Step]:
    with torch.device(device):
        if name == "v4.1":
            layers = automodel_v4.v41_layers(attn, 0.02)
            return layers, automodel_v4.v41_step(layers)
        torch.set_default_dtype(torch.bfloat16)  # of the parameters that have no dtype of their own
        layer = automodel_v4.v4_layer(attn, int(name.removeprefix("v4/")), 0.02)
        torch.set_default_dtype(torch.float32)
    return layer, automodel_v4.v4_step(layer)


def inputs(name: str, tokens: int, width: int, device: str) -> tuple[Tensor, Tensor]:
    generator = torch.Generator(device).manual_seed(tokens)
    options = {"generator": generator, "device": device, "dtype": torch.bfloat16}
    layers = (3,) if name == "v4.1" else ()
    x = torch.randn(1, tokens, width, **options)
    return x, torch.randn(*layers, *x.shape, **options)


def measured(step: automodel_v4.Step, x: Tensor, d_out: Tensor) -> tuple[float, float]:
    """Median milliseconds, peak GiB."""
    cuda, times = x.is_cuda, []
    before = torch.cuda.memory_allocated() if cuda else 0
    for _ in range(5 if cuda else 1):
        if cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        step(x, d_out)
        if cuda:
            torch.cuda.synchronize()
        times.append((time.perf_counter() - start) * 1e3)
    peak = (torch.cuda.max_memory_allocated() - before) / 2**30 if cuda else 0.0
    return statistics.median(times), peak


def results(layer: nn.Module, step: automodel_v4.Step, x: Tensor, d_out: Tensor) -> dict:
    """Outputs and gradients by name."""
    layer.zero_grad()
    *outs, d_x = step(x, d_out)
    found = {f"out {i}": out for i, out in enumerate(outs)} | {"d_x": d_x}
    found |= {name: p.grad for name, p in layer.named_parameters() if p.grad is not None}
    return found


def relative(actual: Tensor, expected: Tensor) -> float:
    return float((actual.double() - expected.double()).norm() / expected.double().norm())


def errors(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> dict[str, float]:
    if ours.keys() != theirs.keys():
        raise SystemExit(f"gradients differ: {sorted(ours.keys() ^ theirs.keys())}")
    return {name: relative(ours[name], theirs[name]) for name in theirs}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tokens", nargs="+", type=int, default=[2048, 4096])
    parser.add_argument("--layers", nargs="+", choices=LAYERS, default=list(LAYERS))
    given = parser.parse_args()
    automodel.install()
    device = given.device
    print(torch.cuda.get_device_name() if device == "cuda" else device, "torch", torch.__version__)
    print(
        f"{'layer':7} {'tokens':>6} {'torch ms':>9} {'GiB':>6} {'winnow ms':>9} {'GiB':>6}  errors"
    )
    failed = False
    for name in given.layers:
        both = [made(name, attn, device) for attn in ("sdpa", "tilelang")]
        for tokens in given.tokens:
            width = next(both[0][0].parameters()).shape[-1]
            x, d_out = inputs(name, tokens, width, device)
            theirs, ours = (results(*one, x, d_out) for one in both)
            found = errors(ours, theirs)
            del theirs, ours
            (torch_ms, torch_gib), (ms, gib) = (measured(step, x, d_out) for _, step in both)
            worst = max(found, key=found.get)
            out = max(error for which, error in found.items() if which.startswith("out"))
            print(
                f"{name:7} {tokens:6} {torch_ms:9.2f} {torch_gib:6.2f} {ms:9.2f} {gib:6.2f}"
                f" out {out:.1e}, d_x {found['d_x']:.1e}, {worst} {found[worst]:.1e}",
                flush=True,
            )
            failed |= not max(found.values()) < LIMIT
    if failed:
        raise SystemExit(f"an error is above {LIMIT}")


if __name__ == "__main__":
    main()
