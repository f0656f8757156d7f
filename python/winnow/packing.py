# SPDX-License-Identifier: Apache-2.0
"""Packing: which keys every row of a packed batch may see, and which rows this rank holds."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from winnow._arguments import Array, at_least, optional_tensor, tensor
from winnow.parallel import Layout, Ranks, check_group
from winnow.shards import Documents, Ratios, Shards, check_sharding


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
            synchronisation with it. With a group: the rows of the whole batch.
        padding_rows: what padding rows see: "empty", nothing; "see_document", all of their document
            and at least one key.
        group: a torch.distributed process group over whose ranks the rows are split; queries here
            are the rows of this rank. All ranks make the Packing at the same time and with the
            same arguments: they compare them, and a difference is an error on every rank. Offsets
            are read by the host, once per batch: on a GPU that is a synchronisation with it.
        sharding: with a group: "zigzag", two pieces of every document for a rank, one from its
            beginning and one from its end, which is equal work for all; or "contiguous".
        multiple: with a group: pieces begin at multiples of so many rows of their document, so that
            a rank has whole pools of any ratio that divides it.
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
        group: Any = None,
        sharding: str = "zigzag",
        multiple: int = 1,
        backend: str | None = None,
    ) -> None:
        self.cu_seqlens = tensor("Packing", "cu_seqlens", cu_seqlens)
        self.cu_seqlens_padded = optional_tensor("Packing", "cu_seqlens_padded", cu_seqlens_padded)
        self.query_rows = optional_tensor("Packing", "query_rows", query_rows)
        self.padding_rows = padding_rows
        self._backend = backend or "automatic"
        self._shards: Shards | None = None
        self._pool_rows: dict[int, Tensor] = {}
        if group is not None:
            self._shards = self._split(group, tokens, sharding, multiple)
        elif mistake := self._wrong_dtype():
            raise ValueError(f"Packing: {mistake}")
        else:
            check_sharding(sharding, multiple)
        if self._shards is not None:
            self.query_rows = self._shards.layout(1).own.int()
            tokens = self.query_rows.numel()
        if tokens is None:
            tokens = self._rows()
        at_least("Packing", "tokens", tokens, 0)
        self._windows = {1: self._make_windows(tokens, 1)}

    @property
    def tokens(self) -> int:
        """Rows that have a window: with a group, those of this rank."""
        return self._windows[1].begin.shape[0]

    @property
    def batch_tokens(self) -> int | None:
        """Rows of the whole batch; None with query_rows, which do not say it."""
        if self._shards is not None:
            return self._shards.tokens
        return self.tokens if self.query_rows is None else None

    def keys(self, ratio: int = 1) -> int | None:
        """Keys of all ranks, rows or pools, where this rank has not all of them."""
        return None if self._shards is None else self._shards.keys(ratio)

    @property
    def rows(self) -> Tensor:
        """[tokens] int32: the rows of the whole batch that are queries here, ascending with a
        group."""
        if self.query_rows is not None:
            return self.query_rows
        return torch.arange(self.tokens, dtype=torch.int32, device=self.cu_seqlens.device)

    def shard(self, x: Tensor, ratio: Ratios = 1) -> Tensor:
        """This rank's rows of a tensor [rows of the whole batch, ...]; with a ratio, its pools."""
        layout = self.layout(ratio)
        if layout is None:
            return x
        if not x.dim() or len(x) != layout.size:
            raise ValueError(
                f"Packing.shard: x {list(x.shape)}: must have {layout.size} rows, those of the"
                " whole batch"
            )
        return x.index_select(0, layout.own.to(x.device))

    def pool_rows(self, ratio: int) -> Tensor:
        """[pools, ratio]: of every pool of this rank its rows, as places in tensors of this rank.

        x[packing.pool_rows(4)] is [pools, 4, ...]: what a layer makes its pooled keys of. Made at
        the first call, which waits for a GPU that has the offsets.
        """
        at_least("Packing.pool_rows", "ratio", ratio, 2)
        if ratio not in self._pool_rows:
            first_rows = self._first_rows_of_pools(ratio)
            rows = first_rows[:, None] + torch.arange(ratio)
            self._pool_rows[ratio] = rows.to(self.cu_seqlens.device)
        return self._pool_rows[ratio]

    def windows(self, ratio: int = 1) -> Windows:
        """The keys that every row may see; made at the first call.

        With ratio r > 1 keys are pools of r rows: every document owns floor(length / r) of them,
        one document's behind another's, and a row sees those that are complete at its position.
        """
        if ratio not in self._windows:
            self._windows[ratio] = self._make_windows(self.tokens, ratio)
        return self._windows[ratio]

    def layout(self, ratio: Ratios = 1) -> Layout | None:
        """What keys are gathered by; None where this rank has all of them."""
        return None if self._shards is None else self._shards.layout(ratio)

    def _wrong_dtype(self) -> str:
        """Which argument has one, as a sentence; empty if none has."""
        for name in ("cu_seqlens", "cu_seqlens_padded", "query_rows"):
            x = getattr(self, name)
            if x is not None and x.dtype != torch.int32:
                return f"{name} has dtype {str(x.dtype).removeprefix('torch.')}: must be int32"
        return ""

    def _split(self, group: Any, tokens: int | None, sharding: str, multiple: int) -> Shards | None:
        """None for a group of one rank, which has all rows."""
        check_group("Packing", "group", group)
        ranks = Ranks(group)
        if mistake := self._wrong_dtype():
            ranks.refuse("Packing", mistake)
        if self.query_rows is not None:
            ranks.refuse("Packing", "query_rows and group: only one of them can be given")
        documents = Documents(self.cu_seqlens, self.cu_seqlens_padded)
        if tokens is None:
            tokens = documents.end
        if ranks.size > 1:
            # Before the rest is refused: what one rank refuses, others must not wait for.
            ranks.agree(
                "Packing",
                f"tokens {tokens}, {documents}, padding_rows {self.padding_rows!r},"
                f" sharding {sharding!r}, multiple {multiple}",
            )
        shards = Shards(ranks, documents, tokens, sharding, multiple)
        return shards if ranks.size > 1 else None

    def _first_rows_of_pools(self, ratio: int) -> Tensor:
        """[pools of this rank], on the host, as places in tensors of this rank."""
        if self._shards is None:
            documents = Documents(self.cu_seqlens, self.cu_seqlens_padded)
            return documents.first_rows_of_pools(ratio)
        own = self._shards.layout(ratio).own.cpu()
        rows = self._shards.rows[self._shards.ranks.rank]
        first_rows = self._shards.documents.first_rows_of_pools(ratio)[own]
        # The rows of a pool lie together wherever they are, and `rows` ascends.
        return torch.searchsorted(rows, first_rows.int())

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
