"""`autoddp wrap`: a command in which each torchrun is autoddp.

`autoddp wrap` is a fork, which becomes its command as `tests/started_forks.py` does it: each program begins as if
Python were new, but has torch from memory. What a shell starts is a new process.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import forks
import pytest
from launchers import AUTODDP, REPORTER, ROOT, SCRIPTS, TORCHRUN, Launch, environment, free_port, start, whole

from autoddp.cli.wrap import _HELP
from autoddp.commandline.words import leading_own, parse_apart

BIN = Path(sys.executable).parent
WRAP = (*AUTODDP, "wrap", "--trials", "0")
TWO = ["--nproc-per-node", "2"]
SAID = "runs in place of torchrun"
# A program that calls torchrun's functions itself, as accelerate and lightning do, and goes on afterwards.
CALLS_RUN = """
import sys, torch.distributed.run as torchrun
arguments = torchrun.get_args_parser().parse_args(sys.argv[1:])
arguments.nproc_per_node, arguments.master_port = "2", str(arguments.master_port or {port})
torchrun.run(arguments)
print("went on")
import os, subprocess
if os.environ.pop("AGAIN", ""):
    arguments.training_script_args = [*arguments.training_script_args, "again"]
    torchrun.run(arguments)
    subprocess.run(["torchrun", "--nproc-per-node", "1", *sys.argv[1:]], check=True)
"""
# One that first looks whether there is a torchrun.
CALLS_MAIN = """
import importlib.util, sys
assert importlib.util.find_spec("torch.distributed.run")
from torch.distributed.run import main
main(sys.argv[1:])
print("went on")
"""


def said_by_wrap(*words: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Of `autoddp wrap WORDS`, which starts no command: a fork does."""
    return forks.run(["-m", "autoddp", "wrap", *words], cwd=cwd, env=environment())


def launched(command: Any, folder: Path, words: Any, **env: str) -> Launch:
    """A finished launch, with the programs of this environment along PATH."""
    return start(command, folder, words, {"PATH": f"{BIN}:{os.environ['PATH']}", **env}).wait()


def wrapped(folder: Path, *command: str, options: tuple[str, ...] = WRAP, **env: str) -> Launch:
    """A finished launch of `autoddp wrap … COMMAND`."""
    return launched(options, folder, command, **env)


def program(folder: Path, code: str) -> list[str]:
    """The command that runs this code."""
    (folder / "program.py").write_text(code.replace("{port}", free_port()))
    return [sys.executable, str(folder / "program.py")]


def becoming_torchrun(folder: Path, before: str) -> list[str]:
    """The command that runs this code, and becomes torchrun."""
    becomes = 'os.execve(shutil.which("torchrun"), ["torchrun", *sys.argv[1:]], os.environ)'
    return program(folder, f"import os, shutil, sys\n{before}\n{becomes}\n")


@pytest.mark.parametrize(
    "command",
    [
        whole(["torchrun", *TWO, REPORTER, "--trials", "7"]),  # the word's way is that of a job that fails, below
        [sys.executable, "-u", "-m", "torch.distributed.run", *TWO, REPORTER, "--trials", "7"],
        # A shell starts torchrun in `test_the_lines_for_a_shell_do_the_same`.
        whole(["bash", "-c", f'{sys.executable} -m torch.distributed.run "$@"', "--", *TWO, REPORTER, "--trials", "7"]),
        whole(["run", REPORTER, "--trials", "7"]),  # its way is that of several jobs, below
        ["main", *TWO, REPORTER, "--trials", "7"],
    ],
    ids=["torchrun", "module", "bash", "run", "main"],
)
def test_the_job_is_torchruns(command: list[str], tmp_path: Path) -> None:
    """The script's words are its own, and its processes find nothing of autoddp in their environment."""
    if code := {"run": CALLS_RUN, "main": CALLS_MAIN}.get(command[0]):
        command = [*program(tmp_path, code), *command[1:]]
    launch = wrapped(tmp_path / "job", *command)
    assert launch.returncode == 0, launch.stderr
    assert launch.stderr.count(SAID) == 1
    assert "is taken by autoddp; for" not in launch.stderr
    reports = launch.reports()
    assert list(reports) == ["report0.0.json", "report1.0.json"]
    for report in reports.values():
        assert report["argv"][1:] == ["--trials", "7"]
        assert not [name for name in report["environ"] if name.startswith("AUTODDP") and name != "AUTODDP_VERBOSE"]
        assert report["environ"]["PYTHONPATH"] == environment()["PYTHONPATH"]
    assert ("went on" in launch.stdout) is bool(code)


def test_a_program_may_start_several_jobs(tmp_path: Path) -> None:
    """Two by torchrun's function, and one by its command."""
    command = [*program(tmp_path, CALLS_RUN), REPORTER, "--trials", "7"]
    launch = wrapped(tmp_path / "job", *command, AGAIN="1")
    assert launch.returncode == 0, launch.stderr
    assert launch.stderr.count(SAID) == 3
    assert "went on" in launch.stdout
    reports = launch.reports()  # of the last job, which has one rank, and of the second one
    words = [reports[f"report{rank}.0.json"]["argv"][1:] for rank in (0, 1)]
    assert words == [["--trials", "7"], ["--trials", "7", "again"]]
    for report in reports.values():
        assert not [name for name in report["environ"] if name.startswith("AUTODDP") and name != "AUTODDP_VERBOSE"]


def test_environment_and_exit_code_are_torchruns(tmp_path: Path) -> None:
    """Side by side with torchrun itself: a job that fails."""
    words = [*TWO, REPORTER, "--exit", "7"]
    plain = start(TORCHRUN, tmp_path / "torchrun", words).wait()
    launch = wrapped(tmp_path / "wrapped", "torchrun", *words)
    assert launch.returncode == plain.returncode
    ours, theirs = launch.reports(), plain.reports()
    assert ours.keys() == theirs.keys()
    for name, report in theirs.items():
        assert ours[name]["environ"].keys() - {"PATH"} == report["environ"].keys() - {"PATH"}
        assert ours[name]["argv"] == report["argv"]


def test_accelerate_launch_is_tuned(tmp_path: Path) -> None:
    """The real `accelerate launch`: it fills in torchrun's options and calls torchrun's `run` in its own process."""
    accelerate = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"]
    more = ["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "{port}"]
    options = (*AUTODDP, "wrap", "--trials", "1", "--allow", "exact", "--diagnose-budget", "0")
    job = [*accelerate, *more, str(SCRIPTS / "plain.py")]
    launch = wrapped(tmp_path / "job", *job, options=options, TUNED_TIMES_LONGER="20")
    assert launch.returncode == 0, launch.stderr
    assert launch.stderr.count(SAID) == 1
    assert "trial 1/1" in launch.stderr, launch.stderr
    assert list((tmp_path / "job").glob("*.autoddp.toml"))


@pytest.mark.whole  # accelerate's launch is tuned above, and a diagnosis in torchrun's place fails below
def test_accelerate_launch_is_diagnosed(tmp_path: Path) -> None:
    """stdout has the document and what accelerate's own process prints, and no job is launched afterwards."""
    accelerate = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"]
    more = ["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "{port}"]
    options = (*AUTODDP, "wrap", "diagnose", "--diagnose-budget", "4s", "--json")
    launch = wrapped(tmp_path / "job", *accelerate, *more, str(SCRIPTS / "slow_loader.py"), options=options)
    assert launch.returncode == 0, launch.stderr
    assert launch.stderr.count(SAID) == 1
    (document,) = (json.loads(line) for line in launch.stdout.splitlines() if line.startswith("{"))
    assert document["findings"][0]["cause"] == "data_loader"
    assert not launch.reports()


def test_a_diagnosis_in_torchruns_place_fails_as_one(tmp_path: Path) -> None:
    (tmp_path / "fails.py").write_text("raise RuntimeError('planted')\n")
    command = ["torchrun", *TWO, str(tmp_path / "fails.py")]
    launch = wrapped(tmp_path / "job", *command, options=(*AUTODDP, "wrap", "diagnose"))
    assert launch.returncode == 1
    assert "nothing was diagnosed: " in launch.stderr
    assert "Traceback" not in launch.stderr


def test_a_command_without_torchrun_runs_as_it_is(tmp_path: Path) -> None:
    command = program(tmp_path, "import torch, sys; print('hello'); sys.exit(5)")
    launch = wrapped(tmp_path / "job", *command)
    assert (launch.returncode, launch.stdout, launch.stderr) == (5, "hello\n", "")


def test_autoddp_within_it_keeps_its_own_options(tmp_path: Path) -> None:
    launch = wrapped(tmp_path / "job", *AUTODDP, "--trials", "3", "--dry-run", *TWO, str(SCRIPTS / "plain.py"))
    assert launch.returncode == 0, launch.stderr
    assert "would tune: 3 trials" in launch.stdout
    assert SAID not in launch.stderr


def test_the_lines_for_a_shell_do_the_same(tmp_path: Path) -> None:
    lines = f'eval "$({sys.executable} -m autoddp wrap --trials 0 --output "two words")"; exec torchrun "$@"'
    launch = launched(("bash", "-c", lines, "--"), tmp_path / "job", [*TWO, REPORTER])
    assert launch.returncode == 0, launch.stderr
    assert launch.stderr.count(SAID) == 1
    assert len(launch.reports()) == 2


def test_a_python_without_autoddps_dependencies_keeps_its_torchrun(tmp_path: Path) -> None:
    """A broken installation is a warning, and the job runs."""
    for name in ("msgspec", "wrapt"):
        (tmp_path / "broken" / name).mkdir(parents=True)
        (tmp_path / "broken" / name / "__init__.py").write_text("raise ImportError('not here')")
    command = becoming_torchrun(tmp_path, f"os.environ['PYTHONPATH'] += {':' + str(tmp_path / 'broken')!r}")
    launch = wrapped(tmp_path / "job", *command, *TWO, REPORTER)
    assert launch.returncode == 0, launch.stderr
    assert "torchrun stays torchrun" in launch.stderr
    assert SAID not in launch.stderr


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--trails", "3", "x"], "--trails: no option of autoddp (did you mean '--trials'?); torchrun's stand in"),
        (["--trials", "x", "y"], "must be a whole number of 0 or more"),
        (["--trials"], "needs a value"),
        whole(["--nproc-per-node", "2", "x"], "--nproc-per-node: no option of autoddp"),
        (["no-such-command"], "no such command"),
        whole(["--json", "x"], "--json: no option of autoddp"),
        whole(["diagnose", "--jsno", "x"], "--jsno: no option of autoddp"),
        (["diagnose", "--json", "no-such-command", "--json"], "wrap no-such-command: no such command"),
        (["--", "diagnose"], "wrap diagnose: no such command"),
        whole(["./folder"], "no such command"),
        (["train.py"], "wrap train.py: a script, and wrap takes a command that starts torchrun itself"),
        whole(["./run.sh"], "wrap ./run.sh: may not be executed: chmod +x ./run.sh"),
        whole(["run.sh"], "wrap run.sh: not along PATH, where commands are looked for: write ./run.sh"),
    ],
)
def test_errors_are_one_line(words: list[str], says: str, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "train.py").touch()
    (tmp_path / "run.sh").touch()
    done = said_by_wrap(*words, cwd=tmp_path)
    assert done.returncode == 2
    assert says in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("options", "says"), [('--output "x', "No closing quotation"), whole("--trails 3", "--trails")]
)
def test_a_variable_set_by_hand_may_be_wrong(options: str, says: str, tmp_path: Path) -> None:
    command = becoming_torchrun(tmp_path, f"os.environ['AUTODDP_WRAP'] = {options!r}")
    launch = wrapped(tmp_path / "job", *command, *TWO, REPORTER)
    assert launch.returncode == 2
    assert says in launch.stderr
    assert "Traceback" not in launch.stderr


def test_the_help_fits_a_terminal() -> None:
    assert max(map(len, _HELP.splitlines())) <= 80


def test_what_stands_before_the_command() -> None:
    assert leading_own(["--trials", "3", "--tune-only", "accelerate", "--trials", "4"]) == (
        ["--trials", "3", "--tune-only"],
        ["accelerate", "--trials", "4"],
    )
    assert leading_own(["--allow=near", "--", "--odd"]) == (["--allow=near"], ["--odd"])
    assert leading_own([]) == ([], [])


def test_no_word_of_torchrun_is_taken() -> None:
    options = parse_apart(["--trials", "3"], ["--nnodes", "1", "train.py", "--trials", "9", "--recipe", "x.toml"])
    assert options.study.trials == 3
    assert options.recipe is None
    assert options.torchrun.training_script_args == ["--trials", "9", "--recipe", "x.toml"]
    assert not options.ranks_given


def test_the_help_lists_autoddps_options() -> None:
    done = said_by_wrap("--help")
    assert done.returncode == 0
    assert "--trials N" in done.stdout
    assert "--nproc-per-node" not in done.stdout
    assert json.dumps(os.fspath(ROOT)) not in done.stdout
