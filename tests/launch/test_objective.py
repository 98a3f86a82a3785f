"""`--objective` as a user calls it: scripts without DDP, whose settings are tuned start by start.

Most scripts here import no torch: what they print is what counts, and a start of them costs next to nothing.
"""

from __future__ import annotations

import json
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from launchers import AUTODDP, PATIENCE, SCRIPTS, Launch, start, wait_for, whole
from one_starts import one_start

from autoddp.attempts.job.deadline import Deadline
from autoddp.attempts.job.live_job import WorkerServer
from autoddp.attempts.starts import objective
from autoddp.attempts.starts.objective import _settings
from autoddp.attempts.starts.one_start import Seen, cost_of_all
from autoddp.attempts.starts.progress import StepsMade
from autoddp.cli import recipe as recipe_command
from autoddp.cli import report as report_command
from autoddp.commandline.mode import choose
from autoddp.commandline.words import parse
from autoddp.diagnose.collectives.ends import StepEnds
from autoddp.diagnose.collectives.recording import Recording
from autoddp.errors import UsageError
from autoddp.hosts.together import Hosts
from autoddp.knobs.env import NodeAndJob, start_settings
from autoddp.recipe import load
from autoddp.runs.folder import CALLS
from autoddp.settings import Objective
from autoddp.study import TrialFailed, TuningOver
from autoddp.topology.facts import Cpu, Gpu, GpuPair, Node
from autoddp.wire import LauncherClient
from autoddp.worker.observe.kernel_accounts import PageFaultCount, PageFaults

RATE = "regex:max:rate ([0-9.]+)"
ONE = ["--nproc-per-node", "1"]
BY_THREADS = "import os\nrate = 20.5 if os.environ.get('OMP_NUM_THREADS') == '1' else 10.25\n"
"""The one setting that is tried on any machine with two cores helps by construction."""
needs_cores = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="on one core there is no number to try")


def tuned(folder: Path, code: str, *words: str) -> Launch:
    folder.mkdir(exist_ok=True)
    (folder / "job.py").write_text(code)
    return start(AUTODDP, folder, [*words, "job.py"]).wait()


def summary(launch: Launch) -> Any:
    (place,) = launch.folder.glob(".autoddp/2*/summary.json")  # a run that is killed leaves none
    return json.loads(place.read_text())


@needs_cores
def test_real_ranks_get_the_setting_that_helps_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "run"
    script = str(SCRIPTS / "own_ranks_by_fork.py")
    launch = start(AUTODDP, folder, ["--objective", "steps", *ONE, "--trials", "1", script]).wait()
    assert launch.returncode == 0, launch.stderr[-3000:]
    assert sorted((folder / "runs").read_text().splitlines()) == ["0 1", "1 1"], "files of trials, or another setting"
    (place,) = folder.glob("*.toml")
    recipe = load(place)
    assert recipe.env == {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    assert recipe.evidence.objective == "steps"
    assert recipe.evidence.baseline_ms_per_step is not None
    assert recipe.evidence.baseline_ms_per_step >= 200
    found = summary(launch)["objective"]
    assert found["gain"]["low"] > 1
    assert found["as_written"] >= 0.2 > found["tuned"]  # 0.01 s of sleep, and what a busy machine adds
    pairs = found["rounds"]
    assert len(pairs["as_written"]) == len(pairs["finalists"][0]["numbers"]) >= 3
    assert "Traceback" not in launch.stderr
    monkeypatch.chdir(folder)
    again = choose(parse([script]))
    assert (again.tune, again.variables) == (False, recipe.env)
    assert again.says.endswith("launching with OMP_NUM_THREADS=1 TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1")


@dataclass
class GoneOn:
    """A run that was killed, and the next one."""

    killed: Path
    known: list[str]
    """Lines of its journal."""
    again: Launch


@pytest.fixture(scope="module")
def gone_on(tmp_path_factory: pytest.TempPathFactory) -> GoneOn:
    """A script that appends to a file and removes one, and prints its number at its end."""
    folder = tmp_path_factory.mktemp("gone_on") / "run"
    folder.mkdir()
    (folder / "log").write_text("mine\n")
    (folder / "best.pt").write_text("weeks of training")
    code = f"{BY_THREADS}open('log', 'a').write('theirs')\nos.remove('best.pt')\nprint('rate', rate, end='')\n"
    killed = a_run_was_killed(folder, code)
    known = (killed / "journal.jsonl").read_text().splitlines()
    return GoneOn(killed, known, tuned(folder, code, "--objective", RATE, *ONE, "--tune-only"))


@needs_cores
def test_a_number_that_is_printed_once_at_the_end(
    gone_on: GoneOn, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """No start leaves anything, whatever the script appends to or removes; without a job the files stay as they are."""
    launch, folder = gone_on.again, gone_on.again.folder
    assert launch.returncode == 0, launch.stderr[-3000:]
    assert (folder / "log").read_text() == "mine\n"
    assert (folder / "best.pt").read_text() == "weeks of training"
    (place,) = folder.glob("*.toml")
    recipe = load(place)
    assert recipe.configuration == {}
    assert recipe.env == {"OMP_NUM_THREADS": "1"}
    assert (recipe.evidence.objective, recipe.evidence.baseline_value) == (RATE, 10.25)
    assert [(entry.value, entry.ms_per_step) for entry in recipe.ladder] == [(20.5, None)]
    assert "×2.00 better" in launch.stderr
    assert "10.25 → 20.5 as printed" in launch.stderr
    assert "  by            OMP_NUM_THREADS=1\n" in launch.stderr or "1 CPU thread per rank\n" in launch.stderr
    assert (summary(launch)["objective"]["as_written"], summary(launch)["objective"]["tuned"]) == (10.25, 20.5)
    monkeypatch.chdir(folder)
    assert report_command.run([]) == 0
    page = Path(capsys.readouterr().out.strip()).read_text()
    assert "10.25 → 20.5 as printed" in page
    assert "report          .autoddp/latest/report.html\n" in launch.stderr
    assert recipe_command.run(["show", place.name]) == 0
    assert f"tuned for {RATE}, baseline 10.25 as printed" in capsys.readouterr().out


@needs_cores
def test_a_setting_under_which_the_script_gives_up_has_failed(tmp_path: Path) -> None:
    """`python train.py | tee log` ends with exit code 0, whatever became of the script."""
    code = "rate, times = (20.5, 1) if os.environ.get('OMP_NUM_THREADS') == '1' else (10.25, 10)\n"
    code = f"import os\n{code}for _ in range(times):\n    print('rate', rate)\n"
    launch = tuned(tmp_path / "run", code, "--objective", RATE, *ONE, "--trials", "1", "--tune-only")
    assert launch.returncode == 0, launch.stderr[-3000:]
    (place,) = launch.folder.glob("*.toml")
    assert load(place).env == {}
    _, trial = summary(launch)["objective"]["starts"]
    assert (trial["state"], trial["reason"]) == (
        "failed",
        "the script has ended after 1 of the 10 numbers that rank 0 shows as written",
    )


def test_a_script_that_never_ends_is_ended(tmp_path: Path) -> None:
    """The time is too short for finals, so nothing is decided, and no recipe is written."""
    code = "import time\nwhile True:\n    print('rate 3', flush=True)\n    time.sleep(0.2)\n"
    launch = tuned(tmp_path / "run", code, "--objective", RATE, *ONE, "--tune-only", "--budget", "7s")
    assert launch.returncode == 1
    assert launch.processes() == []
    last = launch.stderr.strip().splitlines()[-1]
    assert last.startswith("autoddp: error: no recipe was written: ")
    assert "--budget" in last or "no setting" in last
    assert not list(launch.folder.glob("*.toml"))


def test_a_number_is_seen_when_it_is_printed(tmp_path: Path) -> None:
    """Few scripts flush. Into a log Python writes 8 KiB at once, which this one prints in ten minutes."""
    code = "import time\nwhile True:\n    print('rate 3')\n    time.sleep(0.5)\n"
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "job.py").write_text(code)
    # With the threads set there is nothing to try, so the first start is all; it may take as long as it does.
    words = ["--objective", RATE, *ONE, "--tune-only", "job.py"]
    launch = start(AUTODDP, folder, words, {"OMP_NUM_THREADS": "1"}).wait()
    assert launch.returncode == 0, launch.stderr[-2000:]
    assert "has printed nothing" not in launch.stderr
    assert summary(launch)["objective"]["as_written"] == 3


def test_a_number_behind_a_long_log_is_seen(tmp_path: Path) -> None:
    """When a script has ended, its log is cut to 64 MiB: what was read of it last then lay behind its end."""
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "job.py").write_text(
        "import time\nprint(('x' * 1023 + '\\n') * 67_000)\ntime.sleep(2)\nprint('rate 3')\n"
    )
    words = ["--objective", RATE, *ONE, "--tune-only", "job.py"]
    launch = start(AUTODDP, folder, words, {"OMP_NUM_THREADS": "1"}).wait()
    assert launch.returncode == 0, launch.stderr[-2000:]
    assert summary(launch)["objective"]["as_written"] == 3


def interrupted(folder: Path, attempt: int) -> Launch:
    """The launch of `job.py`, ended by SIGINT when its start of this number has printed "here"."""
    launch = start(AUTODDP, folder, ["--objective", RATE, *ONE, "job.py"])
    try:
        logs = f".autoddp/2*/attempt{attempt}/*/attempt_0/0/stdout.log"
        wait_for(lambda: any("here" in log.read_text() for log in folder.glob(logs)), f"start {attempt}")
        launch.process.send_signal(signal.SIGINT)
        launch.process.wait(PATIENCE)
        wait_for(lambda: not launch.processes(), "the end of every process")
    finally:
        launch.kill()
    return launch


def test_a_signal_ends_it_without_a_job(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "job.py").write_text("import time\nopen('log', 'a').write('x')\nprint('here')\ntime.sleep(600)\n")
    launch = interrupted(folder, attempt=0)
    assert launch.returncode == 130
    assert "SIGINT: tuning ends, no job is started" in launch.stderr
    assert not (folder / "log").exists()


@needs_cores
def test_a_signal_keeps_what_was_measured(tmp_path: Path) -> None:
    """The start as written has given its number; the signal comes in that of the first setting."""
    folder = tmp_path / "run"
    folder.mkdir()
    tried = "if 'OMP_NUM_THREADS' in os.environ:\n    print('here', flush=True)\n    time.sleep(600)\n"
    (folder / "job.py").write_text(f"import os, time\n{tried}print('rate 3')\n")
    launch = interrupted(folder, attempt=1)
    assert launch.returncode == 130
    assert "Traceback" not in launch.stderr
    assert summary(launch)["objective"]["as_written"] == 3
    assert not list(folder.glob("*.toml"))


def a_run_was_killed(folder: Path, code: str) -> Path:
    """The folder of a run that was killed after its third start had been measured, or later."""
    folder.mkdir(exist_ok=True)
    (folder / "job.py").write_text(code)
    launch = start(AUTODDP, folder, ["--objective", RATE, *ONE, "--tune-only", "job.py"])
    try:
        journals = ".autoddp/2*/journal.jsonl"
        wait_for(lambda: any(lines(path) > 3 for path in folder.glob(journals)), "the third start")
        launch.process.kill()
        launch.process.wait(PATIENCE)
        wait_for(lambda: not launch.processes(), "the end of every process")
    finally:
        launch.kill()
    (place,) = folder.glob(".autoddp/2*")
    return place


def lines(path: Path) -> int:
    return path.read_text().count("\n")


@needs_cores
def test_a_run_that_was_killed_goes_on(gone_on: GoneOn) -> None:
    """Its starts may have taken hours. The script as written is started anew, to see that it is the same job."""
    killed, known, again, folder = gone_on.killed, gone_on.known, gone_on.again, gone_on.again.folder
    assert again.returncode == 0, again.stderr[-2000:]
    measured = f"cut off after {len(known) - 1} measurements; --fresh begins anew"
    assert f"going on with the tuning run {killed.name}, {measured}" in again.stderr
    newest = max(folder.glob(".autoddp/2*"))
    journal = (newest / "journal.jsonl").read_text().splitlines()
    assert journal[: len(known)] == known
    made = len(list(newest.glob("attempt*")))
    assert made == len(journal) - len(known) + 1, "starts that were known, or one that is missing"
    assert (load(next(folder.glob("*.toml"))).env) == {"OMP_NUM_THREADS": "1"}
    assert not (newest / "study.json").exists()
    assert not (killed / "study.json").exists()


@needs_cores
def test_a_run_of_a_script_that_shows_something_else_now_does_not_go_on(tmp_path: Path) -> None:
    """Its data may have changed: then two numbers were compared by another count."""
    folder = tmp_path / "run"
    (tmp_path / "numbers").write_text("2")
    code = f"""import os
numbers = int(open({str(tmp_path / "numbers")!r}).read())
rate = 20.5 if numbers == 2 and os.environ.get('OMP_NUM_THREADS') == '1' else 10.25
print(f'rate {{rate}}\\n' * numbers)
"""
    assert (a_run_was_killed(folder, code) / "study.json").exists(), "there is nothing to go on with"
    (tmp_path / "numbers").write_text("1")
    again = tuned(folder, code, "--objective", RATE, *ONE, "--tune-only")
    assert again.returncode == 0, again.stderr[-2000:]
    assert "going on" not in again.stderr


@pytest.mark.parametrize(
    ("code", "why", "budget"),
    [
        ("print('loss 3')", f"the script has ended, and has printed nothing that {RATE} finds", "10m"),
        ("import time\nwhile True: time.sleep(1)\n", f"the script has printed nothing that {RATE} finds within", "2s"),
        # Of what cannot be used, test_progress.py has more.
        whole(
            "print('rate 0.0')", "rank 0 prints 0: gains are ratios, so the number must be above 0 and finite", "10m"
        ),
        ("raise ValueError('planted')", "rank 0: ValueError: planted; see ", "10m"),
    ],
)
def test_a_script_that_shows_no_number_is_told_in_one_line(tmp_path: Path, code: str, why: str, budget: str) -> None:
    """A script that ends, or prints what cannot be used, ends tuning by that, however long its start takes."""
    launch = tuned(tmp_path / "run", code, "--objective", RATE, *ONE, "--tune-only", "--budget", budget)
    assert launch.returncode == 1
    last = launch.stderr.strip().splitlines()[-1]
    assert last.startswith("autoddp: error: no recipe was written: ")
    assert why in last
    assert launch.processes() == []
    assert "Traceback" not in launch.stderr


def test_a_ddp_job_is_sent_to_the_usual_way(tmp_path: Path) -> None:
    words = ["--objective", "steps", "--nproc-per-node", "2", str(SCRIPTS / "plain.py")]
    launch = start(AUTODDP, tmp_path / "run", words).wait()
    assert launch.returncode == 2
    last = launch.stderr.strip().splitlines()[-1]
    assert last.startswith("autoddp: error: --objective steps: ")
    assert last.endswith(
        "builds a DistributedDataParallel model, whose settings are tuned without this option: leave it out"
    )
    assert not list(launch.folder.glob("*.pt")), "a job was launched, or a trial's file is left"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("step", "must be steps, or regex:min:PATTERN"),
        ("", "must be steps, or regex:min:PATTERN"),
        ("regex", "which is better, a lower number or a higher one?"),
        ("regex:loss ([0-9.]+)", "which is better, a lower number or a higher one?"),
        ("regex:least:loss ([0-9.]+)", "which is better, a lower number or a higher one?"),
        ("regex:min:", "no group, and it must have exactly one"),
        ("regex:min:loss [0-9.]+", "no group, and it must have exactly one"),
        ("regex:min:loss (?:[0-9.]+)", "no group, and it must have exactly one"),
        ("regex:min:(loss|cost) ([0-9.]+)", "2 groups, and it must have exactly one"),
        ("regex:min:loss ([0-9.]+", "no regular expression (missing ), unterminated subpattern at position 5)"),
        (f"regex:min:({'9' * 30})" + "{" + "9" * 30 + "}", "no regular expression"),
        ("regex:min:loss\t([0-9.]+)", "only printable characters"),
    ],
)
def test_a_bad_objective_is_one_line(text: str, why: str) -> None:
    with pytest.raises(UsageError) as error:
        parse(["--objective", text, "train.py"])
    assert why in str(error.value)
    assert str(error.value).startswith("--objective ")
    assert len(str(error.value).splitlines()) == 1


def test_the_colons_of_a_pattern_stay() -> None:
    found = Objective.parse("regex:min:time: ([0-9:]+) (?:s|ms)")
    assert found.pattern.pattern == "time: ([0-9:]+) (?:s|ms)"
    assert (found.cost(4.0), found.number(4.0)) == (4.0, 4.0)
    higher = Objective.parse("regex:max:(.)")
    assert (higher.cost(4.0), higher.number(0.25)) == (0.25, 4.0)


@pytest.mark.parametrize(
    ("number", "shown"), [(10.25, "10.25"), (9999.7, "10000"), (51234.0, "51234"), (2.5e6, "2500000")]
)
def test_a_number_is_shown_as_the_script_prints_it(number: float, shown: str) -> None:
    """Tokens per second are mostly more than four digits, and nobody reads 5.123e+04."""
    found = Objective.parse("regex:max:tokens/s (.+)")
    assert found.figure(found.cost(number)) == shown


@pytest.fixture
def one_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host with one NUMA node, whatever this one is."""
    monkeypatch.setattr(objective, "usable_nodes", lambda allowed: [(0, set(allowed))])


@pytest.mark.usefixtures("one_node")
def test_what_may_lose_data_is_not_tried_without_a_benchmark() -> None:
    """Peer access between sockets, which some machines only claim to have: nobody would see that the sums are wrong."""
    here = Node("here", gpus=(Gpu(0), Gpu(1)), pairs=(GpuPair(0, 1, "SYS", p2p="OK"),), cpu=Cpu(vendor="GenuineIntel"))
    around = NodeAndJob(here, nodes=2, environment={"OMP_NUM_THREADS": "1"})
    assert {"nccl_p2p_level": "SYS"} in start_settings(around)
    found = _settings(Recording(), 1, around, on_gpus=True)
    assert found == [setting for setting in start_settings(around) if setting != {"nccl_p2p_level": "SYS"}] != []


@needs_cores
@pytest.mark.usefixtures("one_node")
def test_what_the_user_has_set_is_not_tried() -> None:
    def around(in_page_faults: float, **environment: str) -> NodeAndJob:
        return NodeAndJob(node=None, nodes=1, environment=environment, in_page_faults=in_page_faults)

    free = _settings(Recording(), 1, around(0.5), on_gpus=False)
    assert [list(setting) for setting in free][-1] == ["malloc"]
    assert {"threads": 1} in free
    assert _settings(Recording(), 1, around(0.5, OMP_NUM_THREADS="3", MALLOC_TRIM_THRESHOLD_="0"), False) == []
    assert _settings(Recording(), len(os.sched_getaffinity(0)), around(0.0), False) == []


@pytest.mark.parametrize(
    ("ranks", "on_gpus", "variables", "launched", "tried"),
    [
        (2, False, {}, True, True),
        (1, False, {}, True, False),  # CPUs would be idle
        (1, True, {}, True, True),
        (2, False, {"OMP_PROC_BIND": "close"}, True, False),
        (2, False, {}, False, False),  # the script starts its ranks by itself
    ],
)
def test_where_ranks_are_bound(
    ranks: int, on_gpus: bool, variables: dict[str, str], launched: bool, tried: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(objective, "usable_nodes", lambda allowed: [(0, {0}), (1, {1})])
    around = NodeAndJob(node=None, nodes=1, environment=variables)
    recording: Any = SimpleNamespace(processes=[SimpleNamespace(is_launched=launched, threads=1)])
    assert ({"numa_binding": "node"} in _settings(recording, ranks, around, on_gpus)) is tried


def test_without_trials_nothing_is_tuned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    assert choose(parse(["--objective", "steps", "train.py"])).tune
    assert not choose(parse(["--objective", "steps", "--trials", "0", "train.py"])).tune


def test_options_for_ddp_are_said_to_have_no_effect(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    says = choose(parse(["--objective", "steps", "--trace", "--accumulate-up-to", "4", "train.py"])).says
    assert says.startswith("--accumulate-up-to, --trace have no effect with --objective, ")
    assert choose(parse(["--objective", "steps", "--budget", "10m", "train.py"])).says == ""


def test_a_recipe_belongs_to_its_objective(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the option the saved recipe is launched, with as many ranks as torchrun starts; with another, tuned."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "project"
    folder.mkdir()
    code = "print('rate 1')\n"
    launch = tuned(folder, code, "--objective", RATE, *ONE, "--tune-only")
    assert launch.returncode == 0, launch.stderr[-2000:]
    (place,) = folder.glob("*.toml")
    monkeypatch.chdir(folder)
    for words in ([], ["--objective", RATE], ["--objective", RATE, "--recipe", place.name]):
        mode = choose(parse([*words, "job.py"]))
        assert mode.recipe is not None, words
        assert not mode.tune
    assert choose(parse(["--objective", "steps", "job.py"])).tune
    assert choose(parse(["--objective", RATE, "--trials", "2", "job.py"])).tune
    with pytest.raises(UsageError, match=r"was tuned for regex:max:rate .* and would be launched as it is: leave"):
        choose(parse(["--objective", "steps", "--recipe", place.name, "job.py"]))


@pytest.mark.parametrize("builds_ddp", [True, False])
def test_a_rank_that_takes_long_to_say_by_what_it_ends_builds_no_ddp_model(
    builds_ddp: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a busy machine it may have no core for seconds, or be killed for another rank meanwhile."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("LOCAL_RANK", "0")
    start = one_start(tmp_path)
    server = WorkerServer(str(tmp_path / "s"), 0, start.heard)
    try:
        rank = LauncherClient(str(tmp_path / "s"))
        assert rank.hello(builds_ddp)
        later = time.monotonic() + 10
        with monkeypatch.context() as patched:
            patched.setattr(time, "monotonic", lambda: later)
            assert start.is_over() is builds_ddp
        rank.goodbye("RuntimeError: no such file")
    finally:
        server.close()
    assert start.builds_ddp is builds_ddp
    assert [why for _, why in start.failures] == ["rank 0: RuntimeError: no such file"]


def test_page_faults_are_a_share_of_the_time_until_the_last_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A short script may save for longer than it has trained. Then no setting would seem to be worth a start."""
    now, ends = 1000.0, [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now)
    monkeypatch.setattr(PageFaultCount, "taken", lambda _: PageFaults(0, (ends[-1] - 1000.0) / 4))
    start = one_start(tmp_path, progress=StepsMade(tmp_path, period=0))
    monkeypatch.setattr(StepsMade, "look", lambda _: None)
    monkeypatch.setattr(StepEnds, "of_optimizers", lambda _: {0: ends})
    (tmp_path / CALLS).mkdir()
    (tmp_path / CALLS / f"{os.getpid()}-1.calls").touch()
    assert not start.is_over()
    now, ends = 1001.0, [1000.0, 1001.0]
    assert not start.is_over()
    now = 1004.0
    assert not start.is_over()
    assert start.in_page_faults == 0.25
    assert start.memory > 0


@pytest.mark.parametrize("leads", [True, False])
def test_the_clock_of_the_host_that_leads_counts(leads: bool, tmp_path: Path) -> None:
    """Another host may have waited for it for longer than the budget."""
    start = one_start(
        tmp_path,
        needed={0: 8},
        deadline=Deadline(60.0, time.monotonic() - 600, by_length=False),
        hosts=Hosts(rank=0 if leads else 1),
        number=1,
    )
    assert start.is_over() is leads
    assert start.tuning_over == ("the --budget of 1 min 0 s is over" if leads else "")


def test_a_failure_is_dated_by_the_clock_of_the_first_host(tmp_path: Path) -> None:
    """Else the host whose clock is behind has always failed first, and its complaint of the other one is told."""
    start = one_start(tmp_path, needed={0: 8}, hosts=Hosts(rank=1, ahead=3600.0), number=1)
    assert start.seen("rank 1 ended with exit code 1").failed_at == pytest.approx(time.time() - 3600, abs=60)


def test_of_several_hosts_the_first_failure_is_told_and_the_slowest_rank_counts() -> None:
    echo, first, later = Seen(failed="it ended elsewhere"), Seen(failed="no memory", failed_at=7), Seen(0.5)
    with pytest.raises(TrialFailed, match=r"^no memory$"):
        cost_of_all([echo, later, first, Seen(failed="connection lost", failed_at=8)])
    with pytest.raises(TuningOver, match=r"^--budget is over$"):
        cost_of_all([first, Seen(tuning_over="--budget is over")])
    assert cost_of_all([Seen(0.25), later, Seen(nothing="no numbers")]) == 0.5
    with pytest.raises(TrialFailed, match=r"^no numbers$"):
        cost_of_all([Seen(nothing="no numbers")] * 2)
