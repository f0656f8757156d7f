# SPDX-License-Identifier: Apache-2.0
"""winnow.automodel: the documented names, layouts, rules and values."""

import inspect
import math
from typing import get_args

import pytest
import torch
from cases import Random, assert_equal, assert_near, assert_rounded, assert_within, bf16, f32, f64
from hypothesis import given
from hypothesis import strategies as st

import winnow
from winnow import _lib, automodel, reference


def ints(*values, dtype=torch.int32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)


@pytest.mark.parametrize(
    ("name", "parameters", "defaults"),
    [
        ("is_dsa_kernel_available", "name", {}),
        (
            "should_use_tilelang",
            "backend available kernel_name tensors require_bf16",
            {"require_bf16": False},
        ),
        ("_generate_padded_varlen_mask_params", "cu_seqlens cu_seqlens_padded", {}),
        (
            "tilelang_indexer_topk",
            "index_q index_k head_weights cu_seqlens index_topk query_indices cu_seqlens_padded",
            {"query_indices": None, "cu_seqlens_padded": None},
        ),
        ("tilelang_sparse_attention", "q kv_latent topk_indices w_vc softmax_scale", {}),
        (
            "sparse_attn_tilelang",
            "q kv attn_sink topk_idxs sm_scale reference_rounding",
            {"sm_scale": None, "reference_rounding": False},
        ),
        (
            "sparse_attn_tilelang_head_chunked",
            "q kv attn_sink topk_idxs max_heads_per_kernel sm_scale reference_rounding",
            {"sm_scale": None, "reference_rounding": False},
        ),
        (
            "DeepSeekV4SparseAttention.forward",
            "ctx q kv attn_sink topk_idxs sm_scale reference_rounding",
            {"sm_scale": None, "reference_rounding": False},
        ),
        (
            "DeepSeekV4SparseAttentionHeadChunked.forward",
            "ctx q kv attn_sink topk_idxs max_heads_per_kernel sm_scale reference_rounding",
            {"sm_scale": None, "reference_rounding": False},
        ),
        ("DeepSeekV4SparseAttention.backward", "ctx grad_output", {}),
        ("DeepSeekV4SparseAttentionHeadChunked.backward", "ctx grad_output", {}),
    ],
)
def test_signatures(name, parameters, defaults):
    function = automodel
    for word in name.split("."):
        function = getattr(function, word)
    found = inspect.signature(function).parameters
    assert " ".join(found) == parameters
    assert {n: p.default for n, p in found.items() if p.default is not p.empty} == defaults
    kinds = {p.kind for p in found.values()}
    assert kinds == {inspect.Parameter.POSITIONAL_OR_KEYWORD}  # by position and by name


def test_words_of_backends():
    words = ("torch", "tilelang", "cudnn", "auto")
    assert get_args(automodel.DsaIndexerBackend) == words
    assert get_args(automodel.DsaSparseAttentionBackend) == words


class TestDispatch:
    def test_kernels_are_available(self):
        assert automodel.is_dsa_kernel_available("indexer")
        assert automodel.is_dsa_kernel_available(name="sparse_attn")
        with pytest.raises(ValueError, match="name 'sinkhorn': must be one of indexer, sparse_a"):
            automodel.is_dsa_kernel_available("sinkhorn")

    def test_all_cuda(self):
        assert automodel._all_cuda()
        assert not automodel._all_cuda(torch.zeros(1))
        assert not automodel._all_cuda(torch.zeros(1), torch.zeros(1))

    def decide(self, backend, *tensors, available=True, require_bf16=False):
        return automodel.should_use_tilelang(
            backend=backend,
            available=available,
            kernel_name="the lightning indexer",
            tensors=tensors,
            require_bf16=require_bf16,
        )

    @pytest.mark.parametrize("backend", ["torch", "cudnn"])
    def test_other_paths_never(self, backend):
        assert self.decide(backend, torch.zeros(1)) is False

    def test_cpu_tensors_take_the_fast_path(self):
        assert self.decide("auto", torch.zeros(1)) and self.decide("tilelang", torch.zeros(1))
        assert automodel.should_use_tilelang("auto", True, "indexer", ())

    @pytest.mark.parametrize(
        ("options", "tensors", "reason"),
        [
            ({"available": False}, [torch.zeros(1)], "is said to be unavailable"),
            ({"require_bf16": True}, [torch.zeros(1)], "dtype torch.float32: must be torch.bf"),
            ({}, [torch.zeros(1, device="meta")], "are on meta: must be on cpu or cuda"),
            ({}, [torch.zeros(1), torch.zeros(1, device="meta")], "on cpu, meta: must be on one"),
        ],
    )
    def test_auto_falls_back_and_tilelang_says_why(self, options, tensors, reason):
        assert self.decide("auto", *tensors, **options) is False
        with pytest.raises(RuntimeError, match=f"the lightning indexer: .*{reason}"):
            self.decide("tilelang", *tensors, **options)

    def test_bf16_is_enough_where_it_is_required(self):
        assert self.decide("tilelang", torch.zeros(1, dtype=bf16), require_bf16=True)

    def test_unknown_words_are_refused(self):
        message = "backend 'flash': must be one of torch, tilelang, cudnn, auto"
        with pytest.raises(ValueError, match=message):
            self.decide("flash")

    def test_dynamo_traces_the_decision(self):
        """It asks the library, whose functions Dynamo cannot trace."""

        def layer(x):
            return x + 1 if self.decide("tilelang", x) else x

        compiled = torch.compile(layer, fullgraph=True, backend="eager")
        assert compiled(torch.zeros(2)).tolist() == [1, 1]


class TestWindows:
    def test_golden_values(self):
        starts, ends = automodel._generate_padded_varlen_mask_params(ints(0, 2, 5), ints(0, 4, 8))
        assert starts.dtype == ends.dtype == torch.int32
        assert starts.tolist() == [0, 0, 0, 0, 4, 4, 4, 4]
        assert ends.tolist() == [1, 2, 2, 2, 5, 6, 7, 7]

    def test_long_offsets_and_the_fill_of_stacked_batches(self):
        cu_seqlens = ints(0, 2, 5, -1000, -1000, dtype=torch.int64)
        padded = ints(0, 4, 8, -1000, -1000, dtype=torch.int64)
        actual = automodel._generate_padded_varlen_mask_params(cu_seqlens, padded)
        expected = automodel._generate_padded_varlen_mask_params(ints(0, 2, 5), ints(0, 4, 8))
        for a, b in zip(actual, expected, strict=True):
            assert_equal(a, b)

    def test_the_fill_is_taken_at_the_end_only(self):
        with pytest.raises(ValueError, match=r"cu_seqlens\[1\] -1000"):
            automodel._generate_padded_varlen_mask_params(ints(0, -1000, 5), ints(0, 4, 8))

    def test_no_row_is_empty(self):
        starts, ends = automodel._generate_padded_varlen_mask_params(ints(0, 0, 2), ints(0, 2, 4))
        assert (starts.tolist(), ends.tolist()) == ([0, 0, 2, 2], [1, 1, 3, 4])


def indexer(random: Random, tokens: int, keys: int, heads: int = 4, dim: int = 32):
    q, k = random.normal(tokens, heads, dim, dtype=bf16), random.normal(keys, dim, dtype=bf16)
    return q, k, random.normal(tokens, heads, dtype=f32)


def exact_indices(tensors, begin, end, topk):
    scores = reference.index_scores(*(x.to(f64) for x in tensors), begin, end)
    return reference.index_topk(scores, topk)[0]


class TestIndexerTopk:
    def test_plain_documents(self):
        tensors = indexer(Random(1), 64, 64, heads=16, dim=128)
        actual = automodel.tilelang_indexer_topk(*tensors, ints(0, 24, 64), 8)
        assert (actual.shape, actual.dtype) == ((64, 1, 8), torch.int32)
        assert actual.is_contiguous() and not actual.requires_grad
        begin, end = reference.key_windows(ints(0, 24, 64), 64)
        assert_equal(actual[:, 0], exact_indices(tensors, begin, end, 8))

    def test_padded_documents_and_query_rows(self):
        """Row 3 is padding: it sees its document but no padding."""
        q, k, weights = indexer(Random(2), 4, 8)
        rows, padded = ints(1, 3, 4, 6), ints(0, 4, 8)
        actual = automodel.tilelang_indexer_topk(
            q, k, weights, ints(0, 2, 5), 4, query_indices=rows, cu_seqlens_padded=padded
        )
        expected = [[0, 1, -1, -1], [0, 1, -1, -1], [4, -1, -1, -1], [4, 5, 6, -1]]
        assert actual[:, 0].tolist() == expected
        # By position, and with 64-bit integers.
        again = automodel.tilelang_indexer_topk(
            q, k, weights, ints(0, 2, 5).long(), 4, rows.long(), padded.long()
        )
        assert_equal(again, actual)

    def test_query_rows_with_a_batch_dimension(self):
        tensors = indexer(Random(2), 4, 8)
        rows = ints(1, 3, 4, 6)
        expected = automodel.tilelang_indexer_topk(*tensors, ints(0, 2, 8), 4, rows)
        assert_equal(
            automodel.tilelang_indexer_topk(*tensors, ints(0, 2, 8), 4, rows[None]), expected
        )

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"cu_seqlens": ints(0, 9)}, "cu_seqlens ends at 9: must be at most 8, the tokens of"),
            (
                {"cu_seqlens_padded": ints(0, 10)},
                "cu_seqlens_padded ends at 10: must be at most 8, the tokens of the batch",
            ),
            (
                {"cu_seqlens": ints(0, 9), "query_indices": ints(*range(8))},
                "cu_seqlens ends at 9: must be at most 8",
            ),
            (
                {"cu_seqlens": torch.tensor([0.0, 8.0])},
                "cu_seqlens has dtype torch.float32: must be int32 or int64",
            ),
            (
                {"query_indices": torch.arange(8.0)},
                "query_indices has dtype torch.float32: must be int32 or int64",
            ),
        ],
    )
    def test_refusals(self, changes, message):
        q, k, weights = indexer(Random(2), 8, 8)
        call = {"index_q": q, "index_k": k, "head_weights": weights}
        call |= {"cu_seqlens": ints(0, 8), "index_topk": 4}
        automodel.tilelang_indexer_topk(**call)
        with pytest.raises(ValueError, match=f"^tilelang_indexer_topk: {message}"):
            automodel.tilelang_indexer_topk(**call | changes)

    def test_a_float_is_no_number_of_keys(self):
        tensors = indexer(Random(2), 8, 8)
        message = "^tilelang_indexer_topk: index_topk 2.0: must be an integer"
        with pytest.raises(TypeError, match=message):
            automodel.tilelang_indexer_topk(*tensors, ints(0, 8), 2.0)

    def test_keys_of_other_ranks_may_lie_past_the_queries(self):
        q, k, weights = indexer(Random(2), 4, 8)
        rows = ints(4, 5, 6, 7)
        assert automodel.tilelang_indexer_topk(q, k, weights, ints(0, 8), 4, rows).amax() > 3

    def test_equal_offsets_are_no_padding(self):
        tensors = indexer(Random(3), 16, 16)
        plain = automodel.tilelang_indexer_topk(*tensors, ints(0, 5, 16), 4)
        cu_seqlens = ints(0, 5, 16)
        padded = automodel.tilelang_indexer_topk(
            *tensors, cu_seqlens, 4, cu_seqlens_padded=cu_seqlens
        )
        assert_equal(padded, plain)

    def test_short_sequence_keeps_the_width(self):
        tensors = indexer(Random(4), 32, 32)
        actual = automodel.tilelang_indexer_topk(*tensors, ints(0, 32), 64)[:, 0]
        for t in range(32):
            assert actual[t].tolist() == [*range(t + 1)] + [-1] * (63 - t)

    def test_rows_past_the_last_document_choose_nothing(self):
        tensors = indexer(Random(5), 9, 9)
        actual = automodel.tilelang_indexer_topk(*tensors, ints(0, 3, 7, -1000), 4)
        assert (actual[7:] == -1).all() and (actual[:7, 0, 0] >= 0).all()

    def test_rows_do_not_depend_on_how_they_are_cut(self):
        q, k, weights = indexer(Random(6), 24, 24)
        whole = automodel.tilelang_indexer_topk(q, k, weights, ints(0, 10, 24), 4)
        rows = ints(*range(7, 19))
        part = automodel.tilelang_indexer_topk(
            q[7:19], k, weights[7:19], ints(0, 10, 24), 4, query_indices=rows
        )
        assert_equal(part, whole[7:19])

    def test_any_strides_and_weights_of_any_type(self):
        q, k, weights = indexer(Random(7), 12, 12)
        weights = weights.to(bf16)
        expected = automodel.tilelang_indexer_topk(q, k, weights.float(), ints(0, 12), 3)
        by_channel = q.transpose(1, 2).contiguous().transpose(1, 2), k.T.contiguous().T
        actual = automodel.tilelang_indexer_topk(*by_channel, weights, ints(0, 12), 3)
        assert_equal(actual, expected)


def absorbed_layer(random: Random, tokens, heads=4, nope=16, rope=8, latent=32, v=16):
    """The inputs of an MLA layer and the weights of its up-projection."""
    shapes = {
        "q_nope": (tokens, heads, nope),
        "q_pe": (tokens, heads, rope),
        "latent": (tokens, latent),
        "k_pe": (tokens, rope),
        "w_kc": (heads, nope, latent),
        "w_vc": (heads, v, latent),
    }
    return {name: random.normal(*shape) * 0.5 for name, shape in shapes.items()}


def dense_mla(x, indices, scale):
    """Attention with explicit keys and values per head and a mask of the selected keys."""
    k_nope = torch.einsum("sc,hnc->shn", x["latent"], x["w_kc"])
    values = torch.einsum("sc,hdc->shd", x["latent"], x["w_vc"])
    s = torch.einsum("thn,shn->hts", x["q_nope"], k_nope)
    s = (s + torch.einsum("thr,sr->hts", x["q_pe"], x["k_pe"])) * scale
    tokens = len(indices)
    chosen = torch.zeros(tokens, tokens + 1, dtype=torch.bool)
    chosen.scatter_(1, torch.where(indices < 0, tokens, indices).long(), True)
    p = torch.where(chosen[:, :-1], s, -math.inf).softmax(-1)
    return torch.einsum("hts,shd->thd", p, values)


def absorbed(x, indices, scale, dtype):
    q = torch.cat([torch.einsum("thn,hnc->thc", x["q_nope"], x["w_kc"]), x["q_pe"]], -1)
    kv = torch.cat([x["latent"], x["k_pe"]], -1)
    return automodel.tilelang_sparse_attention(
        q.to(dtype), kv[:, None].to(dtype), indices[:, None], x["w_vc"], scale
    )


class TestSparseAttention:
    @pytest.mark.parametrize(("dtype", "limit"), [(f64, 1e-10), (bf16, 3e-2)])
    def test_equals_dense_mla(self, dtype, limit):
        """The output and the gradients of all inputs of the layer, including w_vc."""
        random = Random(8)
        x = absorbed_layer(random, 40)
        begin, end = reference.key_windows(ints(0, 16, 40), 40)
        scores = reference.index_scores(
            random.normal(40, 2, 8), random.normal(40, 8), random.normal(40, 2), begin, end
        )
        indices, _, _ = reference.index_topk(scores, 12)
        scale = 0.1875
        d_out = random.normal(40, 4, 16)
        inputs, oracle = ({n: t.clone().requires_grad_() for n, t in x.items()} for _ in range(2))
        actual, expected = (
            absorbed(inputs, indices, scale, dtype),
            dense_mla(oracle, indices, scale),
        )
        assert (actual.shape, actual.dtype) == ((40, 4, 16), dtype)
        assert_within(actual, expected.detach(), limit)
        actual.backward(d_out.to(dtype))
        expected.backward(d_out)
        for name in x:
            assert_within(inputs[name].grad, oracle[name].grad, limit)

    def test_rows_without_keys_give_zero(self):
        x = absorbed_layer(Random(9), 6)
        indices = torch.full((6, 3), -1).int()
        indices[0], indices[1] = ints(0, 99, -7), ints(6, 7, 8)
        inputs = {name: t.clone().requires_grad_() for name, t in x.items()}
        out = absorbed(inputs, indices, 0.25, f64)
        assert out[0].any() and not out[1:].any()
        out.sum().backward()
        for t in inputs.values():
            assert t.grad.isfinite().all()
        assert not inputs["latent"].grad[1:].any()

    call = {
        "q": torch.ones(4, 2, 24),
        "kv_latent": torch.ones(4, 1, 24),
        "topk_indices": torch.zeros(4, 1, 2).int(),
        "w_vc": torch.ones(2, 8, 16),
        "softmax_scale": 1.0,
    }

    @pytest.mark.parametrize("name", ["kv_latent", "topk_indices"])
    def test_layouts_are_checked(self, name):
        automodel.tilelang_sparse_attention(**self.call)
        with pytest.raises(ValueError, match=rf"{name} \[4, \d+\]: must be \[rows, 1, width\]"):
            automodel.tilelang_sparse_attention(**self.call | {name: self.call[name][:, 0]})

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            (
                {"topk_indices": torch.zeros(4, 1, 2)},
                "topk_indices has dtype torch.float32: must be int32 or int64",
            ),
            (
                {"topk_indices": torch.zeros(4, 1, 2).bool()},
                "topk_indices has dtype torch.bool: must be int32 or int64",
            ),
            ({"softmax_scale": None}, "softmax_scale None: must be given, it has no default"),
            (
                {"w_vc": torch.zeros(2, 8, 32)},
                r"w_vc \[2, 8, 32\]: its last dimension must be at most 24, the channels of q",
            ),
        ],
    )
    def test_refusals(self, changes, message):
        with pytest.raises(ValueError, match=f"^tilelang_sparse_attention: {message}"):
            automodel.tilelang_sparse_attention(**self.call | changes)

    def test_no_index_of_64_bits_wraps_around(self):
        """2**32 would be key 0 in 32 bits."""
        indices = torch.full((4, 1, 2), 2**32)
        indices[0] = 1
        out = automodel.tilelang_sparse_attention(**self.call | {"topk_indices": indices})
        assert out[0].any() and not out[1:].any()


def v4_inputs(random: Random, batch, tokens, keys, heads, dim, topk, dtype=f32):
    return (
        random.normal(batch, tokens, heads, dim, dtype=dtype),
        random.normal(batch, keys, dim, dtype=dtype),
        random.normal(heads, dtype=f32),
        random.lists(batch * tokens, topk, keys).reshape(batch, tokens, topk),
    )


def v4_oracle(q, kv, sink, indices, scale=None):
    dim = q.shape[-1]
    return reference.sparse_attention(q, kv, indices, v_dim=dim, scale=scale, sink=sink)[0]


def both(function, tensors, d_out, *options):
    """The output and the gradients of q, kv and sink."""
    inputs = [x.clone().requires_grad_() for x in tensors[:3]]
    out = function(*inputs, tensors[3], *options)
    out.backward(d_out)
    return out.detach(), [x.grad for x in inputs]


class TestDeepSeekV4:
    @given(st.integers(0, 2**31), st.sampled_from([None, 0.25]), st.sampled_from([None, 1, 2, 9]))
    def test_forward_and_gradients(self, seed, scale, heads_per_kernel):
        random = Random(seed)
        tensors = v4_inputs(random, 2, 7, 9, 3, 8, 5)
        d_out = random.normal(2, 7, 3, 8, dtype=f32)
        exact = [x.to(f64) for x in tensors[:3]] + [tensors[3]]
        expected, d_expected = both(v4_oracle, exact, d_out.to(f64), scale)
        if heads_per_kernel is None:
            out, grads = both(automodel.sparse_attn_tilelang, tensors, d_out, scale)
        else:
            chunked = automodel.sparse_attn_tilelang_head_chunked
            out, grads = both(chunked, tensors, d_out, heads_per_kernel, scale)
        torch.testing.assert_close(out.to(f64), expected, rtol=1e-5, atol=1e-6)
        for a, b in zip(grads, d_expected, strict=True):
            torch.testing.assert_close(a.to(f64), b, rtol=1e-5, atol=1e-6)

    def test_bf16_with_invalid_entries_and_a_strided_gradient(self):
        random = Random(10)
        tensors = v4_inputs(random, 1, 16, 20, 8, 128, 16, dtype=bf16)
        tensors[3][..., 12:] = ints(99, -1, -1, 20)
        d_out = random.normal(1, 8, 16, 128, dtype=bf16).transpose(1, 2)
        exact = [x.to(f64) for x in tensors[:3]] + [tensors[3]]
        expected, d_expected = both(v4_oracle, exact, d_out.to(f64))
        out, grads = both(automodel.sparse_attn_tilelang, tensors, d_out)
        assert [x.dtype for x in grads] == [bf16, bf16, f32]
        assert_within(out, expected, 4e-3)
        for a, b in zip(grads, d_expected, strict=True):
            assert_within(a, b, 1e-2)

    def test_chunks_of_heads_are_rounded_once(self):
        random = Random(11)
        tensors = v4_inputs(random, 2, 24, 16, 12, 64, 8, dtype=bf16)
        d_out = random.normal(2, 24, 12, 64, dtype=bf16)
        chunked = automodel.sparse_attn_tilelang_head_chunked
        out, (d_q, d_kv, d_sink) = both(chunked, tensors, d_out, 5)
        whole_out, whole = both(automodel.sparse_attn_tilelang, tensors, d_out)
        assert_equal(out, whole_out)
        assert_equal(d_q, whole[0])
        assert_near(d_sink, whole[2].to(f64), 1e-5)
        assert_near(d_kv, whole[1].to(f64), 2**-8)
        # The sum of rounded chunks would have a larger error.
        exact = [x.to(f64) for x in tensors[:3]] + [tensors[3]]
        _, (_, sums, _) = both(v4_oracle, exact, d_out.to(f64))
        naive = torch.zeros_like(d_kv)
        for h in range(0, 12, 5):
            part = [x[..., h : h + 5, :] if x.dim() == 4 else x for x in tensors]
            part[2] = tensors[2][h : h + 5]
            naive += both(automodel.sparse_attn_tilelang, part, d_out[:, :, h : h + 5])[1][1]
        error, naive_error = ((x.to(f64) - sums).norm().item() for x in (d_kv, naive))
        assert error < 0.8 * naive_error

    @pytest.mark.parametrize("heads", [None, 1, 5])
    def test_chunks_of_heads_are_passes_of_backward(self, heads, monkeypatch):
        seen = []
        run = _lib.run_allocating

        def spy(op, fields, *rest):
            seen.append((op, fields.get("max_heads_per_pass", 0)))
            run(op, fields, *rest)

        monkeypatch.setattr(_lib, "run_allocating", spy)
        tensors = v4_inputs(Random(19), 1, 3, 4, 12, 8, 2)
        d_out = torch.ones(1, 3, 12, 8)
        if heads is None:
            both(automodel.sparse_attn_tilelang, tensors, d_out)
        else:
            both(automodel.sparse_attn_tilelang_head_chunked, tensors, d_out, heads)
        assert seen == [("sparse_attention_forward", 0), ("sparse_attention_backward", heads or 0)]

    def test_functions_return_the_documented_number_of_gradients(self):
        random = Random(12)
        q, kv, sink, indices = v4_inputs(random, 1, 3, 4, 2, 8, 2)

        def gradients(function, *options):
            out = function.apply(q.clone().requires_grad_(), kv, sink, indices, *options)
            return function.backward(out.grad_fn, torch.ones_like(out))

        plain = gradients(automodel.DeepSeekV4SparseAttention)
        assert len(plain) == 5 and plain[3:] == (None, None)
        assert len(gradients(automodel.DeepSeekV4SparseAttention, None, True)) == 6
        chunked = gradients(automodel.DeepSeekV4SparseAttentionHeadChunked, 1)
        assert len(chunked) == 6 and chunked[3:] == (None, None, None)
        assert len(gradients(automodel.DeepSeekV4SparseAttentionHeadChunked, 1, None, True)) == 7
        for a, b, x in zip(plain[:3], chunked[:3], (q, kv, sink), strict=True):
            assert a.shape == b.shape == x.shape and a.dtype == b.dtype == x.dtype

    def test_default_scale(self):
        tensors = v4_inputs(Random(13), 1, 5, 6, 2, 16, 4)
        default = automodel.sparse_attn_tilelang(*tensors)
        assert_equal(automodel.sparse_attn_tilelang(*tensors, sm_scale=16**-0.5), default)
        assert_equal(automodel.DeepSeekV4SparseAttention.apply(*tensors), default)

    @pytest.mark.parametrize("sink", [-math.inf, 0.0, 200.0, math.inf])
    def test_sinks_of_any_size(self, sink):
        """Also if exp(sink - max) overflows fp32."""
        q, kv, _, indices = v4_inputs(Random(14), 1, 5, 6, 2, 16, 4)
        tensors = (q, kv, torch.full((2,), sink), indices)
        d_out = torch.ones(1, 5, 2, 16)
        out, grads = both(automodel.sparse_attn_tilelang, tensors, d_out)
        exact = [x.to(f64) for x in tensors[:3]] + [indices]
        expected, d_expected = both(v4_oracle, exact, d_out.to(f64))
        assert_near(out, expected, 1e-5)
        for a, b in zip(grads, d_expected, strict=True):
            assert_near(a, b, 1e-5)

    def test_other_types_of_sink_and_indices(self):
        q, kv, sink, indices = v4_inputs(Random(15), 1, 5, 6, 2, 16, 4)
        tensors = (q, kv, sink.to(bf16), indices.long())
        d_out = torch.ones(1, 5, 2, 16)
        out, grads = both(automodel.sparse_attn_tilelang, tensors, d_out)
        expected, d_expected = both(
            automodel.sparse_attn_tilelang, (q, kv, tensors[2].float(), indices), d_out
        )
        assert_equal(out, expected)
        assert grads[2].dtype == bf16
        assert_rounded(grads[2], d_expected[2])

    def test_reference_rounding_changes_nothing(self):
        tensors = v4_inputs(Random(13), 1, 5, 6, 2, 16, 4)
        d_out = torch.ones(1, 5, 2, 16)
        for function, options in (
            (automodel.sparse_attn_tilelang, (0.25,)),
            (automodel.sparse_attn_tilelang_head_chunked, (1, 0.25)),
        ):
            expected, d_expected = both(function, tensors, d_out, *options)
            out, grads = both(function, tensors, d_out, *options, True)
            for a, b in zip((out, *grads), (expected, *d_expected), strict=True):
                assert_equal(a, b)

    def test_floats_are_no_indices(self):
        q, kv, sink, indices = v4_inputs(Random(13), 1, 5, 6, 2, 16, 4)
        message = "topk_idxs has dtype torch.float32: must be int32 or int64"
        with pytest.raises(ValueError, match=message):
            automodel.sparse_attn_tilelang(q, kv, sink, indices.float())

    @pytest.mark.parametrize("heads", [0, -1])
    def test_a_kernel_has_at_least_one_head(self, heads):
        tensors = v4_inputs(Random(16), 1, 5, 6, 2, 16, 4)
        with pytest.raises(ValueError, match=f"max_heads_per_kernel {heads}: must be at least 1"):
            automodel.sparse_attn_tilelang_head_chunked(*tensors, heads)

    def test_scale_zero_is_refused(self):
        tensors = v4_inputs(Random(17), 1, 5, 6, 2, 16, 4)
        with pytest.raises(ValueError, match="sm_scale 0: must not be 0"):
            automodel.sparse_attn_tilelang(*tensors, 0.0)

    def test_packed_equals_each_document_alone(self):
        """Lists of window_indices keep documents apart without any mask."""
        random = Random(18)
        lengths = [9, 4, 12]
        total = sum(lengths)
        q, kv = random.normal(1, total, 2, 16, dtype=f32), random.normal(1, total, 16, dtype=f32)
        sink = random.normal(2, dtype=f32)
        cu_seqlens = ints(0, 9, 13, 25)
        lists = winnow.window_indices(winnow.Packing(cu_seqlens), window=4).indices
        packed = automodel.sparse_attn_tilelang(q, kv, sink, lists[None])
        for a, b in zip(cu_seqlens[:-1], cu_seqlens[1:], strict=True):
            own = winnow.window_indices(winnow.Packing(ints(0, b - a)), window=4).indices
            alone = automodel.sparse_attn_tilelang(q[:, a:b], kv[:, a:b], sink, own[None])
            assert_equal(packed[:, a:b], alone)
