# SPDX-License-Identifier: Apache-2.0
"""winnow.automodel.install on a package with the names of Automodel, which a test writes.

test_automodel_layers.py runs the same on the real package.
"""

import importlib
import sys

import pytest
import torch

from winnow import automodel

FILES = {
    "glm_moe_dsa/optimized_kernels.py": """
def should_use_tilelang(): return "own"
def tilelang_indexer_topk(): return "own"
def another(): return "own"
""",
    "glm_moe_dsa/layers.py": """
from nemo_automodel.components.models.glm_moe_dsa.optimized_kernels import (
    another, tilelang_indexer_topk as renamed
)
""",
    "glm_moe_dsa/late.py": """
from nemo_automodel.components.models.glm_moe_dsa.optimized_kernels import tilelang_indexer_topk
""",
    "deepseek_v4/kernels/sparse_attention.py": """
def sparse_attn_tilelang(): return "own"
""",
    "deepseek_v4/optimized_kernels.py": """
import importlib
HAS_TILELANG = False
_attention = importlib.import_module(
    "nemo_automodel.components.models.deepseek_v4.kernels.sparse_attention"
).sparse_attn_tilelang
calls = []
def _should_use_tilelang(backend, **options):
    calls.append((backend, options))
    return "own"
""",
}
MODELS = "nemo_automodel.components.models."


def forget() -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "nemo_automodel"]:
        del sys.modules[name]


@pytest.fixture
def package(tmp_path, monkeypatch):
    for name, text in FILES.items():
        file = tmp_path / "nemo_automodel" / "components" / "models" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    forget()
    yield
    automodel.uninstall()
    forget()


def module(name: str):
    return importlib.import_module(MODELS + name)


def test_modules_imported_before_and_after(package):
    layers, kernels = module("glm_moe_dsa.layers"), module("glm_moe_dsa.optimized_kernels")
    own, own_attention = layers.renamed, module("deepseek_v4.optimized_kernels")._attention
    served = automodel.install()
    assert served == [
        MODELS + name
        for name in (
            "glm_moe_dsa.optimized_kernels",
            "deepseek_v4.kernels.sparse_attention",
            "deepseek_v4.optimized_kernels",
        )
    ]
    late, v4 = module("glm_moe_dsa.late"), module("deepseek_v4.optimized_kernels")
    for found in (kernels.tilelang_indexer_topk, layers.renamed, late.tilelang_indexer_topk):
        assert found is automodel.tilelang_indexer_topk
    assert v4._attention is automodel.sparse_attn_tilelang
    assert kernels.another() == layers.another() == "own"
    assert not hasattr(kernels, "cudnn_indexer_topk")  # a version without it stays without it
    assert automodel.install() == served
    automodel.uninstall()
    for found in (kernels.tilelang_indexer_topk, layers.renamed, late.tilelang_indexer_topk):
        assert found is own
    assert v4._attention is own_attention
    automodel.uninstall()  # has nothing to do


def test_the_gate_of_deepseek_v4(package):
    v4 = module("deepseek_v4.optimized_kernels")
    automodel.install()
    cpu, meta = torch.zeros(1), torch.zeros(1, device="meta")
    options = {"available": True, "require_bf16": True}

    def decide(backend, kernel_name, x):
        return v4._should_use_tilelang(backend, kernel_name=kernel_name, tensors=(x,), **options)

    assert decide("tilelang", "sparse attention", cpu) is True
    assert decide("auto", "sparse attention", meta) is False
    with pytest.raises(RuntimeError, match="sparse attention: backend 'tilelang' cannot run"):
        decide("tilelang", "sparse attention", meta)
    for word in ("torch", "sparse_torch"):
        assert decide(word, "sparse attention", cpu) is False
    assert not v4.calls
    # Other kernels are Automodel's: its gate decides, and without TileLang its torch path runs.
    assert decide("tilelang", "indexer", cpu) == "own"
    word, given = v4.calls[0]
    assert word == "auto" and given["available"] is False and given["require_bf16"] is True


def test_without_automodel_it_says_so(monkeypatch):
    forget()
    monkeypatch.setitem(sys.modules, "nemo_automodel", None)
    message = "winnow.automodel.install: Automodel cannot be imported: .*nemo_automodel"
    with pytest.raises(ImportError, match=message):
        automodel.install()
