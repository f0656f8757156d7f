# SPDX-License-Identifier: Apache-2.0
"""Packing: the keys that each row of a packed batch may see, and the rows that this rank holds."""

from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from winnow._arguments import Array, check_size, optional_tensor, tensor
from winnow.parallel import Layout, Ranks, check_group
from winnow.shards import Documents, Ratios, Shards, check_sharding, ratios_of


class Windows(NamedTuple):
    """Row t sees the keys [begin[t], end[t])."""

    begin: Tensor  # [tokens]  int32
    end: Tensor  # [tokens]  int32


def _readable(offsets: Tensor) -> bool:
    """Whether the host can read them without waiting for a GPU. What Dynamo traces has no numbers,
    nor have fake tensors."""
    compiling = torch.compiler.is_compiling()
    return not compiling and offsets.is_cpu and not isinstance(offsets, FakeTensor)


class Packing:
    """Documents packed one after another into one batch of rows.

    A row sees the keys of its own document up to itself. Created once per batch, used by every
    layer.

    Args:
        cu_seqlens: [documents + 1] int32, the cumulative lengths of the documents, from 0.
        cu_seqlens_padded: [documents + 1] int32, where documents begin if they are followed by
            padding rows. Windows are in these coordinates, and real rows never see padding.
        query_rows: [tokens] int32, the global rows of the queries, -1 for a row that sees nothing.
            By default all rows in order.
        tokens: the number of rows; rows after the last document see nothing, and documents must
            not reach past them (checked where the offsets are in host memory). By default that of
            query_rows or of the documents; reading it from a GPU costs one synchronisation. With a
            group: the rows of the whole batch.
        padding_rows: what padding rows see: "empty", nothing; "see_document", all of their document
            and at least one key.
        group: a torch.distributed process group over whose ranks the rows are split; the queries
            are the rows of this rank. All ranks must create the Packing together and with the same
            arguments, which they compare; a difference is an error on every rank. The host reads
            the offsets once per batch, which on a GPU is a synchronisation.
        sharding: with a group: "zigzag", two chunks of every document per rank, one from its
            beginning and one from its end, which balances the work; or "contiguous".
        multiple: with a group: chunks begin at multiples of this many rows of their document, so
            that pools of any ratio that divides it are not split.
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
        check_size("Packing", "tokens", tokens, 0)
        if self.query_rows is None:
            self._check_documents(tokens)
        self._windows = {1: self._make_windows(tokens, 1)}

    def _check_documents(self, tokens: int) -> None:
        """Refuses documents that reach past the given rows, where that can be seen: rows past the
        last one do not exist."""
        name, ends = "cu_seqlens", self.cu_seqlens
        if self.cu_seqlens_padded is not None:
            name, ends = "cu_seqlens_padded", self.cu_seqlens_padded
        if not _readable(ends) or ends.dim() != 1 or not len(ends):
            return
        if ends[-1] > tokens:
            raise ValueError(
                f"Packing: {name} ends at {int(ends[-1])}: must be at most tokens {tokens}"
            )

    @property
    def tokens(self) -> int:
        """The number of query rows; with a group, those of this rank."""
        return self._windows[1].begin.shape[0]

    @property
    def batch_tokens(self) -> int | None:
        """The number of rows of the whole batch; unknown (None) with query_rows."""
        if self._shards is not None:
            return self._shards.tokens
        return self.tokens if self.query_rows is None else None

    def keys(self, ratio: int = 1) -> int | None:
        """The number of keys (rows or pools) of all ranks; None if this rank has all of them."""
        return None if self._shards is None else self._shards.keys(ratio)

    def own_keys(self, ratio: Ratios = 1) -> int | None:
        """The number of keys of this rank: rows (ratio 1), pools, or with several ratios all of
        these. Without a group this is unknown (None) with query_rows, and for pools if it would be
        read from a GPU or while Dynamo traces."""
        ratios = ratios_of("Packing.own_keys", ratio)
        layout = self.layout(ratios)
        if layout is not None:
            return len(layout.own)
        if self.query_rows is not None:
            return None
        total = 0
        for each in ratios:
            count = self.batch_tokens if each == 1 else self._pools(each)
            if count is None:
                return None
            total += count
        return total

    @property
    def rows(self) -> Tensor:
        """[tokens] int32: the global rows of the queries; with a group, ascending."""
        if self.query_rows is not None:
            return self.query_rows
        return torch.arange(self.tokens, dtype=torch.int32, device=self.cu_seqlens.device)

    def shard(self, x: Tensor, ratio: Ratios = 1) -> Tensor:
        """The rows (with a ratio, the pools) of this rank of a tensor of the whole batch."""
        x = tensor("Packing.shard", "x", x)
        ratio = ratios_of("Packing.shard", ratio)
        layout = self.layout(ratio)
        rows = self.own_keys(ratio) if layout is None else layout.size
        if rows is not None and (not x.dim() or len(x) != rows):
            raise ValueError(
                f"Packing.shard: x {list(x.shape)}: must have {rows} rows, those of the whole batch"
            )
        return x if layout is None else x.index_select(0, layout.own.to(x.device))

    def pool_rows(self, ratio: int) -> Tensor:
        """[pools, ratio]: the rows of every pool of this rank, as indices into its tensors.

        x[packing.pool_rows(4)] is [pools, 4, ...], from which a layer computes its pooled keys.
        Computed at the first call, which synchronises with a GPU that holds the offsets.
        """
        check_size("Packing.pool_rows", "ratio", ratio, 2)
        if ratio not in self._pool_rows:
            first_rows = self._first_rows_of_pools(ratio)
            rows = first_rows[:, None] + torch.arange(ratio, device="cpu")
            self._pool_rows[ratio] = rows.to(self.cu_seqlens.device)
        return self._pool_rows[ratio]

    def windows(self, ratio: int = 1) -> Windows:
        """The keys that every row may see; computed at the first call.

        With ratio r > 1 keys are pools of r rows: every document has floor(length / r) of them,
        those of consecutive documents follow each other, and a row sees the pools of its document
        that are complete at its position.
        """
        check_size("Packing.windows", "ratio", ratio, 1)
        if ratio not in self._windows:
            self._windows[ratio] = self._make_windows(self.tokens, ratio)
        return self._windows[ratio]

    def layout(self, ratio: Ratios = 1) -> Layout | None:
        """The layout by which keys are gathered; None if this rank has all of them."""
        return None if self._shards is None else self._shards.layout(ratio)

    def _wrong_dtype(self) -> str:
        """An error message for an argument that is not int32; empty if there is none."""
        for name in ("cu_seqlens", "cu_seqlens_padded", "query_rows"):
            x = getattr(self, name)
            if x is not None and x.dtype != torch.int32:
                return f"{name} has dtype {str(x.dtype).removeprefix('torch.')}: must be int32"
        return ""

    def _split(self, group: Any, tokens: int | None, sharding: str, multiple: int) -> Shards | None:
        """Splits the rows over the group; None for a single rank, which has all rows."""
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
            # Before the other checks: if one rank raises, the others must not wait for it.
            ranks.agree(
                "Packing",
                f"tokens {tokens}, {documents}, padding_rows {self.padding_rows!r},"
                f" sharding {sharding!r}, multiple {multiple}",
            )
        shards = Shards(ranks, documents, tokens, sharding, multiple)
        return shards if ranks.size > 1 else None

    def _pools(self, ratio: int) -> int | None:
        """The number of pools of all documents, if it can be had without waiting for a GPU."""
        if ratio in self._pool_rows:
            return len(self._pool_rows[ratio])
        if not _readable(self.cu_seqlens):
            return None
        # Of numbers, since the tensors that FakeTensorMode computes have none.
        return sum((end - begin) // ratio for begin, end in pairwise(self.cu_seqlens.tolist()))

    def _first_rows_of_pools(self, ratio: int) -> Tensor:
        """[pools of this rank], on the host, as indices into tensors of this rank."""
        if self._shards is None:
            documents = Documents(self.cu_seqlens, self.cu_seqlens_padded)
            return documents.first_rows_of_pools(ratio)
        own = self._shards.layout(ratio).own.cpu()
        rows = self._shards.rows[self._shards.ranks.rank]
        first_rows = self._shards.documents.first_rows_of_pools(ratio)[own]
        # The rows of a pool are consecutive on every rank, and `rows` ascends.
        return torch.searchsorted(rows, first_rows.int())

    def _rows(self) -> int:
        if self.query_rows is not None:
            return self.query_rows.numel()
        padded = self.cu_seqlens_padded
        offsets = self.cu_seqlens if padded is None else padded
        # Invalid offsets are refused by the operator.
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
