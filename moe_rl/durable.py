"""Files that are whole and on disk, or not there."""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Of an `OSError`: the disk, the user's quota or the limit on a file's size does not let more be written."""


def sync(path: Path) -> None:
    """Force a file's content, or a directory's entries (a rename in it), to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_atomic(path: Path, content: str | bytes, mode: int = 0o644) -> None:
    """Replace a file's content at once: a temporary file beside it, fsync, rename."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, mode)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    sync(path.parent)
