# SPDX-License-Identifier: Apache-2.0
"""index_target, index_loss and dense_index_loss against the formulas in plain torch."""

import math

import native
import pytest
import torch
from cases import (
    GRAD_LIMIT,
    LOW,
    SCALE,
    Random,
    assert_equal,
    assert_near,
    assert_rounded,
    assert_within,
    bf16,
    dims,
    f32,
    f64,
    gradients,
    heads,
    make_sink,
    oracle_inputs,
    packings,
    seeds,
)
from hypothesis import given
from hypothesis import strategies as st

from winnow import _lib, reference

sink_kinds = st.sampled_from([None, "normal", -math.inf, math.inf])


@given(seeds, st.integers(0, 5), st.integers(0, 8), st.integers(0, 3), heads, dims, sink_kinds)
def test_index_target(seed, tokens, pools, rows, n, dim, sink_kind):
    """Attention over rows and pools, and the target of the selected pools."""
    random = Random(seed)
    q, kv = random.normal(tokens, n, dim), random.normal(rows + pools, dim)
    chosen = random.lists(tokens, 4, pools)
    lengths = random.integers(0, 4, tokens)
    sink = make_sink(random, sink_kind, n)
    own_rows = torch.arange(rows).int().expand(tokens, -1)
    pool_part = torch.where((chosen >= 0) & (torch.arange(4) < lengths[:, None]), chosen + rows, -1)
    attention = {"scale": SCALE, "sink": sink}
    _, lse, _ = native.sparse_attention(
        q, kv, torch.cat([own_rows, pool_part], 1).int(), dim, **attention
    )
    options = attention | {"lengths": lengths, "key_offset": rows}
    actual = native.index_target(q, kv, chosen, lse, **options)
    assert_near(actual, reference.index_target(q, kv, chosen, lse, **options))
    if rows == 0 and sink_kind is None:  # attention is only on the selected keys
        keys = ((pool_part >= 0) & (pool_part < pools)).any(1)
        assert_near(actual.sum(1), torch.where(keys, float(n), 0.0).to(f64))


@pytest.mark.parametrize("dtype", LOW)
def test_index_target_of_working_types(dtype):
    random = Random(1)
    q, kv = random.normal(20, 4, 64, dtype=dtype), random.normal(30, 64, dtype=dtype)
    indices = random.lists(20, 9, 30)
    sink = random.normal(4, dtype=f32)
    _, lse, _ = native.sparse_attention(q, kv, indices, 64, sink=sink, scale=0.125)
    actual = native.index_target(q, kv, indices, lse, sink=sink, scale=0.125)
    exact = [x.detach() for x in oracle_inputs(q, kv, lse, sink)]
    expected = reference.index_target(*exact[:2], indices, exact[2], sink=exact[3], scale=0.125)
    assert_within(actual, expected, 1e-5)


def test_index_target_reads_no_key_that_no_slot_names():
    random = Random(2)
    q, kv, lse = random.normal(2, 2, 8), random.normal(5, 8), random.normal(2, 2)
    indices = torch.tensor([[0, -1, 3], [1, 2, 7]]).int()  # with the offset 1: keys 1, 4; 2, 3
    clean = native.index_target(q, kv, indices, lse, scale=SCALE, key_offset=1)
    kv[0] = math.nan
    assert_equal(native.index_target(q, kv, indices, lse, scale=SCALE, key_offset=1), clean)
    assert clean[0, 1] == 0 and clean[1, 2] == 0 and (clean != 0).sum() == 4


@given(seeds, st.integers(0, 6), st.sampled_from([1, 2, 3, 7]), st.booleans())
def test_index_loss(seed, tokens, topk, with_lengths):
    random = Random(seed)
    indices = random.integers(-1, 5, tokens, topk)
    lengths = random.integers(0, topk, tokens) if with_lengths else None
    scores = random.normal(tokens, topk) * 3
    scores = torch.where(random.integers(0, 5, tokens, topk) == 0, -math.inf, scores)
    target = random.normal(tokens, topk).abs() * random.integers(0, 1, tokens, topk)
    (exact_scores,) = oracle_inputs(scores)
    expected = reference.index_loss(exact_scores, target, indices, lengths)
    loss, d_scores = native.index_loss(scores, target, indices, lengths=lengths)
    assert_near(loss, expected)
    (exact,) = gradients([(expected, torch.ones(tokens))], [exact_scores])
    assert_near(d_scores, exact)


class TestRowsThatDoNotCount:
    def loss(self, indices, scores, target, **options):
        scores, target = (torch.tensor([x], dtype=f64) for x in (scores, target))
        return native.index_loss(scores, target, torch.tensor([indices]).int(), **options)

    @pytest.mark.parametrize(
        ("indices", "scores", "target"),
        [
            ([-1, -1, -1], [1, 2, 3], [1, 1, 1]),
            ([4, -1, -1], [1, math.nan, 3], [1, math.nan, 1]),
            ([4, 5, -1], [1, -math.inf, 3], [1, 1, 1]),
            ([4, 5, 6], [1, 2, 3], [0, 0, 0]),
            ([4, 5, -1], [1, 2, 3], [0, 0, 1]),
        ],
    )
    def test_zero_loss_and_gradient(self, indices, scores, target):
        loss, d_scores = self.loss(indices, scores, target)
        assert loss.tolist() == [0] and d_scores.tolist() == [[0, 0, 0]]

    def test_a_slot_past_lengths_is_none(self):
        lengths = torch.tensor([2]).int()
        loss, d_scores = self.loss([4, 5, 6], [0, 0, math.nan], [1, 3, math.nan], lengths=lengths)
        expected = 0.25 * math.log(0.25 / 0.5) + 0.75 * math.log(0.75 / 0.5)
        assert loss.item() == pytest.approx(expected, rel=1e-12)
        assert d_scores.tolist() == [[0.25, -0.25, 0]]

    def test_equal_distributions(self):
        loss, d_scores = self.loss([1, 2, 3], [0, math.log(2), math.log(5)], [10, 20, 50])
        assert abs(loss.item()) < 1e-15 and d_scores.abs().max() < 1e-15


def test_index_loss_in_f32():
    random = Random(3)
    scores, target = random.normal(30, 9, dtype=f32) * 4, random.normal(30, 9, dtype=f32).abs()
    indices = random.integers(-1, 5, 30, 9)
    (exact_scores,) = oracle_inputs(scores)
    expected = reference.index_loss(exact_scores, target.to(f64), indices)
    loss, d_scores = native.index_loss(scores, target, indices)
    assert_within(loss, expected.detach(), 1e-5)
    assert_within(d_scores, *gradients([(expected, torch.ones(30))], [exact_scores]), 1e-5)


def dense_tensors(random: Random, begin, end, index_keys, n, dim, key_offset=0, dtype=f64):
    tokens = len(begin)
    return (
        random.normal(tokens, n, dim, dtype=dtype),
        random.normal(key_offset + index_keys + 2, dim, dtype=dtype),
        random.normal(tokens, 2, 8, dtype=dtype),
        random.normal(index_keys, 8, dtype=dtype),
        random.normal(tokens, 2, dtype=f64 if dtype == f64 else f32),
        begin,
        end,
    )


@given(packings(), st.integers(1, 2), st.integers(0, 3), seeds, heads, dims, sink_kinds)
def test_dense_index_loss(packing, ratio, key_offset, seed, n, dim, sink_kind):
    random = Random(seed)
    begin, end = reference.key_windows(
        packing.cu_seqlens, packing.tokens, ratio=ratio, **packing.options
    )
    tensors = dense_tensors(random, begin, end, packing.tokens, n, dim, key_offset)
    options = {"sink": make_sink(random, sink_kind, n), "scale": SCALE, "key_offset": key_offset}
    index_q, index_k, weights = oracle_inputs(*tensors[2:5])
    exact = (*tensors[:2], index_q, index_k, weights, begin, end)
    expected, expected_lse = reference.dense_index_loss(*exact, **options)
    loss, lse = native.dense_index_loss(*tensors, **options)
    assert_near(loss, expected)
    assert_near(lse, expected_lse)

    d_loss = random.normal(packing.tokens)
    before = random.normal(*index_k.shape)
    actual = native.dense_index_loss_backward(
        *tensors, lse=lse, d_loss=d_loss, d_index_k=before.clone(), **options
    )
    d_index_q, d_weights, d_index_k = gradients([(expected, d_loss)], [index_q, weights, index_k])
    for a, b in zip(actual, (d_index_q, d_weights, d_index_k + before), strict=True):
        assert_near(a, b)


@pytest.mark.parametrize("dtype", LOW)
def test_dense_index_loss_of_working_types(dtype):
    random = Random(4)
    begin, end = reference.key_windows(torch.tensor([0, 17, 40]), 40)
    tensors = dense_tensors(random, begin, end, 40, 3, 64, dtype=dtype)
    sink = random.normal(3, dtype=f32)
    d_loss = random.normal(40, dtype=f32)
    exact = oracle_inputs(*tensors[:5], sink)
    options = {"scale": 0.125}
    expected, expected_lse = reference.dense_index_loss(
        *exact[:5], begin, end, sink=exact[5], **options
    )
    options["sink"] = sink
    loss, lse = native.dense_index_loss(*tensors, **options)
    assert_within(loss, expected.detach(), 1e-5)
    assert_near(lse, expected_lse, 1e-5)
    actual = native.dense_index_loss_backward(*tensors, lse=lse, d_loss=d_loss, **options)
    assert [x.dtype for x in actual] == [dtype, f32, f32]
    wanted = gradients([(expected, d_loss)], [exact[2], exact[4], exact[3]])
    for a, b in zip(actual, wanted, strict=True):
        assert_within(a, b, GRAD_LIMIT[dtype])
    if dtype != f32:
        rounded = native.poison(*tensors[3].shape, dtype=dtype)
        options |= {"lse": lse, "d_loss": d_loss}
        native.dense_index_loss_backward(*tensors, d_index_k=rounded, **options)
        assert_rounded(rounded, actual[2])


@pytest.mark.parametrize("dtype", [f64, bf16])
def test_dense_index_loss_sees_nothing_outside_the_windows(dtype):
    random = Random(5)
    begin, end = torch.tensor([1, 2, 0, 2]).int(), torch.tensor([4, 2, 0, 3]).int()
    tensors = dense_tensors(random, begin, end, 6, 2, 8, dtype=dtype)
    d_loss = torch.ones(4, dtype=tensors[4].dtype)

    def both():
        loss, lse = native.dense_index_loss(*tensors, scale=SCALE)
        grads = native.dense_index_loss_backward(*tensors, lse=lse, d_loss=d_loss, scale=SCALE)
        return loss, lse, *grads

    clean = both()
    for x in (tensors[1], tensors[3]):
        x[0] = x[4:] = math.nan
    for x in (tensors[0], tensors[2], tensors[4], d_loss):
        x[1:3] = math.nan
    d_loss[3] = math.nan  # a row with a single key has no loss
    for a, b in zip(both(), clean, strict=True):
        assert_equal(a, b)


def test_sparse_and_dense_loss_agree_where_everything_is_chosen():
    random = Random(6)
    begin, end = reference.key_windows(torch.tensor([0, 5, 12]), 12)
    tensors = dense_tensors(random, begin, end, 12, 2, 16)
    q, kv, index_q, index_k, weights = tensors[:5]
    dense, dense_lse = native.dense_index_loss(*tensors, scale=SCALE)
    indices, lengths, scores = native.index_topk(index_q, index_k, weights, begin, end, 12)
    _, lse, _ = native.sparse_attention(q, kv, indices, 16, scale=SCALE)
    assert_near(lse, dense_lse)
    target = native.index_target(q, kv, indices, lse, scale=SCALE)
    assert_near(native.index_loss(scores, target, indices, lengths=lengths)[0], dense)


@pytest.mark.parametrize(
    ("op", "argument", "value"),
    [
        ("index_target", "scale", 0.0),
        ("index_target", "lse", torch.zeros(3, 2)),
        ("index_target", "target", torch.zeros(3, 5, dtype=f64)),
        ("index_target", "key_offset", -1),
        ("index_target", "lengths", torch.tensor([5, 0, 0]).int()),
        ("index_loss", "scores", torch.zeros(3, 4, dtype=bf16)),
        ("index_loss", "target", torch.zeros(3, 4)),
        ("index_loss", "loss", torch.zeros(3, 1, dtype=f64)),
        ("index_loss", "d_scores", None),
        ("dense_index_loss_forward", "scale", math.nan),
        ("dense_index_loss_forward", "index_k", torch.zeros(7, 16, dtype=f64)),
        ("dense_index_loss_forward", "index_k", torch.zeros(9, 8, dtype=f64)),
        ("dense_index_loss_forward", "end", torch.tensor([1, 8, 0]).int()),
        ("dense_index_loss_forward", "key_offset", 9),
    ],
)
def test_refusals_name_the_argument(op, argument, value):
    calls = {
        "index_target": {
            "q": torch.zeros(3, 2, 8, dtype=f64),
            "kv": torch.zeros(6, 8, dtype=f64),
            "indices": torch.zeros(3, 4).int(),
            "lse": torch.zeros(3, 2, dtype=f64),
            "target": torch.zeros(3, 4, dtype=f64),
            "scale": 1.0,
        },
        "index_loss": {
            "indices": torch.zeros(3, 4).int(),
            "scores": torch.zeros(3, 4, dtype=f64),
            "target": torch.zeros(3, 4, dtype=f64),
            "loss": torch.zeros(3, dtype=f64),
            "d_scores": torch.zeros(3, 4, dtype=f64),
        },
        "dense_index_loss_forward": {
            "q": torch.zeros(3, 2, 8, dtype=f64),
            "kv": torch.zeros(8, 8, dtype=f64),
            "index_q": torch.zeros(3, 2, 8, dtype=f64),
            "index_k": torch.zeros(7, 8, dtype=f64),
            "weights": torch.zeros(3, 2, dtype=f64),
            "begin": torch.zeros(3).int(),
            "end": torch.zeros(3).int(),
            "loss": torch.zeros(3, dtype=f64),
            "lse": torch.zeros(3, 2, dtype=f64),
            "scale": 1.0,
        },
    }
    _lib.run(op, native.REFERENCE, **calls[op])
    with pytest.raises(ValueError, match=f"{op}: {argument}\\b"):
        _lib.run(op, native.REFERENCE, **calls[op] | {argument: value})
