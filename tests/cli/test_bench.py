"""`autoddp bench` as a user types it: on gloo ranks of this machine, on two hosts with a known link, and mistyped."""

from __future__ import annotations

import functools
import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from launchers import AUTODDP, BRIEF, SCRIPTS, Launch, start, wait_for, whole

from autoddp.attempts.bench_job import MODULE, parse
from autoddp.bench import BenchResult, load_cached
from autoddp.errors import UsageError

BENCH = (*AUTODDP, "bench")
TWO = ["--nproc-per-node", "2"]


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Launch:
    words = [*TWO, "--max-size", "1M", "--budget", "3s", "--json", "--svg", "link.svg"]
    return start(BENCH, tmp_path_factory.mktemp("bench") / "out", words).wait()


def test_one_json_document_on_stdout(ended: Launch) -> None:
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert len(ended.stdout.splitlines()) == 1
    result = BenchResult.from_plain(json.loads(ended.stdout))
    assert (result.facts.world_size, result.facts.nodes, result.facts.backend) == (2, 1, "gloo")
    assert result.facts.devices == ("cpu",)
    (sweep,) = result.sweeps
    assert (sweep.layout, sweep.ranks) == ("within", 2)
    assert sweep.points[0].bytes == 1024
    assert all(0 < p.low <= p.seconds <= p.high and p.repetitions >= 5 for p in sweep.points)
    assert sweep.stopped or sweep.points[-1].bytes == 2**20
    assert sweep.model is not None
    assert sweep.model.seconds(2**20) >= sweep.model.seconds(1024) > 0
    assert ("fp16", 0) in {(cost.hook, cost.rank) for cost in result.hooks}


def test_progress_is_one_plain_line_per_size(ended: Launch) -> None:
    progress = [line for line in ended.stderr.splitlines() if line.startswith("autoddp: bench: within")]
    assert len(progress) == len(json.loads(ended.stdout)["sweeps"][0]["points"])
    assert "Traceback" not in ended.stderr
    assert "\x1b" not in ended.stderr


def test_the_result_is_kept(ended: Launch) -> None:
    result = BenchResult.from_plain(json.loads(ended.stdout))
    assert load_cached(ended.folder / ".autoddp", result.facts) == result
    assert (ended.folder / "link.svg").read_text().startswith("<svg ")
    assert sorted(path.name for path in ended.folder.iterdir()) == [".autoddp", "link.svg"]


@pytest.mark.parametrize("device", [whole(""), "TCP"])
def test_tuning_uses_what_was_measured_in_the_same_world(ended: Launch, tmp_path: Path, device: str) -> None:
    words = [*TWO, "--trials", "1", "--tune-only", "--diagnose-budget", "0"]
    words += ["--output", str(ended.folder / ".autoddp"), SCRIPTS / "plain.py"]
    variables = {"TUNED_TIMES_LONGER": "12", **({"GLOO_DEVICE_TRANSPORT": device} if device else {})}
    launch = start(BRIEF, tmp_path / "out", list(map(str, words)), variables).wait()
    assert launch.returncode == 0, launch.stderr[-3000:]
    newest = max((ended.folder / ".autoddp").glob("2*/summary.json"), key=lambda path: path.stat().st_mtime)
    link = json.loads(newest.read_text())["job"]["link"]
    (sweep,) = json.loads(ended.stdout)["sweeps"]
    assert link == (None if device else sweep["model"])
    assert ("what autoddp bench measured" in (newest.parent / "tuning.log").read_text()) is not bool(device)


def test_nothing_is_left_running(ended: Launch) -> None:
    assert ended.processes() == []


@pytest.mark.parametrize("number", [signal.SIGINT, whole(signal.SIGTERM), signal.SIGKILL])
def test_a_bench_that_is_ended_early_leaves_no_folder(tmp_path: Path, number: signal.Signals) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    launch = start(BENCH, tmp_path / "out", [*TWO, "--budget", "100s"], {"TMPDIR": str(temporary)})
    try:
        wait_for(lambda: "autoddp: bench: within" in launch.stderr, "the first size")
        assert list(temporary.glob("autoddp-bench-*"))
        launch.process.send_signal(number)
        launch.process.wait(60)
        wait_for(lambda: not list(temporary.glob("autoddp-*")), "the end of the folder")
        if number == signal.SIGINT:  # which elastic passes on to the ranks
            assert "Traceback" not in launch.stderr
    finally:
        launch.kill()


def test_the_backend_that_is_not_there(tmp_path: Path) -> None:
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if torch.cuda.is_available() else {}  # with it, ranks are new processes
    launch = start(BENCH, tmp_path / "out", [*TWO, "--backend", "nccl", "--json"], hidden).wait()
    assert launch.returncode == 2
    assert launch.stdout == ""
    line = "autoddp: error: bench: --backend nccl needs a GPU for every rank, and rank 0 has none; use gloo"
    assert launch.stderr.splitlines()[-1] == line
    assert "Traceback" not in launch.stderr


MISTYPED = {
    # what is typed, what the line says besides the prefix
    "a world of one": ([], "with one rank there is nothing to measure; start two ranks: --nproc-per-node 2"),
    "a script": ([*TWO, "train.py"], "takes no script, but got 'train.py'"),
    "a script after --": ([*TWO, "--", "train.py"], "takes no script"),
    "unknown": ([*TWO, "--max-sise", "1M"], "unknown option --max-sise (did you mean '--max-size'?)"),
    "another launcher's": ([*TWO, "--gpus", "2"], "unknown option --gpus (did you mean '--nproc-per-node'?)"),
    "budget": ([*TWO, "--budget", "soon"], "--budget 'soon': must be a duration above 0, e.g. --budget 20s"),
    "no budget": ([*TWO, "--budget", "0"], "--budget '0': must be a duration above 0"),
    "size": ([*TWO, "--max-size", "1X"], "--max-size '1X': must be a size of 1K or more, e.g. --max-size 64M"),
    "too small": ([*TWO, "--max-size", "512"], "--max-size '512': must be a size of 1K or more"),
    "factor": ([*TWO, "--factor", "1"], "--factor '1': must be a whole number of 2 or more"),
    "backend": ([*TWO, "--backend", "mpi"], "--backend: invalid choice: 'mpi'"),
    "missing value": ([*TWO, "--svg"], "--svg: expected one argument"),
    "torchrun's": (["--nproc-per-node", "many"], "--nproc-per-node many: Unsupported nproc_per_node value: many"),
    "no ranks": (["--nproc-per-node", "0"], "--nproc-per-node 0: must be 1 or more"),
    "nodes in words": ([*TWO, "--nnodes", "two"], "--nnodes two: must be 1 or more, or a range such as 1:4"),
    "for scripts": ([*TWO, "--no-python"], "--no-python and --run-path are for scripts"),
}


@pytest.mark.parametrize("name", MISTYPED)
def test_mistyped(name: str) -> None:
    words, says = MISTYPED[name]
    with pytest.raises(UsageError) as caught:
        parse(words)
    assert str(caught.value).startswith("bench: ")
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("words", [["--svg", "nowhere/link.svg"], ["--output", "a_file"]])
def test_places_are_looked_at_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str]) -> None:
    from autoddp.cli import bench

    monkeypatch.chdir(tmp_path)
    Path("a_file").write_text("")
    with pytest.raises(UsageError, match="cannot be written"):
        bench.run([*TWO, *words])


def test_no_other_file_is_replaced_by_the_drawing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from autoddp.cli import bench

    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("import torch\n")
    with pytest.raises(UsageError, match="not a drawing, so it is not replaced"):
        bench.run([*TWO, "--svg", "train.py"])
    assert Path("train.py").read_text() == "import torch\n"


def test_torchruns_words_are_torchruns() -> None:
    words = ["--nnodes", "2", "--rdzv-backend", "c10d", "--budget", "1m", "--rdzv-endpoint", "h0:29400", *TWO, "--json"]
    request = parse([*words, "--max-size", "64M", "--factor=4", "--backend", "gloo"])
    assert (request.torchrun.nnodes, request.torchrun.rdzv_endpoint) == ("2", "h0:29400")
    assert request.torchrun.training_script == MODULE
    assert request.torchrun.module
    found = request.settings
    assert (found.budget, found.largest, found.factor, found.backend) == (60.0, 2**26, 4, "gloo")
    assert request.json
    assert request.svg is None


def on_all(lab: Any, parent: Path, *words: str) -> list[Launch]:
    """The same command on every host, to the end."""
    meet = ["--nnodes", str(len(lab)), "--rdzv-backend", "c10d", "--rdzv-endpoint", f"{lab.address(0)}:29411"]
    launches = [
        start(
            BENCH,
            parent / f"host{host}",
            [*meet, "--local-addr", lab.address(host), *words],
            {"OMP_NUM_THREADS": "1"},
            popen=functools.partial(lab.popen, host),
        )
        for host in range(len(lab))
    ]
    return [launch.wait() for launch in launches]


@pytest.mark.lab
@pytest.mark.whole
def test_two_hosts_see_the_rate_of_their_link(lab: Any, tmp_path: Path) -> None:
    launches = on_all(
        lab(hosts=2, rate="1gbit"), tmp_path, "--max-size", "16M", "--factor", "4", "--budget", "15s", "--json"
    )
    assert [launch.returncode for launch in launches] == [0, 0], launches[0].stderr[-3000:]
    first, second = (BenchResult.from_plain(json.loads(launch.stdout)) for launch in launches)
    assert first == second  # each host prints and keeps the same
    (sweep,) = first.sweeps
    assert (sweep.layout, sweep.ranks) == ("between", 2)
    last = sweep.points[-1]
    assert last.bytes >= 2**22
    assert last.bytes / last.seconds / 1e9 == pytest.approx(0.125, rel=0.2)


@pytest.mark.lab
@pytest.mark.whole
def test_two_hosts_with_two_ranks_have_three_layouts(lab: Any, tmp_path: Path) -> None:
    launches = on_all(
        lab(hosts=2, rate="200mbit"), tmp_path, *TWO, "--max-size", "256K", "--factor", "4", "--budget", "9s", "--json"
    )
    assert [launch.returncode for launch in launches] == [0, 0], launches[0].stderr[-3000:]
    plain = json.loads(launches[0].stdout)
    assert [(sweep["layout"], sweep["ranks"]) for sweep in plain["sweeps"]] == [
        ("within", 2),
        ("between", 2),
        ("all", 4),
    ]
    within, between, _ = (sweep["points"][-1]["busbw"] for sweep in plain["sweeps"])
    assert within > 2 * between
