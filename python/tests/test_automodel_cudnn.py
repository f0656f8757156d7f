# SPDX-License-Identifier: Apache-2.0
"""The cuDNN names of winnow.automodel against those with TileLang, and their refusals."""

import inspect

import pytest
import torch
from cases import Random, assert_equal, bf16, f32

import winnow
from winnow import automodel

LATENT, ROPE, TOPK = 512, 8, 4
LENGTHS, OFFSETS = [5, 3], torch.tensor([0, 5, 8], dtype=torch.int32)
PADDED = torch.tensor([0, 6, 10], dtype=torch.int32)


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def indexer(tokens: int, keys: int):
    random = Random(1)
    q, k = random.normal(tokens, 4, 16, dtype=bf16), random.normal(keys, 16, dtype=bf16)
    return q, k, random.normal(tokens, 4, dtype=f32)


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("is_cudnn_dsa_available", ""),
        (
            "prepare_cudnn_dsa_packed_metadata",
            "cu_seqlens total_key_tokens max_seqlen query_indices cu_seqlens_padded padding_mask",
        ),
        (
            "cudnn_indexer_topk",
            "index_q index_k head_weights cu_seqlens index_topk query_indices cu_seqlens_padded "
            "packed_metadata",
        ),
        (
            "cudnn_sparse_attention",
            "q kv_latent topk_indices softmax_scale topk_length all_rows_nonempty "
            "valid_row_indices",
        ),
    ],
)
def test_signatures(name, parameters):
    assert " ".join(inspect.signature(getattr(automodel, name)).parameters) == parameters


def test_is_available():
    assert automodel.is_cudnn_dsa_available() is True


class TestMetadata:
    def test_without_padding(self):
        found = automodel.prepare_cudnn_dsa_packed_metadata(OFFSETS, 8, 5)
        assert_equal(found.causal_lengths, ints(1, 2, 3, 4, 5, 1, 2, 3))
        assert found.all_rows_nonempty is True and found.valid_row_indices is None

    def test_padding_sees_nothing(self):
        found = automodel.prepare_cudnn_dsa_packed_metadata(OFFSETS, 10, cu_seqlens_padded=PADDED)
        assert_equal(found.causal_lengths, ints(1, 2, 3, 4, 5, 0, 1, 2, 3, 0))
        assert found.all_rows_nonempty is False
        assert_equal(found.valid_row_indices, torch.tensor([0, 1, 2, 3, 4, 6, 7, 8]))

    def test_rows_of_a_rank_and_a_mask(self):
        """The mask also covers padding that the offsets count as part of a document."""
        found = automodel.prepare_cudnn_dsa_packed_metadata(
            OFFSETS,
            8,
            query_indices=ints(4, 5, 6, 7)[None],
            padding_mask=torch.tensor([False, False, False, True]),
        )
        assert_equal(found.causal_lengths, ints(5, 1, 2, 0))
        assert_equal(found.valid_row_indices, torch.tensor([0, 1, 2]))

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"total_key_tokens": 0}, "total_key_tokens 0: must be at least 1"),
            ({"total_key_tokens": 7}, "cu_seqlens ends at 8: must be at most 7, the tokens of the"),
            ({"query_indices": torch.zeros(3)}, "query_indices has dtype torch.float32: must be"),
            (
                {"padding_mask": torch.zeros(7).bool()},
                r"padding_mask \[7\] of torch.bool: must be torch.bool with 8 elements",
            ),
            ({"padding_mask": torch.zeros(8)}, r"padding_mask \[8\] of torch.float32: must be"),
        ],
    )
    def test_refusals(self, changes, message):
        call = {"cu_seqlens": OFFSETS, "total_key_tokens": 8}
        with pytest.raises(ValueError, match=f"^prepare_cudnn_dsa_packed_metadata: {message}"):
            automodel.prepare_cudnn_dsa_packed_metadata(**call | changes)


class TestIndexerTopk:
    def test_without_padding_as_tilelang(self):
        tensors = indexer(8, 8)
        expected = automodel.tilelang_indexer_topk(*tensors, OFFSETS, TOPK)
        assert_equal(automodel.cudnn_indexer_topk(*tensors, OFFSETS, TOPK), expected)
        metadata = automodel.prepare_cudnn_dsa_packed_metadata(OFFSETS, 8)
        actual = automodel.cudnn_indexer_topk(*tensors, OFFSETS, TOPK, packed_metadata=metadata)
        assert_equal(actual, expected)

    def test_padding_selects_nothing(self):
        tensors = indexer(10, 10)
        metadata = automodel.prepare_cudnn_dsa_packed_metadata(
            OFFSETS, 10, cu_seqlens_padded=PADDED
        )
        expected = automodel.tilelang_indexer_topk(*tensors, OFFSETS, TOPK, None, PADDED)
        expected[[5, 9]] = -1
        for options in ({"cu_seqlens_padded": PADDED}, {"packed_metadata": metadata}):
            assert_equal(automodel.cudnn_indexer_topk(*tensors, OFFSETS, TOPK, **options), expected)

    def test_metadata_of_another_library_is_refused(self):
        message = "packed_metadata is a dict of builtins: must be made by winnow.automodel.prepare"
        with pytest.raises(TypeError, match=message):
            automodel.cudnn_indexer_topk(*indexer(8, 8), OFFSETS, TOPK, packed_metadata={})


class TestSparseAttention:
    def inputs(self):
        random = Random(2)
        q = random.normal(6, 2, LATENT + ROPE, dtype=f32).requires_grad_()
        kv = random.normal(7, 1, LATENT + ROPE, dtype=f32).requires_grad_()
        return q, kv, random.integers(-1, 6, 6, 1, TOPK)

    def test_is_attention_with_the_latent_as_value(self):
        q, kv, indices = self.inputs()
        lengths = ints(4, 0, 1, 2, 3, 4)
        out = automodel.cudnn_sparse_attention(q, kv, indices, 0.05, topk_length=lengths)
        expected = winnow.sparse_attention(
            q, kv[:, 0], indices[:, 0], v_dim=LATENT, scale=0.05, lengths=lengths
        ).out
        assert out.shape == (6, 2, LATENT)
        assert_equal(out, expected)
        assert not out[1].any()
        for a, b in zip(
            torch.autograd.grad(out.sum(), (q, kv)),
            torch.autograd.grad(expected.sum(), (q, kv)),
            strict=True,
        ):
            assert_equal(a, b)

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"q": torch.ones(6, 2, 64)}, r"q \[6, 2, 64\]: must have at least 512 channels"),
            ({"softmax_scale": None}, "softmax_scale None: must be given"),
            ({"topk_length": torch.ones(6)}, "topk_length has dtype torch.float32: must be int32"),
            ({"topk_indices": torch.ones(6, 1, 2)}, "topk_indices has dtype torch.float32: must"),
        ],
    )
    def test_refusals(self, changes, message):
        call = dict(zip(("q", "kv_latent", "topk_indices"), self.inputs(), strict=True))
        with pytest.raises(ValueError, match=f"^cudnn_sparse_attention: {message}"):
            automodel.cudnn_sparse_attention(**call | {"softmax_scale": 1.0} | changes)
