"""Extension modules and libraries that the script has built, as `torch.compile` does, are loaded from the copy."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

from autoddp.isolation.guard.imports import Watcher
from autoddp.isolation.guard.install import rebind
from autoddp.isolation.guard.native import Native


class Loading:
    """Translates the paths that Python hands to the system's loader."""

    def __init__(self, native: Native) -> None:
        self.native = native

    def start(self, watcher: Watcher) -> None:
        """Extension modules at once, ctypes when it is imported."""
        low_level = importlib.import_module("_imp")
        create = low_level.create_dynamic

        def created(spec: Any, *more: Any) -> Any:
            path = self.native.to_read(spec.origin)
            if path != spec.origin:
                spec = SimpleNamespace(name=spec.name, origin=path, loader=spec.loader, parent=spec.parent)
            return create(spec, *more)

        rebind({id(create): (create, created)})
        watcher.when_imported("ctypes", self._patch_ctypes)

    def _patch_ctypes(self, _ctypes: ModuleType) -> None:
        load = getattr(sys.modules.get("_ctypes"), "dlopen", None)
        if load is None:
            return

        def loaded(name: Any, *more: Any) -> Any:
            return load(self.native.to_read(name) if isinstance(name, str) and "/" in name else name, *more)

        rebind({id(load): (load, loaded)})
