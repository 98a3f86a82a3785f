"""Keeps what one attempt has cached for the next: a data set is prepared, and a model compiled, once in a study.

An attempt's upper layers are deleted. Before that, caches are moved from them to the folders with which the next
attempt's upper layers begin. A cache is

    a folder whose name says so: __pycache__, .cache, my_cache, cached-data; and files such as cache-0123.arrow
    what lies below a path named by a variable such as TORCHINDUCTOR_CACHE_DIR, HF_HOME, XDG_CACHE_HOME, CUDA_CACHE_PATH
    a folder in the temporary folder that is named after data or a compiler, unless it holds checkpoints

A folder in which the script works is none, whatever it is called: what it has written there is its output. Locks are
not kept: an attempt is killed, and nobody is left to remove what it held.

The real files stay as they are: nothing of a cache survives the study.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence

from autoddp.isolation.overlay import Layers

_VARIABLE = re.compile(r"CACHE|^(HF_HOME|TORCH_HOME|TORCH_EXTENSIONS_DIR|MPLCONFIGDIR|KERAS_HOME|NLTK_DATA)$")
_IN_HOME = (".cache", ".nv", ".triton", ".keras", ".torch")
_CHECKPOINT = re.compile(r"\.(pt|pth|ckpt|safetensors|distcp|bin)$|checkpoint|snapshot", re.IGNORECASE)
_LOCK = re.compile(r"(^|[^a-z])lock$", re.IGNORECASE)
_IN_TEMPORARY = re.compile(
    r"^(torchinductor|torch_extensions|triton)|(^|[^a-z])(data|datasets?)([^a-z]|$)", re.IGNORECASE
)
"""Names in the temporary folder. A folder of another name may hold what the script goes on from, by whatever name."""


def keep_caches(layers: Layers, environment: Mapping[str, str], working: Sequence[str]) -> None:
    """Move the caches of an attempt that has ended from `layers.scratch` to `layers.kept`.

    `working`: folders in which the script works, the current one first. What is in them is a cache only if its name
    says so.
    """
    roots, working = _cache_roots(environment), [os.path.realpath(folder) for folder in working]
    for name in sorted(os.listdir(layers.scratch)):
        base = os.path.join(layers.scratch, name)
        if not os.path.isfile(os.path.join(base, "path")):
            continue
        with open(os.path.join(base, "path"), "rb") as file:
            covered = os.fsdecode(file.read())
        upper, kept = os.path.join(base, "upper"), os.path.join(layers.kept, layers.name_of(covered))
        for found in list(_caches(upper, covered, roots, working)):
            _remove_locks(found)
            if os.path.lexists(found):
                _move(upper, os.path.relpath(found, upper), kept)


def _cache_roots(environment: Mapping[str, str]) -> list[str]:
    home = os.path.expanduser("~")
    named = [value for name, value in environment.items() if _VARIABLE.search(name) and os.path.isabs(value)]
    return [os.path.realpath(path) for path in (*named, *(os.path.join(home, name) for name in _IN_HOME))]


def _caches(upper: str, covered: str, roots: Sequence[str], working: Sequence[str]) -> Iterator[str]:
    """Paths in `upper`, none of them below another."""
    temporary = os.path.realpath(tempfile.gettempdir())
    pending = [upper]
    while pending:
        folder = pending.pop()
        for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
            real = os.path.normpath(os.path.join(covered, os.path.relpath(entry.path, upper)))
            if _is_cache(real, roots, working):
                yield entry.path
            elif entry.is_dir(follow_symlinks=False):
                is_named = os.path.dirname(real) == temporary and _IN_TEMPORARY.search(entry.name)
                if is_named and not _works_in(real, working) and not _holds_checkpoints(entry.path):
                    yield entry.path
                else:
                    pending.append(entry.path)


def _is_cache(path: str, roots: Sequence[str], working: Sequence[str]) -> bool:
    """Whether all that is at `path` is a cache, by a variable or by its name.

    It is none if the current folder is there or below, as in ~/kvcache/train.py, or by its name if another folder is
    below in which the script works. A folder that an argument names, as --cache-dir does, may be a cache itself.
    """
    if _works_in(path, working[:1]):
        return False
    is_above = any(folder.startswith(f"{path}/") for folder in working)
    return path in roots or ("cache" in os.path.basename(path).lower() and not is_above)


def _works_in(path: str, working: Sequence[str]) -> bool:
    return any(f"{folder}/".startswith(f"{path}/") for folder in working)


def _holds_checkpoints(folder: str) -> bool:
    return any(_CHECKPOINT.search(name) for _, folders, files in os.walk(folder) for name in (*folders, *files))


def _remove_locks(cache: str) -> None:
    """Remove locks that are files or empty folders, such as the `lock` of torch.utils.cpp_extension.

    The next attempt would wait for them. Locks of the kernel (fcntl, flock) have such files too, which are made anew.
    """
    walk = os.walk(cache, topdown=False)
    below = [os.path.join(place, name) for place, folders, files in walk for name in (*folders, *files)]
    for path in (*below, cache):
        if _LOCK.search(os.path.basename(path)):
            with contextlib.suppress(OSError):
                (os.rmdir if _is_folder(path) else os.unlink)(path)


def _move(upper: str, relative: str, kept: str) -> None:
    """Move one file or folder to the same place in `kept`, where nothing is: the attempt began with what was there."""
    _like_parents(upper, os.path.dirname(relative), kept)
    os.rename(os.path.join(upper, relative), os.path.join(kept, relative))


def _like_parents(upper: str, relative: str, kept: str) -> None:
    """Make the folders above, with the mode and owner that they have in the upper layer: the overlay shows these."""
    os.makedirs(kept, exist_ok=True)
    parts = [part for part in relative.split(os.sep) if part]
    for depth in range(len(parts) + 1):
        source, target = os.path.join(upper, *parts[:depth]), os.path.join(kept, *parts[:depth])
        if not os.path.isdir(target):
            os.mkdir(target)
        shutil.copystat(source, target)
        _forget_overlay(target)
        found = os.stat(source)
        with contextlib.suppress(PermissionError):
            os.chown(target, found.st_uid, found.st_gid)


def _forget_overlay(folder: str) -> None:
    """Remove an overlay's own notes: one says that nothing of the real folder is seen, which the script had removed."""
    for name in os.listxattr(folder):
        if ".overlay." in name:
            with contextlib.suppress(OSError):
                os.removexattr(folder, name)


def _is_folder(path: str) -> bool:
    return os.path.isdir(path) and not os.path.islink(path)
