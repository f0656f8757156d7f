# SPDX-License-Identifier: Apache-2.0
"""The model families, and which of their methods are replaced."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

from torch import nn

from winnow.transformers import deepseek_v4, indexers
from winnow.transformers.attention import latent_keys

Replacements = Iterator[tuple[nn.Module, str, Callable]]


class Family(NamedTuple):
    attention: str  # the name of its attention class
    # Of one attention module: modules, names of methods, and what takes their place.
    replacements: Callable[[nn.Module], Replacements]


def _latent(index: Callable) -> Callable[[nn.Module], Replacements]:
    """For attention over latents, with the forward of its indexer."""

    def replacements(module: nn.Module) -> Replacements:
        yield module, "expand_kv", latent_keys
        if module.indexer is not None:  # layers that share a selection have none
            yield module.indexer, "forward", index

    return replacements


FAMILIES = {
    "axk2": Family("AXK2Attention", _latent(indexers.axk2)),
    "deepseek_v32": Family("DeepseekV32Attention", _latent(indexers.deepseek_v32)),
    "deepseek_v4": Family("DeepseekV4Attention", deepseek_v4.replacements),
    "glm_moe_dsa": Family("GlmMoeDsaAttention", _latent(indexers.glm_moe_dsa)),
    "hy_v4": Family("HYV4Attention", _latent(indexers.hy_v4)),
    "mistral_large4": Family("MistralLarge4TextAttention", _latent(indexers.mistral_large4)),
}
