"""Libraries that open files by path in C++ or Rust: they get the path of the script's copy."""

from __future__ import annotations

import errno
import functools
import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from autoddp.isolation.guard import real
from autoddp.isolation.guard.changes import Changes
from autoddp.isolation.guard.imports import Watcher
from autoddp.isolation.guard.install import rebind
from autoddp.isolation.guard.paths import text


class Native:
    """Translates paths, and patches each library when the script imports it."""

    def __init__(self, changes: Changes) -> None:
        self.changes = changes
        self.overlay = changes.overlay

    def start(self, watcher: Watcher) -> None:
        """Wait for the libraries."""
        watcher.when_imported("torch", self.patch_torch)
        watcher.when_imported("torch.distributed", self.patch_distributed)
        watcher.when_imported("safetensors", self.patch_safetensors)
        watcher.when_imported("tokenizers", self.patch_tokenizers)
        watcher.when_imported("torchvision.io.image", self.patch_torchvision)

    # Paths

    def to_read(self, path: Any) -> Any:
        """Where to read; what is no path stays as it is."""
        if not isinstance(path, (str, bytes, os.PathLike)):
            return path
        try:
            place = self.overlay.resolve(text(path))
        except OSError:
            return self._nowhere(path)  # the real path may exist where the script has removed it
        if place.physical == place.path and place.exists:
            return path
        return place.physical if place.exists else self._nowhere(path)

    def to_write(self, path: Any, keep: bool = False) -> Any:
        """Where to write. With `keep` the content is the real file's; else it is about to be replaced."""
        if not isinstance(path, (str, bytes, os.PathLike)):
            return path
        with self.changes.turns.taken():
            try:
                place = self.overlay.resolve(text(path))
                if not place.exists:
                    self.changes.make(place, _touch)
                    return self.changes.above(place)
                if place.is_folder:
                    return self._nowhere(path)
                self.changes.check_content(place)
                return self.changes.copy_up(place, content=keep)
            except OSError as error:
                if error.errno in (errno.ENOENT, errno.ENOTDIR):
                    return self._nowhere(path)  # the library says in its own words that a folder is missing
                error.filename = path
                raise

    def _nowhere(self, path: Any) -> str:
        """A path at which there is nothing and nothing can be made; the script's own if that is one."""
        try:
            there = self.overlay.resolve(text(path), real_only=True).exists
        except OSError:
            return text(path)  # its folder is missing in reality too
        if not there and not self.overlay.resolve(os.path.dirname(text(path)) or ".", real_only=True).exists:
            return text(path)
        return f"{self.overlay.scratch}/nowhere/{os.path.basename(text(path))}"

    # Libraries

    def patch_torch(self, torch: ModuleType) -> None:
        """Checkpoints, scripted modules, mapped storages and traces."""
        core = torch._C
        writer, reader = core.PyTorchFileWriter, core.PyTorchFileReader
        core.PyTorchFileWriter = self._with_path(writer, self.to_write)
        core.PyTorchFileReader = self._with_path(reader, self.to_read)
        for owner, name in ((torch.UntypedStorage, "from_file"), (torch, "from_file")):
            setattr(owner, name, self._mapping(getattr(owner, name), static=owner is not torch))
        for owner, name in ((core.ScriptModule, "save"), (core.ScriptModule, "_save_for_mobile")):
            replace_argument(owner, name, "filename", 1, self.to_write)
        replace_argument(core.ScriptFunction, "save", "filename", 1, self.to_write)
        for name in ("import_ir_module", "_import_ir_module", "_load_for_lite_interpreter"):
            replace_argument(core, name, "filename", 1 if "ir_module" in name else 0, self.to_read)
        for name in ("torch._C._autograd", "torch._C._profiler"):
            bindings = vars(sys.modules[name]) if name in sys.modules else {}
            replace_argument(bindings.get("_ProfilerResult"), "save", "path", 1, self.to_write)
            self._replace_everywhere(bindings.get("_add_execution_trace_observer"))

    def _replace_everywhere(self, function: Any) -> None:
        if function is not None:

            @functools.wraps(function)
            def changed(path: Any, *args: Any, **kwargs: Any) -> Any:
                return function(self.to_write(path), *args, **kwargs)

            rebind({id(function): (function, changed)})

    def _mapping(self, function: Any, static: bool) -> Any:
        @functools.wraps(function)
        def from_file(filename: Any, shared: bool | None = False, *args: Any, **kwargs: Any) -> Any:
            path = self.to_write(filename, keep=True) if shared else self.to_read(filename)
            return function(os.fspath(path), shared, *args, **kwargs)

        return staticmethod(from_file) if static else from_file

    @staticmethod
    def _with_path(kind: Any, change: Callable[[Any], Any]) -> type:
        """A subclass whose first argument may be a path."""
        initialise = kind.__init__

        def init(self: Any, *args: Any, **kwargs: Any) -> None:
            if args:
                args = (change(args[0]), *args[1:])
            initialise(self, *args, **kwargs)

        space = {"__init__": init, "__module__": kind.__module__, "__doc__": kind.__doc__}
        return type(kind.__name__, (kind,), space)

    def patch_distributed(self, distributed: ModuleType) -> None:
        """The store in a file."""
        store = getattr(distributed, "FileStore", None)
        if store is not None:
            changed = self._with_path(store, lambda path: self.to_write(path, keep=True))
            rebind({id(store): (store, changed)})

    def patch_safetensors(self, safetensors: ModuleType) -> None:
        """Both directions; `safetensors.torch` and its siblings take them from here."""
        rust = sys.modules.get("safetensors._safetensors_rust")
        for module in (safetensors, rust):
            replace_argument(module, "serialize_file", "filename", 1, self.to_write)
            replace_argument(module, "safe_open", "filename", 0, self.to_read)

    def patch_tokenizers(self, tokenizers: ModuleType) -> None:
        """A tokenizer that is saved beside a model."""
        for kind in (tokenizers.Tokenizer, getattr(tokenizers.implementations, "BaseTokenizer", None)):
            if kind is tokenizers.Tokenizer:
                replace_argument(kind, "save", "path", 1, self.to_write)
        original = tokenizers.Tokenizer.from_file

        def from_file(path: Any) -> Any:
            return original(self.to_read(path))

        tokenizers.Tokenizer.from_file = staticmethod(from_file)
        model = tokenizers.models.Model
        save = model.save

        @functools.wraps(save)
        def save_model(this: Any, folder: Any, *args: Any, **kwargs: Any) -> Any:
            self.changes.stop(f"tokenizers saves a model to {text(folder)} by itself")

        model.save = save_model

    def patch_torchvision(self, image: ModuleType) -> None:
        """Images that are written by its own extension."""
        for name, position, change in (("write_file", 0, self.to_write), ("read_file", 0, self.to_read)):
            original = getattr(image, name, None)
            replace_argument(image, name, "filename" if name == "write_file" else "path", position, change)
            rebind({id(original): (original, getattr(image, name, None))})


def _touch(path: str) -> None:
    real.close(real.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666))


def replace_argument(owner: Any, name: str, keyword: str, position: int, change: Callable[[Any], Any]) -> None:
    """Let a function get `change(argument)`. A library of another version may not have it."""
    original = getattr(owner, name, None)
    if original is None:
        return

    @functools.wraps(original)
    def changed(*args: Any, **kwargs: Any) -> Any:
        if keyword in kwargs:
            kwargs[keyword] = change(kwargs[keyword])
        elif len(args) > position:
            args = (*args[:position], change(args[position]), *args[position + 1 :])
        return original(*args, **kwargs)

    setattr(owner, name, changed)
