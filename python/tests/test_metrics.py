# SPDX-License-Identifier: Apache-2.0
"""The metrics of a selection against dense attention in plain torch."""

import math

import pytest
import torch
from cases import Random, assert_equal, assert_near, bf16, f64, offsets

import winnow
from winnow import metrics, reference

TOKENS, HEADS, DIM, TOPK, SCALE = 20, 3, 16, 4, 0.25


class Layer:
    """Attention over packed documents, an indexer, and the dense probabilities."""

    def __init__(self, seed: int, ratio: int = 1, key_offset: int = 0, dtype=f64) -> None:
        random = Random(seed)
        self.packing = winnow.Packing(offsets([9, 0, 8]), tokens=TOKENS)
        self.begin, self.end = self.packing.windows(ratio)
        keys = TOKENS // ratio
        self.q = random.normal(TOKENS, HEADS, DIM, dtype=dtype)
        self.kv = random.normal(key_offset + keys, DIM, dtype=dtype)
        weights = random.normal(TOKENS, 2, dtype=f64 if dtype == f64 else torch.float32)
        indexer = (random.normal(TOKENS, 2, 8, dtype=dtype), random.normal(keys, 8, dtype=dtype))
        self.selection = winnow.index_topk(
            *indexer, weights, self.packing, topk=TOPK, ratio=ratio, with_scores=False
        )
        s = SCALE * torch.einsum("thd,sd->ths", self.q.double(), self.kv[key_offset:].double())
        at = torch.arange(keys)
        self.window = (self.begin[:, None] <= at) & (at < self.end[:, None])
        s = s.masked_fill(~self.window[:, None], -math.inf)
        self.lse = s.logsumexp(-1)
        self.p = torch.where(self.window[:, None], (s - self.lse[..., None]).exp(), 0).mean(1)

    def expected(self) -> tuple[list[float], list[float]]:
        """Recall and overlap of every row."""
        recalls, overlaps = [], []
        for t in range(TOKENS):
            seen = self.window[t].nonzero()[:, 0].tolist()
            chosen = [s for s in self.selection.indices[t].tolist() if s >= 0]
            best = sorted(seen, key=lambda s: -self.p[t, s].item())[:TOPK]
            recalls.append(self.p[t, chosen].sum().item() if seen else math.nan)
            overlaps.append(len(set(chosen) & set(best)) / len(best) if seen else math.nan)
        return recalls, overlaps


def close(actual: torch.Tensor, expected: list[float], limit: float = 1e-10) -> None:
    wanted = torch.tensor(expected, dtype=f64)
    assert_equal(actual.isnan(), wanted.isnan())
    assert_near(actual.double().nan_to_num(), wanted.nan_to_num(), limit)


def test_recall_of_mass():
    layer = Layer(1)
    recall = metrics.recall_of_mass(layer.selection, layer.q, layer.kv, layer.lse, scale=SCALE)
    close(recall, layer.expected()[0])
    assert recall[0] == pytest.approx(1)  # a row that sees one key


@pytest.mark.parametrize(("ratio", "key_offset"), [(1, 0), (1, 3), (2, 5)])
def test_on_rows(ratio, key_offset):
    layer = Layer(2, ratio, key_offset)
    recalls, overlaps = layer.expected()
    rows = torch.tensor([19, 3, 12, 3, 0, 16])
    options = {"scale": SCALE, "ratio": ratio, "key_offset": key_offset}
    found = metrics.on_rows(layer.selection, layer.q, layer.kv, layer.packing, rows, **options)
    close(found.recall, [recalls[t] for t in rows])
    close(found.overlap, [overlaps[t] for t in rows], 1e-6)


def test_rows_in_pieces_are_the_same(monkeypatch):
    layer = Layer(3)
    rows = torch.arange(TOKENS)
    inputs = (layer.selection, layer.q, layer.kv, layer.packing)
    whole = metrics.on_rows(*inputs, rows, scale=SCALE)
    monkeypatch.setattr(metrics, "_SLOTS", 30)
    for a, b in zip(metrics.on_rows(*inputs, rows, scale=SCALE), whole, strict=True):
        assert_equal(a, b)
    none = metrics.on_rows(*inputs, rows[:0], scale=SCALE)
    assert len(none.recall) == len(none.overlap) == 0


def test_of_the_working_type():
    layer = Layer(4, dtype=bf16)
    recalls, _ = layer.expected()
    found = metrics.on_rows(
        layer.selection, layer.q, layer.kv, layer.packing, torch.arange(TOKENS), scale=SCALE
    )
    close(found.recall, recalls, 1e-4)


class TestSelections:
    def measure(self, layer: Layer, indices, lengths=None) -> metrics.RowMetrics:
        selection = winnow.Selection(indices, None, lengths)
        rows = torch.arange(1, 9)
        return metrics.on_rows(selection, layer.q, layer.kv, layer.packing, rows, scale=SCALE)

    def test_of_the_best_keys_is_complete(self):
        layer = Layer(5)
        best = layer.p.masked_fill(~layer.window, -1).topk(TOPK)
        indices = torch.where(best.values < 0, -1, best.indices).int()
        assert self.measure(layer, indices).overlap.eq(1).all()

    def test_of_all_keys_has_all_mass(self):
        layer = Layer(6)
        indices = reference.index_topk(layer.window.to(f64).log(), TOKENS)[0]
        found = self.measure(layer, indices)
        assert_near(found.recall, torch.ones(8, dtype=f64))
        assert found.overlap.eq(1).all()

    def test_keys_twice_outside_or_past_lengths_do_not_count(self):
        layer = Layer(7)
        first = layer.begin[:, None].expand(-1, TOPK).contiguous()
        once = torch.where(torch.arange(TOPK) == 0, first, -1).int()
        outside = torch.where(torch.arange(TOPK) == 0, first, layer.end[:, None]).int()
        past = torch.cat([first[:, :1], first[:, 1:] + 1], 1)
        expected = self.measure(layer, once)
        for given in ((first,), (outside,), (past, torch.ones(TOKENS).int())):
            for a, b in zip(self.measure(layer, *given), expected, strict=True):
                assert_equal(a, b)

    def test_ties_count_as_best(self):
        layer = Layer(8)
        layer.q.zero_()  # all keys of a window are alike
        indices = torch.where(
            layer.window.sum(1, keepdim=True) > torch.arange(TOPK),
            layer.end[:, None] - 1 - torch.arange(TOPK),
            -1,
        ).int()
        assert self.measure(layer, indices).overlap.eq(1).all()


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"rows": [1, 2]}, "on_rows: rows"),
        ({"rows": torch.tensor([1.5])}, "on_rows: rows .* of torch.float32"),
        ({"rows": torch.tensor([3, 20])}, "on_rows: rows from 3 to 20: must be from 0 to 19"),
        ({"rows": torch.tensor([-1])}, "on_rows: rows from -1 to -1"),
        ({"key_offset": -1}, "on_rows: key_offset -1"),
        ({"packing": winnow.Packing(offsets([3]))}, "on_rows: packing of 3 rows: must have 20"),
        ({"head_group": "heads"}, "on_rows: head_group is a str: must be a torch.distributed.Proc"),
    ],
)
def test_refusals_name_the_argument(change, text):
    layer = Layer(9)
    given = {"selection": layer.selection, "q": layer.q, "kv": layer.kv, "scale": SCALE}
    given |= {"packing": layer.packing, "rows": torch.arange(3)}
    with pytest.raises((ValueError, TypeError), match=text):
        metrics.on_rows(**given | change)
