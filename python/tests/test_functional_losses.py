# SPDX-License-Identifier: Apache-2.0
"""The differentiable losses that train an indexer, against plain torch."""

import math

import pytest
import torch
from cases import (
    SCALE,
    Random,
    assert_equal,
    assert_near,
    backward,
    f32,
    f64,
    indexers,
    leaves,
    make_sink,
    offsets,
    topks,
)
from hypothesis import given
from hypothesis import strategies as st

import winnow
from winnow import _lib, reference

sink_kinds = st.sampled_from([None, "normal", -math.inf, math.inf, 1e4])


def oracle_index_loss(scores, target, indices, lengths):
    """The loss per row and whether the row counts, implemented independently of the package."""
    loss = reference.index_loss(scores, target, indices, lengths)
    counts = []
    for t in range(len(indices)):
        slots = range(indices.shape[1] if lengths is None else int(lengths[t]))
        valid = [j for j in slots if indices[t, j] >= 0 and scores[t, j] != -math.inf]
        counts.append(len(valid) >= 2 and sum(target[t, j].item() for j in valid) > 0)
    return loss, sum(counts)


class TestIndexLoss:
    @given(indexers(), topks, sink_kinds, st.integers(0, 3), st.sampled_from(["replay", "topk"]))
    def test_value_and_gradients(self, drawn, topk, sink_kind, key_offset, kind):
        random, packing, tensors = drawn
        tokens, keys = len(tensors[0]), len(tensors[1])
        q, kv = random.normal(tokens, 2, 8), random.normal(key_offset + keys, 8)
        sink = make_sink(random, sink_kind, 2)
        inputs, oracle = leaves(*tensors), leaves(*tensors)
        chosen = {"topk": topk}
        if kind == "replay":
            chosen = {
                "indices": random.lists(tokens, topk, keys),
                "lengths": random.integers(0, topk, tokens),
            }
        selection = winnow.index_topk(*inputs, packing, **chosen)
        indices, _, lengths, _ = selection
        lists = torch.where(indices < 0, -1, indices + key_offset).int()
        attention = {"v_dim": 8, "scale": SCALE, "sink": sink, "lengths": lengths}
        _, lse, _ = reference.sparse_attention(q, kv, lists, **attention)

        options = {"scale": SCALE, "sink": sink, "key_offset": key_offset}
        target = reference.index_target(q, kv, indices, lse, lengths=lengths, **options)
        dense = reference.index_scores(*oracle, *packing.windows())
        scores = reference.index_replay(dense, indices, lengths)
        rows, counts = oracle_index_loss(scores, target, indices, lengths)
        expected = {"none": rows, "sum": rows.sum(), "mean": rows.sum() / max(counts, 1)}
        for reduction, exact in expected.items():
            options["reduction"] = reduction
            loss = winnow.index_loss(selection, q, kv, lse, **options)
            assert_near(loss, exact)
            counted = winnow.index_loss(selection, q, kv, lse, **options, with_count=True)
            assert_equal(counted.loss, loss)
            assert int(counted.rows) == counts
        gradients = backward([loss], [torch.ones_like(loss)], inputs)
        exact = backward([expected["mean"]], [torch.ones(())], oracle)
        for a, b in zip(gradients, exact, strict=True):
            assert_near(a, b)

    def test_second_derivatives_of_scores_are_refused(self):
        random = Random(12)
        inputs = random.normal(6, 2, 8), random.normal(6, 8), random.normal(6, 2)
        q, kv = random.normal(6, 2, 16), random.normal(6, 16)
        selection = winnow.index_topk(*inputs, winnow.Packing(offsets([6])), topk=4)
        lse = winnow.sparse_attention(q, kv, selection.indices).lse

        def loss(scores):
            return winnow.index_loss(selection._replace(scores=scores), q, kv, lse, scale=0.25)

        with pytest.raises(RuntimeError, match="once_differentiable"):
            torch.autograd.functional.hessian(loss, selection.scores)

    def test_attention_gets_no_gradient(self):
        random = Random(11)
        inputs = leaves(random.normal(6, 2, 8), random.normal(6, 8), random.normal(6, 2))
        q, kv = leaves(random.normal(6, 2, 16), random.normal(6, 16))
        selection = winnow.index_topk(*inputs, winnow.Packing(offsets([6])), topk=4)
        out, lse, _ = winnow.sparse_attention(q, kv, selection.indices)
        winnow.index_loss(selection, q, kv, lse, scale=0.25).backward()
        assert q.grad is None and kv.grad is None
        assert all(x.grad.any() for x in inputs)


class TestIndexTarget:
    def layer(self, random: Random, selection) -> tuple:
        q, kv = random.normal(6, 2, 16), random.normal(6, 16)
        return q, kv, winnow.sparse_attention(q, kv, selection.indices).lse

    def selection(self, random: Random):
        inputs = leaves(random.normal(6, 2, 8), random.normal(6, 8), random.normal(6, 2))
        return winnow.index_topk(*inputs, winnow.Packing(offsets([2, 4])), topk=3)

    def test_value(self):
        random = Random(14)
        selection = self.selection(random)
        q, kv, lse = self.layer(random, selection)
        sink = random.normal(2)
        target = winnow.index_target(selection, q, kv, lse, scale=0.25, sink=sink)
        expected = reference.index_target(
            q, kv, selection.indices, lse, scale=0.25, sink=sink, lengths=selection.lengths
        )
        assert_near(target, expected)
        before = random.normal(6, 3)
        kept = before.clone()
        added = winnow.index_target(selection, q, kv, lse, scale=0.25, sink=sink, target=before)
        assert_near(added, expected + before)
        assert_equal(before, kept)
        assert not added.requires_grad

    def test_layers_that_share_a_selection_have_one_loss(self):
        """It is the loss of one layer with the heads of both."""
        random = Random(15)
        selection = self.selection(random)
        layers = [self.layer(random, selection) for _ in range(2)]
        target = winnow.index_target(selection, *layers[0], scale=0.25)
        options = {"scale": 0.25, "reduction": "sum"}
        loss = winnow.index_loss(selection, *layers[1], target=target, **options)
        # The heads of each layer have channels of their own.
        q = torch.zeros(6, 4, 32, dtype=f64)
        for i, (layer_q, _, _) in enumerate(layers):
            q[:, 2 * i : 2 * i + 2, 16 * i : 16 * i + 16] = layer_q
        _, kv, lse = (torch.cat(x, -1) for x in zip(*layers, strict=True))
        expected = winnow.index_loss(selection, q, kv, lse, **options)
        assert_near(loss, expected)
        assert_near(*(torch.autograd.grad(x, selection.scores)[0] for x in (loss, expected)))


class TestFrozenModel:
    """Training the indexer alone computes and allocates nothing for the gradients of attention."""

    @pytest.fixture
    def calls(self, monkeypatch) -> list[tuple[str, dict]]:
        seen, run = [], _lib.run_allocating

        def spy(op, fields, *others):
            seen.append((op, fields))
            run(op, fields, *others)

        monkeypatch.setattr(_lib, "run_allocating", spy)
        return seen

    def check(self, calls, loss, names, given):
        inputs = {id(x) for x in given}
        loss.backward()
        assert [op for op, _ in calls] == names
        for _, fields in calls:
            for name, x in fields.items():
                if isinstance(x, torch.Tensor) and id(x) not in inputs:
                    assert x.shape[-1] != 40, name  # the width of queries and keys of attention

    def test_warm_up(self, calls):
        random = Random(16)
        indexer = leaves(random.normal(6, 2, 8), random.normal(6, 8), random.normal(6, 2))
        q, kv = random.normal(6, 3, 40), random.normal(6, 40)
        packing = winnow.Packing(offsets([6]))
        calls.clear()
        loss = winnow.dense_index_loss(q, kv, *indexer, packing, scale=SCALE)
        names = ["dense_index_loss_forward", "dense_index_loss_backward"]
        self.check(calls, loss, names, (q, kv))
        assert all(x.grad.any() for x in indexer)

    def test_sparse(self, calls):
        random = Random(17)
        indexer = leaves(random.normal(6, 2, 8), random.normal(6, 8), random.normal(6, 2))
        q, kv = random.normal(6, 3, 40), random.normal(6, 40)
        packing = winnow.Packing(offsets([6]))
        calls.clear()
        selection = winnow.index_topk(*indexer, packing, topk=4)
        out, lse, _ = winnow.sparse_attention(q, kv, selection.indices, v_dim=16, scale=SCALE)
        assert not out.requires_grad
        loss = winnow.index_loss(selection, q, kv, lse, scale=SCALE)
        names = ["index_topk_forward", "sparse_attention_forward", "index_target", "index_loss"]
        self.check(calls, loss, [*names, "index_topk_backward"], (q, kv))
        assert all(x.grad.any() for x in indexer)


class TestDenseIndexLoss:
    @given(indexers(), sink_kinds, st.integers(1, 2), st.integers(0, 3))
    def test_value_and_gradients(self, drawn, sink_kind, ratio, key_offset):
        random, packing, tensors = drawn
        tokens, keys = len(tensors[0]), len(tensors[1])
        q, kv = random.normal(tokens, 2, 8), random.normal(key_offset + keys, 8)
        sink = make_sink(random, sink_kind, 2)
        begin, end = packing.windows(ratio)
        inputs, oracle = leaves(*tensors), leaves(*tensors)
        options = {"scale": SCALE, "sink": sink, "key_offset": key_offset}
        rows, _ = reference.dense_index_loss(q, kv, *oracle, begin, end, **options)
        counts = sum(e - b >= 2 for b, e in zip(begin.tolist(), end.tolist(), strict=True))
        if sink_kind in (math.inf, 1e4):  # all probabilities are 0
            counts = 0
        expected = {"none": rows, "sum": rows.sum(), "mean": rows.sum() / max(counts, 1)}
        for reduction, exact in expected.items():
            loss = winnow.dense_index_loss(
                q, kv, *inputs, packing, ratio=ratio, reduction=reduction, **options
            )
            assert_near(loss, exact)
        gradients = backward([loss], [torch.ones_like(loss)], inputs)
        exact = backward([expected["mean"]], [torch.ones(())], oracle)
        for a, b in zip(gradients, exact, strict=True):
            assert_near(a, b)

    @pytest.mark.parametrize("sink_kind", [None, "normal"])
    def test_a_given_lse_is_used(self, sink_kind):
        random = Random(13)
        q, kv = random.normal(6, 2, 16), random.normal(6, 16)
        sink = make_sink(random, sink_kind, 2)
        tensors = random.normal(6, 2, 8), random.normal(6, 8), random.normal(6, 2)
        packing = winnow.Packing(offsets([2, 4]))
        every_key = torch.arange(6).expand(6, -1)
        begin, end = (x[:, None] for x in packing.windows())
        lists = torch.where((every_key >= begin) & (every_key < end), every_key, -1).int()
        (q,) = leaves(q)  # so that lse is part of a graph
        lse = winnow.sparse_attention(q, kv, lists, scale=SCALE).lse
        options = {"scale": SCALE, "sink": sink}
        losses = []
        for more in ({"lse": lse}, {}, {"lse": lse + 1}):
            inputs = leaves(*tensors)
            loss = winnow.dense_index_loss(q, kv, *inputs, packing, **options, **more)
            losses.append((loss, *backward([loss], [None], inputs)))
        for a, b in zip(*losses[:2], strict=True):
            assert_near(a, b)
        # Without a sink a common factor of all probabilities cancels.
        assert torch.allclose(losses[2][0], losses[0][0]) == (sink is None)

    def test_gradcheck(self):
        random = Random(12)
        q, kv = random.normal(6, 2, 16), random.normal(6, 16)
        inputs = leaves(random.normal(6, 2, 8), random.normal(6, 8), random.normal(6, 2))
        packing = winnow.Packing(offsets([2, 4]))

        def loss(*tensors):
            return winnow.dense_index_loss(q, kv, *tensors, packing, scale=SCALE, reduction="none")

        assert torch.autograd.gradcheck(loss, inputs)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_backends_agree_on_a_sink_that_is_not_finite(value):
    random, packing = Random(11), winnow.Packing(offsets([5, 4]))
    q, kv = random.normal(9, 3, 16, dtype=f32), random.normal(9, 16, dtype=f32)
    index_q, index_k = random.normal(9, 2, 8, dtype=f32), random.normal(9, 8, dtype=f32)
    weights, sink = random.normal(9, 2, dtype=f32), random.normal(3, dtype=f32)
    sink[1] = value

    def results(backend: str) -> dict[str, torch.Tensor]:
        inputs, indexer = leaves(q, kv, sink), leaves(index_q, index_k, weights)
        options = {"scale": SCALE, "sink": inputs[2], "backend": backend}
        selection = winnow.index_topk(*indexer, packing, topk=4, backend=backend)
        out, lse, _ = winnow.sparse_attention(*inputs[:2], selection, **options)
        of_rows = options | {"reduction": "none"}
        sparse = winnow.index_loss(selection, q, kv, lse, **of_rows)
        dense = winnow.dense_index_loss(q, kv, *indexer, packing, **of_rows)
        named = {"out": out, "lse": lse, "sparse": sparse, "dense": dense}
        named["target"] = winnow.index_target(selection, q, kv, lse, **options)
        named |= zip(("d_q", "d_kv", "d_sink"), torch.autograd.grad(out.sum(), inputs), strict=True)
        for name, loss in {"sparse": sparse, "dense": dense}.items():
            gradients = torch.autograd.grad(loss.sum(), indexer)
            named |= {f"{name} {i}": gradient for i, gradient in enumerate(gradients)}
        return named

    expected = results("reference")
    for name in ("out", "d_q", "d_sink", "target", "sparse", "dense"):
        assert expected[name].isnan().any() == math.isnan(value), name
    for name, actual in results("cpu").items():
        torch.testing.assert_close(actual, expected[name], rtol=1e-4, atol=1e-5, equal_nan=True)
