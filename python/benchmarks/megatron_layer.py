# SPDX-License-Identifier: Apache-2.0
"""One attention layer of Megatron-Core at the width of GLM-5.2: its unfused path against winnow.

    PYTHONPATH=python .venv/bin/python python/benchmarks/megatron_layer.py [--megatron FOLDER]

Needs a GPU. The layer is Megatron's AbsorbedMLASelfAttention in bf16 with one document, projections
included; "own" selects its keys and has the indexer's loss over them, "linear" does so by scores
without ReLU, "shared" takes the selection of another layer. Times are medians of forward and
backward together, memory is the largest amount allocated during a step beyond what is allocated
before it. At the first size the two are compared.
"""

import argparse
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

sys.path.append(str(Path(__file__).resolve().parent.parent / "tests"))
import megatron_core

import winnow.megatron

WIDTH = {
    "hidden_size": 6144,
    "num_attention_heads": 64,
    "q_lora_rank": 2048,
    "kv_lora_rank": 512,
    "qk_head_dim": 192,
    "qk_pos_emb_head_dim": 64,
    "v_head_dim": 256,
    "dsa_indexer_n_heads": 32,
    "dsa_indexer_head_dim": 128,
    "dsa_indexer_topk": 2048,
    "dsa_indexer_loss_coeff": 0.01,
    "params_dtype": torch.bfloat16,
    "bf16": True,
}
KINDS = {
    "own": {},
    "linear": {"dsa_indexer_scoring_relu": False},
    "shared": {"dsa_indexer_topk_freq": 2, "dsa_indexer_skip_topk_offset": 1},
}
UNFUSED_UP_TO = 8192  # tokens; it keeps several matrices of 64 heads x tokens x tokens


def relative_error(actual: Tensor, expected: Tensor) -> float:
    difference = actual.double() - expected.double()
    return (difference.norm() / expected.double().norm()).item()


def differences(theirs: dict[str, Tensor], ours: dict[str, Tensor]) -> str:
    errors = {name: relative_error(ours[name], theirs[name]) for name in theirs}
    worst = max(errors, key=errors.get)
    return f"out differs by {errors['out']:.1e}, {worst} by {errors[worst]:.1e}"


class Layer:
    """A layer with an input; calling it makes a step of training."""

    def __init__(self, kind: str, backend: str, tokens: int) -> None:
        config = megatron_core.config(**WIDTH, **KINDS[kind], dsa_kernel_backend=backend)
        generator = torch.Generator("cuda").manual_seed(tokens)
        shape = (tokens, 1, config.hidden_size)
        options = {"generator": generator, "device": "cuda", "dtype": torch.bfloat16}
        self.x = torch.randn(shape, **options).requires_grad_()
        self.d_out = torch.randn(shape, **options)
        self.layer = megatron_core.layer(config, 1)
        if kind == "shared":
            config.dsa_kernel_backend = "winnow"  # whose selection both take
            with torch.no_grad():
                self.layer(self.x, None)
            config.dsa_kernel_backend = backend
            self.layer = megatron_core.layer(config, 2)

    def __call__(self) -> dict[str, Tensor]:
        """The output and all gradients."""
        self.x.grad = None
        self.layer.zero_grad()
        out, _ = self.layer(self.x, None)
        out.backward(self.d_out)
        gradients = {name: weight.grad for name, weight in self.layer.named_parameters()}
        return {"out": out, "d_x": self.x.grad} | gradients


def measured(step: Callable[[], object], repeats: int = 3) -> tuple[float, float]:
    """Milliseconds and GiB of a step."""
    step()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        step()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times), (torch.cuda.max_memory_allocated() - before) / 2**30


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megatron", type=Path, default=megatron_core.FOLDER, metavar="FOLDER")
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 8192, 16384, 32768, 65536])
    options = parser.parse_args()
    megatron_core.find(options.megatron)
    from megatron.core import parallel_state

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    winnow.megatron.register()
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in "ab")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    print(f"a product of 8192^3 by torch takes {measured(lambda: a @ b, 20)[0]:.2f} ms")
    print(f"{'layer':<8}{'tokens':>8}{'backend':>9}{'ms':>9}{'GiB':>8}")
    for kind in KINDS:
        for tokens in options.tokens:
            results = []
            for backend in ("none", "winnow"):
                if backend == "none" and tokens > UNFUSED_UP_TO:
                    continue
                try:
                    layer = Layer(kind, backend, tokens)
                    figures = "{:>9.1f}{:>8.1f}".format(*measured(layer))
                    results.append(layer() if tokens == options.tokens[0] else {})
                except torch.OutOfMemoryError:
                    figures = "   out of memory"
                layer = None
                torch.cuda.empty_cache()
                print(f"{kind:<8}{tokens:>8}{backend:>9}{figures}", flush=True)
            if len(results) == 2 and results[0]:
                print(f"{kind}: {differences(*results)}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
