# SPDX-License-Identifier: Apache-2.0
"""Activation checkpointing that keeps selections."""

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts


def keep_selections() -> tuple[AbstractContextManager, AbstractContextManager]:
    """The `context_fn` of torch.utils.checkpoint under which nothing is selected twice.

        torch.utils.checkpoint.checkpoint(
            layer, x, use_reentrant=False, context_fn=winnow.keep_selections
        )

    Everything is recomputed in backward but the results of index_topk: its indices, lengths and
    scores are stored, and attention is recomputed over the same keys. Without this, checkpointing
    is as right, since index_topk chooses the same keys again, but pays for all scores twice.
    """
    return create_selective_checkpoint_contexts(_policy)


def _policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    if operator is torch.ops.winnow.index_topk_forward.default:
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE
