"""A rank that ends by an exception leaves it for elastic's summary; no other end and no other process does."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from launchers import environment

from autoddp.wire.worker_config import LAUNCHER, naming_errors

FAILING = "def main():\n    raise KeyError('x')\nmain()"
ENDINGS = {
    # how the script ends: its code, and what its error file says ("" for no file)
    "exception": (FAILING, "KeyError: 'x'"),
    "a hook of its own": (f"import sys; sys.excepthook = lambda *error: None\n{FAILING}", "KeyError: 'x'"),
    "while cleaning up": (f"import atexit; atexit.register(lambda: 1 / 0)\n{FAILING}", "KeyError: 'x'"),
    "exit code": ("import sys; sys.exit(3)", ""),
    "exit with words": ("raise SystemExit('no')", ""),
    "exit after a caught error": ("try: 1 / 0\nexcept ZeroDivisionError: raise SystemExit(3)", ""),
    "success": ("print('trained')", ""),
    "Ctrl-C": ("raise KeyboardInterrupt", ""),
    "a thread's error": ("import threading; t = threading.Thread(target=lambda: 1 / 0); t.start(); t.join()", ""),
    "an interactive session's error": (
        "import code, sys; code.InteractiveInterpreter().runsource('1 / 0'); sys.exit(3)",
        "",
    ),
    "a helper's error": (f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {FAILING!r}])", ""),
    "a fork's error": (
        f"import os\nif os.fork() == 0:\n    {FAILING.replace(chr(10), chr(10) + '    ')}\nos.wait()",
        "",
    ),
    "recorded before": (
        f"import os\nopen(os.environ['TORCHELASTIC_ERROR_FILE'], 'w').write('mine')\n{FAILING}",
        "mine",
    ),
}


def run(folder: Path, *words: str, **more: str) -> subprocess.CompletedProcess[str]:
    env = environment(TORCHELASTIC_ERROR_FILE=str(folder / "error.json"))
    env |= {**naming_errors(env), **more}
    return subprocess.run([sys.executable, *words], cwd=folder, env=env, capture_output=True, text=True)


@pytest.mark.parametrize("name", ENDINGS)
def test_what_a_rank_leaves(tmp_path: Path, name: str) -> None:
    code, expected = ENDINGS[name]
    (tmp_path / "script.py").write_text(code)
    ended = run(tmp_path, "script.py")
    assert "autoddp" not in ended.stderr
    place = tmp_path / "error.json"
    if expected in ("", "mine"):
        assert (place.read_text() if place.exists() else "") == expected
        return
    assert ended.returncode == 1
    said = json.loads(place.read_text())["message"]
    assert said["message"] == expected
    assert said["extraInfo"]["py_callstack"].startswith("Traceback (most recent call last):\n")
    assert "in main" in said["extraInfo"]["py_callstack"]
    assert int(said["extraInfo"]["timestamp"]) > 1e9


def test_a_module_too(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(FAILING)
    assert run(tmp_path, "-m", "script").returncode == 1
    assert json.loads((tmp_path / "error.json").read_text())["message"]["message"] == "KeyError: 'x'"


def test_only_the_launchers_own_children(tmp_path: Path) -> None:
    """A shell script may start several programs for one rank, and tolerate that one of them fails."""
    (tmp_path / "script.py").write_text(FAILING)
    assert run(tmp_path, "script.py", **{LAUNCHER: "1"}).returncode == 1
    assert not (tmp_path / "error.json").exists()


def test_a_place_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(FAILING)
    ended = run(tmp_path, "script.py", TORCHELASTIC_ERROR_FILE=str(tmp_path / "absent" / "error.json"))
    assert ended.returncode == 1
    assert ended.stderr.splitlines()[-1].startswith("autoddp: warning: the cause is not in elastic's summary: ")


def test_without_a_place_nothing_is_said(tmp_path: Path) -> None:
    """As under --log-dir /dev/null."""
    (tmp_path / "script.py").write_text(FAILING)
    ended = run(tmp_path, "script.py", TORCHELASTIC_ERROR_FILE="")
    assert ended.returncode == 1
    assert "autoddp" not in ended.stderr


def test_the_script_sees_no_trace_of_it(tmp_path: Path) -> None:
    program = (
        "import os, sys; print(dict(os.environ), sys.path, sys.excepthook is sys.__excepthook__, sorted(sys.modules))"
    )
    (tmp_path / "script.py").write_text(program)
    env = environment(TORCHELASTIC_ERROR_FILE="x")
    bare, armed = (
        subprocess.run([sys.executable, "script.py"], cwd=tmp_path, env={**env, **more}, capture_output=True, text=True)
        for more in ({}, naming_errors(env))
    )
    assert armed.stdout.replace("'sitecustomize', ", "").replace("'atexit', ", "") == bare.stdout.replace(
        "'atexit', ", ""
    )
    assert armed.stderr == bare.stderr == ""
