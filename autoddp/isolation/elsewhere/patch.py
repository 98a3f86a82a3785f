"""How a library is watched: a table names its operations, and each gets a check when the script imports the library."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from fnmatch import fnmatchcase
from types import ModuleType
from typing import Any, NoReturn

from autoddp.isolation.hooks import when_imported

Stop = Callable[[str], NoReturn]
_COROUTINE = 0x80  # inspect.CO_COROUTINE
_reads: ContextVar[bool] = ContextVar("autoddp_reads", default=False)


@dataclass(frozen=True)
class Call:
    """One call of a watched operation."""

    operation: str
    owner: Any
    """The object whose method it is; None for a function."""
    args: tuple[Any, ...]
    """Positional arguments, without `owner`."""
    kwargs: Mapping[str, Any]
    names: Sequence[str] = ()
    """Names of the positional arguments."""

    def argument(self, *names: str, default: Any = None) -> Any:
        """The argument that has one of these names, however it was passed."""
        for name in names:
            if name in self.kwargs:
                return self.kwargs[name]
            if name in self.names and self.names.index(name) < len(self.args):
                return self.args[self.names.index(name)]
        return default


@dataclass(frozen=True)
class Client:
    """One library and its operations that change something elsewhere."""

    name: str
    modules: str
    """Modules in which to look for the operations, separated by blanks: the library may have moved them."""
    operations: str
    """`function` or `Class.method`, separated by blanks; `.method` is of the same class as the one before.

    A name with `*` is a pattern over public names.
    """
    says: str = "writes to"
    """The verb of the reason; what follows it is `target`."""
    target: str = ""
    """Names of the arguments that may say where it writes, separated by blanks."""
    reads: str = ""
    """Patterns of the operations that pass."""
    judge: Callable[[Call], str] | None = None
    """Called before each operation, in place of `says` and `target`; it returns "" to let the operation pass, else the
    verb and the target."""
    reads_may_post: bool = False
    """What `judge` lets pass may send any HTTP request: AWS' reads are POSTs."""


def watch(clients: Sequence[Client], stop: Stop) -> None:
    """Check the operations of each client from the import of its module on."""
    by_module: dict[str, list[Client]] = {}
    for client in clients:
        for module in client.modules.split():
            by_module.setdefault(module, []).append(client)
    for module, its in by_module.items():
        patch_when_imported(module, functools.partial(_patch, its, stop))


def patch_when_imported(module: str, patch: Callable[[ModuleType], None]) -> None:
    """Call `patch(module)` after its import. A fault in it must not break the script's import."""

    def imported(module: ModuleType) -> None:
        try:
            patch(module)
        except Exception:  # an unknown version of the library: its HTTP requests are checked all the same
            return

    when_imported(module, imported)


def inside_read() -> bool:
    """Whether this code runs inside an operation that is known to read only."""
    return _reads.get()


@contextmanager
def _reading(yes: bool) -> Iterator[None]:
    token = _reads.set(yes or _reads.get())
    try:
        yield
    finally:
        _reads.reset(token)


def _patch(clients: Sequence[Client], stop: Stop, module: ModuleType) -> None:
    replaced: dict[Any, str] = {}
    for client in clients:
        class_name = ""
        for operation in client.operations.split():
            owner_name, _, pattern = operation.rpartition(".")
            if not operation.startswith("."):
                class_name = owner_name
            owner = getattr(module, class_name, None) if class_name else module
            if owner is None:
                continue
            wrappers = {}
            for name, raw in _matching(owner, pattern, client.reads.split()):
                check = functools.partial(_check, client, stop, name)
                wrappers[name] = watched(raw, check, client.reads_may_post)
                replaced[_function(raw)] = name
            _put(module, class_name, owner, wrappers)
    _rebind(module, replaced)


def _matching(owner: Any, pattern: str, spared: Sequence[str]) -> Iterator[tuple[str, Any]]:
    names = [pattern] if "*" not in pattern else [name for name in dir(owner) if not name.startswith("_")]
    for name in names:
        if fnmatchcase(name, pattern) and not any(fnmatchcase(name, read) for read in spared):
            raw = _raw(owner, name)
            if callable(_function(raw)):
                yield name, raw


def _raw(owner: Any, name: str) -> Any:
    """The attribute as it is stored: a staticmethod stays one."""
    for base in getattr(owner, "__mro__", (owner,)):
        if name in vars(base):
            return vars(base)[name]
    return None


def _function(raw: Any) -> Any:
    return raw.__func__ if isinstance(raw, (staticmethod, classmethod)) else raw


def _put(module: ModuleType, owner_name: str, owner: Any, wrappers: Mapping[str, Any]) -> None:
    try:
        for name, wrapper in wrappers.items():
            setattr(owner, name, wrapper)
    except TypeError:  # a class written in C is immutable: the module gets a subclass of it
        subclass = type(owner.__name__, (owner,), {"__module__": owner.__module__, **wrappers})
        setattr(module, owner_name, subclass)


def _rebind(module: ModuleType, replaced: Mapping[Any, str]) -> None:
    """A module that ends with `upload_file = api.upload_file` holds the method that was there before."""
    for name, value in list(vars(module).items()):
        bound = getattr(value, "__self__", None)
        if bound is not None and getattr(value, "__func__", None) in replaced:
            setattr(module, name, getattr(bound, replaced[value.__func__]))


def _check(client: Client, stop: Stop, operation: str, call: Call) -> None:
    """End tuning if the call changes something elsewhere."""
    try:
        said = _what(client, call) if client.judge is None else client.judge(call)
    except Exception:  # unknown arguments: without tuning the job runs as written, which is never wrong
        said = f"{client.says} another machine"
    if said:
        stop(f"{client.name} {said} ({operation})")


def _what(client: Client, call: Call) -> str:
    target = call.argument(*client.target.split())
    return client.says if target is None else f"{client.says} {plain(target)}"


def words(text: str) -> frozenset[str]:
    """The words of a text as a set: words("get put") is {"get", "put"}."""
    return frozenset(text.split())


def plain(value: Any) -> str:
    """A target in one short line."""
    name = getattr(value, "name", value)  # a bucket object
    return " ".join(str(name).split())[:120]


def watched(raw: Any, check: Callable[[Call], None], reads_may_post: bool = False) -> Any:
    """`raw`, with a call of `check` before it. It is a plain function, because fsspec and inspect ask for its type."""
    if isinstance(raw, (staticmethod, classmethod)):
        return type(raw)(watched(raw.__func__, check, reads_may_post))
    innermost = raw
    while hasattr(innermost, "__wrapped__"):
        innermost = innermost.__wrapped__
    code = getattr(innermost, "__code__", None)
    names: tuple[str, ...] = code.co_varnames[: code.co_argcount] if code else ()
    method = bool(names) and names[0] in ("self", "cls")
    if code is None:  # written in C: a method descriptor gets its object first, a function does not
        method = type(raw).__name__ in ("method_descriptor", "wrapper_descriptor", "cython_function_or_method")

    def checked(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        owner, rest = (args[0], args[1:]) if method and args else (None, args)
        check(Call(getattr(raw, "__name__", ""), owner, rest, kwargs, names[1:] if method else names))

    if getattr(getattr(raw, "__code__", None), "co_flags", 0) & _COROUTINE:

        async def wait(*args: Any, **kwargs: Any) -> Any:
            checked(args, kwargs)
            with _reading(reads_may_post):
                return await raw(*args, **kwargs)

        return functools.wraps(raw)(wait)

    def run(*args: Any, **kwargs: Any) -> Any:
        checked(args, kwargs)
        with _reading(reads_may_post):
            return raw(*args, **kwargs)

    return functools.wraps(raw)(run)
