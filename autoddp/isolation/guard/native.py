"""Libraries that open files by path in C, C++ or Rust: they get the path of the script's copy.

So do extension modules and libraries that the script has built, as `torch.compile` does, when they are loaded.
"""

from __future__ import annotations

import errno
import functools
import importlib
import os
import stat
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

from autoddp.isolation import real
from autoddp.isolation.guard.paths import is_path, text
from autoddp.isolation.guard.view import Place, View
from autoddp.isolation.hooks import replace_everywhere, when_imported
from autoddp.isolation.pipes import OTHERS

_READ, _WRITE = "to_read", "to_write"

_PATH_ARGUMENTS = {
    # library: module, function or Class.method, parameter, its position (0 is a method's object), method of `Native`
    "torch": (
        ("torch._C", "ScriptModule.save", "filename", 1, _WRITE),
        ("torch._C", "ScriptModule._save_for_mobile", "filename", 1, _WRITE),
        ("torch._C", "ScriptFunction.save", "filename", 1, _WRITE),
        ("torch._C", "_save_jit_module", "filename", 1, _WRITE),
        ("torch._C", "_save_mobile_module", "filename", 1, _WRITE),
        ("torch._C", "_save_parameters", "filename", 1, _WRITE),
        ("torch._C", "_backport_for_mobile", "filename_input", 0, _READ),
        ("torch._C", "_backport_for_mobile", "filename_output", 1, _WRITE),
        ("torch._C", "_backport_for_mobile_from_buffer", "filename_output", 1, _WRITE),
        ("torch._C", "_load_jit_module_from_file", "filename", 0, _READ),
        ("torch._C", "_load_mobile_module_from_file", "filename", 0, _READ),
        ("torch._C", "_CUDAGraph.debug_dump", "debug_path", 1, _WRITE),
        ("torch._C", "_acceleratorGraph.debug_dump", "path", 1, _WRITE),
        ("torch._C", "_cuda_tunableop_write_file", "filename", 0, _WRITE),
        ("torch._C", "import_ir_module", "filename", 1, _READ),
        ("torch._C", "_import_ir_module", "filename", 1, _READ),
        ("torch._C", "_load_for_lite_interpreter", "filename", 0, _READ),
        ("torch._C._autograd", "_ProfilerResult.save", "path", 1, _WRITE),
        ("torch._C._profiler", "_ProfilerResult.save", "path", 1, _WRITE),
    ),
    "safetensors": (  # `safetensors.torch` and its siblings take them from here
        ("safetensors", "serialize_file", "filename", 1, _WRITE),
        ("safetensors", "safe_open", "filename", 0, _READ),
        ("safetensors._safetensors_rust", "serialize_file", "filename", 1, _WRITE),
        ("safetensors._safetensors_rust", "safe_open", "filename", 0, _READ),
    ),
    "tokenizers": (("tokenizers", "Tokenizer.save", "path", 1, _WRITE),),
    "torchvision.io.image": (
        ("torchvision.io.image", "write_file", "filename", 0, _WRITE),
        ("torchvision.io.image", "read_file", "path", 0, _READ),
    ),
}
"""Arguments that are paths, by the library that must have been imported. Other versions may lack some functions."""


class Native:
    """Translates paths, and patches each library when the script imports it."""

    def __init__(self, view: View) -> None:
        self.view = view

    def start(self) -> None:
        """Patch Python's loader of extension modules now, and libraries as soon as they are imported."""
        replace_everywhere(importlib.import_module("_imp").create_dynamic, self._loading)
        for library in _PATH_ARGUMENTS:
            when_imported(library, functools.partial(self._patch_arguments, library))
        when_imported("torch", self._patch_torch)
        when_imported("torch.distributed", self._patch_distributed)
        when_imported("tokenizers", self._patch_tokenizers)
        when_imported("ctypes", self._patch_ctypes)
        when_imported("readline", self._patch_readline)
        when_imported("ssl", self._patch_key_log)

    # Paths

    def to_read(self, path: Any) -> Any:
        """The path to read from; what is no path stays as it is."""
        if not is_path(path):
            return path
        try:
            place = self.view.resolve(path)
        except OSError:
            return self._nowhere(path)  # the real path may exist where the script has removed it
        self._require_no_pipe(place)
        if place.physical == place.path and place.exists:
            return path
        return place.physical if place.exists else self._nowhere(path)

    def to_write(self, path: Any, keep: bool = False) -> Any:
        """The path to write to. With `keep` the copy has the real file's content; else that is about to be replaced."""
        if not is_path(path):
            return path
        with self.view.lock.held():
            try:
                place = self.view.resolve(path)
                if not place.exists:
                    self.view.make(place, lambda at: real.create(at, 0o666))
                    return self.view.above(place)
                if place.is_folder:
                    return self._nowhere(path)
                self._require_no_pipe(place)
                self.view.check_content(place)
                return self.view.copy_up(place, content=keep)
            except OSError as error:
                if error.errno in (errno.ENOENT, errno.ENOTDIR):
                    return self._nowhere(path)  # the library says in its own words that a folder is missing
                error.filename = path
                raise

    def _require_no_pipe(self, place: Place) -> None:
        """A library that opens a pipe is seen by no audit hook."""
        if place.is_real and stat.S_ISFIFO(place.found().st_mode):
            self.view.stop(f"open of {place.path}, {OTHERS}")

    def _nowhere(self, path: Any) -> str:
        """A path at which there is nothing and nothing can be made; the script's own if that is one."""
        try:
            there = self.view.resolve(path, real_only=True).exists
        except OSError:
            return text(path)  # its folder is missing in reality too
        if not there and not self.view.resolve(os.path.dirname(text(path)) or ".", real_only=True).exists:
            return text(path)
        return f"{self.view.scratch}/nowhere/{os.path.basename(text(path))}"

    # Libraries

    def _patch_arguments(self, library: str, _module: ModuleType) -> None:
        for module, function, keyword, position, change in _PATH_ARGUMENTS[library]:
            owner_name, _, name = function.rpartition(".")
            owner = sys.modules.get(module)
            owner = getattr(owner, owner_name, None) if owner_name else owner
            original = getattr(owner, name, None)
            if original is None:
                continue
            changed = _with_argument(original, keyword, position, getattr(self, change))
            setattr(owner, name, changed)
            if library.startswith("torchvision"):  # its package has taken the functions already
                replace_everywhere(original, functools.partial(_always, changed))

    def _patch_torch(self, torch: ModuleType) -> None:
        """Checkpoints, mapped storages and traces."""
        core = torch._C
        core.PyTorchFileWriter = _with_path(core.PyTorchFileWriter, self.to_write)
        core.PyTorchFileReader = _with_path(core.PyTorchFileReader, self.to_read)
        torch.from_file = self._mapping(torch.from_file)  # type: ignore[attr-defined]
        torch.UntypedStorage.from_file = staticmethod(self._mapping(torch.UntypedStorage.from_file))
        for name in ("torch._C._autograd", "torch._C._profiler"):
            bindings = vars(sys.modules[name]) if name in sys.modules else {}
            replace_everywhere(bindings.get("_add_execution_trace_observer"), self._with_first_argument)

    def _with_first_argument(self, function: Any) -> Any:
        @functools.wraps(function)
        def changed(path: Any, *args: Any, **kwargs: Any) -> Any:
            return function(self.to_write(path), *args, **kwargs)

        return changed

    def _mapping(self, function: Any) -> Any:
        @functools.wraps(function)
        def from_file(filename: Any, shared: bool | None = False, *args: Any, **kwargs: Any) -> Any:
            path = self.to_write(filename, keep=True) if shared else self.to_read(filename)
            return function(os.fspath(path), shared, *args, **kwargs)

        return from_file

    def _patch_distributed(self, distributed: ModuleType) -> None:
        """The store in a file."""
        store = getattr(distributed, "FileStore", None)
        replace_everywhere(store, lambda kind: _with_path(kind, functools.partial(self.to_write, keep=True)))

    def _patch_tokenizers(self, tokenizers: ModuleType) -> None:
        """A tokenizer that is saved beside a model."""
        kind, model = tokenizers.Tokenizer, tokenizers.models.Model
        kind.from_file = staticmethod(_with_argument(kind.from_file, "path", 0, self.to_read))

        @functools.wraps(model.save)
        def save(this: Any, folder: Any, *args: Any, **kwargs: Any) -> Any:
            self.view.stop(f"tokenizers saves a model to {text(folder)} by itself")

        model.save = save

    def _patch_readline(self, readline: ModuleType) -> None:
        """The history of what was typed, by default in a file of the user's home folder."""

        def replace(name: str, position: int, change: Callable[[Any], Any]) -> None:
            original = getattr(readline, name, None)
            if original is not None:

                @functools.wraps(original)
                def called(*args: Any) -> Any:
                    path = args[position] if len(args) > position else None
                    default = os.path.expanduser("~/.history")
                    return original(*args[:position], change(default if path is None else path))

                setattr(readline, name, called)

        replace("read_history_file", 0, self.to_read)
        replace("write_history_file", 0, self.to_write)
        replace("append_history_file", 1, functools.partial(self.to_write, keep=True))

    def _patch_key_log(self, ssl: ModuleType) -> None:
        """OpenSSL appends the keys of each connection to this file, which SSLKEYLOGFILE may name."""
        original = ssl.SSLContext.keylog_filename

        def assign(context: Any, path: Any) -> None:
            original.__set__(context, self.to_write(path, keep=True))

        def found(context: Any) -> Any:
            path = original.__get__(context)
            return path if path is None else self.view.virtual(os.fsdecode(path))

        ssl.SSLContext.keylog_filename = property(found, assign)

    def _patch_ctypes(self, _ctypes: ModuleType) -> None:
        def make(load: Any) -> Any:
            def loaded(name: Any, *more: Any) -> Any:
                return load(self.to_read(name) if isinstance(name, str) and "/" in name else name, *more)

            return loaded

        replace_everywhere(getattr(sys.modules.get("_ctypes"), "dlopen", None), make)

    def _loading(self, create: Any) -> Any:
        def created(spec: Any, *more: Any) -> Any:
            path = self.to_read(spec.origin)
            if path != spec.origin:
                spec = SimpleNamespace(name=spec.name, origin=path, loader=spec.loader, parent=spec.parent)
            return create(spec, *more)

        return created


def _always(new: Any, _original: Any) -> Any:
    return new


def _with_path(kind: Any, change: Callable[[Any], Any]) -> type:
    """A subclass whose first argument may be a path."""
    initialise = kind.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        if args:
            args = (change(args[0]), *args[1:])
        initialise(self, *args, **kwargs)

    return type(kind.__name__, (kind,), {"__init__": init, "__module__": kind.__module__, "__doc__": kind.__doc__})


def _with_argument(original: Any, keyword: str, position: int, change: Callable[[Any], Any]) -> Any:
    """A function that calls the original one with `change(argument)`."""

    @functools.wraps(original)
    def changed(*args: Any, **kwargs: Any) -> Any:
        if keyword in kwargs:
            kwargs[keyword] = change(kwargs[keyword])
        elif len(args) > position:
            args = (*args[:position], change(args[position]), *args[position + 1 :])
        return original(*args, **kwargs)

    return changed
