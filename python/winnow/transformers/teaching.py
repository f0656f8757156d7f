# SPDX-License-Identifier: Apache-2.0
"""Training the indexers of a model: its attention teaches them which keys matter.

An indexing layer leaves its selection with scores here, and the attention layers that use it add
their probabilities to its target. The losses are made after the model's forward. A layer that
checkpointing runs again computes its scores again, for backward, and leaves nothing.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from winnow import _autograd
from winnow.transformers.warn import warn_once

_RUN = _autograd.Run(None, None)


class Selection:
    """The selection of one indexing layer, and what attention makes of it."""

    def __init__(self, indices: Tensor, scores: Tensor, tokens_per_slot: int) -> None:
        self.indices = indices  # [batch, rows, topk] int32
        self.scores = scores  # [batch, rows, topk], differentiable
        self.tokens_per_slot = tokens_per_slot
        self.target = torch.zeros_like(scores)  # attention, summed over heads and layers

    def add(self, attention: Tensor, group: dist.ProcessGroup | None = None) -> None:
        """Adds a layer's attention to the keys of its lists, which begin with the selection.

        Args:
            attention: [batch, rows, slots] fp32, summed over the heads of this rank.
            group: the ranks over which the layer's heads are split; None: this one has them all.
        """
        topk = self.indices.shape[-1]
        attention = attention[..., : topk * self.tokens_per_slot]
        attention = attention.unflatten(-1, (topk, -1)).sum(-1)
        if group is not None:
            dist.all_reduce(attention, group=group)
        self.target += attention.to(self.target.device)

    def loss(self) -> Tensor:
        """winnow.index_loss of this target: the mean over the rows that count."""
        indices, scores, target = (
            x.flatten(0, 1) for x in (self.indices, self.scores, self.target)
        )
        by_row = _autograd.index_loss(scores, target, indices, None, _RUN)
        valid = (indices >= 0) & (scores != -torch.inf)
        counts = (valid.sum(-1) >= 2) & (valid & (target > 0)).any(-1)
        return by_row.sum() / counts.sum().clamp(min=1)


class Losses(list[Tensor]):
    """The losses of a forward. A copy has their values, since copy.deepcopy takes no graph."""

    def __deepcopy__(self, memo: dict[int, Any]) -> "Losses":
        return Losses(loss.detach().clone() for loss in self)


class Teaching:
    """What the layers of one model share while its forward runs."""

    def __init__(self) -> None:
        self.selections: list[Selection] | None = None  # None: no forward is running

    def begin(self, model: nn.Module, args: Any) -> None:
        """Before the model's forward."""
        self.selections = []

    def end(self, model: nn.Module, args: Any, output: Any) -> Any:
        """After it: losses into model.winnow_losses, and their sum into the output's loss."""
        selections, self.selections = self.selections or [], None
        if torch.is_grad_enabled() and not selections:
            warn_once(
                "winnow.transformers: no indexing layer ran with gradients, so that no indexer is"
                " trained: gradient checkpointing must have use_reentrant=False"
            )
        # Of a list, since Dynamo makes no list from a generator.
        model.winnow_losses = Losses([selection.loss() for selection in selections])
        if model.winnow_losses and getattr(output, "loss", None) is not None:
            losses = [x.to(output.loss.device) for x in model.winnow_losses]
            output.loss = output.loss + torch.stack(losses).sum()
        return output

    def keep(self, indices: Tensor, scores: Tensor, tokens_per_slot: int) -> None:
        """Keeps the selection of an indexing layer."""
        if self.selections is not None:
            self.selections.append(Selection(indices, scores, tokens_per_slot))


def teaching_of(module: nn.Module) -> Teaching | None:
    """Of an indexer or an attention module; None: no indexer is trained in this call."""
    return module.__dict__.get("winnow_teaching") if torch.is_grad_enabled() else None


def selection_of(module: nn.Module, dropout: float) -> Selection | None:
    """The selection that this attention layer uses; None: nobody learns from it."""
    teaching = teaching_of(module)
    if teaching is None or not teaching.selections:
        return None
    if dropout:  # eager returns weights with zeros in them, and the others scaled up
        warn_once(
            f"winnow.transformers: attention_dropout {dropout}: layers with dropout teach no"
            " indexer: set attention_dropout to 0 to train indexers"
        )
        return None
    return teaching.selections[-1]


def attention_to(keys: Tensor, weights: Tensor) -> Tensor:
    """[batch, rows, slots]: attention to the keys, summed over heads; 0 where there is no key.

    Args:
        keys: [batch, rows, slots]; -1: none.
        weights: [batch, heads, rows, all keys], of eager attention.
    """
    total = nn.functional.pad(weights.detach().sum(1, dtype=torch.float32), (0, 1))
    return total.gather(-1, torch.where(keys < 0, total.shape[-1] - 1, keys).long())
