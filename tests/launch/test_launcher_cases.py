"""The cases that PyTorch tests its own launcher with, under torchrun, `autoddp --trials 0` and plain `autoddp`.

Plain autoddp starts the script once more, to tune it, which must not show: what the script writes then vanishes. None
of these scripts builds a DDP model, so it then launches them as written.
"""

import re

import pytest
from launchers import AUTODDP, REPORTER, SIDES, start, whole

ALL = {**SIDES, "plain": AUTODDP}
TWO = ["--nproc-per-node", "2"]
BASH = 'echo "rank $RANK of $WORLD_SIZE in bash: $0 $*" | tee "$OUT/report$RANK"'
# name: words, more environment, the exit code of torchrun, how many workers
CASES = {
    "four ranks": (["--nproc-per-node", "4", REPORTER, "--x", "y"], {}, 0, 4),
    "static, as caffe2's": (
        "--nnodes=1 --nproc_per_node=2 --monitor-interval=1 --start-method=spawn --master-addr=localhost "
        f"--master-port={{port}} --node-rank=0 {REPORTER}",
        {},
        0,
        2,
    ),
    "bash": ([*TWO, "--no-python", "bash", "-c", BASH, "one", "two words", "--seed", "3"], {}, 0, 2),
    "variables": (
        [REPORTER, "--nproc-per-node", "5"],
        {"PET_NNODES": "1", "PET_NPROC_PER_NODE": "2", "PET_RDZV_ID": "v", "PET_START_METHOD": "spawn"},
        0,
        2,
    ),
    "one rank, as nobody says more": ([REPORTER], {}, 0, 1),
    "auto": (["--nproc-per-node", "auto", REPORTER], {}, 0, None),
    "elastic": (
        "--nnodes=1:2 --nproc-per-node=2 --rdzv-backend=c10d --rdzv-endpoint=localhost:{port} --rdzv-id=e "
        f"--rdzv-conf=last_call_timeout=1 --max-restarts=2 {REPORTER}",
        {},
        0,
        2,
    ),
    "failing worker": ([*TWO, REPORTER, "--exit", "7"], {}, 1, 2),
    "standalone": (["--standalone", *TWO, REPORTER], {}, 0, 2),
    "run-path": ([*TWO, "--run-path", REPORTER, "a"], {}, 0, 2),
    "tee with prefix": (
        [*TWO, "--role=trainer", "--tee=3", "--log-dir={out}/logs", REPORTER],
        {"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "[${role_name} ${local_rank} of ${rank}]: "},
        0,
        2,
    ),
}
SAMPLED = ("bash",)


@pytest.fixture(scope="module", params=[name if name in SAMPLED else whole(name) for name in CASES])
def case(request, tmp_path_factory):
    words, env, code, workers = CASES[request.param]
    folder = tmp_path_factory.mktemp("case")
    words = words.split() if isinstance(words, str) else words
    launches = {side: start(command, folder / side.replace(" ", "_"), words, env) for side, command in ALL.items()}
    try:
        yield {side: launch.wait() for side, launch in launches.items()}, code, workers
    finally:
        for launch in launches.values():
            launch.kill()


def same_for_all(launches, what):
    """`what` of torchrun, which the two others have alike."""
    found = {side: what(launch) for side, launch in launches.items()}
    assert found["autoddp"] == found["torchrun"]
    assert found["plain"] == found["torchrun"]
    return found["torchrun"]


def console(launch):
    """What came from the workers; their order among each other is chance."""
    return sorted(line for text in (launch.stdout, launch.stderr) for line in text.splitlines() if "rank " in line)


def from_workers(launch):
    return [line for line in console(launch) if re.search(r"rank \d (on std|of \d in bash)", line)]


def failure(launch):
    found = re.search(r"^=+\n.* FAILED\n-+\n.*?^=+$", launch.stderr, re.MULTILINE | re.DOTALL)
    return launch.anonymous(found[0]) if found else ""


def files(launch):
    """All that lies in the folder; job folders below logs/ have random names."""
    found = {re.sub(r"logs/[^/]+/", "logs/", str(path.relative_to(launch.folder))) for path in launch.folder.rglob("*")}
    return {path for path in found if not path.startswith(".autoddp") and not re.fullmatch("logs/[^/]*", path)}


def starts(launch):
    """How each worker was started: its words, its place among all, and what its environment says of that."""
    if (launch.folder / "report0").exists():
        return sorted(path.read_text() for path in launch.folder.glob("report*"))
    known = {}
    for name, report in launch.reports().items():
        variables = {
            name: launch.anonymous(value)
            for name, value in report["environ"].items()
            if re.match("(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE|NAME)$|TORCH|OMP|PET_|MASTER_ADDR", name)
        }
        del variables["TORCHELASTIC_RUN_ID"], variables["TORCHELASTIC_ERROR_FILE"]
        if "--nnodes=1:2" in launch.words:
            del variables["MASTER_ADDR"]  # where hosts may join, plain autoddp chooses the network
        command = [re.sub(r"(fd|handle)=\d+", r"\1=<fd>", word) for word in report["command"]]  # --run-path forks
        known[name] = report["argv"], command, report["name"], variables
    return known


def test_as_under_torchrun(case):
    launches, code, workers = case
    assert same_for_all(launches, lambda launch: launch.returncode) == code
    found = same_for_all(launches, starts)
    assert len(found) == (workers or len(found)) > 0
    assert len(same_for_all(launches, from_workers)) >= len(found)
    assert bool(same_for_all(launches, failure)) is bool(code)
    assert same_for_all(launches, files)
    assert "autoddp: tuning " in launches["plain"].stderr
    assert "launching as written" in launches["plain"].stderr
    assert not any(launch.processes() for launch in launches.values())


@pytest.mark.whole
def test_an_unknown_number_is_refused_by_all(tmp_path):
    """torchrun shows a traceback and ends with 1; a user's error is one line and exit code 2 here."""
    words = ["--nproc-per-node", "many", REPORTER]
    launches = {side: start(command, tmp_path / side, words) for side, command in ALL.items()}
    for side, launch in launches.items():
        assert launch.wait().returncode == (1 if side == "torchrun" else 2)
        assert "Unsupported nproc_per_node value: many" in launch.stderr
        assert launch.reports() == {}
