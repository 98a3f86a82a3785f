"""A host that comes when the others have met already joins their job, as it does under torchrun."""

from __future__ import annotations

import functools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from launchers import AUTODDP, ROOT, Launch, free_port, start, wait_for
from torch.distributed import HashStore
from torch.distributed.elastic.rendezvous import RendezvousClosedError, RendezvousHandler, RendezvousParameters
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import create_backend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler

from autoddp.cli.main import Job, launch
from autoddp.commandline.environment import job_environment
from autoddp.commandline.mode import Mode, torch_version
from autoddp.commandline.words import parse
from autoddp.hosts import late_hosts
from autoddp.hosts.late_hosts import Notices, Plan, Running
from autoddp.knobs import Configuration
from autoddp.network.own_network import Network
from autoddp.recipe import Recipe, dump, load
from autoddp.wire.worker_config import APPLY, WorkerConfig

RECIPE = replace(
    load(ROOT / "tests" / "recipe" / "sound.autoddp.toml"), configuration=Configuration({"bucket_cap_mb": 3.0})
)
# One line for each start of a rank; the job is over once there are two ranks and nobody has been told to wait.
SCRIPT = f"""
echo "$RANK of $WORLD_SIZE: ${APPLY}" >> $OUT/starts
while [ "$WORLD_SIZE" = 1 -o -e "$OUT/../first" ]; do
    if [ -e "$OUT/fail" ]; then rm "$OUT/fail"; exit 1; fi
    sleep 0.05
done
"""
# Without it torch 2.13's own agents fail: the one that stays the first gives its store's address to no host that joins.
STORE_OF_ITS_OWN = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
LAST_CALL = 6  # seconds; a host that joins looks once a second whether it may


def test_a_host_that_waits_for_the_end_of_tuning_says_so() -> None:
    """And which hosts have met: where a command was started twice on one of them, both may have taken all places."""
    notices = Notices(HashStore(), "job")
    notices.plan(Plan("digest", "tuning with 20 trials", job=True, hosts="host0, host0"))
    said: list[str] = []

    def say(text: str) -> None:
        said.append(text)
        notices.running(Running("digest"))

    assert notices.awaited(say, most=2)[1].digest == "digest"
    (line,) = said
    assert line.startswith("the other hosts have begun already (tuning with 20 trials; on host0, host0): joining them")


@pytest.mark.parametrize(("script", "is_told"), [("02", True), ("01", False), ("", False)])
def test_a_late_host_with_another_script_is_told_so(script: str, is_told: bool) -> None:
    """It may be another job, with the endpoint of the first one and the usual run id: it waited for that one's end."""
    notices, said = Notices(HashStore(), "none"), list[str]()
    notices.plan(Plan("digest", "tuning with 20 trials", job=True, hosts="host0, host1", script="01"))
    notices.running(Running("digest"))
    notices.awaited(said.append, 2, script)
    assert [line.partition("; on host0, host1): ")[2] for line in said] == is_told * [
        "if this is another job, give it an --rdzv-id, or an endpoint, of its own"
    ]


@pytest.mark.parametrize(("most", "looks"), [(2, 3), (3, 2)])
def test_a_host_too_many_lets_those_that_have_met_take_part_first(monkeypatch, most, looks) -> None:
    """It was there before one of them, which then waited in vain until the job had ended."""
    notices, looked = Notices(HashStore(), "job"), list[float]()

    def polls(limit: float, _: float):
        """The first host launches the job before the second look, the other one before the third."""
        for _ in range(5 if limit else 0):
            if len(looked) in (1, 2):
                notices.running(Running(nodes=2))
            looked.append(limit)
            yield 0.0

    monkeypatch.setattr(late_hosts, "polls", polls)
    monkeypatch.setattr(late_hosts, "_JOINING", 0.0)
    notices.plan(Plan(job=True))
    notices.awaited(lambda _: None, most)
    assert len(looked) == looks


def host(
    parent: Path,
    name: str,
    port: str,
    nodes: str,
    recipe: Recipe | None = RECIPE,
    address: str = "127.0.0.1",
    force: bool = True,
    popen: Any = None,
    last_call: int = LAST_CALL,
    meeting: list[str] | None = None,
) -> Launch:
    folder = parent / name
    folder.mkdir(exist_ok=True)
    (folder / "train.sh").write_text(SCRIPT)
    own = []
    if recipe is not None:
        (folder / "own.toml").write_text(dump(recipe))
        own = ["--recipe", "own.toml"]
    c10d = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{address}:{port}", "--rdzv-id", "j"]
    c10d += ["--rdzv-conf", f"last_call_timeout={last_call}"]
    options = ["--nnodes", nodes, "--nproc-per-node", "1", "--max-restarts", "3"]
    all_ = [*(meeting or c10d), *options, *own, *(["--force"] if force else []), "--no-python", "sh", "train.sh"]
    return start(AUTODDP, folder, all_, STORE_OF_ITS_OWN, popen=popen)


def starts(launch: Launch) -> list[str]:
    """What the ranks of one host were started as: rank, world size, the configuration and its variables."""
    path = launch.folder / "starts"
    found = []
    for line in path.read_text().splitlines() if path.exists() else ():
        place, _, given = line.partition(": ")
        config = json.loads(given) if given else {}
        found.append(f"{place.partition(' ')[2]}: {config.get('configuration', 'as written')}")
    return found


def comes_late(parent: Path, first: dict, second: dict) -> tuple[Launch, Launch]:
    """Of a job for one or two hosts the second one comes when the first one's rank runs alone; both ended."""
    port = free_port()
    one = host(parent, "host0", port, "1:2", **first)
    try:
        wait_for(lambda: starts(one), "the first rank")
        two = host(parent, "host1", port, "1:2", **second)
        two.wait()
        if two.returncode == 0:
            one.wait()
    finally:
        one.kill()
    return one, two


RUNS = "{'bucket_cap_mb': 3.0}"


@pytest.mark.parametrize("own", [RECIPE, None], ids=["the same recipe", "no recipe"])
def test_a_host_that_comes_late_joins_the_job(tmp_path, own):
    """Also one that would tune for lack of a recipe: it takes that of the job."""
    one, two = comes_late(tmp_path, {}, {"recipe": own})
    assert (one.returncode, two.returncode) == (0, 0), one.stderr + two.stderr
    assert "the job runs already on other hosts: joining it" in two.stderr
    assert starts(one) == [f"of 1: {RUNS}", f"of 2: {RUNS}"]
    assert starts(two) == [f"of 2: {RUNS}"]
    if own is None:
        (place,) = two.folder.glob("*.autoddp.toml")
        kept = load(place)
        # It says this host's own name of the script, and its own arguments.
        fits, made_by = (
            replace(RECIPE.fits, script="sh"),
            replace(RECIPE.made_by, arguments=kept.made_by.arguments),
        )
        assert kept == replace(RECIPE, fits=fits, made_by=made_by)


@pytest.mark.parametrize("joins", [True, False])
def test_a_late_host_of_a_job_that_has_ended_says_so(capfd: pytest.CaptureFixture[str], joins: bool) -> None:
    """Torch's agent ended with a traceback of forty lines. Of the hosts that have met, it stays as under torchrun."""
    port = free_port()
    place = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "j", "--nnodes", "1:2"]
    options = parse([*place, "--rdzv-conf", "is_host=0", "--no-python", "true"])
    ended = other_hosts_rendezvous(port)
    ended.set_closed()
    with pytest.raises(SystemExit if joins else RendezvousClosedError) as raised:
        launch(Job(options, {}, joins=joins))
    told = "autoddp: error: the other hosts have ended the job, or are out of reach\n"
    assert capfd.readouterr().err.endswith(told) is joins
    assert getattr(raised.value, "code", 1) == 1


def other_hosts_rendezvous(port: str) -> RendezvousHandler:
    """The rendezvous of a job, with its store in this process."""
    settings = {"is_host": "1", "store_type": "tcp"}
    parameters = RendezvousParameters("c10d", f"127.0.0.1:{port}", "j", 1, 2, "127.0.0.1", **settings)
    backend, store = create_backend(parameters)
    return create_handler(store, backend, parameters)


def test_a_late_host_with_another_recipe_is_refused(tmp_path):
    other = replace(RECIPE, configuration=Configuration({"bucket_cap_mb": 5.0}))
    one, two = comes_late(tmp_path, {}, {"recipe": other})
    assert two.returncode == 2
    (line,) = [line for line in two.stderr.splitlines() if "error: " in line]
    assert "hosts differ: the job runs already with a recipe with bucket_cap_mb=3" in line
    assert "bucket_cap_mb=5" in line
    assert starts(one) == [f"of 1: {RUNS}"]


def test_no_host_joins_a_static_rendezvous_late(tmp_path):
    """One of another job, with the same port, took the place of a host whose rank was training."""
    port = free_port()
    (tmp_path / "first").touch()

    def begin(name: str, rank: str) -> Launch:
        place = ["--node-rank", rank, "--master-addr", "127.0.0.1", "--master-port", port]
        return host(tmp_path, name, port, "2", meeting=place)

    one, two = begin("host0", "0"), begin("host1", "1")
    try:
        wait_for(lambda: starts(one) and starts(two), "both ranks")
        other = begin("other", "1").wait()
        assert other.returncode == 2, other.stderr
        assert "under --rdzv-backend static no host can join a job later" in other.stderr
        (tmp_path / "first").unlink()
        assert (one.wait().returncode, two.wait().returncode) == (0, 0), one.stderr + two.stderr
    finally:
        one.kill()
        two.kill()
    assert starts(one) == starts(two) == [f"of 2: {RUNS}"]
    assert starts(other) == []


@pytest.mark.parametrize(
    ("nodes", "settings", "more", "world"),
    [
        ("1:2", {"hook": "bf16"}, [], 8),
        ("1:2", {"hook": "bf16"}, ["--force"], 0),
        ("1:2", {"bucket_cap_mb": 3.0}, [], 0),  # changes no gradients
        ("2", {"hook": "bf16"}, [], 0),  # torchrun starts no other number
    ],
)
def test_ranks_know_for_how_many_of_them_the_recipe_is(nodes, settings, more, world):
    """A recipe for two hosts went on on one, where the other one was lost: at a start it would have been left out."""
    mode = Mode(tune=False, several_nodes=True, recipe=replace(RECIPE, configuration=Configuration(settings)))
    words = ["--rdzv-backend", "c10d", "--nnodes", nodes, *more, "train.py"]
    found = job_environment(parse(words), mode, Network())
    assert WorkerConfig.parse(found[APPLY]).world == world


@pytest.mark.lab
def test_a_host_that_was_lost_comes_back(lab, tmp_path):
    hosts = lab(hosts=2)
    place = {"address": hosts.address(0), "recipe": RECIPE}
    (tmp_path / "first").touch()

    def begin(number: int) -> Launch:
        popen = functools.partial(hosts.fork, number)
        return host(tmp_path, f"host{number}", "29433", "2", **place, popen=popen)

    one, two = begin(0), begin(1)
    wait_for(lambda: starts(one) and starts(two), "both ranks")
    two.kill()
    (one.folder / "fail").touch()  # as a rank fails whose peer is gone
    wait_for(lambda: not (one.folder / "fail").exists(), "the end of the other rank")
    (tmp_path / "first").unlink()
    again = begin(1)
    assert (again.wait().returncode, one.wait().returncode) == (0, 0), one.stderr + again.stderr
    # As where the same command is given twice: then it waits until the job ends.
    assert "the job runs already, on as many hosts as --nnodes allows (2): this host takes part once" in again.stderr
    assert starts(one) == [f"of 2: {RUNS}"] * 2
    assert starts(again) == [f"of 2: {RUNS}"] * 2


@pytest.mark.parametrize(
    ("hook", "says", "runs"),
    [
        ({"bucket_cap_mb": 3.0}, "it changes no gradients, and is used all the same", RUNS),
        ({"hook": "bf16"}, "it is on the near rung: launching as written", "as written"),
    ],
    ids=["exact", "near"],
)
def test_a_recipe_for_another_number_of_hosts(tmp_path, hook, says, runs):
    """With a range as --nnodes the number of hosts is known when they have met."""
    fits = replace(RECIPE.fits, devices=("cpu",), backend="gloo", torch=torch_version())
    recipe = replace(RECIPE, configuration=Configuration(hook), fits=fits)
    one = host(tmp_path, "host0", free_port(), "1:2", recipe=recipe, force=False, last_call=1)
    try:
        wait_for(lambda: starts(one), "the first rank")
    finally:
        one.kill()
    assert f"world size 8 in the recipe, 1 here; nodes 2 in the recipe, 1 here; {says}" in one.stderr
    assert starts(one) == [f"of 1: {runs}"]
