"""fsspec: every file system that is not this machine's, whichever package brings it (s3fs, gcsfs, adlfs, sftp, hf, …).

Each class is watched when it is defined. Reading passes; opening for writing, putting, moving and deleting end tuning.
"""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

from autoddp.isolation.elsewhere.patch import Call, Stop, patch_when_imported, plain, watched, words

NOT_ELSEWHERE = words(
    # This machine's files, which the isolation of the file system covers, and memory.
    "file local memory data "
    # These pass everything on to another file system, which is watched itself.
    "dir cached blockcache filecache simplecache async_wrapper zip tar libarchive reference generic"
)

WRITES = words(
    "pipe pipe_file put put_file rm rm_file rmdir mv mv_file move rename cp copy cp_file mkdir mkdirs makedir makedirs "
    "touch delete write_bytes write_text upload bulk_delete merge chmod put_tags setxattr set_expiration"
)
OPENS = frozenset(("open", "open_async"))


def watch_fsspec(stop: Stop) -> None:
    """Watch each class derived from `AbstractFileSystem`, at the moment when it is defined."""
    patch_when_imported("fsspec.spec", functools.partial(_watch, stop))


def _watch(stop: Stop, spec: ModuleType) -> None:
    base = spec.AbstractFileSystem
    own = vars(base).get("__init_subclass__")

    def defined(cls: type, /, **kwargs: Any) -> None:
        own.__func__(cls, **kwargs) if own else super(base, cls).__init_subclass__(**kwargs)
        _wrap(cls, stop)

    base.__init_subclass__ = classmethod(defined)
    _wrap(base, stop)


def _wrap(cls: type, stop: Stop) -> None:
    for name, raw in list(vars(cls).items()):
        if name.lstrip("_") in WRITES | OPENS and callable(raw):
            setattr(cls, name, watched(raw, functools.partial(_check, stop, name.lstrip("_") in OPENS, name)))


def _check(stop: Stop, opens: bool, operation: str, call: Call) -> None:
    protocol = getattr(call.owner, "protocol", "file")
    protocols = (protocol,) if isinstance(protocol, str) else tuple(protocol)
    if NOT_ELSEWHERE.intersection(protocols):
        return
    # `_open` is checked too: some file systems call it without `open`.
    if opens and not set(str(call.argument("mode", default="rb"))) & set("wax+"):
        return
    path = call.argument("path", "path1", "rpath", "lpath", default="")
    stop(f"fsspec writes to {protocols[0]}://{plain(path)} ({operation})")
