# SPDX-License-Identifier: Apache-2.0
"""Packing: which keys every row of a packed batch may see."""

from typing import NamedTuple

import torch
from torch import Tensor

from winnow._arguments import Array, at_least, optional_tensor, tensor


class Windows(NamedTuple):
    """Row t sees the keys [begin[t], end[t])."""

    begin: Tensor  # [tokens]  int32
    end: Tensor  # [tokens]  int32


class Packing:
    """Documents that stand one after another in one batch of rows.

    A row sees the keys of its own document up to itself. Made once per batch, used by every layer.

    Args:
        cu_seqlens: [documents + 1] int32, the cumulated lengths of the documents, from 0.
        cu_seqlens_padded: [documents + 1] int32, where documents begin if padding rows stand behind
            their real ones. Windows are in these coordinates, and real rows never see padding.
        query_rows: [tokens] int32, the rows of the whole batch that are queries here, -1 for a row
            that sees nothing. By default all of them in their order.
        tokens: how many rows there are; rows past the last document see nothing. By default as many
            as query_rows has, or as the documents take: to read that from a GPU costs one
            synchronisation with it.
        padding_rows: what padding rows see: "empty", nothing; "see_document", all of their document
            and at least one key.
        backend: "automatic" (the default), "reference", "cpu" or "cuda".
    """

    def __init__(
        self,
        cu_seqlens: Array,
        cu_seqlens_padded: Array | None = None,
        query_rows: Array | None = None,
        *,
        tokens: int | None = None,
        padding_rows: str = "empty",
        backend: str | None = None,
    ) -> None:
        self.cu_seqlens = tensor("Packing", "cu_seqlens", cu_seqlens)
        self.cu_seqlens_padded = optional_tensor("Packing", "cu_seqlens_padded", cu_seqlens_padded)
        self.query_rows = optional_tensor("Packing", "query_rows", query_rows)
        self.padding_rows = padding_rows
        self._backend = backend or "automatic"
        if tokens is None:
            tokens = self._rows()
        at_least("Packing", "tokens", tokens, 0)
        self._windows = {1: self._make_windows(tokens, 1)}

    @property
    def tokens(self) -> int:
        """Rows that have a window."""
        return self._windows[1].begin.shape[0]

    def windows(self, ratio: int = 1) -> Windows:
        """The keys that every row may see; made at the first call.

        With ratio r > 1 keys are pools of r rows: every document owns floor(length / r) of them,
        one document's behind another's, and a row sees those that are complete at its position.
        """
        if ratio not in self._windows:
            self._windows[ratio] = self._make_windows(self.tokens, ratio)
        return self._windows[ratio]

    def _rows(self) -> int:
        if self.query_rows is not None:
            return self.query_rows.numel()
        padded = self.cu_seqlens_padded
        offsets = self.cu_seqlens if padded is None else padded
        # What is no list of offsets is refused by the operator.
        return max(int(offsets.flatten()[-1]), 0) if offsets.numel() else 0

    def _make_windows(self, tokens: int, ratio: int) -> Windows:
        begin, end = torch.ops.winnow.key_windows(
            self.cu_seqlens,
            self.cu_seqlens_padded,
            self.query_rows,
            tokens,
            ratio,
            self.padding_rows,
            backend=self._backend,
        )
        return Windows(begin, end)
