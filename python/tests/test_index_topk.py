# SPDX-License-Identifier: Apache-2.0
"""index_topk and quantize_fp8 against the formulas in plain torch."""

import math

import native
import pytest
import torch
from cases import (
    GRAD_LIMIT,
    LOW,
    Random,
    assert_equal,
    assert_near,
    assert_rounded,
    assert_within,
    bf16,
    dims,
    f8,
    f32,
    f64,
    gradients,
    heads,
    offsets,
    oracle_inputs,
    packings,
    seeds,
)
from hypothesis import given
from hypothesis import strategies as st

from winnow import _lib, reference

ORDERS = ("ascending", "by_score")
topks = st.sampled_from([1, 2, 5, 16])


class Case:
    """q, k, weights and windows of one call."""

    def __init__(self, random: Random, begin, end, keys, heads, dim, dtype=f64, integers=False):
        accumulator = f64 if dtype == f64 else f32
        tokens = len(begin)
        if integers:  # every sum is exact, and there are many ties
            self.q = random.integers(-2, 2, tokens, heads, dim, dtype=dtype)
            self.k = random.integers(-1, 1, keys, dim, dtype=dtype)
            self.weights = random.integers(-1, 2, tokens, heads, dtype=accumulator)
        else:
            self.q = random.normal(tokens, heads, dim, dtype=dtype)
            self.k = random.normal(keys, dim, dtype=dtype)
            self.weights = random.normal(tokens, heads, dtype=accumulator)
        self.begin, self.end = begin, end
        self.k_scale = random.integers(1, 2, keys, dtype=f32) if dtype == f8 else None

    @property
    def inputs(self):
        return self.q, self.k, self.weights, self.begin, self.end

    def select(self, topk, **options):
        return native.index_topk(*self.inputs, topk, k_scale=self.k_scale, **options)

    def replay(self, indices, **options):
        return native.index_replay(*self.inputs, indices, k_scale=self.k_scale, **options)

    def oracle_scores(self):
        """Dense scores in float64."""
        q, k, weights = (x.to(f64) for x in self.inputs[:3])
        k_scale = None if self.k_scale is None else self.k_scale.to(f64)
        return reference.index_scores(q, k, weights, self.begin, self.end, k_scale=k_scale)

    def all_scores(self):
        """The score of every key of the window as computed by the library, by replay."""
        return self.replay(torch.arange(len(self.k)).int().expand(len(self.q), -1).contiguous())


def causal_case(random: Random, tokens, heads, dim, dtype=f64, integers=False) -> Case:
    rows = torch.arange(tokens, dtype=torch.int32)
    return Case(random, torch.zeros_like(rows), rows + 1, tokens, heads, dim, dtype, integers)


@st.composite
def drawn_cases(draw, dtypes=(f64,), integers=False):
    packing = draw(packings())
    begin, end = reference.key_windows(packing.cu_seqlens, packing.tokens, **packing.options)
    random = Random(draw(seeds))
    shape = (packing.tokens + draw(st.integers(0, 2)), draw(heads), draw(dims))
    return random, Case(random, begin, end, *shape, draw(st.sampled_from(dtypes)), integers)


@given(drawn_cases(), topks, st.sampled_from(ORDERS))
def test_select(drawn, topk, order):
    _, case = drawn
    indices, lengths, scores = case.select(topk, order=order)
    expected = reference.index_topk(case.oracle_scores(), topk, order=order)
    assert_equal(indices, expected[0])
    assert_equal(lengths, expected[1])
    assert_near(scores, expected[2])


@given(drawn_cases((*LOW, f64, f8), integers=True), topks, st.sampled_from(ORDERS))
def test_ties_go_to_the_smaller_key_in_every_type(drawn, topk, order):
    _, case = drawn
    expected = reference.index_topk(case.oracle_scores(), topk, order=order)
    for actual, exact in zip(case.select(topk, order=order), expected, strict=True):
        assert_equal(actual, exact.to(actual.dtype))


@given(drawn_cases((*LOW, f64, f8)), topks, st.sampled_from(ORDERS))
def test_selected_are_the_largest_of_the_scores_that_were_computed(drawn, topk, order):
    _, case = drawn
    if len(case.k) == 0:
        return
    expected = reference.index_topk(case.all_scores(), topk, order=order)
    for actual, exact in zip(case.select(topk, order=order), expected, strict=True):
        assert_equal(actual, exact)


@pytest.mark.parametrize("dtype", [*LOW, f8])
def test_accuracy_of_working_types(dtype):
    random = Random(1)
    case = causal_case(random, 64, 6, 128, dtype)
    exact = case.oracle_scores()
    indices, _, scores = case.select(16)
    k = case.k.to(f64) if dtype != f8 else case.k.to(f64) * case.k_scale.to(f64)[:, None]
    products = torch.einsum("thd,sd->ths", case.q.to(f64).abs(), k.abs())
    magnitude = torch.einsum("th,ths->ts", case.weights.to(f64).abs(), products)
    limit = 1e-5 * torch.where(exact > -math.inf, magnitude, 0).amax(1, keepdim=True)
    chosen = reference.index_replay(exact, indices)
    assert_equal(chosen == -math.inf, scores == -math.inf)
    finite = chosen > -math.inf
    assert ((scores.to(f64) - chosen).abs() <= limit)[finite].all()
    # The selected set must be equal if the gap at the boundary exceeds the error.
    ranked = exact.sort(dim=1, descending=True).values
    clear = (ranked[:, 15] - ranked[:, 16] > 2 * limit[:, 0]) | (ranked[:, 16] == -math.inf)
    assert clear.sum() > 50
    assert_equal(indices[clear], reference.index_topk(exact, 16)[0][clear])


def test_scores_are_optional_and_so_are_lengths():
    case = causal_case(Random(2), 9, 2, 8)
    names = ("q", "k", "weights", "begin", "end")
    indices = native.poison(9, 4, dtype=torch.int32)
    arguments = dict(zip(names, case.inputs, strict=True))
    _lib.run("index_topk_forward", native.REFERENCE, indices=indices, **arguments)
    assert_equal(indices, case.select(4)[0])


def one_head_case(scores: list[float], dtype=f64) -> Case:
    """One row in which the score of key s is exactly scores[s]."""
    values = torch.tensor(scores, dtype=f64)
    case = Case(Random(0), torch.tensor([0]).int(), torch.tensor([len(scores)]).int(), 0, 2, 8)
    case.q = torch.zeros(1, 2, 8, dtype=dtype)
    case.q[0, 0, 0], case.q[0, 1, 0] = 1, -1
    case.k = torch.zeros(len(scores), 8, dtype=dtype)
    case.k[:, 0] = values.to(dtype)
    case.weights = torch.tensor([[1, -1]], dtype=native.accumulator(case.q))
    return case


@pytest.mark.parametrize("dtype", [f64, *LOW])
class TestOrder:
    def test_larger_first_then_smaller_key(self, dtype):
        case = one_head_case([1, 3, -2, 3, 0, 1, 3], dtype)
        assert case.select(5)[0].tolist() == [[0, 1, 3, 5, 6]]
        assert case.select(4)[0].tolist() == [[0, 1, 3, 6]]
        assert case.select(7, order="by_score")[0].tolist() == [[1, 3, 6, 0, 5, 4, 2]]
        assert case.select(9, order="by_score")[2][0, 5:].tolist() == [0, -2, -math.inf, -math.inf]

    def test_zeros_of_both_signs_are_equal(self, dtype):
        case = one_head_case([1, 1, 1, 1], dtype)
        case.q.zero_()
        case.q[0, 0, 0] = 1
        case.k[:, 0] = torch.tensor([-1, 1, -1, 1])  # a head of weight -0 gives -0 for 1 and 3
        case.weights = torch.tensor([[-0.0, 0.0]], dtype=case.weights.dtype)
        assert case.select(2, order="by_score")[0].tolist() == [[0, 1]]

    def test_nan_and_minus_infinity_are_never_chosen(self, dtype):
        case = one_head_case([1, math.nan, -math.inf, 2, math.inf], dtype)
        indices, lengths, scores = case.select(5, order="by_score")
        assert indices[0, : lengths[0]].tolist() == [4, 3, 0]
        assert indices[0, lengths[0] :].eq(-1).all() and scores[0, lengths[0] :].eq(-math.inf).all()

    def test_nan_score_stays_nan_in_replay(self, dtype):
        case = one_head_case([1, math.nan, 3], dtype)
        scores = case.replay(torch.tensor([[2, 1, -1, 0]]).int())
        assert scores[0, [0, 3]].tolist() == [3, 1] and scores[0, 1].isnan()
        assert scores[0, 2] == -math.inf


def test_golden_short_context():
    case = one_head_case([0.5, -math.inf, 0.25])
    indices, lengths, scores = case.select(5)
    assert indices.tolist() == [[0, 2, -1, -1, -1]] and lengths.tolist() == [2]
    assert scores[0].tolist() == [0.5, 0.25, -math.inf, -math.inf, -math.inf]


def test_scores_that_round_to_the_same_number_are_equal():
    case = one_head_case([1, 1], f32)
    case.q[0, 0, 1], case.k[1, 1] = 2**-30, 1  # the exact score of key 1 is larger
    assert case.select(1)[0].tolist() == [[0]] and case.select(1)[2].tolist() == [[1]]


@pytest.mark.parametrize("dtype", [f64, *LOW])
def test_a_document_gives_the_same_bits_alone_and_packed(dtype):
    lengths = [5, 0, 12, 1, 7]
    cu_seqlens = offsets(lengths)
    begin, end = reference.key_windows(cu_seqlens, sum(lengths))
    case = Case(Random(3), begin, end, sum(lengths), 3, 16, dtype)
    indices, counts, scores = case.select(4)
    for i, length in enumerate(lengths):
        own = slice(cu_seqlens[i], cu_seqlens[i + 1])
        alone_windows = reference.key_windows(offsets([length]), length)
        inputs = case.q[own], case.k[own], case.weights[own], *alone_windows
        alone = native.index_topk(*inputs, 4)
        first = cu_seqlens[i]
        assert_equal(indices[own], torch.where(alone[0] < 0, -1, alone[0] + first).int())
        assert_equal(counts[own], alone[1])
        assert_equal(scores[own], alone[2])


def test_threads_change_no_bit():
    case = causal_case(Random(4), 40, 3, 16, bf16)
    results = []
    for threads in (1, 2, 3):
        execution = _lib.execution(backend="reference", threads=threads)
        results.append(case.select(6, execution=execution))
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            assert_equal(a, b)


@given(drawn_cases(), topks, st.booleans())
def test_replay_and_backward(drawn, topk, with_lengths):
    random, case = drawn
    tokens, keys = len(case.q), len(case.k)
    indices = random.lists(tokens, topk, keys)
    lengths = random.integers(0, topk, tokens) if with_lengths else None
    q, k, weights = oracle_inputs(*case.inputs[:3])
    dense = reference.index_scores(q, k, weights, case.begin, case.end)
    expected = reference.index_replay(dense, indices, lengths)
    assert_near(case.replay(indices, lengths=lengths), expected)

    d_scores = random.normal(tokens, topk)
    finite = torch.where(expected > -math.inf, expected, 0)
    exact = gradients([(finite, d_scores)], [q, weights, k])
    # Invalid slots contribute nothing, and d_k is added to.
    d_scores = torch.where(expected > -math.inf, d_scores, math.nan).detach()
    before = random.normal(keys, case.k.shape[1])
    actual = native.index_topk_backward(
        *case.inputs, indices, d_scores, before.clone(), lengths=lengths
    )
    exact[2] += before
    for a, b in zip(actual, exact, strict=True):
        assert_near(a, b)


@pytest.mark.parametrize("dtype", LOW)
def test_backward_of_working_types(dtype):
    random = Random(5)
    case = causal_case(random, 40, 5, 64, dtype)
    indices, lengths, _ = case.select(12)
    d_scores = random.normal(40, 12, dtype=f32)
    q, k, weights = oracle_inputs(*case.inputs[:3])
    dense = reference.index_scores(q, k, weights, case.begin, case.end)
    scores = reference.index_replay(dense, indices)
    finite = torch.where(scores > -math.inf, scores, 0)
    exact = gradients([(finite, d_scores)], [q, weights, k])
    actual = native.index_topk_backward(*case.inputs, indices, d_scores, lengths=lengths)
    assert [x.dtype for x in actual] == [dtype, f32, f32]
    for a, b in zip(actual, exact, strict=True):
        assert_within(a, b, GRAD_LIMIT[dtype])
    if dtype != f32:
        rounded = native.poison(*k.shape, dtype=dtype)
        native.index_topk_backward(*case.inputs, indices, d_scores, rounded)
        assert_rounded(rounded, actual[2])


@pytest.mark.parametrize("dtype", [f64, bf16])
def test_memory_outside_the_windows_is_not_touched(dtype):
    case = Case(Random(6), torch.tensor([2, 3, 0]).int(), torch.tensor([5, 3, 0]).int(), 8, 2, 8)
    case.q, case.k = case.q.to(dtype), case.k.to(dtype)
    case.weights = case.weights.to(native.accumulator(case.q))
    indices = torch.tensor([[2, 0, 4, 7], [3, 0, 1, 2], [-1, 0, 8, 99]]).int()
    d_scores = torch.ones(3, 4, dtype=case.weights.dtype)
    calls = (
        lambda: case.select(4),
        lambda: [case.replay(indices)],
        lambda: native.index_topk_backward(*case.inputs, indices, d_scores),
    )
    clean = [call() for call in calls]
    case.k[[0, 1, 5, 6, 7]] = math.nan
    case.q[1:], case.weights[1:] = math.nan, math.nan
    for before, call in zip(clean, calls, strict=True):
        for a, b in zip(call(), before, strict=True):
            assert_equal(a, b)


def test_subgradient_at_zero_is_zero():
    case = one_head_case([0.0, 1.0])
    case.k[0, 1] = 5  # q . k is 0, k is not
    indices = torch.tensor([[0, 1]]).int()
    d_scores = torch.ones(1, 2, dtype=f64)
    d_q, d_weights, d_k = native.index_topk_backward(*case.inputs, indices, d_scores)
    assert d_weights.tolist() == [[1, 0]]
    assert d_q[0, 0, 0] == 1 and not d_q[0, 1].any()
    assert not d_k[0].any() and d_k[1, 0] == 1


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("shape", [(5, 16), (3, 2, 8), (0, 8), (1, 1)])
def test_quantize_fp8(power_of_two, dtype, shape):
    x = (Random(7).normal(*shape) * 10 ** Random(8).integers(-6, 4, *shape[:-1], 1)).to(dtype)
    actual = native.quantize_fp8(x, power_of_two=power_of_two)
    for a, b in zip(actual, reference.quantize_fp8(x, power_of_two=power_of_two), strict=True):
        assert_equal(a, b)


@given(st.lists(st.floats(width=32), min_size=1, max_size=9), st.booleans())
def test_quantize_fp8_takes_any_number(row, power_of_two):
    x = torch.tensor([row], dtype=f32)
    values, scale = native.quantize_fp8(x, power_of_two=power_of_two)
    expected, expected_scale = reference.quantize_fp8(x, power_of_two=power_of_two)
    assert_equal(scale, expected_scale)
    assert_equal(values.float(), expected.float())  # as float, so that all NaN compare equal


def test_quantize_fp8_special_rows():
    x = torch.zeros(4, 4)
    x[1] = torch.tensor([math.inf, -math.inf, 448, math.nan])
    x[2] = torch.tensor([448.0 * 2, 1, -0.0, 2**-9])
    x[3] = math.inf
    values, scale = native.quantize_fp8(x)
    floor = torch.tensor(1e-4) / 448
    assert_equal(scale, torch.tensor([floor, 1, 2, floor]))
    assert values[1, :3].float().tolist() == [448, -448, 448] and values[1, 3].float().isnan()
    assert_equal(
        values[2].float(), torch.tensor([448.0, 0.5, -0.0, 0.0])
    )  # 2^-10 rounds to even, 0
    _, scale = native.quantize_fp8(x, power_of_two=True)
    assert scale.tolist() == [2**-22, 1, 2, 2**-22]  # a power of two is kept


def test_fp8_scores_are_those_of_the_dequantised_values():
    random = Random(9)
    tokens, n, dim = 24, 4, 64
    q, k = random.normal(tokens, n, dim, dtype=bf16), random.normal(tokens, dim, dtype=bf16)
    q8, q_scale = native.quantize_fp8(q)
    k8, k_scale = native.quantize_fp8(k, power_of_two=True)
    weights = random.normal(tokens, n, dtype=f32) * q_scale
    begin, end = reference.key_windows(offsets([tokens]), tokens)
    _, _, scores = native.index_topk(q8, k8, weights, begin, end, 8, k_scale=k_scale)
    exact = reference.index_scores(
        q8.to(f64), k8.to(f64), weights.to(f64), begin, end, k_scale=k_scale.to(f64)
    )
    expected = reference.index_topk(exact, 8)[2]
    finite = expected > -math.inf
    assert_within(scores[finite], expected[finite], 1e-6)


@pytest.mark.parametrize(
    ("change", "argument"),
    [
        ({"q": torch.zeros(3, 2, 12, dtype=f64), "k": torch.zeros(5, 12, dtype=f64)}, "q"),
        ({"q": torch.zeros(3, 2, dtype=f64)}, "q"),
        ({"k": torch.zeros(5, 8)}, "k"),
        ({"k": torch.zeros(5, 16, dtype=f64)}, "k"),
        ({"weights": torch.zeros(3, 2)}, "weights"),
        ({"weights": torch.zeros(3, 1, dtype=f64)}, "weights"),
        ({"k_scale": torch.zeros(5)}, "k_scale"),
        ({"q": torch.zeros(3, 2, 8).to(f8), "weights": torch.zeros(3, 2)}, "k"),
        ({"begin": torch.zeros(2).int()}, "begin"),
        ({"begin": torch.tensor([0, -1, 0]).int()}, "begin"),
        ({"end": torch.tensor([1, 6, 0]).int()}, "end"),
        ({"begin": torch.tensor([2, 0, 0]).int()}, "end"),
        ({"end": torch.zeros(3)}, "end"),
        ({"indices": torch.zeros(3, 0).int()}, "indices"),
        ({"indices": torch.zeros(3, 4)}, "indices"),
        ({"indices": None}, "indices"),
        ({"scores": torch.zeros(3, 4)}, "scores"),
        ({"scores": torch.zeros(3, 5, dtype=f64)}, "scores"),
        ({"replay": True}, "scores"),
        ({"replay": True, "lengths": torch.tensor([5, 0, 0]).int()}, "(scores|lengths)"),
        ({"order": "sorted"}, "order"),
    ],
)
def test_refusals_name_the_argument(change, argument):
    case = Case(Random(10), torch.zeros(3).int(), torch.ones(3).int(), 5, 2, 8)
    names = ("q", "k", "weights", "begin", "end")
    call = dict(zip(names, case.inputs, strict=True)) | {"indices": torch.zeros(3, 4).int()}
    with pytest.raises(ValueError, match=f"index_topk_forward: {argument}\\b"):
        _lib.run("index_topk_forward", native.REFERENCE, **call | change)


def test_fp8_needs_its_scale():
    case = Case(Random(11), torch.zeros(3).int(), torch.ones(3).int(), 5, 2, 8, dtype=f8)
    case.k_scale = None
    with pytest.raises(ValueError, match="index_topk_forward: k_scale"):
        case.select(4)
