"""Floor 0. Atomic writes: a reader always finds a whole file, whatever happens while it is written."""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path


def write_whole(path: Path, content: str | bytes) -> None:
    """Write `content` (text as UTF-8) to `path` in one atomic step: a reader finds the old file or the whole new one.

    The new file has the mode that the umask gives, whatever mode the old one had. If `path` is a link, the link itself
    is replaced. Raises OSError if the disk is full or the folder takes no files; `path` is then unchanged, and no other
    file is left beside it.
    """
    # The scratch file has a random name, because other processes and hosts may write the same file into a shared
    # folder. mkstemp is not used, because it lets only the owner read the file, whatever the umask.
    scratch = path.with_name(f".autoddp-{secrets.token_hex(8)}.tmp")
    try:
        with open(scratch, "xb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())  # otherwise the file may be empty after a power cut
        os.replace(scratch, path)
    except BaseException:
        with contextlib.suppress(OSError):
            scratch.unlink()
        raise
