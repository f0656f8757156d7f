# SPDX-License-Identifier: Apache-2.0
"""The wheel, built and installed into an environment that has winnow from nowhere else."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
NVCC = shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
# Without the variables by which the tests find the package and its library in the source tree.
ENVIRONMENT = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "WINNOW_LIBRARY")}

GIVEN_CUDA_WHEEL = os.environ.get("WINNOW_CUDA_WHEEL")  # of `make cuda-wheel`, else one is built

pytestmark = pytest.mark.slow

STEP = """
import pathlib, re, sys, torch, winnow
assert pathlib.Path(winnow.__file__).is_relative_to(sys.prefix), winnow.__file__
device = "cuda" if "cuda" in winnow.backends() else "cpu"
packing = winnow.Packing(torch.tensor([0, 3, 8], dtype=torch.int32, device=device))
q = torch.randn(8, 2, 64, device=device, requires_grad=True)
kv = torch.randn(8, 64, device=device, requires_grad=True)
weights = torch.ones(8, 2, device=device)
selection = winnow.index_topk(q, kv, weights, packing, topk=2)
attention = winnow.sparse_attention(q, kv, selection.indices, lengths=selection.lengths)
loss = winnow.index_loss(selection, q, kv, attention.lse, scale=1 / 8)
(attention.out.sum() + loss).backward()
assert q.grad.isfinite().all() and kv.grad.abs().sum() > 0
maps = pathlib.Path("/proc/self/maps").read_text()
own = set(re.findall(r"/\\S*(?:libwinnow|winnow\\.libs)\\S*", maps))
assert len(own) > 1 and all(pathlib.Path(x).is_relative_to(sys.prefix) for x in own), own
print("step on", device)
"""


def run(*command: object, **environment: str) -> str:
    done = subprocess.run(
        [str(word) for word in command],
        cwd=ROOT,
        env=ENVIRONMENT | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}"
    return done.stdout


def built_wheel(cuda: bool, folder: Path) -> Path:
    """With CUDA for one architecture, in a build folder of its own: all take half an hour."""
    options, environment = ["-C", "build-dir=build/wheel-test"], {}
    if cuda:
        options = ["-C", "build-dir=build/wheel-test-cuda"]
        environment = {"WINNOW_CUDA": "1", "CUDACXX": NVCC}
        environment["CMAKE_ARGS"] = "-DCMAKE_CUDA_ARCHITECTURES=90a-real"
    run("scripts/wheel.sh", folder, *options, **environment)
    (wheel,) = folder.glob("winnow-*.whl")
    return wheel


@pytest.mark.parametrize("cuda", [False, True], ids=["cpu", "cuda"])
def test_a_wheel_is_all_that_an_environment_needs(cuda: bool, tmp_path: Path) -> None:
    wheel = GIVEN_CUDA_WHEEL if cuda else None
    if wheel is None and not (ROOT / "pyproject.toml").exists():
        pytest.skip("not in the source tree: WINNOW_CUDA_WHEEL can name a wheel")
    if wheel is None and cuda and not (Path(NVCC).exists() and torch.cuda.is_available()):
        pytest.skip("no GPU with nvcc here: WINNOW_CUDA_WHEEL can name a wheel")
    wheel = Path(wheel).resolve() if wheel else built_wheel(cuda, tmp_path)
    assert ("+cu" in wheel.name) == cuda and "-py3-none-manylinux" in wheel.name

    run(sys.executable, "-m", "venv", tmp_path / "venv")
    python = tmp_path / "venv" / "bin" / "python"
    run(python, "-m", "pip", "install", "--no-deps", wheel)
    # Torch and what it needs, behind the environment's own packages.
    folder = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
    Path(folder, "torch.pth").write_text(f"{Path(torch.__file__).parents[1]}\n")
    device = "cuda" if cuda and torch.cuda.is_available() else "cpu"
    assert f"step on {device}" in run(python, "-c", STEP)
    assert ", 0 failed" in run(python, "-m", "winnow", "check", "key_windows")
