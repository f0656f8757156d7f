# SPDX-License-Identifier: Apache-2.0
"""The context-parallel batches of Automodel's GLM-5.2 model, made with winnow.

A padded batch becomes one packed row of tokens, of which every rank keeps a contiguous shard, while
the offsets remain those of the whole batch. winnow.automodel exports these functions.
"""

import contextlib
import math
from array import array
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from winnow import _lib
from winnow._arguments import check_size

_TOKENS = ("input_ids", "labels", "position_ids")  # [rows, tokens]
_LENGTHS = ("seq_lens", "seq_lens_padded")  # [rows, documents]
_MAKE_BATCH = "make_glm_dsa_packed_cp_batch_and_ctx"


def _contiguous_cp_indices(
    total_tokens: int, cp_size: int, cp_rank: int, device: torch.device
) -> Tensor:
    """[total_tokens / cp_size] int64: the rows that a rank holds."""
    return _rank_rows(
        "_contiguous_cp_indices", "total_tokens", total_tokens, cp_size, cp_rank, device
    )


def _rank_rows(
    function: str, name: str, tokens: int, size: int, rank: int, device: torch.device
) -> Tensor:
    check_size(function, "cp_size", size, 1)
    if not 0 <= rank < size:
        raise ValueError(f"{function}: cp_rank {rank}: must be from 0 to {size - 1}")
    if tokens % size:
        raise ValueError(f"{function}: {name} {tokens}: must be divisible by cp_size {size}")
    tokens //= size
    return torch.arange(rank * tokens, (rank + 1) * tokens, device=device)


def _slice_thd_chunk_for_cp(
    chunk: dict[str, Tensor],
    cp_group,
    cp_size: int,
    cp_rank: int,
    padding_token_id: int,
    cp_mesh=None,
) -> dict[str, Any]:
    """The shard of a packed batch that a rank holds: its tokens, and offsets of the whole batch.

    Args:
        chunk: input_ids, labels, position_ids [tokens], cu_seqlens; optionally cu_seqlens_padded,
            max_seqlen and padding_mask [tokens], True for padding.
        cp_group: the process group, passed on to the layers.
        cp_size: the number of ranks.
        cp_rank: this rank.
        padding_token_id: the token of padding; used only without a padding_mask.
        cp_mesh: not used but for its size, which must be cp_size.
    """
    name = "_slice_thd_chunk_for_cp"
    if cp_mesh is not None and cp_mesh.size() != cp_size:
        raise ValueError(f"{name}: cp_mesh of {cp_mesh.size()} ranks: must have cp_size {cp_size}")
    return _shard(name, chunk, cp_group, cp_size, cp_rank, padding_token_id)


def _shard(
    function: str, chunk: dict[str, Tensor], group, size: int, rank: int, padding_token_id: int
) -> dict[str, Any]:
    ids = chunk["input_ids"]
    rows = _rank_rows(function, "tokens of input_ids", len(ids), size, rank, ids.device)
    padding = chunk.get("padding_mask")
    if padding is None:
        padding = _padding_of_tokens(ids, padding_token_id)
    # With pipeline parallelism input_ids may be embeddings computed by an earlier stage.
    ids_dtype = ids.dtype if ids.is_floating_point() else torch.int64
    shard = {
        "input_ids": ids[rows].to(ids_dtype),
        "labels": chunk["labels"][rows].to(torch.int64),
        "position_ids": chunk["position_ids"][rows].to(torch.int64),
        "cu_seqlens": chunk["cu_seqlens"].to(torch.int32).contiguous(),
        "qkv_format": "thd",
        "cp_size": size,
        "cp_rank": rank,
        "_glm_dsa_cp_group": group,
        "glm_dsa_cp_query_indices": rows.to(torch.int32),
        "padding_mask": padding[rows].bool(),
    }
    for name in ("max_seqlen", "cu_seqlens_padded"):
        if name in chunk:
            shard[name] = chunk[name].to(torch.int32).contiguous()
    return shard


def _padding_of_tokens(input_ids: Tensor, padding_token_id: int) -> Tensor:
    """Finds padding by token value, which is safe only if all of it is at the end."""
    if input_ids.is_floating_point():
        raise ValueError(
            "_slice_thd_chunk_for_cp: chunk without padding_mask: must be given where input_ids are"
            " embeddings"
        )
    padding = input_ids == padding_token_id
    if (padding[:-1] & ~padding[1:]).any():
        raise ValueError(
            f"_slice_thd_chunk_for_cp: padding_token_id {padding_token_id} also occurs as content: "
            "must be a token of padding alone, or padding_mask must be given"
        )
    return padding


def make_glm_dsa_packed_cp_batch_and_ctx(
    cp_mesh,
    tp_mesh,
    batch,
    loss_mask=None,
    padding_token_id: int = 0,
    num_chunks: int = 1,
    seq_lens_padding_value: int = -1000,
):
    """Turns a padded batch into this rank's shard of a packed one; also returns a no-op context.

    Args:
        cp_mesh: a one-dimensional DeviceMesh, or an object with its get_group() and size(): the
            ranks that share the batch.
        tp_mesh: not used, as in Automodel.
        batch: input_ids, labels and position_ids [rows, tokens], seq_lens and seq_lens_padded
            [rows, documents]; the padded lengths of a row sum to its tokens. seq_lens_padded may be
            None: documents follow each other, and padding is only at the end of a chunk.
        loss_mask: not used.
        padding_token_id: not used: padding is derived from the lengths.
        num_chunks: the number of packed batches, with equally many rows each; if it is more than
            one, tensors have a leading dimension.
        seq_lens_padding_value: the fill value after the last length of a row, and after the last
            offset of a chunk with fewer documents than others.

    Returns:
        contextlib.nullcontext (the class, not an instance) and the batch, with the keys of
        _slice_thd_chunk_for_cp.
    """
    if not all(callable(getattr(cp_mesh, name, None)) for name in ("get_group", "size")):
        raise TypeError(
            f"{_MAKE_BATCH}: cp_mesh is a {type(cp_mesh).__name__}: must be a"
            " torch.distributed.DeviceMesh, or have its get_group() and size()"
        )
    group, size = cp_mesh.get_group(), cp_mesh.size()
    rank = dist.get_rank(group) if dist.is_available() and dist.is_initialized() else 0
    shards = [
        _shard(_MAKE_BATCH, chunk, group, size, rank, padding_token_id)
        for chunk in _thd_chunks(batch, num_chunks, seq_lens_padding_value)
    ]
    if num_chunks <= 1:
        return contextlib.nullcontext, shards[0]
    stacked = {
        key: torch.stack([shard[key] for shard in shards]) if isinstance(value, Tensor) else value
        for key, value in shards[0].items()
    }
    return contextlib.nullcontext, stacked


@dataclass(frozen=True)
class ShardLayout:
    """Where the tokens of a sharded batch came from; the attributes that Automodel's own has."""

    local_token_global_indices: Tensor | None = None
    original_seq_len: int | None = None
    padded_seq_len: int | None = None  # the tokens of all ranks
    input_row_shape: tuple[int, ...] | None = None  # that of the tokens before they were packed
    input_token_stream_positions: Tensor | None = None


def shard_glm_dsa_packed_cp_batch(
    cp_mesh,
    tp_mesh,
    batch,
    loss_mask=None,
    padding_token_id: int = 0,
    num_chunks: int = 1,
    seq_lens_padding_value: int = -1000,
):
    """make_glm_dsa_packed_cp_batch_and_ctx; also returns a ShardLayout, or None for chunks."""
    context, shard = make_glm_dsa_packed_cp_batch_and_ctx(
        cp_mesh, tp_mesh, batch, loss_mask, padding_token_id, num_chunks, seq_lens_padding_value
    )
    if num_chunks > 1:
        return context, shard, None
    rows = tuple(batch["input_ids"].shape[:2])
    return context, shard, ShardLayout(padded_seq_len=math.prod(rows), input_row_shape=rows)


def _thd_chunks(batch, num_chunks: int, fill: int) -> list[dict[str, Tensor]]:
    """Flattens a padded batch into packed ones, on the device of its input_ids."""
    _check_shapes(batch)
    ids, lengths = batch["input_ids"], batch["seq_lens"].tolist()
    rows, row_tokens = ids.shape[:2]
    chunks = max(num_chunks, 1)
    if rows % chunks:
        raise ValueError(
            f"{_MAKE_BATCH}: num_chunks {num_chunks}: must divide the {rows} rows of input_ids"
        )
    if batch.get("seq_lens_padded") is None:
        padded, padding = _padded_at_the_end(lengths, row_tokens, fill, chunks)
    else:
        padded, padding = batch["seq_lens_padded"].tolist(), None
    try:
        layout = _lib.thd_layout(sum(lengths, []), sum(padded, []), rows, row_tokens, fill, chunks)
    except ValueError as error:  # replace the name of the library function
        raise ValueError(f"{_MAKE_BATCH}: {str(error).removeprefix('thd_batch: ')}") from None

    def from_host(numbers: array | bytearray, dtype: torch.dtype) -> Tensor:
        return torch.frombuffer(numbers, dtype=dtype).view(chunks, -1)

    flat = {
        "input_ids": ids.reshape(chunks, -1, *ids.shape[2:]),
        "labels": batch["labels"].reshape(chunks, -1),
        "position_ids": batch["position_ids"].reshape(chunks, -1),
        "cu_seqlens": from_host(layout.cu_seqlens, torch.int32),
        "max_seqlen": from_host(layout.max_seqlen, torch.int32)[:, 0],
        "padding_mask": from_host(layout.padding_mask, torch.bool),
    }
    if layout.cu_seqlens_padded is not None:
        flat["cu_seqlens_padded"] = from_host(layout.cu_seqlens_padded, torch.int32)
    if padding is not None:  # the library counts padding at the end as part of the last document
        cu_seqlens, rows_of_chunk = flat["cu_seqlens"], rows // chunks
        for chunk, tokens in enumerate(padding):
            own = sum(lengths[chunk * rows_of_chunk : (chunk + 1) * rows_of_chunk], [])
            documents = [length for length in own if length != fill]
            cu_seqlens[chunk, len(documents)] -= tokens
            flat["max_seqlen"][chunk] = max(documents)
    on_device = {key: value.to(ids.device) for key, value in flat.items()}
    return [{key: value[chunk] for key, value in on_device.items()} for chunk in range(chunks)]


def _padded_at_the_end(
    seq_lens: list[list[int]], row_tokens: int, fill: int, chunks: int
) -> tuple[list[list[int]], list[int]]:
    """Lengths that fill every row, and the padding added to the last document of every chunk."""
    padded, padding = [list(row) for row in seq_lens], []
    for r, row in enumerate(padded):
        documents = [d for d, length in enumerate(row) if length != fill]
        tokens = sum(row[d] for d in documents)
        is_last = (r + 1) % (len(padded) // chunks) == 0
        if tokens > row_tokens or (tokens < row_tokens and not (is_last and documents)):
            raise ValueError(
                f"{_MAKE_BATCH}: sum of seq_lens[{r}] {tokens}: must be {row_tokens} where"
                " seq_lens_padded is None, or less in the last row of a chunk"
            )
        if is_last:
            padding.append(row_tokens - tokens)
            row[documents[-1]] += padding[-1]
    return padded, padding


def _check_shapes(batch) -> None:
    if missing := [key for key in (*_TOKENS, "seq_lens") if batch.get(key) is None]:
        raise ValueError(f"{_MAKE_BATCH}: batch without {', '.join(missing)}: must be given")
    ids = list(batch["input_ids"].shape)
    if len(ids) < 2 or 0 in ids:
        raise ValueError(f"{_MAKE_BATCH}: input_ids {ids}: must be [rows, tokens], none of them 0")
    documents = batch["seq_lens"].shape[-1:]
    shapes = dict.fromkeys(_TOKENS[1:], ids[:2]) | dict.fromkeys(_LENGTHS, [ids[0], *documents])
    for key, shape in shapes.items():
        if batch.get(key) is not None and list(batch[key].shape) != shape:
            raise ValueError(f"{_MAKE_BATCH}: {key} {list(batch[key].shape)}: must be {shape}")
