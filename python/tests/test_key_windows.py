# SPDX-License-Identifier: Apache-2.0
"""key_windows and window_indices against the formulas in plain torch."""

import native
import pytest
import torch
from cases import Random, assert_equal, offsets, packings, seeds
from hypothesis import given
from hypothesis import strategies as st

from winnow import reference


def ints(*values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize("module", [native, reference])
class TestGoldenValues:
    def test_compact_documents(self, module):
        begin, end = module.key_windows(ints(0, 3, 5), 5)
        assert (begin.tolist(), end.tolist()) == ([0, 0, 0, 3, 3], [1, 2, 3, 4, 5])

    def test_padding_keys_are_never_seen(self, module):
        padded = {"cu_seqlens_padded": ints(0, 4, 8), "padding_rows": "see_document"}
        begin, end = module.key_windows(ints(0, 2, 5), 8, **padded)
        assert begin.tolist() == [0, 0, 0, 0, 4, 4, 4, 4]
        assert end.tolist() == [1, 2, 2, 2, 5, 6, 7, 7]

    def test_padding_rows_are_empty_by_default(self, module):
        begin, end = module.key_windows(ints(0, 2, 5), 9, cu_seqlens_padded=ints(0, 4, 8))
        assert (end - begin).tolist() == [1, 2, 0, 0, 1, 2, 3, 0, 0]

    def test_query_rows(self, module):
        rows = {"cu_seqlens_padded": ints(0, 4, 8), "query_rows": ints(1, 4, 6, -1, 8)}
        begin, end = module.key_windows(ints(0, 2, 5), 5, padding_rows="see_document", **rows)
        assert (begin.tolist(), end.tolist()) == ([0, 4, 4, 0, 0], [2, 5, 7, 0, 0])

    def test_padding_row_of_an_empty_document_sees_one_key(self, module):
        padded = {"cu_seqlens_padded": ints(0, 2, 4), "padding_rows": "see_document"}
        begin, end = module.key_windows(ints(0, 0, 2), 4, **padded)
        assert (begin.tolist(), end.tolist()) == ([0, 0, 2, 2], [1, 1, 3, 4])

    def test_pools_of_one_document_stand_behind_those_of_another(self, module):
        begin, end = module.key_windows(ints(0, 9, 14), 14, ratio=4)
        assert begin.tolist() == [0] * 9 + [2] * 5
        assert end.tolist() == [0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 2, 3, 3]

    def test_window_then_pools(self, module):
        options = {"window": 4, "ratio": 4, "key_offset": 8, "query_rows": ints(4, 5)}
        indices, lengths = module.window_indices(ints(0, 8), 2, 6, **options)
        assert indices.tolist() == [[1, 2, 3, 4, 8, -1], [2, 3, 4, 5, 8, -1]]
        assert lengths.tolist() == [5, 5]

    def test_chosen_pools_keep_their_order_and_leave_no_gaps(self, module):
        # 99 and -1 are invalid, pool 1 is not complete at row 5, 2 belongs to the next document.
        pool_ids = ints([1, -1, 0, 99], [3, 1, 0, 2])
        options = {"window": 2, "ratio": 4, "key_offset": 20, "query_rows": ints(5, 15)}
        options |= {"pool_ids": pool_ids}
        indices, lengths = module.window_indices(ints(0, 8, 16), 2, 6, **options)
        assert indices.tolist() == [[4, 5, 20, -1, -1, -1], [14, 15, 23, 22, -1, -1]]
        assert lengths.tolist() == [3, 4]


@st.composite
def query_rows(draw, tokens: int):
    """None, or some of the rows in any order, including -1."""
    rows = draw(st.none() | st.lists(st.integers(-1, tokens + 1), max_size=12))
    return None if rows is None else torch.tensor(rows, dtype=torch.int32)


@given(packings(), st.integers(1, 5), st.sampled_from(["empty", "see_document"]), st.data())
def test_key_windows(packing, ratio, padding_rows, data):
    rows = data.draw(query_rows(packing.tokens))
    tokens = packing.tokens if rows is None else len(rows)
    options = packing.options | {"query_rows": rows, "ratio": ratio, "padding_rows": padding_rows}
    actual = native.key_windows(packing.cu_seqlens, tokens, **options)
    expected = reference.key_windows(packing.cu_seqlens, tokens, **options)
    for a, b in zip(actual, expected, strict=True):
        assert_equal(a, b)


@given(
    packings(), st.integers(0, 6), st.sampled_from([0, 2, 3, 4]), st.booleans(), seeds, st.data()
)
def test_window_indices(packing, window, ratio, choose, seed, data):
    rows = data.draw(query_rows(packing.tokens))
    tokens = packing.tokens if rows is None else len(rows)
    options = packing.options | {"query_rows": rows, "window": window, "ratio": ratio}
    options["key_offset"] = packing.tokens + 3
    pools = 10
    if choose and ratio:
        options["pool_ids"] = Random(seed).integers(-2, pools, tokens, pools)
    topk = max(window + pools, 1)
    actual = native.window_indices(packing.cu_seqlens, tokens, topk, **options)
    expected = reference.window_indices(packing.cu_seqlens, tokens, topk, **options)
    for a, b in zip(actual, expected, strict=True):
        assert_equal(a, b)


def test_a_document_has_the_same_windows_alone_and_packed():
    lengths = [5, 0, 8, 1, 3]
    cu_seqlens = offsets(lengths)
    for ratio in (1, 2):
        begin, end = native.key_windows(cu_seqlens, sum(lengths), ratio=ratio)
        first_key = 0
        for i, length in enumerate(lengths):
            alone = native.key_windows(offsets([length]), length, ratio=ratio)
            own = slice(cu_seqlens[i], cu_seqlens[i + 1])
            assert_equal(begin[own], alone[0] + first_key)
            assert_equal(end[own], alone[1] + first_key)
            first_key += length // ratio


@pytest.mark.parametrize(
    ("change", "argument"),
    [
        ({"cu_seqlens": ints(1, 3)}, "cu_seqlens"),
        ({"cu_seqlens": ints(0, 3, 2)}, "cu_seqlens"),
        ({"cu_seqlens": ints(0, -3)}, "cu_seqlens"),
        ({"cu_seqlens": ints()}, "cu_seqlens"),
        ({"cu_seqlens": ints([0, 3])}, "cu_seqlens"),
        ({"cu_seqlens": torch.tensor([0, 3])}, "cu_seqlens"),
        ({"cu_seqlens": None}, "cu_seqlens"),
        ({"cu_seqlens_padded": ints(0, 2)}, "cu_seqlens_padded"),
        ({"cu_seqlens_padded": ints(0, 3, 4)}, "cu_seqlens_padded"),
        ({"query_rows": ints(0, 1, -2)}, "query_rows"),
        ({"query_rows": ints(0, 1)}, "begin"),
        ({"ratio": 0}, "ratio"),
        ({"ratio": -1}, "ratio"),
        ({"padding_rows": "some"}, "padding_rows"),
    ],
)
def test_refusals_name_the_argument(change, argument):
    arguments = {"cu_seqlens": ints(0, 3)} | change
    cu_seqlens = arguments.pop("cu_seqlens")
    with pytest.raises(ValueError, match=f"key_windows: {argument}\\b"):
        native.key_windows(cu_seqlens, 3, **arguments)


@pytest.mark.parametrize(
    ("change", "argument"),
    [
        ({"window": -1}, "window"),
        ({"window": 4}, "indices"),
        ({"ratio": 2, "key_offset": 7}, "key_offset"),
        ({"ratio": 1, "key_offset": 8}, "ratio"),
        ({"ratio": 2, "key_offset": 8}, "indices"),
        ({"pool_ids": torch.zeros(8, 2, dtype=torch.int32)}, "pool_ids"),
        ({"query_rows": ints(-5, 0, 0, 0, 0, 0, 0, 0)}, "query_rows"),
    ],
)
def test_index_lists_that_cannot_be_are_refused(change, argument):
    with pytest.raises(ValueError, match=f"window_indices: {argument}\\b"):
        native.window_indices(ints(0, 8), 8, 3, **change)
