"""Python programs as forks of a process that has imported torch: a start costs 0.1 s of CPU time, not 2 to 3 s.

    process = forks.popen(["-m", "autoddp", "--trials", "0", "train.py"], cwd=folder, env=env, stdout=out, stderr=err)
    process.wait(100)

The program is a process of its own, with its own words, environment, working folder and streams, also in /proc. Two
things are not as in `python WORDS`: torch, its compiler and what launchers use of autoddp are imported before the
program begins; and after the last function of `atexit` the process ends at once, as to take all modules apart costs
another second. A test of how a process starts, of what it imports, or of how C++ objects are destroyed must use
subprocess.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import gc
import hashlib
import importlib
import inspect
import json
import mmap
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from started_forks import Preloaded, show_in_proc

PATIENCE = 150  # seconds; on a machine that is busy elsewhere

run_id = os.environ.get("PYTEST_XDIST_TESTRUNUID", str(os.getpid()))
"""Processes with the same one share their servers: an import of torch is four to six CPU seconds."""

STARTS: Counter[str] = Counter()
"""What this process has started so far: launchers, forks of their own (ranks), and new processes of Python."""

_ROOM = 2**16
"""Bytes of the server's own words and of its own environment: the words and variables of its forks replace them."""
_NAMESPACES = {"net": 0x40000000, "uts": 0x04000000, "mnt": 0x00020000}  # CLONE_NEW… of linux/sched.h
_LAUNCHERS = ("autoddp.cli.main", "autoddp.cli.tuned", "autoddp.attempts.tune")
"""What launchers import that tune. Their ranks import it anew."""
_EARLY = ("PYTHON", "LD_")
"""Variables that the interpreter and the loader of libraries read as they start: each set of them has a server."""


def popen(
    words: Sequence[str],
    *,
    cwd: str | Path = ".",
    env: Mapping[str, str],
    stdin: Any = None,
    stdout: Any = None,
    stderr: Any = None,
    host: int | None = None,
    imported: tuple[str, ...] = (),
) -> Fork:
    """Run `python WORDS`; `words` begin with -m, -c or a script. `host` is the holder of a lab's host to run it on.

    `imported`: modules that the server has imported in place of torch; such a program starts others as Python does.
    """
    early = {name: value for name, value in env.items() if name.startswith(_EARLY)}
    if not imported:
        early["PYTHONPATH"] = paths()  # in place of another one, of which a fork is told
    request = {"words": list(words), "cwd": os.path.abspath(cwd), "env": dict(env), "host": host}
    streams = [number if file is None else file.fileno() for number, file in enumerate((stdin, stdout, stderr))]
    return Fork(_server(tuple(sorted(early.items())), imported), request, streams)


def paths() -> str:
    """PYTHONPATH, with the checkout to import from first."""
    return os.pathsep.join([str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])])


def run(words: Sequence[str], **options: Any) -> subprocess.CompletedProcess[str]:
    """Run `python WORDS` to its end. What it printed is kept in memory, in no folder."""
    with open(os.memfd_create("out"), "w+b") as out, open(os.memfd_create("err"), "w+b") as err:
        process = popen(words, stdout=out, stderr=err, **options)
        try:
            code = process.wait(PATIENCE)
        finally:
            process.kill()
        for stream in (out, err):
            stream.seek(0)
        return subprocess.CompletedProcess(words, code, out.read().decode(), err.read().decode())


class Fork:
    """What tests use of `subprocess.Popen`."""

    def __init__(self, server: socket.socket, request: dict[str, Any], streams: Sequence[int]) -> None:
        self.returncode: int | None = None
        self.args = request["words"]
        read, write = os.pipe()
        socket.send_fds(server, [json.dumps(request).encode()], [*streams, write])
        os.close(write)
        self._told = os.fdopen(read)
        """A line with the process id, and at its end a line with the exit code and what it started."""
        self.pid = int(self._told.readline())

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not select.select([self._told], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
            code, forked, new = map(int, self._told.readline().split())
            self.returncode = code
            STARTS.update({"launchers": 1, "ranks": forked, "new": new})
        return self.returncode

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


@functools.cache
def _server(early: Sequence[tuple[str, str]], imported: Sequence[str]) -> socket.socket:
    """The way to the server, which all of pytest's processes share, and which ends with the last of them."""
    name = "\0" + hashlib.sha256(repr((os.getuid(), run_id, early, imported)).encode()).hexdigest()
    listener, ours = (socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(2))
    with listener, contextlib.suppress(OSError):  # where another process has it, that one starts the server
        listener.bind(name)
        listener.listen()
        others = {n: v for n, v in os.environ.items() if not n.startswith(_EARLY)}
        subprocess.Popen(
            [sys.executable, __file__, str(listener.fileno()), "x" * _ROOM, *imported],
            env={**others, **dict(early), "ROOM": "x" * _ROOM},
            pass_fds=[listener.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )
    until = time.monotonic() + PATIENCE
    while ours.connect_ex(name):
        assert time.monotonic() < until, "no server"
        time.sleep(0.01)
    atexit.register(ours.close)
    return ours


def _serve(listener: socket.socket, imported: Sequence[str]) -> dict[str, Any]:
    """Fork for each request; return in the fork, with the request. All ends where nobody can ask any more."""
    preloaded = None if imported else _with_torch()
    for name in imported:
        importlib.import_module(name)
    signal.signal(signal.SIGCHLD, _wait_for_all)  # their CPU time is then known, see `cpu_time`
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    links = [listener]
    while True:
        for link in select.select(links, [], [])[0]:
            if link is listener:
                links.append(listener.accept()[0])
                continue
            message, streams, _, _ = socket.recv_fds(link, 2 * _ROOM, 4)
            if not message:
                links.remove(link)
                link.close()
                if links == [listener]:
                    os._exit(0)
                continue
            if os.fork() == 0:
                for one in links:
                    one.close()
                _stay_as_parent(streams.pop(), preloaded)
                for number, stream in enumerate(streams):
                    os.dup2(stream, number)
                    os.close(stream)
                return {**json.loads(message), "preloaded": preloaded}
            for stream in streams:
                os.close(stream)


def _with_torch() -> Preloaded:
    """Import torch, and what launchers use."""
    torchrun = "torch.distributed.run"
    gc.disable()
    # The first optimizer imports _dynamo; `autoddp wrap` changes torchrun.
    preloaded = Preloaded("torch", "torch._dynamo", torchrun, changed=torchrun)
    del sys.modules[torchrun]  # else it could not be run as a program without a warning
    with contextlib.suppress(Exception):  # where a package is broken, the launcher finds that out
        for name in _LAUNCHERS:
            importlib.import_module(name)
        pages = importlib.import_module("autoddp.report.page")._environment()
        for template in pages.list_templates(["html", "css"]):  # each launcher that tunes would compile them
            pages.get_template(template)
    inspect.stack()  # torch asks for it in each launcher; Python looks up the file of each module for its first answer
    for name in ("<frozen runpy>", "<string>"):
        inspect.modulesbyfile[name] = "runpy"  # without a file it would be looked for each time; -c has "<string>"
    gc.freeze()  # what was imported is no garbage: no fork has to look there, which would copy each of its pages
    gc.enable()
    return preloaded


def _wait_for_all(*_: object) -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _stay_as_parent(told: int, preloaded: Preloaded | None) -> None:
    """Fork once more, return in the child, and tell how it ends and what it has started."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    started = mmap.mmap(-1, 2)  # shared with all forks
    child = os.fork()
    if child == 0:
        if preloaded is not None:
            preloaded.start_by_forks(started)
        os.close(told)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        return
    with contextlib.suppress(BrokenPipeError):
        os.write(told, b"%d\n" % child)
        os.closerange(0, told)  # who reads the program's output must see its end
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        os.write(told, b"%d %d %d\n" % (code, started[0], started[1]))
    os._exit(0)


def _become(words: list[str], cwd: str, env: dict[str, str], host: int | None, preloaded: Preloaded | None) -> None:
    """Run the program, as the interpreter would that was started with this."""
    if host is not None:
        enter_host(host)
    ending = _Ending()
    atexit.register(ending.end)  # the first to be registered is called last
    os.chdir(cwd)
    if preloaded is not None and env.get("PYTHONPATH", "") != os.environ["PYTHONPATH"]:
        preloaded.look_in(env.get("PYTHONPATH", ""))
    os.environ.clear()  # nothing of C's environment lies any more where /proc reads it
    os.environ.update(env)
    tempfile.tempdir = None  # the server's may be another one
    sys.orig_argv = [sys.executable, *words]
    show_in_proc(sys.orig_argv, [f"{name}={value}" for name, value in env.items()])
    kind, rest = (words[0], words[1:]) if words[0] in ("-m", "-c") else ("", words)
    sys.argv = [kind or rest[0], *rest[1:]]
    sys.path[0] = {"-m": cwd, "-c": ""}.get(kind) if kind else os.path.dirname(os.path.abspath(rest[0]))
    with ending:
        _run(kind, rest)


def _run(kind: str, rest: list[str]) -> None:
    if kind == "-m":
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif kind == "-c":
        exec(compile(rest[0], "<string>", "exec"), vars(sys.modules["__main__"]))
    else:
        runpy.run_path(rest[0], run_name="__main__")


def enter_host(process: int) -> None:
    """Move this process, which has one thread, into the namespaces of a host's holder; os.setns needs Python 3.12."""
    libc = ctypes.CDLL(None, use_errno=True)
    for name, kind in _NAMESPACES.items():
        with open(f"/proc/{process}/ns/{name}") as space:
            if libc.setns(space.fileno(), kind):
                raise OSError(ctypes.get_errno(), f"setns {name}")


class _Ending:
    """Ends this process, as the interpreter would, but before it takes its modules apart."""

    def __init__(self) -> None:
        self._pid, self._code = os.getpid(), 0

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, _: Any) -> None:
        if isinstance(error, SystemExit):
            self._code = error.code if isinstance(error.code, int) else int(error.code is not None)
        elif error is not None:
            self._code = -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1

    def end(self) -> None:
        if os.getpid() != self._pid:
            return  # a fork of the program that ends by itself
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError, AttributeError):
                stream.flush()
        if self._code < 0:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
        os._exit(self._code & 0xFF)


if __name__ == "__main__":
    _become(**_serve(socket.socket(fileno=int(sys.argv[1])), sys.argv[3:]))
