# SPDX-License-Identifier: Apache-2.0
"""Checks of keys, packings and selections against each other."""

from torch import Tensor

from winnow._arguments import Array, tensor
from winnow.keys import Keys
from winnow.packing import Packing
from winnow.results import Selection


def check_packing(function: str, packing: Packing) -> None:
    if not isinstance(packing, Packing):
        raise TypeError(f"{function}: packing is a {type(packing).__name__}: must be a Packing")


def check_rows(function: str, packing: Packing, q: Tensor) -> None:
    check_packing(function, packing)
    if q.dim() and packing.tokens != q.shape[0]:
        raise ValueError(
            f"{function}: packing of {packing.tokens} rows: must have {q.shape[0]}, as q"
        )


def check_keys(
    function: str, name: str, packing: Packing, ratio: int, local: Tensor, keys: Keys | None
) -> None:
    """Refuses the keys of one rank: windows of a rank refer to the keys of all ranks."""
    must_have, has = packing.keys(ratio), rows_of(local, keys)
    if must_have is not None and has != must_have:
        raise ValueError(
            f"{function}: {name} of {has} rows: must have {must_have}, those of all ranks, as"
            " gather_keys returns them"
        )


def check_selection(function: str, selection: Selection) -> None:
    if not isinstance(selection, Selection):
        raise TypeError(
            f"{function}: selection is a {type(selection).__name__}: must be a Selection, as"
            " index_topk returns it"
        )


def check_selected_keys(
    function: str, selection: Selection, kv_rows: int, key_offset: int = 0, exact: bool = False
) -> None:
    """Refuses a kv without the keys that were selected from, such as that of one rank."""
    check_selection(function, selection)
    if selection.keys is None:
        return
    must_have = key_offset + selection.keys
    if kv_rows < must_have or (exact and kv_rows > must_have):
        raise ValueError(
            f"{function}: kv of {kv_rows} rows: must have {must_have}, the keys that the selection"
            " was made from (gather_keys returns those of all ranks)"
        )


def rows_of(local: Tensor, keys: Keys | None = None) -> int:
    """The number of keys, those of all ranks included."""
    if keys is not None and keys.gathering is not None:
        return keys.gathering.layout.size
    return local.shape[-2] if local.dim() > 1 else local.numel()


def local_and_keys(function: str, name: str, value: Array | Keys) -> tuple[Tensor, Keys | None]:
    """Returns the keys of this rank, and the Keys object if there are other ranks."""
    if isinstance(value, Keys):
        return value.local, value if value.gathering is not None else None
    return tensor(function, name, value), None


def values_of(function: str, name: str, value: Array | Keys) -> Tensor:
    return value.values if isinstance(value, Keys) else tensor(function, name, value)
