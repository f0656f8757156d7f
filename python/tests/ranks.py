# SPDX-License-Identifier: Apache-2.0
"""Processes that are the ranks of a process group, for tests of context parallel.

Whatever a rank does, nothing is left behind and nobody waits for ever: the parent gives up after a
time and kills all of them, and a rank whose parent is gone ends by itself.
"""

import faulthandler
import multiprocessing
import os
import pickle
import time
import traceback
from collections.abc import Iterable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

# Ranks are forked from a server process that has imported everything and started no thread.
_processes = multiprocessing.get_context("forkserver")
_processes.set_forkserver_preload(["torch.distributed", "pytest", "hypothesis", "winnow"])

PATIENCE = 120  # seconds per call
GRACE = 2  # seconds in which ranks may end by themselves


class Failure(str):
    """The exception of a rank, as text that begins with its type."""


def _serve(
    rank: int,
    size: int,
    store: str,
    timeout: float,
    backend: str,
    environment: dict[str, str],
    connection: Connection,
) -> None:
    faulthandler.dump_traceback_later(10 * PATIENCE, exit=True)
    os.environ |= environment
    torch.set_num_threads(1)
    dist.init_process_group(
        backend,
        init_method=f"file://{store}",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=timeout),
    )
    while True:
        try:
            function, args, options = pickle.loads(connection.recv_bytes())
        except (EOFError, ConnectionResetError):  # the parent process has ended, or wants no more
            return
        try:
            answer = function(*args, **options)
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            answer = Failure(text + "\n" + traceback.format_exc())
        # Sent as bytes: torch would send tensors in shared memory that is freed with the rank.
        connection.send_bytes(pickle.dumps(answer))


class Ranks:
    """A group of processes; a call runs a function in all of them and returns their results.

    Functions are those of modules, and their arguments and results are pickled.
    """

    def __init__(
        self,
        size: int,
        store: str,
        timeout: float = 60,
        backend: str = "gloo",
        environment: dict[str, str] | None = None,
    ) -> None:
        self.size = size
        self.processes = []
        self._connections: list[Connection] = []
        for rank in range(size):
            ours, theirs = _processes.Pipe()
            args = (rank, size, store, timeout, backend, environment or {}, theirs)
            process = _processes.Process(target=_serve, args=args, daemon=True)
            process.start()
            theirs.close()
            self._connections.append(ours)
            self.processes.append(process)

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(self, *_: Any) -> None:
        """A rank that waits for a call ends by itself and unlinks its semaphores: tqdm makes one
        where something is compiled. Those of a killed rank are left to the resource tracker, which
        warns of them when this program ends."""
        for connection in self._connections:
            connection.close()
        deadline = time.monotonic() + GRACE
        for process in self.processes:
            process.join(max(deadline - time.monotonic(), 0))
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()

    def start(self, function, *args: Any, **options: Any) -> None:
        for connection in self._connections:
            connection.send_bytes(pickle.dumps((function, args, options)))

    def results(self, of: Iterable[int] | None = None, patience: float = PATIENCE) -> list[Any]:
        """The results of these ranks, or of all; a Failure for a rank that did not return."""
        ranks = list(range(self.size) if of is None else of)
        results: dict[int, Any] = {}
        deadline = time.monotonic() + patience
        while missing := [rank for rank in ranks if rank not in results]:
            ready = wait([self._connections[r] for r in missing], deadline - time.monotonic())
            if not ready:
                raise TimeoutError(f"ranks {missing} have not answered in {patience} s")
            for connection in ready:
                rank = self._connections.index(connection)
                try:
                    results[rank] = pickle.loads(connection.recv_bytes())
                except EOFError:
                    results[rank] = Failure("the rank has died")
        return [results[rank] for rank in ranks]

    def __call__(self, function, *args: Any, **options: Any) -> list[Any]:
        """Calls start and results; a Failure fails the test."""
        self.start(function, *args, **options)
        results = self.results()
        for rank, result in enumerate(results):
            assert not isinstance(result, Failure), f"rank {rank}: {result}"
        return results
