# SPDX-License-Identifier: Apache-2.0
"""winnow.megatron behind the layers of the real Megatron-Core; its backend "none" is the oracle.

Functions whose names begin with an underscore run in the ranks, which alone import Megatron.
"""

import argparse
import contextlib
import dataclasses
import typing
import warnings
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import megatron_core
import pytest
import torch
import torch.distributed as dist
from cases import GRAD_LIMIT, Random, assert_equal, assert_within, bf16, f32, f64, offsets
from torch import Tensor

import winnow.megatron

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
    megatron_core.stay_on_the_cpu()
    winnow.megatron.register()


class _Run:
    """What a step of training gives, by name: outputs, losses, selections and gradients."""

    def __init__(
        self, backend: str, packed: bool, batch: int, masked: bool, options: dict[str, Any]
    ) -> None:
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
            documents.real_token_mask_q = torch.arange(tokens // cp) % 5 > 0  # what the loss counts
        generator = torch.Generator().manual_seed(dist.get_rank() if tp * cp > 1 else 0)
        shape = (tokens // (tp * cp), batch, made.hidden_size)
        x, d_out = (torch.randn(shape, generator=generator).to(made.params_dtype) for _ in "xd")
        x.requires_grad_()
        DSAIndexerLossLoggingHelper.tracker.clear()
        mask = None
        if masked:
            hidden = torch.rand(batch, 1, tokens, tokens, generator=generator) < 0.4
            mask = (hidden & ~torch.eye(tokens, dtype=torch.bool)) | ~torch.ones(
                tokens, tokens, dtype=torch.bool
            ).tril()
        out = x
        for layer in layers:
            if masked:
                layer.attn_mask_type = None
            out = out + layer(out, mask, packed_seq_params=documents)[0]
        out.backward(d_out)
        self.tensors = {"out": out.detach(), "d_x": x.grad}
        self.tensors |= {name: weight.grad for name, weight in layers.named_parameters()}
        self.loss = DSAIndexerLossLoggingHelper.tracker.get("values")
        carrier = documents if packed else made
        self.selections = getattr(carrier, DSAttention._HOLDER_ATTR, {})


@contextlib.contextmanager
def _reasons(declined: dict[str, str] | None) -> Iterator[None]:
    """Asserts what is declined inside, and that each reason is given once."""
    winnow.megatron._warn.cache_clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    said = [str(warning.message) for warning in caught]
    assert [text for text in said if text.startswith("winnow")] == [
        f"winnow.megatron: {function} is left to Megatron's own path: {reason}"
        for function, reason in (declined or {}).items()
    ]


def _sets(indices: Tensor) -> list[set[int]]:
    return [set(row) - {-1} for row in indices.flatten(0, 1).tolist()]


def _agree(
    packed: bool,
    options: dict[str, Any],
    batch: int = 1,
    masked: bool = False,
    declined: dict[str, str] | None = None,
) -> None:
    """Compares two layers on both backends; `declined` has the reasons by function."""
    from megatron.core import parallel_state

    sizes = {name: options[name] for name in options if name.endswith("parallel_size")}
    parallel_state.initialize_model_parallel(**sizes)
    try:
        with _reasons(declined):
            theirs, ours = (
                _Run(name, packed, batch, masked, options) for name in ("none", "winnow")
            )
    finally:
        parallel_state.destroy_model_parallel()
    limit = GRAD_LIMIT[options.get("params_dtype", f32)]
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
    with pytest.raises(
        RuntimeError, match="needs a megatron-core with a table of DSA kernel backends"
    ):
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


def _on_the_command_line() -> None:
    """By Megatron's own parser, whose package imports a name that Python has since 3.12."""
    typing.override = getattr(typing, "override", lambda function: function)
    from megatron.core.transformer.transformer_config import TransformerConfig
    from megatron.training.argument_utils import ArgumentGroupFactory

    parser = argparse.ArgumentParser()
    others = [x.name for x in dataclasses.fields(TransformerConfig)]
    others.remove("dsa_kernel_backend")
    ArgumentGroupFactory(TransformerConfig, exclude=others).build_group(parser)
    given = parser.parse_args(["--dsa-kernel-backend", "winnow"])
    assert given.dsa_kernel_backend == "winnow"
    assert parser.parse_args([]).dsa_kernel_backend == "none"


def test_the_command_line_takes_the_name(ranks):
    ranks(_on_the_command_line)


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


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(LOSS, id="sparse loss"),
        pytest.param(DENSE, id="dense loss", marks=pytest.mark.slow),
        pytest.param(SHARED, id="shared selection", marks=pytest.mark.slow),
    ],
)
def test_a_batch_agrees(ranks, options):
    ranks(_agree, False, options, batch=3)


TENSOR, CONTEXT = {"tensor_model_parallel_size": 2}, {"context_parallel_size": 2}


@pytest.mark.parametrize(
    ("split", "options", "packed"),
    [
        pytest.param(TENSOR, LOSS, True, id="tp-sparse-thd"),
        pytest.param(TENSOR, DENSE, False, id="tp-dense-sbhd"),
        pytest.param(CONTEXT, LOSS, False, id="cp-sparse-sbhd"),
        pytest.param(CONTEXT, SHARED, True, id="cp-shared-thd"),
        pytest.param(TENSOR, LOSS, False, id="tp-sparse-sbhd", marks=pytest.mark.slow),
        pytest.param(TENSOR, DENSE, True, id="tp-dense-thd", marks=pytest.mark.slow),
        pytest.param(TENSOR, SHARED, False, id="tp-shared-sbhd", marks=pytest.mark.slow),
        pytest.param(TENSOR, SHARED, True, id="tp-shared-thd", marks=pytest.mark.slow),
        pytest.param(CONTEXT, LOSS, True, id="cp-sparse-thd", marks=pytest.mark.slow),
        pytest.param(CONTEXT, DENSE, False, id="cp-dense-sbhd", marks=pytest.mark.slow),
        pytest.param(CONTEXT, DENSE, True, id="cp-dense-thd", marks=pytest.mark.slow),
        pytest.param(CONTEXT, SHARED, False, id="cp-shared-sbhd", marks=pytest.mark.slow),
    ],
)
def test_two_ranks_agree(ranks, split, options, packed):
    ranks(_agree, packed, options | split)


MASK = "a mask: a row of winnow sees the keys of one interval [start, end)"
FORM = "attention is not in the absorbed form of MLA, where a value is part of its key"


@pytest.mark.parametrize(
    "options", [{}, LOSS, DENSE, SHARED, BF16], ids=["none", "sparse", "dense", "shared", "bf16"]
)
def test_scores_without_relu_agree(ranks, options):
    ranks(_agree, True, options | {"dsa_indexer_scoring_relu": False})


def test_a_mask_is_declined(ranks):
    declined = {"run_fused_dsa_attention": MASK}
    ranks(_agree, False, LOSS, batch=2, masked=True, declined=declined)


def _unabsorbed(options: dict[str, Any], declined: dict[str, str]) -> None:
    from megatron.core import parallel_state
    from megatron.core.transformer.enums import AttnMaskType

    parallel_state.initialize_model_parallel()
    made = megatron_core.config(**options)
    core = megatron_core.layer(made).core_attention
    random = Random(3)
    inputs = [random.normal(24, 1, 4, dim, dtype=f32).requires_grad_() for dim in (24, 24, 16)]
    x, qr = (random.normal(24, 1, width, dtype=f32) for width in (64, 32))
    results = []
    for backend, reasons in (("none", {}), ("winnow", declined)):
        made.dsa_kernel_backend = backend
        with _reasons(reasons):
            out = core(*inputs, None, x, qr, attn_mask_type=AttnMaskType.causal)
        parameters = [*inputs, *(core.parameters() if options else ())]
        results.append([out, *torch.autograd.grad(out.square().sum(), parameters)])
    parallel_state.destroy_model_parallel()
    for expected, actual in zip(*results, strict=True):
        assert_within(actual, expected.double(), GRAD_LIMIT[f32])


@pytest.mark.parametrize("options", [{}, LOSS], ids=["without loss", "with loss"])
def test_keys_of_every_head_are_declined(ranks, options):
    declined = {"run_fused_dsa_attention": FORM}
    if options:
        reason = "key has 4 heads: must have one, as in the absorbed form of MLA"
        declined["run_fused_qk_topk_with_loss"] = reason
    ranks(_unabsorbed, options, declined)


def _selections_of_windows() -> None:
    from megatron.core.transformer.experimental_attention_variant.dsa import fused_qk_topk_naive

    random = Random(4)
    q, k, weights = (
        random.normal(*shape, dtype=f32) for shape in ((50, 2, 16, 32), (40, 2, 32), (50, 2, 16))
    )
    begin = random.integers(0, 40, 50)
    end = begin + random.integers(0, 30, 50)  # some windows are empty, some end behind all keys
    indices, lengths = winnow.megatron.run_fused_qk_topk(
        q, k, weights, 8, begin, end, block_size=8192, cp_size=1
    )
    _, expected = fused_qk_topk_naive(
        q, k, weights, 8, varlen_starts=begin, varlen_ends=end, use_relu=True
    )
    assert indices.shape == (2, 50, 8)
    assert _sets(indices) == _sets(expected)
    assert_equal(lengths, (expected >= 0).sum(-1).int())


def test_windows_of_any_kind_are_served(ranks):
    ranks(_selections_of_windows)


def _rows_of_this_rank() -> None:
    from megatron.core.transformer.experimental_attention_variant import dsa_layout

    cu_seqlens = offsets(DOCUMENTS)
    theirs = dsa_layout.build_packed_allgather_cp_local_positions(
        cu_seqlens, dist.get_world_size(), dist.get_rank(), cu_seqlens.device
    )
    assert_equal(winnow.Packing(cu_seqlens, group=dist.group.WORLD).rows, theirs.int())


def test_zigzag_ranks_hold_the_rows_that_a_packing_gives_them(ranks):
    """So that winnow.rollout serves the context parallel of Megatron."""
    ranks(_rows_of_this_rank)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"key": torch.zeros(4, 1, 2, 40)}, "key has 2 heads: must have one"),
        ({"v_channels": 36}, "kv_lora_rank 36: must be a multiple of 8 up to 1024"),
        (
            {"query": torch.zeros(4, 1, 2, 2000)},
            "the dimension of query 2000: must be a multiple of 8 up to 1024",
        ),
        (
            {"query": torch.zeros(4, 1, 2, 40, dtype=f64)},
            "query has dtype torch.float64: must be torch.bfloat16, torch.float16 or",
        ),
        (
            {"query": torch.zeros(4, 1, 2, 40, device="meta")},
            "query is on meta: must be on cpu or cuda",
        ),
    ],
)
def test_other_reasons(changes, reason):
    winnow.megatron._warn.cache_clear()
    arguments = {"query": torch.zeros(4, 1, 2, 40), "key": torch.zeros(4, 1, 1, 40)}
    arguments |= {"topk_indices": torch.zeros(1, 4, 2).int(), "softmax_scale": 1.0}
    arguments |= {"v_channels": 32}
    assert winnow.megatron.run_fused_absorbed_sparse_attention(**arguments).shape == (4, 1, 2, 32)
    start = "winnow.megatron: run_fused_absorbed_sparse_attention is left to Megatron's own path: "
    with pytest.warns(UserWarning, match=start + reason):
        result = winnow.megatron.run_fused_absorbed_sparse_attention(**arguments | changes)
    assert result is None


@pytest.mark.parametrize(
    ("dim", "options", "reason"),
    [
        (12, {}, "dsa_indexer_head_dim 12: must be a multiple of 8"),
        (16, {"sink": None, "bias": 1}, "bias, sink: megatron-core 0.19.2 has no such argument"),
    ],
)
def test_other_reasons_of_the_indexer(dim, options, reason):
    winnow.megatron._warn.cache_clear()
    q, k, weights = torch.zeros(4, 1, 2, dim), torch.zeros(4, 1, dim), torch.zeros(4, 1, 2)
    windows = torch.zeros(4).int(), torch.ones(4).int()
    with pytest.warns(UserWarning, match=reason):
        assert winnow.megatron.run_fused_qk_topk(q, k, weights, 2, *windows, **options) is None
