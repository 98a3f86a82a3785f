"""Keeps what one attempt has cached for the next: a data set is prepared, and a model compiled, once in a study.

An attempt's upper layers are deleted. Before that, caches are moved from them to the folders with which the next
attempt's upper layers begin. A cache is

    a folder whose name says so: __pycache__, .cache, my_cache, cached-data; and files such as cache-0123.arrow
    what lies below a path named by a variable such as TORCHINDUCTOR_CACHE_DIR, HF_HOME, XDG_CACHE_HOME, CUDA_CACHE_PATH
    a folder in the temporary folder, unless the script works there or it holds checkpoints

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


def keep_caches(layers: Layers, environment: Mapping[str, str], working: Sequence[str]) -> None:
    """Move the caches of an attempt that has ended from `layers.scratch` to `layers.kept`.

    `working`: folders in which the script works. What is in them is a cache only if its name says so.
    """
    roots = _cache_roots(environment)
    for name in sorted(os.listdir(layers.scratch)):
        base = os.path.join(layers.scratch, name)
        if not os.path.isfile(os.path.join(base, "path")):
            continue
        with open(os.path.join(base, "path"), "rb") as file:
            covered = os.fsdecode(file.read())
        upper, kept = os.path.join(base, "upper"), os.path.join(layers.kept, layers.name_of(covered))
        for found in list(_caches(upper, covered, roots, working)):
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
            if real in roots or "cache" in entry.name.lower():
                yield entry.path
            elif entry.is_dir(follow_symlinks=False):
                is_temporary = os.path.dirname(real) == temporary and not _works_in(real, working)
                if is_temporary and not _holds_checkpoints(entry.path):
                    yield entry.path
                else:
                    pending.append(entry.path)


def _works_in(path: str, working: Sequence[str]) -> bool:
    return any(f"{os.path.realpath(folder)}/".startswith(path + "/") for folder in working)


def _holds_checkpoints(folder: str) -> bool:
    return any(_CHECKPOINT.search(name) for _, folders, files in os.walk(folder) for name in (*folders, *files))


def _move(upper: str, relative: str, kept: str) -> None:
    """Move one file or folder to the same place in `kept`, over what is there from earlier attempts."""
    _like_parents(upper, os.path.dirname(relative), kept)
    _merge(os.path.join(upper, relative), os.path.join(kept, relative))


def _like_parents(upper: str, relative: str, kept: str) -> None:
    """Make the folders above, with the mode and owner that they have in the upper layer: the overlay shows these."""
    os.makedirs(kept, exist_ok=True)
    parts = [part for part in relative.split(os.sep) if part]
    for depth in range(len(parts) + 1):
        source, target = os.path.join(upper, *parts[:depth]), os.path.join(kept, *parts[:depth])
        if not os.path.isdir(target):
            os.mkdir(target)
        shutil.copystat(source, target)
        found = os.stat(source)
        with contextlib.suppress(PermissionError):
            os.chown(target, found.st_uid, found.st_gid)


def _merge(source: str, target: str) -> None:
    if _is_folder(source) and _is_folder(target):
        for name in os.listdir(source):
            _merge(os.path.join(source, name), os.path.join(target, name))
        return
    if _is_folder(target):
        shutil.rmtree(target)
    os.rename(source, target)


def _is_folder(path: str) -> bool:
    return os.path.isdir(path) and not os.path.islink(path)
