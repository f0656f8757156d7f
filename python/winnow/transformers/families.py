# SPDX-License-Identifier: Apache-2.0
"""The model families, and which of their methods are replaced."""

from collections.abc import Callable, Iterator

from torch import nn

from winnow.transformers import deepseek_v4, glm5_next, indexers
from winnow.transformers.attention import latent_keys

Replacements = Iterator[tuple[nn.Module, str, Callable]]


# Of one module: modules, names of methods, and what takes their place.
Replace = Callable[[nn.Module], Replacements]


def _latent(index: Callable) -> Replace:
    """For attention over latents, with the forward of its indexer."""

    def replacements(module: nn.Module) -> Replacements:
        yield module, "expand_kv", latent_keys
        if module.indexer is not None:  # layers that share a selection have none
            yield module.indexer, "forward", index

    return replacements


# By family and class.
FAMILIES: dict[str, dict[str, Replace]] = {
    "axk2": {"AXK2Attention": _latent(indexers.axk2)},
    "deepseek_v32": {"DeepseekV32Attention": _latent(indexers.deepseek_v32)},
    "deepseek_v4": {"DeepseekV4Attention": deepseek_v4.replacements},
    "glm5_next": {
        "Glm5NextTextAttention": glm5_next.replacements,
        "Glm5NextTextModel": glm5_next.model_replacements,
    },
    "glm_moe_dsa": {"GlmMoeDsaAttention": _latent(indexers.glm_moe_dsa)},
    "hy_v4": {"HYV4Attention": _latent(indexers.hy_v4)},
    "mistral_large4": {"MistralLarge4TextAttention": _latent(indexers.mistral_large4)},
}
