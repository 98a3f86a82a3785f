"""The house stays as drawn: who may import whom, one home for each dependency, one place for private names.

Every import counts, also those inside functions and those written as importlib.import_module("...").
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "autoddp"
SOURCES = {str(path.relative_to(PACKAGE)): path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py")}

FLOORS = (
    ("version",),  # below the ground: what the package's own __init__ says of itself
    ("__init__", "codec", "cpus", "errors", "files", "imports", "log", "units"),
    ("tables", "topology", "timing", "isolation", "cluster"),
    ("knobs", "processes"),
    ("recipe", "bench", "settings", "trace", "network"),
    ("wire", "predict", "runs", "torchrun", "own_code"),
    ("worker", "study", "diagnose", "commandline"),
    ("report", "hosts"),
    ("attempts",),
    ("cli",),
    ("__main__", "inject"),
)
FLOOR_OF = {unit: floor for floor, units in enumerate(FLOORS) for unit in units}

HOMES = {
    "torch": (
        "worker/",
        "torchrun/jobs.py",
        "torchrun/meetings.py",
        "torchrun/options.py",
        "torchrun/surroundings.py",
        "network/loopback.py",
        "commandline/environment.py",
        "commandline/local_fingerprint.py",
        "commandline/mode.py",
        "cli/main.py",
    ),
    "optuna": ("study/sampler.py",),
    "numpy": ("predict/calibration.py",),
    "wrapt": ("worker/process/bootstrap.py", "worker/process/isolated.py", "isolation/hooks.py"),
    "rich": (
        "tables.py",
        "report/terminal.py",
        "report/node_text.py",
        "report/communication_text.py",
        "report/diagnosis_text.py",
    ),
    "tomlkit": ("recipe/write.py",),
    "tomli": ("recipe/read.py",),
    "msgspec": ("codec.py",),
    "jinja2": ("report/page.py",),
    "shtab": ("cli/completion.py",),
    "pynvml": ("topology/nvidia/nvml.py",),
    "psutil": (
        "runs/owner.py",
        "topology/system/interfaces.py",
        "topology/system/machine.py",
        "processes/children.py",
    ),
}
IMPORTED_AS = {"nvidia-ml-py": "pynvml"}
ONLY_THIS_OF_TORCH = {
    "commandline/mode.py": {"torch.__version__"},  # to compare with a recipe's
    "commandline/environment.py": {"torch.backends.mkl.is_available"},  # else torch may compute as numpy does
    "commandline/local_fingerprint.py": {"torch"},  # its CUDA and NCCL, likewise
    "cli/main.py": {"torch.distributed.elastic.multiprocessing.errors.record"},  # as torchrun's own main is decorated
}

PRIVATE_TO_OTHERS = {
    # The end of a process whose main thread waits in a call that cannot be interrupted.
    ("worker/bench/deadline.py", "_exit"),
    # The parser of --rdzv-conf: the handler's registry wants its result, and torch has no public one.
    ("torchrun/options.py", "_parse_rendezvous_config"),
    # The names of torch's rendezvous backends, and of those that plugins add: there is no public list.
    ("torchrun/options.py", "_registry"),
    # Whether elastic knows that this node hosts the endpoint: only its own answer tells.
    ("torchrun/options.py", "_matches_machine_hostname"),
    # How elastic sorts launchers of one address: nothing public numbers them.
    ("torchrun/surroundings.py", "_NodeDescGenerator"),
    # Where an agent waits for the others, under any rendezvous: each has a class of its own.
    ("torchrun/surroundings.py", "_rendezvous"),
    # torch's part in C++. What has no public name there is asked for by it; the names below it are those of this list.
    ("isolation/guard/native.py", "_C"),
    ("worker/graphs/safe_capture.py", "_C"),
    ("worker/process/device.py", "_C"),
    ("worker/ddp/backward.py", "_C"),
    ("worker/observe/first_uses.py", "_C"),
    # Whether a GPU has a context of this process: nothing public tells where the allocator does not.
    ("worker/process/device.py", "_cuda_hasPrimaryContext"),
    # argparse has no public list of a parser's options.
    ("commandline/parsers.py", "_actions"),
    ("torchrun/options.py", "_actions"),
    ("commandline/words.py", "_actions"),
    ("cli/completion.py", "_actions"),
    ("cli/parser.py", "_option_string_actions"),
    ("commandline/parsers.py", "_add_action"),
    ("commandline/parsers.py", "_option_string_actions"),
    # Work of a known length for a GPU, without a kernel of ours: torch's own tests use it, and nothing public does it.
    ("worker/process/device.py", "_sleep"),
    # Whether this thread is in a backward pass: modes that begin or end there are undone behind it.
    ("worker/observe/first_uses.py", "_current_graph_task_id"),
    # Which threads are on Python's list only because something in them has asked who they are.
    ("worker/observe/call_recorder.py", "_DummyThread"),
    # What an iterator of torch's DataLoader is of: none of it has a public name.
    ("worker/observe/loader.py", "_BaseDataLoaderIter"),
    ("worker/observe/loader.py", "_num_workers"),
    ("worker/observe/loader.py", "_prefetch_factor"),
    ("worker/observe/loader.py", "_persistent_workers"),
    ("worker/observe/loader.py", "_dataset"),
    ("worker/observe/loader.py", "_index_sampler"),
    ("worker/observe/loader.py", "_collate_fn"),
    ("worker/observe/loader.py", "_next_index"),
    ("worker/observe/loader.py", "_auto_collation"),
    ("worker/observe/loader.py", "_num_yielded"),
    ("worker/observe/loader.py", "_data_queue"),
    ("worker/observe/loader.py", "_task_info"),
    ("worker/observe/loader.py", "_rcvd_idx"),
    ("worker/observe/loader.py", "_pin_memory"),
    ("worker/observe/loader.py", "_worker_init_fn"),
    # Workers of our own, whose death torch would raise in the script: nothing public lets them die.
    ("worker/observe/loader.py", "_worker_pids_set"),
    ("worker/observe/loader.py", "_remove_worker_pids"),
    # Where torch.compile's settings are, which its documentation names: whether it cuts at buckets, and replays.
    ("worker/effects/torch_compile.py", "_dynamo"),
    ("worker/effects/torch_compile.py", "_inductor"),
    # torch.cuda.graphs itself takes arguments apart with it, and torch 2.4 has it under no public name.
    ("worker/graphs/signature.py", "_pytree"),
    # Python's own, documented in spite of their names.
    ("worker/process/ending.py", "_exit"),
    ("worker/process/heartbeat.py", "_current_frames"),
    ("attempts/keeper.py", "_exit"),
    ("processes/supervisor.py", "_exit"),
    ("processes/signals.py", "_exit"),
    ("inject/sitecustomize.py", "_exit"),
    # Where a request goes that is sent through a proxy, and how: neither has a public name.
    ("isolation/elsewhere/requests.py", "_tunnel_host"),
    ("isolation/elsewhere/requests.py", "_method"),
    ("isolation/elsewhere/requests.py", "_channel"),
    # Which library sends: Python has no public way to the frames of a call that does not import inspect.
    ("isolation/elsewhere/sockets.py", "_getframe"),
    # The same of who calls a collective.
    ("worker/observe/call_recorder.py", "_getframe"),
    # Whether the script has a mode of its own, in which another one must neither begin nor end.
    ("worker/observe/first_uses.py", "_get_current_dispatch_mode"),
    # Where torch takes the agent's store for that of any ranks: the only place where the port is known.
    ("worker/process/agent_store.py", "_create_c10d_store"),
    # The end of a forked rank of a replay, which must not run what its parent has registered.
    ("worker/bench/replay.py", "_exit"),
    # The same of who reads a gradient.
    ("worker/gradients/access.py", "_getframe"),
    # Where torch gives a tensor's shared memory a name.
    ("isolation/guard/shared_memory.py", "_share_filename_cpu_"),
    ("isolation/guard/shared_memory.py", "_new_using_filename_cpu"),
}
PRIVATE_ALLOWED_IN = "worker/ddp/private.py"  # the single file that touches DistributedDataParallel's private names


TORCH_CUDA = "worker/process/device.py"  # the single file of a rank that calls torch.cuda, so that a fake covers all
TORCH_CUDA_ELSEWHERE = {
    # A subclass of `torch.cuda.graph`, which torch's own function is made to use: the capture itself, not an access.
    "worker/graphs/safe_capture.py": {"CUDAGraph", "Stream", "default_generators", "graph"},
    # That function, as a default: tests give another one.
    "worker/graphs/__init__.py": {"make_graphed_callables"},
    # The script's own `torch.cuda.synchronize` is replaced here; nothing is called.
    "worker/observe/host_device.py": {""},
    # Programs of their own, in no script's rank.
    "worker/bench/__main__.py": {"device_count", "get_device_name", "is_available", "mem_get_info", "set_device"},
    "worker/bench/burst.py": {"set_device"},
    "worker/bench/replay.py": {"current_device", "device_count", "set_device", "synchronize"},
}
"""Other files of the worker → what they use of torch.cuda; "" is the module itself."""


def unit_of(file: str) -> str:
    return file.partition("/")[0].removesuffix(".py")


def imports(source: str) -> Iterator[str]:
    """Full dotted names: `from a.b import c` is a.b.c."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "a relative import: write it out"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") in ("import_module", "find_spec"):
            yield from (a.value for a in node.args if isinstance(a, ast.Constant))


def upward_imports(file: str, source: str) -> list[str]:
    here, found = unit_of(file), []
    for name in imports(source):
        first, _, rest = name.partition(".")
        unit = rest.partition(".")[0]
        if first != "autoddp":
            continue
        there = unit if unit in FLOOR_OF else "__init__"
        if there != here and FLOOR_OF[there] >= FLOOR_OF[here]:
            found.append(f"{file} imports {name}")
    return found


def is_at(home: str, file: str) -> bool:
    return file == home or (home.endswith("/") and file.startswith(home))


def homeless_imports(file: str, source: str) -> list[str]:
    found = []
    for name in imports(source):
        package = name.partition(".")[0]
        if package in sys.stdlib_module_names or package in ("autoddp", "sitecustomize"):
            continue
        homes = HOMES.get(package, ())
        at_home = any(is_at(home, file) for home in homes)
        if not at_home or name not in ONLY_THIS_OF_TORCH.get(file, {name}):
            found.append(f"{file} imports {name}")
    return found


def private_names(source: str) -> set[str]:
    """`_x` of something that is not `self`, imports of `_x`, and getattr(thing, "_x")."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and getattr(node.value, "id", "") not in ("self", "cls"):
            found.add(node.attr)
        elif isinstance(node, ast.ImportFrom):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("getattr", "hasattr", "setattr"):
            found |= {a.value for a in node.args[1:2] if isinstance(a, ast.Constant)}
    return {name for name in found if re.match("_[a-zA-Z]", name)}


def test_every_unit_has_a_floor() -> None:
    assert {unit_of(file) for file in SOURCES} == FLOOR_OF.keys()


def test_imports_go_down_only() -> None:
    assert [fault for file, source in SOURCES.items() for fault in upward_imports(file, source)] == []


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("study/x.py", "from autoddp.attempts.tune import tune"),  # up
        ("study/x.py", "def f():\n    import autoddp.worker.process.bootstrap"),  # a neighbour, inside a function
        ("timing/x.py", "from autoddp.knobs import Rung"),
        ("worker/x.py", "importlib.import_module('autoddp.cli.main')"),
        ("errors.py", "from autoddp import is_tuning"),
    ],
)
def test_the_floor_check_sees(file: str, line: str) -> None:
    assert len(upward_imports(file, line)) == 1


def test_a_dependency_is_imported_at_home_only() -> None:
    assert [fault for file, source in SOURCES.items() for fault in homeless_imports(file, source)] == []


def test_every_home_is_lived_in() -> None:
    """A file that no longer imports its dependency has to go from `HOMES`."""
    found = {(name.partition(".")[0], file) for file, source in SOURCES.items() for name in imports(source)}
    assert [
        (package, home)
        for package, homes in HOMES.items()
        for home in homes
        if not any(name == package and is_at(home, file) for name, file in found)
    ] == []


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("attempts/tune.py", "import torch"),
        ("study/search.py", "def f():\n    from optuna import create_study"),
        ("cli/main.py", "from torch.distributed import init_process_group"),
        ("bench/model.py", "import numpy"),
    ],
)
def test_the_home_check_sees(file: str, line: str) -> None:
    assert len(homeless_imports(file, line)) == 1


def test_every_declared_dependency_has_a_home_here() -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    block = text.partition("\ndependencies = [")[2].partition("\n]")[0]
    declared = set(re.findall(r'^    "([a-z0-9-]+)', block, re.MULTILINE))
    assert {IMPORTED_AS.get(name, name) for name in declared} == set(HOMES)


ROOMS = (
    *(
        "attempts",
        "attempts/job",
        "attempts/starts",
        "cluster",
        "commandline",
        "diagnose",
        "hosts",
        "network",
        "own_code",
        "processes",
        "runs",
        "torchrun",
    ),
    "diagnose/collectives",
    "isolation/kernel",
    *(f"topology/{name}" for name in ("nccl", "nvidia", "rdma", "system")),
    *(f"worker/{name}" for name in ("ddp", "effects", "gradients", "job", "observe", "process", "trial")),
)


def test_each_room_begins_with_the_names_of_its_files() -> None:
    for room in ROOMS:
        said = ast.get_docstring(ast.parse(SOURCES[f"{room}/__init__.py"])) or ""
        named = set(re.findall(r"^ *(\w+)  ", said, re.MULTILINE))
        there = {path.stem for path in (PACKAGE / room).glob("*.py")} - {"__init__"}
        assert named == there, room


def test_private_names_of_others() -> None:
    """The list is exact: a name that is no longer used has to go from it."""
    found = {
        (file, name) for file, source in SOURCES.items() if file != PRIVATE_ALLOWED_IN for name in private_names(source)
    }
    assert found == PRIVATE_TO_OTHERS


def uses_of_torch_cuda(source: str) -> set[str]:
    """`torch.cuda.x` is x; `torch.cuda` by itself, and whatever is imported from it, is ""."""
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Attribute)]
    of_cuda = [node for node in nodes if ast.unparse(node.value) == "torch.cuda"]
    alone = sum(ast.unparse(node) == "torch.cuda" for node in nodes) > len(of_cuda)
    imported = any(f"{name}.".startswith("torch.cuda.") for name in imports(source))
    return {node.attr for node in of_cuda} | ({""} if alone or imported else set())


def test_torch_cuda_is_called_in_one_place() -> None:
    """The list is exact."""
    found = {file: uses_of_torch_cuda(source) for file, source in SOURCES.items() if file.startswith("worker/")}
    assert found.pop(TORCH_CUDA)
    assert {file: names for file, names in found.items() if names} == TORCH_CUDA_ELSEWHERE


@pytest.mark.parametrize(
    "line",
    ["torch.cuda.Event()", "from torch.cuda import Event", "import torch.cuda", "f(torch.cuda)", "c = torch.cuda"],
)
def test_the_check_of_torch_cuda_sees(line: str) -> None:
    assert uses_of_torch_cuda(line)


def test_launch_py_asks_for_every_dependency() -> None:
    """A checkout that is not installed says in one line what is missing."""
    tree = ast.parse((ROOT / "launch.py").read_text(encoding="utf-8"))
    needs = {
        getattr(one.targets[0], "id", ""): ast.literal_eval(one.value)
        for one in tree.body
        if isinstance(one, ast.Assign)
    }
    assert set(needs["NEEDS"]) == set(HOMES) - {"tomli"}
    assert needs["NEEDS_BEFORE_3_11"] == ("tomli",)
    bare = subprocess.run([sys.executable, "-S", "launch.py", "train.py"], cwd=ROOT, capture_output=True, text=True)
    assert bare.returncode == 2
    assert bare.stderr.count("\n") == 1
    assert "has no torch, optuna" in bare.stderr
