# SPDX-License-Identifier: Apache-2.0
"""Activation checkpointing that saves the selections of index_topk."""

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts


def keep_selections() -> tuple[AbstractContextManager, AbstractContextManager]:
    """A `context_fn` of torch.utils.checkpoint that does not recompute selections.

        torch.utils.checkpoint.checkpoint(
            layer, x, use_reentrant=False, context_fn=winnow.keep_selections
        )

    Backward recomputes everything except the results of index_topk: its indices, lengths and scores
    are saved, and attention is recomputed over the same keys. Checkpointing is correct without this
    too, since index_topk selects the same keys again, but then computes all scores twice.
    """
    return create_selective_checkpoint_contexts(_policy)


def _policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    if operator is torch.ops.winnow.index_topk_forward.default:
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE
