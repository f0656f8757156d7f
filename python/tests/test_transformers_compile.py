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
