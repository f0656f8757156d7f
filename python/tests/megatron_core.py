# SPDX-License-Identifier: Apache-2.0
"""A layer of the real Megatron-Core with DSA, for tests on the CPU and the benchmark.

Megatron is imported inside the functions: not every process that imports this file has it.
"""

import sys
import zlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

VERSION = "0.19.2"
FOLDER = Path(sys.prefix) / f"megatron-core-{VERSION}"  # by scripts/setup.sh venv
MISSING = f"megatron-core {VERSION} is not in {FOLDER}: scripts/setup.sh venv puts it there"


def find(folder: Path = FOLDER) -> None:
    """Makes Megatron importable."""
    if str(folder) not in sys.path:
        sys.path.append(str(folder))


def stay_on_the_cpu() -> None:
    """Megatron makes its tensors on the current GPU and copies through pinned memory; in this
    process both are the CPU from here on. Nor is anything compiled: importing the compiler takes
    longer than the tests, and the layer has nothing that Megatron compiles."""
    make = torch.tensor
    torch.tensor = lambda *args, pin_memory=False, **options: make(*args, **options)
    torch.cuda.current_device = lambda: torch.device("cpu")
    Tensor.cuda = lambda x, **_: x
    torch.compile = lambda function=None, **_: function or (lambda function: function)


def config(**options: Any) -> Any:
    """A small layer, or one of the width given by `options`."""
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    small = {
        "num_layers": 2,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "q_lora_rank": 32,
        "kv_lora_rank": 32,
        "qk_head_dim": 16,
        "qk_pos_emb_head_dim": 8,
        "v_head_dim": 16,
        "dsa_indexer_n_heads": 16,  # so many that hardly a score is 0, which would be a tie
        "dsa_indexer_head_dim": 32,
        "dsa_indexer_topk": 8,
        "dsa_indexer_use_sparse_loss": True,
    }
    fixed = {
        "experimental_attention_variant": "dsa",
        "dsa_indexer_rotate_activation": False,  # the rotation needs a package for CUDA
        "transformer_impl": "local",
        "normalization": "RMSNorm",
        "qk_layernorm": True,
        "add_bias_linear": False,
        "rope_type": "rope",
        "perform_initialization": False,
        "cp_comm_type": "allgather",
    }
    return MLATransformerConfig(**small | fixed | options)


class _Linear(torch.nn.Linear):
    """Replaces the linear layer of Transformer Engine, which Megatron has for the indexer."""

    def __init__(self, inputs: int, outputs: int, *, config: Any, **_: Any) -> None:
        device = torch.cuda.current_device()
        super().__init__(inputs, outputs, bias=False, device=device, dtype=config.params_dtype)

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return super().forward(x), None


class _Norm(torch.nn.Module):
    """Megatron's own wrapper of torch's norms refuses sequence parallel."""

    def __init__(self, *, config: Any, hidden_size: int, eps: float) -> None:
        super().__init__()
        kind = torch.nn.RMSNorm if config.normalization == "RMSNorm" else torch.nn.LayerNorm
        device = torch.cuda.current_device()
        self.norm = kind(hidden_size, eps=eps, device=device, dtype=config.params_dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x)


def layer(made: Any, number: int = 1) -> Any:
    """AbsorbedMLASelfAttention with DSAttention; random weights of a trained one's size."""
    from megatron.core.models.backends import LocalSpecProvider
    from megatron.core.models.gpt.experimental_attention_variant_module_specs import (
        get_dsa_module_spec_for_backend,
    )
    from megatron.core.parallel_state import get_tensor_model_parallel_rank
    from megatron.core.transformer.spec_utils import build_module

    class Provider(LocalSpecProvider):
        def linear(self) -> type:
            return _Linear

        def layer_norm(self, **_: Any) -> type:
            return _Norm

    provider = Provider()
    spec = get_dsa_module_spec_for_backend(made, provider)
    spec.submodules.linear_q_down_proj = provider.column_parallel_linear()
    spec.submodules.linear_kv_down_proj = provider.column_parallel_linear()
    built = build_module(spec, config=made, layer_number=number, cp_comm_type=made.cp_comm_type)
    for name, weight in built.named_parameters():
        if weight.dim() == 2:
            split = getattr(weight, "tensor_model_parallel", False)
            seed = f"{name} {number} {get_tensor_model_parallel_rank() if split else 0}"
            generator = torch.Generator(weight.device).manual_seed(zlib.crc32(seed.encode()))
            torch.nn.init.normal_(weight, std=weight.shape[1] ** -0.5, generator=generator)
    return built
