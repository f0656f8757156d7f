# SPDX-License-Identifier: Apache-2.0
"""DeepSeek-V4 of transformers: against eager on single documents, whose pools it shares; packed
and padded batches against their documents alone, since eager pools rows of several documents."""

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
from tiny_models import token_ids  # noqa: E402

import winnow.transformers  # noqa: E402

TOKENS = 70  # pools of 4 and of 16, and rows that complete none
LIMIT = 1e-4


made = functools.partial(made_family, "deepseek_v4")


@pytest.fixture
def model() -> nn.Module:
    return made()


def ids(batch: int = 2) -> Tensor:
    return token_ids(batch, TOKENS)


def test_logits_and_gradients_are_those_of_eager(model):
    with Selections(model) as selections:
        logits, expected = gradients(model, ids())
    with winnow.transformers.enabled(model):
        selected = [indices.int() for indices in selections.layers]
        with Replay(model, selected):
            actual, found = gradients(model, ids())
        with Selections(model) as ours, torch.no_grad():
            model(ids(), use_cache=False)
    assert (actual - logits).abs().max() < LIMIT
    assert largest_error(found, expected) < 1e-3
    assert any(name.endswith("sinks") for name in found)
    for own, eager in zip(ours.layers, selected, strict=True):
        assert torch.equal(own.sort(-1).values, eager.sort(-1).values)


def test_bf16_logits_are_those_of_eager():
    model = copy.deepcopy(made(with_experts=False)).to(bf16)
    with torch.no_grad():
        with Selections(model) as selections:
            expected = model(ids(), use_cache=False).logits
        selected = [indices.int() for indices in selections.layers]
        with winnow.transformers.enabled(model), Replay(model, selected):
            actual = model(ids(), use_cache=False).logits
    assert relative(actual, expected) < 3e-2


def alone(model: nn.Module, document: Tensor) -> Tensor:
    return model(document, use_cache=False).logits


@pytest.mark.parametrize("use_cache", [False, True])
def test_packed_documents_are_those_alone(model, use_cache):
    lengths = [21, 3, 30, 16]
    together, positions = ids(1), torch.cat([torch.arange(length) for length in lengths])[None]
    with torch.no_grad(), winnow.transformers.enabled(model):
        packed = model(together, position_ids=positions, use_cache=use_cache).logits
        parts = [alone(model, part) for part in together.split(lengths, dim=1)]
    assert (packed - torch.cat(parts, dim=1)).abs().max() < LIMIT


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("positions", ["counted", "slots"])
@pytest.mark.parametrize("use_cache", [False, True])
def test_padding_changes_no_real_row(model, side, positions, use_cache):
    both, mask = ids(), torch.ones(2, TOKENS, dtype=torch.long)
    mask[0, slice(0, 7) if side == "left" else slice(-7, None)] = 0
    given = {"attention_mask": mask, "use_cache": use_cache}
    if positions == "counted":
        given["position_ids"] = (mask.cumsum(-1) - 1).masked_fill(mask == 0, 1)
    with torch.no_grad(), winnow.transformers.enabled(model):
        actual = model(both, **given).logits
        first = alone(model, both[:1][mask[:1].bool()][None])
        second = alone(model, both[1:])
    # Rotary embeddings are relative: moved positions change no more than rounding does.
    assert (actual[:1][mask[:1].bool()] - first[0]).abs().max() < LIMIT
    assert (actual[1:] - second).abs().max() < LIMIT


def test_generation_is_that_of_eager(model):
    options = {"do_sample": False, "suppress_tokens": [0], "max_new_tokens": 18}
    expected = model.generate(ids()[:, :30], **options)
    with winnow.transformers.enabled(model):
        assert torch.equal(model.generate(ids()[:, :30], **options), expected)


def test_padded_generation_is_that_of_the_prompts_alone(model):
    options = {"do_sample": False, "suppress_tokens": [0], "max_new_tokens": 9}
    prompts, mask = ids()[:, :30], torch.ones(2, 30, dtype=torch.long)
    mask[0, :7] = 0
    with winnow.transformers.enabled(model):
        both = model.generate(prompts, attention_mask=mask, **options)[:, 30:]
        first = model.generate(prompts[:1, 7:], **options)[:, 23:]
        second = model.generate(prompts[1:], **options)[:, 30:]
    assert torch.equal(both, torch.cat([first, second]))


def test_a_prompt_in_pieces_is_the_prompt(model):
    with torch.no_grad(), winnow.transformers.enabled(model):
        whole = alone(model, ids())
        cache = transformers.DynamicCache(config=model.config)
        parts = ids().split([15, 2, 1, 33, 19], dim=1)
        pieces = [model(part, past_key_values=cache).logits for part in parts]
    assert (torch.cat(pieces, dim=1) - whole).abs().max() < LIMIT


def test_checkpointing_gives_the_same_gradients(model):
    with winnow.transformers.enabled(model.train()):
        _, expected = gradients(model, ids())
        model.gradient_checkpointing_enable()
        _, found = gradients(model, ids())
        model.gradient_checkpointing_disable()
    model.eval()
    assert largest_error(found, expected) < 1e-6


def test_disable_restores_everything(model):
    before = state(model)
    winnow.transformers.enable(model)
    winnow.transformers.disable(model)
    assert state(model) == before


def test_a_mask_of_the_users_own_runs_as_eager(model, told):
    causal = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril().triu(-7)
    mask = torch.zeros(()).where(causal, torch.finfo(torch.float32).min)
    mask = mask.expand(2, 1, TOKENS, TOKENS)
    with torch.no_grad():
        expected = model(ids(), attention_mask=mask, use_cache=False).logits
        with winnow.transformers.enabled(model), pytest.warns(UserWarning, match="4 dimensions"):
            actual = model(ids(), attention_mask=mask, use_cache=False).logits
    assert (actual - expected).abs().max() < LIMIT


def test_dropout_runs_as_eager(told):
    model = copy.deepcopy(made()).train()
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    with winnow.transformers.enabled(model), pytest.warns(UserWarning, match="dropout 0.5"):
        assert model(ids()).logits.isfinite().all()
