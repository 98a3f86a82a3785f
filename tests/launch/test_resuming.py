"""A study that was cut off goes on at the next start of the same job, and of no other."""

from __future__ import annotations

import functools
import json
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from fake_worker import facts
from launchers import BRIEF, SCRIPTS, start, wait_for, whole
from test_tuned_hosts import rendezvous
from test_tuned_scripts import summary

from autoddp.attempts.job.journal import Journal
from autoddp.attempts.resuming import (
    _entries,
    changed_since,
    cut_off,
    job_now,
    killed_again,
    study_begins,
    study_is_over,
)
from autoddp.attempts.starts.start_journal import MeasuredStart, Shown, ShownByHost, StartJournal, read_starts
from autoddp.codec import encode
from autoddp.commandline.words import parse
from autoddp.knobs import AS_WRITTEN, Configuration
from autoddp.runs.folder import RunFolder
from autoddp.study import StudySettings
from autoddp.wire import BlockDone, Entry, Measure

PLAIN = str(SCRIPTS / "plain.py")


def entry(index: int, cap: float = 1.0, left: float = 100.0) -> Entry:
    asked = Measure(index, Configuration({"bucket_cap_mb": cap}), 1, 3, left=left)
    return Entry(asked, BlockDone(index, (0.01, 0.02, 0.03), 0.01, 0.001))


def written(path: Path, entries: list[Entry]) -> Path:
    path.write_text("".join(encode(one) + "\n" for one in entries))
    return path


@pytest.mark.parametrize("cut", [0, 1, 40])
def test_a_line_cut_short_loses_that_line(tmp_path: Path, cut: int) -> None:
    place = written(tmp_path / "journal", [entry(0), entry(1), entry(2)])
    text = place.read_text()
    place.write_text(text[: len(text) - cut])
    assert len(_entries(place)) == (3 if cut < 2 else 2)


@pytest.mark.parametrize(
    "damage", ["", "{}\n", "[]\n", "null\n", '{"asked": 3}\n', "\x00\x00", encode(entry(5)) + "\n"]
)
def test_what_is_no_entry_ends_it(tmp_path: Path, damage: str) -> None:
    place = written(tmp_path / "journal", [entry(0), entry(1)])
    place.write_text(place.read_text() + damage + encode(entry(2)) + "\n")
    assert [one.asked.index for one in _entries(place)] == ([0, 1, 2] if not damage else [0, 1])
    assert _entries(tmp_path / "absent") == []


def test_the_same_questions_are_answered_and_no_others(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal")
    journal.earlier = [entry(0), entry(1, cap=2.0), entry(2)]
    assert journal.answer(entry(0, left=7.0).asked) == entry(0)
    assert journal.answer(entry(1, cap=4.0).asked) is None
    assert journal.answer(entry(2).asked) is None  # it answered a question that followed from the other one
    journal.add(entry(1, cap=4.0))
    assert journal.answer(entry(1, cap=4.0).asked) == entry(1, cap=4.0)
    assert journal.answer(entry(2).asked) is None
    assert len((tmp_path / "journal").read_text().splitlines()) == 2


ONE, TWO = Configuration({"threads": 1}), Configuration({"threads": 2})
STARTS = [MeasuredStart(AS_WRITTEN, 1.0, "", 9.0), MeasuredStart(ONE, None, "no memory", 5.0)]
STARTS += [MeasuredStart(TWO, 0.5, "", 8.0), MeasuredStart(ONE, None, "killed", 1.0)]


@pytest.mark.parametrize("damage", ["", "{}\n", "\x00\x00", '{"configuration": {}, "co'])
def test_starts_are_read_up_to_what_is_no_start(tmp_path: Path, damage: str) -> None:
    """A failure at the end may come of what has cut the run off."""
    path, shown = tmp_path / "journal", Shown((ShownByHost(((0, 8), (1, 8)), 3), ShownByHost()), facts())
    journal = StartJournal(path)
    journal.begins(shown)
    for one in STARTS:
        journal.add(one)
    path.write_text(path.read_text() + damage)
    assert read_starts(path) == (shown, STARTS[:3])
    path.write_text(damage)
    assert read_starts(path) is None


def test_starts_answer_the_same_questions_and_no_others(tmp_path: Path) -> None:
    journal = StartJournal(tmp_path / "journal")
    journal.begins(Shown((ShownByHost(((0, 8),)),), facts()), STARTS[:3])
    assert [journal.answer(one) for one in (AS_WRITTEN, ONE)] == STARTS[:2]
    assert journal.answer(AS_WRITTEN) is None  # the study goes another way
    assert journal.answer(TWO) is None
    known = read_starts(tmp_path / "journal")
    assert known is not None
    assert known[1] == STARTS[:1]


WORDS = ["--nproc-per-node", "2", "train.py", "--config=job.yaml"]


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a job whose study was cut off after three measurements."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MY_BATCH", "8")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    Path("train.py").write_text("import os\nimport model\nbatch = os.environ.get('MY_BATCH')\n")
    Path("model.py").write_text("layers = 2\n")
    Path("job.yaml").write_text("lr: 0.1\n")
    _cut_off_here(WORDS)
    return tmp_path


def _cut_off_here(
    words: list[str], entries: Sequence[Entry] = (), *, in_order: bool = False, begun: bool = True, at_once: int = 1
) -> None:
    """`in_order`: by a signal that the launcher has heard. `begun`: the script has come to its first steps.

    `at_once`: launchers; each begins before any of them has written what it measured.
    """
    child = os.fork()
    if child == 0:
        try:
            folder = RunFolder(Path(".autoddp"))
            if at_once > 1:
                _cut_off_here(words, entries, in_order=in_order, begun=begun, at_once=at_once - 1)
                _next_tick()
            if begun:
                written(folder.journal, list(entries) or [entry(0), entry(1), entry(2)])
            study_begins(folder, job_now(parse(words)), StudySettings(), facts() if begun else None)
            if in_order:
                folder._end()
        finally:
            os._exit(0)
    os.waitpid(child, 0)


def _next_tick() -> None:
    """Wait until a file that is written now counts as written later: the kernel dates files by ticks of its clock."""
    begun, tick = time.time(), Path("tick")
    tick.touch()
    while tick.stat().st_mtime <= begun:
        tick.touch()


def _found(words: list[str] = WORDS) -> int:
    folder = RunFolder(Path(".autoddp"))
    try:
        return len(cut_off(folder, job_now(parse(words)), StudySettings(), facts())[1])
    finally:
        folder.clean()


def test_the_same_job_goes_on(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNHEARD_OF", "1")
    (job / "beside.py").write_text("nobody imports it\n")
    assert _found() == 3


def test_a_failure_at_the_end_is_measured_again(job: Path) -> None:
    """The host that was lost has cut the study off, and before that it has made the ranks of this one fail."""
    other, late, lost = [*WORDS, "--lr=1"], [*WORDS, "--lr=2"], "rank 0: Connection closed by peer"
    _cut_off_here(other, [entry(0), entry(1), entry(2), Entry(entry(3).asked, None, lost)])
    assert _found(other) == 3
    _cut_off_here(late, [entry(0), Entry(entry(1).asked, None, "killed"), entry(2)])
    assert _found(late) == 3


def test_a_study_that_went_on_to_its_end_does_not_go_on_again(job: Path) -> None:
    """Else whoever tunes once more, because the machine was busy, gets the old measurements, for a day."""
    other = [*WORDS, "--lr=1"]
    _cut_off_here(other)
    folder = RunFolder(Path(".autoddp"))
    try:
        assert _found() == 3
        study_begins(folder, job_now(parse(WORDS)), StudySettings(), facts())
        study_is_over(folder)
    finally:
        folder.clean()
    assert _found() == 0
    assert _found(other) == 3


def _killed_again(words: list[str] = WORDS) -> str:
    folder = RunFolder(Path(".autoddp"))
    try:
        return killed_again(folder, job_now(parse(words)), StudySettings())
    finally:
        folder.clean()


def test_a_study_that_is_killed_twice_at_one_place_is_not_begun_again(job: Path) -> None:
    """Where memory is short, all that a container runs is ended, and a container is started again, for ever."""
    assert not _killed_again()
    _cut_off_here(WORDS)
    assert "killed twice after 3 measurements" in _killed_again()
    assert not _killed_again([*WORDS, "--lr=1"])
    _cut_off_here(WORDS, [entry(0), entry(1), entry(2), entry(3)])
    assert not _killed_again()
    _cut_off_here(WORDS, begun=False)
    _cut_off_here(WORDS, begun=False)
    assert "killed twice before the first measurement" in _killed_again()
    (job / "train.py").write_text("less = True\n")
    assert not _killed_again()


def test_what_ends_two_launchers_of_a_job_at_once_is_one_kill(job: Path) -> None:
    """Two hosts in containers of one name, or a job that runs twice; an end of the machine ends all of them."""
    other = [*WORDS, "--lr=1"]
    _cut_off_here(other, at_once=2)
    assert not _killed_again(other)
    _cut_off_here(other, at_once=2)
    assert "killed twice after 3 measurements" in _killed_again(other)


def test_a_study_that_was_ended_in_order_may_be_begun_as_often_as_the_user_likes(job: Path) -> None:
    other = [*WORDS, "--lr=1"]
    _cut_off_here(other, in_order=True)
    _cut_off_here(other, in_order=True)
    assert not _killed_again(other)
    _cut_off_here(other)
    assert not _killed_again(other)


def test_a_study_that_comes_to_its_end_makes_up_for_a_kill_before_its_first_step(job: Path) -> None:
    _cut_off_here(WORDS, begun=False)
    folder = RunFolder(Path(".autoddp"))
    try:
        study_begins(folder, job_now(parse(WORDS)), StudySettings(), facts())
        study_is_over(folder)
    finally:
        folder.clean()
    _cut_off_here(WORDS, begun=False)
    assert not _killed_again()


@pytest.mark.parametrize("text", ["", "{", "[1, 2]", "[[1, 2]]", "3", "\x00", "{}"])
def test_what_says_of_no_study_counts_for_none(job: Path, text: str) -> None:
    _cut_off_here(WORDS, begun=False)
    for place in Path(".autoddp").glob("2*/study.json"):
        place.write_text(text)
    assert not _killed_again()
    assert _found() == 0
    folder = RunFolder(Path(".autoddp"))
    try:
        study_begins(folder, job_now(parse(WORDS)), StudySettings(), facts())
        study_is_over(folder)
    finally:
        folder.clean()


@pytest.mark.parametrize("changed", ["train.py", "model.py", "job.yaml", "MY_BATCH", "OMP_NUM_THREADS", "arguments"])
def test_another_job_does_not(job: Path, changed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    words = WORDS
    if changed == "arguments":
        words = [*WORDS, "--lr=1"]
    elif "." in changed:
        with (job / changed).open("a") as file:
            file.write("# changed\n")
    else:
        monkeypatch.setenv(changed, "2")
    assert _found(words) == 0


def test_another_folder_or_another_host_does_not(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (job / "other").mkdir()
    for name in ("train.py", "model.py", "job.yaml"):
        (job / "other" / name).write_bytes((job / name).read_bytes())
    (job / "other" / ".autoddp").symlink_to(job / ".autoddp")
    monkeypatch.chdir(job / "other")
    assert _found() == 0
    monkeypatch.chdir(job)
    for mark in job.glob(".autoddp/2*/owner.json"):
        plain = json.loads(mark.read_text())
        plain["ended"], plain["owner"]["host"] = True, "another"
        mark.write_text(json.dumps(plain))
    assert _found() == 0


def test_a_package_in_a_folder_and_a_pipe(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (job / "package").mkdir()
    (job / "package" / "__main__.py").write_text("layers = 2\n")
    os.mkfifo(job / "pipe")
    for words in (["package"], ["pipe"]):  # a pipe is not read: its content is the script's
        _cut_off_here(words)
        assert _found(words) == 3
    (job / "package" / "__main__.py").write_text("layers = 3\n")
    assert _found(["package"]) == 0


@pytest.mark.parametrize("between", [False, whole(True)], ids=["at once", "after another study"])
def test_a_killed_launchers_study_goes_on(tmp_path: Path, between: bool) -> None:
    folder = tmp_path / "run"
    words = ["--nproc-per-node", "2", "--trials", "3", "--all-trials", "--tune-only", "--diagnose-budget", "0", PLAIN]
    first = start(BRIEF, folder, words, {"TUNED_TIMES_LONGER": "1000"})
    wait_for(lambda: "trial 1/3" in first.stderr, "the first trial")
    first.process.kill()
    first.process.wait(30)
    wait_for(lambda: not first.processes(), "the end of every process")
    (cut_off,) = folder.glob(".autoddp/2*")
    known = (cut_off / "journal.jsonl").read_text().splitlines()

    if between:
        other = start(BRIEF, folder, ["--allow", "exact", *words], {"TUNED_TIMES_LONGER": "1000"})
        wait_for(lambda: other.stderr.count("trial 1/3") == 2, "a trial of another study")  # all write to one file
        other.process.terminate()
        assert other.process.wait(60) == 143
        assert "going on with the tuning run" not in other.stderr

    again = start(BRIEF, folder, words, {"TUNED_TIMES_LONGER": "1000"}).wait()
    assert again.returncode == 0, again.stderr[-2000:]
    said = f"going on with the tuning run {cut_off.name}, cut off after {len(known)} measurements; --fresh begins anew"
    assert said in again.stderr
    newest = max(folder.glob(".autoddp/2*"))
    assert (newest / "journal.jsonl").read_text().splitlines()[: len(known)] == known
    study = summary(again)
    assert len(study["trials"]) == 3
    assert (folder / "scripts.plain.autoddp.toml").exists()
    assert not (newest / "study.json").exists()


def test_a_launcher_that_is_killed_twice_while_it_tunes_runs_the_job_as_written(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    words = ["--nproc-per-node", "2", "--trials", "3", "--all-trials", PLAIN]
    for number in (1, 2):
        killed = start(BRIEF, folder, words)
        wait_for(lambda of=killed, n=number: of.stderr.count("isolation: ") == n, "a start of the script")
        killed.process.kill()
        killed.process.wait(30)
        wait_for(lambda of=killed: not of.processes(), "the end of every process")
    last = start(BRIEF, folder, words).wait()
    assert last.returncode == 0, last.stderr[-2000:]
    assert "not tuned, launching as written: tuning was killed twice before the first measurement" in last.stderr
    assert last.stderr.count("isolation: ") == 2
    assert not list(folder.glob("*.autoddp.toml"))


@pytest.mark.lab
@pytest.mark.whole
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_several_hosts_go_on_together(lab, tmp_path, number):
    """One of two launchers ends; the other one's measurements are what both go on from, if it leads then."""
    hosts, env = lab(hosts=2), {"GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1", "TUNED_TIMES_LONGER": "1000"}

    def launched(*more):
        words = ["--trials", "4", "--allow", "exact", "--tune-only", "--diagnose-budget", "0", *more, PLAIN]
        where = ["--nnodes", "2", "--nproc-per-node", "1"]
        return [
            start(
                BRIEF,
                tmp_path / f"host{host}",
                [*where, *rendezvous(hosts, "static", host), *words],
                env,
                popen=functools.partial(hosts.popen, host),
            )
            for host in range(2)
        ]

    first = launched()
    wait_for(lambda: "trial 2/4" in first[0].stderr, "the second trial")
    first[1].process.send_signal(number)
    assert first[0].wait().returncode == 1
    first[1].wait()
    for launch in first:
        wait_for(lambda launch=launch: not launch.processes(), "the end of every process")
    (cut_off,) = first[0].folder.glob(".autoddp/2*")
    known = (cut_off / "journal.jsonl").read_text().splitlines()

    again = [launch.wait() for launch in launched()]
    assert [launch.returncode for launch in again] == [0, 0], again[0].stderr[-2000:]
    assert f"going on with the tuning run {cut_off.name}, cut off after {len(known)} measurements" in again[0].stderr
    journals = [max(launch.folder.glob(".autoddp/2*")) / "journal.jsonl" for launch in again]
    assert journals[0].read_text().splitlines()[: len(known)] == known
    measured = [[json.loads(line)["done"] for line in journal.read_text().splitlines()] for journal in journals]
    assert measured[0] == measured[1]
    recipes = [(launch.folder / "scripts.plain.autoddp.toml").read_text() for launch in again]
    assert recipes[0] == recipes[1]


@pytest.mark.parametrize("edited", [None, "train.py", "model.py", "job.yaml"])
def test_what_the_user_changes_while_the_script_is_tuned_is_named(job: Path, edited: str | None) -> None:
    options = parse(WORDS)
    before = job_now(options)
    if edited is not None:
        Path(edited).write_text(Path(edited).read_text() + "\n# the next experiment\n")
    changed = changed_since(before)
    assert [Path(name).name for name in changed] == ([edited] if edited else [])


def test_a_script_that_was_removed_while_it_was_tuned_is_named(job: Path) -> None:
    options = parse(WORDS)
    before = job_now(options)
    Path("train.py").unlink()
    assert "train.py" in changed_since(before)


@pytest.mark.parametrize("script", ["import os\n", "import os\nimport model\ndef main(:\n"])
def test_a_module_that_was_not_changed_is_not_named(job: Path, script: str) -> None:
    """The script imports it no longer, or is half written."""
    before = job_now(parse(WORDS))
    Path("train.py").write_text(script)
    assert [Path(name).name for name in changed_since(before)] == ["train.py"]


def test_a_changed_script_is_named_by_its_whole_path(job: Path) -> None:
    Path("lr=0.1").mkdir()
    Path("lr=0.1/train.py").write_text("one = 1\n")
    before = job_now(parse(["--trials", "3", "lr=0.1/train.py"]))
    Path("lr=0.1/train.py").write_text("one = 2\n")
    assert changed_since(before) == ["lr=0.1/train.py"]
