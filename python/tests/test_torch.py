# SPDX-License-Identifier: Apache-2.0
"""winnow with torch.compile, checkpointing, DLPack and tensor parallelism."""

from decimal import Decimal
from functools import partial

import numpy as np
import pytest
import torch
import torch._dynamo.testing
import torch._inductor.config
from cases import Random, assert_equal, assert_near, bf16, f32, f64, offsets
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

import winnow
from winnow import _lib, automodel

SCALE = 0.25


def step(q, kv, sink, w_v, index_q, index_k, weights, packing: winnow.Packing) -> Tensor:
    """A training step that uses all differentiable functions."""
    selection = winnow.index_topk(index_q, index_k, weights, packing, topk=4)
    out, lse, _ = winnow.sparse_attention(q, kv, selection, v_dim=8, scale=SCALE, sink=sink)
    values = winnow.value_projection(out, w_v)
    pools = winnow.window_indices(packing, window=3, ratio=2, key_offset=q.shape[0])
    keys = torch.cat([kv, 0.5 * (kv[::2] + kv[1::2])])
    pooled = winnow.sparse_attention(q, keys, pools, sink=sink)
    attention = {"scale": SCALE, "sink": sink.detach()}
    target = winnow.index_target(selection, q, kv, lse, **attention)
    dense = (q, kv, index_q, index_k, weights, packing)
    return (
        values.square().sum()
        + pooled.out.sum()
        + winnow.index_loss(selection, q, kv, lse, target=target, **attention)
        + winnow.dense_index_loss(*dense, **attention)
        + winnow.dense_index_loss(*dense, lse=lse, **attention)
    )


def inputs(lengths: list[int], dtype=f32) -> tuple[list[Tensor], winnow.Packing]:
    random = Random(sum(lengths))
    tokens, low = sum(lengths), f64 if dtype == f64 else f32
    tensors = [
        random.normal(tokens, 3, 16, dtype=dtype),
        random.normal(tokens, 16, dtype=dtype),
        random.normal(3, dtype=low),
        random.normal(3, 5, 8, dtype=dtype),
        random.normal(tokens, 2, 8, dtype=dtype),
        random.normal(tokens, 8, dtype=dtype),
        random.normal(tokens, 2, dtype=low),
    ]
    return [x.requires_grad_() for x in tensors], winnow.Packing(offsets(lengths))


def value_and_gradients(function, tensors, packing) -> list[Tensor]:
    loss = function(*tensors, packing)
    return [loss.detach(), *torch.autograd.grad(loss, tensors)]


# All sizes of the first batch differ, since Dynamo treats equal sizes as the same symbol.
PACKED_LENGTHS = [[2, 3, 1, 2, 1, 3], [6, 8], [3, 4, 9, 4], [30]]


class TestCompile:
    @pytest.fixture(autouse=True)
    def _reset(self):
        torch._dynamo.reset()
        yield
        torch._dynamo.reset()

    def test_one_graph_serves_every_packed_length(self):
        graphs = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
        compiled = torch.compile(step, fullgraph=True, dynamic=True, backend=graphs)
        counts = []
        for lengths in PACKED_LENGTHS:
            call = inputs(lengths, bf16)
            expected = value_and_gradients(step, *call)
            for a, b in zip(value_and_gradients(compiled, *call), expected, strict=True):
                assert_equal(a, b)
            counts.append(graphs.frame_count)
        assert counts[0] > 0 and len(set(counts)) == 1

    def test_lengths_become_dynamic_by_themselves(self):
        graphs = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
        compiled = torch.compile(step, fullgraph=True, backend=graphs)
        for lengths in PACKED_LENGTHS[:2]:
            value_and_gradients(compiled, *inputs(lengths))
        compilations = graphs.frame_count
        for lengths in PACKED_LENGTHS[2:]:
            call = inputs(lengths)
            expected = value_and_gradients(step, *call)
            for a, b in zip(value_and_gradients(compiled, *call), expected, strict=True):
                assert_equal(a, b)
        assert graphs.frame_count == compilations

    @torch._inductor.config.patch({"cpp.simdlen": 1})
    def test_inductor(self):
        """Little between the operators and no SIMD: the C++ compiler takes seconds a kernel."""

        def operators(q, kv, sink, w_v, index_q, index_k, weights, packing):
            selection = winnow.index_topk(index_q, index_k, weights, packing, topk=4)
            lists = winnow.window_indices(packing, window=3)
            out, lse, _ = winnow.sparse_attention(
                q, kv, selection.indices, v_dim=8, scale=SCALE, sink=sink, lengths=lists.lengths
            )
            rows = {"scale": SCALE, "sink": sink.detach(), "reduction": "none"}
            loss = winnow.index_loss(selection, q, kv, lse, **rows)
            return winnow.value_projection(out, w_v).square(), loss

        compiled = torch.compile(operators, fullgraph=True, dynamic=True)
        for lengths in PACKED_LENGTHS[:2]:
            tensors, packing = inputs(lengths)
            results = []
            for function in (operators, compiled):
                outputs = function(*tensors, packing)
                ones = [torch.ones_like(x) for x in outputs]
                results.append([*outputs, *torch.autograd.grad(outputs, tensors, ones)])
            for a, b in zip(*results, strict=True):
                assert_near(b.detach(), a.detach().to(f64), 1e-5)

    def test_windows_and_offsets_can_be_made_inside(self):
        def chosen(q, k, weights, cu_seqlens):
            packing = winnow.Packing(cu_seqlens, tokens=q.shape[0])
            return winnow.index_topk(q, k, weights, packing, topk=q.shape[0] // 2).indices

        compiled = torch.compile(chosen, fullgraph=True, dynamic=True, backend="aot_eager")
        for lengths in PACKED_LENGTHS:
            (*_, q, k, weights), packing = inputs(lengths)
            expected = chosen(q, k, weights, packing.cu_seqlens)
            assert_equal(compiled(q, k, weights, packing.cu_seqlens), expected)

    def test_scale_may_be_made_of_sizes(self):
        def attention(q, kv, indices):
            return winnow.sparse_attention(q, kv, indices, scale=q.shape[0] ** -0.5).out

        compiled = torch.compile(attention, fullgraph=True, dynamic=True, backend="aot_eager")
        random = Random(2)
        for tokens in (5, 9):
            q, kv = random.normal(tokens, 3, 16), random.normal(7, 16)
            indices = random.lists(tokens, 4, 7)
            assert_equal(compiled(q, kv, indices), attention(q, kv, indices))

    @pytest.mark.parametrize("scale", [np.float32(0.5), np.float64(0.5), np.array(0.5), Decimal(1)])
    def test_scale_of_another_type_breaks_the_graph(self, scale):
        def attention(scale):
            return winnow.sparse_attention(torch.ones(2, 3, 16), kv, indices, scale=scale).out

        random = Random(2)
        kv, indices = random.normal(7, 16, dtype=f32), random.lists(2, 4, 7)
        what = "sparse_attention: scale is a (ndarray|Decimal): must be a Python number"
        with pytest.raises(torch._dynamo.exc.Unsupported, match=what):
            torch.compile(attention, fullgraph=True, backend="eager")(scale)
        assert_equal(torch.compile(attention, backend="eager")(scale), attention(float(scale)))

    def test_automodel(self):
        def attention(q, kv, sink, indices):
            whole = automodel.sparse_attn_tilelang(q, kv, sink, indices)
            return whole + automodel.sparse_attn_tilelang_head_chunked(q, kv, sink, indices, 2)

        compiled = torch.compile(attention, fullgraph=True, dynamic=True, backend="aot_eager")
        random = Random(1)
        for tokens in (6, 9):
            q, kv = random.normal(2, tokens, 3, 16, dtype=f32), random.normal(2, 7, 16, dtype=f32)
            tensors = [x.requires_grad_() for x in (q, kv, random.normal(3, dtype=f32))]
            indices = random.lists(2 * tokens, 4, 7).reshape(2, tokens, 4)
            results = []
            for function in (attention, compiled):
                out = function(*tensors, indices)
                results.append([out.detach(), *torch.autograd.grad(out.sum(), tensors)])
            for a, b in zip(*results, strict=True):
                assert_equal(a, b)


@pytest.fixture
def ran(monkeypatch) -> list[str]:
    """Names of the ops that the library ran."""
    names: list[str] = []
    run = _lib.run_allocating
    monkeypatch.setattr(
        _lib, "run_allocating", lambda op, *a, **o: (names.append(op), run(op, *a, **o))
    )
    return names


class TestCheckpointing:
    def gradients(self, **options):
        """Gradients of one layer with these checkpointing options, or without checkpointing."""
        tensors, packing = inputs([5, 7])
        layer = partial(checkpoint, step, use_reentrant=False, **options) if options else step
        return value_and_gradients(layer, tensors, packing)

    def test_stored_indices_are_replayed(self, ran):
        expected = self.gradients()
        ran.clear()
        actual = self.gradients(context_fn=winnow.keep_selections)
        for a, b in zip(actual, expected, strict=True):
            assert_equal(a, b)
        assert ran.count("index_topk_forward") == 1
        assert (
            ran.count("sparse_attention_forward") == 4
        )  # two in forward, two recomputed in backward

    def test_compiled_layers_replay_them_too(self, ran):
        expected = self.gradients()
        ran.clear()
        tensors, packing = inputs([5, 7])

        def layer(*args):
            return checkpoint(step, *args, use_reentrant=False, context_fn=winnow.keep_selections)

        compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
        for a, b in zip(value_and_gradients(compiled, tensors, packing), expected, strict=True):
            assert_equal(a, b)
        assert ran.count("index_topk_forward") == 1
        assert ran.count("sparse_attention_forward") == 4
        torch._dynamo.reset()

    def test_without_them_the_same_keys_are_chosen_again(self, ran):
        expected = self.gradients()
        ran.clear()
        for a, b in zip(self.gradients(preserve_rng_state=False), expected, strict=True):
            assert_equal(a, b)
        assert ran.count("index_topk_forward") == 2

    def test_layers_that_share_indices(self, ran):
        """A layer without an indexer gets the indices of another one as an ordinary tensor."""
        (q, kv, *_, index_q, index_k, weights), packing = inputs([5, 7])
        selection = winnow.index_topk(index_q, index_k, weights, packing, topk=4)

        def shared(q, kv):
            return winnow.sparse_attention(q, kv, selection.indices).out

        expected = torch.autograd.grad(shared(q, kv).sum(), (q, kv))
        out = checkpoint(shared, q, kv, use_reentrant=False)
        for a, b in zip(torch.autograd.grad(out.sum(), (q, kv)), expected, strict=True):
            assert_equal(a, b)
        assert ran.count("index_topk_forward") == 1


class ForeignArray:
    """An array that supports only DLPack."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def __dlpack__(self, **options):
        return self.tensor.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.tensor.__dlpack_device__()


class TestDLPack:
    @pytest.mark.parametrize("wrap", [Tensor.numpy, ForeignArray])
    def test_arrays_give_what_tensors_give(self, wrap):
        tensors, packing = inputs([5, 7])
        q, kv, sink, w_v, index_q, index_k, weights = (x.detach() for x in tensors)

        def run(convert):
            indexer = map(convert, (index_q, index_k, weights))
            made = winnow.Packing(convert(packing.cu_seqlens))
            selection = winnow.index_topk(*indexer, made, topk=4)
            attention = winnow.sparse_attention(
                convert(q), convert(kv), convert(selection.indices), sink=convert(sink)
            )
            values = winnow.value_projection(convert(attention.out[..., :8]), convert(w_v))
            loss = winnow.index_loss(
                selection, convert(q), convert(kv), convert(attention.lse), scale=SCALE
            )
            dense = winnow.dense_index_loss(
                *map(convert, (q, kv, index_q, index_k, weights)), made, scale=SCALE
            )
            return [
                *selection[:3],
                *attention[:2],
                values,
                loss,
                dense,
                *winnow.quantize_fp8(convert(q)),
            ]

        for a, b in zip(run(wrap), run(lambda x: x), strict=True):
            assert_equal(a, b)

    def test_results_are_arrays_without_a_copy(self):
        q, kv = np.ones((3, 2, 16), np.float32), np.ones((4, 16), np.float32)
        out = winnow.sparse_attention(q, kv, np.zeros((3, 2), np.int32)).out
        array = np.from_dlpack(out)
        assert array.ctypes.data == out.data_ptr() and (array == 1).all()

    def test_strides_are_kept(self):
        random = Random(2)
        wide = random.normal(6, 40, dtype=f32).numpy()
        q, indices = random.normal(3, 2, 16, dtype=f32).numpy(), np.zeros((3, 2), np.int32)
        strided = winnow.sparse_attention(q, wide[::2, 8:24], indices).out
        dense = winnow.sparse_attention(q, wide[::2, 8:24].copy(), indices).out
        assert_equal(strided, dense)

    @pytest.mark.parametrize("view", [lambda x: x[::-1], lambda x: x[:, ::-1]])
    def test_negative_strides_are_refused(self, view):
        """torch would abort the process."""
        q, kv, indices = np.ones((3, 2, 16)), np.ones((4, 16)), np.zeros((3, 2), np.int32)
        with pytest.raises(ValueError, match="^sparse_attention: kv has strides of .*negative$"):
            winnow.sparse_attention(q, view(kv), indices)
        with pytest.raises(ValueError, match="^sparse_attention: indices has strides of "):
            winnow.sparse_attention(q, kv, view(indices))
        with pytest.raises(ValueError, match="^Packing: cu_seqlens has strides of "):
            winnow.Packing(np.array([3, 0], np.int32)[::-1])

    def test_another_byte_order_is_refused(self):
        q, kv, indices = np.ones((3, 2, 16)), np.ones((4, 16)), np.zeros((3, 2), np.int32)
        with pytest.raises(ValueError, match="^sparse_attention: kv cannot be .*byte order"):
            winnow.sparse_attention(q, kv.astype(">f8"), indices)
        with pytest.raises(ValueError, match="^sparse_attention: indices cannot be .*byte order"):
            winnow.sparse_attention(q, kv, indices.astype(">i4"))

    def test_arrays_that_must_not_be_written_are_read(self):
        q, kv, indices = np.ones((3, 2, 16)), np.ones((4, 16)), np.zeros((3, 2), np.int32)
        expected = winnow.sparse_attention(q, kv.copy(), indices).out
        kv.flags.writeable = False
        assert_equal(winnow.sparse_attention(q, kv, indices).out, expected)

    def test_lists_are_no_arrays(self):
        with pytest.raises(TypeError, match="quantize_fp8: x is a list: must be a tensor, or an"):
            winnow.quantize_fp8([[1.0]])


class TestTransforms:
    """What docs/python.md says about the transforms of torch.func and forward mode."""

    @pytest.fixture
    def call(self):
        (q, kv, *_), _ = inputs([3, 2])
        indices = torch.zeros(5, 3, dtype=torch.int32)
        return lambda q: winnow.sparse_attention(q, kv.detach(), indices).out, q.detach()

    def test_torch_func_is_refused(self, call):
        attention, q = call
        uses = [
            lambda: torch.func.grad(lambda q: attention(q).sum())(q),
            lambda: torch.func.jvp(attention, (q,), (q,)),
            lambda: torch.func.vmap(attention)(torch.stack([q, q])),
            lambda: torch.func.jacrev(attention)(q),
        ]
        for use in uses:
            with pytest.raises(RuntimeError, match="must override the setup_context staticmethod"):
                use()

    def test_forward_mode_is_refused(self, call):
        attention, q = call
        with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="the jvp function"):
            attention(forward_ad.make_dual(q, q))

    def test_batched_gradients_are_refused(self, call):
        attention, q = call
        q.requires_grad_()
        with pytest.raises(RuntimeError, match="Batching rule not implemented for winnow::"):
            torch.autograd.grad(attention(q), q, torch.ones(2, *q.shape), is_grads_batched=True)

    def test_operators_of_tensors_alone_are_mapped(self, call):
        x = torch.stack([call[1], 2 * call[1]])
        scales = torch.func.vmap(lambda x: winnow.quantize_fp8(x).scale)(x)
        assert_equal(scales, winnow.quantize_fp8(x.flatten(0, 1)).scale.view_as(scales))

    def test_jacobian_of_torch_autograd_works(self, call):
        attention, q = call
        jacobian = torch.autograd.functional.jacobian(attention, q)
        direction = torch.ones_like(q)
        (expected,) = torch.autograd.grad(attention(q.requires_grad_()), q, direction)
        assert_near(jacobian.sum((0, 1, 2)), expected.to(f64), 1e-5)

    def test_second_derivatives_are_refused_whatever_gradient_comes_in(self):
        """That of a sum requires no gradient, and torch would take its derivative for 0."""
        (q, kv, sink, w_v, *indexer), packing = inputs([5, 7])
        model, weights = (q.detach(), kv.detach()), indexer[2]
        selection = winnow.index_topk(*indexer, packing, topk=4)
        replayed = winnow.index_topk(*indexer, packing, indices=selection.indices)
        attention = winnow.sparse_attention(q, kv, selection, sink=sink)
        loss = winnow.index_loss(selection, *model, attention.lse, scale=SCALE)
        dense = winnow.dense_index_loss(*model, *indexer, packing, scale=SCALE)
        for value, x in [
            (selection.scores[-1].sum(), weights),
            (replayed.scores[-1].sum(), weights),
            (attention.out.sum(), q),
            (attention.lse.sum(), q),
            (winnow.value_projection(q[..., :8], w_v).sum(), w_v),
            (loss, weights),
            (dense, weights),
        ]:
            (d_x,) = torch.autograd.grad(value, x, create_graph=True)
            with pytest.raises(RuntimeError, match="differentiate twice"):
                d_x.square().sum().backward(retain_graph=True)

    def test_a_gradient_with_a_graph_of_checkpointed_layers_is_right(self, call):
        attention, q = call
        out = checkpoint(attention, q.requires_grad_(), use_reentrant=False)
        (d_q,) = torch.autograd.grad(out.sum(), q, create_graph=True)
        (expected,) = torch.autograd.grad(attention(q).sum(), q)
        assert_equal(d_q.detach(), expected)

    def test_hessian_of_torch_autograd_is_refused(self, call):
        attention, q = call
        with pytest.raises(RuntimeError, match="differentiate twice"):
            torch.autograd.functional.hessian(lambda q: attention(q).sum(), q)


def loss_of_heads(first: int, last: int, group=None) -> tuple[Tensor, Tensor]:
    """The loss over the heads of all ranks, of which this one has [first, last), and d_weights."""
    (q, kv, *_, index_q, index_k, weights), packing = inputs([5, 7], f64)
    q = torch.cat([q, q.flip(0)], 1)[:, first:last]
    selection = winnow.index_topk(index_q, index_k, weights, packing, topk=4)
    lse = winnow.sparse_attention(q, kv, selection.indices).lse
    loss = winnow.index_loss(selection, q, kv, lse, scale=SCALE, head_group=group)
    return loss.detach(), *torch.autograd.grad(loss, weights)


def loss_of_half_the_heads() -> tuple[Tensor, Tensor]:
    first = 3 * torch.distributed.get_rank()
    return loss_of_heads(first, first + 3, torch.distributed.group.WORLD)


def test_heads_that_are_split_over_ranks(two_ranks):
    loss, d_weights = loss_of_heads(0, 6)
    for actual, gradient in two_ranks(loss_of_half_the_heads):
        assert_near(actual, loss)
        assert_near(gradient, d_weights)
