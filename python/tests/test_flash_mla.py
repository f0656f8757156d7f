# SPDX-License-Identifier: Apache-2.0
"""winnow.flash_mla against the definitions of FlashMLA."""

import inspect
import math

import pytest
import torch
from cases import Random, assert_near, assert_within, bf16, f32, f64, heads, seeds
from hypothesis import given
from hypothesis import strategies as st

from winnow.flash_mla import flash_mla_sparse_fwd


def definition(q, kv, indices, sm_scale, d_v, attn_sink=None, topk_length=None):
    """Attention row by row and head by head in double."""
    rows, n, _ = q.shape
    keys = len(kv)
    q, kv = q.to(f64), kv[:, 0].to(f64)
    out = torch.zeros(rows, n, d_v, dtype=f64)
    max_logits = torch.full((rows, n), -math.inf, dtype=f64)
    lse = torch.full((rows, n), math.inf, dtype=f64)
    for t in range(rows):
        count = indices.shape[2] if topk_length is None else int(topk_length[t])
        chosen = [i for i in indices[t, 0, :count].tolist() if 0 <= i < keys]
        for h in range(n if chosen else 0):
            logits = sm_scale * (kv[chosen] @ q[t, h])
            max_logits[t, h], lse[t, h] = logits.max(), logits.logsumexp(0)
            out[t, h] = (logits - lse[t, h]).exp() @ kv[chosen][:, :d_v]
            if attn_sink is not None:  # exp(lse) / (exp(lse) + exp(sink))
                out[t, h] *= torch.sigmoid(lse[t, h] - attn_sink[h].to(f64))
    return out, max_logits, lse


def test_signature():
    found = inspect.signature(flash_mla_sparse_fwd).parameters
    assert " ".join(found) == "q kv indices sm_scale d_v attn_sink topk_length"
    assert [p.default for p in found.values()][4:] == [512, None, None]


@given(
    seeds,
    st.integers(0, 5),
    st.integers(0, 7),
    heads,
    st.sampled_from([1, 3, 6]),
    st.sampled_from([None, 0.5, -math.inf, math.inf]),
    st.booleans(),
)
def test_against_the_definition(seed, rows, keys, n, topk, sink, with_length):
    random = Random(seed)
    q, kv = random.normal(rows, n, 24), random.normal(keys, 1, 24)
    indices = random.lists(rows, topk, keys)[:, None]
    call = {
        "attn_sink": None if sink is None else torch.full((n,), sink, dtype=f64),
        "topk_length": random.integers(0, topk, rows) if with_length else None,
    }
    actual = flash_mla_sparse_fwd(q, kv, indices, 0.25, 16, **call)
    for a, b in zip(actual, definition(q, kv, indices, 0.25, 16, **call), strict=True):
        assert_near(a, b)


def test_shapes_of_deepseek_v3():
    random = Random(1)
    q, kv = random.normal(5, 16, 576, dtype=bf16), random.normal(80, 1, 576, dtype=bf16)
    indices, sink = random.lists(5, 64, 80)[:, None], random.normal(16, dtype=f32)
    actual = flash_mla_sparse_fwd(q, kv, indices, 0.0625, attn_sink=sink)
    assert [x.dtype for x in actual] == [bf16, f32, f32]
    expected = definition(q, kv, indices, 0.0625, 512, sink)
    assert_within(actual[0], expected[0], 4e-3)
    for a, b in zip(actual[1:], expected[1:], strict=True):
        assert_near(a, b, 1e-4)


@pytest.mark.parametrize("name", ["kv", "indices"])
def test_more_heads_of_keys_are_refused(name):
    call = {"q": torch.zeros(4, 2, 16), "kv": torch.zeros(6, 1, 16), "sm_scale": 1.0, "d_v": 8}
    call["indices"] = torch.zeros(4, 1, 3).int()
    flash_mla_sparse_fwd(**call)
    with pytest.raises(ValueError, match=rf"flash_mla_sparse_fwd: {name} \[\d, 2, \d+\]: must be"):
        flash_mla_sparse_fwd(**call | {name: call[name].expand(-1, 2, -1)})
