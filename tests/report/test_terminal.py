"""What a user sees of a study, on a terminal and in a file, and what only the log has."""

from __future__ import annotations

import contextlib
import io
import math
import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from study.simulated import SimulatedJob, facts
from terminals import terminal

from autoddp import log
from autoddp.diagnose import Diagnosis
from autoddp.diagnose.findings import Finding, Scaling
from autoddp.knobs import Configuration, Rung
from autoddp.knobs.job import NEVER_REDUCES
from autoddp.report import Terminal, say
from autoddp.report.diagnosis_text import for_stdout
from autoddp.report.terminal import _ladder
from autoddp.study import Outcome, Screened, Study, StudySettings
from autoddp.tables import text_of
from autoddp.timing import STAGES, RankAnatomy
from autoddp.wire import JobFacts

LEFT_OUT = {"static_graph": "there are unused parameters", "numa_binding": "its CPUs are on one NUMA node"}


def studied(
    tmp_path: Path, job: SimulatedJob, known: JobFacts | None = None, verbose: bool = True, **plan: object
) -> Outcome:
    """A study before the terminal; its log is in tmp_path."""
    made = StudySettings(**plan)
    terminal = Terminal(made.allows, tmp_path / "tuning.log", verbose=verbose)
    try:
        return Study(job, known or facts(left_out=LEFT_OUT), made, terminal).run()
    finally:
        terminal.close()


class File(io.StringIO):
    """What a study writes to stderr, which is no terminal then."""

    def studied(self, *arguments: object, **plan: object) -> Outcome:
        with contextlib.redirect_stderr(self):
            return studied(*arguments, **plan)


@pytest.fixture
def file() -> File:
    return File()


def test_in_a_file_there_is_a_line_for_each_trial(tmp_path: Path, file: File) -> None:
    outcome = file.studied(tmp_path, SimulatedJob(), trials=9, all_trials=True, allow=Rung.NEAR)
    lines = file.getvalue().splitlines()
    trials = [line for line in lines if re.match(r"autoddp: trial +\d+/9  ", line)]
    assert len(trials) == 9
    assert sum("final round" in line for line in lines) == 1
    assert not any("left as it is" in line or "\x1b" in line for line in lines)
    rungs = [record.configuration.rung for record in outcome.trials]
    assert {Rung.LOSSY, Rung.NEAR} <= set(rungs)
    for line, rung in zip(trials, rungs, strict=True):
        assert ("lossy (not allowed)" in line) is (rung is Rung.LOSSY)
    assert any(line.startswith("lossy (not allowed) ") for line in lines)  # of the ladder
    assert sum(" ←" in line for line in lines) <= 1


def test_a_script_that_reduces_by_itself_is_not_told_that_gradients_take_nothing(tmp_path: Path, file: File) -> None:
    known = facts(micro_batches=0.0, left_out={"hook": NEVER_REDUCES})
    outcome = file.studied(tmp_path, SimulatedJob(), known, verbose=False, trials=4)
    assert " ms per step as written; DDP reduces no gradients in it\n" in file.getvalue()
    assert outcome.trials == ()
    assert outcome.decision.why == f"{NEVER_REDUCES}, so no trial was run: your settings stay"


@pytest.mark.parametrize("allow", list(Rung)[:3])
@pytest.mark.parametrize("link", [22.0, 200.0, 5000.0])
def test_by_default_a_study_is_few_lines(link: float, allow: Rung, tmp_path: Path, file: File) -> None:
    """The rest is in the log: what is shown, and then all that is not."""
    file.studied(tmp_path, SimulatedJob(link), verbose=False, allow=allow)
    lines = file.getvalue().splitlines()
    assert len(lines) <= 10
    assert max(map(len, lines)) <= 80
    assert not any(re.search(r"trial +\d+/|rung  |buck", line) for line in lines)
    log = (tmp_path / "tuning.log").read_text()
    assert "the ladder" in log
    assert re.search(r"^trial +1/20", log, re.MULTILINE)


def test_finals_are_announced_once(tmp_path: Path, file: File) -> None:
    with contextlib.redirect_stderr(file):
        terminal = Terminal(StudySettings().allows, tmp_path / "tuning.log")
        for number in (1, 2, 1, 2, 3):
            terminal.final(number, 3)
        terminal.close()
    assert file.getvalue().count("take turns") == 1


def test_the_best_so_far_is_one_that_is_allowed(tmp_path: Path, file: File) -> None:
    outcome = file.studied(tmp_path, SimulatedJob(), trials=9, all_trials=True, allow=Rung.EXACT)
    allowed = [record.seconds for record in outcome.trials if record.configuration.rung is Rung.EXACT]
    assert min(record.seconds for record in outcome.trials) < min(allowed)
    told = [float(found) for found in re.findall(r"  best ([\d.]+)  ", file.getvalue())]
    assert told[-1] == pytest.approx(1e3 * min(allowed), rel=0.01)


def test_the_log_has_all(tmp_path: Path, file: File) -> None:
    file.studied(tmp_path, SimulatedJob(), trials=5)
    log = (tmp_path / "tuning.log").read_text()
    for name, why in LEFT_OUT.items():
        assert f"left as it is: {name} ({why})" in log
    assert len(re.findall(r"^trial \d/5", log, re.MULTILINE)) == 5
    assert 3 <= len(re.findall(r"^final round \d+ of 12 at most$", log, re.MULTILINE)) <= 12
    assert "the ladder" in log
    shown = [line.removeprefix("autoddp: ") for line in file.getvalue().splitlines() if line.startswith("autoddp: ")]
    assert [line for line in shown if line not in log.splitlines()] == []


def test_a_log_that_cannot_be_written_stops_nothing(tmp_path: Path, file: File) -> None:
    (tmp_path / "tuning.log").mkdir()
    assert file.studied(tmp_path, SimulatedJob(), trials=3).trials
    assert file.getvalue().count("autoddp: trial ") == 3


class Drifting(SimulatedJob):
    """A job on a machine that is `slower` times as slow until the first trial begins."""

    def __init__(self, slower: float) -> None:
        super().__init__()
        self._slower = slower
        self._began = False

    def cost(self, configuration: Configuration) -> float:
        self._began = self._began or bool(configuration)
        return super().cost(configuration) * (1 if self._began else self._slower)


@pytest.mark.parametrize(("slower", "said"), [(1.0, False), (1.05, False), (1.8, True), (0.5, True)])
def test_a_step_that_takes_another_time_at_the_end_is_said(
    slower: float, said: bool, tmp_path: Path, file: File
) -> None:
    outcome = file.studied(tmp_path, Drifting(slower), trials=4)
    found = re.findall(
        r"your settings took ([\d.]+) ms .*, then ([\d.]+) in the final rounds: other programs", file.getvalue()
    )
    assert len(found) == said
    if said:
        began, ended = map(float, found[0])
        assert began / ended == pytest.approx(outcome.baseline.seconds / outcome.baseline_seconds, rel=0.02)
        assert began / ended == pytest.approx(slower, rel=0.1)


def test_on_a_terminal_there_is_one_bar_with_the_time_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    master, slave = os.openpty()
    for name, value in {"TERM": "xterm-256color", "COLUMNS": "150"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("NO_COLOR", raising=False)
    drawn: list[bytes] = []

    def read() -> None:
        while chunk := os.read(master, 65536):
            if b"the end of it" in b"".join([*drawn[-2:], chunk]):
                drawn.append(chunk)
                return
            drawn.append(chunk)

    reader = threading.Thread(target=read)
    reader.start()
    with open(slave, "w", closefd=False) as terminal:
        monkeypatch.setattr(sys, "stderr", terminal)
        studied(tmp_path, SimulatedJob(), trials=7, all_trials=True, allow=Rung.NEAR)
        say("the end of it")
    reader.join()
    os.close(slave)
    os.close(master)
    text = re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", b"".join(drawn).decode())
    bars = re.findall(r"autoddp: (trials|final rounds) (\d+)/(\d+) ━+[╸━ ]* *([^\r\n]*)", text)
    states = list(dict.fromkeys((what, int(done), int(of)) for what, done, of, _ in bars))
    assert states[:7] == [("trials", number, 7) for number in range(1, 8)]
    assert states[7:] == [("final rounds", number, 12) for number in range(1, len(states) - 6)]
    assert len(states) >= 7 + 3
    assert all("s left" in more for what, _, _, more in bars if what == "trials")
    assert "autoddp: trial " not in text
    assert "autoddp: launching " in text.splitlines()[-2]
    assert (tmp_path / "tuning.log").read_text().count("trial ") >= 7


def test_while_the_bar_moves_no_wait_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the final rounds a line said every 25 seconds what had just begun: "0 s so far"."""
    monkeypatch.setenv("TERM", "xterm")
    with terminal() as (theirs, _), open(theirs, "w", closefd=False) as stream:
        monkeypatch.setattr(sys, "stderr", stream)
        shown = Terminal(lambda _: True, tmp_path / "tuning.log")
        monkeypatch.setattr(log, "_last_line", -math.inf)
        shown.progress("no_overlap", 1, 3)
        assert math.isfinite(log.seconds_since_a_line())
        shown.close()


SPINS = """
import sys
from pathlib import Path
from autoddp.log import tell
from autoddp.report import Terminal, say

terminal = Terminal(lambda _: True, Path("tuning.log"))
say("said")
tell("told")
say("said again")
terminal.close()
tell("the end of it")
"""


def test_nothing_is_drawn_in_a_file_whatever_the_environment_says(tmp_path: Path) -> None:
    env = {**os.environ, "FORCE_COLOR": "1", "TTY_COMPATIBLE": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    words = [sys.executable, "-c", SPINS]
    done = subprocess.run(words, cwd=tmp_path, env=env, stderr=subprocess.PIPE, text=True, timeout=100)
    assert done.stderr == "".join(f"autoddp: {line}\n" for line in ("said", "told", "said again", "the end of it"))


@pytest.mark.parametrize(("term", "columns"), [("xterm", "80"), ("xterm", "0"), ("dumb", "80")])
def test_on_a_terminal_lines_stand_above_the_spinner(term: str, columns: str, tmp_path: Path) -> None:
    """A thread redraws it meanwhile. In a process of its own, because the two once waited for each other for ever."""
    env = {**os.environ, "TERM": term, "COLUMNS": columns, "PYTHONPATH": str(Path(__file__).parents[2])}
    with terminal() as (theirs, written):
        process = subprocess.Popen([sys.executable, "-c", SPINS], cwd=tmp_path, env=env, stdin=theirs, stderr=theirs)
        try:
            assert process.wait(100) == 0
        finally:
            process.kill()
    shown = b"".join(written).decode()
    assert ("starting the script" in shown) is (term == "xterm")
    assert ("\x1b" in shown) is (term == "xterm")  # a dumb terminal shows escape sequences as they are
    cleared = re.sub(r"\r?\x1b\[(2?K|1A|\?25[lh])", "\n", shown)  # what is written then begins a line
    found = re.findall(r"^autoddp: ([^\r\n]*)\r$", cleared, re.MULTILINE)
    assert found == ["said", "told", "said again", "the end of it"]


SHELL = """
import fcntl, os, subprocess, sys, termios
fcntl.ioctl(2, termios.TIOCSCTTY, 0)  # the terminal is this session's
subprocess.run([sys.executable, "-c", sys.argv[1]], preexec_fn=os.setpgrp if sys.argv[2] == "&" else None, check=True)
"""


@pytest.mark.parametrize("how", ["", "&"])
def test_nothing_is_drawn_where_the_user_types(how: str, tmp_path: Path) -> None:
    """After `autoddp train.py &` the line of the cursor, and the cursor, are the shell's."""
    env = {**os.environ, "TERM": "xterm", "COLUMNS": "80", "PYTHONPATH": str(Path(__file__).parents[2])}
    words = [sys.executable, "-c", SHELL, SPINS, how]
    with terminal() as (theirs, written):
        shell = subprocess.Popen(words, cwd=tmp_path, env=env, stdin=theirs, stderr=theirs, start_new_session=True)
        try:
            assert shell.wait(100) == 0
        finally:
            shell.kill()
    assert (b"\x1b[?25l" in b"".join(written)) is (how == "")
    assert b"autoddp: the end of it" in b"".join(written)


@pytest.mark.parametrize("hosts", [("vm",), ("gpu-node-17", "gpu-node-18")])
def test_a_diagnosis_on_80_columns_has_every_digit(hosts: tuple[str, ...]) -> None:
    """Rich takes columns away from each number where a row is too long."""
    stages = dict.fromkeys(STAGES, 0.0123)
    ranks = [RankAnatomy(rank, hosts[rank % len(hosts)], 1.234, stages, 0.0067) for rank in range(64)]
    scaling = Scaling(64, None, None, 1.0, "64 ranks give 64 times what one gives")
    lines = text_of(for_stdout(Diagnosis(1.234, ranks, (), (), scaling, (), ())), 80).splitlines()
    assert max(map(len, lines)) <= 80
    (first,) = (line.split() for line in lines if line.split()[:1] == ["0"])
    assert first[-10:] == [*["12.3"] * 6, "6.70", *["12.3"] * 2, "1234"]


def test_a_cause_on_80_columns_has_the_width_for_its_sentences() -> None:
    """As a table it would take half of the columns for the names, and break the words of what to change."""
    fix = "DistributedDataParallel(bucket_cap_mb=0.5): smaller buckets begin to travel while the backward pass goes on"
    one = Finding("no_overlap", (0, 1), 0.0118, 0.0101, 0.0135, "proved", "most of them begin to travel late", fix)
    ranks = [RankAnatomy(0, "vm", 0.03, dict.fromkeys(STAGES, 0.003), 0.0)]
    shown = for_stdout(Diagnosis(0.03, ranks, (one,), (), None, (), ()))
    assert text_of(shown, 80).splitlines()[-4:] == [
        "no_overlap: 11.8 ms per step (99 % interval: 10.1 to 13.5), proved",
        "  seen  most of them begin to travel late",
        "  fix   DistributedDataParallel(bucket_cap_mb=0.5): smaller buckets begin to",
        "        travel while the backward pass goes on",
    ]
    row = r"no_overlap +11\.8 \(10\.1 to 13\.5\) +proved +most of them begin to travel late"
    assert re.fullmatch(row, text_of(shown, 1000).splitlines()[-2])  # a program's, and a wide file's


def test_a_ladder_on_80_columns_has_every_word(tmp_path: Path, file: File) -> None:
    """As a table it has no room there: rich would cut the ends of words, and fold settings letter by letter."""
    outcome = file.studied(tmp_path, SimulatedJob(), trials=9, all_trials=True, allow=Rung.NEAR)
    text = text_of([_ladder(outcome, lambda _: True, boxed=True)], 80)
    words = " ".join(text.split())
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= 80
    for standing in outcome.ladder:
        for part in (standing.configuration.changes, str(standing.configuration), str(standing.speedup)):
            assert part in words
    assert "┃" in text_of([_ladder(outcome, lambda _: True, boxed=True)], 400)


def test_a_setting_that_is_cut_short_shows_it(tmp_path: Path, file: File) -> None:
    """Of a list of devices the first half looks like all of them."""
    with contextlib.redirect_stderr(file):
        terminal = Terminal(lambda _: True, tmp_path / "tuning.log")
        terminal.screened([Screened({"allocator": "expandable_segments:True"}, None)], 3)
        terminal.close()
    (line,) = file.getvalue().splitlines()
    assert line.startswith("autoddp: to try last, by a new start: PYTORCH_CUDA_ALLOC_CONF=expandable_seg")
    assert line.endswith(" …")
    assert len(line) <= 80
