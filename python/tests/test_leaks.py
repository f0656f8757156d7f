# SPDX-License-Identifier: Apache-2.0
"""Calls leave no memory behind."""

import resource

import pytest
import torch
from cases import bf16
from test_ops import Inputs, calls

import winnow
from winnow import ops

CALLS = 3000
MOST_GROWTH = 2 << 20  # bytes
DEVICES = ["cpu", *(["cuda"] if "cuda" in winnow.backends() else [])]


@pytest.fixture
def two_threads():
    """Of each call: one thread would run it without the pool."""
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)


def resident_bytes() -> int:
    with open("/proc/self/statm") as sizes:
        return int(sizes.read().split()[1]) * resource.getpagesize()


def device_bytes() -> int:
    """What torch's allocator and everyone else hold of the GPU."""
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return torch.cuda.memory_allocated() + total - free


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ops._calls)
def test_calls_leave_nothing_behind(name, device, two_threads):
    operator = getattr(torch.ops.winnow, name)
    args = [
        x.to(device) if isinstance(x, torch.Tensor) else x for x in calls(Inputs(bf16))[name][0]
    ]

    def run(count: int) -> tuple[int, int]:
        for _ in range(count):
            operator(*args)
        on_device = device_bytes() if device == "cuda" else 0
        return resident_bytes(), on_device

    before = run(CALLS // 10)  # threads are started, caches and pools are filled
    after = run(CALLS)
    assert after[0] - before[0] < MOST_GROWTH
    assert after[1] - before[1] < MOST_GROWTH
