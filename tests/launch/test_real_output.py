"""The real job's output on a terminal is the script's own: bars, colours and debug variables are as under torchrun."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import termios
import threading
from pathlib import Path

import pytest
import torch
from launchers import AUTODDP, SCRIPTS, TORCHRUN, forked, start, whole

from autoddp.knobs import Configuration
from autoddp.recipe import Evidence, Fits, MadeBy, Recipe, save
from autoddp.worker.ddp.model import parameters_digest

BARS = str(SCRIPTS / "bars.py")
ONE = ["--nproc-per-node", "1"]
OF_BARS = torch.nn.Linear(8, 8)
"""The model of bars.py."""
VERSION = torch.__version__.split("+")[0]


def on_a_terminal(command, folder: Path, words, asked: bytes = b"\0", answer: bytes = b"") -> bytes:
    """All that a launch writes to the terminal that is its standard input, output and error.

    `answer` is typed once the terminal shows what is `asked`, again and again.
    """
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("4H", 24, 70, 0, 0))
    written: list[bytes] = []

    def read() -> None:
        while True:
            try:
                part = os.read(ours, 65536)
            except OSError:  # the last process has closed it
                return
            written.append(part)
            if b"".join(written).endswith(asked):
                os.write(ours, answer)

    def popen(argv, **options):
        streams = dict.fromkeys(("stdin", "stdout", "stderr"), os.fdopen(theirs, "r+b", 0, closefd=False))
        return forked(argv, **{**options, **streams})

    reader = threading.Thread(target=read)
    reader.start()
    launch = start(command, folder, words, {"NCCL_DEBUG": "INFO", "TERM": "xterm", "COLUMNS": "70"}, popen=popen)
    os.close(theirs)
    launch.wait()
    reader.join(30)
    os.close(ours)
    assert launch.returncode == 0, b"".join(written)
    return b"".join(written)


@pytest.fixture(scope="module")
def under_torchrun(tmp_path_factory) -> bytes:
    return on_a_terminal(TORCHRUN, tmp_path_factory.mktemp("torchrun") / "job", [*ONE, BARS])


def test_the_script_sees_a_terminal(under_torchrun: bytes) -> None:
    assert b"terminal True True INFO" in under_torchrun
    assert under_torchrun.count(b"\repoch 1") >= 20
    assert under_torchrun.endswith(b"\rhalf a line")


def a_recipe() -> Recipe:
    """One that fits the job, with a hook on its model."""
    fits = Fits(1, 1, "gloo", ("cpu",), VERSION, 288, parameters_digest(OF_BARS), inputs=("0: float32[2, 8]",))
    made_by = MadeBy("0.1.0", VERSION, "3.11.7", "2026-01-01T00:00:00Z", "")
    evidence = Evidence(31.0, 0.1, 20, 6, 100, "the best of what you allow")
    return Recipe(made_by, fits, Configuration({"gradient_as_bucket_view": True}), evidence)


@pytest.mark.parametrize(
    "options", [whole(["--trials", "0"]), ["--recipe", "recipe.toml"]], ids=["as torchrun", "recipe"]
)
def test_the_terminal_shows_what_torchrun_shows(under_torchrun: bytes, tmp_path: Path, options: list[str]) -> None:
    """Byte for byte, after autoddp's own lines, which are whole lines before the job's first byte."""
    (tmp_path / "job").mkdir()
    save(a_recipe(), tmp_path / "job" / "recipe.toml")
    shown = on_a_terminal(AUTODDP, tmp_path / "job", [*options, "--force", *ONE, BARS])
    found = re.fullmatch(rb"((?:autoddp: [^\r\n]*\r\n)*)(.*)", shown, re.DOTALL)
    assert found is not None
    assert found[2] == under_torchrun
    assert found[1].startswith(b"autoddp: ") == (options[0] == "--recipe")


ASKS = """
import os
if os.environ["RANK"] == "0":
    print("hello", input("your name? "))
"""


def test_a_question_is_the_real_jobs(tmp_path: Path) -> None:
    """While a script is tuned its questions go to a log, so nobody could answer them: it reads an empty input."""
    (tmp_path / "asks.py").write_text(ASKS)
    words = ["--nproc-per-node", "2", "--trials", "2", "../asks.py"]
    shown = on_a_terminal(AUTODDP, tmp_path / "job", words, b"your name? ", b"Ada\n")
    tuned, job = shown.split(b"launching as written", 1)
    assert b"isolation: " in tuned
    assert b"your name" not in tuned
    assert b"EOFError" in job
    assert job.endswith(b"your name? Ada\r\nhello Ada\r\n")
