"""Floor 0. Files of ours that a reader finds whole, whatever happens while they are written."""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path


def write_whole(path: Path, content: str | bytes) -> None:
    """Write `content` (text as UTF-8) to `path` in one atomic step: a reader finds the old file or the whole new one.

    The new file has the mode that the umask gives, whatever the old one had. A link at `path` is replaced itself.
    OSError where the disk is full or the folder takes no files: `path` is then as it was, with no other file beside it.
    """
    # The name is a new one, because other processes and hosts may write the same file into a shared folder. It is not
    # mkstemp's, because that gives a file to its owner alone, whatever the umask.
    scratch = path.with_name(f".autoddp-{secrets.token_hex(8)}.tmp")
    try:
        with open(scratch, "xb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())  # else, after a power cut, the name may stand for an empty file
        os.replace(scratch, path)
    except BaseException:
        with contextlib.suppress(OSError):
            scratch.unlink()
        raise
