"""What a forked launcher starts with Python, its ranks above all, as forks too: a rank's imports cost it 2 CPU-seconds.

A launcher that `forks.py` has forked starts a rank by `subprocess.Popen([sys.executable, "-u", "train.py"], …)`. Here
that is a fork of the launcher in which Python is put back to what it was before any import. What the program imports it
imports again, by way of the import system and its hooks; only modules that the server had imported (torch) are handed
out as they are, not read and run once more. So a rank is a child of its launcher, with the words, environment, session,
namespaces, limits and streams that it would have, and runs sitecustomize, excepthooks and atexit functions as always.

Two things are not as in a new process. C++ libraries are loaded already: what they read from the environment as they
are loaded is not read again (such starts stay real, see `_READ_EARLY`). And modules are not taken apart at the end.
Tests of how processes start or end use `subprocess` for the launcher; under `--whole` all of them do.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import ctypes
import gc
import importlib
import importlib.machinery
import io
import logging
import mmap
import os
import runpy
import shutil
import signal
import site
import subprocess
import sys
import tempfile
import threading
import traceback
import types
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

_READ_EARLY = ("PYTHON", "LD_", "MALLOC_", "GLIBC_", "OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "TORCH_", "CUDA_")
"""Variables that the interpreter, the loader of libraries, or a library reads once, as it starts."""
_IGNORES = {"PYTHONWARNINGS": "ignore"}
"""The one value of this variable that is put into effect here. Jobs of autoddp's own have it."""
_READ_LATE = {
    "PYTHONPATH",  # its folders are put into sys.path here
    "OMP_NUM_THREADS",  # torch is told
    "TORCH_NCCL_ASYNC_ERROR_HANDLING",  # for NCCL alone
    "TORCH_NCCL_DUMP_ON_TIMEOUT",  # likewise
    "PYTHONSAFEPATH",  # its folder is left out here
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE",  # read when launchers meet
    # scikit-learn sets both in a process of pytest that imports it, for Intel's OpenMP: torch has GNU's. All ranks that
    # were started from there afterwards would be new processes.
    "KMP_DUPLICATE_LIB_OK",
    "KMP_INIT_AT_FORK",
}
_FIRST_LINE = f"#!{sys.executable}\n".encode()


class Preloaded:
    """What the server has imported, and what Python was before that: made in the server, used in its forks."""

    def __init__(self, *names: str, changed: str = "") -> None:
        """Import the modules `names`; a program that imports one of them gets all that this import brings along.

        `changed`: one of them that launchers change, which each program that imports it runs once more.
        """
        users = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        self._path = [entry for entry in sys.path[1:] if entry not in users]
        self._base, self._finders, self._filters = dict(sys.modules), list(sys.meta_path), warnings.filters[:]
        self._base.pop(__name__, None)
        self._groups: dict[str, dict[str, types.ModuleType]] = {}
        for name in names:
            before = set(sys.modules)
            importlib.import_module(name)
            self._groups[name] = {new: module for new, module in list(sys.modules.items()) if new not in before}
            self._groups[name].pop(changed, None)
        for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
            finalizer.atexit = False  # torch's own, which take its libraries apart
        self._loggers = {name: _state(logger) for name, logger in _loggers().items()}
        self._environment, self._cpus = dict(os.environ), len(os.sched_getaffinity(0))
        self._launchers_own: list[Callable[..., Any]] = []
        """Functions that the launcher has registered to be called at its own end."""
        self._kept: list[Any] = []
        """Objects of the launcher: one that is freed in a fork may close a descriptor that is another file by now."""

    def look_in(self, users: str) -> None:
        """Have this process import from the folders of its PYTHONPATH all but what was imported with torch."""
        standard = sys.stdlib_module_names
        kept = {*self._base, *(name for group in self._groups.values() for name in group)}
        for name in list(sys.modules):
            if name not in kept and name.partition(".")[0] not in standard:
                del sys.modules[name]
        sys.path[1:] = self._with_users(users)
        sys.path_importer_cache.clear()

    def _with_users(self, users: str) -> list[str]:
        """sys.path as Python would have it with this PYTHONPATH, but without the program's own folder."""
        return [*(os.path.abspath(entry) for entry in filter(None, users.split(os.pathsep))), *self._path]

    def start_by_forks(self, counts: mmap.mmap) -> None:
        """Let this process start Python programs by forks, and become one without a start.

        `counts` gets their number, and that of other starts.
        """
        popen: Any = subprocess.Popen
        really, register, execve = popen._execute_child, atexit.register, os.execve

        def recorded(function: Callable[..., Any], *arguments: Any, **named: Any) -> Callable[..., Any]:
            self._launchers_own.append(function)
            return register(function, *arguments, **named)

        # Popen.__init__ calls it with all arguments by position.
        def execute(
            started: Any, args: Any, executable: Any, preexec_fn: Any, close_fds: Any, pass_fds: Any, cwd: Any,
            env: Any, startupinfo: Any, creationflags: Any, shell: Any, *rest: Any,
        ) -> None:  # fmt: skip
            # p2cread … errwrite, restore_signals, gid, gids, uid, umask, start_new_session
            pipes, session = rest[:6], rest[11]
            environment = dict(os.environ if env is None else env)
            unusual = executable or preexec_fn or pass_fds or cwd or shell
            python = [] if unusual else _as_python(args, environment)
            if not python or self._begins_otherwise(environment):
                before = (executable, preexec_fn, close_fds, pass_fds, cwd, env, startupinfo, creationflags, shell)
                counts[1] += bool(args) and args[0] == sys.executable
                really(started, args, *before, *rest)
                return
            counts[0] += 1
            sys.stdout.flush()
            sys.stderr.flush()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # from 3.12 on: this process has threads
                started.pid = os.fork()
            if started.pid == 0:
                atexit.register, popen._execute_child, os.execve = register, really, execve
                self._become(python, environment, (pipes[0], pipes[3], pipes[5]), session)
            started._child_created = True
            started._close_pipe_fds(*pipes)

        def becomes(path: Any, words: Sequence[str], environment: Mapping[str, str]) -> None:
            python = _as_python([path, *words[1:]], environment)
            if not python or self._begins_otherwise(environment):
                execve(path, words, environment)
            counts[0] += 1
            self._become(python, dict(environment), (0, 1, 2), False)

        atexit.register, popen._execute_child, os.execve = recorded, execute, becomes

    def _begins_otherwise(self, environment: Mapping[str, str]) -> bool:
        """Whether a new process would begin in another way than the server has, by a variable that is read early."""

        def read_early(variables: Mapping[str, str]) -> dict[str, str]:
            early = {n: v for n, v in variables.items() if n.startswith(_READ_EARLY) and n not in _READ_LATE}
            return dict(early.items() - _IGNORES.items())

        return read_early(environment) != read_early(self._environment)

    def _become(
        self, words: list[str], environment: dict[str, str], streams: Sequence[int], starts_session: bool
    ) -> None:
        """Run the program as the interpreter would; never returns."""
        code = 70
        try:
            _leave_the_launcher(streams, starts_session)
            self._forget_the_launcher()
            os.environ.clear()
            os.environ.update(environment)
            show_in_proc(words, [f"{name}={value}" for name, value in environment.items()])
            _unbuffered_streams()
            self._tell_torch_of_threads(environment)
            sys.path[:] = self._with_users(environment.get("PYTHONPATH", ""))
            sys.orig_argv = words
            rest = words[2:] if words[1] == "-u" else words[1:]
            sys.argv = rest[:] if rest[0] != "-m" else ["-m", *rest[2:]]
            if _IGNORES.items() <= environment.items():
                sys.warnoptions[:] = ["ignore"]
                warnings.simplefilter("ignore")
            site.execsitecustomize()
            code = _run(rest, bool(environment.get("PYTHONSAFEPATH")) and sys.version_info >= (3, 11))
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)

    def _forget_the_launcher(self) -> None:
        for function in self._launchers_own:
            atexit.unregister(function)
        modules, standard = dict(sys.modules), sys.stdlib_module_names
        self._kept += [modules, sys.stdin, sys.stdout, sys.stderr]
        for name in modules:
            if name not in self._base and name.partition(".")[0] not in standard:
                del sys.modules[name]
        for name in ("sitecustomize", "usercustomize"):
            sys.modules.pop(name, None)
        sys.meta_path[:] = [_HandsOut(self._groups), *self._finders]
        sys.path_importer_cache.clear()
        warnings.filters[:] = self._filters
        sys.excepthook, threading.excepthook = sys.__excepthook__, threading.__excepthook__
        tempfile.tempdir = None
        for name, logger in _loggers().items():
            logger.handlers, logger.propagate, logger.level = self._loggers.get(name, ([], True, logging.NOTSET))
        if "multiprocessing.resource_tracker" in sys.modules:
            del sys.modules["multiprocessing.resource_tracker"]  # the launcher's has a descriptor that is closed here
        self._groups["torch"]["torch"].default_generator.seed()  # else all ranks would draw the same
        for group in self._groups.values():
            if "numpy.random" in group:
                group["numpy.random"].seed()

    def _tell_torch_of_threads(self, environment: Mapping[str, str]) -> None:
        """As OpenMP would have found it out while torch was loaded."""
        threads, cpus = environment.get("OMP_NUM_THREADS", ""), len(os.sched_getaffinity(0))
        if threads.isdigit() or cpus != self._cpus:
            self._groups["torch"]["torch"].set_num_threads(int(threads) if threads.isdigit() else cpus)


class _HandsOut:
    """A finder, and the loader, of modules that are in memory already."""

    def __init__(self, groups: Mapping[str, dict[str, types.ModuleType]]) -> None:
        self._groups = groups
        self._modules = {name: module for group in groups.values() for name, module in group.items()}
        self._specs = {name: getattr(module, "__spec__", None) for name, module in self._modules.items()}

    def find_spec(self, name: str, path: object = None, target: object = None) -> importlib.machinery.ModuleSpec | None:
        module = self._modules.get(name)
        if module is None:
            return None
        of_old = self._specs[name]
        spec = importlib.machinery.ModuleSpec(name, self, origin=getattr(of_old, "origin", None))  # type: ignore[arg-type]
        spec.submodule_search_locations = getattr(of_old, "submodule_search_locations", None)
        return spec

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return self._modules[spec.name]

    def exec_module(self, module: types.ModuleType) -> None:
        """Put its old spec back, and bring all that its first import brought along."""
        name = next(name for name, known in self._modules.items() if known is module)
        module.__spec__ = self._specs[name]
        ahead: list[Any] = sys.meta_path[: sys.meta_path.index(self)]  # type: ignore[arg-type]
        for other, known in self._groups.get(name, {}).items():
            if other in sys.modules:
                continue
            if any(finder.find_spec(other, None) for finder in ahead):
                importlib.import_module(other)  # somebody waits for its import
            else:
                sys.modules[other] = known


def _as_python(args: Any, environment: Mapping[str, str]) -> list[str]:
    """The command as this interpreter with a script or a module, and no option but -u; else nothing.

    Programs such as torchrun are scripts of this interpreter, which the kernel starts in their place.
    """
    words = list(args) if isinstance(args, (list, tuple)) else [args]  # elastic gives a tuple
    if words and words[0] != sys.executable:
        with contextlib.suppress(OSError, TypeError):
            program: Any = shutil.which(words[0], path=environment.get("PATH"))
            with open(program, "rb") as file:
                words = [sys.executable, program, *words[1:]] if file.readline(4096) == _FIRST_LINE else []
    rest = words[2:] if words[1:2] == ["-u"] else words[1:]
    runs = len(rest) > 1 if rest[:1] == ["-m"] else bool(rest) and os.path.isfile(rest[0])
    return words if runs and words[0] == sys.executable else []


def _leave_the_launcher(streams: Sequence[int], starts_session: bool) -> None:
    """What the kernel and `Popen` do between fork and exec."""
    gc.freeze()
    if starts_session:
        os.setsid()
    for number, descriptor in enumerate(streams):
        if descriptor not in (-1, number):
            os.dup2(descriptor, number)
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2:
            with contextlib.suppress(OSError):
                os.close(int(name))
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        if signal.getsignal(number) != signal.SIG_IGN:
            with contextlib.suppress(OSError, ValueError):
                signal.signal(number, signal.SIG_DFL)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # as Python does when it starts
        signal.signal(number, signal.SIG_IGN)
    if signal.getsignal(signal.SIGINT) == signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _unbuffered_streams() -> None:
    def text(number: int, mode: str, errors: str) -> Any:
        raw: Any = io.open(number, mode, buffering=0 if mode == "wb" else -1, closefd=False)  # noqa: SIM115, UP020
        return io.TextIOWrapper(raw, "utf-8", errors, write_through=mode == "wb")

    for name, number, mode in (("stdin", 0, "rb"), ("stdout", 1, "wb"), ("stderr", 2, "wb")):
        try:
            stream = text(number, mode, "backslashreplace" if name == "stderr" else "strict")
        except OSError:
            stream = None  # it is closed
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _run(words: Sequence[str], is_safe_path: bool) -> int:
    """Run a script or `-m MODULE` as `__main__` to its end, with what Python does then; its exit code.

    `is_safe_path`: without the script's folder, or the current one, in sys.path.
    """
    main = types.ModuleType("__main__")
    main.__builtins__ = builtins  # type: ignore[attr-defined]
    sys.modules["__main__"] = main
    code = 0
    try:
        if not is_safe_path:
            sys.path.insert(0, os.getcwd() if words[0] == "-m" else os.path.dirname(os.path.realpath(words[0])))
        if words[0] == "-m":
            runpy._run_module_as_main(words[1])  # type: ignore[attr-defined]
        else:
            main.__file__ = words[0]
            main.__loader__ = importlib.machinery.SourceFileLoader("__main__", words[0])
            with io.open_code(os.path.abspath(words[0])) as file:
                source = file.read()
            exec(compile(source, words[0], "exec"), main.__dict__)
    except SystemExit as ended:
        code = _exit_code(ended)
    except BaseException as error:
        code = _tell(error)
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    if code < 0:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    return code & 0xFF


def _exit_code(ended: SystemExit) -> int:
    if ended.code is None or isinstance(ended.code, int):
        return ended.code or 0
    print(ended.code, file=sys.stderr)
    return 1


def _tell(error: BaseException) -> int:
    """Report an exception as Python does that nobody has caught, without the frames that are above the program's."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename in (__file__, "<frozen runpy>", runpy.__file__):
        trace = trace.tb_next
    error.__traceback__ = trace
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, trace
    if sys.version_info >= (3, 12):
        sys.last_exc = error
    try:
        sys.excepthook(type(error), error, trace)
    except SystemExit as ended:
        return _exit_code(ended)
    except BaseException:
        traceback.print_exc()
    return -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1


def show_in_proc(words: list[str], variables: list[str]) -> None:
    """Let /proc/PID/cmdline and environ show these: other processes know this one by them."""
    numbers = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    begins, ends, env_begins, env_ends = map(int, numbers[45:49])
    for shown, start, end in ((words, begins, ends), (variables, env_begins, env_ends)):
        text = b"".join(os.fsencode(one) + b"\0" for one in shown)
        assert len(text) < end - start
        ctypes.memmove(start, text.ljust(end - start, b"\0"), end - start)


def _loggers() -> dict[str, logging.Logger]:
    known = logging.root.manager.loggerDict
    return {"": logging.root, **{name: one for name, one in list(known.items()) if isinstance(one, logging.Logger)}}


def _state(logger: logging.Logger) -> tuple[list[logging.Handler], bool, int]:
    return list(logger.handlers), logger.propagate, logger.level
