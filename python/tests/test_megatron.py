# SPDX-License-Identifier: Apache-2.0
"""winnow.megatron behind the layers of the real Megatron-Core; its backend "none" is the oracle.

Functions whose names begin with an underscore run in the ranks, which alone import Megatron.
"""

import warnings
from types import SimpleNamespace
from typing import Any

import megatron_core
import pytest
import torch
import torch.distributed as dist
from cases import assert_within, bf16, f32, offsets
from torch import Tensor

import winnow.megatron

LIMIT = {f32: 1e-5, bf16: 2e-2}
LOSS = {"dsa_indexer_loss_coeff": 0.7}
DENSE = LOSS | {"dsa_indexer_use_sparse_loss": False}
SHARED = LOSS | {"dsa_indexer_topk_freq": 2, "dsa_indexer_skip_topk_offset": 1}
BF16 = LOSS | {"params_dtype": bf16, "bf16": True, "num_layers": 1}
DOCUMENTS = [4, 16, 8, 0, 12]  # multiples of 4, as two zigzag ranks ask


@pytest.fixture(scope="module")
def ranks(two_ranks):
    if not megatron_core.FOLDER.exists():
        pytest.skip(megatron_core.MISSING)
    two_ranks(_start)
    return two_ranks


def _start() -> None:
    warnings.simplefilter("ignore")  # of Megatron, about packages that are not there
    megatron_core.find()
    winnow.megatron.register()


class _Run:
    """What a step of training gives, by name: outputs, losses, selections and gradients."""

    def __init__(self, backend: str, packed: bool, batch: int, options: dict[str, Any]) -> None:
        from megatron.core.packed_seq_params import PackedSeqParams
        from megatron.core.transformer.experimental_attention_variant.dsa import (
            DSAIndexerLossLoggingHelper,
            DSAttention,
        )

        tp, cp = (options.get(f"{kind}_parallel_size", 1) for kind in ("tensor_model", "context"))
        made = megatron_core.config(**options, sequence_parallel=tp > 1)
        made.dsa_kernel_backend = backend  # not before, since it asks for a GPU
        numbers = range(1, made.num_layers + 1)
        layers = torch.nn.ModuleList([megatron_core.layer(made, number) for number in numbers])
        cu_seqlens = offsets(DOCUMENTS)
        tokens = int(cu_seqlens[-1])
        documents = None
        if packed:
            of_both = {f"cu_seqlens_{side}": cu_seqlens for side in ("q", "kv")}
            longest = {f"max_seqlen_{side}": max(DOCUMENTS) for side in ("q", "kv")}
            documents = PackedSeqParams(qkv_format="thd", **of_both, **longest)
            if options.get("calculate_per_token_loss"):
                documents.real_token_mask_q = torch.arange(tokens // cp) % 5 > 0
        generator = torch.Generator().manual_seed(dist.get_rank() if tp * cp > 1 else 0)
        shape = (tokens // (tp * cp), batch, made.hidden_size)
        x, d_out = (torch.randn(shape, generator=generator).to(made.params_dtype) for _ in "xd")
        x.requires_grad_()
        DSAIndexerLossLoggingHelper.tracker.clear()
        carrier = documents if packed else made
        out = x
        for layer in layers:
            out = out + layer(out, None, packed_seq_params=documents)[0]
        out.backward(d_out)
        self.tensors = {"out": out.detach(), "d_x": x.grad}
        self.tensors |= {name: weight.grad for name, weight in layers.named_parameters()}
        self.loss = DSAIndexerLossLoggingHelper.tracker.get("values")
        self.selections = getattr(carrier, DSAttention._HOLDER_ATTR, {})


def _sets(indices: Tensor) -> list[set[int]]:
    return [set(row) - {-1} for row in indices.flatten(0, 1).tolist()]


def _agree(packed: bool, options: dict[str, Any], batch: int = 1) -> None:
    from megatron.core import parallel_state

    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # nothing may be declined
        warnings.filterwarnings("ignore", module="megatron|torch")
        sizes = {name: options[name] for name in options if name.endswith("parallel_size")}
        parallel_state.initialize_model_parallel(**sizes)
        try:
            theirs, ours = (_Run(name, packed, batch, options) for name in ("none", "winnow"))
        finally:
            parallel_state.destroy_model_parallel()
    limit = LIMIT[options.get("params_dtype", f32)]
    for name, expected in theirs.tensors.items():
        if expected is None:
            assert ours.tensors[name] is None, name
            continue
        assert expected.norm() > 0, name
        try:
            assert_within(ours.tensors[name], expected.double(), limit)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from None
    if "dsa_indexer_loss_coeff" in options:
        assert theirs.loss[0] > 0
        assert_within(ours.loss, theirs.loss.double(), limit)
    assert ours.selections.keys() == theirs.selections.keys()
    assert bool(ours.selections) == ("dsa_indexer_topk_freq" in options)
    for number, expected in theirs.selections.items():
        assert _sets(ours.selections[number]) == _sets(expected)


def test_register_says_what_is_missing():
    with pytest.raises(RuntimeError, match="megatron-core has no table of DSA kernel backends"):
        winnow.megatron.register()


def _registered() -> None:
    from megatron.core import utils
    from megatron.core.transformer.experimental_attention_variant import dsa_kernels

    winnow.megatron.register()
    assert utils._VALID_DSA_KERNEL_BACKENDS == ("none", "tilelang", "cudnn", "winnow")
    assert list(dsa_kernels._BACKEND_MODULE_NAME_BY_BACKEND) == ["tilelang", "cudnn", "winnow"]
    assert (
        dsa_kernels._load_backend(SimpleNamespace(dsa_kernel_backend="winnow")) is winnow.megatron
    )


def test_registering_twice_adds_one_name(ranks):
    ranks(_registered)


@pytest.mark.parametrize("packed", [False, True], ids=["sbhd", "thd"])
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="without loss"),
        pytest.param(LOSS, id="sparse loss"),
        pytest.param(DENSE, id="dense loss"),
        pytest.param(SHARED, id="shared selection"),
        pytest.param(LOSS | {"calculate_per_token_loss": True}, id="loss of tokens"),
        pytest.param(BF16, id="bf16"),
    ],
)
def test_a_layer_agrees(ranks, packed, options):
    ranks(_agree, packed, options)


@pytest.mark.parametrize("options", [LOSS, DENSE, SHARED], ids=["sparse", "dense", "shared"])
def test_a_batch_agrees(ranks, options):
    ranks(_agree, False, options, batch=3)


@pytest.mark.parametrize("packed", [False, True], ids=["sbhd", "thd"])
@pytest.mark.parametrize("options", [LOSS, DENSE, SHARED], ids=["sparse", "dense", "shared"])
@pytest.mark.parametrize("kind", ["tensor_model", "context"])
def test_two_ranks_agree(ranks, kind, options, packed):
    ranks(_agree, packed, options | {f"{kind}_parallel_size": 2})
