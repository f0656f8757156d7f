# SPDX-License-Identifier: Apache-2.0
"""From rollout to training: attention over the keys that an inference engine has selected.

    replay = winnow.rollout.Replay(selections, packing)
    indices, lengths = replay.layer(3)
    scores = winnow.index_topk(index_q, index_k, weights, packing, indices=indices, lengths=lengths)
    out, lse, _ = winnow.sparse_attention(q, kv, indices, lengths=lengths, ...)

Engines return the selection of every token in positions of its own sequence, in any order. Here
they become key rows of a packed batch, for the rows that this rank holds.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from winnow._arguments import Array, check_size, tensor
from winnow.functional import IndexList
from winnow.packing import Packing

_NONE = torch.iinfo(torch.int32).max  # sorts behind all keys


class Replay:
    """The selections of a rollout for a batch; created once per batch.

    The host reads the offsets and rows of the packing, which on a GPU is a synchronisation.

    Args:
        selections: one array per document, [rows, layers, topk] int32 or int64: the positions in
            the document that the token of a row selected. Of a row with n visible keys the first
            min(n, topk) slots are read; -1 in them is no key. A document has as many rows as
            tokens, or one less, since an engine does not run the token that it returns last. Or one
            such array for the whole batch, with the rows of all documents and without padding.
        packing: the batch of training, whose documents are the sequences of the rollout. With a
            group, or with query_rows, results are for the rows of this rank; keys stand in global
            order, as gather_keys returns them.
    """

    def __init__(self, selections: Array | Sequence[Array], packing: Packing) -> None:
        if not isinstance(packing, Packing):
            kind = type(packing).__name__
            raise TypeError(f"Replay: packing is a {kind}: must be a Packing")
        self._packing = packing
        lengths = packing.cu_seqlens.cpu().diff().tolist()
        if isinstance(selections, Sequence):
            self._parts = [_checked(f"selections[{i}]", x) for i, x in enumerate(selections)]
            _check_documents(self._parts, lengths)
            given = [len(part) for part in self._parts]
        else:
            self._parts = [_checked("selections", selections)]
            _check_rows(self._parts[0], sum(lengths))
            given = lengths
        self._find_rows(torch.tensor([*given, 0], device="cpu"))

    def layer(self, layer: int, *, ratio: int = 1) -> IndexList:
        """The keys that every row of this rank selected: ascending, then -1.

        Rows that the engine did not run have no keys. A position that its row does not see is a
        ValueError if the selections are in host memory, and no key if they are on a GPU.

        Args:
            layer: which of the layers of the selections.
            ratio: keys are pools of this many rows, and the selections are of the pools of a
                document.
        """
        layers, topk = self._parts[0].shape[1:]
        check_size("Replay", "layer", layer, 0, layers - 1)
        check_size("Replay", "ratio", ratio, 1)
        device = self._parts[0].device
        positions = torch.cat([part[:, layer] for part in self._parts])
        if len(positions):
            positions = positions.index_select(0, self._source.to(device))
        else:
            positions = positions.new_full((len(self._source), topk), -1)
        visible = (self._tokens // ratio).to(device)[:, None]
        in_use = torch.arange(topk, device=device) < visible
        valid = in_use & (positions >= 0) & (positions < visible)
        if device.type == "cpu":
            self._check_positions(in_use & (positions >= visible), positions, visible, layer)
        begin = self._packing.windows(ratio).begin
        valid, positions = valid.to(begin.device), positions.to(begin.device, torch.int32)
        keys = torch.where(valid, positions + begin[:, None], _NONE).sort(1).values
        return IndexList(keys.masked_fill_(keys == _NONE, -1), valid.sum(1, dtype=torch.int32))

    def _find_rows(self, given: Tensor) -> None:
        """`given` are the rows of every document, and 0 for rows after the last document."""
        packing = self._packing
        padded = packing.cu_seqlens_padded
        offsets = (packing.cu_seqlens if padded is None else padded).cpu().long()
        rows = packing.rows.cpu().long()
        self._document = torch.searchsorted(offsets[1:], rows, right=True)
        self._position = rows - offsets[self._document]
        runs = (self._position >= 0) & (self._position < given[self._document])
        self._tokens = torch.where(runs, self._position + 1, 0)  # up to the one of the row
        first = given.cumsum(0) - given
        self._source = torch.where(runs, first[self._document] + self._position, 0)

    def _check_positions(
        self, wrong: Tensor, positions: Tensor, visible: Tensor, layer: int
    ) -> None:
        if not wrong.any():
            return
        row, slot = wrong.nonzero()[0].tolist()
        raise ValueError(
            f"Replay: selections of document {int(self._document[row])} have"
            f" {int(positions[row, slot])} in row {int(self._position[row])} of layer {layer}: must"
            f" be a position in the document, less than {int(visible[row])}, or -1"
        )


def _checked(name: str, value: Array) -> Tensor:
    x = tensor("Replay", name, value)
    if x.dtype not in (torch.int32, torch.int64):
        kind = str(x.dtype).removeprefix("torch.")
        raise ValueError(f"Replay: {name} has dtype {kind}: must be int32 or int64")
    if x.dim() != 3 or not all(x.shape[1:]):
        raise ValueError(f"Replay: {name} {list(x.shape)}: must be [rows, layers, topk]")
    return x


def _check_rows(selections: Tensor, rows: int) -> None:
    if len(selections) != rows:
        raise ValueError(
            f"Replay: selections {list(selections.shape)}: must have {rows} rows, those of all"
            " documents"
        )


def _check_documents(parts: list[Tensor], lengths: list[int]) -> None:
    if not parts or len(parts) != len(lengths):
        raise ValueError(
            f"Replay: selections of {len(parts)} documents: must be of {len(lengths)}, as packing,"
            " and of one at least"
        )
    first = parts[0]
    for i, (part, length) in enumerate(zip(parts, lengths, strict=True)):
        if part.shape[1:] != first.shape[1:] or part.device != first.device:
            raise ValueError(
                f"Replay: selections[{i}] {list(part.shape)} on {part.device}: must have"
                f" {first.shape[1]} layers and {first.shape[2]} slots on {first.device}, as"
                " selections[0]"
            )
        if len(part) not in (length, length - 1):
            raise ValueError(
                f"Replay: selections[{i}] {list(part.shape)}: must have {length} rows, as its"
                " document, or one less"
            )
