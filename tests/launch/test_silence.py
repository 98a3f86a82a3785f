"""While something is waited for, no half minute passes without a line. Here a half minute takes a fifth of a second."""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from autoddp import log
from autoddp.attempts.preparation import prepared
from autoddp.cli.diagnose import examine
from autoddp.cli.main import prepare
from autoddp.commandline.options import Options
from autoddp.commandline.words import parse
from autoddp.processes import silence
from autoddp.processes.silence import awaiting


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    lines: list[str] = []

    def tell(text: str) -> None:
        log.line_is_shown()
        lines.append(text)

    monkeypatch.setattr(silence, "tell", tell)
    monkeypatch.setattr(silence, "_LONGEST", 0.2)
    monkeypatch.setattr(silence, "_LOOKS", 0.01)
    log.line_is_shown()
    return lines


def until(condition: object) -> None:
    assert callable(condition)
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_wait_speaks_again_and_again(said: list[str]) -> None:
    with awaiting("the others"):
        until(lambda: len(said) >= 3 and said[-1].endswith("so far"))
    assert all(re.fullmatch(r"waiting for the others(, \d+ s so far)?", line) for line in said)


def test_the_innermost_wait_speaks_and_its_line_is_made_when_it_is_shown(said: list[str]) -> None:
    steps = 0
    with awaiting("all of it"):
        with awaiting(lambda: f"{steps} steps"):
            steps = 5
            until(lambda: said.count("5 steps") >= 2)
            # On a busy machine another line may have come before. From its first one on, this wait speaks alone.
            heard = said[said.index("5 steps") :]
        assert set(heard) == {"5 steps"}
        until(lambda: said[-1].startswith("waiting for all of it"))


def test_other_lines_are_enough(said: list[str]) -> None:
    with awaiting("the others"):
        for _ in range(60):
            log.line_is_shown()
            time.sleep(0.01)
            if said:  # this process was not run for that long
                assert log.seconds_since_a_line() < 60
                break
    assert len(said) <= 1


def test_the_thread_ends_with_the_last_wait(said: list[str]) -> None:
    with awaiting("the others"), awaiting("more of them"):
        assert "autoddp-words" in {thread.name for thread in threading.enumerate()}
    assert "autoddp-words" not in {thread.name for thread in threading.enumerate()}


def test_what_is_removed_before_and_after_a_run_is_waited_for_with_a_word(
    said: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A launcher that was killed may have left what its script has written, as may be a million files on NFS."""

    def slow(*_: object) -> tuple[str, ...]:
        count = len(said)
        until(lambda: len(said) > count)
        return ()

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("autoddp.runs.folder._tidied", slow)
    monkeypatch.setattr("autoddp.runs.folder.remove_scratch", slow)
    with prepared(parse(["--isolation", "off", "train.py"])):
        assert said[0].startswith("waiting for what earlier runs have left to be removed")
        said.clear()
    assert said[0].startswith("waiting for what the script has written to be removed")


BEGINS: dict[str, Callable[[Options], object]] = {
    "a job": lambda options: prepare(options, time.monotonic()),
    "a diagnosis": lambda options: examine(options, as_json=False),
}


@pytest.mark.parametrize("name", BEGINS)
def test_a_driver_that_does_not_answer_is_waited_for_with_a_word(
    name: str, said: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NVML may hang for ever where a GPU has fallen off the bus, and this is before autoddp's first line."""

    def device_count() -> int:
        until(lambda: said)
        return 0

    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()
    monkeypatch.setattr("torch.cuda.device_count", device_count)
    BEGINS[name](parse(["--dry-run", "train.py"]))
    assert said[0].startswith("waiting for this host's GPU driver")


@pytest.mark.parametrize("name", BEGINS)
def test_a_slow_disk_is_not_told_as_a_driver(
    name: str, said: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def is_file(path: object, isfile: Callable[[object], bool] = os.path.isfile) -> bool:
        if str(path) == "train.py":
            until(lambda: said)
        return isfile(path)

    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()
    options = parse(["--nproc-per-node", "2", "--dry-run", "train.py"])
    monkeypatch.setattr("os.path.isfile", is_file)
    BEGINS[name](options)
    assert said[0].startswith("waiting for the files of the script and its recipes")
