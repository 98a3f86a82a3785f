"""Runs each case of `test_system_calls` as an attempt whose calls are held, and prints what would have ended tuning.

    python watched_programs.py < cases.json     # {name: Python code}

Prints {name: [reason, exit code]}, and in a second line the port and the process outside, the folder, how often the two
servers outside were reached, and whether the process lives.

The code finds in `outside` and `by_path` a server that is none of the attempt's, in `others` a process that is not, and
in `folder` an empty folder. As by a launcher, an attempt is killed when its reason is heard. That of the case "nobody
hears it" has no launcher any more.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import tempfile
import threading
import traceback
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NoReturn

from autoddp.isolation import Level
from autoddp.isolation.elsewhere.programs import ProgramWatch
from autoddp.isolation.kernel.syscalls import adopt_orphans, die_with_parent
from autoddp.isolation.plan import IsolationPlan
from autoddp.processes.children import kill_descendants
from autoddp.wire import StopTuning, decode

LIMIT = 60.0  # seconds of a case


class Outside:
    """A server that is none of the attempt's: it hangs up, and counts how often it was reached."""

    def __init__(self, server: socket.socket) -> None:
        self.server, self.reached = server, 0

    def begin(self) -> None:
        """Serve from now on, in a thread."""
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            self.server.accept()[0].close()
            self.reached += 1


def reason(launcher: socket.socket) -> str:
    """What the launcher has been sent."""
    with Connection(launcher.accept()[0].detach()) as connection:
        message = decode(connection.recv_bytes())
    assert isinstance(message, StopTuning)
    return message.reason


def outcome(code: str, launcher: socket.socket, path: str, known: dict[str, Any]) -> tuple[str, int]:
    """Why tuning would have ended, or "", and the exit code of the attempt's first process."""
    watch = ProgramWatch(IsolationPlan(Level.OFF, path).text())
    alive, held = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(alive)
        status = 1
        try:
            watch.hold()
            exec(code, known)
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    os.close(held)
    watch.begin(child)
    why = ""
    while not why and alive not in (ready := wait([alive, launcher, *watch.awaited], LIMIT)):
        assert ready, f"nothing happens: {code}"
        if launcher in ready:
            why = reason(launcher)
            os.kill(child, signal.SIGKILL)
        else:
            watch.answer()
    os.close(alive)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    kill_descendants()
    watch.close()
    return why, status


def main() -> None:
    """Run all cases, in a process that has nothing of what is outside of them."""
    own = os.getpid()
    others = os.fork()
    if others == 0:
        die_with_parent(signal.SIGKILL, own)  # also where a case has ended the keeper
        signal.pause()
    with (
        tempfile.TemporaryDirectory(prefix="held-") as name,  # short, as the paths of Unix sockets have to be
        socket.create_server(("127.0.0.1", 0)) as outside,
        socket.socket(socket.AF_UNIX) as by_path,
    ):
        folder = Path(name)
        by_path.bind(str(folder / "outside"))
        by_path.listen()
        port = outside.getsockname()[1]
        known = {"outside": port, "by_path": str(folder / "outside"), "others": others, "folder": str(folder)}
        keeper = os.fork()
        if keeper == 0:
            outside.close()
            by_path.close()
            keep(folder, known)
        servers = [Outside(outside), Outside(by_path)]
        for server in servers:
            server.begin()
        assert os.waitpid(keeper, 0)[1] == 0
        lives = os.waitpid(others, os.WNOHANG)[0] == 0
        print(json.dumps([port, others, name, *(server.reached for server in servers), lives]))
    os.kill(others, signal.SIGKILL)


def keep(folder: Path, known: dict[str, Any]) -> NoReturn:
    """Print what became of each case; in the keeper."""
    code = 1
    try:
        adopt_orphans()
        path = str(folder / "launcher")
        launcher = socket.socket(socket.AF_UNIX)
        launcher.bind(path)
        launcher.listen()
        answers = {}
        for name, case in json.load(sys.stdin).items():
            answers[name] = outcome(case, launcher, f"{path}-gone" if name == "nobody hears it" else path, known)
        print(json.dumps(answers))
        sys.stdout.flush()
        code = 0
    finally:
        os._exit(code)


if __name__ == "__main__":
    main()
