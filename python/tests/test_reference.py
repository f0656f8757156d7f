# SPDX-License-Identifier: Apache-2.0
"""winnow.reference, the oracle of the tests, against explicit sums and finite differences."""

import math

import pytest
import torch
from cases import Random, assert_near, f64

from winnow import reference


def test_attention_is_the_sum_over_slots():
    random = Random(1)
    q, kv, sink = random.normal(8, 2, 8), random.normal(5, 8), random.normal(2)
    indices, lengths = random.lists(8, 6, 5), random.integers(0, 6, 8)
    options = {"v_dim": 4, "scale": 0.3, "sink": sink, "lengths": lengths}
    out, lse, max_logits = reference.sparse_attention(q, kv, indices, **options)
    target = reference.index_target(q, kv, indices, lse, scale=0.3, sink=sink, lengths=lengths)
    expected_target = torch.zeros_like(target)
    for t in range(8):
        slots = [j for j in range(lengths[t]) if 0 <= indices[t, j] < 5]
        for h in range(2):
            s = {j: 0.3 * (q[t, h] @ kv[indices[t, j]]).item() for j in slots}
            total = sum(math.exp(x) for x in s.values())
            weights = {j: math.exp(x) / (total + math.exp(sink[h])) for j, x in s.items()}
            expected = sum(
                (w * kv[indices[t, j], :4] for j, w in weights.items()),
                torch.zeros(4, dtype=f64),
            )
            assert_near(out[t, h], expected)
            assert lse[t, h].item() == pytest.approx(math.log(total) if slots else -math.inf)
            largest = max(s.values(), default=-math.inf)
            assert max_logits[t, h].item() == pytest.approx(largest, rel=1e-12)
            for j, w in weights.items():
                expected_target[t, j] += w
    assert_near(target, expected_target)


def test_gradients_are_those_of_finite_differences():
    random = Random(2)
    q, kv, sink = random.normal(4, 2, 8), random.normal(5, 8), random.normal(2)
    index_q, index_k, weights = random.normal(4, 2, 8), random.normal(5, 8), random.normal(4, 2)
    indices = torch.tensor([[0, 1, 1], [-1, -1, -1], [4, 9, 2], [3, -1, 3]])
    begin, end = torch.tensor([0, 1, 2, 0]).int(), torch.tensor([1, 4, 2, 5]).int()

    def attention(q, kv, sink):
        out, lse, _ = reference.sparse_attention(q, kv, indices, v_dim=4, scale=0.3, sink=sink)
        return out, lse[[0, 2, 3]]

    def dense_loss(index_q, index_k, weights):
        tensors = (q.detach(), kv.detach(), index_q, index_k, weights, begin, end)
        return reference.dense_index_loss(*tensors, scale=0.3, sink=sink.detach())[0]

    for function, inputs in ((attention, (q, kv, sink)), (dense_loss, (index_q, index_k, weights))):
        assert torch.autograd.gradcheck(function, [x.requires_grad_() for x in inputs])


def test_top_k_is_a_sort_by_score_and_key():
    random = Random(3)
    scores = random.integers(-3, 3, 20, 9).double()
    scores[scores == -3] = -math.inf
    scores[scores == -2] = math.nan
    for topk in (1, 4, 12):
        indices, lengths, chosen = reference.index_topk(scores, topk, order="by_score")
        ascending, _, _ = reference.index_topk(scores, topk)
        for t, row in enumerate(scores.tolist()):
            keys = [s for s in range(9) if row[s] > -math.inf]
            best = sorted(keys, key=lambda s: (-row[s], s))[:topk]
            fill = [-1] * (topk - len(best))
            assert indices[t].tolist() == best + fill
            assert ascending[t].tolist() == sorted(best) + fill
            assert lengths[t] == len(best)
            assert chosen[t].tolist() == [row[s] for s in best] + [-math.inf] * len(fill)


def test_index_scores_by_hand():
    q = torch.tensor([[[1.0, 0], [0, -1]]]).expand(3, 2, 2)
    k = torch.tensor([[2.0, 3], [-1, -4], [5, -6]])
    weights = torch.tensor([[10.0, 1]]).expand(3, 2)
    begin, end = torch.tensor([0, 1, 1]), torch.tensor([3, 3, 1])
    expected = [[20, 4, 56], [-math.inf, 4, 56], [-math.inf] * 3]
    assert reference.index_scores(q, k, weights, begin, end).tolist() == expected


def test_loss_by_hand():
    scores, target = torch.tensor([[0.0, 0, 5, 1]]), torch.tensor([[1.0, 3, 4, 9]])
    indices = torch.tensor([[7, 8, -1, 9]])
    loss = reference.index_loss(scores, target, indices, torch.tensor([3]))
    assert loss.item() == pytest.approx(0.25 * math.log(0.5) + 0.75 * math.log(1.5))


def test_quantize_fp8_by_hand():
    x = torch.tensor([[0.0, 0], [-448, 17], [450, 1], [math.inf, math.nan]])
    values, scale = reference.quantize_fp8(x, power_of_two=True)
    assert scale.tolist() == [2**-22, 1, 2, 2**-22]
    # e4m3 has 3 mantissa bits: 17 rounds to 16, 450 / 2 to 224.
    assert values[:3].float().tolist() == [[0, 0], [-448, 16], [224, 0.5]]
    assert values[3, 0].float() == 448 and values[3, 1].float().isnan()


def test_everything_works_without_keys():
    q, kv = torch.zeros(2, 1, 8), torch.zeros(0, 8)
    indices, windows = torch.tensor([[0, -1], [3, 1]]), torch.zeros(2).int()
    out, lse, max_logits = reference.sparse_attention(q, kv, indices, v_dim=8)
    assert not out.any() and (lse == -math.inf).all() and (max_logits == -math.inf).all()
    scores = reference.index_scores(q, kv, torch.ones(2, 1), windows, windows)
    assert (reference.index_topk(scores, 3)[0] == -1).all()
    assert (reference.index_replay(scores, indices) == -math.inf).all()
