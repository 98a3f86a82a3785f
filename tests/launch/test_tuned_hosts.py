"""Several hosts run one study, launch one configuration, and each keeps the recipe."""

import functools
import json
import sys

import pytest
from launchers import BRIEF, SCRIPTS, start, whole
from torch.distributed import TCPStore

from autoddp.recipe import load

PLAIN = str(SCRIPTS / "plain.py")


def rendezvous(lab, kind, host):
    """The words that join `host` to the others."""
    if kind == "static":
        return ["--node-rank", str(host), "--master-addr", lab.address(0), "--master-port", "29411"]
    address = lab.address(0)
    endpoint = f"{f'[{address}]' if ':' in address else address}:29411"
    own = ["--local-addr", lab.address(host)] if kind == "c10d" else []
    return ["--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, *own, "--rdzv-id", "t"]


def run_on_all(lab, kind, parent, *words, env=None, ranks=None):
    """The same command on every host, to the end; `ranks`: how many each host starts, else one."""
    variables = {"GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1", "TUNED_TIMES_LONGER": "12", **(env or {})}
    own = ["--diagnose-budget", "0", *words]
    each = ranks or [1] * len(lab)
    launches = [
        start(
            BRIEF,
            parent / f"host{host}",
            ["--nnodes", str(len(lab)), "--nproc-per-node", str(each[host]), *rendezvous(lab, kind, host), *own],
            variables,
            popen=functools.partial(lab.fork, host),
        )
        for host in range(len(lab))
    ]
    return [launch.wait() for launch in launches]


def summaries(launches):
    return [json.loads(max(launch.folder.glob(".autoddp/2*/summary.json")).read_text()) for launch in launches]


ALONE = "127.0.0.1 localhost\n::1 localhost\n"
NAMES = {
    "right": None,
    "loopback": [f"{ALONE}127.0.0.1 host{host}\n" for host in range(2)],
    "nothing": [ALONE] * 2,
    "debian": [f"{ALONE}127.0.1.1 host{host}\n" for host in range(2)],
    "each-other": [f"{ALONE}10.77.0.{2 - host} host{host}\n" for host in range(2)],
}


@pytest.mark.lab
@pytest.mark.parametrize("kind", ["static", whole("c10d"), whole("c10d without --local-addr")])
@pytest.mark.parametrize("names", ["loopback", *(whole(name) for name in NAMES if name != "loopback")])
@pytest.mark.parametrize("ipv6", [False, whole(True)], ids=["ipv4", "ipv6"])
def test_two_hosts_tune_once(lab, kind, names, ipv6, tmp_path):
    """Whatever their names stand for, and with GLOO_SOCKET_IFNAME set by the user."""
    if ipv6 and names in ("right", "each-other"):
        pytest.skip("those names stand for IPv4 addresses")
    hosts = lab(hosts=2, names=NAMES[names], ipv6=ipv6)
    launches = run_on_all(hosts, kind, tmp_path, "--trials", "1", PLAIN)
    assert [launch.returncode for launch in launches] == [0, 0], launches[0].stderr[-2000:]
    first, second = summaries(launches)
    assert first["trials"] == second["trials"]
    assert len(first["trials"]) == 1
    recipes = [(launch.folder / "scripts.plain.autoddp.toml").read_text() for launch in launches]
    assert recipes[0] == recipes[1]
    assert first["decision"]["configuration"] == second["decision"]["configuration"]


@pytest.mark.lab
@pytest.mark.whole
def test_a_crash_on_one_host_costs_only_its_trial(lab, tmp_path):
    script = str(SCRIPTS / "planted_failure.py")
    launches = run_on_all(lab(hosts=2), "c10d", tmp_path, "--trials", "3", script, "--kind", "abort")
    assert [launch.returncode for launch in launches] == [0, 0], launches[0].stderr[-2000:]
    for study in summaries(launches):
        assert [trial["state"] == "failed" for trial in study["trials"]] == [True, False, False]


NUMBERED = """
import os, sys
from pathlib import Path
from autoddp.commandline.words import parse
from autoddp.torchrun.jobs import run_tuning_job

port, attempt, script = sys.argv[1:]
meet = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--local-addr", "127.0.0.1"]
torchrun = parse(["--nnodes", "2", "--nproc-per-node", "1", *meet, script]).torchrun
torchrun.node_rank = int(os.environ["NUMBER"])
sys.exit(run_tuning_job(torchrun, Path.cwd(), int(attempt)) or 0)
"""


def test_two_launchers_on_one_machine_have_the_same_ranks_in_each_attempt(tmp_path):
    """Elastic sorts hosts of one address by process ids, and tuning ends where rank 0 moves to another launcher."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    script = tmp_path / "script.py"
    script.write_text("import os; open('group_rank', 'w').write(os.environ['GROUP_RANK'])")
    for attempt, numbers in enumerate(((0, 1), (1, 0))):
        launches = [
            start(
                (sys.executable, "-c", NUMBERED),
                tmp_path / f"attempt{attempt}" / f"host{number}",
                [str(store.port), str(attempt), str(script)],
                {"NUMBER": str(number)},
            )
            for number in numbers
        ]
        for launch, number in zip(launches, numbers, strict=True):
            assert launch.wait().returncode == 0, launch.stderr[-2000:]
            assert (launch.folder / "group_rank").read_text() == str(number)


@pytest.mark.lab
@pytest.mark.whole
def test_hosts_with_different_recipes_start_nothing(lab, tmp_path):
    hosts = lab(hosts=2)
    run_on_all(hosts, "c10d", tmp_path, "--trials", "1", "--tune-only", PLAIN)
    (tmp_path / "host1" / "scripts.plain.autoddp.toml").unlink()
    launches = run_on_all(hosts, "c10d", tmp_path, PLAIN)
    assert [launch.returncode for launch in launches] == [2, 2]
    for launch in launches:
        assert (
            "autoddp: error: hosts differ: a recipe with" in launch.stderr or "hosts differ: no recipe" in launch.stderr
        )
        assert "Traceback" not in launch.stderr


@pytest.mark.lab
@pytest.mark.whole
def test_hosts_with_different_numbers_of_ranks_use_their_recipe(lab, tmp_path):
    """Each knows its own number alone. The recipe is not used for another world, and then they tune again."""
    hosts, name = lab(hosts=2), "scripts.plain.autoddp.toml"

    def run(ranks, *words):
        before = [len(path.read_text()) for path in sorted(tmp_path.glob("host*.stderr"))] or [0, 0]
        launches = run_on_all(hosts, "c10d", tmp_path, *words, PLAIN, ranks=ranks)
        says = [launch.stderr[begins:] for launch, begins in zip(launches, before, strict=True)]
        assert [launch.returncode for launch in launches] == [0, 0], says[0][-2000:]
        return [launch.folder for launch in launches], says

    folders, _ = run([2, 1], "--trials", "1", "--tune-only")
    assert (folders[0] / name).read_text() == (folders[1] / name).read_text()
    fits = load(folders[0] / name).fits
    assert (fits.world_size, fits.nodes, fits.ranks_of_nodes) == (3, 2, (1, 2))
    for words in ([], ["--recipe", name]):
        _, says = run([2, 1], *words)
        for one in says:
            assert f"recipe {name}: launching" in one
            assert "made for another job" not in one
            assert "autoddp: tuning" not in one
        trained = [path for folder in folders for path in folder.glob("rank*.pt")]
        assert len(trained) == 3, "another number of ranks has trained"
        for path in trained:
            path.unlink()
    _, says = run([2, 2])
    for folder, one in zip(folders, says, strict=True):
        assert "world size 3 in the recipe, 4 here; it " in one
        assert "the next launch tunes again" in one
        assert (folder / "scripts.plain.autoddp.unfit").exists()
    _, says = run([2, 2], "--dry-run")
    assert all("was of another job (world size 3 in the recipe, 4 here): tuning again" in one for one in says)


@pytest.mark.lab
@pytest.mark.whole
def test_hosts_that_need_each_others_files_are_tuned_under_guard(lab, tmp_path):
    """Under the overlay no host sees what another one writes; under guard all write in one folder."""
    shared = tmp_path / "shared"
    shared.mkdir()
    script = str(SCRIPTS / "needs_a_file.py")
    words = ["--trials", "1", "--allow", "exact", "--tune-only", script]
    launches = run_on_all(lab(hosts=2), "c10d", tmp_path, *words, env={"SHARED": str(shared)})
    assert [launch.returncode for launch in launches] == [0, 0], launches[0].stderr[-2000:]
    for launch, study in zip(launches, summaries(launches), strict=True):
        assert len(study["trials"]) == 1
        assert "isolation: overlay" in launch.stderr
        assert "isolation: guard" in launch.stderr
        assert "waits in vain for" in launch.stderr
    assert list(shared.iterdir()) == []


USES_THE_STORE = f"""
import datetime, os, runpy, sys
from torch.distributed import TCPStore

rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
store = TCPStore(
    os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False, timeout=datetime.timedelta(seconds=30)
)
assert store.add(f"started/{{rank}}", 1) == 1, "the store of an attempt before"
store.wait([f"started/{{other}}" for other in range(world)])
sys.path.insert(0, {str(SCRIPTS)!r})
sys.argv = ["planted_failure.py", "--kind", "abort"]
runpy.run_path({str(SCRIPTS / "planted_failure.py")!r}, run_name="__main__")
"""


@pytest.mark.lab
@pytest.mark.parametrize("kind", [whole("c10d"), whole("static")])
def test_a_script_that_uses_torchruns_store_before_its_process_group(lab, kind, tmp_path):
    """In each attempt, of which the first one is ended by an abort, and in the real job."""
    (tmp_path / "script.py").write_text(USES_THE_STORE)
    launches = run_on_all(lab(hosts=2), kind, tmp_path, "--trials", "3", str(tmp_path / "script.py"))
    assert [launch.returncode for launch in launches] == [0, 0], launches[0].stderr[-2000:]
    for study in summaries(launches):
        assert [trial["state"] == "failed" for trial in study["trials"]] == [True, False, False]
