# SPDX-License-Identifier: Apache-2.0
"""Times calls on a CUDA device in turns, with an empty L2 and the time of the host hidden."""

import statistics
from collections.abc import Callable, Mapping

import torch

_SPIN_CYCLES = 4_000_000  # about 2 ms, in which the host enqueues the call
_FLUSH_BYTES = 256 << 20


def median_ms(calls: Mapping[str, Callable[[], object]], repeat: int) -> dict[str, float]:
    """The median time of each call."""
    return {n: statistics.median(times) for n, times in times_ms(calls, repeat).items()}


def times_ms(calls: Mapping[str, Callable[[], object]], repeat: int) -> dict[str, list[float]]:
    """The times of each call; every round calls all of them, each time in another order."""
    flush = torch.empty(_FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    for call in calls.values():
        call()  # some compile at their first call
        call()
    names = list(calls)
    events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {n: [] for n in names}
    for number in range(repeat):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(_SPIN_CYCLES)
            flush.fill_(number % 128)
            begin.record()
            calls[name]()
            end.record()
            events[name].append((begin, end))
        torch.cuda.synchronize()
    return {n: [b.elapsed_time(e) for b, e in events[n]] for n in names}
