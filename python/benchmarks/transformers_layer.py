# SPDX-License-Identifier: Apache-2.0
"""One attention layer of transformers, as eager, by SDPA and by winnow: time and peak memory.

    PYTHONPATH=python python python/benchmarks/transformers_layer.py [--device cuda] [--json FILE]
    PYTHONPATH=python python python/benchmarks/transformers_layer.py --count

The module is the model's own, of the widths of its default config (GLM-5.2 and DeepSeek-V4-Flash),
in bf16 with random weights; the mask is made by the model's own function. Memory is the peak above
weights and input. Times are medians. Out of memory is a row; larger sizes are then left out.

--count needs neither GPU nor memory: it runs fake tensors through the same module and counts the
bytes of those that live at the same time. What operators use inside is not in it; winnow's stay
within their workspace limit of 256 MiB.
"""

import argparse
import gc
import json
import statistics
import time
import weakref
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import DeepseekV4Config, GlmMoeDsaConfig
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask
from transformers.models.deepseek_v4 import modeling_deepseek_v4 as v4
from transformers.models.glm_moe_dsa import modeling_glm_moe_dsa as glm

import winnow.transformers

SIZES = [2048, 4096, 8192, 16384, 32768, 65536, 131072]


class Glm(nn.Module):
    """A layer that selects its own keys."""

    implementations = ("eager", "sdpa", "winnow")

    def __init__(self) -> None:
        super().__init__()
        self.config = GlmMoeDsaConfig(num_hidden_layers=1)
        self.attention = glm.GlmMoeDsaAttention(self.config, 0)
        self.rotary = glm.GlmMoeDsaRotaryEmbedding(self.config)

    def forward(self, x: Tensor) -> Tensor:
        positions = torch.arange(x.shape[1], device=x.device)[None]
        mask = create_causal_mask(self.config, x, None, None, positions, allow_is_causal_skip=False)
        return self.attention(x, self.rotary(x, positions), mask, position_ids=positions)[0]


class V4(nn.Module):
    """A layer with a sliding window and selected pools of 4 rows."""

    implementations = ("eager", "winnow")  # the family has no SDPA

    def __init__(self) -> None:
        super().__init__()
        self.config = DeepseekV4Config(
            num_hidden_layers=1, layer_types=["compressed_sparse_attention"]
        )
        self.attention = v4.DeepseekV4Attention(self.config, 0)
        self.rotary = v4.DeepseekV4RotaryEmbedding(self.config)

    def forward(self, x: Tensor) -> Tensor:
        positions = torch.arange(x.shape[1], device=x.device)[None]
        mask = create_sliding_window_causal_mask(self.config, x, None, None, positions)
        embeddings = {
            kind: self.rotary(x, positions, layer_type=kind) for kind in ("main", "compress")
        }
        return self.attention(x, embeddings, positions, mask)[0]


LAYERS = {"glm-5.2": Glm, "deepseek-v4": V4}


def made(layer: str, device: str) -> nn.Module:
    torch.manual_seed(0)
    with torch.device(device):
        module = LAYERS[layer]().to(torch.bfloat16)
    rotary = [x for x in module.modules() if "Rotary" in type(x).__name__]
    for part in rotary:
        part.float()  # frequencies stay in fp32, as in a loaded model
    with torch.no_grad():
        for x in module.parameters():
            x.normal_(std=0.02)
    return module


def measured(call: Callable[[], None], device: str, repeats: int) -> dict[str, float]:
    """Median seconds and peak GiB above what was there before."""
    cuda = device == "cuda"
    call()
    gc.collect()
    if cuda:
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        if cuda:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    peak = (torch.cuda.max_memory_allocated() - before) / 2**30 if cuda else 0.0
    return {"ms": statistics.median(times) * 1e3, "gib": peak}


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of the tensors that are made inside, and their peak."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: dict[int, int] = {}
        self.now = self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, Tensor):
                self._count(x.untyped_storage())
        self.peak = max(self.peak, self.now)
        return out

    def _count(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self.storages:
            self.storages[key] = storage.nbytes()
            self.now += storage.nbytes()
            weakref.finalize(storage, self._drop, key)

    def _drop(self, key: int) -> None:
        self.now -= self.storages.pop(key)


def counted(layer: str, implementation: str, tokens: int, backward: bool) -> float:
    """The peak GiB above weights and input, of fake tensors."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        torch.set_default_dtype(torch.bfloat16)
        module = LAYERS[layer]()
        torch.set_default_dtype(torch.float32)
        use(module, implementation)
        x = torch.randn(1, tokens, module.config.hidden_size, dtype=torch.bfloat16)
        x.requires_grad_(backward)
        with LiveBytes() as live, torch.set_grad_enabled(backward):
            out = module(x)
            if backward:
                out.backward(out.detach())
    return live.peak / 2**30


def use(module: nn.Module, implementation: str) -> None:
    if implementation == "winnow":
        winnow.transformers.enable(module)
    else:
        module.config._attn_implementation = implementation


def count(layers: list[str], sizes: list[int]) -> None:
    print(f"{'layer':12} {'by':7} {'what':8}", *(f"{tokens:8}" for tokens in sizes), " (GiB)")
    for layer in layers:
        for implementation in LAYERS[layer].implementations:
            for backward in (False, True):
                what = "both" if backward else "forward"
                peaks = (counted(layer, implementation, tokens, backward) for tokens in sizes)
                figures = " ".join(f"{peak:8.2f}" for peak in peaks)
                print(f"{layer:12} {implementation:7} {what:8} {figures}", flush=True)


def row(module: nn.Module, tokens: int, backward: bool, device: str) -> dict[str, float]:
    width = module.config.hidden_size
    x = torch.randn(1, tokens, width, device=device, dtype=torch.bfloat16)
    x.requires_grad_(backward)

    def call() -> None:
        with torch.set_grad_enabled(backward):
            out = module(x)
        if backward:
            out.backward(out.detach())
            x.grad = None
            module.zero_grad()

    try:
        return measured(call, device, 3 if tokens <= 16384 else 1)
    except torch.OutOfMemoryError:
        return {}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--layers", nargs="+", choices=LAYERS, default=list(LAYERS))
    parser.add_argument("--tokens", nargs="+", type=int, default=SIZES)
    parser.add_argument("--json", help="write the rows to this file too")
    parser.add_argument("--count", action="store_true", help="count memory, run nothing")
    arguments = parser.parse_args()
    if arguments.count:
        return count(arguments.layers, arguments.tokens)
    device = arguments.device
    print(torch.cuda.get_device_name() if device == "cuda" else device, "torch", torch.__version__)
    print(f"{'layer':12} {'by':7} {'what':8} {'tokens':>7} {'ms':>9} {'GiB':>7}")
    rows = []
    for layer in arguments.layers:
        module = made(layer, device)
        for implementation in module.implementations:
            use(module, implementation)
            for backward in (False, True):
                what = "both" if backward else "forward"
                for tokens in arguments.tokens:
                    found = row(module, tokens, backward, device)
                    if device == "cuda":
                        gc.collect()
                        torch.cuda.empty_cache()
                    rows.append({"layer": layer, "by": implementation, "what": what,
                                 "tokens": tokens, **found})  # fmt: skip
                    figures = (
                        f"{found['ms']:9.2f} {found['gib']:7.2f}" if found else " out of memory"
                    )
                    print(
                        f"{layer:12} {implementation:7} {what:8} {tokens:7} {figures}", flush=True
                    )
                    if not found:
                        break
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump(rows, file, indent=1)


if __name__ == "__main__":
    main()
