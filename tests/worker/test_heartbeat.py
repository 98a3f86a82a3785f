"""What the heartbeat says of a rank, and what it holds of a script while it looks at the stack."""

from __future__ import annotations

import sys
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import pytest
from launchers import wait_for
from on_ranks import on_ranks
from wait_checks import checks

from autoddp.worker.process import heartbeat


class _Variable:
    """Anything that can be referred to weakly."""


def _function_of_a_script() -> weakref.ref[_Variable]:
    variable = _Variable()
    time.sleep(0.0002)
    return weakref.ref(variable)


@pytest.fixture
def slow_looks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """The file of a heartbeat that looks again and again, each time as long as on a busy machine."""

    def slow(frame: FrameType | None) -> str:
        time.sleep(0.002)
        return place(frame)

    place = heartbeat.where
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(heartbeat, "where", slow)
    monkeypatch.setattr(heartbeat, "_INTERVAL", 0.0005)
    heartbeat.start_heartbeat(str(tmp_path))
    yield tmp_path / "0"
    monkeypatch.setattr(heartbeat, "_INTERVAL", 3600.0)  # until this process ends
    time.sleep(0.1)


def test_a_process_that_is_told_its_rank_later_has_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As under --run-path: its launcher said that no rank had started, and a rank that hung was waited for."""
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(heartbeat, "_INTERVAL", 0.01)
    heartbeat.start_heartbeat(str(tmp_path))
    monkeypatch.setenv("RANK", "3")
    wait_for(lambda: (tmp_path / "3").exists(), "the heartbeat")
    monkeypatch.setattr(heartbeat, "_INTERVAL", 3600.0)  # until this process ends
    time.sleep(0.1)


def test_a_count_of_references_has_no_variable_of_a_function_that_has_returned(slow_looks: Path) -> None:
    kept, kept_at_the_count = 0, 0
    for _ in range(500):
        reference = _function_of_a_script()
        kept += reference() is not None
        with heartbeat.no_frame_is_held():
            kept_at_the_count += reference() is not None
    assert slow_looks.exists()
    assert kept > 0, "no look fell into the function: this test shows nothing"
    assert kept_at_the_count == 0


def test_only_ranks_that_wait_for_each_other_hang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not where one of them validates, alone or by a child process, sleeps, or computes in its backward pass."""
    beats = tmp_path / "heartbeats"
    beats.mkdir()
    monkeypatch.setenv("HEARTBEATS", str(beats))
    for found in on_ranks(2, checks, tmp_path):
        assert found["hung"] == {"each waits for the other": True}
        assert "ranks 0, 1 wait in recv, called in wait_checks.py, line " in found["said"]


def test_an_import_is_called_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first half minute of many scripts: "ranks 0, 1 are in _find_and_load" told nobody what they were doing."""
    library = tmp_path / "site-packages"
    library.mkdir()
    (library / "slow_library.py").write_text("import sys\nPLACE = sys.where(sys._getframe())\n")
    monkeypatch.syspath_prepend(str(library))
    monkeypatch.setattr(sys, "where", heartbeat.where, raising=False)
    script: dict[str, object] = {}
    exec(compile("\nfrom slow_library import PLACE", str(tmp_path / "train.py"), "exec"), script)
    assert script["PLACE"] == "an import, called in train.py, line 2"


def _place_in(file: Path, body: str, **names: object) -> str:
    """What is said of a rank that stands in `look()` in that file, called by the script."""
    found: list[str] = []
    names["look"] = lambda: found.append(heartbeat.where(sys._getframe(1)))
    exec(compile(body, str(file), "exec"), names)
    exec(compile("\n\nstep()", "/home/me/train.py", "exec"), names)
    return found[0]


def test_names_that_a_library_has_for_itself_are_not_told() -> None:
    """`<string>` stood for torch's dataclasses, `_use_grad` for an optimizer's step, and one of our own for a hook."""
    library, own = Path("/venv/site-packages/lib.py"), Path(heartbeat.__file__)
    inside = "def _private(f): return f()\ndef public(): look()\n"
    assert _place_in(library, inside + "def step(): _private(public)") == "step, called in train.py, line 3"
    assert _place_in(library, inside + "step = lambda: look()") == "<lambda>, called in train.py, line 3"
    assert _place_in(library, "def _step(): look()\nstep = _step") == "_step, called in train.py, line 3"
    assert _place_in(library, "def public(): look()\nstep = lambda: public()") == "public, called in train.py, line 3"
    outer = "def public(): look()\ndef _outer(): public()\nstep = _outer"
    assert _place_in(library, outer) == "public, called in train.py, line 3"
    assert _place_in(own, "def _after_step(): look()\nstep = _after_step") == "train.py, line 3"
    assert _place_in(own, "def before_step(): look()\nstep = before_step") == "train.py, line 3"
    assert (
        _place_in(Path("<string>"), "def __init__(): look()\nstep = __init__") == "__init__, called in train.py, line 3"
    )
