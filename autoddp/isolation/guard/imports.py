"""Calls back when a module has been imported, so that its native functions are replaced before anyone takes them.

`wrapt` can do this too, but importing it takes longer than the rest of the guard, in every process of the script.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

Then = Callable[[ModuleType], None]


class Watcher:
    """A finder that lets the others find, and adds a step after the module's own code."""

    def __init__(self) -> None:
        self._waiting: dict[str, list[Then]] = {}
        sys.meta_path.insert(0, self)

    def when_imported(self, name: str, then: Then) -> None:
        """`then(module)` at once if it is imported already."""
        module = sys.modules.get(name)
        if module is not None:
            then(module)
        else:
            self._waiting.setdefault(name, []).append(then)

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Called by the import system."""
        if name not in self._waiting:
            return None
        for finder in sys.meta_path:
            if finder is self or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(name, path, target)
            if spec is not None:
                found: Any = spec  # a loader need not be of the abstract class
                if spec.loader is not None:
                    found.loader = _Loader(spec.loader, self._waiting.pop(name))
                return spec
        return None


class _Loader:
    """The module's own loader with a step after it."""

    def __init__(self, loader: Any, then: list[Then]) -> None:
        self.loader = loader
        self.then = then

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """As the loader does."""
        made: ModuleType | None = self.loader.create_module(spec)
        return made

    def exec_module(self, module: ModuleType) -> None:
        """As the loader does, and then the step."""
        if module.__spec__ is not None:
            module.__spec__.loader = self.loader
        module.__loader__ = self.loader
        self.loader.exec_module(module)
        for then in self.then:
            then(module)
