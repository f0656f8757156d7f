# SPDX-License-Identifier: Apache-2.0
"""The rows, and the pools of rows, of a packed batch that each rank holds."""

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

from winnow import _lib
from winnow._arguments import check_size, one_of
from winnow.parallel import Layout, Ranks

Ratios = int | Sequence[int]


def ratios_of(function: str, ratio: Ratios) -> tuple[int, ...]:
    ratios = tuple(ratio) if isinstance(ratio, Sequence) else (ratio,)
    if not ratios:
        raise ValueError(f"{function}: ratio {ratio}: must not be empty")
    for each in ratios:
        check_size(function, "ratio", each, 1)
    return ratios


def check_sharding(sharding: str, multiple: int) -> None:
    """Checks the arguments of Packing, which are validated without a group too."""
    one_of("Packing", "sharding", sharding, _lib.SHARDINGS)
    check_size("Packing", "multiple", multiple, 1)


class Documents:
    """The documents of a batch, copied to the host, which synchronises with a GPU."""

    def __init__(self, cu_seqlens: Tensor, cu_seqlens_padded: Tensor | None) -> None:
        self.device = cu_seqlens.device
        self.cu_seqlens = cu_seqlens.cpu()
        padded = None if cu_seqlens_padded is None else cu_seqlens_padded.cpu()
        self.offsets = self.cu_seqlens if padded is None else padded  # where documents begin
        self._padded = padded

    def __str__(self) -> str:
        numbers = [*self.cu_seqlens.flatten().tolist(), *self.offsets.flatten().tolist()]
        digest = hashlib.sha256(str(numbers).encode()).hexdigest()[:8]
        return f"{self.offsets.numel() - 1} documents (offsets with sum {digest})"

    @property
    def end(self) -> int:
        """The number of rows of all documents."""
        return max(int(self.offsets.flatten()[-1]), 0) if self.offsets.numel() else 0

    def check(self) -> None:
        """Lets the operator check the offsets; with 0 tokens it computes nothing."""
        torch.ops.winnow.key_windows(self.cu_seqlens, self._padded, None, 0)

    def pools(self, ratio: int) -> Tensor:
        """[documents] int64: the number of pools of each document."""
        return self.cu_seqlens.diff().long() // ratio

    def first_rows_of_pools(self, ratio: int) -> Tensor:
        """[pools] int64: the first row of each pool, in the order of the documents."""
        pools = self.pools(ratio)
        begins = self.offsets[:-1].long().repeat_interleave(pools)
        first_pools = (pools.cumsum(0) - pools).repeat_interleave(pools)
        return begins + ratio * (torch.arange(len(begins), device="cpu") - first_pools)


class Shards:
    """The rows of a batch, split over the ranks of a group."""

    def __init__(
        self, ranks: Ranks, documents: Documents, tokens: int, sharding: str, multiple: int
    ) -> None:
        check_sharding(sharding, multiple)
        documents.check()
        offsets = documents.offsets.tolist()
        numbers, counts = _lib.shard_rows(offsets, tokens, ranks.size, sharding, multiple)
        no_rows = torch.empty(0, dtype=torch.int32, device="cpu")  # not an array of 0 numbers
        rows = torch.frombuffer(numbers, dtype=torch.int32) if tokens else no_rows
        self.rows = rows.split(counts)  # of every rank
        self.ranks, self.documents, self.tokens = ranks, documents, tokens
        self._multiple = multiple
        self._layouts: dict[tuple[int, ...], Layout] = {}

    def layout(self, ratio: Ratios) -> Layout:
        """The layout of rows (ratio 1), of pools, or with several ratios of their concatenation."""
        ratios = ratios_of("Packing.layout", ratio)
        if ratios not in self._layouts:
            kinds = [self._rows_of_ranks(r) for r in ratios]
            sizes = [sum(map(len, rows)) for rows in kinds]
            begins = [sum(sizes[:i]) for i in range(len(sizes))]
            rows = [
                torch.cat([begin + x for begin, x in zip(begins, own, strict=True)])
                for own in zip(*kinds, strict=True)
            ]
            self._layouts[ratios] = Layout(self.ranks, rows, self.documents.device)
        return self._layouts[ratios]

    def keys(self, ratio: int) -> int:
        """The number of rows (ratio 1) or pools of all ranks."""
        return self.tokens if ratio == 1 else int(self.documents.pools(ratio).sum())

    def _rows_of_ranks(self, ratio: int) -> tuple[Tensor, ...]:
        """The rows (ratio 1) or the pools of each rank."""
        if ratio == 1:
            return self.rows
        if self._multiple % ratio:
            raise ValueError(
                f"Packing: ratio {ratio}: must divide multiple {self._multiple}, so that every rank"
                " has whole pools"
            )
        first_rows = self.documents.first_rows_of_pools(ratio)
        pool_that_begins = torch.full((self.tokens,), -1, device="cpu")
        pool_that_begins[first_rows] = torch.arange(len(first_rows), device="cpu")
        pools = pool_that_begins.index_select(0, torch.cat(self.rows))
        counts = [int((own >= 0).sum()) for own in pools.split([len(rows) for rows in self.rows])]
        return pools[pools >= 0].split(counts)
