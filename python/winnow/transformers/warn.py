# SPDX-License-Identifier: Apache-2.0
"""Why something runs as in eager attention, said once a reason."""

import warnings

OWN_MASK = (
    "winnow.transformers: attention_mask of 4 dimensions: only padding masks [batch, keys] run"
    " sparse; this batch runs as in eager attention"
)

_told: set[str] = set()


def warn_once(sentence: str) -> None:
    if sentence not in _told:
        _told.add(sentence)
        warnings.warn(sentence, stacklevel=3)
