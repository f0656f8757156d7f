# SPDX-License-Identifier: Apache-2.0
"""Projections that are more than a weight: adapters of PEFT, and quantised ones."""

import copy
import warnings

import pytest
import torch
from torch import nn

pytest.importorskip("transformers", minversion="5.22")
from model_runs import Replay, Selections, gradients, largest_error, relative  # noqa: E402
from tiny_models import made, token_ids  # noqa: E402

import winnow.transformers  # noqa: E402

LIMIT = 1e-4


def adapted(family: str = "deepseek_v32", dropout: float = 0.0) -> nn.Module:
    """With LoRA on kv_b_proj, whose second factor is 0 in a new model."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(4)
    config = peft.LoraConfig(r=4, target_modules=["kv_b_proj"], lora_dropout=dropout)
    model = peft.get_peft_model(copy.deepcopy(made(family)), config).eval()
    for name, x in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(x, std=0.1)
    return model


@pytest.mark.parametrize("family", ["deepseek_v32", "glm5_next", "hy_v4"])
def test_adapters_of_kv_b_proj_are_folded_and_trained(family):
    model, ids = adapted(family), token_ids()
    with Selections(model) as selections:
        logits, expected = gradients(model, ids)
    with winnow.transformers.enabled(model), Replay(model, selections.without_future()):
        actual, found = gradients(model, ids)
    assert (actual - logits).abs().max() < LIMIT
    assert largest_error(found, expected) < 1e-3
    assert found and all("kv_b_proj.lora_" in name for name in found)


def test_adapters_can_be_switched_off_and_merged_while_enabled():
    model, ids = adapted(), token_ids()
    with torch.no_grad(), winnow.transformers.enabled(model):
        together = model(ids).logits
        with model.disable_adapter():
            alone = model(ids).logits
        model.merge_adapter()
        assert (model(ids).logits - together).abs().max() < LIMIT
        model.unmerge_adapter()
    with torch.no_grad(), winnow.transformers.enabled(made("deepseek_v32")):
        assert (made("deepseek_v32")(ids).logits - alone).abs().max() < LIMIT
    assert (together - alone).abs().max() > 0.1


def test_adapters_with_dropout_run_as_eager(told):
    model, ids = adapted(dropout=0.5), token_ids()
    with winnow.transformers.enabled(model.train()):
        with pytest.warns(UserWarning, match="kv_b_proj has an adapter with dropout"):
            torch.manual_seed(3)
            actual = model(ids).logits
    torch.manual_seed(3)
    assert relative(actual.detach(), model(ids).logits.detach()) < 1e-5


def test_a_bias_of_kv_b_proj_runs_as_eager(told):
    model, ids = copy.deepcopy(made("deepseek_v32")), token_ids()
    for layer in model.model.layers:
        projection = layer.self_attn.kv_b_proj
        projection.bias = nn.Parameter(torch.full((projection.out_features,), 0.1))
    with torch.no_grad():
        with Selections(model) as selections:
            expected = model(ids).logits
        with winnow.transformers.enabled(model), Replay(model, selections.without_future()):
            with pytest.warns(UserWarning, match="kv_b_proj has a bias"):
                actual = model(ids).logits
    assert (actual - expected).abs().max() < LIMIT


def by_torchao(config: str) -> nn.Module:
    quantization = pytest.importorskip("torchao.quantization")
    model = copy.deepcopy(made("deepseek_v32", with_experts=False))
    quantization.quantize_(model, getattr(quantization, config)())
    return model


def by_torch() -> nn.Module:
    model = copy.deepcopy(made("deepseek_v32", with_experts=False))
    names = {name for name, _ in model.named_modules() if name.endswith("kv_b_proj")}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated in favour of torchao
        return torch.ao.quantization.quantize_dynamic(model, names, dtype=torch.qint8)


# Where activations are quantised too, folding leaves that rounding out: its effect is the limit.
QUANTISED = {
    "weights, torchao": (lambda: by_torchao("Int8WeightOnlyConfig"), 1e-5),
    "activations, torchao": (lambda: by_torchao("Int8DynamicActivationInt8WeightConfig"), 5e-2),
    "activations, torch": (by_torch, 5e-2),
}


@pytest.mark.parametrize("kind", QUANTISED)
def test_quantised_projections_are_folded_by_their_effective_weight(kind):
    quantised, limit = QUANTISED[kind]
    model, ids = quantised(), token_ids()
    with torch.no_grad():
        with Selections(model) as selections:
            expected = model(ids, use_cache=False).logits
        with winnow.transformers.enabled(model), Replay(model, selections.without_future()):
            actual = model(ids, use_cache=False).logits
        unquantised = made("deepseek_v32", with_experts=False)(ids, use_cache=False).logits
    assert relative(actual, expected) < limit
    assert relative(expected, unquantised) > limit / 2
