# SPDX-License-Identifier: Apache-2.0
"""The context-parallel helpers of NeMo Automodel, implemented with winnow.

A padded batch becomes one packed row of tokens, of which every rank keeps a contiguous shard, while
the offsets remain those of the whole batch; before attention the keys of all ranks are gathered.
winnow.automodel exports these functions too.
"""

import atexit
import contextlib
import math
from array import array
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from winnow import _lib
from winnow._arguments import check_size
from winnow.keys import Keys
from winnow.parallel import Layout, Ranks, check_group

_TOKENS = ("input_ids", "labels", "position_ids")  # [rows, tokens]
_LENGTHS = ("seq_lens", "seq_lens_padded")  # [rows, documents]
_MAKE_BATCH = "make_glm_dsa_packed_cp_batch_and_ctx"


def glm_dsa_cp_enabled(cp_group) -> bool:
    """Whether the group has more than one rank."""
    return _is_distributed(cp_group) and dist.get_world_size(cp_group) > 1


def _is_distributed(cp_group) -> bool:
    return cp_group is not None and dist.is_available() and dist.is_initialized()


def glm_dsa_cp_all_gather(tensor: Tensor, dim: int, cp_group) -> Tensor:
    """Concatenates the shards of all ranks along `dim`; returns the tensor itself with one rank.

    Differentiable: the gradients of all ranks are summed in fp32 and rounded once.
    """
    if _is_distributed(cp_group):
        check_group("glm_dsa_cp_all_gather", "cp_group", cp_group)
    if not glm_dsa_cp_enabled(cp_group):
        return tensor
    part = tensor.movedim(dim, 0)
    layout = _even_layout(cp_group, len(part), part.device)
    gradient = "with" if torch.is_grad_enabled() and tensor.requires_grad else "without"
    signature = f"tensor {tensor.dtype} {list(tensor.shape)}, dim {dim}, {gradient} gradient"
    layout.ranks.agree_on_keys(layout.function, part.device, signature, "")
    return Keys(part, layout).whole.movedim(0, dim)


@lru_cache(maxsize=16)  # all layers of a model use the same ones
def _even_layout(cp_group, rows: int, device: torch.device) -> Layout:
    """The layout in which every rank has `rows` rows."""
    ranks = Ranks(cp_group)
    begins = range(0, rows * ranks.size, rows) if rows else [0] * ranks.size
    parts = [torch.arange(begin, begin + rows) for begin in begins]
    return Layout(ranks, parts, device, "glm_dsa_cp_all_gather")


# Cached layouts hold a process group, which must not outlive the interpreter.
atexit.register(_even_layout.cache_clear)


def _contiguous_cp_indices(
    total_tokens: int, cp_size: int, cp_rank: int, device: torch.device
) -> Tensor:
    """[total_tokens / cp_size] int64: the rows that a rank holds."""
    name = "_contiguous_cp_indices"
    check_size(name, "cp_size", cp_size, 1)
    if not 0 <= cp_rank < cp_size:
        raise ValueError(f"{name}: cp_rank {cp_rank}: must be from 0 to {cp_size - 1}")
    if total_tokens % cp_size:
        raise ValueError(
            f"{name}: total_tokens {total_tokens}: must be divisible by cp_size {cp_size}"
        )
    tokens = total_tokens // cp_size
    return torch.arange(cp_rank * tokens, (cp_rank + 1) * tokens, device=device)


def _slice_thd_chunk_for_cp(
    chunk: dict[str, Tensor], cp_group, cp_size: int, cp_rank: int, padding_token_id: int
) -> dict[str, Any]:
    """The shard of a packed batch that a rank holds: its tokens, and offsets of the whole batch.

    Args:
        chunk: input_ids, labels, position_ids [tokens], cu_seqlens; optionally cu_seqlens_padded,
            max_seqlen and padding_mask [tokens], True for padding.
        cp_group: the process group, passed on to the layers.
        cp_size: the number of ranks.
        cp_rank: this rank.
        padding_token_id: the token of padding; used only without a padding_mask.
    """
    ids = chunk["input_ids"]
    rows = _contiguous_cp_indices(len(ids), cp_size, cp_rank, ids.device)
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
        "cp_size": cp_size,
        "cp_rank": cp_rank,
        "_glm_dsa_cp_group": cp_group,
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
            [rows, documents]; the padded lengths of a row sum to its tokens.
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
        _slice_thd_chunk_for_cp(chunk, group, size, rank, padding_token_id)
        for chunk in _thd_chunks(batch, num_chunks, seq_lens_padding_value)
    ]
    if num_chunks <= 1:
        return contextlib.nullcontext, shards[0]
    stacked = {
        key: torch.stack([shard[key] for shard in shards]) if isinstance(value, Tensor) else value
        for key, value in shards[0].items()
    }
    return contextlib.nullcontext, stacked


def _thd_chunks(batch, num_chunks: int, fill: int) -> list[dict[str, Tensor]]:
    """Flattens a padded batch into packed ones, on the device of its input_ids."""
    _check_shapes(batch)
    ids, lengths = batch["input_ids"], (batch[key].flatten() for key in _LENGTHS)
    rows, row_tokens = ids.shape[:2]
    chunks = max(num_chunks, 1)
    if rows % chunks:
        raise ValueError(
            f"{_MAKE_BATCH}: num_chunks {num_chunks}: must divide the {rows} rows of input_ids"
        )
    try:
        layout = _lib.thd_layout(*(x.tolist() for x in lengths), rows, row_tokens, fill, chunks)
    except ValueError as error:  # replace the name of the library function
        raise ValueError(f"{_MAKE_BATCH}: {str(error).removeprefix('thd_batch: ')}") from None

    def from_host(numbers: array | bytearray, dtype: torch.dtype) -> Tensor:
        return torch.frombuffer(numbers, dtype=dtype).view(chunks, -1).to(ids.device)

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
    return [{key: value[chunk] for key, value in flat.items()} for chunk in range(chunks)]


def _check_shapes(batch) -> None:
    if missing := [key for key in (*_TOKENS, *_LENGTHS) if batch.get(key) is None]:
        raise ValueError(f"{_MAKE_BATCH}: batch without {', '.join(missing)}: must be given")
    ids = list(batch["input_ids"].shape)
    if len(ids) < 2 or 0 in ids:
        raise ValueError(f"{_MAKE_BATCH}: input_ids {ids}: must be [rows, tokens], none of them 0")
    documents = batch["seq_lens"].shape[-1:]
    shapes = dict.fromkeys(_TOKENS[1:], ids[:2]) | dict.fromkeys(_LENGTHS, [ids[0], *documents])
    for key, shape in shapes.items():
        if list(batch[key].shape) != shape:
            raise ValueError(f"{_MAKE_BATCH}: {key} {list(batch[key].shape)}: must be {shape}")


def dsv4_cp_local_seq_multiple(model_or_config) -> int:
    """The multiple that the rows of a DeepSeek-V4 rank must be, so that no pool is split.

    Pools of ratio 4 overlap with their neighbours, so they count in pairs. 128 for the published
    models.

    Args:
        model_or_config: has `compress_ratios`, or a `config` that has them; 0 means no pools.
    """
    config = getattr(model_or_config, "config", model_or_config)
    ratios = (int(ratio) for ratio in getattr(config, "compress_ratios", None) or ())
    return math.lcm(*(2 * ratio if ratio == 4 else ratio for ratio in ratios if ratio > 0))
