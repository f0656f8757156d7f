# SPDX-License-Identifier: Apache-2.0
"""The model families, and which of their methods are replaced."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

from torch import nn

from winnow.transformers import indexers
from winnow.transformers.attention import latent_keys


class Family(NamedTuple):
    attention: str  # the name of its attention class
    index: Callable  # the forward of its indexer

    def replacements(self, module: nn.Module) -> Iterator[tuple[nn.Module, str, Callable]]:
        """Module, name of the method, and what takes its place, of one attention module."""
        yield module, "expand_kv", latent_keys
        if module.indexer is not None:  # layers that share a selection have none
            yield module.indexer, "forward", self.index


FAMILIES = {
    "deepseek_v32": Family("DeepseekV32Attention", indexers.half_split),
    "glm_moe_dsa": Family("GlmMoeDsaAttention", indexers.interleaved),
}
