"""Bad input, typed for real: one line on stderr, exit code 2, nothing started, nothing written.

Every case is a process of its own, a fork of one that has imported torch and autoddp. Under --whole
`test_all_entries_speak_alike` starts from nothing.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import forks
import pytest
from launchers import ROOT, environment, run_python, whole
from torch import __version__ as torch_build

from autoddp.knobs import Configuration
from autoddp.recipe import Evidence, Fits, MadeBy, Recipe, dump
from autoddp.version import __version__

torch_version = str(torch_build).partition("+")[0]
RECIPE = dump(
    Recipe(
        made_by=MadeBy("0.1.0", "2.13.0", "3.11.7", "2025-11-20T21:00:00Z"),
        fits=Fits(8, 2, "nccl", ("NVIDIA H100",), "2.13.0", 102228128, "0123456789abcdef"),
        configuration=Configuration({"bucket_cap_mb": 50}),
        evidence=Evidence(31.21, 0.384, 20, 6, 1234, "the exact rung wins"),
    )
)
HERE = dump(
    Recipe(
        made_by=MadeBy("0.1.0", torch_version, "3.11.7", "2025-11-20T21:00:00Z"),
        fits=Fits(2, 1, "gloo", ("cpu",), torch_version, 102228128, "0123456789abcdef"),
        configuration=Configuration({"bucket_cap_mb": 50}),
        evidence=Evidence(31.21, 0.384, 20, 6, 1234, "the exact rung wins"),
    )
)
FILES = {
    "train.py": "raise SystemExit('this must not run')\n",
    "train.sh": "#!/bin/sh\n",
    "run.sh": "#!/bin/sh\n",
    "train.ipynb": "{}",
    "a_file": "",
    "unfit.toml": RECIPE,
    "newer.toml": RECIPE.replace("schema = 1", "schema = 2"),
    "not.toml": "this is no TOML\n",
    "key.toml": RECIPE.replace("bucket_cap_mb = 50", "buket_cap_mb = 50"),
    "type.toml": RECIPE.replace("bucket_cap_mb = 50", 'bucket_cap_mb = "50"'),
    "range.toml": RECIPE.replace("bucket_cap_mb = 50", "bucket_cap_mb = 5000000"),
    "threads.toml": RECIPE + '\n[env]\nOMP_NUM_THREADS = "-5"\n',
    "interface.toml": HERE + '\n[env]\nGLOO_SOCKET_IFNAME = "nope0"\n',
    "code.toml": RECIPE + '\n[env]\nLD_PRELOAD = "/tmp/x.so"\n',
}
MIB = "must be a number from 0.5 to 100000 MiB"
NOWHERE = "link.toml"
LONG = "long" * 100
CASES = {
    # what is typed, what the line says besides the prefix
    "unknown option": ("--trails 20 train.py", "unknown option --trails (did you mean '--trials'?)"),
    "trials no number": ("--trials x train.py", "--trials 'x': must be a whole number of 0 or more, e.g. --trials 20"),
    "trials negative": ("--trials -3 train.py", "--trials '-3': must be a whole number of 0 or more"),
    "missing value": ("--trials -- train.py", "--trials: needs a value: a whole number of 0 or more"),
    "missing value of torchrun's": ("--nnodes", "--nnodes: expected one argument"),
    "no script": ("--trials 3", "no script given: autoddp [options] train.py [its arguments]"),
    "misspelt command": ("diagnos", "script not found: diagnos (did you mean 'diagnose'?) (looked in {cwd})"),
    "a program in place of the script": (
        "sh train.py",
        "sh is a program, and no script in {cwd}: leave it out, or write autoddp wrap sh … if it starts torchrun, or",
    ),
    "script not found": ("nowhere.py", "script not found: nowhere.py (looked in {cwd}); check the path, or -m"),
    "long name": (f"{LONG}.py", f"script not found: {LONG}.py (looked in {{cwd}})"),
    "recipe with a long name": (f"--recipe {LONG}.toml train.py", f"{LONG}.toml: cannot be read: File name too long"),
    "recipe to a long name": (
        f"--nproc-per-node 2 --trials 2 --recipe {LONG}.toml train.py",
        f"--recipe {LONG}.toml: cannot be read (File name too long); name another file",
    ),
    "probe of a long name": (f"probe --sysfs {LONG}", f"probe: --sysfs {LONG}: not a folder"),
    "folder": (".", ". is a folder without a __main__.py: name the script in it"),
    "escapes in a name": ("\x1b[31mred.py", "script not found: \\x1b[31mred.py (looked in {cwd})"),
    "program not found": ("--no-python nowhere", "program not found: nowhere (looked in {cwd})"),
    "program that may not run": (
        "--no-python ./train.sh",
        "./train.sh may not be executed, and --no-python starts it as a program: chmod +x ./train.sh",
    ),
    "program of the current folder": (
        "--no-python run.sh",
        "run.sh is not along PATH, and --no-python looks nowhere else for a bare name: write ./run.sh",
    ),
    "program that is a folder": ("--no-python /tmp", "/tmp is a folder, and --no-python starts a program"),
    "program and module": ("--no-python -m train", "--no-python starts a program, and --module a module of Python"),
    "notebook": ("train.ipynb", "train.ipynb is a notebook, which Python cannot run: jupyter nbconvert --to script"),
    "rendezvous of an unknown kind": (
        "--nproc-per-node 2 --rdzv-backend bogus train.py",
        "no job can start with --rdzv-backend bogus --rdzv-endpoint none: there is no rendezvous backend of that name",
    ),
    "rendezvous without its library": (
        "--nproc-per-node 2 --rdzv-backend etcd --rdzv-endpoint host0:2379 train.py",
        "its module etcd is not installed here: pip install python-etcd, or --rdzv-backend c10d",
    ),
    "standalone on two hosts": ("--standalone --nnodes 2 train.py", "--standalone is for a job on one host"),
    "ambiguous word of the script": ("train.py --r=16", "if it is the script's, write -- before the script: autoddp"),
    "redirects of another kind": ("--nproc-per-node 2 --redirects 5 train.py", "--redirects 5: must be 0 (nothing)"),
    "tee of another kind": ("--nproc-per-node 2 -t 0:7 train.py", "--tee 0:7: must be 0 (nothing), 1 (stdout)"),
    "filter of ranks": ("--local-ranks-filter all train.py", "--local-ranks-filter all: must be numbers of"),
    "restarts negative": ("--max-restarts -1 train.py", "--max-restarts -1: must be a whole number of 0 or more"),
    "monitor interval of nothing": ("--monitor-interval 0 train.py", "--monitor-interval 0.0: must be a number of"),
    "monitor interval that is none": ("--monitor-interval nan train.py", "--monitor-interval nan: must be a number of"),
    "handler of events": ("--event-log-handler x train.py", "--event-log-handler x: torch has none of this name"),
    "specs of logs": ("--logs-specs nope train.py", "--logs-specs nope: must be one of default"),
    "bench with redirects of another kind": ("bench --nproc-per-node 2 --redirects 5", "--redirects 5: must be 0 (no"),
    "bench with a log folder that is a file": ("bench --nproc-per-node 2 --log-dir a_file", "a_file is no folder that"),
    "log folder that is a file": ("--log-dir a_file train.py", "--log-dir a_file: a_file is no folder that takes"),
    "log folder below a file": ("--log-dir a_file/x train.py", "--log-dir a_file/x: a_file is no folder that takes"),
    "rendezvous setting without a value": (
        "--nproc-per-node 2 --rdzv-conf timeout train.py",
        "--rdzv-endpoint localhost:0 --rdzv-conf timeout: The rendezvous configuration option 'timeout' must have",
    ),
    "another launcher's": ("--use-env train.py", "--use-env: an option of torch.distributed.launch."),
    "recipe not found": ("--recipe unfot.toml train.py", "unfot.toml: no such file; autoddp SCRIPT --trials 20 writes"),
    "recipe not TOML": ("--recipe not.toml train.py", "not.toml: not TOML: "),
    "recipe newer": ("--recipe newer.toml train.py", "newer.toml: schema = 2: written by a newer autoddp; upgrade it"),
    "recipe key": ("--recipe key.toml train.py", "unknown key (did you mean 'bucket_cap_mb'?)"),
    "recipe type": ("--recipe type.toml train.py", f'type.toml: configuration.bucket_cap_mb = "50": {MIB}'),
    "recipe range": ("--recipe range.toml train.py", f"range.toml: configuration.bucket_cap_mb = 5000000: {MIB}"),
    "recipe variable": ("--recipe code.toml train.py", "code.toml: env"),
    "recipe number": ("--recipe threads.toml train.py", 'threads.toml: env.OMP_NUM_THREADS = "-5": must be a whole'),
    "recipe interface": (
        "--nproc-per-node 2 --recipe interface.toml train.py",
        "interface.toml: env.GLOO_SOCKET_IFNAME = 'nope0': no interface nope0 here: correct [env], tune again",
    ),
    "recipe device": ("--recipe /dev/zero train.py", "/dev/zero: no regular file, so not a recipe"),
    "recipe to a device": (
        "--nproc-per-node 2 --trials 2 --recipe /dev/null train.py",
        "/dev/null: no regular file, so no recipe is written there; name another file",
    ),
    "recipe over another file": (
        "--nproc-per-node 2 --trials 2 --recipe not.toml train.py",
        "not.toml: this file is not a recipe, so it is not replaced; name another file",
    ),
    "recipe to a folder": ("--nproc-per-node 2 --trials 2 --recipe /tmp train.py", "/tmp: no regular file"),
    "recipe by a link that leads nowhere": (
        f"--nproc-per-node 2 --trials 2 --recipe {NOWHERE} train.py",
        f"--recipe {NOWHERE}: there is no folder {{cwd}}/nowhere; make it, or name another file",
    ),
    "no ranks": ("--nproc-per-node 0 train.py", "--nproc-per-node 0: must be 1 or more, e.g. --nproc-per-node 2"),
    "no ranks as torchrun": ("--trials 0 --nproc-per-node -2 train.py", "--nproc-per-node -2: must be 1 or more"),
    "no nodes": ("--nnodes 0 train.py", "--nnodes 0: must be 1 or more, or a range such as 1:4"),
    "ranks in words": (
        "--nproc-per-node two train.py",
        "--nproc-per-node two: Unsupported nproc_per_node value: two; give a number of ranks, or auto",
    ),
    "ranks of a device that is not here": (
        "--nproc-per-node xpu train.py",
        "--nproc-per-node xpu: ",
    ),
    "nodes in words": ("--nnodes two train.py", "--nnodes two: must be 1 or more, or a range such as 1:4"),
    "range of three": ("--nnodes 1:2:3 train.py", "--nnodes 1:2:3: must be 1 or more, or a range such as 1:4"),
    "range of nodes": ("--nnodes 3:2 train.py", "--nnodes 3:2: must be 1 or more, or a range such as 1:4"),
    "node too high": ("--nnodes 2 --node-rank 2 train.py", "--node-rank 2: must be from 0 to 1 with --nnodes 2"),
    "seed too large": (f"--seed {'9' * 30} train.py", "must be a whole number from 0 to 4294967295, e.g. --seed 0"),
    "steps too many": (f"--job-steps {'9' * 30} train.py", "must be a whole number of 1 or more, e.g. --job-steps"),
    "tune only, no trials": ("--tune-only --trials 0 train.py", "--tune-only --trials 0: nothing would be done"),
    "recipe unfit": (
        "--nproc-per-node 2 --recipe unfit.toml train.py",
        "unfit.toml: made for another job: world size 8 in the recipe, 2 here; nodes 2 in the recipe, 1 here",
    ),
    "output unwritable": (
        "--nproc-per-node 2 --output a_file/below train.py",
        "--output a_file/below: cannot be written (Not a directory); name a folder that can",
    ),
    "recipe command": ("recipe check not.toml", "not.toml: not TOML: "),
    "recipe command's word": ("recipe chekc not.toml", "recipe: "),
    "bench into no folder": ("bench --nproc-per-node 2 --output=", "bench: --output '': must be a folder"),
    "report without a run": ("report", "report: no run in .autoddp has a summary.json; name a run's folder, or tune"),
    "report of another file": ("report not.toml", "report: not.toml: not the summary of a run: Expecting value"),
}


def make(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    for name, text in FILES.items():
        (folder / name).write_text(text)
    (folder / NOWHERE).symlink_to("nowhere/recipe.toml")
    (folder / "run.sh").chmod(0o755)
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make(tmp_path)


TYPES_ALL = """
import json, os, sys
from autoddp.cli import main

for folder, words in json.loads(sys.argv[1]).items():
    child = os.fork()
    if child:
        with open(f"{folder}.code", "w") as code:
            print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), end="", file=code)
        continue
    os.chdir(folder)
    for number, what in ((1, "out"), (2, "err")):
        os.dup2(os.open(f"{folder}.{what}", os.O_WRONLY | os.O_CREAT), number)
    sys.argv[1:] = words
    try:
        main.main()
    except SystemExit as ended:
        sys.stdout.flush()
        os._exit(ended.code)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    os._exit(70)
"""


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which every case has run, each in a folder of its own."""
    parent = tmp_path_factory.mktemp("cases")
    typed = {str(make(parent / name)): words.split() for name, (words, _) in CASES.items()}
    done = forks.run(["-c", TYPES_ALL, json.dumps(typed)], cwd=parent, env=environment())
    assert done.returncode == 0, done.stderr
    return parent


def typed(folder: Path, words: str) -> tuple[int, str, str]:
    done = forks.run(["-m", "autoddp", *words.split()], cwd=folder, env=environment())
    return done.returncode, done.stdout, done.stderr


def everything_below(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() if path.is_file() else "" for path in folder.rglob("*")}


@pytest.mark.parametrize("name", CASES)
def test_one_line_and_nothing_else(cases: Path, name: str) -> None:
    code, out, err = ((cases / f"{name}.{what}").read_text() for what in ("code", "out", "err"))
    assert (code, out) == ("2", "")
    assert err.startswith("autoddp: error: ")
    assert CASES[name][1].format(cwd=cases / name) in err
    assert err.endswith("\n")
    assert err.count("\n") == 1
    assert everything_below(cases / name) == {**FILES, NOWHERE: ""}


@pytest.mark.parametrize("words", ["train.py", "/dev/null", "-m train"])
def test_a_current_folder_that_was_removed(tmp_path: Path, words: str) -> None:
    line = f"cd {tmp_path} && mkdir gone && cd gone && rmdir ../gone && exec {sys.executable} {ROOT}/launch.py {words}"
    done = subprocess.run(["bash", "-c", line], env=environment(), capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "autoddp: error: the current folder is not there any more (No such file or directory): cd to it again\n"
    )


VANISHES = """
import os, sys
from autoddp.cli import main

load = main.load_torchrun
main.load_torchrun = lambda: (load(), os.rmdir(os.getcwd()))
main.main()
"""


@pytest.mark.parametrize("words", ["train.py", __file__, "-m train", "--no-python nowhere"])
def test_a_current_folder_that_is_removed_while_torch_is_imported(tmp_path: Path, words: str) -> None:
    done = forks.run(["-c", VANISHES, "--nproc-per-node", "2", *words.split()], cwd=tmp_path, env=environment())
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "autoddp: error: the current folder is not there any more (No such file or directory): cd to it again\n"
    )


HAS_NO_THREADS = """
import threading
from autoddp.cli import main

def start(thread):
    if thread.name.startswith("autoddp-"):
        raise RuntimeError("can't start new thread")
    before(thread)

before, threading.Thread.start = threading.Thread.start, start
main.main()
"""


def test_a_limit_on_threads_costs_tuning_and_not_the_job(tmp_path: Path) -> None:
    """Address space counts, too: `ulimit -v` with room for torchrun's threads and none for ours."""
    (tmp_path / "train.py").write_text("print('trained')\n")
    done = forks.run(["-c", HAS_NO_THREADS, "train.py"], cwd=tmp_path, env=environment())
    assert (done.returncode, done.stdout) == (0, "trained\n"), done.stderr
    assert "not tuned, launching as written: tuning itself failed: RuntimeError(" in done.stderr
    assert "Traceback" not in done.stderr


VANISHES_IN_TUNING = """
import os, shutil, sys
from autoddp.attempts import tune
from autoddp.attempts.starts import objective
from autoddp.cli import main

def run(tuning):
    here = os.getcwd()
    os.rename(here, here + ".old")
    shutil.rmtree(here + ".old")
    if sys.argv.pop() == "again":
        os.mkdir(here)
    return tune.Tuned(why="it is not what is tested here")

objective.ObjectiveTuning.run = tune.Tuning.run = run
main.main()
"""


@pytest.mark.parametrize("then", ["again", "never"])
def test_a_current_folder_that_is_removed_in_tuning(tmp_path: Path, then: str) -> None:
    """The job starts in the folder that is at its path by then; without one it starts as torchrun would there."""
    script, folder = tmp_path / "train.py", tmp_path / "here"
    script.write_text("import os\ntry:\n    print(os.getcwd())\nexcept OSError:\n    print('nowhere')\n")
    folder.mkdir()
    words = ["-c", VANISHES_IN_TUNING, "--nproc-per-node", "1", "--objective", "steps", str(script), then]
    done = forks.run(words, cwd=folder, env=environment())
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{folder if then == 'again' else 'nowhere'}\n"
    assert ("made again: the job starts in the new one" in done.stderr) == (then == "again")
    assert ("torch cannot be imported there" in done.stderr) == (then == "never")


@pytest.mark.parametrize("words", [whole("--trails 20 train.py"), "--recipe key.toml train.py"])
def test_all_entries_speak_alike(folder: Path, words: str) -> None:
    installed = (
        "-c",
        f"import sys; sys.argv = ['autoddp', *{words.split()}]; from autoddp.cli.main import main; main()",
    )
    answers = set()
    for command in (("-m", "autoddp"), (f"{ROOT}/launch.py",), installed):
        done = run_python([*command, *words.split()], cwd=folder, env=environment())
        answers.add((done.returncode, done.stdout, done.stderr))
    assert answers == {typed(folder, words)}
    assert answers.pop()[0] == 2


def test_a_project_with_a_file_named_as_a_module_of_pythons(folder: Path) -> None:
    """`python -m` has Python look in the current folder first."""
    (folder / "statistics.py").write_text("print('of the project')\n")
    command = [sys.executable, "-m", "autoddp", "--version"]
    done = subprocess.run(command, cwd=folder, env=environment(), capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"autoddp {__version__}\n", "")


def test_a_world_of_one_cannot_be_tuned(folder: Path) -> None:
    code, out, err = typed(folder, "--nproc-per-node 1 --tune-only train.py")
    assert (code, out) == (1, "")
    assert err == (
        "autoddp: error: with one rank there is nothing to tune; start two ranks or more, e.g. --nproc-per-node 2\n"
    )


def test_a_folder_of_a_commands_name_is_in_nobodys_way(folder: Path) -> None:
    """Many projects have a folder called report or bench, in which Python finds nothing to run."""
    (folder / "report").mkdir()
    code, out, err = typed(folder, "report")
    assert (code, out) == (2, "")
    assert "report: no run in .autoddp has a summary.json" in err
    (folder / "report" / "__main__.py").write_text("import sys\nprint(sys.argv[1:])\n")
    code, out, _ = typed(folder, "--trials 0 report mine")
    assert (code, out) == (0, "['mine']\n")
    code, out, _ = typed(folder, "report --trials 0 mine")
    assert (code, out) == (0, "['mine']\n")


def test_a_file_of_a_commands_name_is_a_script(folder: Path) -> None:
    (folder / "recipe").write_text("import sys\nprint(sys.argv[1:])\n")
    assert "unknown option --trails" in typed(folder, "--trails 3 recipe")[2]
    code, out, _ = typed(folder, "recipe --trials 0 show me")
    assert (code, out) == (0, "['show', 'me']\n")


LOSES = [
    ("{} >/dev/full", 1, "autoddp: error: standard output cannot be written (No space left on device)\n"),
    ("{{ sleep 0.5; {}; }} | true; exit ${{PIPESTATUS[0]}}", 141, ""),  # its reader has ended by then
    ("{} >&-", 0, ""),
]
PRINTS = [
    *("recipe show --json good.toml", "--version", "wrap", "probe", "--trials 0 --dry-run good.toml", "--help"),
    *("recipe show --help", "probe --json", "recipe --help", "wrap --help", "diagnose --help", "bench --help"),
]
"""`make test` has the first with each loss, and the next three with a full disk."""


@pytest.mark.parametrize(
    ("command", "line", "code", "said"),
    [
        (name, *lost) if name == PRINTS[0] or (name in PRINTS[:4] and lost is LOSES[0]) else whole(name, *lost)
        for name in PRINTS
        for lost in LOSES
    ],
)
def test_output_that_is_lost_is_one_line_or_none(tmp_path: Path, command: str, line: str, code: int, said: str) -> None:
    (tmp_path / "good.toml").write_text(RECIPE)
    words = ["bash", "-c", line.format(f"{sys.executable} -m autoddp {command}")]
    done = subprocess.run(words, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (code, said)
