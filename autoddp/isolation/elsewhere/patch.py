"""How a library is watched: a table entry names its operations, and each is wrapped when the script imports it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from fnmatch import fnmatchcase
from types import ModuleType
from typing import Any, NoReturn

import wrapt

Stop = Callable[[str], NoReturn]
_COROUTINE = 0x80  # inspect.CO_COROUTINE
_vouched: ContextVar[bool] = ContextVar("autoddp_vouched", default=False)


@dataclass(frozen=True)
class Call:
    """One call of a watched operation."""

    operation: str
    owner: Any
    """The object whose method it is; None for a function."""
    args: tuple[Any, ...]
    """Without `owner`."""
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
    """Where the operations are, separated by blanks: the library may have moved them."""
    operations: str
    """`function` or `Class.method`, separated by blanks; `Class.upload_*` is a pattern over public names."""
    says: str = "writes to"
    """The verb of the reason; what follows it is `target`."""
    target: str = ""
    """Names of the arguments that may say where it writes, separated by blanks."""
    reads: str = ""
    """Exceptions from `operations`."""
    judge: Callable[[Call], str] | None = None
    """Called before each operation; "" lets it through, else the verb and the target."""
    vouches: bool = False
    """What the judge lets through may send any HTTP request: AWS reads are POSTs."""


def arm(clients: Sequence[Client], stop: Stop) -> None:
    """Wrap the operations of each client when its module is imported; a module that is there already, now."""
    by_module: dict[str, list[Client]] = {}
    for client in clients:
        for module in client.modules.split():
            by_module.setdefault(module, []).append(client)
    for module, its in by_module.items():
        when_imported(module, functools.partial(_patch, its, stop))


def when_imported(module: str, patch: Callable[[ModuleType], None]) -> None:
    """Call `patch(module)` after its import. A fault of ours must not break the script's import."""

    def imported(module: ModuleType) -> None:
        try:
            patch(module)
        except Exception:  # a version unlike all that we know: the HTTP door still stands behind this one
            return

    wrapt.register_post_import_hook(imported, module)


def vouched() -> bool:
    """Whether this call is inside one that is known to read only."""
    return _vouched.get()


@contextmanager
def _vouching(yes: bool) -> Iterator[None]:
    token = _vouched.set(yes or _vouched.get())
    try:
        yield
    finally:
        _vouched.reset(token)


def _patch(clients: Sequence[Client], stop: Stop, module: ModuleType) -> None:
    replaced: dict[Any, str] = {}
    for client in clients:
        for operation in client.operations.split():
            owner_name, _, pattern = operation.rpartition(".")
            owner = getattr(module, owner_name, None) if owner_name else module
            if owner is None:
                continue
            wrappers = {
                name: watched(raw, functools.partial(_check, client, stop, name), client.vouches)
                for name, raw in _matching(owner, pattern, client.reads)
            }
            replaced.update((_function(_raw(owner, name)), name) for name in wrappers)
            _put(module, owner_name, owner, wrappers)
    _rebind(module, replaced)


def _matching(owner: Any, pattern: str, reads: str) -> list[tuple[str, Any]]:
    names = [pattern] if "*" not in pattern else [name for name in dir(owner) if not name.startswith("_")]
    found = [(name, _raw(owner, name)) for name in names if fnmatchcase(name, pattern)]
    spared = reads.split()
    return [
        (name, raw)
        for name, raw in found
        if callable(_function(raw)) and not any(fnmatchcase(name, read) for read in spared)
    ]


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
    """`upload_file = api.upload_file` at the end of a module has bound the function that was there before."""
    for name, value in list(vars(module).items()):
        bound = getattr(value, "__self__", None)
        if bound is not None and getattr(value, "__func__", None) in replaced:
            setattr(module, name, getattr(bound, replaced[value.__func__]))


def _check(client: Client, stop: Stop, operation: str, call: Call) -> None:
    if client.judge is None:
        target = call.argument(*client.target.split()) if client.target else None
        said = client.says if target is None else f"{client.says} {plain(target)}"
    else:
        said = _judged(client, call)
    if said:
        stop(f"{client.name} {said} ({operation})")


def _judged(client: Client, call: Call) -> str:
    assert client.judge is not None
    try:
        return client.judge(call)
    except Exception:  # arguments unlike all that we know: the job runs as written, which harms nobody
        return f"{client.says} another machine"


def words(text: str) -> frozenset[str]:
    """Long lists stay readable: words("get put") is {"get", "put"}."""
    return frozenset(text.split())


def plain(value: Any) -> str:
    """A target in one short line."""
    name = getattr(value, "name", value)  # a bucket object
    return " ".join(str(name).split())[:120]


def watched(raw: Any, check: Callable[[Call], None], vouches: bool = False) -> Any:
    """`raw` with `check` in front of it; a plain function, because fsspec and inspect look at what it is."""
    if isinstance(raw, (staticmethod, classmethod)):
        return type(raw)(watched(raw.__func__, check, vouches))
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
            with _vouching(vouches):
                return await raw(*args, **kwargs)

        return functools.wraps(raw)(wait)

    def run(*args: Any, **kwargs: Any) -> Any:
        checked(args, kwargs)
        if not vouches:
            return raw(*args, **kwargs)
        with _vouching(True):
            return raw(*args, **kwargs)

    return functools.wraps(raw)(run)
