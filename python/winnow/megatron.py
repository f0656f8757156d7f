# SPDX-License-Identifier: Apache-2.0
"""A kernel backend for the DeepSeek sparse attention (DSA) of Megatron-Core.

    import winnow.megatron

    winnow.megatron.register()
    config = MLATransformerConfig(..., dsa_kernel_backend="winnow")

Megatron imports this module by its name and calls the functions whose names begin with
``run_fused_``; names, parameters and layouts are those of its module
``megatron.core.transformer.experimental_attention_variant.dsa_kernels``. A function returns None
for a call that winnow does not take, which then runs on Megatron's own path; a warning gives the
reason, once. docs/megatron.md says what is covered.

In the shapes below sq and sk are the query and key rows of this rank's call, b the batch.
"""

import functools
import warnings
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from winnow import _lib, functional
from winnow._autograd import DenseIndexLoss, IndexTopk, Run
from winnow.functional import Selection

_RUN = Run(backend=None, kernel=None)
# Arguments that say how rows are split over ranks and blocks, which the windows say too.
_LAYOUT = {
    "attn_mask_type",
    "block_size",
    "cp_size",
    "local_packed_cp_query_len",
    "local_packed_cp_query_start",
    "local_packed_cp_rank",
    "packed_seq_params",
    "single_packed_thd_sequence",
    "use_local_indexer_varlen",
    "varlen_is_plain_causal",
}
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def register() -> None:
    """Makes "winnow" a value of Megatron's `dsa_kernel_backend`; more calls change nothing."""
    try:
        from megatron.core import utils
        from megatron.core.transformer.experimental_attention_variant import dsa_kernels
        from megatron.core.transformer.transformer_config import TransformerConfig

        modules = dsa_kernels._BACKEND_MODULE_NAME_BY_BACKEND
        names = utils._VALID_DSA_KERNEL_BACKENDS
        field = TransformerConfig.__dataclass_fields__["dsa_kernel_backend"]
    except (ImportError, AttributeError, KeyError) as error:
        raise RuntimeError(
            "winnow.megatron.register: needs a megatron-core with a table of DSA kernel backends,"
            f" as 0.19.2 has: {error}"
        ) from error
    modules["winnow"] = __name__
    if "winnow" not in names:
        utils._VALID_DSA_KERNEL_BACKENDS = (*names, "winnow")
    choices = get_args(field.type)  # of --dsa-kernel-backend, which is made from the field
    if choices and "winnow" not in choices:
        field.type = Literal[(*choices, "winnow")]


def run_fused_qk_topk(
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    index_topk: int,
    starts: Tensor,
    ends: Tensor,
    *,
    use_relu: bool = True,
    **layout: Any,
) -> tuple[Tensor, Tensor] | None:
    """Selects the keys with the largest indexer scores. No gradient.

    Args:
        q: [sq, b, index_heads, index_dim].
        k: [sk, b, index_dim], the keys of all context-parallel ranks in global order.
        weights: [sq, b, index_heads], all scales folded in.
        index_topk: the number of keys to select.
        starts, ends: [sq], row t sees the keys [starts[t], ends[t]).
        layout: arguments without which the windows say the same.

    Returns:
        topk_indices [b, sq, topk] int32, ascending, followed by -1, and topk_length [b, sq] int32.
    """
    if reason := _why_not_select(q, layout):
        return _decline("run_fused_qk_topk", reason)
    q, weights = _index_queries(q, weights, use_relu)
    return _stacked(_select(q, k, weights, index_topk, starts, ends, with_scores=False))


def run_fused_qk_topk_with_loss(
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    index_topk: int,
    starts: Tensor,
    ends: Tensor,
    *,
    config: Any,
    query: Tensor,
    key: Tensor,
    softmax_scale: float,
    loss_coeff: float,
    pg_collection: Any,
    query_valid_rows: Tensor | None = None,
    calculate_per_token_loss: bool = False,
    use_relu: bool = True,
    **layout: Any,
) -> tuple[Tensor, Tensor, Tensor] | None:
    """run_fused_qk_topk, and the indexer's loss over the selected keys, differentiable in q, k and
    weights.

    The loss needs the log-sum-exp of attention, for which its forward is run here.

    Args:
        query: [sq, b, heads, qk_dim], the heads of this tensor-parallel rank.
        key: [sk, b, 1, qk_dim].
        pg_collection: over the ranks of its group `tp` the target is summed.
        query_valid_rows: [b, sq] bool, the rows that count; by default all.
        calculate_per_token_loss: return the sum over rows, not the mean.
        others: as in run_fused_qk_topk.

    Returns:
        topk_indices, topk_length and the loss, multiplied by loss_coeff.
    """
    v_channels = config.kv_lora_rank
    reason = _why_not_select(q, layout) or _why_not_attend(query, key, v_channels)
    if reason:
        return _decline("run_fused_qk_topk_with_loss", reason)
    q, weights = _index_queries(q, weights, use_relu)
    selections = _select(q, k, weights, index_topk, starts, ends, with_scores=True)
    indices, lengths = _stacked(selections)
    with torch.no_grad():
        _, lse = _attend(query, key, indices, lengths, softmax_scale, v_channels)
    rows = _sparse_loss(selections, query, key, lse, softmax_scale, pg_collection)
    loss = _reduce(rows, loss_coeff, query_valid_rows, calculate_per_token_loss)
    return indices, lengths, loss


def run_fused_absorbed_sparse_attention(
    query: Tensor,
    key: Tensor,
    topk_indices: Tensor,
    softmax_scale: float,
    v_channels: int,
    topk_length: Tensor | None = None,
) -> Tensor | None:
    """Latent attention over selected keys. Differentiable in query and key.

    Args:
        query: [sq, b, heads, qk_dim].
        key: [sk, b, 1, qk_dim]; a value is its first v_channels channels.
        topk_indices: [b, sq, topk]; invalid indices contribute nothing.
        topk_length: [b, sq], the number of slots to use.

    Returns:
        [sq, b, heads, v_channels].
    """
    if reason := _why_not_attend(query, key, v_channels):
        return _decline("run_fused_absorbed_sparse_attention", reason)
    lengths = None if topk_length is None else topk_length.int()
    out, _ = _attend(query, key, topk_indices.int(), lengths, softmax_scale, v_channels)
    return out.transpose(0, 1)


def run_fused_dsa_attention(
    *,
    config: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    up_v_weight: Tensor | None,
    q_indexer: Tensor,
    k_indexer: Tensor,
    indexer_weights: Tensor,
    indexer_topk: int,
    softmax_scale: float,
    loss_coeff: float,
    sparse_loss: bool,
    calculate_per_token_loss: bool,
    absorbed_mla: bool,
    varlen_starts: Tensor | None,
    varlen_ends: Tensor | None,
    key_positions: Tensor | None,
    query_valid_rows: Tensor | None,
    use_relu: bool,
    pg_collection: Any = None,
    **layout: Any,
) -> tuple[Tensor, Tensor | None] | None:
    """Selection, attention, value projection and the indexer's loss of one layer. Differentiable.

    Args:
        query, key: as in run_fused_absorbed_sparse_attention.
        value: None, since a value is part of its key.
        up_v_weight: [heads, v_head_dim, v_channels].
        q_indexer, k_indexer, indexer_weights, indexer_topk: as in run_fused_qk_topk.
        loss_coeff: of the indexer's loss; 0: without loss.
        sparse_loss: the loss is over the selected keys, otherwise over the whole windows.
        varlen_starts, varlen_ends: [sq], row t sees the keys [starts[t], ends[t]).
        key_positions: None, the keys stand in global order.
        others: as in run_fused_qk_topk_with_loss.

    Returns:
        The output [sq, b, heads * v_head_dim] and the loss, None without one.
    """
    v_channels = config.kv_lora_rank
    reason = (
        _why_not_select(q_indexer, layout)
        or _why_not_absorbed(absorbed_mla, value, up_v_weight)
        or _why_not_attend(query, key, v_channels)
        or _why_not_windows(varlen_starts, varlen_ends, key_positions)
    )
    if reason:
        return _decline("run_fused_dsa_attention", reason)
    starts, ends = varlen_starts.int(), varlen_ends.int()
    q_indexer, indexer_weights = _index_queries(q_indexer, indexer_weights, use_relu)
    indexer = (q_indexer, k_indexer, indexer_weights)
    with_scores = loss_coeff != 0 and sparse_loss
    selections = _select(*indexer, indexer_topk, starts, ends, with_scores=with_scores)
    out, lse = _attend(query, key, *_stacked(selections), softmax_scale, v_channels)
    out = torch.einsum("bshc,hdc->sbhd", out, up_v_weight).flatten(2)
    if loss_coeff == 0:
        return out, None
    if sparse_loss:
        rows = _sparse_loss(selections, query, key, lse, softmax_scale, pg_collection)
    else:
        rows = _dense_loss(*indexer, starts, ends, query, key, softmax_scale, pg_collection)
    return out, _reduce(rows, loss_coeff, query_valid_rows, calculate_per_token_loss)


def _index_queries(q: Tensor, weights: Tensor, use_relu: bool) -> tuple[Tensor, Tensor]:
    """q and fp32 weights with which the scores of index_topk are those of Megatron's indexer.

    Without the ReLU a score is linear: that of one head, the weighted sum of all. Its fp32 values
    are split into parts of the dtype of the keys, and x = max(x, 0) - max(-x, 0) makes two heads of
    every part. The gradient of the sum is that of its first part.
    """
    weights = weights.float()
    if use_relu:
        return q, weights
    whole = torch.einsum("sbh,sbhd->sbd", weights, q.float())
    parts = [whole.to(q.dtype)]
    rest = whole.detach()
    for _ in range(2 if q.dtype != torch.float32 else 0):  # 3 x 8 bits are those of fp32
        rest = rest - parts[-1].detach().float()
        parts.append(rest.to(q.dtype))
    heads = torch.stack([*parts, *(-part for part in parts)], dim=2)
    signs = torch.ones(heads.shape[:3], device=q.device)
    signs[:, :, len(parts) :] = -1
    return heads, signs


def _select(
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    topk: int,
    starts: Tensor,
    ends: Tensor,
    with_scores: bool,
) -> list[Selection]:
    """The selection of every slice of the batch; with scores it is differentiable."""
    topk = min(topk, len(k))
    ends = ends.clamp(max=len(k))  # those of padding rows may lie behind all keys
    selections = []
    for i in range(q.shape[1]):
        inputs = (q[:, i], k[:, i], weights[:, i], None, starts, ends, topk, "ascending")
        if with_scores:
            indices, lengths, scores = IndexTopk.apply(*inputs, _RUN, None)
        else:
            with torch.no_grad():
                indices, lengths, scores = torch.ops.winnow.index_topk_forward(*inputs, False)
        selections.append(Selection(indices, scores, lengths))
    return selections


def _stacked(selections: list[Selection]) -> tuple[Tensor, Tensor]:
    """indices [b, sq, topk] and lengths [b, sq]; nothing is copied for a batch of one."""
    if len(selections) == 1:
        return selections[0].indices[None], selections[0].lengths[None]
    return (
        torch.stack([selection.indices for selection in selections]),
        torch.stack([selection.lengths for selection in selections]),
    )


def _attend(
    query: Tensor,
    key: Tensor,
    indices: Tensor,
    lengths: Tensor | None,
    scale: float,
    v_channels: int,
) -> tuple[Tensor, Tensor]:
    """Returns out [b, sq, heads, v_channels] and lse [b, sq, heads]."""
    out, lse, _ = functional.sparse_attention(
        query.transpose(0, 1),
        key[:, :, 0].transpose(0, 1),
        indices,
        v_dim=v_channels,
        scale=scale,
        lengths=lengths,
    )
    return out, lse


def _sparse_loss(
    selections: list[Selection],
    query: Tensor,
    key: Tensor,
    lse: Tensor,
    scale: float,
    pg_collection: Any,
) -> Tensor:
    """[b, sq]: the loss of every row over its selected keys."""
    query, key, lse = query.detach(), key.detach(), lse.detach()
    group = _head_group(pg_collection)
    return torch.stack(
        [
            functional.index_loss(
                selection,
                query[:, i],
                key[:, i, 0],
                lse[i],
                scale=scale,
                head_group=group,
                reduction="none",
            )
            for i, selection in enumerate(selections)
        ]
    )


def _dense_loss(
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    starts: Tensor,
    ends: Tensor,
    query: Tensor,
    key: Tensor,
    scale: float,
    pg_collection: Any,
) -> Tensor:
    """[b, sq]: the loss of every row over its whole window, for which all heads are gathered."""
    query, key = query.detach(), key.detach()
    ends = ends.clamp(max=len(k))
    group = _head_group(pg_collection)
    if group is not None:
        query = query.contiguous()
        heads = [torch.empty_like(query) for _ in range(group.size())]
        torch.distributed.all_gather(heads, query, group=group)
        query = torch.cat(heads, dim=2)
    rows = []
    for i in range(q.shape[1]):
        attention = (query[:, i], key[:, i, 0], None)
        indexer = (q[:, i], k[:, i], weights[:, i], starts, ends)
        loss, _ = DenseIndexLoss.apply(*attention, *indexer, None, scale, 0, _RUN, None, None)
        rows.append(loss)
    return torch.stack(rows)


def _reduce(
    rows: Tensor, loss_coeff: float, query_valid_rows: Tensor | None, per_token: bool
) -> Tensor:
    """The sum over rows, or the mean over those that count: Megatron counts rows with one key."""
    count = rows.numel()
    if query_valid_rows is not None:
        rows = torch.where(query_valid_rows, rows, 0)  # others may hold NaN
        count = query_valid_rows.sum().clamp(min=1)
    loss = rows.sum() * loss_coeff
    return loss if per_token else loss / count


def _head_group(pg_collection: Any) -> Any:
    """The group over whose ranks the heads are split; None for one rank."""
    group = getattr(pg_collection, "tp", None)
    return group if group is not None and group.size() > 1 else None


def _why_not_select(q: Tensor, layout: dict[str, Any]) -> str:
    if unknown := sorted(layout.keys() - _LAYOUT):
        return f"{', '.join(unknown)}: megatron-core 0.19.2 has no such argument"
    if q.shape[-1] % 8:
        return f"dsa_indexer_head_dim {q.shape[-1]}: must be a multiple of 8"
    return _why_not_tensor("the indexer's q", q)


def _why_not_attend(query: Tensor, key: Tensor, v_channels: int) -> str:
    if key.shape[2] != 1:
        return f"key has {key.shape[2]} heads: must have one, as in the absorbed form of MLA"
    for name, dim in (("the dimension of query", query.shape[-1]), ("kv_lora_rank", v_channels)):
        if dim % 8 or dim > 1024:
            return f"{name} {dim}: must be a multiple of 8 up to 1024"
    return _why_not_tensor("query", query)


def _why_not_absorbed(absorbed: bool, value: Tensor | None, up_v_weight: Tensor | None) -> str:
    if not absorbed or value is not None or up_v_weight is None:
        return "attention is not in the absorbed form of MLA, where a value is part of its key"
    return ""


def _why_not_windows(
    starts: Tensor | None, ends: Tensor | None, key_positions: Tensor | None
) -> str:
    if starts is None or ends is None or key_positions is not None:
        return "a mask: a row of winnow sees the keys of one interval [start, end)"
    return ""


def _why_not_tensor(name: str, x: Tensor) -> str:
    if x.dtype not in _DTYPES:
        return f"{name} has dtype {x.dtype}: must be torch.bfloat16, torch.float16 or torch.float32"
    if x.device.type not in ("cpu", "cuda"):
        return f"{name} is on {x.device}: must be on cpu or cuda"
    return _why_not_backend(x.device.type)


_why_not_backend = functools.cache(_lib.backend_why_not)


@functools.cache
def _warn(function: str, reason: str) -> None:
    warnings.warn(
        f"winnow.megatron: {function} is left to Megatron's own path: {reason}", stacklevel=4
    )


def _decline(function: str, reason: str) -> None:
    """Gives the reason at the first such call and returns what Megatron takes for a refusal."""
    _warn(function, reason)
