"""`autoddp report`: it finds a run, writes its page anew, and says in one line what is wrong with what it was given."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from autoddp.cli.report import run
from autoddp.errors import AutoddpError

SUMMARY = {"schema": 1, "script": "train.py", "trials": [], "headroom": {"share": 0.42, "interval": [0.4, 0.44]}}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def made(name: str, **more: Any) -> Path:
    """A run's folder with its summary."""
    place = Path(".autoddp") / name
    place.mkdir(parents=True)
    (place / "summary.json").write_text(json.dumps({**SUMMARY, "run": name, **more}))
    return place


def test_the_newest_run(capsys: Any) -> None:
    for name in ("20251121-235959-b-9", "20251122-000001-a-1", "20251120-000000-z-77777"):
        made(name)
    Path(".autoddp/20251123-000000-a-2").mkdir()  # a run that has not ended
    assert run([]) == 0
    place = Path(capsys.readouterr().out.rstrip("\n"))
    assert place == Path(".autoddp/20251122-000001-a-1/report.html")
    assert "run 20251122-000001-a-1" in place.read_text()
    assert stat.S_IMODE(place.stat().st_mode) == 0o600
    assert len(list(Path(".autoddp").glob("2*/report.html"))) == 1


@pytest.mark.parametrize("what", ["a folder", "a summary", "another name"])
def test_one_that_is_named(what: str, capsys: Any) -> None:
    place = made("20251121-235959-b-9")
    made("20251122-000001-a-1")
    given = {"a folder": place, "a summary": place / "summary.json", "another name": Path("x.json")}[what]
    Path("x.json").write_bytes((place / "summary.json").read_bytes())
    assert run([str(given)]) == 0
    page = Path("report.html") if what == "another name" else place / "report.html"
    assert capsys.readouterr().out == f"{page}\n"
    assert "run 20251121-235959-b-9" in page.read_text()


def test_to_another_file(capsys: Any) -> None:
    place = made("20251121-235959-b-9")
    for _ in range(2):  # the second time it replaces its own
        assert run([str(place), "--output", "train.html"]) == 0
        assert capsys.readouterr().out == "train.html\n"
    assert not (place / "report.html").exists()
    assert "42 % (40 % to 44 %)" in Path("train.html").read_text()


def test_a_part_that_is_wrong_is_left_out_and_told_in_one_line(capsys: Any) -> None:
    place = made("20251121-235959-b-9", headroom={"share": "much"}, topology=7, what_if=[{"label": "elsewhere"}])
    assert run([str(place)]) == 0
    told = capsys.readouterr()
    assert told.out == f"{place}/report.html\n"
    assert told.err == (
        f"autoddp: warning: report: {place}/summary.json: a part of the summary is wrong and left out of the page: "
        "headroom: share: Expected `float`, got `str` (and 2 more, which the page names)\n"
    )
    page = (place / "report.html").read_text()
    assert page.count("is wrong and left out here: ") == 3


BAD = {
    # what is typed, what the line says; the files are those of `files`
    "no run": ([], "report: no run in .autoddp has a summary.json; name a run's folder"),
    "absent": (["nowhere"], "report: nowhere: No such file or directory; name a run's folder or its summary.json"),
    "an empty name": ([""], "report: a name is empty; name a run's folder or its summary.json"),
    "to an empty name": (["good.json", "--output", ""], "report: a name is empty"),
    "a long name": (["long" * 100], f"report: {'long' * 100}: File name too long; name a run's folder or its summary"),
    "a link to itself": (["itself"], "report: itself: Too many levels of symbolic links; name a run's folder or its"),
    "to a long name": (
        ["good.json", "--output", "long" * 100],
        f"report: {'long' * 100}: cannot be written: File name",
    ),
    "a folder of no run": (["empty"], "report: empty/summary.json: No such file or directory"),
    "not JSON": (["broken.json"], "report: broken.json: not the summary of a run: Expecting"),
    "an empty file": (["nothing.json"], "report: nothing.json: not the summary of a run: Expecting value"),
    "not text": (["binary.json"], "report: binary.json: not the summary of a run: "),
    "a list": (
        ["list.json"],
        "report: list.json: not the summary of a run: Expected `object`, got `array`; name a run's folder or its",
    ),
    "another object": (["other.json"], "report: other.json: not the summary of a run: it has neither trials nor"),
    "another schema": (["newer.json"], "report: newer.json: a summary of schema 1 was expected"),
    "no schema": (["old.json"], "report: old.json: a summary of schema 1 was expected"),
    "another type": (["type.json"], "report: type.json: trials: Expected `array`, got `str`"),
    "nested": (["nested.json"], "report: nested.json: "),
    "a long number": (["number.json"], "report: number.json: "),
    "huge": (["huge.json"], "report: huge.json: larger than 64 MiB, so not the summary of a run"),
    "a device": (["/dev/zero"], "report: /dev/zero: no regular file; name a run's folder or its summary.json"),
    "a pipe": (["pipe"], "report: pipe: no regular file"),
    "escapes in a name": (["\x1b[31mred"], "report: \\x1b[31mred: No such file or directory"),
    "over another file": (["good.json", "--output", "mine.html"], "mine.html: not a report of autoddp, so it is not"),
    "over the summary": (["good.json", "--output", "good.json"], "good.json: not a report of autoddp, so it is not"),
    "to a folder": (["good.json", "--output", "empty"], "empty: no regular file, so no report is written there"),
    "to nowhere": (["good.json", "--output", "no/x.html"], "report: no/x.html: cannot be written: No such file or"),
    "unknown option": (["--outptu", "x"], "report: unrecognized arguments: --outptu (did you mean '--output'?); see"),
    "three runs": (["a", "b", "c"], "report: 3 runs; name one, or two to compare"),
}


def files() -> None:
    """What `BAD` names."""
    texts = {
        "broken.json": '{"schema": 1,',
        "nothing.json": "",
        "list.json": "[]",
        "other.json": '{"schema": 1}',
        "newer.json": '{"schema": 2, "trials": []}',
        "old.json": '{"trials": []}',
        "mine.html": "<p>mine</p>",
        "type.json": '{"schema": 1, "trials": "x"}',
        "good.json": json.dumps(SUMMARY),
        "nested.json": "[" * 100_000,
        "number.json": '{"schema": ' + "9" * 5000 + "}",
    }
    for name, text in texts.items():
        Path(name).write_text(text)
    Path("binary.json").write_bytes(b"\xff\xfe\x00\x80")
    Path("empty").mkdir()
    os.mkfifo("pipe")
    os.symlink("itself", "itself")
    with open("huge.json", "wb") as file:
        file.truncate(65 * 2**20)


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_line(name: str, capsys: Any) -> None:
    if name != "no run":
        files()
    before = {path: path.read_bytes() for path in sorted(Path().rglob("*")) if path.is_file()}
    words, line = BAD[name]
    with pytest.raises(AutoddpError) as caught:
        run(words)
    said = str(caught.value)
    assert said.startswith(line)
    assert said.isprintable()
    assert caught.value.exit_code == 2
    assert capsys.readouterr() == ("", "")
    assert before == {path: path.read_bytes() for path in sorted(Path().rglob("*")) if path.is_file()}
