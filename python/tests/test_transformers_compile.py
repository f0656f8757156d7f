# SPDX-License-Identifier: Apache-2.0
"""torch.compile of enabled models of transformers, of every family whose eager model compiles."""

import pytest
import torch

pytest.importorskip("transformers", minversion="5.22")
from tiny_models import FAMILIES, made, padded, token_ids  # noqa: E402

import winnow.transformers  # noqa: E402

LIMIT = 1e-4


# aot_eager traces as inductor does, and generates no code, which takes minutes a family.
@pytest.mark.slow
@pytest.mark.parametrize(
    "family, backend",
    [*((family, "aot_eager") for family in FAMILIES), ("glm_moe_dsa", "inductor")],
)
def test_a_compiled_model_gives_the_same_logits(family, backend):
    model, ids = made(family), token_ids()
    for mask in (torch.ones_like(ids), padded("left")):
        torch.compiler.reset()
        with torch.no_grad(), winnow.transformers.enabled(model):
            expected = model(ids, attention_mask=mask, use_cache=False).logits
            compiled = torch.compile(model, fullgraph=True, backend=backend)
            actual = compiled(ids, attention_mask=mask, use_cache=False).logits
        assert (actual - expected)[mask.bool()].abs().max() < LIMIT


def test_a_compiled_model_has_the_same_losses_of_indexers():
    model, ids = made("deepseek_v32", with_experts=False), token_ids()
    torch.compiler.reset()
    with winnow.transformers.enabled(model, train_indexer=True):
        expected = model(ids, labels=ids, use_cache=False).loss
        losses = [loss.item() for loss in model.winnow_losses]
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        actual = compiled(ids, labels=ids, use_cache=False).loss
        assert (actual - expected).abs() < LIMIT
        assert [x.item() for x in model.winnow_losses] == pytest.approx(losses, rel=1e-4)
