# SPDX-License-Identifier: Apache-2.0
"""winnow.rollout: selections as engines return them, under packing and on two ranks.

Functions whose names begin with an underscore run in the ranks.
"""

import random
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from cases import Packing, Random, assert_equal, f32, offsets, packings, seeds
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import winnow
from winnow.rollout import Replay

LAYERS, TOPK = 2, 4


def rollout(lengths: list[int], seed: int, whole: bool) -> list[Tensor]:
    """[rows, layers, topk] of every document: some positions that a row sees, in any order, with -1
    among them and garbage behind them. Some documents lack their last row, unless `whole`."""
    draw = random.Random(seed)
    documents = []
    for length in lengths:
        rows = length if whole or not length else length - draw.randint(0, 1)
        document = torch.tensor([draw.randint(-9, 99) for _ in range(rows * LAYERS * TOPK)])
        document = document.view(rows, LAYERS, TOPK).int()
        for position in range(rows):
            for layer in range(LAYERS):
                read = min(position + 1, TOPK)
                chosen = draw.sample(range(position + 1), draw.randint(0, read))
                chosen += [-1] * (read - len(chosen))
                draw.shuffle(chosen)
                document[position, layer, :read] = torch.tensor(chosen)
        documents.append(document)
    return documents


def keys_of(document: Tensor, position: int, layer: int) -> list[int]:
    """The positions that a row selected, ascending; none for a row that was not run."""
    if position >= len(document):
        return []
    read = document[position, layer, : position + 1].tolist()
    return sorted(x for x in read if x >= 0)


@given(packings(), seeds, st.booleans(), st.sampled_from(["empty", "see_document"]))
def test_every_row_has_the_keys_that_it_selected(packing, seed, as_array, padding_rows):
    lengths = packing.cu_seqlens.diff().tolist()
    documents = rollout(lengths, seed, whole=as_array)
    begins = packing.cu_seqlens if packing.cu_seqlens_padded is None else packing.cu_seqlens_padded
    expected = {}
    for document, begin in zip(documents, begins.tolist(), strict=False):
        for position in range(len(document)):
            keys = [keys_of(document, position, layer) for layer in range(LAYERS)]
            expected[begin + position] = [[begin + key for key in of_layer] for of_layer in keys]
    rows = torch.tensor(random.Random(seed).sample(range(-1, packing.tokens), packing.tokens)).int()
    options: dict[str, Any] = packing.options | {"padding_rows": padding_rows}
    made = winnow.Packing(packing.cu_seqlens, query_rows=rows, **options)
    if as_array or not documents:
        documents = torch.cat([torch.empty(0, LAYERS, TOPK).int(), *documents])
    replay = Replay(documents, made)
    for layer in range(LAYERS):
        indices, lengths = replay.layer(layer)
        assert indices.shape == (len(rows), TOPK) and indices.dtype == lengths.dtype == torch.int32
        for row, own, length in zip(rows.tolist(), indices.tolist(), lengths.tolist(), strict=True):
            keys = expected.get(row, [[]] * LAYERS)[layer]
            assert own == keys + [-1] * (TOPK - len(keys))
            assert length == len(keys)


def test_the_default_device_changes_nothing():
    document, packing = rollout([5], 0, whole=True)[0], winnow.Packing(offsets([5]))
    expected = Replay(document, packing).layer(1)
    with torch.device("meta"):  # cuda, as a rule
        replayed = Replay(document, packing).layer(1)
    for a, b in zip(replayed, expected, strict=True):
        assert_equal(a, b)


def of_engine(indices: Tensor, begin: Tensor, end: Tensor, seed: int) -> Tensor:
    """[rows, 1, topk]: a selection of winnow as an engine returns it."""
    rows = []
    for own, first, last in zip(indices.tolist(), begin.tolist(), end.tolist(), strict=True):
        read = [key - first if key >= 0 else -1 for key in own[: last - first]]
        random.Random(seed).shuffle(read)
        rows.append(read + [7777] * (len(own) - len(read)))
    return torch.tensor(rows).int()[:, None]


@pytest.mark.parametrize("ratio", [1, 2])
def test_a_selection_comes_back(ratio):
    draw = Random(5)
    packing = winnow.Packing(offsets([9, 1, 14, 6]))
    keys = int((packing.cu_seqlens.diff() // ratio).sum())
    q, k, weights = (draw.normal(*x, dtype=f32) for x in ((30, 3, 16), (keys, 16), (30, 3)))
    selection = winnow.index_topk(q, k, weights, packing, topk=5, ratio=ratio)
    engine = of_engine(selection.indices, *packing.windows(ratio), seed=6)
    indices, lengths = Replay(engine, packing).layer(0, ratio=ratio)
    assert_equal(indices, selection.indices)
    assert_equal(lengths, selection.lengths)
    options = {"indices": indices, "lengths": lengths, "ratio": ratio}
    assert_equal(winnow.index_topk(q, k, weights, packing, **options).scores, selection.scores)


def batch() -> tuple[Packing, list[Tensor], Tensor, Tensor]:
    lengths, padded = [13, 2, 0, 21], [16, 4, 0, 21]
    packing = Packing(offsets(lengths), offsets(padded), 43)
    draw = Random(7)
    q, kv = draw.normal(43, 2, 16, dtype=f32), draw.normal(43, 16, dtype=f32)
    return packing, rollout(lengths, 8, whole=False), q, kv


def _attention(sharding: str) -> tuple[Tensor, Tensor]:
    packing, documents, q, kv = batch()
    options = packing.options | {"tokens": packing.tokens}
    made = winnow.Packing(packing.cu_seqlens, group=dist.group.WORLD, sharding=sharding, **options)
    indices, lengths = Replay(documents, made).layer(1)
    keys = winnow.gather_keys(made.shard(kv), made)
    out = winnow.sparse_attention(made.shard(q), keys, indices, lengths=lengths).out
    return made.rows, out


@pytest.mark.parametrize("sharding", ["zigzag", "contiguous"])
def test_two_ranks_attend_to_the_same_keys(two_ranks, sharding):
    packing, documents, q, kv = batch()
    made = winnow.Packing(packing.cu_seqlens, tokens=packing.tokens, **packing.options)
    indices, lengths = Replay(documents, made).layer(1)
    assert (lengths > 1).any()
    expected = winnow.sparse_attention(q, kv, indices, lengths=lengths).out
    rows, outs = zip(*two_ranks(_attention, sharding), strict=True)
    assert sorted(torch.cat(rows).tolist()) == list(range(packing.tokens))
    assert_equal(torch.cat(outs), expected[torch.cat(rows).long()])


def test_arrays_of_other_libraries():
    packing = winnow.Packing(offsets([3]))
    selections = np.array([[[0, 5]], [[1, 0]], [[2, -1]]])
    for given_selections in (selections, [selections], (selections[:2],)):
        indices, lengths = Replay(given_selections, packing).layer(0)
        assert indices.tolist()[:2] == [[0, -1], [0, 1]]
        assert lengths.tolist()[:2] == [1, 2]
    assert (indices[2].tolist(), lengths[2].item()) == ([-1, -1], 0)


ZEROS = torch.zeros(5, 2, 4).int()


@pytest.mark.parametrize(
    ("selections", "text"),
    [
        (ZEROS[0], r"selections \[2, 4\]: must be \[rows, layers, topk\]$"),
        (ZEROS[:, :0], r"selections \[5, 0, 4\]: must be \[rows, layers, topk\]$"),
        (ZEROS.float(), "selections has dtype float32: must be int32 or int64$"),
        (ZEROS[:4], r"selections \[4, 2, 4\]: must have 5 rows, those of all documents$"),
        ([ZEROS], "selections of 1 documents: must be of 2, as packing, and of one at least$"),
        (
            [ZEROS[:3], ZEROS[:3]],
            r"selections\[1\] \[3, 2, 4\]: must have 2 rows, as its document, or one less$",
        ),
        (
            [ZEROS[:3], ZEROS[:2, :1]],
            r"selections\[1\] \[2, 1, 4\] on cpu: must have 2 layers and 4 slots on cpu, as"
            r" selections\[0\]$",
        ),
    ],
)
def test_wrong_selections_are_refused(selections, text):
    with pytest.raises(ValueError, match="^Replay: " + text):
        Replay(selections, winnow.Packing(offsets([3, 2])))


def test_positions_of_the_batch_are_refused():
    selections = ZEROS.clone()
    selections[4, 1, 1] = 4  # the row itself, but counted from the beginning of the batch
    replay = Replay(selections, winnow.Packing(offsets([3, 2])))
    replay.layer(0)
    text = (
        "Replay: selections of document 1 have 4 in row 1 of layer 1: must be a position in the"
        " document, less than 2, or -1$"
    )
    with pytest.raises(ValueError, match=text):
        replay.layer(1)


def test_wrong_arguments_are_refused():
    packing = winnow.Packing(offsets([3, 2]))
    with pytest.raises(TypeError, match="Replay: packing is a int: must be a Packing$"):
        Replay(ZEROS, 5)
    for layer, allowed in {-1: "at least 0", 2: "at most 1"}.items():
        with pytest.raises(ValueError, match=f"Replay: layer {layer}: must be {allowed}$"):
            Replay(ZEROS, packing).layer(layer)
    for no_layer in ("0", None, True):
        with pytest.raises(TypeError, match=f"Replay: layer {no_layer!r}: must be an integer$"):
            Replay(ZEROS, packing).layer(no_layer)
    with pytest.raises(ValueError, match="Replay: ratio 0: must be at least 1$"):
        Replay(ZEROS, packing).layer(0, ratio=0)
