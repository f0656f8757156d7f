# SPDX-License-Identifier: Apache-2.0
"""Packing and window_indices of the package against the formulas in plain torch."""

import re

import numpy as np
import pytest
import torch
from cases import Random, assert_equal, offsets, packings, seeds
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

import winnow
from winnow import reference


@given(packings(), st.integers(1, 4), st.sampled_from(["empty", "see_document"]))
def test_windows(packing, ratio, padding_rows):
    options = packing.options | {"padding_rows": padding_rows}
    made = winnow.Packing(packing.cu_seqlens, tokens=packing.tokens, **options)
    expected = reference.key_windows(packing.cu_seqlens, packing.tokens, ratio=ratio, **options)
    assert made.tokens == packing.tokens
    for actual, exact in zip(made.windows(ratio), expected, strict=True):
        assert_equal(actual, exact)


def test_the_documents_say_how_many_rows_there_are():
    assert winnow.Packing(offsets([3, 0, 2])).tokens == 5
    assert winnow.Packing(offsets([3, 0, 2]), offsets([4, 1, 4])).tokens == 9
    assert winnow.Packing(offsets([3, 2]), query_rows=torch.tensor([4, -1]).int()).tokens == 2
    assert winnow.Packing(offsets([])).tokens == 0
    windows = winnow.Packing(offsets([3, 2]), tokens=7).windows()
    assert (windows.end - windows.begin).tolist() == [1, 2, 3, 1, 2, 0, 0]


def test_windows_are_made_once():
    packing = winnow.Packing(offsets([3, 2]))
    assert packing.windows() is packing.windows(1)
    assert packing.windows(2) is packing.windows(2)
    assert packing.windows(2).end.tolist() == [0, 1, 1, 1, 2]


def test_arrays_of_other_libraries():
    packing = winnow.Packing(np.array([0, 3, 5], np.int32), np.array([0, 4, 7], np.int32))
    expected = winnow.Packing(offsets([3, 2]), offsets([4, 3]))
    for actual, exact in zip(packing.windows(), expected.windows(), strict=True):
        assert_equal(actual, exact)


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        (
            {"cu_seqlens": torch.tensor([0, 3])},
            ValueError,
            "Packing: cu_seqlens has dtype int64: must be int32$",
        ),
        (
            {"cu_seqlens_padded": torch.tensor([0, 3, 5])},
            ValueError,
            "Packing: cu_seqlens_padded has dtype int64: must be int32$",
        ),
        (
            {"query_rows": torch.tensor([0.0])},
            ValueError,
            "Packing: query_rows has dtype float32: must be int32$",
        ),
        ({"cu_seqlens": torch.tensor([1, 3]).int()}, ValueError, r"cu_seqlens\[0\] 1: must be 0"),
        ({"cu_seqlens": torch.tensor([0, 3, 2]).int()}, ValueError, r"cu_seqlens\[2\] 2"),
        ({"cu_seqlens": torch.tensor([0, -3]).int()}, ValueError, r"cu_seqlens\[1\] -3"),
        ({"cu_seqlens": torch.tensor([]).int()}, ValueError, "cu_seqlens i32"),
        ({"cu_seqlens": torch.tensor([[0, 3]]).int()}, ValueError, "cu_seqlens i32"),
        ({"cu_seqlens": [0, 3]}, TypeError, "Packing: cu_seqlens is a list: must be a tensor"),
        ({"cu_seqlens_padded": offsets([3])}, ValueError, "cu_seqlens_padded i32"),
        ({"query_rows": torch.tensor([-2]).int()}, ValueError, r"query_rows\[0\] -2"),
        ({"query_rows": torch.tensor([0, 1]).int(), "tokens": 3}, ValueError, "begin i32"),
        ({"padding_rows": "none"}, ValueError, "padding_rows 'none': must be one of empty"),
        ({"tokens": -1}, ValueError, "Packing: tokens -1: must be at least 0"),
        ({"tokens": 4}, ValueError, "Packing: cu_seqlens ends at 5: must be at most tokens 4"),
        (
            {"cu_seqlens_padded": torch.tensor([0, 4, 7]).int(), "tokens": 6},
            ValueError,
            "Packing: cu_seqlens_padded ends at 7: must be at most tokens 6",
        ),
        ({"tokens": 7.0}, TypeError, "Packing: tokens 7.0: must be an integer"),
        ({"sharding": "striped"}, ValueError, "Packing: sharding 'striped': must be one of cont"),
        ({"multiple": 0}, ValueError, "Packing: multiple 0: must be at least 1"),
        ({"backend": "gpu"}, ValueError, "backend 'gpu': must be one of automatic"),
    ],
)
def test_what_is_wrong_is_named(arguments, error, text):
    with pytest.raises(error, match=text):
        winnow.Packing(**{"cu_seqlens": offsets([3, 2])} | arguments)


def test_ratio_is_checked():
    with pytest.raises(ValueError, match="Packing.windows: ratio 0: must be at least 1"):
        winnow.Packing(offsets([3, 2])).windows(0)
    for ratio in ([2], 1.0, True):
        with pytest.raises(TypeError, match="Packing.windows: ratio .*: must be an integer"):
            winnow.Packing(offsets([3, 2])).windows(ratio)


class TestRowsWithoutAGroup:
    """As with one: packing.shard and gather_keys refuse another number of rows."""

    @pytest.mark.parametrize(
        ("ratio", "rows"), [(1, 5), (2, 2), ((1, 2), 7)], ids=["rows", "pools", "both"]
    )
    def test_keys_must_be_those_of_the_batch(self, ratio, rows):
        packing = winnow.Packing(offsets([3, 2]))
        x = torch.zeros(rows, 8)
        assert (
            packing.shard(x, ratio) is x and winnow.gather_keys(x, packing, ratio=ratio).whole is x
        )
        for wrong in (torch.zeros(rows + 1, 8), torch.zeros(rows - 1, 8), torch.zeros(())):
            told = rf"{re.escape(str(list(wrong.shape)))}: must have {rows} rows, those of"
            with pytest.raises(ValueError, match=f"^Packing.shard: x {told} the whole batch$"):
                packing.shard(wrong, ratio)
            with pytest.raises(ValueError, match=f"^gather_keys: x {told} this rank "):
                winnow.gather_keys(wrong, packing, ratio=ratio)

    def test_query_rows_do_not_say_how_many_keys_there_are(self):
        packing = winnow.Packing(offsets([3, 2]), query_rows=torch.tensor([4]).int())
        assert winnow.gather_keys(torch.zeros(6, 8), packing).whole.shape == (6, 8)
        for ratio in (1, 2, (1, 2)):
            assert packing.own_keys(ratio) is None
            x = torch.zeros(1, 8)
            assert winnow.gather_keys(x, packing, ratio=ratio).whole is packing.shard(x, ratio) is x

    def test_pools_are_counted_without_making_them(self, monkeypatch):
        packing = winnow.Packing(offsets([3, 4]))
        monkeypatch.setattr(winnow.Packing, "pool_rows", None)
        assert packing.own_keys(2) == 3 and packing.own_keys((1, 2)) == 10

    def test_pools_are_where_the_offsets_are_whatever_the_default_device(self):
        packing = winnow.Packing(offsets([3, 4]))
        with torch.device("meta"):  # cuda, as a rule
            assert packing.pool_rows(2).tolist() == [[0, 1], [3, 4], [5, 6]]

    @pytest.mark.parametrize("allow", [True, False])
    def test_fake_tensors_are_counted_too(self, allow):
        packing = winnow.Packing(offsets([3, 4]))
        with FakeTensorMode(allow_non_fake_inputs=allow):
            assert winnow.gather_keys(torch.ones(3, 8), packing, ratio=2).whole.shape == (3, 8)
            with pytest.raises(ValueError, match=r"^gather_keys: x \[4, 8\]: must have 3 rows"):
                winnow.gather_keys(torch.ones(4, 8), packing, ratio=2)

    def test_fake_offsets_have_no_numbers(self):
        with FakeTensorMode():
            packing = winnow.Packing(offsets([3, 4]), tokens=7)
            assert packing.windows(2).end.shape == (7,)
            assert packing.own_keys(2) is None and packing.own_keys() == 7
            assert winnow.gather_keys(torch.ones(3, 8), packing, ratio=2).whole.shape == (3, 8)

    @pytest.mark.parametrize(
        ("ratio", "error", "text"),
        [
            (0, ValueError, "ratio 0: must be at least 1"),
            ((1, -2), ValueError, "ratio -2: must be at least 1"),
            ((), ValueError, r"ratio \(\): must not be empty"),
            (True, TypeError, "ratio True: must be an integer"),
            (1.0, TypeError, "ratio 1.0: must be an integer"),
            ((1, 2.0), TypeError, "ratio 2.0: must be an integer"),
            (None, TypeError, "ratio None: must be an integer"),
        ],
    )
    @pytest.mark.parametrize("counted", [True, False])
    def test_ratios_are_checked_in_the_name_of_the_call(self, ratio, error, text, counted):
        """Where nothing is counted, too, as with offsets on a GPU."""
        rows = None if counted else torch.tensor([4]).int()
        packing, x = winnow.Packing(offsets([3, 2]), query_rows=rows), torch.zeros(5, 8)
        for name, call in {
            "Packing.own_keys": packing.own_keys,
            "Packing.shard": lambda ratio: packing.shard(x, ratio),
            "gather_keys": lambda ratio: winnow.gather_keys(x, packing, ratio=ratio),
        }.items():
            with pytest.raises(error, match=f"^{name}: {text}$"):
                call(ratio)

    def test_what_has_no_rows_is_named(self):
        packing = winnow.Packing(offsets([3, 2]))
        with pytest.raises(TypeError, match=r"^Packing.shard: x is a list: must be a tensor"):
            packing.shard([1.0] * 5)

    def test_the_check_is_traced(self):
        def double(x, packing):
            return 2 * winnow.gather_keys(packing.shard(x), packing).whole

        torch._dynamo.reset()
        compiled = torch.compile(double, fullgraph=True, dynamic=True, backend="aot_eager")
        for lengths in ([3, 4], [5, 1, 6]):
            x = torch.ones(sum(lengths), 8)
            assert_equal(compiled(x, winnow.Packing(offsets(lengths))), 2 * x)


class TestWindowIndices:
    @given(packings(1), st.integers(1, 6), st.sampled_from([0, 2, 3]), st.booleans(), seeds)
    def test_against_plain_torch(self, packing, window, ratio, choose, seed):
        made = winnow.Packing(packing.cu_seqlens, tokens=packing.tokens, **packing.options)
        options = {"window": window, "ratio": ratio, "key_offset": packing.tokens}
        if choose and ratio:
            options["pool_ids"] = Random(seed).integers(-2, 9, packing.tokens, 4)
        indices, lengths = winnow.window_indices(made, **options)
        expected = reference.window_indices(
            packing.cu_seqlens, packing.tokens, indices.shape[1], **packing.options, **options
        )
        assert_equal(indices, expected[0])
        assert_equal(lengths, expected[1])

    def test_golden_values(self):
        packing = winnow.Packing(offsets([8]), query_rows=torch.tensor([4, 5]).int())
        options = {"window": 4, "ratio": 4, "key_offset": 8, "topk": 6}
        indices, lengths = winnow.window_indices(packing, **options)
        assert indices.tolist() == [[1, 2, 3, 4, 8, -1], [2, 3, 4, 5, 8, -1]]
        assert lengths.tolist() == [5, 5]

    @pytest.mark.parametrize(
        ("options", "text"),
        [
            ({}, "topk 0: must be at least 1"),
            ({"window": 2, "topk": 1}, "window_indices: indices i32"),
            ({"window": 2, "ratio": 1}, "window_indices: ratio 1"),
            ({"window": 2, "ratio": 2, "key_offset": 3}, "window_indices: key_offset 3"),
            ({"window": 2, "pool_ids": torch.zeros(5, 2).int()}, "window_indices: pool_ids"),
            ({"window": 2, "ratio": -2, "topk": 4}, "window_indices: ratio -2"),
            ({"window": 2**30 + 1}, "window_indices: window 1073741825: must be at most"),
            ({"window": 2**30, "ratio": 2}, "window 1073741824: must be at most 1073741822"),
            (
                {"window": 2**30, "ratio": 2, "pool_ids": torch.zeros(5, 3).int()},
                "window 1073741824: must be at most 1073741821",
            ),
            ({"window": 2, "ratio": 2, "pool_ids": torch.tensor(0).int()}, "pool_ids i32"),
        ],
    )
    def test_what_is_wrong_is_named(self, options, text):
        with pytest.raises(ValueError, match=text):
            winnow.window_indices(winnow.Packing(offsets([3, 2])), **options)

    def test_offsets_are_no_packing(self):
        with pytest.raises(TypeError, match="window_indices: packing is a Tensor: must be a Pack"):
            winnow.window_indices(offsets([3, 2]), window=2)

    def test_rows_of_one_rank_do_not_say_how_long_lists_get(self):
        packing = winnow.Packing(offsets([8]), query_rows=torch.tensor([7]).int())
        with pytest.raises(ValueError, match="topk None: must be given"):
            winnow.window_indices(packing, ratio=2, key_offset=8)
        assert winnow.window_indices(packing, window=3).indices.tolist() == [[5, 6, 7]]
