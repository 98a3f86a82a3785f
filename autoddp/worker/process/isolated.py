"""Starts the isolation in each Python process of a tuning attempt: the ranks, and processes that the script starts.

`inject/sitecustomize.py` calls it before anything else runs. The isolation may end tuning.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import functools
import os
import shutil
import signal
import sys
from collections.abc import Callable, Sequence
from types import ModuleType, TracebackType
from typing import Any, NoReturn

import wrapt

from autoddp.isolation import Level
from autoddp.isolation.children import mark_as_checked, watch_children
from autoddp.isolation.elsewhere.own import has_ended, pid_namespace
from autoddp.isolation.hooks import check_events, rebind
from autoddp.isolation.locks import beneath_the_overlay, watch_locks
from autoddp.isolation.pipes import Pipes, watch_pipes
from autoddp.isolation.plan import IsolationPlan
from autoddp.isolation.ports import note_ports
from autoddp.isolation.stopping import stopper
from autoddp.units import data_size

_COPYING = {"open", "os.chmod", "os.chown", "os.truncate", "os.utime", "os.setxattr", "os.link", "os.rename"}
"""Audit events of operations that make an overlay copy a whole file."""
_OF_THE_NAME = {"os.link", "os.rename"}
"""Audit events that take a symbolic link itself; the others change the file to which it leads."""
_OF_SQLITE = ("attempt to write a readonly database", "unable to open database file")
"""SQLite's words for whatever the system says."""
_OF_THE_OVERLAY = (
    # The user namespace has no mapping for the file's owner or group.
    (errno.EOVERFLOW, ["value too large for", *_OF_SQLITE], "files of another group cannot be changed"),
    # A folder with mounts below it cannot be covered by an overlay of an ordinary user.
    (errno.EROFS, ["read-only file system", "os error 30"], "this folder cannot be changed"),
    # autofs mounts a folder at its first use in the host's namespace, and only there.
    (errno.ELOOP, ["too many levels of symbolic links", "os error 40"], "nothing is mounted at its first use"),
    # The attempt's logs and its socket are mounts, in the run's folder and in the temporary one: ranks write there.
    (errno.EBUSY, ["device or resource busy", "os error 16"], "this folder cannot be removed"),
    (errno.ENOTEMPTY, ["directory not empty", "os error 39"], "this folder cannot be removed"),
)
"""Errors that only the overlay causes: number, text, and what the user is told happens under it."""


def start(text: str, keeper: str) -> None:
    """Start the isolation. Does not import torch.

    `text` is the value of the variable that holds the isolation plan, `keeper` that of a rank's `worker_config.KEEPER`.
    """
    plan = IsolationPlan.parse(text)
    stop = stopper(plan.socket)
    pipes = Pipes(plan.began)
    if keeper and sys.platform == "linux":
        from autoddp.isolation.kernel.syscalls import die_with_parent

        # This is a rank, which must not outlive an attempt that is killed, nor one that was killed before this.
        die_with_parent(signal.SIGKILL, os.getppid())
        pid, _, namespace = keeper.partition(" ")
        # In a container with process ids of its own, as under `apptainer exec --pid`, nobody can see the keeper.
        if namespace == pid_namespace() and has_ended(int(pid)):
            os.kill(os.getpid(), signal.SIGKILL)
    mark_as_checked()  # before the guard, which lets nothing load a library by ctypes
    watch_children(text)
    note_ports(os.path.dirname(plan.socket))
    if plan.level is Level.GUARD:
        from autoddp.isolation.guard import start_guard

        if plan.landlock:
            _at_the_end_of(_is_refusal, stop, "the kernel refused a write by other means than Python's own")
        start_guard(plan, stop, pipes)
    elif plan.level is Level.OVERLAY:
        under_guard = stopper(plan.socket, overlay_is_to_blame=True)
        for number, texts, why in _OF_THE_OVERLAY:
            _at_the_end_of(functools.partial(_is_error, number, texts), under_guard, f"{why} under the overlay")
        _rename_folders_by_copying()
        watch_locks(beneath_the_overlay)
        if plan.copied_at_most:
            _watch_copies(plan.copied_at_most, stop)
    if plan.level is not Level.GUARD:  # which watches them itself
        watch_pipes(pipes, stop)
    _answer_for_the_terminal()
    from autoddp.isolation.elsewhere import watch_clients

    watch_clients(stop, pipes, plan.programs_are_watched)


def _answer_for_the_terminal() -> None:
    """Let `os.get_terminal_size` tell that of standard input where output is asked: it goes to a log while tuning."""
    original = os.get_terminal_size

    @functools.wraps(original)
    def get_terminal_size(fd: int = 1, /) -> os.terminal_size:
        try:
            return original(fd)
        except OSError:
            if fd not in (1, 2) or not os.isatty(0):
                raise
            return original(0)

    rebind({id(original): (original, get_terminal_size)})


def _at_the_end_of(is_ours: Callable[[BaseException], bool], stop: Callable[[str], NoReturn], why: str) -> None:
    """Call `stop` with `why` if the script ends with an exception that the isolation has caused.

    Without this, the exception would count as a failure of the script. A script may catch it and end by `sys.exit`, as
    Hydra does, or put a hook of its own in the place of Python's, as `rich.traceback` does.
    """
    before, leave = sys.excepthook, sys.exit

    def look(error: BaseException | None) -> None:
        cause = error
        while cause is not None and not is_ours(cause):
            cause = cause.__cause__ or cause.__context__
        if cause is not None:
            with contextlib.suppress(Exception):  # the script may have put an object of its own there
                sys.stderr.flush()
            stop(f"{why}: {next(iter(str(cause).splitlines()), type(cause).__name__)}")

    def ended(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        before(kind, error, trace)
        look(error)

    @functools.wraps(leave)
    def leaves(status: Any = None) -> NoReturn:
        if status:
            look(sys.exc_info()[1])
        leave(status)

    def at_exit() -> None:
        if hasattr(sys, "last_value"):  # else it costs each Python that the script starts an import
            from autoddp.worker.process.error_file import error_of_the_script

            look(error_of_the_script())

    sys.excepthook, sys.exit = ended, leaves
    atexit.register(at_exit)


def _is_refusal(error: BaseException) -> bool:
    """Whether the error is EACCES as C++ and Rust libraries report it, in words of their own.

    In the system's words it is Python's, or that of an extension in C. The guard answers Python's functions, so without
    it they would fail too. What an extension has tried is told by a file that this user could make.
    """
    text = str(error).lower()
    cause: BaseException | None = error
    while cause is not None:  # who catches an error of Python's may repeat its words
        in_words_of_system = isinstance(cause, OSError) and cause.strerror == os.strerror(errno.EACCES)
        if in_words_of_system and not _could_make(getattr(cause, "filename", None)):
            return False
        cause = cause.__cause__ or cause.__context__
    return "permission denied" in text or "os error 13" in text


def _could_make(path: Any) -> bool:
    """Whether there is no file at that path, and this user may make one: then it is Landlock that has refused it."""
    if not isinstance(path, (str, bytes)) or os.path.lexists(path):
        return False
    return os.access(os.path.dirname(os.path.abspath(path)), os.W_OK | os.X_OK)


def _is_error(number: int, texts: Sequence[str], error: BaseException) -> bool:
    """Whether the error has this number, or one of these texts, as C++ and Rust libraries report it."""
    is_it = isinstance(error, OSError) and error.errno == number
    return is_it or any(text in str(error).lower() for text in texts)


def _watch_copies(most: int, stop: Callable[[str], NoReturn]) -> None:
    """End tuning before a change of a large file makes the overlay copy it."""

    def check(event: str, *arguments: Any) -> None:
        path = arguments[0] if arguments else None
        if not isinstance(path, (str, bytes)) or (event == "open" and not _opens_to_change(arguments)):
            return
        try:
            found = os.lstat(path) if event in _OF_THE_NAME else os.stat(path)
        except (OSError, ValueError):
            return
        if found.st_size > most and found.st_blocks:
            stop(
                f"{event} of {os.fsdecode(path)} would put all of it ({data_size(found.st_size)}) into the scratch "
                f"folder, and --scratch-limit allows {data_size(most)}"
            )

    def shared_memory(module: ModuleType) -> None:
        shm_open = module.shm_open

        def opened(path: str, flags: int, *more: Any, **named: Any) -> Any:
            check("open", f"/dev/shm/{path.lstrip('/')}", None, flags)  # Python reports no event for it
            return shm_open(path, flags, *more, **named)

        module.shm_open = opened  # type: ignore[attr-defined]

    check_events({event: functools.partial(check, event) for event in _COPYING})
    wrapt.register_post_import_hook(shared_memory, "_posixshmem")


def _opens_to_change(arguments: tuple[Any, ...]) -> bool:
    """Whether an `open` event is for changing existing content; a file that is truncated is not copied."""
    flags = arguments[2] if len(arguments) > 2 and isinstance(arguments[2], int) else 0
    return flags & os.O_ACCMODE != os.O_RDONLY and not flags & os.O_TRUNC


def _rename_folders_by_copying() -> None:
    """Rename by copying where the overlay cannot rename, as `mv` does.

    An overlay in a user namespace cannot rename a folder of its lower layer. An ordinary user has an overlay for each
    folder of a disk with mounts below it: so a file, too, cannot be renamed from /tmp to /home there, although both
    are on one disk.
    """
    rebind({id(each): (each, _Rename(each)) for each in (os.rename, os.replace)}, classes=True)


class _Rename:
    """`os.rename` or `os.replace`. No function, because `pathlib` of Python 3.10 keeps it in a class, like a method."""

    def __init__(self, original: Callable[..., None]) -> None:
        self._original = original
        self.__name__ = original.__name__
        self.__doc__ = original.__doc__

    def __call__(self, src: Any, dst: Any, *, src_dir_fd: int | None = None, dst_dir_fd: int | None = None) -> None:
        try:
            self._original(src, dst, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)
        except OSError as error:
            if error.errno != errno.EXDEV or src_dir_fd is not None or dst_dir_fd is not None:
                raise
            if not os.path.isdir(src) or os.path.islink(src):
                self._move_file(os.fsdecode(src), os.fsdecode(dst))
            else:
                if os.path.isdir(dst):
                    os.rmdir(dst)  # as rename does: only an empty folder is replaced
                shutil.copytree(src, dst, symlinks=True)
                shutil.rmtree(src)

    def _move_file(self, src: str, dst: str) -> None:
        if os.path.isdir(dst) and not os.path.islink(dst):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), src, None, dst)
        beside = f"{dst}.autoddp-{os.getpid()}"
        try:
            shutil.copy2(src, beside, follow_symlinks=False)
            self._original(beside, dst)  # who reads `dst` sees the old file or the whole new one
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(beside)
            raise
        os.unlink(src)
