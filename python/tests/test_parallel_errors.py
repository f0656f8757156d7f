# SPDX-License-Identifier: Apache-2.0
"""Context parallel over Gloo: errors if ranks differ, have invalid arguments, or one is lost.

Functions whose names begin with an underscore run in the ranks.
"""

import contextlib
import multiprocessing
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import bf16, f32, offsets
from ranks import Failure, Ranks

import winnow
from winnow.parallel import Ranks as Group


def _gather() -> None:
    packing = winnow.Packing(offsets([12]), group=dist.group.WORLD)
    assert winnow.gather_keys(torch.ones(packing.tokens, 8), packing).whole.sum() == 12 * 8


def _call(name: str, odd: Any, usual: Any) -> None:
    """Rank 1 has a different argument."""
    value, world = odd if dist.get_rank() == 1 else usual, dist.group.WORLD
    if name == "offsets":
        winnow.Packing(value, group=world)
    elif name == "packing":
        winnow.Packing(offsets([12]), group=world, **value)
    else:
        packing = winnow.Packing(offsets([12]), group=world)
        rows_more, width, dtype, requires_grad = value
        x = torch.zeros(packing.tokens + rows_more, width, dtype=dtype)
        winnow.gather_keys(x.requires_grad_(requires_grad), packing)


KEYS = (0, 8, f32, False)


@pytest.mark.parametrize(
    ("name", "odd", "usual", "texts"),
    [
        ("offsets", offsets([5, 7]), offsets([5, 8]), ("tokens 12, 2 documents", "tokens 13")),
        ("offsets", offsets([4, 8]), offsets([5, 7]), ("(offsets with sum",)),
        (
            "offsets",
            torch.tensor([0, 12]),
            offsets([12]),
            ("rank 1: Packing: cu_seqlens has dtype int64: must be int32",),
        ),
        (
            "packing",
            {"query_rows": offsets([])},
            {},
            ("rank 1: Packing: query_rows and group: only one of them can be given",),
        ),
        ("packing", {"sharding": "contiguous"}, {}, ("sharding 'contiguous'", "sharding 'zigzag'")),
        ("packing", {"multiple": 4}, {}, ("multiple 4", "multiple 1")),
        ("packing", {"tokens": 14}, {}, ("tokens 14", "tokens 12")),
        ("packing", {"padding_rows": "see_document"}, {}, ("'see_document'", "'empty'")),
        ("keys", (0, 16, f32, False), KEYS, ("[rows, 16]", "[rows, 8]")),
        ("keys", (0, 8, bf16, False), KEYS, ("torch.bfloat16", "torch.float32")),
        (
            "keys",
            (1, 8, f32, False),
            KEYS,
            (
                "rank 1: gather_keys: x [7, 8]: must have 6 rows, those of this rank (packing.shard"
                " takes them from a whole tensor)",
            ),
        ),
        ("keys", (0, 8, f32, True), KEYS, ("with gradient", "without gradient")),
    ],
)
def test_ranks_that_differ_are_told_on_every_rank(two_ranks, name, odd, usual, texts):
    two_ranks.start(_call, name, odd, usual)
    for result in two_ranks.results():
        function = "gather_keys" if name == "keys" else "Packing"
        assert isinstance(result, Failure)
        assert result.startswith(f"ValueError: {function}: ranks differ: rank 0: {function}: ")
        for text in texts:
            assert text in result.splitlines()[0]
    two_ranks(_gather)  # the group is still usable


def _out_of_step() -> None:
    packing = winnow.Packing(offsets([12]), group=dist.group.WORLD)
    x = torch.ones(packing.tokens, 8, requires_grad=True)
    total = winnow.gather_keys(x, packing).whole.sum()
    total.backward() if dist.get_rank() == 0 else winnow.gather_keys(x, packing)


def test_ranks_out_of_step_are_told(two_ranks):
    two_ranks.start(_out_of_step)
    for result in two_ranks.results():
        assert result.startswith("ValueError: gather_keys: ranks differ: rank 0: ")
        assert "the sum of gradients torch.float32 [12, 8]; rank 1: " in result.splitlines()[0]


def _refusals() -> None:
    world = dist.group.WORLD
    with pytest.raises(ValueError, match="query_rows and group: only one"):
        winnow.Packing(offsets([4]), query_rows=torch.zeros(2).int(), group=world)
    with pytest.raises(ValueError, match="^Packing: cu_seqlens has dtype int64: must be int32$"):
        winnow.Packing(torch.tensor([0, 4]), group=world)
    other = 1 - dist.get_rank()
    others = [dist.new_group([rank]) for rank in range(2)][other]
    with pytest.raises(TypeError, match="^Packing: group is -100, what torch.distributed gives a "):
        winnow.Packing(offsets([4]), group=others)
    with pytest.raises(TypeError, match="^Packing: group is a str: must be a torch.distributed.Pr"):
        winnow.Packing(offsets([4]), group="world")
    with pytest.raises(ValueError, match="sharding 'striped': must be one of contiguous, zigzag"):
        winnow.Packing(offsets([4]), group=world, sharding="striped")
    with pytest.raises(ValueError, match="Packing: multiple 0: must be at least 1"):
        winnow.Packing(offsets([4]), group=world, multiple=0)
    with pytest.raises(ValueError, match=r"key_windows: cu_seqlens\[1\] -3"):
        winnow.Packing(torch.tensor([0, -3]).int(), group=world)
    with pytest.raises(ValueError, match=r"key_windows: cu_seqlens_padded\[2\] 2"):
        winnow.Packing(offsets([1, 1]), torch.tensor([0, 3, 2]).int(), group=world)
    with pytest.raises(ValueError, match="tokens"):
        winnow.Packing(offsets([4]), group=world, tokens=3)
    packing = winnow.Packing(offsets([12]), group=world, multiple=2)
    x = torch.zeros(packing.tokens, 8)
    with pytest.raises(ValueError, match="Packing.pool_rows: ratio 1: must be at least 2"):
        packing.pool_rows(1)
    with pytest.raises(ValueError, match="ratio 4: must divide multiple 2"):
        winnow.gather_keys(x, packing, ratio=4)
    with pytest.raises(ValueError, match="^gather_keys: ratio 0: must be at least 1$"):
        winnow.gather_keys(x, packing, ratio=0)
    with pytest.raises(ValueError, match="^Packing.layout: ratio 0: must be at least 1$"):
        packing.layout(0)
    with pytest.raises(ValueError, match=r"^gather_keys: x \[12, 8\]: must have 6 rows, those of"):
        winnow.gather_keys(torch.zeros(12, 8), packing)
    with pytest.raises(TypeError, match="gather_keys: packing is a Tensor"):
        winnow.gather_keys(x, offsets([12]))
    with pytest.raises(ValueError, match=r"Packing.shard: x \[11, 8\]: must have 12 rows"):
        packing.shard(torch.zeros(11, 8))
    q, weights = torch.zeros(packing.tokens, 1, 8), torch.zeros(packing.tokens, 1)
    with pytest.raises(ValueError, match="index_topk: k of 6 rows: must have 12, those of all"):
        winnow.index_topk(q, x, weights, packing, topk=2)
    selection = winnow.index_topk(q, winnow.gather_keys(x, packing), weights, packing, topk=2)
    with pytest.raises(ValueError, match="sparse_attention: kv of 6 rows: must have 12, the keys"):
        winnow.sparse_attention(q, x, selection)
    with pytest.raises(ValueError, match="index_loss: kv of 6 rows: must have 12, the keys"):
        winnow.index_loss(selection, q, x, torch.zeros(packing.tokens, 1), scale=1.0)
    winnow.sparse_attention(q, winnow.gather_keys(x, packing), selection)
    with pytest.raises(ValueError, match="dense_index_loss: index_k of 6 rows: must have 12"):
        winnow.dense_index_loss(q, x, q, x, weights, packing, scale=1.0)


def test_what_is_wrong_is_named(two_ranks):
    two_ranks(_refusals)


def _make_a_lock() -> str:
    global _lock
    _lock = multiprocessing.get_context("forkserver").RLock()
    return _lock._semlock.name


def test_ranks_leave_no_semaphore_behind(tmp_path):
    """The resource tracker would warn of it behind the last line of all tests."""
    with Ranks(2, str(tmp_path / "store")) as ranks:
        files = [Path("/dev/shm/sem." + name.lstrip("/")) for name in ranks(_make_a_lock)]
        assert all(file.exists() for file in files)
    assert not any(file.exists() for file in files)


TIMEOUT = 4.0


def _killed_before_the_sum() -> str:
    packing = winnow.Packing(offsets([48]), group=dist.group.WORLD)
    x = torch.ones(packing.tokens, 8, requires_grad=True)
    total = winnow.gather_keys(x, packing).whole.sum()
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        total.backward()
    except RuntimeError as error:
        return str(error)
    raise AssertionError("a sum without rank 1 has ended")


def test_a_rank_lost_before_the_sum_is_told_as_that(tmp_path):
    with Ranks(2, str(tmp_path / "store"), TIMEOUT) as ranks:
        ranks.start(_killed_before_the_sum)
        (text,) = ranks.results((0,), patience=30)
    what = "the comparison of arguments (the sum of gradients torch.float32 [48, 8])"
    assert text.startswith(f"gather_keys: {what} failed on rank 0 of 2: ")


def _with_a_lost_rank(stage: str, how: str) -> tuple[str, float]:
    """Loses rank 1 while the others are in a collective; returns their errors and times."""
    packing = winnow.Packing(offsets([48]), group=dist.group.WORLD)
    x = torch.ones(packing.tokens, 8, requires_grad=True)
    if stage == "sum":
        total = winnow.gather_keys(x, packing).whole.sum()
    if dist.get_rank() == 1:
        agree = Group.agree

        def agree_and_go(*args: Any) -> None:
            agree(*args)
            time.sleep(0.5)  # now the others are in the collective
            if how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(60)

        Group.agree = agree_and_go
    begin = time.monotonic()
    try:
        total.backward() if stage == "sum" else winnow.gather_keys(x, packing).values
    except RuntimeError as error:
        return str(error), time.monotonic() - begin
    raise AssertionError("a collective without rank 1 has ended")


@pytest.mark.parametrize("how", ["killed", "hung"])
def test_a_lost_rank_is_an_error_on_the_others(tmp_path, how):
    """Both stages at once, since each waits for the time-out."""
    stages = {"gather": "the gather of keys", "sum": "the sum of gradients over ranks"}
    with contextlib.ExitStack() as stack:
        groups = {
            stage: stack.enter_context(Ranks(3, str(tmp_path / stage), TIMEOUT)) for stage in stages
        }
        for stage, ranks in groups.items():
            ranks.start(_with_a_lost_rank, stage, how)
        for stage, what in stages.items():
            answers = groups[stage].results((0, 2), patience=30)
            for rank, (text, seconds) in zip((0, 2), answers, strict=True):
                assert text.startswith(f"gather_keys: {what} failed on rank {rank} of 3: ")
                assert seconds < 2 * TIMEOUT
