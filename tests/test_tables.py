"""Tables as text: the same rows for a program and, folded, for a terminal."""

from __future__ import annotations

import io
import sys

import pytest

from autoddp.tables import aligned, grid, text_of

ROWS = [("hook", "1 MiB", "64 MiB"), ("fp16", "0.21", "9.87"), ("[red]0[/] rank 2", "10.4", "100.2")]


def test_columns_are_aligned() -> None:
    assert aligned(ROWS).splitlines() == [
        "hook              1 MiB  64 MiB",
        "fp16              0.21   9.87",
        "[red]0[/] rank 2  10.4   100.2",
    ]
    assert aligned(ROWS, numbers=True).splitlines() == [
        "hook              1 MiB  64 MiB",
        "fp16               0.21    9.87",
        "[red]0[/] rank 2   10.4   100.2",
    ]


def test_a_row_for_a_program_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    long = "bucket_cap_mb=50 " * 60
    assert aligned([("launches", long)]) == f"launches  {long.rstrip()}"
    assert capsys.readouterr().out == ""


def test_it_is_one_line_whatever_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """Services that run tests set both."""
    for name, value in {"TERM": "dumb", "FORCE_COLOR": "1"}.items():
        monkeypatch.setenv(name, value)
    assert aligned([("launches", "bucket_cap_mb=50 " * 60)]).count("\n") == 0


def test_on_a_narrow_terminal_nothing_is_cut() -> None:
    lines = text_of([grid([("why", "x" * 70)])], 40).splitlines()
    assert max(map(len, lines)) <= 40
    assert "".join(lines).count("x") == 70
    assert all(line.startswith("     ") for line in lines[1:])


def test_no_table_needs_a_stdout(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be full, or closed, and the table may be for another place."""
    with open("/dev/full", "w", encoding="utf-8") as full:
        for stdout in (full, None):
            monkeypatch.setattr(sys, "stdout", stdout)
            assert aligned([("a", "bc"), ("def", "g")]) == "a    bc\ndef  g"


class Screen(io.StringIO):
    """A terminal."""

    def isatty(self) -> bool:
        return True


def test_on_a_terminal_that_is_said_to_have_no_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rich prints nothing there."""
    for name, value in {"TERM": "xterm", "COLUMNS": "0"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "stdout", Screen())
    assert aligned(ROWS).startswith("hook")
