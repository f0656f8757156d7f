# SPDX-License-Identifier: Apache-2.0
"""The differentiable functions against plain torch: forward, gradients, edge cases, errors."""

import math
import re
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import torch
from cases import (
    GRAD_LIMIT,
    LOW,
    OUT_LIMIT,
    SCALE,
    Random,
    assert_equal,
    assert_near,
    assert_within,
    backward,
    bf16,
    dims,
    f8,
    f32,
    f64,
    finite,
    heads,
    indexers,
    leaves,
    make_sink,
    offsets,
    oracle_inputs,
    seeds,
    topks,
)
from hypothesis import given
from hypothesis import strategies as st

import winnow
from winnow import reference
from winnow._once_differentiable import once_differentiable

sink_kinds = st.sampled_from([None, "normal", -math.inf, math.inf, 1e4])


def strided(x):
    """The same values with gaps between rows."""
    wide = x.new_full((*x.shape[:-1], x.shape[-1] + 3), 7)
    wide[..., : x.shape[-1]] = x
    return wide[..., : x.shape[-1]]


class TestSparseAttention:
    @given(
        seeds,
        st.sampled_from([(), (1,), (3,)]),
        st.integers(0, 6),
        st.integers(0, 9),
        heads,
        dims,
        topks,
        sink_kinds,
        st.booleans(),
        st.sampled_from([None, 1, 2]),
    )
    def test_forward_and_gradients(
        self, seed, batch, tokens, keys, n, dim, topk, sink_kind, with_lengths, heads_per_pass
    ):
        random = Random(seed)
        q, kv = random.normal(*batch, tokens, n, dim), random.normal(*batch, keys, dim)
        slices = batch[0] if batch else 1
        indices = random.lists(slices * tokens, topk, keys).reshape(*batch, tokens, topk)
        lengths = random.integers(0, topk, *batch, tokens) if with_lengths else None
        sink = make_sink(random, sink_kind, n)
        v_dim = min(dim, 16)
        options = {"v_dim": v_dim, "scale": SCALE, "lengths": lengths}
        d_out, d_lse = random.normal(*batch, tokens, n, v_dim), random.normal(*batch, tokens, n)

        inputs = leaves(q, kv, sink)
        actual = winnow.sparse_attention(
            *map(strided, inputs[:2]),
            indices,
            sink=inputs[2],
            with_max_logits=True,
            max_heads_per_pass=heads_per_pass,
            **options,
        )
        oracle = leaves(q, kv, sink)
        expected = reference.sparse_attention(*oracle[:2], indices, sink=oracle[2], **options)
        for a, b in zip(actual, expected, strict=True):
            assert_near(a, b)
        gradients = backward([actual.out, finite(actual.lse)], [d_out, d_lse], inputs)
        exact = backward([expected[0], finite(expected[1])], [d_out, d_lse], oracle)
        for a, b in zip(gradients, exact, strict=True):
            if a is not None:
                assert_near(a, b)

    @pytest.mark.parametrize("dtype", LOW)
    def test_working_types(self, dtype):
        random = Random(1)
        q, kv = random.normal(24, 5, 72, dtype=dtype), random.normal(60, 72, dtype=dtype)
        indices, sink = random.lists(24, 33, 60), random.normal(5, dtype=f32)
        d_out = random.normal(24, 5, 64, dtype=dtype)
        inputs = leaves(q, kv, sink)
        options = {"v_dim": 64, "scale": 0.125}
        out, lse, max_logits = winnow.sparse_attention(
            *inputs[:2], indices, sink=inputs[2], **options
        )
        assert (out.dtype, lse.dtype, max_logits) == (dtype, f32, None)
        oracle = oracle_inputs(q, kv, sink)
        expected = reference.sparse_attention(*oracle[:2], indices, sink=oracle[2], **options)
        assert_within(out, expected[0].detach(), OUT_LIMIT[dtype])
        gradients = backward([out], [d_out], inputs)
        assert [x.dtype for x in gradients] == [dtype, dtype, f32]
        for a, b in zip(gradients, backward(expected[:1], [d_out.to(f64)], oracle), strict=True):
            assert_within(a, b, GRAD_LIMIT[dtype])

    def test_gradients_that_are_views_of_one_number(self):
        """The backward of sum() passes a gradient whose strides are all 0."""
        random = Random(2)
        q, kv = random.normal(4, 2, 16), random.normal(6, 16)
        indices = random.integers(0, 5, 4, 3)
        inputs, oracle = leaves(q, kv), leaves(q, kv)
        winnow.sparse_attention(*inputs, indices).out.sum().backward()
        reference.sparse_attention(*oracle, indices, v_dim=16)[0].sum().backward()
        for a, b in zip(inputs, oracle, strict=True):
            assert_near(a.grad, b.grad)

    def test_only_lse_is_used(self):
        random = Random(3)
        q, kv = random.normal(4, 2, 16), random.normal(6, 16)
        indices = random.integers(0, 5, 4, 3)
        inputs, oracle = leaves(q, kv), leaves(q, kv)
        winnow.sparse_attention(*inputs, indices).lse.sum().backward()
        reference.sparse_attention(*oracle, indices, v_dim=16)[1].sum().backward()
        for a, b in zip(inputs, oracle, strict=True):
            assert_near(a.grad, b.grad)

    def test_gradcheck(self):
        random = Random(4)
        inputs = leaves(random.normal(4, 2, 16), random.normal(6, 16), random.normal(2))
        indices = random.lists(4, 5, 6)

        def attention(q, kv, sink):
            options = {"v_dim": 8, "scale": SCALE, "sink": sink, "backend": "reference"}
            out, lse, _ = winnow.sparse_attention(q, kv, indices, **options)
            return out, finite(lse)

        assert torch.autograd.gradcheck(attention, inputs)

    def test_second_derivatives_are_refused(self):
        random = Random(5)
        q, kv = leaves(random.normal(4, 2, 16), random.normal(6, 16))
        out = winnow.sparse_attention(q, kv, random.integers(0, 5, 4, 3)).out
        (d_q,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            d_q.sum().backward()

    def test_a_backward_of_one_gradient_is_differentiated_once(self):
        class Double(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return 2 * x

            @staticmethod
            @once_differentiable
            def backward(ctx, d_out):
                return (2 * d_out,)

        (x,) = leaves(Random(7).normal(3, 4))
        (d_x,) = torch.autograd.grad(Double.apply(x).sum(), x, create_graph=True)
        assert_equal(d_x, torch.full_like(x, 2.0))

    def test_deterministic_gradients_have_the_same_bits(self):
        random = Random(6)
        q, kv = random.normal(40, 3, 24, dtype=bf16), random.normal(30, 24, dtype=bf16)
        indices, d_out = random.lists(40, 9, 30), random.normal(40, 3, 24, dtype=bf16)
        results = []
        for _ in range(3):
            inputs = leaves(q, kv)
            out = winnow.sparse_attention(*inputs, indices, deterministic=True).out
            results.append(backward([out], [d_out], inputs))
        for other in results[1:]:
            for a, b in zip(results[0], other, strict=True):
                assert_equal(a, b)


class TestIndexTopk:
    @given(indexers(), topks, st.sampled_from([1, 2]), st.sampled_from(["ascending", "by_score"]))
    def test_forward_and_gradients(self, drawn, topk, ratio, order):
        random, packing, tensors = drawn
        inputs, oracle = leaves(*tensors), leaves(*tensors)
        options = {"topk": topk, "ratio": ratio, "order": order}
        selection = winnow.index_topk(*map(strided, inputs), packing, **options)
        dense = reference.index_scores(*oracle, *packing.windows(ratio))
        indices, lengths, scores = reference.index_topk(dense, topk, order=order)
        assert_equal(selection.indices, indices)
        assert_equal(selection.lengths, lengths)
        assert_near(selection.scores, scores)
        d_scores = random.normal(*indices.shape)
        # Gradients of invalid slots, NaN included, have no effect.
        spoilt = torch.where(indices < 0, math.nan, d_scores)
        actual = backward([selection.scores], [spoilt], inputs)
        exact = backward([torch.where(indices < 0, 0, scores)], [d_scores], oracle)
        for a, b in zip(actual, exact, strict=True):
            assert_near(a, b)

    @given(indexers(), topks, st.booleans())
    def test_replay(self, drawn, topk, with_lengths):
        random, packing, tensors = drawn
        tokens, keys = len(tensors[0]), len(tensors[1])
        indices = random.lists(tokens, topk, keys)
        lengths = random.integers(0, topk, tokens) if with_lengths else None
        inputs, oracle = leaves(*tensors), leaves(*tensors)
        selection = winnow.index_topk(*inputs, packing, indices=indices, lengths=lengths)
        assert selection.indices is indices and selection.lengths is lengths
        dense = reference.index_scores(*oracle, *packing.windows())
        scores = reference.index_replay(dense, indices, lengths)
        assert_near(selection.scores, scores)
        d_scores = random.normal(tokens, topk)
        actual = backward([selection.scores], [d_scores], inputs)
        exact = backward([finite(scores)], [d_scores], oracle)
        for a, b in zip(actual, exact, strict=True):
            assert_near(a, b)

    def test_gradcheck(self):
        random = Random(7)
        inputs = leaves(random.normal(6, 2, 8), random.normal(6, 8), random.normal(6, 2))
        packing = winnow.Packing(offsets([2, 4]))

        def scores(*tensors):
            selection = winnow.index_topk(*tensors, packing, topk=2, backend="reference")
            return finite(selection.scores)

        assert torch.autograd.gradcheck(scores, inputs)

    def test_scores_are_left_out_on_request(self):
        random = Random(8)
        tensors = random.normal(6, 2, 8), random.normal(6, 8), random.normal(6, 2)
        packing = winnow.Packing(offsets([2, 4]))
        with_scores = winnow.index_topk(*tensors, packing, topk=3)
        without = winnow.index_topk(*leaves(*tensors), packing, topk=3, with_scores=False)
        assert_equal(without.indices, with_scores.indices)
        assert_equal(without.lengths, with_scores.lengths)
        assert without.scores is None

    def test_fp8(self):
        random = Random(9)
        q, k = random.normal(24, 4, 64, dtype=bf16), random.normal(24, 64, dtype=bf16)
        weights = random.normal(24, 4, dtype=f32)
        packing = winnow.Packing(offsets([24]))
        q8, q_scale = winnow.quantize_fp8(q)
        k8, k_scale = winnow.quantize_fp8(k, power_of_two=True)
        selection = winnow.index_topk(q8, k8, weights * q_scale, packing, topk=8, k_scale=k_scale)
        dequantised = q8.to(f64), k8.to(f64) * k_scale[:, None], (weights * q_scale).to(f64)
        exact = reference.index_replay(
            reference.index_scores(*dequantised, *packing.windows()), selection.indices
        )
        assert_within(finite(selection.scores), finite(exact), 1e-5)
        with pytest.raises(NotImplementedError, match="weights require gradients"):
            winnow.index_topk(q8, k8, weights.requires_grad_(), packing, topk=8, k_scale=k_scale)


class TestValueProjection:
    @given(seeds, st.integers(0, 5), heads, dims, st.integers(1, 9))
    def test_forward_and_gradients(self, seed, tokens, n, v_dim, head_dim):
        random = Random(seed)
        tensors = random.normal(tokens, n, v_dim), random.normal(n, head_dim, v_dim)
        d_out_v = random.normal(tokens, n, head_dim)
        inputs, oracle = leaves(*tensors), leaves(*tensors)
        actual = winnow.value_projection(*map(strided, inputs))
        expected = reference.value_projection(*oracle)
        assert_near(actual, expected)
        exact = backward([expected], [d_out_v], oracle)
        for a, b in zip(backward([actual], [d_out_v], inputs), exact, strict=True):
            assert_near(a, b)

    def test_gradcheck(self):
        random = Random(10)
        inputs = leaves(random.normal(3, 2, 8), random.normal(2, 5, 8))
        assert torch.autograd.gradcheck(winnow.value_projection, inputs)


def call(name: str, **changes):
    """A valid call of a function, with changes."""
    packing = winnow.Packing(offsets([3, 2]))
    indexer = {"q": torch.zeros(5, 2, 8), "k": torch.zeros(5, 8), "weights": torch.zeros(5, 2)}
    attention = {"q": torch.zeros(5, 2, 16), "kv": torch.zeros(6, 16)}
    legal = {
        "index_topk": {**indexer, "packing": packing, "topk": 2},
        "sparse_attention": {**attention, "indices": torch.zeros(5, 3).int()},
        "value_projection": {"out": torch.zeros(5, 2, 8), "w_v": torch.zeros(2, 4, 8)},
        "index_loss": {
            "selection": winnow.Selection(torch.zeros(5, 3).int(), torch.zeros(5, 3), None),
            **attention,
            "lse": torch.zeros(5, 2),
            "scale": 1.0,
        },
        "index_target": {
            "selection": winnow.Selection(torch.zeros(5, 3).int(), None, None),
            **attention,
            "lse": torch.zeros(5, 2),
            "scale": 1.0,
        },
        "dense_index_loss": {
            **attention,
            "index_q": indexer["q"],
            "index_k": indexer["k"],
            "weights": indexer["weights"],
            "packing": packing,
            "scale": 1.0,
        },
        "quantize_fp8": {"x": torch.zeros(5, 8)},
    }
    return getattr(winnow, name)(**legal[name] | changes)


@pytest.mark.parametrize(
    ("name", "changes", "error", "text"),
    [
        # Types of arguments, and of elements.
        ("sparse_attention", {"q": [1.0]}, TypeError, "q is a list: must be a tensor"),
        (
            "sparse_attention",
            {"kv": torch.zeros(6, 16, dtype=bf16)},
            ValueError,
            "kv has dtype bfloat16: must be float32, as q$",
        ),
        (
            "dense_index_loss",
            {"index_k": torch.zeros(5, 8, dtype=bf16)},
            ValueError,
            "index_k has dtype bfloat16: must be float32, as index_q$",
        ),
        (
            "sparse_attention",
            {"indices": torch.zeros(5, 3).long()},
            ValueError,
            "indices has dtype int64: must be int32$",
        ),
        (
            "sparse_attention",
            {"q": torch.zeros(5, 2, 16).long()},
            ValueError,
            "q has dtype int64: must be one of float32, bfloat16, float16, float64, float8_e4m3fn$",
        ),
        # Devices.
        (
            "sparse_attention",
            {"q": torch.zeros(5, 2, 16, device="meta")},
            ValueError,
            "kv on cpu: must be on meta, as q",
        ),
        (
            "index_topk",
            {"weights": torch.zeros(5, 2, device="meta")},
            ValueError,
            "weights on meta: must be on cpu, as q",
        ),
        (
            "sparse_attention",
            {"indices": torch.zeros(5, 3, requires_grad=True)},
            ValueError,
            "indices f32.*dtype must be i32",
        ),
        ("sparse_attention", {"sink": torch.zeros(2, dtype=f64)}, ValueError, "sink f64.*dtype"),
        ("index_topk", {"weights": torch.zeros(5, 2, dtype=bf16)}, ValueError, "weights bf16"),
        ("quantize_fp8", {"x": torch.zeros(5, 8, dtype=f64)}, ValueError, "x f64"),
        # Shapes.
        ("sparse_attention", {"q": torch.zeros(5, 16)}, ValueError, "q f32.*3 dimensions"),
        ("sparse_attention", {"q": torch.zeros(())}, ValueError, "q f32.*3 dimensions"),
        (
            "index_topk",
            {"q": torch.zeros(2, 5, 2, 8), "k": torch.zeros(2, 5, 8)},
            ValueError,
            r"q \[2, 5, 2, 8\]: must be \[tokens, index_heads, index_dim\], without a batch .*pack",
        ),
        ("index_topk", {"q": torch.zeros(())}, ValueError, "q f32.*3 dimensions"),
        ("sparse_attention", {"kv": torch.zeros(6, 24)}, ValueError, "kv f32.*qk_dim must be 16"),
        ("sparse_attention", {"lengths": torch.zeros(4).int()}, ValueError, "lengths i32"),
        ("index_topk", {"k": torch.zeros(5, 16)}, ValueError, "k f32.*index_dim must be 8"),
        ("value_projection", {"w_v": torch.zeros(3, 4, 8)}, ValueError, "w_v f32.*heads must be 2"),
        ("value_projection", {"w_v": torch.zeros(8)}, ValueError, "w_v f32.*3 dimensions"),
        ("index_loss", {"lse": torch.zeros(5, 3)}, ValueError, "lse f32.*heads must be 2"),
        # Strides.
        (
            "sparse_attention",
            {"q": torch.zeros(5, 16, 2).transpose(1, 2)},
            ValueError,
            "q f32.*last stride must be 1",
        ),
        ("sparse_attention", {"kv": torch.zeros(16, 6).T}, ValueError, "kv.*last stride"),
        # Numbers and words.
        ("sparse_attention", {"v_dim": 0}, ValueError, "v_dim 0: must be at least 1"),
        (
            "sparse_attention",
            {"v_dim": 24, "scale": 1.0},
            ValueError,
            "v_dim 24: must be at most",
        ),
        ("sparse_attention", {"v_dim": 8.0, "scale": 1.0}, TypeError, "v_dim 8.0: must be an int"),
        (
            "sparse_attention",
            {"indices": torch.zeros(5, 3)},
            ValueError,
            "indices f32.*must be",
        ),
        ("sparse_attention", {"v_dim": 8}, ValueError, "scale 0: must be given"),
        ("sparse_attention", {"scale": 0.0}, ValueError, "scale 0: must not be 0"),
        ("sparse_attention", {"scale": math.nan}, ValueError, "scale nan: must be finite"),
        ("sparse_attention", {"max_heads_per_pass": 0}, ValueError, "max_heads_per_pass 0"),
        ("sparse_attention", {"backend": "tpu"}, ValueError, "backend 'tpu': must be one of"),
        ("sparse_attention", {"lengths": torch.full((5,), 4).int()}, ValueError, r"lengths\[0\] 4"),
        ("index_topk", {"topk": 0}, ValueError, "topk 0: must be at least 1"),
        ("index_topk", {"topk": 2.0}, TypeError, "topk 2.0: must be an integer"),
        ("index_topk", {"topk": "2"}, TypeError, "topk '2': must be an integer"),
        ("index_topk", {"topk": True}, TypeError, "topk True: must be an integer"),
        ("index_loss", {"selection": torch.zeros(5, 3).int()}, TypeError, "selection is a Tensor"),
        ("index_target", {"selection": None}, TypeError, "selection is a NoneType: must be a Sel"),
        ("index_topk", {"topk": None}, ValueError, "one of topk and indices must be given"),
        ("index_topk", {"indices": torch.zeros(5, 2).int()}, ValueError, "one of topk and indices"),
        ("index_topk", {"lengths": torch.zeros(5).int()}, ValueError, "lengths: must be absent"),
        ("index_topk", {"order": "random"}, ValueError, "order 'random': must be one of"),
        ("index_topk", {"k_scale": torch.ones(5)}, ValueError, "k_scale f32.*must be absent"),
        ("index_loss", {"reduction": "max"}, ValueError, "reduction 'max': must be one of mean"),
        ("index_loss", {"scale": 0.0}, ValueError, "scale 0: must be given"),
        ("index_loss", {"head_group": "heads"}, TypeError, "head_group is a str: must be a torch"),
        (
            "index_loss",
            {"selection": winnow.Selection(torch.zeros(5, 3).int(), None, None)},
            ValueError,
            "selection without scores",
        ),
        ("index_target", {"target": torch.zeros(5, 2)}, ValueError, "target f32.*topk must be 3"),
        ("index_target", {"target": 3}, TypeError, "target"),
        ("index_target", {"key_offset": -1}, ValueError, "key_offset -1"),
        ("dense_index_loss", {"lse": torch.zeros(5, 3)}, ValueError, "lse f32.*heads must be 2"),
        ("dense_index_loss", {"reduction": ""}, ValueError, "reduction ''"),
        ("dense_index_loss", {"key_offset": 2}, ValueError, "index_k f32.*at most 4"),
        # No packing, or one of another batch.
        ("index_topk", {"packing": offsets([5])}, TypeError, "packing is a Tensor: must be a Pac"),
        (
            "index_topk",
            {"packing": winnow.Packing(offsets([4]))},
            ValueError,
            "packing of 4 rows: must have 5, as q",
        ),
        (
            "dense_index_loss",
            {"packing": winnow.Packing(offsets([6]))},
            ValueError,
            "packing of 6 rows: must have 5, as q",
        ),
        (
            "index_topk",
            {"packing": winnow.Packing(offsets([3, 2])), "k": torch.zeros(4, 8)},
            ValueError,
            r"end\[4\] 5: must be at most 4, as keys",
        ),
        # The keys of one rank, beside a selection from the keys of all.
        (
            "sparse_attention",
            {"indices": winnow.Selection(torch.zeros(5, 3).int(), None, None, 12)},
            ValueError,
            "kv of 6 rows: must have 12, the keys that the selection was made from .gather_keys",
        ),
        (
            "sparse_attention",
            {"indices": winnow.Selection(torch.zeros(5, 3).int(), None, None, 5)},
            ValueError,
            "kv of 6 rows: must have 5",
        ),
        (
            "sparse_attention",
            {
                "indices": winnow.Selection(torch.zeros(5, 3).int(), None, None, 6),
                "lengths": torch.ones(5).int(),
            },
            ValueError,
            "lengths: must be absent, the selection has its own",
        ),
        (
            "index_loss",
            {"selection": winnow.Selection(torch.zeros(5, 3).int(), torch.zeros(5, 3), None, 5)}
            | {"key_offset": 2},
            ValueError,
            "kv of 6 rows: must have 7",
        ),
        # Valid, but not supported.
        (
            "sparse_attention",
            {"q": torch.zeros(5, 2, 16, dtype=f64), "kv": torch.zeros(6, 16, dtype=f64)}
            | {"backend": "cpu"},
            NotImplementedError,
            "the cpu backend's kernel simd does not take f64",
        ),
    ],
)
def test_errors_name_what_is_wrong(name, changes, error, text):
    call(name)
    # index_loss calls index_target first.
    with pytest.raises(error, match=f"^({name}|index_target).*{text}"):
        call(name, **changes)


@pytest.mark.parametrize(
    "name", ["sparse_attention", "index_loss", "index_target", "dense_index_loss"]
)
class TestScale:
    @pytest.mark.parametrize(
        "scale",
        [
            "1",
            b"1",
            [1.0],
            1j,
            True,
            *(torch.ones(2), torch.tensor(True), torch.tensor(2 + 0j)),
            *(np.ones(2), np.array(True), np.array(2 + 0j), np.array("1"), np.bool_(True)),
        ],
    )
    def test_must_be_a_number(self, name, scale):
        with pytest.raises(TypeError, match=rf"^{name}: scale {re.escape(repr(scale))}: must be a"):
            call(name, scale=scale)

    @pytest.mark.parametrize(
        "scale",
        [
            *(1, Fraction(1), Decimal(1), torch.tensor(1.0), torch.ones(1)),
            *(np.float32(1), np.array(1.0), np.array(1), np.ones(1)),
        ],
    )
    def test_may_be_any_number(self, name, scale):
        results = call(name, scale=scale), call(name, scale=1.0)
        assert_equal(*(x[0] if isinstance(x, tuple) else x for x in results))

    @pytest.mark.parametrize("scale", [10**400, -Fraction(10**400), Decimal("sNaN")], ids=type)
    def test_is_finite(self, name, scale):
        what = f"scale is a {type(scale).__name__} that no float can hold"
        with pytest.raises(ValueError, match=f"^{name}: {what}: must be finite$"):
            call(name, scale=scale)

    def test_has_no_gradient(self, name):
        with pytest.raises(NotImplementedError, match=f"^{name}: scale requires gradients: there"):
            call(name, scale=torch.ones((), requires_grad=True))


@pytest.mark.parametrize(
    "size",
    [2.5, torch.tensor(2.0), torch.ones(2).int(), torch.tensor(True), torch.tensor(2 + 0j)],
)
def test_sizes_must_be_integers(size):
    with pytest.raises(TypeError, match="^index_topk: topk .*: must be an integer"):
        call("index_topk", topk=size)
    with pytest.raises(TypeError, match="^index_target: key_offset .*: must be an integer"):
        call("index_target", key_offset=size)


@pytest.mark.parametrize("size", [2**31, 2**40, 2**70])
def test_sizes_that_are_too_large_are_refused(size):
    packing = winnow.Packing(offsets([3, 2]))
    too_large = f"{size}: must be at most 2147483647$"
    too_many = f"{size}: must be at most 1073741824$"
    with pytest.raises(ValueError, match=f"^index_topk: topk {too_many}"):
        call("index_topk", topk=size)
    with pytest.raises(ValueError, match=f"^window_indices: topk {too_many}"):
        winnow.window_indices(packing, window=2, topk=size)
    with pytest.raises(ValueError, match=f"^Packing.windows: ratio {too_large}"):
        call("index_topk", ratio=size)
    with pytest.raises(ValueError, match=f"^sparse_attention: v_dim {too_large}"):
        call("sparse_attention", v_dim=size)
    with pytest.raises(ValueError, match=f"^dense_index_loss: key_offset {too_large}"):
        call("dense_index_loss", key_offset=size)
    for name in ("window", "ratio", "key_offset"):
        with pytest.raises(ValueError, match=f"^window_indices: {name} {too_large}"):
            winnow.window_indices(packing, **{"window": 2} | {name: size})
    with pytest.raises(ValueError, match=f"^Packing: tokens {too_large}"):
        winnow.Packing(offsets([3]), tokens=size)


def test_integers_cannot_require_gradients():
    with pytest.raises(RuntimeError, match="floating point"):
        call("sparse_attention", indices=torch.zeros(5, 3).int().requires_grad_())


def test_fp8_keys_need_their_scale():
    q, k = torch.zeros(5, 2, 8).to(f8), torch.zeros(5, 8).to(f8)
    with pytest.raises(ValueError, match="k_scale absent: must be given where q is f8_e4m3"):
        call("index_topk", q=q, k=k)
