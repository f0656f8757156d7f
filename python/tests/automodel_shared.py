# SPDX-License-Identifier: Apache-2.0
"""What the tests of Automodel's real layers share; see test_automodel_layers.py."""

import pytest
import torch
from cases import Random, assert_within, f32
from nemo_automodel.components.models.common import BackendConfig

from winnow import automodel

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LIMIT = 1e-5 if DEVICE == "cuda" else 1.5e-6  # of relative errors in fp32
HIDDEN = 48


@pytest.fixture(scope="module", autouse=True)
def installed():
    automodel.install()
    yield
    automodel.uninstall()


def backend(attn: str) -> BackendConfig:
    return BackendConfig(
        linear="torch", attn=attn, rms_norm="torch", experts="torch", dispatcher="torch"
    )


def input_of(tokens: int, seed: int = 2) -> torch.Tensor:
    return Random(seed).normal(tokens, HIDDEN, dtype=f32).to(DEVICE)


def gradients(layer: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {n: p.grad for n, p in layer.named_parameters() if p.grad is not None}


def assert_agree(actual, expected, layer, oracle, limit: float) -> None:
    """Outputs, gradients of inputs, and gradients of all parameters that have one."""
    for a, b in zip(actual, expected, strict=True):
        assert_within(a, b.to(torch.float64), limit)
    found, wanted = gradients(layer), gradients(oracle)
    assert found and found.keys() == wanted.keys()
    for name in wanted:
        assert_within(found[name], wanted[name].to(torch.float64), limit)
