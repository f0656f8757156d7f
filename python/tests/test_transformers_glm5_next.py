# SPDX-License-Identifier: Apache-2.0
"""GLM-5.3 of transformers: an indexer of pools and tails, among layers of linear attention."""

import copy
import functools

import pytest
import torch
from cases import bf16
from torch import Tensor, nn

transformers = pytest.importorskip("transformers", minversion="5.22")
from test_transformers import (  # noqa: E402
    Replay,
    Selections,
    gradients,
    largest_error,
    relative,
    state,
    token_ids,
)
from transformers import Glm5NextConfig, Glm5NextForConditionalGeneration  # noqa: E402

import winnow.transformers  # noqa: E402

TOKENS = 38  # nine pools of 4 and a tail
LIMIT = 1e-4


@functools.cache
def made(with_experts: bool = True) -> nn.Module:
    torch.manual_seed(1)
    text = dict(
        vocab_size=64,
        hidden_size=256,
        intermediate_size=64,
        moe_intermediate_size=32,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=2,
        n_routed_experts=4,
        num_experts_per_tok=2,
        q_lora_rank=64,
        linear_num_heads=2,
        linear_head_dim=32,
        layer_types=["linear_attention", "indexed_attention", "indexed_attention"],
        indexer_types=["full", "full", "shared"],
        mlp_layer_types=["dense", "sparse" if with_experts else "dense", "dense"],
        index_topk=16,
        index_kpool=4,
        index_n_heads=16,
        hc_mult=2,
        initializer_range=0.06,
        pad_token_id=0,
        eos_token_id=None,
    )
    vision = dict(
        hidden_size=16, intermediate_size=16, depth=1, num_heads=2, out_hidden_size=256,
        projection_intermediate_size=16,
    )  # fmt: skip
    config = Glm5NextConfig(text_config=text, vision_config=vision)
    config._attn_implementation = "eager"
    model = Glm5NextForConditionalGeneration(config).eval()
    with torch.no_grad():
        for name, x in model.named_parameters():
            if "index_kpool_compress" in name:  # constant in a new model
                x.normal_(std=0.1)
    return model


@pytest.fixture
def model() -> nn.Module:
    return made()


def ids() -> Tensor:
    return token_ids(2, TOKENS)


def padded(side: str) -> Tensor:
    mask = torch.ones(2, TOKENS, dtype=torch.long)
    mask[0, slice(0, 7) if side == "left" else slice(-7, None)] = 0
    return mask


def sorted_lists(layers: list[Tensor]) -> list[Tensor]:
    return [indices.sort(-1, descending=True).values for indices in layers]


def test_logits_and_gradients_are_those_of_eager(model):
    with Selections(model) as selections:
        logits, expected = gradients(model, ids())
    with winnow.transformers.enabled(model):
        with Replay(model, selections.layers):
            actual, found = gradients(model, ids())
        with Selections(model) as ours, torch.no_grad():
            model(ids(), use_cache=False)
    assert (actual - logits).abs().max() < LIMIT
    assert largest_error(found, expected) < 1e-3
    for own, eager in zip(sorted_lists(ours.layers), sorted_lists(selections.layers), strict=True):
        assert torch.equal(own, eager)


def test_bf16_logits_are_those_of_eager():
    model = copy.deepcopy(made(with_experts=False)).to(bf16)
    with torch.no_grad():
        with Selections(model) as selections:
            expected = model(ids(), use_cache=False).logits
        with winnow.transformers.enabled(model), Replay(model, selections.layers):
            actual = model(ids(), use_cache=False).logits
    assert relative(actual, expected) < 2e-2


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_no_real_row(model, side):
    mask = padded(side)
    with torch.no_grad():
        expected = model(ids(), attention_mask=mask).logits
        with winnow.transformers.enabled(model):
            actual = model(ids(), attention_mask=mask).logits
    assert (actual - expected)[mask.bool()].abs().max() < LIMIT


def test_generation_is_that_of_eager(model):
    options = {"do_sample": False, "suppress_tokens": [0], "max_new_tokens": 9}
    expected = model.generate(ids(), attention_mask=padded("left"), **options)
    with winnow.transformers.enabled(model):
        assert torch.equal(
            model.generate(ids(), attention_mask=padded("left"), **options), expected
        )
        options |= {"cache_implementation": "static", "disable_compile": True}
        assert torch.equal(
            model.generate(ids(), attention_mask=padded("left"), **options), expected
        )


def test_a_prompt_shorter_than_a_pool_selects_its_tokens(model):
    with torch.no_grad():
        expected = model(ids()[:, :3]).logits
        with winnow.transformers.enabled(model):
            assert (model(ids()[:, :3]).logits - expected).abs().max() < LIMIT


def test_checkpointing_gives_the_same_gradients(model):
    with winnow.transformers.enabled(model.train()):
        _, expected = gradients(model, ids())
        model.gradient_checkpointing_enable()
        _, found = gradients(model, ids())
        model.gradient_checkpointing_disable()
    model.eval()
    assert largest_error(found, expected) < 1e-6


def test_packed_documents_are_refused(model):
    positions = torch.cat([torch.arange(20), torch.arange(18)])[None]
    with winnow.transformers.enabled(model), torch.no_grad():
        with pytest.raises(ValueError, match="packed documents are not supported by glm5_next"):
            model.model.language_model(ids(), position_ids=positions)


def test_disable_restores_everything(model):
    before = state(model)
    winnow.transformers.enable(model)
    winnow.transformers.disable(model)
    assert state(model) == before
