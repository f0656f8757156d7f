# SPDX-License-Identifier: Apache-2.0
"""Runs automodel_*.py: the layers of the real nemo-automodel, in a process of their own.

Automodel needs another transformers than other tests may have, so it is installed into a folder
that only that process sees. Where it cannot be had, the tests are skipped.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent
VERSION = "0.7.0"
FOLDER = TESTS.parents[1] / "build" / f"automodel-{VERSION}"
# What the layers import, with the version of transformers that this Automodel asks for. It requires
# more, but torch is there, and the rest is not used by the layers.
REQUIREMENTS = (
    f"nemo-automodel=={VERSION} transformers==5.18.0 huggingface-hub tokenizers safetensors regex"
    " pyyaml tqdm httpx2 httpcore2 h11 anyio idna truststore"
)


@pytest.fixture(scope="module")
def environment() -> dict[str, str]:
    """The variables of a process that finds Automodel."""
    if not FOLDER.exists():
        command = [sys.executable, "-m", "pip", "install", "-q", "--no-compile", "--no-deps"]
        command += ["--target", str(FOLDER), *REQUIREMENTS.split()]
        made = subprocess.run(command, capture_output=True, text=True)
        if made.returncode:
            shutil.rmtree(FOLDER, ignore_errors=True)
            pytest.skip(f"nemo-automodel {VERSION} cannot be installed: {made.stderr[-200:]}")
    paths = [str(TESTS.parent), str(TESTS), os.environ.get("PYTHONPATH", ""), str(FOLDER)]
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}


@pytest.mark.slow
@pytest.mark.parametrize("file", ["glm_layers", "v4_layers", "package"])
def test_automodel(file, environment):
    command = [sys.executable, "-m", "pytest", "-q", f"automodel_{file}.py"]
    run = subprocess.run(command, cwd=TESTS, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-5000:] + run.stderr[-2000:]
    assert " passed" in run.stdout
