"""The way into a script's process leaves no trace: environment, import path, sitecustomize, errors are as without it.

Each test runs the same program twice, as torchrun would start it and with an order in the environment. Where torch is
imported, that costs a start three CPU seconds: such a program is a rank with torch in memory (see started_forks.py), or
finds a torch that is empty. Under --whole all start from nothing, with the real one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import forks
import pytest
import torch
from launchers import FROM_NOTHING, environment, whole

from autoddp.knobs import Configuration
from autoddp.wire import WorkerConfig
from autoddp.wire.worker_config import APPLY

PROGRAM = """
import json, os, sys
site = sys.modules.get("sitecustomize")
print(json.dumps({
    "environment": dict(os.environ),
    "path": sys.path,
    "arguments": sys.argv,
    "sitecustomize": getattr(site, "__file__", None) if hasattr(site, "marks") else None,
    "marks": getattr(site, "marks", None),
    "of a child": os.popen("env | sort | grep -v ^_=").read(),
    "torch": "torch" in sys.modules,
}))
"""
ORDERS = {
    "tuning": WorkerConfig(socket="/nowhere/s", scratch="/nowhere/scratch"),
    "recipe": WorkerConfig(configuration=Configuration({"bucket_cap_mb": 50.0}), parameters_digest="0123456789abcdef"),
}
SITES = {
    "none": None,
    "counting": "import os, sys\nsys.marks = marks = [*getattr(sys, 'marks', []), os.environ.get('PYTHONPATH')]\n",
    "broken": "raise ValueError('broken by its owner')\n",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "script").mkdir()
    (tmp_path / "script" / "train.py").write_text(PROGRAM)
    (tmp_path / "user").mkdir()
    return tmp_path


def bare(folder: Path, pythonpath: str | None) -> dict[str, str]:
    env = environment(RANK="0", LOCAL_RANK="0")
    del env["PYTHONPATH"]
    return env if pythonpath is None else {**env, "PYTHONPATH": pythonpath}


def run(folder: Path, env: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-u", *(words or ("script/train.py", "--lr", "0.1"))],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
    )


STARTS = "import json, subprocess, sys; sys.exit(subprocess.run(sys.argv[2:], env=json.loads(sys.argv[1])).returncode)"


def run_as_rank(folder: Path, env: dict[str, str], script: str) -> subprocess.CompletedProcess[str]:
    """As `run`, of a script that imports torch: a launcher starts it which has torch in memory."""
    if FROM_NOTHING in os.environ:
        return run(folder, env, script)
    return forks.run(["-c", STARTS, json.dumps(env), sys.executable, "-u", script], cwd=folder, env=environment())


def empty_torch(folder: Path) -> str:
    """A folder for sys.path, with a torch that was built without `distributed`; with none under --whole."""
    place = folder / "empty"
    (place / "torch").mkdir(parents=True)
    if FROM_NOTHING in os.environ:
        return str(folder / "none")
    (place / "torch" / "__init__.py").write_text("class distributed:\n    is_available = staticmethod(bool)\n")
    return str(place)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("site", SITES)
def test_a_script_sees_what_it_would_see(folder: Path, order: str, site: str) -> None:
    if SITES[site]:
        (folder / "user" / "sitecustomize.py").write_text(SITES[site])
    env = bare(folder, str(folder / "user"))
    without, with_order = run(folder, env), run(folder, {**env, **ORDERS[order].environment(env)})
    assert without.returncode == with_order.returncode == 0
    assert json.loads(with_order.stdout) == json.loads(without.stdout)
    assert with_order.stderr == without.stderr
    assert json.loads(without.stdout)["torch"] is False
    if site == "counting":
        assert json.loads(with_order.stdout)["marks"] == [str(folder / "user")]


WAYS = [["-c", PROGRAM], ["-m", "train"], ["script/train.py"]]
EACH = [(words, pythonpath) for words in WAYS for pythonpath in (None, "", "a:/b::c")]


@pytest.mark.parametrize(
    ("words", "pythonpath"),
    # Each of the one with some of the other; a script's own way has all.
    [pair if number % 4 == 0 or number >= 6 else whole(*pair) for number, pair in enumerate(EACH)],
    ids=lambda one: one[0] if isinstance(one, list) else repr(one),
)
def test_whatever_pythonpath_was(folder: Path, pythonpath: str | None, words: list[str]) -> None:
    env = bare(folder, pythonpath)
    (folder / "train.py").write_text(PROGRAM)
    without, with_order = (run(folder, {**env, **more}, *words) for more in ({}, ORDERS["recipe"].environment(env)))
    assert json.loads(with_order.stdout) == json.loads(without.stdout)
    assert (with_order.stderr, with_order.returncode) == (without.stderr, 0)


@pytest.mark.parametrize("pythonpath", [None, "", "a:/b"])
def test_what_a_program_has_added_to_pythonpath_stays(folder: Path, pythonpath: str | None) -> None:
    """As a shell script does that --no-python starts, and that starts Python."""
    env = bare(folder, pythonpath)
    words = ["bash", "-c", 'PYTHONPATH=/added${PYTHONPATH:+:$PYTHONPATH} exec "$0" -c "$1"', sys.executable, PROGRAM]
    without, with_order = (
        json.loads(subprocess.run(words, cwd=folder, env={**env, **more}, capture_output=True, text=True).stdout)
        for more in ({}, ORDERS["recipe"].environment(env))
    )
    assert with_order["environment"]["PYTHONPATH"] == without["environment"]["PYTHONPATH"]
    assert with_order["path"] == without["path"]


@pytest.mark.parametrize("order", ORDERS)
def test_a_script_that_fails_fails_alike(folder: Path, order: str) -> None:
    env = bare(folder, None)
    program = ("-c", "def main():\n    raise KeyError('x')\nmain()")
    without, with_order = run(folder, env, *program), run(folder, {**env, **ORDERS[order].environment(env)}, *program)
    assert (with_order.returncode, with_order.stdout, with_order.stderr) == (1, "", without.stderr)
    assert "KeyError" in without.stderr


@pytest.mark.parametrize("text", ["no JSON", '{"surplus": 1}'])
def test_an_order_that_cannot_be_read_stops_nothing(folder: Path, text: str) -> None:
    env = bare(folder, None)
    env |= {**ORDERS["recipe"].environment(env), APPLY: text}
    (folder / "train.py").write_text("import torch; print('trained')\n")
    found = run_as_rank(folder, env, "train.py")
    assert (found.returncode, found.stdout) == (0, "trained\n")
    assert found.stderr.startswith("autoddp: warning: the script runs as written, the worker could not start: ")
    assert found.stderr.count("\n") == 1


SAYS_OTHERWISE = """
import os
os.environ["LOCAL_RANK"] = "0"
del os.environ["WORLD_SIZE"]
import torch
from autoddp.wire.started_with import started_with
print(started_with("LOCAL_RANK"), started_with("WORLD_SIZE"))
"""


@pytest.mark.parametrize("order", ORDERS)
def test_what_torchrun_told_is_known_though_the_script_says_otherwise_before_it_imports_torch(
    folder: Path, order: str
) -> None:
    env = bare(folder, None) | {"LOCAL_RANK": "1", "WORLD_SIZE": "2"}
    (folder / "train.py").write_text(SAYS_OTHERWISE)
    found = run_as_rank(folder, {**env, **ORDERS[order].environment(env)}, "train.py")
    assert (found.returncode, found.stdout) == (0, "1 2\n"), found.stderr


SET_LATER = """
import os
os.environ.update(RANK="1", LOCAL_RANK="1")
import torch
from autoddp.wire.started_with import local_rank, started_with
print(started_with("RANK"), local_rank(), started_with("WORLD_SIZE", "none"))
"""


@pytest.mark.parametrize("order", ORDERS)
def test_what_elastic_tells_a_process_that_runs_already_is_known(folder: Path, order: str) -> None:
    """As under --run-path."""
    env = bare(folder, None)
    del env["RANK"], env["LOCAL_RANK"]
    (folder / "train.py").write_text(SET_LATER)
    found = run_as_rank(folder, {**env, **ORDERS[order].environment(env)}, "train.py")
    assert (found.returncode, found.stdout) == (0, "1 1 none\n"), found.stderr


def test_a_process_without_torch_imports_nothing_for_it(folder: Path) -> None:
    """Only atexit, which is built into the interpreter."""
    env = bare(folder, None)
    program = ("-c", "import sys; print(*sorted(set(sys.modules) - {'sitecustomize', 'atexit'}), sep='\\n')")
    without, with_order = (run(folder, {**env, **more}, *program) for more in ({}, ORDERS["recipe"].environment(env)))
    assert with_order.stdout == without.stdout


def test_a_process_started_again_leaves_when_the_launcher_is_gone(folder: Path) -> None:
    env = {**bare(folder, None), "TORCHELASTIC_RESTART_COUNT": "1"}
    found = run(folder, {**env, **ORDERS["tuning"].environment(env)}, "-c", "print('trained')")
    assert (found.returncode, found.stdout, found.stderr) == (0, "", "")


STARTS_ITSELF_ANEW = """
import os, sys
if "AGAIN" not in os.environ:
    os.environ["AGAIN"] = "1"
    {how}
sys.path.insert(0, {torch!r})
import torch
ours = [name for name in os.environ if name.startswith(("AUTODDP_WORKER", "AUTODDP_NAMES"))]
print([name for name in {worker} if name in sys.modules], os.environ["PYTHONPATH"], ours)
"""
HOWS = {
    "execv": ("os.execv(sys.executable, [sys.executable, *sys.argv])", True),
    "by another program": ("os.execvpe('env', ['env', sys.executable, *sys.argv], dict(os.environ))", True),
    "in a group": (
        "import torch.distributed as d; d.init_process_group('gloo', store=d.HashStore(), rank=0, world_size=1)\n"
        "    os.execv(sys.executable, [sys.executable, *sys.argv])",
        False,
    ),
    "after it has trained": (
        "import torch, torch.distributed as d\n"
        "    d.init_process_group('gloo', store=d.HashStore(), rank=0, world_size=1)\n"
        "    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))\n"
        "    d.destroy_process_group()\n"
        "    os.execv(sys.executable, [sys.executable, *sys.argv])",
        False,
    ),
    "a fork": ("os.fork() or os.execv(sys.executable, [sys.executable, *sys.argv]); sys.exit(os.wait()[1])", False),
}


@pytest.mark.parametrize("how", HOWS)
def test_a_rank_that_starts_itself_anew_stays_one(folder: Path, how: str) -> None:
    """As with another PYTHONHASHSEED, or bound by numactl. What it forks is none."""
    act, stays = HOWS[how]
    worker = ["autoddp.worker.process.bootstrap"]
    if FROM_NOTHING in os.environ:  # with the empty torch it has nothing to do
        worker.append("autoddp.worker.job.applying")
    env = bare(folder, str(folder / "user"))
    program = STARTS_ITSELF_ANEW.format(how=act, torch=empty_torch(folder), worker=worker)
    (folder / "again.py").write_text(program)
    found = run_as_rank(folder, {**env, **ORDERS["recipe"].environment(env)}, "again.py")
    assert (found.returncode, found.stdout) == (0, f"{worker if stays else []} {folder / 'user'} []\n"), found.stderr


PUTS_ONE_PAST_PYTHON = """
import os, sys
if len(sys.argv) == 1:
    os.putenv("LD_LIBRARY_PATH", "/its/own")
    os.putenv("LANGUAGE", "new")
    {how}
    try:
        os.execv("/no/such/program", ["program"])
    except FileNotFoundError:
        assert not any(name.startswith("AUTODDP_WORKER") for name in os.popen("env"))
    os.execv(sys.executable, [sys.executable, *sys.argv, "again"])
print(os.environ.get("LD_LIBRARY_PATH"), os.environ["LANGUAGE"], os.environ.get("PYTHONPATH"))
"""


@pytest.mark.parametrize(
    ("how", "path"),
    [("", "/user"), ('os.putenv("PYTHONPATH", "/other:/more")', "/other:/more"), ('os.unsetenv("PYTHONPATH")', None)],
)
def test_what_a_script_has_put_into_its_environment_past_python_stays(folder: Path, how: str, path: str | None) -> None:
    """As Python says of os.putenv and execv. A script that starts itself anew until it is set would never end."""
    (folder / "again.py").write_text(PUTS_ONE_PAST_PYTHON.replace("{how}", how))
    env = {**bare(folder, "/user"), "LANGUAGE": "old"}
    for more in ({}, ORDERS["recipe"].environment(env)):
        found = run(folder, {**env, **more}, "again.py")
        assert (found.returncode, found.stdout) == (0, f"/its/own new {path}\n"), found.stderr


SETS_THREADS_ANEW = """
import os, sys
if os.environ["OMP_NUM_THREADS"] != "4":
    os.environ["OMP_NUM_THREADS"] = "4"
    os.execv(sys.executable, [sys.executable, *sys.argv])
sys.path.insert(0, {torch!r})
import torch
from autoddp.wire.started_with import started_with
ours = [name for name in os.environ if name.startswith("AUTODDP_WORKER")]
print(os.environ["OMP_NUM_THREADS"], started_with("OMP_NUM_THREADS"), ours)
"""


def test_threads_that_a_script_sets_where_it_starts_itself_anew_are_its_own(folder: Path) -> None:
    """They would be set so in the launched job too, whatever the recipe says."""
    (folder / "again.py").write_text(SETS_THREADS_ANEW.format(torch=empty_torch(folder)))
    env = {**bare(folder, None), "OMP_NUM_THREADS": "1"}
    found = run(folder, {**env, **ORDERS["recipe"].environment(env)}, "again.py")
    assert (found.returncode, found.stdout) == (0, "4 1 []\n"), found.stderr


SETS_THE_SAME_ANEW = """
import os, sys
if len(sys.argv) == 1:
    os.environ["OMP_NUM_THREADS"] = "1"
    os.execv(sys.executable, [sys.executable, *sys.argv, "again"])
sys.path.insert(0, {torch!r})
import torch
from autoddp.wire.started_with import started_with
print(os.environ["OMP_NUM_THREADS"], started_with("OMP_NUM_THREADS"))
"""


def test_threads_that_it_sets_to_what_they_were_are_its_own_too(folder: Path) -> None:
    """torchrun gives each of several ranks one; in the launched job the script would set the recipe's back to it."""
    (folder / "again.py").write_text(SETS_THE_SAME_ANEW.format(torch=empty_torch(folder)))
    env = {**bare(folder, None), "OMP_NUM_THREADS": "1"}
    found = run(folder, {**env, **ORDERS["tuning"].environment(env)}, "again.py")
    assert (found.returncode, found.stdout) == (0, "1 by the script\n"), found.stderr


OLD = torch.__version__ < (2, 8)
"""Torch 2.6 does not import this module itself: a script beside a statistics.py of its own cannot be tuned with it."""
IMPORTS = """
import sys
before = set(sys.modules)
assert "torch._dynamo" in before
import autoddp.worker.job.applying, autoddp.worker.job.bypass, autoddp.worker.trial.runner, autoddp.worker.trial.tuning
added = {name.partition(".")[0] for name in set(sys.modules) - before}
print(*sorted(added & sys.stdlib_module_names))
"""


def test_a_file_of_the_users_is_not_imported_in_place_of_a_module_of_pythons(folder: Path) -> None:
    """The script's folder comes first in a rank. A name there that torch imports too is a fault without autoddp."""
    done = forks.run(["-c", IMPORTS], cwd=folder, env=environment())
    brought_along = "_statistics statistics" if OLD else ""
    assert (done.stdout, done.stderr) == (f"{brought_along}\n", "")


OWN_HOOK = """
import sys
import torch
import torch.distributed as dist
from autoddp.knobs import Configuration
from autoddp.wire import WorkerConfig
from autoddp.worker.job.applying import start_applying
start_applying(WorkerConfig(configuration=Configuration({"bucket_cap_mb": 1.0})))
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
model.register_comm_hook(None, lambda state, bucket: None)
print("torch.distributed.algorithms.ddp_comm_hooks" in sys.modules, flush=True)
"""


def test_a_hook_of_the_scripts_own_imports_no_hooks_of_torch(folder: Path) -> None:
    """torch may warn where it is imported: under PYTHONWARNINGS=error the script would fail, and not under torchrun."""
    done = forks.run(["-c", OWN_HOOK], cwd=folder, env=environment())
    assert done.stdout == "False\n", done.stderr


TRAINS = """
import sys, torch
import torch.distributed as dist
import torch.nn.parallel
from statistics import of_the_project
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
print(of_the_project, sys.path, "autoddp.worker.job.applying" in sys.modules)
"""


@pytest.mark.parametrize(("name", "word"), [("train.py", "script/train.py"), whole("__main__.py", "script")])
def test_a_project_keeps_a_file_with_the_name_of_a_module_that_autoddp_imports(
    folder: Path, name: str, word: str
) -> None:
    """It imports torch itself: if it were run in the middle of torch's import, torch would be made twice, and fail."""
    env = bare(folder, None)
    (folder / "script" / name).write_text("import sys; print(sys.path)\n")
    path = run(folder, env, word).stdout.strip()
    (folder / "script" / "statistics.py").write_text("import torch\nof_the_project = 'theirs'\n")
    (folder / "script" / name).write_text(TRAINS)
    found = run(folder, {**env, **ORDERS["recipe"].environment(env)}, word)
    assert (found.returncode, found.stdout, found.stderr) == (0, f"theirs {path} True\n", "")


@pytest.mark.parametrize("order", ["recipe", "tuning"])
def test_the_folder_of_pythons_own_modules(folder: Path, order: str) -> None:
    """There each of Python's modules has its own file. No project lies there, so none of them is hidden."""
    env = bare(folder, None)
    words = [sys.executable, "-c", "import statistics; print(statistics.fmean([1]))"]
    env |= ORDERS[order].environment(env)
    done = subprocess.run(words, cwd=Path(os.__file__).parent, env=env, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("1.0\n", "")


def test_a_current_folder_that_was_removed(folder: Path) -> None:
    """As where a script removes the folder that it works in, and then starts Python."""
    line = 'mkdir gone && cd gone && rmdir ../gone && exec "$@"'
    command = ["bash", "-c", line, "bash", sys.executable, "-c", "import sys; print(sys.path)"]
    for env in ({}, ORDERS["tuning"].environment(bare(folder, None))):
        done = subprocess.run(command, cwd=folder, env={**bare(folder, None), **env}, capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, "")
