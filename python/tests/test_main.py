# SPDX-License-Identifier: Apache-2.0
"""python -m winnow, the code in the documentation, and the example."""

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import winnow
from winnow import _bench, _check, _lib, functional
from winnow.__main__ import main

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    "README.md",
    "docs/python.md",
    "docs/packing.md",
    "docs/your-layer.md",
    "docs/automodel.md",
    "docs/frameworks.md",
    "docs/training-the-indexer.md",
]


def test_info(capsys):
    assert main(["info"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"winnow {winnow.__version__}, torch {torch.__version__}"
    assert "libwinnow.so" in lines[1]
    for line, name in zip(lines[2:], ("reference", "cpu", "cuda"), strict=True):
        usable = f"yes: {winnow.backends()[name]}" if name in winnow.backends() else "no: "
        assert line.startswith(name) and usable in line


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_check(capsys, backend):
    assert main(["check", "--backend", backend]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in _check.CHECKS)
    assert re.search(r"^\d\d compared, 0 failed$", out, re.MULTILINE)


def test_check_fails_where_a_function_is_wrong(capsys, monkeypatch):
    right = functional.value_projection
    monkeypatch.setattr(functional, "value_projection", lambda *x, **o: right(*x, **o) * 1.01)
    assert main(["check", "value_projection", "key_windows"]) == 1
    out = capsys.readouterr().out
    assert len(re.findall(r"value_projection .* FAILED", out)) >= 4
    assert len(re.findall(r"key_windows .* ok", out)) == 4


def test_check_says_what_a_backend_cannot_do(capsys, monkeypatch):
    right = functional.index_topk

    def too_wide(*tensors, backend=None, **options):  # the cpu backend does not support fp64
        return right(*(x.double() for x in tensors[:3]), *tensors[3:], backend="cpu", **options)

    monkeypatch.setattr(functional, "index_topk", too_wide)
    assert main(["check", "index_topk"]) == 0
    out = capsys.readouterr().out
    kernels = ("avx512_bf16 takes bf16 and f8_e4m3", "simd does not take f64: it computes in fp32")
    refusal = "; ".join(f"the cpu backend's kernel {kernel}" for kernel in kernels)
    assert out.count(f"not here: index_topk_forward: {refusal}") == 2
    assert "0 compared, 0 failed" in out


def test_bench(capsys, monkeypatch):
    sizes = {"tokens": 16, "heads": 2, "index_heads": 2, "topk": 4}
    monkeypatch.setitem(_bench._SIZES, "cpu", sizes)
    monkeypatch.setattr(_bench, "_SECONDS", 0.01)
    assert main(["bench"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "cpu, bf16, 16 tokens, 2 heads, 2 index_heads, 4 topk"
    timed = [line for line in lines if re.search(r"[0-9.]+ ms forward +[0-9.]+ ms backward", line)]
    assert [line.split()[0] for line in timed] == list(_bench.NAMES[:-1])
    assert sum(line.startswith("host,") and "us a call" in line for line in lines) == 2


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["run"],
        ["check", "softmax"],
        ["bench", "--backend", "tpu"],
        ["check", "--device", "tpu"],
    ],
)
def test_bad_words_have_exit_code_2(capsys, words):
    with pytest.raises(SystemExit) as exit:
        main(words)
    assert exit.value.code == 2 and "usage: python -m winnow" in capsys.readouterr().err


@pytest.mark.skipif("cuda" in winnow.backends(), reason="the cuda backend is here")
def test_a_backend_that_is_not_here_is_named(capsys):
    assert main(["check", "--backend", "cuda"]) == 1
    reason = _lib.backend_why_not("cuda")
    assert "cuda" in reason and reason in capsys.readouterr().err


@pytest.mark.parametrize("page", PAGES)
def test_programs_in_the_documentation_run(page):
    programs = re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(), re.M | re.S)
    assert programs
    for program in programs:
        exec(compile(program, page, "exec"), {})


@pytest.mark.slow
def test_a_dense_decoder_becomes_sparse(tmp_path, capsys):
    """The example in short: the indexer learns where attention is, and the loss stays."""
    example = runpy.run_path(str(ROOT / "examples" / "dense_to_sparse.py"))
    steps = ["--steps", "160", "60", "20", "--device", "cpu", "--plot", str(tmp_path / "plot.png")]
    text, _, recall = example["main"](steps).values()
    assert text[0][1] > 2.5
    assert recall[0][1] < 0.4 and recall[-1][1] > 0.8
    printed = capsys.readouterr().out
    losses = re.findall(r"held-out text (\S+), with 32 keys of up to 256 (\S+)", printed)
    (_, random_keys), (frozen, warm), (dense, sparse) = [map(float, pair) for pair in losses]
    assert random_keys > 2 and frozen < 1.6 and sparse < 1.6
    assert warm < frozen + 0.05 and sparse < dense + 0.05
    assert "recall of mass, steps 160 to 239" in printed  # the plot in the terminal


def test_the_example_takes_any_number_of_steps(capsys):
    example = runpy.run_path(str(ROOT / "examples" / "train_tiny.py"))
    for steps in (1, 4):
        assert len(example["train"]("winnow", steps, "cpu")["letters"]) == steps
    assert "step    3" in capsys.readouterr().out


def test_the_example_learns_to_copy(capsys):
    """With 8 keys per row from step 30 on, selected by an indexer that is trained along."""
    example = runpy.run_path(str(ROOT / "examples" / "train_tiny.py"))
    losses = example["train"]("winnow", 120, "cpu")
    assert losses["letters"][0] > 2.5 and losses["letters"][-1] < 0.3
    assert losses["indexers"][-1] < 0.5 * max(losses["indexers"])
    dense = example["train"]("dense", 30, "cpu")["letters"]
    assert losses["letters"][:30] == pytest.approx(dense, rel=1e-3)  # all keys until then
    assert "keys 8" in capsys.readouterr().out


@pytest.mark.skipif(Path(sys.prefix) != ROOT / ".venv", reason="not the environment of `make test`")
def test_the_environment_imports_winnow(tmp_path):
    """As someone who runs an example does, without PYTHONPATH."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-c", "import winnow; print(winnow.__file__)"]
    told = subprocess.run(command, env=environment, cwd=tmp_path, text=True, capture_output=True)
    assert told.stdout.startswith(str(ROOT)), told.stderr
