# SPDX-License-Identifier: Apache-2.0
"""What the functions return."""

from typing import NamedTuple

from torch import Tensor


class Selection(NamedTuple):
    """The result of index_topk; valid slots of a row come first."""

    indices: Tensor  # [tokens, topk]  int32; -1 after the valid slots
    scores: Tensor | None  # [tokens, topk]  as weights, differentiable; -inf in invalid slots
    lengths: Tensor | None  # [tokens]  int32, number of valid slots
    keys: int | None = None  # how many keys there were to select from, those of all ranks


class Attention(NamedTuple):
    """The result of sparse_attention."""

    out: Tensor  # [tokens, heads, v_dim]
    lse: Tensor  # [tokens, heads]  natural log, keys only; -inf for a row without keys
    max_logits: Tensor | None  # [tokens, heads]  the largest logit, not differentiable


class CountedLoss(NamedTuple):
    """A loss and the number of rows that count in it."""

    loss: Tensor  # []  or [tokens] with reduction "none"
    rows: Tensor  # []  int64, how many count


class IndexList(NamedTuple):
    """The keys of every row: valid entries first, then -1."""

    indices: Tensor  # [tokens, topk]  int32
    lengths: Tensor  # [tokens]  int32, number of valid entries


class Quantized(NamedTuple):
    """Rows quantised to e4m3; row r represents scale[r] * values[r]."""

    values: Tensor  # as x, float8_e4m3fn
    scale: Tensor  # x without its last dimension, float32
