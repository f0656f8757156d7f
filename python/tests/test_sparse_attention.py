# SPDX-License-Identifier: Apache-2.0
"""sparse_attention and value_projection against the formulas in plain torch."""

import math

import native
import pytest
import torch
from cases import (
    GRAD_LIMIT,
    LOW,
    OUT_LIMIT,
    Random,
    assert_equal,
    assert_near,
    assert_rounded,
    assert_within,
    bf16,
    dims,
    f16,
    f32,
    f64,
    gradients,
    heads,
    oracle_inputs,
    seeds,
)
from hypothesis import given
from hypothesis import strategies as st

from winnow import _lib, reference

SCALE = 0.3125  # exact in fp32


class Case:
    """One call, forward and backward, of the library and of the oracle."""

    def __init__(self, q, kv, indices, *, v_dim, sink=None, lengths=None, scale=SCALE):
        self.tensors = (q, kv, indices)
        self.v_dim, self.sink, self.scale = v_dim, sink, scale
        self.options = {"lengths": lengths, "sink": sink, "scale": scale}

    def forward(self, **options):
        return native.sparse_attention(*self.tensors, self.v_dim, **self.options, **options)

    def backward(self, d_out, **options):
        out, lse, _ = self.forward()
        return native.sparse_attention_backward(
            *self.tensors, out, lse, d_out, **self.options, **options
        )

    def oracle(self, d_out=None, d_lse=None):
        """out, lse, max_logits, and if d_out is given also d_q, d_kv, d_sink."""
        q, kv, sink = oracle_inputs(*self.tensors[:2], self.sink)
        options = self.options | {"sink": sink, "v_dim": self.v_dim}
        out, lse, max_logits = reference.sparse_attention(q, kv, self.tensors[2], **options)
        results = [out.detach(), lse.detach(), max_logits.detach()]
        if d_out is None:
            return results
        outputs = [(out, d_out)]
        if d_lse is not None:
            outputs.append((torch.where(lse > -math.inf, lse, 0), d_lse))
        return results, gradients(outputs, [q, kv] if sink is None else [q, kv, sink])


def random_case(random: Random, tokens, keys, heads, dim, v_dim, topk, dtype=f64, **options):
    accumulator = f64 if dtype == f64 else f32
    if options.pop("with_sink", False):
        options["sink"] = random.normal(heads, dtype=accumulator)
    if options.pop("with_lengths", False):
        options["lengths"] = random.integers(0, topk, tokens)
    q = random.normal(tokens, heads, dim, dtype=dtype)
    kv = random.normal(keys, dim, dtype=dtype)
    return Case(q, kv, random.lists(tokens, topk, keys), v_dim=v_dim, **options)


@st.composite
def drawn_cases(draw):
    random = Random(draw(seeds))
    dim = draw(dims)
    return random, random_case(
        random,
        tokens=draw(st.integers(0, 6)),
        keys=draw(st.integers(0, 9)),
        heads=draw(heads),
        dim=dim,
        v_dim=draw(st.sampled_from([d for d in (8, 16, 24) if d <= dim])),
        topk=draw(st.sampled_from([1, 2, 5, 12])),
        with_sink=draw(st.booleans()),
        with_lengths=draw(st.booleans()),
    )


@given(drawn_cases())
def test_forward(drawn):
    _, case = drawn
    for actual, expected in zip(case.forward(), case.oracle(), strict=True):
        assert_near(actual, expected)


@given(drawn_cases(), st.booleans(), st.integers(0, 4))
def test_backward(drawn, with_d_lse, max_heads_per_pass):
    random, case = drawn
    q, kv, _ = case.tensors
    d_out = random.normal(*q.shape[:-1], case.v_dim)
    d_lse = random.normal(*q.shape[:-1]) if with_d_lse else None
    # d_kv and d_sink are added to.
    d_kv = random.normal(*kv.shape)
    d_sink = None if case.sink is None else random.normal(*case.sink.shape)
    before = [torch.zeros_like(q), d_kv.clone()] + ([] if d_sink is None else [d_sink.clone()])
    passes = {"max_heads_per_pass": max_heads_per_pass}
    actual = case.backward(d_out, d_lse=d_lse, d_kv=d_kv, d_sink=d_sink, **passes)
    _, expected = case.oracle(d_out, d_lse)
    for a, b, c in zip(actual, expected, before, strict=False):
        assert_near(a, b + c)


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize(
    ("dim", "v_dim", "with_sink"), [(72, 64, False), (72, 72, True), (576, 512, True)]
)
def test_accuracy_of_working_types(dtype, dim, v_dim, with_sink):
    random = Random(dim)
    scale = 0.0625
    options = {"with_sink": with_sink, "with_lengths": True, "scale": scale}
    case = random_case(random, 24, 60, 5, dim, v_dim, 33, dtype=dtype, **options)
    q, kv, indices = case.tensors
    d_out, d_lse = random.normal(24, 5, v_dim, dtype=dtype), random.normal(24, 5, dtype=f32)
    (out, lse, max_logits), expected = case.oracle(d_out, d_lse)

    actual_out, actual_lse, actual_max = case.forward()
    assert (actual_out.dtype, actual_lse.dtype, actual_max.dtype) == (dtype, f32, f32)
    assert_within(actual_out, out, OUT_LIMIT[dtype])
    # sum_j p_j |v_j|, by attention over keys whose first channels are |v|.
    exact_q, exact_kv = q.to(f64), kv.to(f64)
    wide_q = torch.cat([torch.zeros(24, 5, v_dim), exact_q], -1)
    wide_kv = torch.cat([exact_kv[:, :v_dim].abs(), exact_kv], -1)
    options = case.options | {"v_dim": v_dim}
    magnitude = reference.sparse_attention(wide_q, wide_kv, indices, **options)[0]
    assert ((actual_out.to(f64) - out).abs() <= 2**-8 * (out.abs() + magnitude)).all()
    limit = 1e-4 if dtype != f32 else 1e-5
    for actual, exact in ((actual_lse, lse), (actual_max, max_logits)):
        assert_near(actual, exact, limit)

    d_q, d_kv, d_sink = case.backward(d_out, d_lse=d_lse)
    assert (d_q.dtype, d_kv.dtype) == (dtype, f32)
    for actual, exact in zip((d_q, d_kv, d_sink), expected, strict=False):
        assert_within(actual, exact, GRAD_LIMIT[dtype])

    if dtype != f32:
        # A d_kv of the type of kv is overwritten by the same sums, rounded once.
        rounded = native.poison(*kv.shape, dtype=dtype)
        case.backward(d_out, d_lse=d_lse, d_kv=rounded)
        assert_rounded(rounded, d_kv)


@pytest.mark.parametrize("dtype", [f64, bf16])
@pytest.mark.parametrize("with_lengths", [False, True])
def test_a_batch_is_the_same_call_over_slices(dtype, with_lengths):
    random = Random(3)
    batch, tokens, keys, n, dim, topk = 3, 4, 7, 2, 16, 5
    accumulator = f64 if dtype == f64 else f32
    q = random.normal(batch, tokens, n, dim, dtype=dtype)
    kv = random.normal(batch, keys, dim, dtype=dtype)
    indices = torch.stack([random.lists(tokens, topk, keys) for _ in range(batch)])
    lengths = random.integers(0, topk, batch, tokens) if with_lengths else None
    sink = random.normal(n, dtype=accumulator)
    d_out = random.normal(batch, tokens, n, 8, dtype=dtype)
    d_lse = random.normal(batch, tokens, n, dtype=accumulator)

    whole = Case(q, kv, indices, v_dim=8, sink=sink, lengths=lengths)
    forward, (d_q, d_kv, d_sink) = whole.forward(), whole.backward(d_out, d_lse=d_lse)
    d_sink_sum = torch.zeros_like(sink)
    for b in range(batch):
        own = None if lengths is None else lengths[b]
        part = Case(q[b], kv[b], indices[b], v_dim=8, sink=sink, lengths=own)
        for a, e in zip(forward, part.forward(), strict=True):
            assert_equal(a[b], e)
        part_d_q, part_d_kv, _ = part.backward(d_out[b], d_lse=d_lse[b], d_sink=d_sink_sum)
        assert_equal(d_q[b], part_d_q)
        assert_equal(d_kv[b], part_d_kv)
    assert_near(d_sink, d_sink_sum.to(f64), 1e-6)
    if dtype == f64:
        for actual, expected in zip(forward, whole.oracle(), strict=True):
            assert_near(actual, expected)
        _, expected = whole.oracle(d_out, d_lse)
        for actual, exact in zip((d_q, d_kv, d_sink), expected, strict=True):
            assert_near(actual, exact)


@pytest.mark.parametrize("sink", [-math.inf, math.inf, 1e4, -1e4, 0.0])
def test_extreme_sinks(sink):
    random = Random(5)
    case = random_case(random, 6, 8, 2, 16, 8, 4)
    case.sink = case.options["sink"] = torch.full((2,), sink, dtype=f64)
    d_out, d_lse = random.normal(6, 2, 8), random.normal(6, 2)
    results, expected = case.oracle(d_out, d_lse)
    for actual, exact in zip(case.forward(), results, strict=True):
        assert_near(actual, exact)
    for actual, exact in zip(case.backward(d_out, d_lse=d_lse), expected, strict=True):
        assert_near(actual, exact)
    if sink == math.inf:
        assert not case.forward()[0].any()
        assert not case.backward(d_out)[0].any()  # only d_lse reaches q and kv


def test_no_sink_is_a_sink_of_minus_infinity():
    random = Random(6)
    case = random_case(random, 6, 8, 2, 16, 8, 4)
    d_out = random.normal(6, 2, 8)
    without = [*case.forward(), *case.backward(d_out)[:2]]
    case.sink = case.options["sink"] = torch.full((2,), -math.inf, dtype=f64)
    with_sink = [*case.forward(), *case.backward(d_out)[:2]]
    for a, b in zip(without, with_sink, strict=True):
        assert_equal(a, b)


@pytest.mark.parametrize("with_sink", [False, True])
@pytest.mark.parametrize("indices", [[-1, -1, -1], [8, 9, 2**31 - 1], [-(2**31), -1, -7]])
def test_rows_without_keys_give_zero(with_sink, indices):
    random = Random(7)
    case = random_case(random, 3, 8, 2, 16, 16, 3, with_sink=with_sink, scale=0)
    case.tensors[2][1] = torch.tensor(indices)
    case.tensors[2][2] = torch.tensor([0, 1, 2])
    case.options["lengths"] = torch.tensor([0, 3, 3], dtype=torch.int32)
    out, lse, max_logits = case.forward()
    assert not out[:2].any() and out[2].any()
    assert (lse[:2] == -math.inf).all() and (max_logits[:2] == -math.inf).all()
    d_out, d_lse = random.normal(3, 2, 16), random.normal(3, 2)
    d_out[:2] = d_lse[:2] = math.nan  # has no effect
    d_q, d_kv, d_sink = case.backward(d_out, d_lse=d_lse)
    assert not d_q[:2].any() and d_q[2].any()
    assert d_kv.isfinite().all() and not d_kv[3:].any()
    assert d_sink is None or d_sink.isfinite().all()


@pytest.mark.parametrize("dtype", [f64, *LOW])
def test_memory_that_no_slot_names_is_not_touched(dtype):
    random = Random(8)
    q, kv = random.normal(3, 2, 16, dtype=dtype), random.normal(6, 16, dtype=dtype)
    indices = torch.tensor([[0, -1, 2], [2, 6, 99], [0, 4, 5]], dtype=torch.int32)
    lengths = torch.tensor([3, 3, 1], dtype=torch.int32)
    d_out = random.normal(3, 2, 8, dtype=dtype)
    clean = Case(q, kv, indices, v_dim=8, lengths=lengths)
    spoilt = kv.clone()
    spoilt[[1, 3, 4, 5]] = math.nan
    dirty = Case(q, spoilt, indices, v_dim=8, lengths=lengths)
    for a, b in zip(dirty.forward(), clean.forward(), strict=True):
        assert_equal(a, b)
    d_kv = torch.zeros(6, 16, dtype=native.accumulator(q))
    d_kv[[1, 3, 4, 5]] = math.nan
    d_q, d_kv, _ = dirty.backward(d_out, d_kv=d_kv)
    expected_d_q, expected_d_kv, _ = clean.backward(d_out)
    assert_equal(d_q, expected_d_q)
    assert d_kv[[1, 3, 4, 5]].isnan().all() and not expected_d_kv[[1, 3, 4, 5]].any()
    assert_equal(d_kv[[0, 2]], expected_d_kv[[0, 2]])


def test_a_key_that_stands_twice_counts_twice():
    kv = torch.eye(8, dtype=f64)[:2]
    q = torch.zeros(1, 1, 8, dtype=f64)
    indices = torch.tensor([[0, 1, 0, 0]], dtype=torch.int32)
    out, lse, _ = Case(q, kv, indices, v_dim=8).forward()
    assert_near(out[0, 0, :2], torch.tensor([0.75, 0.25], dtype=f64))
    assert_near(lse, torch.tensor([[4.0]], dtype=f64).log())


def test_default_scale():
    random = Random(9)
    case = random_case(random, 4, 8, 2, 16, 16, 3, scale=0)
    default = case.forward()
    case.options["scale"] = 0.25  # 1 / sqrt(16)
    for a, b in zip(default, case.forward(), strict=True):
        assert_equal(a, b)


def test_order_of_slots_does_not_matter():
    random = Random(10)
    case = random_case(random, 5, 9, 2, 16, 8, 6)
    case.tensors = (*case.tensors[:2], case.tensors[2].flip(1))
    flipped = case.forward()
    case.tensors = (*case.tensors[:2], case.tensors[2].flip(1))
    for a, b in zip(flipped, case.forward(), strict=True):
        assert_near(a, b)


@pytest.mark.parametrize("dtype", [f64, bf16, f16, f32])
def test_a_row_does_not_depend_on_its_neighbours(dtype):
    random = Random(11)
    case = random_case(random, 12, 20, 3, 24, 16, 7, dtype=dtype, with_sink=True)
    q, kv, indices = case.tensors
    d_out = random.normal(12, 3, 16, dtype=dtype)
    whole, (d_q, _, _) = case.forward(), case.backward(d_out)
    for rows in (slice(0, 1), slice(5, 9)):
        more_keys = torch.cat([kv, kv])
        part = Case(q[rows], more_keys, indices[rows].clamp(max=20), v_dim=16, sink=case.sink)
        part.tensors[2][part.tensors[2] == 20] = -1
        for a, b in zip(part.forward(), whole, strict=True):
            assert_equal(a, b[rows])
        assert_equal(part.backward(d_out[rows])[0], d_q[rows])


def test_threads_and_repetition_change_no_bit():
    random = Random(12)
    case = random_case(random, 40, 30, 3, 24, 16, 9, dtype=bf16, with_sink=True)
    d_out = random.normal(40, 3, 16, dtype=bf16)
    results = []
    for threads in (1, 2, 3, 0):
        execution = _lib.execution(backend="reference", threads=threads, deterministic=True)
        forward = case.forward(execution=execution)
        results.append([*forward, *case.backward(d_out, execution=execution)])
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            assert_equal(a, b)


def test_strided_views():
    random = Random(13)
    case = random_case(random, 4, 8, 2, 16, 8, 3)
    q, kv, indices = case.tensors
    expected = case.forward()
    wide_q = random.normal(4, 5, 20)[:, 1:5:2, 2:18]
    wide_kv, wide_indices = random.normal(16, 24)[::2, 8:], torch.zeros(4, 9).int()[:, 3:6]
    for wide, narrow in ((wide_q, q), (wide_kv, kv), (wide_indices, indices)):
        wide.copy_(narrow)
    strided = Case(wide_q, wide_kv, wide_indices, v_dim=8).forward()
    for a, b in zip(strided, expected, strict=True):
        assert_equal(a, b)
    by_head = native.poison(2, 4, 8, dtype=f64)
    arguments = {"q": q, "kv": kv, "indices": indices, "lse": expected[1], "scale": SCALE}
    _lib.run("sparse_attention_forward", native.REFERENCE, out=by_head.transpose(0, 1), **arguments)
    assert_equal(by_head.transpose(0, 1), expected[0])


@pytest.mark.parametrize("dtype", [f64, *LOW])
@pytest.mark.parametrize("shape", [(7, 3, 16, 8), (1, 1, 8, 24), (0, 2, 8, 8)])
def test_value_projection(dtype, shape):
    tokens, n, v_dim, head_dim = shape
    random = Random(14)
    out = random.normal(tokens, n, v_dim, dtype=dtype)
    w_v = random.normal(n, head_dim, v_dim, dtype=dtype)
    d_out_v = random.normal(tokens, n, head_dim, dtype=dtype)
    exact_inputs = oracle_inputs(out, w_v)
    exact = reference.value_projection(*exact_inputs)
    assert_within(native.value_projection(out, w_v), exact.detach(), OUT_LIMIT[dtype])
    before = random.normal(*w_v.shape, dtype=native.accumulator(out))
    d_out, d_w_v = native.value_projection_backward(out, w_v, d_out_v, before.clone())
    exact_d_out, exact_d_w_v = gradients([(exact, d_out_v)], exact_inputs)
    assert_within(d_out, exact_d_out, GRAD_LIMIT[dtype])
    assert_within(d_w_v, exact_d_w_v + before, GRAD_LIMIT[dtype])
    if dtype in (bf16, f16):
        rounded = native.poison(*w_v.shape, dtype=dtype)
        native.value_projection_backward(out, w_v, d_out_v, rounded)
        _, sums = native.value_projection_backward(out, w_v, d_out_v)
        assert_rounded(rounded, sums)


def legal_call() -> dict:
    random = Random(15)
    return {
        "q": random.normal(4, 2, 16),
        "kv": random.normal(6, 16),
        "indices": torch.zeros(4, 3).int(),
        "lengths": torch.full((4,), 3).int(),
        "sink": random.normal(2),
        "out": torch.full((4, 2, 8), 7.0, dtype=f64),
        "lse": torch.full((4, 2), 7.0, dtype=f64),
        "scale": SCALE,
    }


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("q", None),
        ("q", torch.zeros(4, 2, dtype=f64)),
        ("q", torch.zeros(4, 2, 16).to(torch.float8_e4m3fn)),
        ("q", torch.zeros(4, 16, 2, dtype=f64).transpose(1, 2)),
        ("kv", torch.zeros(6, 16)),
        ("kv", torch.zeros(6, 24, dtype=f64)),
        ("kv", torch.zeros(6, 1, 16, dtype=f64)),
        ("kv", torch.zeros(16, 6, dtype=f64).T),
        ("indices", torch.zeros(4, 3, dtype=f64)),
        ("indices", torch.zeros(4, 3, dtype=torch.int64)),
        ("indices", torch.zeros(3, 3).int()),
        ("indices", torch.zeros(4, 0).int()),
        ("lengths", torch.zeros(3).int()),
        ("lengths", torch.tensor([1, 4, 0, 0]).int()),
        ("lengths", torch.tensor([1, -1, 0, 0]).int()),
        ("sink", torch.zeros(2)),
        ("sink", torch.zeros(3, dtype=f64)),
        ("out", None),
        ("out", torch.zeros(4, 2, 24, dtype=f64)),
        ("out", torch.zeros(4, 2, 4, dtype=f64)),
        ("out", torch.zeros(4, 1, 8, dtype=f64).expand(4, 2, 8)),
        ("lse", torch.zeros(4, 2)),
        ("max_logits", torch.zeros(4, 3, dtype=f64)),
        ("scale", math.nan),
        ("scale", math.inf),
        ("scale", 0.0),
    ],
)
def test_refusals_name_the_argument_and_write_nothing(argument, value):
    call = legal_call()
    _lib.run("sparse_attention_forward", native.REFERENCE, **legal_call())
    with pytest.raises(ValueError, match=f"sparse_attention_forward: {argument}\\b"):
        _lib.run("sparse_attention_forward", native.REFERENCE, **call | {argument: value})
    for name in ("out", "lse"):
        assert (call[name] == 7).all()


@pytest.mark.parametrize("dim", [12, 0, 1032])
def test_channels_are_multiples_of_eight_up_to_1024(dim):
    q, kv = torch.zeros(4, 2, dim), torch.zeros(6, dim)
    with pytest.raises(ValueError, match=r"sparse_attention_forward: q f32\[4, 2, .*qk_dim"):
        native.sparse_attention(q, kv, torch.zeros(4, 3).int(), dim)


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("d_out", torch.zeros(4, 2, 16, dtype=f64)),
        ("d_lse", torch.zeros(4, dtype=f64)),
        ("d_q", torch.zeros(4, 2, 16)),
        ("d_kv", torch.zeros(6, 16)),
        ("d_kv", torch.zeros(5, 16, dtype=f64)),
        ("d_sink", torch.zeros(3, dtype=f64)),
        ("max_heads_per_pass", -1),
    ],
)
def test_backward_refusals_name_the_argument(argument, value):
    call = legal_call()
    gradient = {"d_out": call["out"].clone(), "d_q": call["q"].clone(), "d_kv": call["kv"].clone()}
    call |= gradient
    with pytest.raises(ValueError, match=f"sparse_attention_backward: {argument}\\b"):
        _lib.run("sparse_attention_backward", native.REFERENCE, **call | {argument: value})
