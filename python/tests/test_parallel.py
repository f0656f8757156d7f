# SPDX-License-Identifier: Apache-2.0
"""Context parallel over Gloo with ranks as processes: N ranks against one rank.

Functions whose names begin with an underscore run in the ranks.
"""

import contextlib
import io
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from cases import GRAD_LIMIT, Random, assert_equal, assert_within, bf16, f16, f32, f64, offsets
from ranks import Ranks
from torch.utils.checkpoint import checkpoint

import winnow
from winnow.parallel import Layout

SIZES = (1, 2, 3, pytest.param(4, marks=pytest.mark.slow), 8)
SCALE = 0.25
HEADS, QK_DIM, V_DIM, INDEX_HEADS, INDEX_DIM, TOPK = 2, 24, 16, 2, 8, 6


class Batch(NamedTuple):
    lengths: list[int]
    slots: list[int] | None = None  # lengths with padding
    behind: int = 0  # rows after the last document

    @property
    def tokens(self) -> int:
        return sum(self.slots or self.lengths) + self.behind

    def packing(self, **options: Any) -> winnow.Packing:
        padded = None if self.slots is None else offsets(self.slots)
        return winnow.Packing(offsets(self.lengths), padded, tokens=self.tokens, **options)


BATCHES = {
    "even": Batch([48]),
    "one_document": Batch([37]),
    "packed": Batch([5, 0, 17, 1, 12]),
    "padded": Batch([5, 0, 17, 9], [8, 2, 17, 13], 4),
    "fewer_rows_than_ranks": Batch([2, 1]),
    "nothing": Batch([]),
}


@pytest.fixture(scope="module", params=SIZES)
def ranks(request, tmp_path_factory):
    store = tmp_path_factory.mktemp("ranks") / "store"
    with Ranks(request.param, str(store)) as started:
        yield started


@pytest.fixture(scope="module")
def four_ranks(tmp_path_factory):
    with Ranks(4, str(tmp_path_factory.mktemp("ranks") / "store")) as started:
        yield started


def whole(results: list[dict[str, Any]], name: str, rows: str = "rows") -> torch.Tensor:
    """The rows of all ranks in global order; asserts that every row is present once."""
    order = torch.cat([result[rows] for result in results]).long()
    assert_equal(order.sort().values, torch.arange(len(order)))
    parts = torch.cat([result[name] for result in results])
    return torch.empty_like(parts).index_copy_(0, order, parts)


def _leaves(packing: winnow.Packing, tokens: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The rows of this rank of inputs that do not depend on the number of ranks."""
    random = Random(tokens)
    accumulator = f64 if dtype == f64 else f32
    inputs = {
        "q": random.normal(tokens, HEADS, QK_DIM, dtype=dtype),
        "kv": random.normal(tokens, QK_DIM, dtype=dtype),
        "index_q": random.normal(tokens, INDEX_HEADS, INDEX_DIM, dtype=dtype),
        "index_k": random.normal(tokens, INDEX_DIM, dtype=dtype),
        "weights": random.normal(tokens, INDEX_HEADS, dtype=accumulator),
        "d_out": random.normal(tokens, HEADS, V_DIM, dtype=dtype),
    }
    return {name: packing.shard(x).requires_grad_(name != "d_out") for name, x in inputs.items()}


def _layer(packing, q, kv, index_q, index_k, weights, regather=False):
    keys = winnow.gather_keys(kv, packing, regather=regather)
    index_keys = winnow.gather_keys(index_k, packing, regather=regather)
    selection = winnow.index_topk(index_q, index_keys, weights, packing, topk=TOPK)
    out, lse, _ = winnow.sparse_attention(q, keys, selection, v_dim=V_DIM, scale=SCALE)
    loss = winnow.index_loss(selection, q, keys, lse, scale=SCALE, reduction="none")
    return selection, out, lse, loss


def _train(batch: Batch, dtype: torch.dtype, group: Any = "world", **options: Any):
    """Runs a layer forward and backward; on one rank if `group` is None."""
    regather = options.pop("regather", False)
    group = dist.group.WORLD if group == "world" else group
    packing = batch.packing(group=group, **options)
    leaves = _leaves(packing, batch.tokens, dtype)
    d_out = leaves.pop("d_out")
    selection, out, lse, loss = _layer(packing, **leaves, regather=regather)
    ((out * d_out).sum() + loss.sum()).backward()
    results = {"rows": packing.rows, "out": out, "lse": lse, "loss": loss} | selection._asdict()
    results |= {f"d_{name}": x.grad for name, x in leaves.items()}
    return {name: x.detach() for name, x in results.items() if name != "keys"}


FORWARD = ("out", "lse", "loss", "indices", "scores", "lengths")
KEY_GRADIENTS = ("d_kv", "d_index_k")


@pytest.mark.parametrize("sharding", ["contiguous", "zigzag"])
@pytest.mark.parametrize("name", list(BATCHES))
def test_ranks_compute_what_one_computes(ranks, name, sharding):
    batch = BATCHES[name]
    for dtype in (f32, bf16):
        results = ranks(_train, batch, dtype, "world", sharding=sharding)
        expected = _train(batch, dtype, None)
        for part in (*FORWARD, "d_q", "d_index_q", "d_weights"):
            assert_equal(whole(results, part), expected[part])
        for part in KEY_GRADIENTS:
            assert_within(whole(results, part), expected[part].double(), GRAD_LIMIT[dtype])


def _plain_sums(group: Any = "world") -> dict[str, torch.Tensor]:
    """Losses whose gradients are expanded scalars; on a rank without rows these have no elements
    and strides of 0."""
    batch, group = BATCHES["fewer_rows_than_ranks"], dist.group.WORLD if group == "world" else group
    packing = batch.packing(group=group)
    leaves = _leaves(packing, batch.tokens, f32)
    leaves.pop("d_out")
    selection, out, lse, loss = _layer(packing, **leaves)
    w_v = torch.ones(HEADS, 8, V_DIM)
    scores = selection.scores.masked_fill(selection.indices < 0, 0)
    (out.sum() + lse.sum() + loss.sum() + scores.sum()).backward()
    winnow.value_projection(out.detach().requires_grad_(), w_v).sum().backward()
    return {"rows": packing.rows} | {f"d_{name}": x.grad for name, x in leaves.items()}


def test_ranks_without_rows_go_backward(ranks):
    results, expected = ranks(_plain_sums), _plain_sums(None)
    for part in ("d_q", "d_index_q", "d_weights"):
        assert_equal(whole(results, part), expected[part])
    for part in KEY_GRADIENTS:
        assert_within(whole(results, part), expected[part].double(), GRAD_LIMIT[f32])


def test_gathering_again_gives_the_same_bits(ranks):
    calls = [ranks(_train, BATCHES["padded"], bf16, "world", regather=x) for x in (False, True)]
    for kept, again in zip(*calls, strict=True):
        for part in kept:
            assert_equal(kept[part], again[part])


def _gathered_again() -> tuple[int, int]:
    """Counts the gathers of a step without and with `regather`."""
    counts, gather = [], Layout.gather
    for regather in (False, True):
        calls = []
        Layout.gather = lambda layout, x, calls=calls: (calls.append(1), gather(layout, x))[1]
        try:
            _train(BATCHES["packed"], f32, regather=regather)
        finally:
            Layout.gather = gather
        counts.append(len(calls))
    return tuple(counts)


def test_backward_gathers_again_if_asked(two_ranks):
    assert two_ranks(_gathered_again) == [(2, 4)] * 2


def _dense(batch: Batch, group: Any = "world", **options: Any) -> dict[str, torch.Tensor]:
    group = dist.group.WORLD if group == "world" else group
    packing = batch.packing(group=group)
    leaves = _leaves(packing, batch.tokens, f32)
    q, kv, index_q, index_k, weights, _ = leaves.values()
    kv, index_keys = (winnow.gather_keys(x, packing, **options) for x in (kv, index_k))
    loss = winnow.dense_index_loss(
        q, kv, index_q, index_keys, weights, packing, scale=SCALE, reduction="none"
    )
    loss.sum().backward()
    results = {"rows": packing.rows, "loss": loss.detach(), "d_index_k": index_k.grad}
    return results | {"d_index_q": index_q.grad, "d_weights": weights.grad}


@pytest.mark.parametrize("regather", [False, True])
def test_warm_up(ranks, regather):
    for batch in (BATCHES["packed"], BATCHES["padded"]):
        expected = _dense(batch, None)
        results = ranks(_dense, batch, "world", regather=regather)
        for part in ("loss", "d_index_q", "d_weights"):
            assert_equal(whole(results, part), expected[part])
        assert_within(whole(results, "d_index_k"), expected["d_index_k"].double(), GRAD_LIMIT[f32])


def _rows_and_heads(batch: Batch, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """A layer on 2 x 2 ranks: rank 2 r + h has half r of the rows and half h of the heads."""
    row, head = divmod(dist.get_rank(), 2)
    row_groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    head_groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    packing = batch.packing(group=row_groups[head])
    leaves = _leaves(packing, batch.tokens, dtype)
    leaves["q"] = leaves["q"].detach()[:, head : head + 1].contiguous().requires_grad_()
    d_out = leaves.pop("d_out")[:, head : head + 1]
    q, kv, index_q, index_k, weights = leaves.values()
    keys, index_keys = (winnow.gather_keys(x, packing) for x in (kv, index_k))
    selection = winnow.index_topk(index_q, index_keys, weights, packing, topk=TOPK)
    out, lse, _ = winnow.sparse_attention(
        q, keys, selection.indices, v_dim=V_DIM, scale=SCALE, lengths=selection.lengths
    )
    loss = winnow.index_loss(
        selection, q, keys, lse, scale=SCALE, head_group=head_groups[row], reduction="none"
    )
    ((out * d_out).sum() + loss.sum()).backward()
    recall = winnow.metrics.recall_of_mass(
        selection, q, keys, lse, scale=SCALE, head_group=head_groups[row]
    )
    results = {"rows": packing.rows, "out": out, "loss": loss, "recall": recall}
    results |= {f"d_{name}": x.grad for name, x in leaves.items()}
    return {name: x.detach() for name, x in results.items()}


@pytest.mark.parametrize("dtype", [f32, bf16])
def test_rows_and_heads_split_together(four_ranks, dtype):
    batch = BATCHES["packed"]
    results, expected = four_ranks(_rows_and_heads, batch, dtype), _train(batch, dtype, None)
    halves = [results[head::2] for head in range(2)]  # by heads, each with all rows
    for half in halves:
        assert_within(whole(half, "loss"), expected["loss"].double(), 1e-5)
        # The selected keys are all keys of the attention that gave lse.
        recall = whole(half, "recall")
        assert_within(recall[recall.isfinite()], torch.ones_like(recall.double()), 1e-5)
        for part in ("d_index_q", "d_index_k", "d_weights"):
            assert_within(whole(half, part), expected[part].double(), GRAD_LIMIT[dtype])
    for part in ("out", "d_q"):
        joined = torch.cat([whole(half, part) for half in halves], 1)
        assert_within(joined, expected[part].double(), GRAD_LIMIT[dtype])
    d_kv = sum(whole(half, "d_kv").double() for half in halves)
    assert_within(d_kv, expected["d_kv"].double(), GRAD_LIMIT[dtype])


def _replay(batch: Batch, group: Any = "world") -> dict[str, torch.Tensor]:
    """Replay of given indices, and fp8 keys with their scales."""
    group = dist.group.WORLD if group == "world" else group
    packing = batch.packing(group=group)
    _, _, index_q, index_k, weights, _ = _leaves(packing, batch.tokens, f32).values()
    keys = winnow.gather_keys(index_k, packing)
    indices = packing.shard(Random(3).lists(batch.tokens, 4, batch.tokens))
    scores = winnow.index_topk(index_q, keys, weights, packing, indices=indices).scores
    scores.masked_fill(scores.isinf(), 0).sum().backward()
    q8, k8 = winnow.quantize_fp8(index_q), winnow.quantize_fp8(index_k)
    with torch.no_grad():
        keys8, scale8 = (winnow.gather_keys(x, packing) for x in k8)
        fp8 = winnow.index_topk(
            q8.values, keys8, weights * q8.scale, packing, topk=TOPK, k_scale=scale8
        )
        silent = winnow.index_topk(
            index_q, keys, weights, packing, topk=TOPK, with_scores=False, order="by_score"
        )
    results = {"rows": packing.rows, "scores": scores.detach(), "d_index_k": index_k.grad}
    return results | {"fp8": fp8.indices, "fp8_scores": fp8.scores, "silent": silent.indices}


def test_replay_and_fp8(ranks):
    batch = BATCHES["padded"]
    results, expected = ranks(_replay, batch), _replay(batch, None)
    for part in ("scores", "fp8", "fp8_scores", "silent"):
        assert_equal(whole(results, part), expected[part])
    assert_within(whole(results, "d_index_k"), expected["d_index_k"].double(), GRAD_LIMIT[f32])


def _pools(batch: Batch, sharding: str, group: Any = "world") -> dict[str, torch.Tensor]:
    """DeepSeek-V4: a window of rows, then pools of 4 rows selected by the indexer."""
    group, ratio = dist.group.WORLD if group == "world" else group, 4
    packing = batch.packing(group=group, sharding=sharding, multiple=8)
    leaves = _leaves(packing, batch.tokens, f32)
    q, kv, index_q, index_k, weights, _ = leaves.values()
    pools = kv[packing.pool_rows(ratio)].mean(1)
    index_pools = index_k[packing.pool_rows(ratio)].mean(1)
    keys = winnow.gather_keys(torch.cat([kv, pools]), packing, ratio=(1, ratio))
    index_keys = winnow.gather_keys(index_pools, packing, ratio=ratio)
    selection = winnow.index_topk(index_q, index_keys, weights, packing, topk=2, ratio=ratio)
    options = {"window": 3, "ratio": ratio, "key_offset": batch.tokens}
    chosen = winnow.window_indices(packing, pool_ids=selection.indices, **options)
    out, lse, _ = winnow.sparse_attention(
        q, keys, chosen.indices, lengths=chosen.lengths, sink=torch.tensor([0.5, -1.0])
    )
    loss = winnow.index_loss(
        selection, q, keys, lse, scale=QK_DIM**-0.5, key_offset=batch.tokens, reduction="sum"
    )
    (out.square().sum() + loss).backward()
    assert packing.pool_rows(ratio) is packing.pool_rows(ratio)  # cached: no second synchronisation
    layout = packing.layout(ratio)
    results = {"rows": packing.rows, "out": out, "chosen": chosen.indices, "pooled": pools}
    results["pools"] = torch.arange(len(pools)) if layout is None else layout.own
    results["all"] = winnow.window_indices(packing, **options).indices
    results |= {f"d_{name}": leaves[name].grad for name in ("q", "kv", "index_k", "index_q")}
    return {name: x.detach() for name, x in results.items()}


@pytest.mark.parametrize("sharding", ["contiguous", "zigzag"])
def test_pools(ranks, sharding):
    for batch in (Batch([70]), Batch([21, 3, 40, 9], [24, 3, 44, 17], 5)):
        results, expected = ranks(_pools, batch, sharding), _pools(batch, sharding, None)
        for part in ("out", "chosen", "all", "d_q", "d_index_q"):
            assert_equal(whole(results, part), expected[part])
        assert_equal(whole(results, "pooled", "pools"), expected["pooled"])
        for part in ("d_kv", "d_index_k"):
            assert_within(whole(results, part), expected[part].double(), GRAD_LIMIT[f32])


def _weighted_by_rank() -> list[torch.Tensor]:
    """The loss of rank r is r + 1 times the sum of all keys, through an operator that returns every
    key and through the gathered keys themselves."""
    packing = Batch([6]).packing(group=dist.group.WORLD)
    gradients = []
    for dtype in (bf16, f64):
        local = packing.shard(Random(1).normal(6, 8, dtype=dtype)).requires_grad_()
        keys = winnow.gather_keys(local, packing)
        q, indices = torch.zeros(6, 1, 8, dtype=dtype), torch.arange(6).int()[:, None]
        every_key = winnow.sparse_attention(q, keys, indices).out
        for x in (every_key, keys.whole):
            (gradient,) = torch.autograd.grad((dist.get_rank() + 1) * x.sum(), local)
            gradients.append(gradient)
    return gradients


def test_gradients_of_all_ranks_are_added(ranks):
    total = sum(range(1, ranks.size + 1))  # 3 with two ranks
    for gradients in ranks(_weighted_by_rank):
        for x in gradients:
            assert_equal(x, torch.full_like(x, total))


def _sum_beyond_bf16(dtype: torch.dtype, half: float) -> torch.Tensor:
    """Rank 0 contributes 1 + half, rank 1 half, where half is half an ulp of 1."""
    packing = Batch([1]).packing(group=dist.group.WORLD)
    local = torch.ones(packing.tokens, 8, dtype=dtype).requires_grad_()
    keys = winnow.gather_keys(local, packing)
    d_out = {0: [1, half], 1: [half, 0]}[dist.get_rank()]
    q, indices = torch.zeros(2, 1, 8, dtype=dtype), torch.zeros(2, 1, dtype=torch.int32)
    out = winnow.sparse_attention(q, keys, indices).out
    out.backward(torch.tensor(d_out, dtype=dtype)[:, None, None].expand_as(out))
    return local.grad


@pytest.mark.parametrize(("dtype", "half"), [(bf16, 2**-8), (f16, 2**-11)])
def test_gradients_are_rounded_after_the_sum_over_ranks(two_ranks, dtype, half):
    # If the terms were rounded first, they would be 1 and half, and their sum 1.
    gradient = torch.cat(two_ranks(_sum_beyond_bf16, dtype, half))
    assert_equal(gradient, torch.full((1, 8), 1 + 2 * half, dtype=dtype))


def _properties() -> None:
    world = dist.group.WORLD
    batch = BATCHES["padded"]
    packing = batch.packing(group=world)
    keys = winnow.gather_keys(packing.rows, packing)
    assert packing.batch_tokens == batch.tokens and packing.tokens == len(packing.rows)
    assert_equal(keys.whole, torch.arange(batch.tokens).int())
    assert keys.whole.data_ptr() == keys.values.data_ptr()  # gathered once
    assert (keys.whole is keys.local) == (dist.get_world_size() == 1)
    x = torch.arange(2.0 * batch.tokens).view(-1, 2)
    assert_equal(packing.shard(x), x[packing.rows.long()])
    many = winnow.gather_keys(packing.shard(x)[:, None, :, None], packing)
    assert_equal(many.whole, x[:, None, :, None])
    windows = batch.packing().windows()
    for mine, all_rows in zip(packing.windows(), windows, strict=True):
        assert_equal(mine, packing.shard(all_rows))


def _ratios_in_a_list() -> None:
    packing = winnow.Packing(offsets([12]), group=dist.group.WORLD, multiple=2)
    rows = packing.rows
    x = torch.cat([rows, rows[packing.pool_rows(2)][:, 0] + 100])
    # A list on some ranks and a tuple on others are equal.
    ratio = [1, 2] if dist.get_rank() else (1, 2)
    expected = [*range(12), *range(100, 112, 2)]
    assert winnow.gather_keys(x, packing, ratio=ratio).whole.tolist() == expected
    assert_equal(packing.shard(torch.tensor(expected).int(), ratio), x)


def test_ratios_in_a_list(two_ranks):
    two_ranks(_ratios_in_a_list)


def _on_another_default_device() -> None:
    cu_seqlens, x = offsets([12, 1]), torch.arange(13)
    with torch.device("meta"):  # cuda, as a rule
        packing = winnow.Packing(cu_seqlens, group=dist.group.WORLD, multiple=2)
        keys = winnow.gather_keys(packing.shard(x), packing).whole
        pools = winnow.gather_keys(packing.shard(x[:6], 2), packing, ratio=2).whole
        empty = winnow.Packing(cu_seqlens[:1], group=dist.group.WORLD)
    assert_equal(keys, x)
    assert_equal(pools, x[:6])
    assert empty.tokens == 0


def test_the_default_device_changes_nothing(two_ranks):
    two_ranks(_on_another_default_device)


def _without_gradients() -> None:
    packing = BATCHES["even"].packing(group=dist.group.WORLD)
    leaves = _leaves(packing, BATCHES["even"].tokens, f32)
    with torch.no_grad():
        keys = winnow.gather_keys(leaves["kv"], packing)
    q, indices = leaves["q"], torch.zeros(packing.tokens, 1, dtype=torch.int32)
    winnow.sparse_attention(q, keys, indices, v_dim=V_DIM, scale=SCALE).out.sum().backward()
    assert q.grad is not None and leaves["kv"].grad is None


def test_keys_gathered_without_gradients_get_none(ranks):
    ranks(_without_gradients)


def test_properties(ranks):
    ranks(_properties)


def _checkpointed(context: str) -> dict[bool, dict[str, torch.Tensor]]:
    packing = BATCHES["packed"].packing(group=dist.group.WORLD)
    results = {}
    for recompute in (False, True):
        leaves = _leaves(packing, BATCHES["packed"].tokens, f32)
        d_out = leaves.pop("d_out")
        options = {"context_fn": winnow.keep_selections} if context == "keep_selections" else {}
        if recompute:
            _, out, _, loss = checkpoint(
                _layer, packing, *leaves.values(), use_reentrant=False, **options
            )
        else:
            _, out, _, loss = _layer(packing, **leaves)
        ((out * d_out).sum() + loss.sum()).backward()
        results[recompute] = {name: x.grad for name, x in leaves.items()}
    return results


@pytest.mark.parametrize("context", ["plain", "keep_selections"])
def test_checkpointing_gives_the_same_bits(two_ranks, context):
    for results in two_ranks(_checkpointed, context):
        for name, gradient in results[False].items():
            assert_equal(results[True][name], gradient)


def _compiled() -> None:
    batch = BATCHES["packed"]
    packing = batch.packing(group=dist.group.WORLD)
    gradients = []
    for layer in (_layer, torch.compile(_layer, backend="eager")):
        leaves = _leaves(packing, batch.tokens, f32)
        d_out = leaves.pop("d_out")
        _, out, _, loss = layer(packing, **leaves)
        ((out * d_out).sum() + loss.sum()).backward()
        gradients.append([out.detach(), *(x.grad for x in leaves.values())])
    for eager, compiled in zip(*gradients, strict=True):
        assert_equal(compiled, eager)


def test_compiled(two_ranks):
    two_ranks(_compiled)


def _ask() -> str:
    packing = winnow.Packing(offsets([12]), group=dist.group.WORLD)
    keys = winnow.gather_keys(torch.ones(packing.tokens, 8, requires_grad=True), packing)
    q = torch.ones(packing.tokens, 1, 8, requires_grad=True)
    return winnow.why_not(winnow.sparse_attention, q, keys, torch.zeros(packing.tokens, 1).int())


def test_gathered_keys_can_be_asked_about(two_ranks):
    assert two_ranks(_ask) == ["", ""]


EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "context_parallel.py"


def assert_agrees(printed: str) -> None:
    """Of the example: all errors but those of sums over ranks are 0."""
    first, *lines = printed.splitlines()
    rows, tokens = re.fullmatch(r"2 ranks, (\d+) of (\d+) rows on rank 0", first).groups()
    assert int(tokens) // 2 <= int(rows) <= (int(tokens) + 1) // 2
    errors = {line.split(" relative")[0].rstrip(): float(line.split()[-1]) for line in lines}
    assert len(errors) == 7
    for name, error in errors.items():
        assert error <= (
            GRAD_LIMIT[bf16] if name in ("gradient of kv", "gradient of index_k") else 0
        )


def _example() -> str:
    """What the example prints on this rank, which has its process group; with fewer rows."""
    main = runpy.run_path(str(EXAMPLE))["main"]
    main.__globals__["TOKENS"] = 1101
    output = io.StringIO()
    with (
        mock.patch.object(dist, "init_process_group"),
        mock.patch.object(dist, "destroy_process_group"),
        mock.patch.object(sys, "argv", [str(EXAMPLE)]),
        contextlib.redirect_stdout(output),
    ):
        main()
    return output.getvalue()


def test_the_example_agrees_with_one_rank(two_ranks):
    first, second = two_ranks(_example)
    assert_agrees(first)
    assert not second


@pytest.mark.slow
def test_torchrun_starts_the_example():
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [*torchrun, "--nproc-per-node", "2", str(EXAMPLE)],
        capture_output=True,
        text=True,
        timeout=120,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    assert_agrees(done.stdout)
