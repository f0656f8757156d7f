# SPDX-License-Identifier: Apache-2.0
"""Files that are written whole or not at all."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

_MOST_LINKS = 40  # as in Linux


@contextmanager
def written_whole(path: Path) -> Iterator[BinaryIO]:
    """A file to write to, which takes the name `path` in the end.

    A file of that name stays as it is until then, and if writing fails. Links are followed; a
    device, a pipe, or an open stream such as /dev/stdout is written to directly.
    """
    if (stream := _stream(path)) is not None:
        if sys.stdout:
            sys.stdout.flush()  # comes first where both are one file
        with open(os.dup(stream), "wb") as file:
            yield file
        return
    if path.exists() and not path.is_file():
        with open(path, "wb") as file:
            yield file
        return
    path = path.resolve()
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        with open(part, "wb") as file:
            yield file
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def _stream(path: Path) -> int | None:
    """The open stream that a path like /dev/stdout or /dev/fd/63 leads to."""
    streams = Path("/proc/self/fd").resolve()
    for _ in range(_MOST_LINKS):
        if not path.is_symlink():
            return None
        folder = path.parent.resolve()
        if folder == streams:
            return int(path.name)
        path = folder / path.readlink()
    return None
