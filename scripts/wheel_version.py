# SPDX-License-Identifier: Apache-2.0
"""The version of a wheel, for pyproject.toml: that of the package, and with the CUDA backend in it
the toolkit's behind a plus, as in 0.1.0+cu130."""

import os
import re
import subprocess
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


def _cuda_version() -> str:
    """The local part of the version, of the compiler that CMake would take."""
    compilers = (os.environ.get("CUDACXX"), "nvcc", "/usr/local/cuda/bin/nvcc")
    for compiler in filter(None, compilers):
        try:
            text = subprocess.run([compiler, "--version"], capture_output=True, text=True).stdout
        except FileNotFoundError:
            continue
        if release := re.search(r"release (\d+)\.(\d+)", text):
            return f"+cu{release[1]}{release[2]}"
    raise SystemExit("WINNOW_CUDA is set, but there is no nvcc: CUDACXX can name it")


def dynamic_metadata(settings: Any, project: Any) -> dict[str, str]:
    text = (ROOT / "python" / "winnow" / "__init__.py").read_text()
    version = re.search(r'^__version__ = "(.+)"$', text, re.MULTILINE)[1]
    with_cuda = os.environ.get("WINNOW_CUDA", "0").lower() not in ("", "0", "off", "false", "no")
    return {"version": version + (_cuda_version() if with_cuda else "")}
