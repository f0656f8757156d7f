# SPDX-License-Identifier: Apache-2.0
"""Collectives over torch.distributed for tensors whose rows are sharded over ranks."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

_SIGNATURE_BYTES = 256

# torch 2.13 renames these functions and deprecates the old names.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def check_group(function: str, name: str, group: Any) -> None:
    """Raises TypeError unless `group` is a process group that this process belongs to."""
    if isinstance(group, dist.ProcessGroup):
        return
    given = f"is a {type(group).__name__}"
    if group == dist.GroupMember.NON_GROUP_MEMBER:
        given = f"is {group}, what torch.distributed gives a process that is no rank of the group"
    raise TypeError(
        f"{function}: {name} {given}: must be a torch.distributed.ProcessGroup that this process"
        " belongs to"
    )


class Ranks:
    """A process group and the position of this process in it."""

    def __init__(self, group: Any) -> None:
        self.group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        # By device type, such as {"cpu": "gloo", "cuda": "nccl"}.
        self.backends = dict(word.split(":") for word in dist.get_backend_config(group).split(","))
        self._agreed: set[str] = set()

    def agree(self, function: str, signature: str) -> None:
        """Raises ValueError on every rank unless all ranks pass the same signature.

        Waits for all ranks, and for the GPU if the group has no backend for CPU tensors.
        """
        device = "cpu" if "cpu" in self.backends else "cuda"
        text = f"{function}: {signature}".encode()[:_SIGNATURE_BYTES].ljust(_SIGNATURE_BYTES)
        mine = torch.tensor(list(text), dtype=torch.uint8, device=device)
        texts = mine.new_empty(self.size * _SIGNATURE_BYTES)
        with self.failures_of(f"{function}: the comparison of arguments ({signature})"):
            _all_gather(texts, mine, group=self.group)
            of_ranks = texts.view(self.size, -1).tolist()
        said: dict[str, list[int]] = {}
        for rank, numbers in enumerate(of_ranks):
            said.setdefault(bytes(numbers).decode(errors="replace").rstrip(), []).append(rank)
        if len(said) > 1:
            each = "; ".join(f"{_name_ranks(ranks)} {text}" for text, ranks in said.items())
            raise ValueError(f"{function}: ranks differ: {each}")

    def refuse(self, function: str, mistake: str) -> NoReturn:
        """Raises ValueError for an error on this rank, and on the others when they call agree."""
        if self.size > 1:
            self.agree(function, mistake)
        raise ValueError(f"{function}: {mistake}")

    def agree_on_keys(
        self, function: str, device: torch.device, signature: str, mistake: str
    ) -> None:
        """Calls agree: over Gloo every time; over other backends, where the host would wait for the
        device in every layer, once per signature.

        An error on this rank alone is reported to the ranks that compare.
        """
        if self.backends.get(device.type) == "gloo" or signature not in self._agreed:
            self.agree(function, mistake or signature)
        if mistake:
            raise ValueError(f"{function}: {mistake}")
        self._agreed.add(signature)

    @contextmanager
    def failures_of(self, what: str) -> Iterator[None]:
        """Adds to an error of torch.distributed what failed and on which rank."""
        try:
            yield
        except RuntimeError as error:
            raise RuntimeError(
                f"{what} failed on rank {self.rank} of {self.size}: {error}"
            ) from error


def _name_ranks(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:4])) + (f" and {len(ranks) - 4} more" * (len(ranks) > 4))
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {shown}:"


class Layout:
    """The rows of a whole tensor that each rank holds.

    Collectives need shards of equal size, so shorter ones are padded in the communication buffer,
    and only there.
    """

    def __init__(
        self,
        ranks: Ranks,
        rows: list[Tensor],
        device: torch.device,
        function: str = "gather_keys",
    ) -> None:
        """`rows` are those of each rank, on the host; together they are 0 .. size - 1. `function`
        is named in errors."""
        self.ranks, self.device, self.function = ranks, device, function
        self.own = rows[ranks.rank].to(device)
        self.size = sum(map(len, rows))
        self._longest = max(map(len, rows))
        counts = [torch.arange(len(own), device="cpu") for own in rows]
        places = torch.cat([rank * self._longest + count for rank, count in enumerate(counts)])
        order = torch.cat(rows).long()
        # Permutations from the buffer to the whole tensor and back; None if both are in order.
        self._to_whole = self._to_buffer = None
        if self._longest * ranks.size != self.size or not torch.equal(order, places):
            to_whole = torch.empty_like(order)
            to_whole[order] = places
            to_buffer = torch.zeros(self._longest * ranks.size, dtype=torch.long, device="cpu")
            to_buffer[places] = order
            self._to_whole, self._to_buffer = to_whole.to(device), to_buffer.to(device)

    def gather(self, part: Tensor) -> "Gather":
        """Starts to gather the rows of all ranks."""
        return Gather(self, part.detach())

    def sum_to_parts(self, whole: Tensor) -> Tensor:
        """Reduce-scatter: sums `whole` over ranks in its dtype; returns the rows of this rank."""
        ranks = self.ranks
        if ranks.backends[whole.device.type] == "gloo":
            ranks.agree(self.function, f"the sum of gradients {whole.dtype} {list(whole.shape)}")
        if self._to_buffer is not None:
            whole = whole.index_select(0, self._to_buffer)
        part = whole.new_empty((self._longest, *whole.shape[1:]))
        if part.numel():
            with ranks.failures_of(f"{self.function}: the sum of gradients over ranks"):
                _reduce_scatter(part, whole.contiguous(), group=ranks.group)
        return part[: len(self.own)]


class Gather:
    """An asynchronous all-gather: NCCL runs on its own stream, Gloo in its own threads."""

    def __init__(self, layout: Layout, part: Tensor) -> None:
        self._layout, self._dtype = layout, part.dtype
        if part.dtype.itemsize == 1:  # Gloo does not support fp8
            part = part.view(torch.uint8)
        if len(part) < layout._longest:
            filled = part.new_zeros((layout._longest, *part.shape[1:]))
            filled[: len(part)] = part
            part = filled
        self._part = part.contiguous()  # kept alive, like the buffer, until the gather is done
        ranks = layout.ranks
        self._buffer = part.new_empty((layout._longest * ranks.size, *part.shape[1:]))
        self._work = None
        if self._buffer.numel():
            with ranks.failures_of(f"{layout.function}: the gather of keys"):
                self._work = _all_gather(self._buffer, self._part, group=ranks.group, async_op=True)

    def wait(self) -> Tensor:
        """Returns all rows in global order. Over NCCL the current stream waits, not the host."""
        layout = self._layout
        if self._work is not None:
            with layout.ranks.failures_of(f"{layout.function}: the gather of keys"):
                self._work.wait()
        whole = self._buffer
        if layout._to_whole is not None:
            whole = whole.index_select(0, layout._to_whole)
        return whole.view(self._dtype)
