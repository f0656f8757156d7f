# SPDX-License-Identifier: Apache-2.0
"""GLM-5.3 of transformers: an indexer of pools and tails, among layers of linear attention."""

import copy
import functools

import pytest
import torch
from cases import bf16
from torch import Tensor, nn

transformers = pytest.importorskip("transformers", minversion="5.22")
from model_runs import (  # noqa: E402
    Replay,
    Selections,
    gradients,
    largest_error,
    relative,
    state,
)
from tiny_models import made as made_family  # noqa: E402
from tiny_models import padded, token_ids  # noqa: E402

import winnow.transformers  # noqa: E402

TOKENS = 38  # nine pools of 4 and a tail
LIMIT = 1e-4


made = functools.partial(made_family, "glm5_next")


@pytest.fixture
def model() -> nn.Module:
    return made()


def ids() -> Tensor:
    return token_ids(2, TOKENS)


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
    mask = padded(side, TOKENS)
    with torch.no_grad():
        expected = model(ids(), attention_mask=mask).logits
        with winnow.transformers.enabled(model):
            actual = model(ids(), attention_mask=mask).logits
    assert (actual - expected)[mask.bool()].abs().max() < LIMIT


def test_generation_is_that_of_eager(model):
    options = {"do_sample": False, "suppress_tokens": [0], "max_new_tokens": 9}
    expected = model.generate(ids(), attention_mask=padded("left", TOKENS), **options)
    with winnow.transformers.enabled(model):
        assert torch.equal(
            model.generate(ids(), attention_mask=padded("left", TOKENS), **options), expected
        )
        options |= {"cache_implementation": "static", "disable_compile": True}
        assert torch.equal(
            model.generate(ids(), attention_mask=padded("left", TOKENS), **options), expected
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
