# SPDX-License-Identifier: Apache-2.0
"""Context parallel over NCCL, with the one rank that one GPU allows. Skipped without a GPU.

One rank needs no gather, and gather_keys makes none. So Keys are made here with a Layout in which
the rank holds all rows, but not in their order: everything is gathered, ordered, summed and sent
back as with many ranks. Functions whose names begin with an underscore run in the rank.
"""

import time

import pytest
import torch
import torch.distributed as dist
from cases import GRAD_LIMIT, Random, assert_equal, assert_within, bf16, f8, f32, offsets
from ranks import Ranks

import winnow
from winnow.keys import Keys
from winnow.parallel import Layout
from winnow.parallel import Ranks as Group

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available()
    or not dist.is_nccl_available()
    or "cuda" not in winnow.backends(),
    reason="no CUDA device, or torch without NCCL, or a library without CUDA",
)

TOKENS, SCALE = 96, 0.0625
TIMEOUT = 3.0  # seconds, of the group that times out
SLEEP_CYCLES = 20_000_000_000  # about 10 s


@pytest.fixture(scope="module")
def rank(tmp_path_factory):
    store = tmp_path_factory.mktemp("ranks") / "store"
    with Ranks(1, str(store), backend="nccl") as started:
        yield started


def _layout(order: torch.Tensor) -> Layout:
    return Layout(Group(dist.group.WORLD), [order], torch.device("cuda", 0))


def _order() -> torch.Tensor:
    return torch.randperm(TOKENS, generator=torch.Generator().manual_seed(1))


def _step(dtype: torch.dtype, regather: bool | None) -> list[torch.Tensor]:
    """Results and gradients of a layer; on plain tensors if regather is None."""
    random = Random(1)
    q = random.normal(TOKENS, 4, 576, dtype=dtype).cuda().requires_grad_()
    kv = random.normal(TOKENS, 576, dtype=dtype).cuda()
    index_q = random.normal(TOKENS, 8, 128, dtype=dtype).cuda().requires_grad_()
    index_k = random.normal(TOKENS, 128, dtype=dtype).cuda()
    weights = random.normal(TOKENS, 8, dtype=f32).cuda().requires_grad_()
    order = _order().cuda()
    local = [kv, index_k] if regather is None else [kv[order], index_k[order]]
    keys = local = [x.requires_grad_() for x in local]
    if regather is not None:
        keys = [Keys(x, _layout(order.cpu()), regather) for x in local]
    packing = winnow.Packing(offsets([40, 56]).cuda(), tokens=TOKENS)
    selection = winnow.index_topk(index_q, keys[1], weights, packing, topk=32, deterministic=True)
    out, lse, _ = winnow.sparse_attention(
        q,
        keys[0],
        selection.indices,
        v_dim=512,
        scale=SCALE,
        lengths=selection.lengths,
        deterministic=True,
    )
    loss = winnow.index_loss(selection, q, keys[0], lse, scale=SCALE, reduction="sum")
    (out.float().square().sum() + loss).backward()
    gradients = [x.grad for x in local]
    if regather is not None:
        back = torch.empty_like(order)
        back[order] = torch.arange(TOKENS, device="cuda")
        gradients = [x[back] for x in gradients]
    results = (out, selection.indices, selection.scores, q.grad, weights.grad, *gradients)
    return [x.detach().cpu() for x in results]


@pytest.mark.parametrize("dtype", [bf16, f32])
@pytest.mark.parametrize("regather", [False, True])
def test_a_layer_is_the_same_as_without_a_group(rank, dtype, regather):
    (expected,), (actual,) = rank(_step, dtype, None), rank(_step, dtype, regather)
    for a, b in zip(actual[:-2], expected[:-2], strict=True):
        assert_equal(a, b)
    for a, b in zip(actual[-2:], expected[-2:], strict=True):
        assert_within(a, b.double(), GRAD_LIMIT[dtype])


def _through_the_packing() -> None:
    packing = winnow.Packing(offsets([40, 56]).cuda(), group=dist.group.WORLD)
    x = torch.ones(TOKENS, 8, device="cuda")
    assert packing.tokens == TOKENS and winnow.gather_keys(x, packing).whole is x
    Group(dist.group.WORLD).agree("test", "what this rank says")
    order, values = _order(), Random(2).normal(TOKENS, 128, dtype=f32)
    keys = Keys(values[order].to(f8).cuda(), _layout(order))
    assert_equal(keys.whole.cpu(), values.to(f8))


def test_packing_agreement_and_fp8(rank):
    rank(_through_the_packing)


def _overlap() -> tuple[bool, bool]:
    """Whether the device was still busy when the host had the keys, and when NCCL had finished."""
    layout = _layout(_order())
    x = torch.ones(TOKENS, 576, device="cuda")
    Keys(x, layout).values.sum().item()  # initialises NCCL
    busy = torch.cuda.Event()

    torch.cuda._sleep(SLEEP_CYCLES // 10)
    values = Keys(x, layout).values  # after the sleep, since it needs x
    busy.record()
    host_was_first = not busy.query()
    assert_equal(values, x)
    torch.cuda.synchronize()

    keys = Keys(x, layout)
    torch.cuda._sleep(SLEEP_CYCLES // 10)  # enqueued after the gather starts, so it overlaps
    busy.record()
    while not (gathered := keys._under_way._work.is_completed()) and not busy.query():
        time.sleep(0.01)
    gather_was_first = gathered and not busy.query()
    torch.cuda.synchronize()
    return host_was_first, gather_was_first


def test_the_gather_runs_beside_other_work(rank):
    assert rank(_overlap) == [(True, True)]


def _too_late() -> str:
    layout = _layout(_order())
    x = torch.ones(TOKENS, 576, device="cuda")
    Keys(x, layout).values.sum().item()
    torch.cuda._sleep(SLEEP_CYCLES)
    try:
        return f"no error, but {Keys(x, layout).values.shape}"
    except RuntimeError as error:
        return str(error)


def test_a_collective_that_does_not_end_is_an_error(tmp_path):
    environment = {"TORCH_NCCL_BLOCKING_WAIT": "1"}
    with Ranks(1, str(tmp_path / "store"), TIMEOUT, "nccl", environment) as rank:
        rank.start(_too_late)
        (text,) = rank.results(patience=60)
    assert text.startswith("gather_keys: the gather of keys failed on rank 0 of 1: ")
