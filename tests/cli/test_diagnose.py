"""`autoddp diagnose` as a user calls it: real ranks, real scripts."""

from __future__ import annotations

import functools
import io
import json
import re
import signal
import stat
import sys
from pathlib import Path
from typing import Any

import pytest
from lab import Lab, unavailable
from launchers import AUTODDP, PATIENCE, SCRIPTS, forked, start, wait_for, whole
from terminals import terminal

from autoddp.cli.diagnose import _HELP, _columns, run
from autoddp.commandline.mode import choose_to_diagnose
from autoddp.commandline.options import DECLARED
from autoddp.commandline.parsers import help_text
from autoddp.commandline.words import parse
from autoddp.diagnose import CAUSES
from autoddp.diagnose.rounds import _NO_TIME
from autoddp.errors import AutoddpError, UsageError
from autoddp.trace import check

STAGES = ("data", "copy", "buffers", "forward", "backward", "exposed", "optimizer", "other")


def diagnose(folder: Path, *words: str) -> Any:
    return start((*AUTODDP, "diagnose"), folder, list(words), {}).wait()


def on_a_terminal(folder: Path, *words: str) -> tuple[Any, str]:
    """The same, and what it shows there."""
    with terminal() as (theirs, written), open(theirs, "wb", closefd=False) as stream:

        def popen(argv: list[str], **options: Any) -> Any:
            return forked(argv, **{**options, "stderr": stream})

        done = start((*AUTODDP, "diagnose"), folder, list(words), {"TERM": "xterm", "COLUMNS": "80"}, popen).wait()
    return done, b"".join(written).decode()


@pytest.fixture(scope="module")
def slow_on_rank_1(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The diagnosis of a script whose loader is slow on rank 1, in a folder with a file of the user's."""
    folder = tmp_path_factory.mktemp("slow_on_rank_1")
    (folder / "precious.pt").write_text("weeks of training")
    words = [
        "--json",
        "--nproc-per-node",
        "2",
        "--diagnose-budget",
        "30s",  # it goes on until the rounds agree
        str(SCRIPTS / "slow_loader.py"),
        "--slow",
        "1",
        "--ms",
        "80",  # much more than what other tests beside this one take from a step
    ]
    done = diagnose(folder, *words)
    assert done.returncode == 0, done.stderr
    return done


def test_a_loader_that_is_slow_on_one_rank(slow_on_rank_1: Any) -> None:
    found = json.loads(slow_on_rank_1.stdout)
    first = found["findings"][0]
    assert (first["cause"], first["ranks"], first["status"]) == ("data_loader", [1], "proved"), found["findings"]
    slow = found["ranks"][1]["data_ms"]  # of this job on this machine: a sleep may take longer than asked for
    assert first["low"] <= 1.4 * slow
    assert first["high"] >= 0.6 * slow
    assert first["low"] <= first["ms"] <= first["high"]
    assert "DataLoader(num_workers=" in first["fix"]
    assert {one["cause"] for one in found["findings"]} <= set(CAUSES)
    known = [one["status"] for one in found["findings"]]
    assert known == sorted(known), "what is proved comes first; tests/diagnose has the order by cost"
    for rank in found["ranks"]:
        assert sum(rank[f"{stage}_ms"] for stage in STAGES) == pytest.approx(rank["step_ms"], rel=0.05)
    assert found["ranks"][1]["data_ms"] >= 80 > found["ranks"][0]["data_ms"]
    assert found["ranks"][0]["waiting_ms"] > found["ranks"][1]["waiting_ms"]
    assert found["waterfall"][0]["cause"] == "as written"
    folder = slow_on_rank_1.folder
    assert (folder / "precious.pt").read_text() == "weeks of training"
    assert [path.name for path in folder.iterdir() if path.suffix == ".toml"] == [], "a recipe was written"


def test_a_diagnosis_leaves_a_trace_of_all_ranks(slow_on_rank_1: Any) -> None:
    (path,) = slow_on_rank_1.folder.glob(".autoddp/2*/trace.json")
    assert f"trace: {path} (open it in" in slow_on_rank_1.stderr
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    trace = json.loads(path.read_text())
    assert check(trace) == []
    processes = [e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"]
    assert [name.split(" on ")[0] for name in processes] == ["rank 0", "rank 1"]
    told = trace["otherData"]
    assert (told["contradictions"], told["clock_error_ms"]) == (0, {"rank 0": 0.0, "rank 1": 0.0})
    assert told["reductions"] >= 5
    spans = [e for e in trace["traceEvents"] if e["ph"] == "X"]
    stages = {e["name"] for e in spans if e["cat"] == "stages"}
    assert {"data", "forward", "backward", "exposed", "optimizer"} <= stages
    waiting = {e["pid"] for e in spans if e["name"].startswith("waits for rank 1")}
    assert waiting == {1}, "rank 0 waits for rank 1, whose loader is slow"
    assert len(json.loads(path.with_name("summary.json").read_text())["timelines"]) == 2


@pytest.mark.whole
def test_a_loader_of_a_script_without_optimizer(tmp_path: Path) -> None:
    """Kept batches go on as long as steps do: epochs must not come to an end meanwhile, and the script with them."""
    script = str(SCRIPTS / "slow_loader.py")
    done = diagnose(
        tmp_path, "--json", "--nproc-per-node", "2", "--diagnose-budget", "30s", script, "--by-hand", "--ms", "80"
    )
    assert done.returncode == 0, done.stderr
    first = json.loads(done.stdout)["findings"][0]
    assert (first["cause"], first["ranks"], first["status"]) == ("data_loader", [0, 1], "proved")
    # On a busy machine there may be too little time for the workers.
    assert "not tried" not in first["text"].replace(f"not tried: {_NO_TIME}", "")
    assert not list(tmp_path.glob(".autoddp/2*/attempt1")), "the script ended"


@pytest.mark.parametrize("json_too", [True, whole(False)])
def test_a_script_without_ddp(tmp_path: Path, json_too: bool) -> None:
    option = ["--json"] if json_too else []
    done = diagnose(tmp_path, *option, "--nproc-per-node", "2", str(SCRIPTS / "no_ddp.py"))
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    why = "the script built no DistributedDataParallel model"
    if json_too:
        found = json.loads(done.stdout)
        assert (found["step_ms"], found["findings"], found["not_measured"]) == (None, [], [f"everything: {why}"])
    else:
        seen = "no collective of its own was seen (functional ones are not)"
        assert done.stdout == f"nothing to measure: {why}, and {seen}\n"


@pytest.mark.parametrize("how", ["_exit(0)", whole("execv('/bin/true', ['true'])")])
def test_a_script_that_ends_without_a_word(tmp_path: Path, how: str) -> None:
    """It has 40 steps, and ends in the middle of a block. That is no failure, so it is started again."""
    code = (SCRIPTS / "plain.py").read_text().replace("    stop()\n", f"    import os; os.{how}\n")
    assert how in code
    (tmp_path / "short.py").write_text(f"import sys\nsys.path.insert(0, {str(SCRIPTS)!r})\n{code}")
    words = ["--json", "--nproc-per-node", "2", "--diagnose-budget", "0.5s", "short.py", "--steps", "60"]
    done = diagnose(tmp_path, *words)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["step_ms"] > 0
    assert "exit code 0" not in done.stdout + done.stderr


def test_a_script_that_fails(tmp_path: Path) -> None:
    (tmp_path / "fails.py").write_text("raise RuntimeError('planted')\n")
    done = diagnose(tmp_path, "--json", "--nproc-per-node", "2", "fails.py")
    assert done.returncode == 1
    assert "nothing was diagnosed: " in done.stderr.strip().splitlines()[-1]
    assert json.loads(done.stdout)["not_measured"][0].startswith("everything: ")


FAILS_LATER = """
import time, torch, torch.distributed as dist
dist.init_process_group("gloo")
for step in range(300):
    time.sleep(0.002)
    dist.all_reduce(torch.ones(100))
raise ValueError("planted")
"""


def test_a_script_that_fails_has_an_answer_for_what_it_has_done(tmp_path: Path) -> None:
    (tmp_path / "fails.py").write_text(FAILS_LATER)
    done = diagnose(tmp_path, "--json", "--diagnose-budget", "1s", "--nproc-per-node", "2", "fails.py")
    assert done.returncode == 1
    assert "the diagnosis ended early: rank " in done.stderr.strip().splitlines()[-1]
    found = json.loads(done.stdout)
    assert "ValueError: planted" in found["not_measured"][-1]
    assert max(row["calls"] for row in found["communication"]["rows"]) > 500
    assert ranks_in_trace(tmp_path) == ["rank 0", "rank 1"]


def ranks_in_trace(folder: Path) -> list[str]:
    """The ranks that the trace of the only run below this folder shows; it has the format's form."""
    (path,) = folder.glob(".autoddp/2*/trace.json")
    trace = json.loads(path.read_text())
    assert check(trace) == []
    assert any(event["name"].startswith("all_reduce") for event in trace["traceEvents"])
    return [e["args"]["name"].partition(" on ")[0] for e in trace["traceEvents"] if e["name"] == "process_name"]


@pytest.mark.skipif(bool(unavailable()), reason=unavailable())
def test_what_was_found_before_a_host_has_left_is_shown(tmp_path: Path) -> None:
    """Nothing is launched afterwards, so the host that is left needs no other."""
    with Lab(hosts=2) as lab:
        words = ["--json", "--diagnose-budget", "30s", "--nnodes", "2", "--nproc-per-node", "1"]
        words += ["--master-addr", lab.address(0), "--master-port", "29412"]
        # Each batch takes much more than what other tests beside this one take from a step.
        script = [str(SCRIPTS / "slow_loader.py"), "--epochs", "3000", "--ms", "80"]
        launches = []
        for host in range(2):
            popen = functools.partial(lab.fork, host)
            mine = [*words, "--node-rank", str(host), *script]
            launches.append(start((*AUTODDP, "diagnose"), tmp_path / f"host{host}", mine, {}, popen=popen))
        first, second = launches
        try:
            wait_for(lambda: "diagnosis 1/" in first.stderr, "the first experiment")
            second.process.send_signal(signal.SIGINT)
            first.process.wait(PATIENCE)
        finally:
            first.kill()
            second.kill()
    assert first.returncode == 0, first.stderr
    assert json.loads(first.stdout)["findings"][0]["cause"] == "data_loader"
    assert "the diagnosis ended early: node 1 (host1) has left: " in first.stderr


UNEVEN_CALLS = """
import time
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
first = dist.new_group([0, 1])  # the ranks of the first host, where calls are seen much more often
for _ in range(100_000):
    for _ in range(20):
        if dist.get_rank() < 2:
            dist.all_reduce(torch.ones(10), group=first)
        time.sleep(0.1)
    dist.all_reduce(torch.ones(1000))
"""


@pytest.mark.whole  # half a minute
@pytest.mark.skipif(bool(unavailable()), reason=unavailable())
def test_a_script_without_ddp_on_two_hosts(tmp_path: Path) -> None:
    """The first host has recorded enough long before the second one, and ends its ranks. The others fail for want of
    them: that was the second host's answer, and its exit code was 1.
    """
    (tmp_path / "calls.py").write_text(UNEVEN_CALLS)
    with Lab(hosts=2) as lab:
        words = ["--json", "--nnodes", "2", "--master-addr", lab.address(0), "--master-port", "29413"]
        launches = []
        for host in range(2):
            popen = functools.partial(lab.fork, host)
            mine = [*words, "--node-rank", str(host), "--nproc-per-node", str(2 - host), str(tmp_path / "calls.py")]
            launches.append(start((*AUTODDP, "diagnose"), tmp_path / f"host{host}", mine, {}, popen=popen))
        try:
            for launch in launches:
                launch.wait()
        finally:
            for launch in launches:
                launch.kill()
    for host, launch in enumerate(launches):
        assert launch.returncode == 0, launch.stderr
        assert "nothing was diagnosed" not in launch.stderr
        assert json.loads(launch.stdout)["communication"]["rows"]
        assert ranks_in_trace(launch.folder) == [["rank 0", "rank 1"], ["rank 2"]][host], "those of this host"


def interrupted(folder: Path, number: signal.Signals, *words: str) -> Any:
    """A diagnosis that gets a signal in its first experiment."""
    script = [str(SCRIPTS / "slow_loader.py"), "--epochs", "3000"]
    command = (*AUTODDP, "diagnose", *words, "--nproc-per-node", "2")
    launch = start(command, folder, script, {})
    try:
        wait_for(lambda: "diagnosis 1/" in launch.stderr, "the first experiment")
        launch.process.send_signal(number)
        launch.process.wait(PATIENCE)
        wait_for(lambda: not launch.processes(), "the end of every process")
    finally:
        launch.kill()
    return launch


def test_a_signal_ends_the_diagnosis(tmp_path: Path) -> None:
    done = interrupted(tmp_path / "run", signal.SIGTERM)
    assert done.returncode == 143
    assert "autoddp: SIGTERM: the diagnosis ends\n" in done.stderr
    assert "What the script writes during the diagnosis" in done.stderr
    assert not re.search("tuning|tuned|no job", done.stderr), done.stderr


@pytest.mark.whole  # the way of SIGTERM, above, and the names, in test_tuned_signals
def test_a_signal_that_the_user_names_ends_the_diagnosis(tmp_path: Path) -> None:
    done = interrupted(tmp_path / "run", signal.SIGUSR1, "--signals-to-handle", "SIGTERM,SIGUSR1")
    assert done.returncode == 128 + signal.SIGUSR1
    assert "autoddp: SIGUSR1: the diagnosis ends\n" in done.stderr


@pytest.mark.whole  # the way of test_no_orphans.py
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux lets a process adopt orphans")
def test_no_orphans_after_the_command_was_killed(tmp_path: Path) -> None:
    done = interrupted(tmp_path / "run", signal.SIGKILL, "--no-orphans")
    assert done.returncode == -signal.SIGKILL
    assert "autoddp: --no-orphans: ending what the launcher, which was killed, has left behind" in done.stderr


def test_a_dry_run_starts_nothing(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "plain.py").write_text("open('ran', 'w')\n")
    options = ["--dry-run", "--nproc-per-node", "2", "--tee", "3", "--allow", "near"]
    done = diagnose(tmp_path / "run", *options, "plain.py", "--lr", "1")
    assert (done.returncode, done.stdout) == (0, "would diagnose: plain.py --lr 1\n")
    assert "autoddp: --allow, --tee have no effect here: a diagnosis measures the script as written" in done.stderr
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["plain.py"]


def test_the_help_fits_a_terminal() -> None:
    assert max(map(len, _HELP.splitlines())) <= 80


def test_no_option_is_ignored_in_silence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    listed = help_text(whole=True, of_diagnose=True) + _HELP
    for option, declared in DECLARED.items():
        words = [option, *([declared["example"] or "x"] if "type" in declared else []), "train.py"]
        if f"\n  {option}" in listed:
            assert parse(words).not_of_a_diagnosis == []
        elif option in ("--trials", "--recipe"):  # the answer would be about another job than the one that is meant
            with pytest.raises(UsageError, match=f"^diagnose: {option} is for tuning and launching"):
                choose_to_diagnose(parse(words))
        else:
            says = choose_to_diagnose(parse(words)).says
            assert says.startswith(f"{option} has no effect here: a diagnosis measures")
    if "--log-line-prefix-template" in listed:  # torchrun has it since torch 2.15
        says = choose_to_diagnose(parse(["--log-line-prefix-template", "x", "train.py"])).says
        assert says.startswith("--log-line-prefix-template has no effect here: a diagnosis keeps")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "no script given"),
        (["--json"], "no script given"),
        (["missing.py"], "missing.py"),
        (["--trials", "3", "plain.py"], "--trials is for tuning"),
        (["--dry-run", "--json", "plain.py"], "leave out --json"),
        (["--diagnose-budget", "0", "plain.py"], "nothing would be done"),
        (["--diagnose-budget", "soon", "plain.py"], "must be a duration, or 0 for none"),
        (["--jsno", "plain.py"], "unknown option --jsno"),
    ],
)
def test_bad_words_are_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], says: str) -> None:
    (tmp_path / "plain.py").write_text("")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(AutoddpError) as error:
        run(words)
    assert error.value.exit_code == 2
    assert says in str(error.value)
    assert "\n" not in str(error.value)


def test_variables_for_tuning_are_in_nobodys_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They were refused as options that nobody had typed."""
    (tmp_path / "train.py").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("AUTODDP_TRIALS", "20")
    monkeypatch.setenv("AUTODDP_RECIPE", "mine.toml")
    assert choose_to_diagnose(parse(["train.py"])).tune
    monkeypatch.setenv("AUTODDP_TRIALS", "0")
    with pytest.raises(UsageError, match=r"^diagnose: AUTODDP_TRIALS=0 makes autoddp torchrun: unset it$"):
        choose_to_diagnose(parse(["train.py"]))


def test_such_a_line_is_all_that_is_said(tmp_path: Path) -> None:
    done = diagnose(tmp_path, "--jsno", "plain.py")
    assert done.returncode == 2
    assert "unknown option --jsno" in done.stderr.strip().splitlines()[-1]
    assert "Traceback" not in done.stderr


def test_a_master_whose_name_nobody_knows_ends_it_at_once(tmp_path: Path) -> None:
    """As it ends a launch: where all names are known before the job starts, waiting for this one is in vain."""
    (tmp_path / "train.py").write_text("")
    told = {"SM_HOSTS": '["no-host.invalid", "other.invalid"]', "SM_CURRENT_HOST": "other.invalid", "SM_NUM_GPUS": "1"}
    done = start((*AUTODDP, "diagnose"), tmp_path, ["train.py"], told).wait()
    assert done.returncode == 2
    assert "SM_HOSTS names the master no-host.invalid" in done.stderr.strip().splitlines()[-1]


def test_a_word_of_the_script_stays_its_own(tmp_path: Path) -> None:
    """--json behind the script's name belongs to the script."""
    (tmp_path / "says.py").write_text("import sys, pathlib\npathlib.Path('said').write_text(' '.join(sys.argv[1:]))\n")
    done = diagnose(tmp_path, "--nproc-per-node", "1", "--isolation", "off", "says.py", "--json", "x")
    assert not done.stdout.startswith("{")
    assert (tmp_path / "said").read_text() == "--json x"


# tests/launch/test_networks.py has it on two hosts. A rank that is spawned imports torch anew in each start.
@pytest.mark.parametrize("ranks_by", ["fork", whole("spawn"), whole("")])
def test_a_script_that_communicates_without_ddp(tmp_path: Path, ranks_by: str) -> None:
    """As under torchrun, and with ranks of its own under one rank, at a port of theirs: torchrun itself hangs there.

    Nothing spins beside calls that are timed: redrawing takes a core from them. The script has started long since, too.
    """
    words = [str(SCRIPTS / "small_calls.py"), "--tensors", "20"]
    words += ["--ranks", "2", "--by", ranks_by] if ranks_by else []
    options = ["--json", "--diagnose-budget", "1s", "--nproc-per-node", "1" if ranks_by else "2"]
    # Beside other programs a rank may lose its core between most of its calls, as if it computed there.
    for attempt in range(3):
        folder = tmp_path / str(attempt)
        folder.mkdir()
        done, shown = on_a_terminal(folder, *options, *words)
        assert done.returncode == 0, shown
        assert "Traceback" not in shown
        before, _, after = shown.partition(" of the calls again")
        found = json.loads(done.stdout)
        if after and any("small_collectives" in str(found[part]) for part in ("findings", "not_measured")):
            break
    assert "starting the script" in before
    assert after
    assert "starting the script" not in after
    (row,) = [row for row in found["communication"]["rows"] if row["calls"] >= 2 * 600]
    assert (row["collective"], row["bytes_per_call"], row["groups"]) == ("all_reduce", 400, [[0, 1]])
    assert Path(row["file"]).name == "small_calls.py"
    started_by = {one["started_by"] for one in found["communication"]["processes"]}
    assert started_by == {"the script" if ranks_by else "autoddp"}
    small = [one for one in found["findings"] if one["cause"] == "small_collectives"]
    place = f"small_calls.py:{row['line']}"
    if small:
        assert small[0]["ms"] > 0
        assert place in small[0]["fix"]
    else:  # beside other programs, rounds may differ too much to say whether it gains
        (unsure,) = (one for one in found["not_measured"] if "whether small_collectives costs anything" in one)
        assert place in unsure
    assert found["communication"]["step_ms"] > 0
    (summary,) = folder.glob(".autoddp/2*/summary.json")
    assert json.loads(summary.read_text())["diagnosis"] == found, "the same for programs that read the run's folder"


@pytest.mark.parametrize(("terminal", "columns"), [("40", 80), ("80", 80), ("132", 132)])
def test_tables_have_room_for_their_numbers(monkeypatch: pytest.MonkeyPatch, terminal: str, columns: int) -> None:
    screen = io.StringIO()
    monkeypatch.setattr(screen, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stdout", screen)
    for name, value in {"TERM": "xterm", "COLUMNS": terminal}.items():
        monkeypatch.setenv(name, value)
    assert _columns() == columns
