"""Keeps Python's modules, which autoddp imports in the script's process, apart from files of the script of these names.

    with past_the_script():
        from autoddp.worker.process.bootstrap import arm

Files beside a script take precedence over Python's modules. So the `statistics.py` of a project would be run where
autoddp imports Python's `statistics`, and that in the middle of torch's import. And where autoddp has imported Python's
first, the script would get it in place of its own file.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Iterator
from importlib.machinery import PathFinder


@contextlib.contextmanager
def past_the_script() -> Iterator[None]:
    """Import Python's own modules, also where the script's folder has such names; afterwards the script finds its own.

    What was imported meanwhile stays with its importers.
    """
    folder = _folder_of_the_script()
    names = _names_in(folder)
    if not names:
        yield
        return
    path, before = sys.path[:], dict(sys.modules)
    files = {name: os.path.realpath(getattr(before.get(name), "__file__", None) or "") for name in names}
    theirs = [name for name in before if files.get(top := name.partition(".")[0]) == names.get(top, "")]
    sys.path[:] = [entry for entry in path if _real(entry) != folder]
    for name in theirs:
        del sys.modules[name]
    try:
        yield
    finally:
        sys.path[:] = path
        of_python = [name for name in sys.modules if name.partition(".")[0] in names]
        for name in of_python:
            if name not in before or name in theirs:
                del sys.modules[name]
        sys.modules.update((name, before[name]) for name in theirs)


def _folder_of_the_script() -> str:
    """What Python puts first in `sys.path`, also before it has done so."""
    words = iter(sys.orig_argv[1:])
    for word in words:
        if word in ("-X", "-W"):
            next(words, "")
        elif word in ("-m", "-c", "-"):
            break
        elif not word.startswith("-"):
            script = _real(word)  # or a folder with a __main__.py
            return script if os.path.isdir(script) else os.path.dirname(script)
    return _real(".")


def _real(path: str) -> str:
    try:
        return os.path.realpath(path)
    except OSError:  # the current folder was removed: nothing is imported from there
        return ""


@functools.cache
def _names_in(folder: str) -> dict[str, str]:
    """Name of a module of Python's → the file of that name in this folder; nothing where the files are Python's."""
    if folder == os.path.dirname(_real(os.__file__)):
        return {}
    found = (
        (name, PathFinder.find_spec(name, [folder])) for name in sys.stdlib_module_names - {*sys.builtin_module_names}
    )
    return {
        name: os.path.realpath(spec.origin) for name, spec in found if spec is not None and spec.loader and spec.origin
    }
