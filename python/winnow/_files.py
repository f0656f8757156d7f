# SPDX-License-Identifier: Apache-2.0
"""Files that are written whole or not at all."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """The path to write to, whose file takes the name `path` in the end.

    A file of that name stays as it is until then, and if writing fails. Links are followed; a
    device or a pipe is written to directly.
    """
    if path.exists() and not path.is_file():
        yield path
        return
    path = path.resolve()
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        yield part
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
