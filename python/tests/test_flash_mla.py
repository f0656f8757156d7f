# SPDX-License-Identifier: Apache-2.0
"""winnow.flash_mla against the definitions of FlashMLA."""

import importlib.util
import inspect
import math
import sys
from types import ModuleType

import pytest
import torch
from cases import Random, assert_equal, assert_near, assert_within, bf16, f32, f64, heads, seeds
from hypothesis import given
from hypothesis import strategies as st

from winnow import flash_mla
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
    names = "q kv indices sm_scale d_v attn_sink topk_length indexer_topk out unknown"
    assert " ".join(found) == names
    assert [p.default for p in found.values()][4:9] == [512, None, None, 0, None]


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


@pytest.fixture
def call():
    return {
        "q": torch.ones(4, 2, 16),
        "kv": torch.arange(96.0).view(6, 1, 16) / 96,
        "indices": torch.tensor([0, 3, -1]).int().expand(4, 1, 3),
        "sm_scale": 0.5,
        "d_v": 8,
    }


@pytest.mark.parametrize("name", ["kv", "indices"])
def test_more_heads_of_keys_are_refused(name, call):
    with pytest.raises(ValueError, match=rf"flash_mla_sparse_fwd: {name} \[\d, 2, \d+\]: must be"):
        flash_mla_sparse_fwd(**call | {name: call[name].expand(-1, 2, -1)})


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"indexer_topk": 512}, NotImplementedError, "indexer_topk 512: must be 0"),
        ({"is_causal": True, "seqlens": 3}, TypeError, "is_causal, seqlens: not among the argume"),
        ({"sm_scale": None}, TypeError, "sm_scale None: must be a number"),
        ({"sm_scale": "1"}, TypeError, "sm_scale '1': must be a number"),
        ({"sm_scale": 0.0}, ValueError, "sm_scale 0.0: must not be 0"),
        ({"q": [1.0]}, TypeError, "q is a list: must be a tensor"),
        ({"q": torch.zeros(16)}, ValueError, r"q \[16\]: must be \[s_q, h_q, d_qk\]"),
        ({"kv": None}, TypeError, "kv is a NoneType: must be a tensor"),
        ({"indices": [0]}, TypeError, "indices is a list: must be a tensor"),
        ({"topk_length": 3}, TypeError, "topk_length is a int: must be a tensor"),
        ({"out": [1]}, TypeError, "out is a list: must be a tensor"),
        ({"attn_sink": [1.0]}, TypeError, "attn_sink is a list: must be a tensor"),
        ({"attn_sink": torch.ones(3)}, ValueError, r"attn_sink f32\[3\]: h_q must be 2, as in q$"),
        ({"attn_sink": torch.ones(2).int()}, ValueError, r"attn_sink i32\[2\]: dtype must be f32$"),
        ({"topk_length": torch.ones(3).int()}, ValueError, r"topk_length i32\[3\]: s_q must be 4"),
        ({"sm_scale": math.inf}, ValueError, "sm_scale inf: must be finite$"),
        ({"kv": torch.ones(6, 1, 8)}, ValueError, r"kv f32\[6, 8\]: d_qk must be 16, as in q$"),
        ({"d_v": "8"}, TypeError, "d_v '8': must be an integer"),
        ({"d_v": 512}, ValueError, "d_v 512: must be at most 16, the channels of q"),
        (
            {"indices": torch.zeros(4, 1, 3).long()},
            ValueError,
            "indices has dtype torch.int64: must be int32",
        ),
        (
            {"topk_length": torch.ones(4)},
            ValueError,
            "topk_length has dtype torch.float32: must be int32",
        ),
        (
            {"out": torch.zeros(4, 2, 16)},
            ValueError,
            r"out \[4, 2, 16\] of torch.float32 on cpu: must be \[4, 2, 8\] of torch.float32",
        ),
    ],
)
def test_refusals(changes, error, message, call):
    with pytest.raises(error, match=f"^flash_mla_sparse_fwd: {message}"):
        flash_mla_sparse_fwd(**call | changes)


def test_the_output_can_be_given(call):
    """As vLLM does, with a part of a larger tensor."""
    expected = flash_mla_sparse_fwd(**call, indexer_topk=0)
    whole = torch.full((6, 2, 8), 7.0)
    actual = flash_mla_sparse_fwd(**call, out=whole[1:5])
    assert actual[0].data_ptr() == whole[1:5].data_ptr()
    assert_equal(whole[1:5], expected[0])
    assert (whole[0] == 7).all() and (whole[5] == 7).all()
    for a, b in zip(actual[1:], expected[1:], strict=True):
        assert_equal(a, b)


class TestInstall:
    @pytest.fixture(autouse=True)
    def uninstalled(self):
        flash_mla.uninstall()
        yield
        flash_mla.uninstall()

    def test_other_libraries_find_it_as_flash_mla(self):
        assert flash_mla.install() and flash_mla.install()
        from flash_mla import flash_mla_sparse_fwd as found
        from flash_mla.flash_mla_interface import flash_mla_sparse_fwd as also_found

        assert found is also_found is flash_mla_sparse_fwd
        assert importlib.util.find_spec("flash_mla") is not None
        with pytest.raises(ImportError):  # so that libraries see that there is no decoding
            from flash_mla import flash_mla_with_kvcache  # noqa: F401
        flash_mla.uninstall()
        assert importlib.util.find_spec("flash_mla") is None
        assert "flash_mla.flash_mla_interface" not in sys.modules

    def test_a_package_that_is_there_is_left_alone(self, monkeypatch):
        real = ModuleType("flash_mla")
        monkeypatch.setitem(sys.modules, "flash_mla", real)
        assert not flash_mla.install()
        flash_mla.uninstall()
        assert sys.modules["flash_mla"] is real

    def test_a_package_that_is_not_imported_yet_is_left_alone(self, monkeypatch, tmp_path):
        (tmp_path / "flash_mla").mkdir()
        (tmp_path / "flash_mla" / "__init__.py").touch()
        monkeypatch.syspath_prepend(tmp_path)
        assert not flash_mla.install()
        assert "flash_mla" not in sys.modules
