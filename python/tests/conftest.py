# SPDX-License-Identifier: Apache-2.0
"""Test settings: reproducible property tests, one torch thread for small matrices; ranks."""

import pytest
import torch
from hypothesis import settings
from ranks import Ranks

settings.register_profile(
    "winnow", deadline=None, derandomize=True, database=None, max_examples=150, print_blob=False
)
settings.load_profile("winnow")
torch.set_num_threads(1)


def pytest_configure(config):
    config.addinivalue_line("markers", "slow: too long for every change; make test-all runs it")


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    with Ranks(2, str(tmp_path_factory.mktemp("ranks") / "store")) as started:
        yield started


@pytest.fixture
def told(monkeypatch):
    """Reasons to run as eager are said once a process; with this once a test."""
    from winnow.transformers import warn

    monkeypatch.setattr(warn, "_told", set())
