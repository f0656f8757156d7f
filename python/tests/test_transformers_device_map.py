# SPDX-License-Identifier: Apache-2.0
"""Models that Accelerate has spread over devices, as from_pretrained(device_map=...) does: weights
that stay elsewhere until a module runs, and layers on the CPU and on a GPU."""

import copy

import pytest
import torch
from torch import nn

pytest.importorskip("transformers", minversion="5.22")
accelerate = pytest.importorskip("accelerate")
from tiny_models import FAMILIES, TOKENS, made, padded, token_ids  # noqa: E402

import winnow.transformers  # noqa: E402

LIMIT = 1e-4


@pytest.fixture(params=FAMILIES)
def family(request) -> str:
    return request.param


def logits(model: nn.Module, device: str = "cpu") -> torch.Tensor:
    """Of the real rows of a padded batch."""
    mask = padded("right")
    given = {"attention_mask": mask.to(device), "use_cache": False}
    with torch.no_grad():
        return model(token_ids().to(device), **given).logits.cpu()[mask.bool()]


def offloaded(model: nn.Module) -> nn.Module:
    """Its weights come back for as long as the module that owns them runs."""
    return accelerate.cpu_offload(model, execution_device=torch.device("cpu"))


def test_weights_elsewhere_come_back(family):
    with winnow.transformers.enabled(made(family)):
        expected = logits(made(family))
    model = offloaded(copy.deepcopy(made(family)))
    before = logits(model)
    with winnow.transformers.enabled(model):
        assert (logits(model) - expected).abs().max() < 1e-6
        assert all(x.is_meta for x in model.parameters())
    assert torch.equal(logits(model), before)


def test_a_model_spread_while_enabled_is_disabled():
    model = winnow.transformers.enable(copy.deepcopy(made("deepseek_v4")))
    expected = logits(model)
    offloaded(model)
    assert (logits(model) - expected).abs().max() < 1e-6
    winnow.transformers.disable(model)
    assert (logits(model) - logits(made("deepseek_v4"))).abs().max() < 1e-6


def spread(model: nn.Module, main: str) -> nn.Module:
    """The first and the last layer on the GPU, the middle one on the CPU; where the CPU is not the
    main device, its weights go to the GPU for the time that they are needed."""
    middle = next(name for name, _ in model.named_modules() if name.endswith("layers.1"))
    device_map: dict[str, int | str] = {middle: "cpu"}
    parent = ""
    for own in middle.split("."):
        siblings = (x for x, _ in model.get_submodule(parent).named_children() if x != own)
        device_map |= {f"{parent}.{x}".removeprefix("."): 0 for x in siblings}
        parent = f"{parent}.{own}".removeprefix(".")
    keys = model._skip_keys_device_placement
    return accelerate.dispatch_model(
        model, device_map, main_device=main, force_hooks=True, skip_keys=keys
    )


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("main", ["cuda:0", "cpu"])
def test_layers_on_the_cpu_and_on_a_gpu(family, main):
    with winnow.transformers.enabled(made(family)):
        expected = logits(made(family))
    model = spread(copy.deepcopy(made(family)), main)
    try:
        eager = logits(model, "cuda")
    except RuntimeError as error:  # mistral_large4 shares keys between layers where they are
        pytest.skip(f"eager does not run either: {error}")
    with winnow.transformers.enabled(model):
        actual = logits(model, "cuda")
        generated = model.generate(token_ids().cuda(), max_new_tokens=4, do_sample=False)
    assert (actual - expected).abs().max() < LIMIT
    assert (eager - logits(made(family))).abs().max() < LIMIT
    assert generated.shape == (2, TOKENS + 4)
