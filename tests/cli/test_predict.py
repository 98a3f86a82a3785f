"""`autoddp predict` as a user types it: from the summary of a whole study of a simulated job, and from bad files."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import forks
import pytest
from launchers import BRIEF, ROOT, environment, start

from autoddp.cli.predict import run
from autoddp.codec import convert, encode
from autoddp.errors import UsageError
from autoddp.knobs import AS_WRITTEN, Configuration
from autoddp.predict import Profile, step_seconds
from autoddp.recipe import Evidence, Fits, MadeBy, Recipe, save

MIB, MIB_PER_SECOND, LATENCY = 24, 100.0, 0.001
COMPUTING = 0.030
SEGMENT = {"from_bytes": 0.0, "alpha_seconds": LATENCY, "seconds_per_byte": 1 / (MIB_PER_SECOND * 2**20)}
PROFILE: dict[str, Any] = {  # 24 gradients of 1 MiB each, over a link of 100 MiB/s between two hosts
    "world_size": 2,
    "nodes": 2,
    "backend": "gloo",
    "ddp_arguments": {},
    "gradients": [{"shape": [512, 512], "bytes": 2**20}] * MIB,
    "fixed": 0.002,
    "before": 0.008,
    "backward": 0.020,
    "ready": [0.020 * (MIB - place) / MIB for place in range(MIB)],
    "link": {
        "segments": [SEGMENT],
        "residuals": [],
    },
    "coefficients": {"burst": 0.0, "stretch": 1e-9, "copying": 0.0, "rounding": 0.0, "low_rank": 0.0, "call": 0.0},
    "measured": 0.253,
    "typical_error": 0.03,
    "large_error": 0.09,
}
SUMMARY: dict[str, Any] = {
    "schema": 1,
    "recipe": "train.autoddp.toml",
    "profile": PROFILE,
    "trials": [
        {"configuration": {"bucket_cap_mb": 8.0}, "seconds": 0.26, "state": "measured"},
        {"configuration": {"hook": "bf16", "bucket_cap_mb": 4.0}, "seconds": 0.13, "state": "measured"},
    ],
    "decision": {"configuration": {"hook": "bf16", "bucket_cap_mb": 4.0}, "why": "the best"},
}
RECIPE = Recipe(
    made_by=MadeBy("0.1.0", "2.13.0", "3.11.7", "2026-11-20T21:00:00Z"),
    fits=Fits(2, 2, "gloo", ("cpu",), "2.13.0", MIB * 2**20, "0123456789abcdef"),
    configuration=Configuration({"bucket_cap_mb": 50}),
    evidence=Evidence(31.21, 0.384, 20, 6, 1234, "the exact rung wins", run="20261122-1"),
)


@pytest.fixture
def summary(tmp_path: Path) -> Path:
    place = tmp_path / ".autoddp/20261122-1"
    place.mkdir(parents=True)
    (place / "summary.json").write_text(encode(SUMMARY))
    return place / "summary.json"


@pytest.fixture
def answer(summary: Path, capsys: Any) -> Callable[..., dict[str, Any]]:
    def ask(*words: str) -> dict[str, Any]:
        assert run([str(summary), *words, "--json"]) == 0
        (line,) = capsys.readouterr().out.splitlines()
        found: dict[str, Any] = json.loads(line)
        return found

    return ask


def step(found: dict[str, Any], name: str = "as written") -> float:
    return next(row["step_ms"] / 1e3 for row in found["rows"] if row["name"] == name)


def test_where_it_was_measured(answer: Callable[..., dict[str, Any]]) -> None:
    found = answer()
    assert found["extrapolated"] == []
    assert (found["nodes"], found["ranks"]) == (2, 2)
    assert [row["name"] for row in found["rows"]] == ["as written", "as tuned"]
    assert [row["measured_ms"] for row in found["rows"]] == [253.0, 130.0]
    # The first bucket has 1 MiB and arrives early; the other one has the rest, and is ready when all gradients are.
    assert step(found) == pytest.approx(COMPUTING + LATENCY + (MIB - 1) / MIB_PER_SECOND)
    assert found["rows"][0]["efficiency"] == pytest.approx(COMPUTING / step(found))


def test_more_nodes_send_more_bytes(answer: Callable[..., dict[str, Any]]) -> None:
    two, four = answer(), answer("--nodes", "4")
    assert four["ranks"] == 4
    assert step(two) == pytest.approx(COMPUTING + LATENCY + (MIB - 1) / MIB_PER_SECOND)
    assert step(four) == pytest.approx(COMPUTING + 3 * LATENCY + 1.5 * (MIB - 1) / MIB_PER_SECOND)
    assert four["extrapolated"] == ["4 ranks in place of 2: a ring, and computing as long as it was"]
    assert all(row["measured_ms"] is None for row in four["rows"])


def test_another_link(answer: Callable[..., dict[str, Any]]) -> None:
    found = answer("--link", "1Gbit", "--latency", "100us")
    assert step(found) == pytest.approx(COMPUTING + 0.0002 + (MIB - 1) * 2**20 / (0.956 * 125e6))
    assert len(found["extrapolated"]) == 2
    assert step(answer("--link", "100Gbit")) == pytest.approx(COMPUTING, rel=0.2)


def test_another_batch(answer: Callable[..., dict[str, Any]]) -> None:
    """Computing takes longer, the link does not; the optimizer does not either."""
    found = answer("--batch-times", "100")
    assert found["rows"][0]["computing_ms"] == pytest.approx(2.002e3 + 0.8e3)
    assert found["rows"][0]["efficiency"] > 0.9


def test_other_settings(answer: Callable[..., dict[str, Any]]) -> None:
    found = answer("--cap", "24", "--hook", "powersgd:2")
    (asked,) = [row for row in found["rows"] if row["name"] == "as asked"]
    assert asked["configuration"] == {"bucket_cap_mb": 24.0, "hook": "powersgd", "powersgd_rank": 2}
    assert asked["step_ms"] < 0.5 * found["rows"][0]["step_ms"]
    assert found["extrapolated"] == ["the hook powersgd: no trial has measured it, so what it computes is a guess"]


def test_one_rank_reduces_nothing(answer: Callable[..., dict[str, Any]]) -> None:
    found = answer("--nodes", "1")
    assert [row["step_ms"] for row in found["rows"]] == [pytest.approx(COMPUTING * 1e3)] * 2
    assert found["extrapolated"] == ["one rank reduces nothing, and computing as long as it was"]


def test_a_link_that_nobody_knows(summary: Path) -> None:
    with pytest.raises(UsageError, match=r"ran on 2 nodes, .*on one node is not known; say its rate"):
        run([str(summary), "--nodes", "1", "--nproc-per-node", "2"])
    assert run([str(summary), "--nodes", "1", "--nproc-per-node", "2", "--link", "10GB/s"]) == 0


def other(summary: Path, **profile: Any) -> Path:
    """A summary beside it, of a profile in which that is different."""
    place = summary.with_name("other.json")
    place.write_text(encode(SUMMARY | {"profile": PROFILE | profile}))
    return place


def asked(place: Path, words: str, capsys: Any) -> dict[str, Any]:
    assert run([str(place), *words.split(), "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    return found


def test_as_many_ranks_on_more_nodes(summary: Path, capsys: Any) -> None:
    one_node = other(summary, nodes=1)
    with pytest.raises(UsageError, match="it ran on one node, so the link between 2 ranks on 2 nodes is not known"):
        run([str(one_node), "--nodes", "2", "--nproc-per-node", "1"])
    found = asked(one_node, "--nodes 2 --nproc-per-node 1 --link 1Gbit", capsys)
    assert (found["nodes"], found["ranks"]) == (2, 2)
    assert step(found) == pytest.approx(COMPUTING + LATENCY + (MIB - 1) * 2**20 / (0.956 * 125e6))
    assert [line.split(":")[0] for line in found["extrapolated"]] == [
        "another number of ranks on a node",
        "a link of 1 Gbit/s",
        "the latency of this link is not known, and that of one node is used",
    ]
    eight = other(summary, nodes=4, world_size=8)
    found = asked(eight, "--nodes 8 --nproc-per-node 1", capsys)
    assert (found["nodes"], found["ranks"]) == (8, 8)
    assert len(found["extrapolated"]) == 1
    assert all(row["measured_ms"] is None for row in found["rows"])


def test_a_ring_over_nodes_is_no_faster_than_inside_one(summary: Path, capsys: Any) -> None:
    """Two ranks on one node reach 100 MiB/s: on four nodes the ring passes such links too, however fast the network."""
    one_node = other(summary, nodes=1)
    found = asked(one_node, "--nodes 4 --link 100Gbit", capsys)
    assert (found["nodes"], found["ranks"]) == (4, 8)
    assert step(found) == pytest.approx(COMPUTING + 7 * LATENCY + 1.75 * (MIB - 1) / MIB_PER_SECOND)
    assert "inside a node 0.839 Gbit/s, as on one node: the ring is no faster than this" in found["extrapolated"]
    slow = asked(one_node, "--nodes 4 --link 100Mbit", capsys)
    assert not any("inside a node" in line for line in slow["extrapolated"])
    assert step(slow) > 5 * step(found)


def test_nodes_with_different_numbers_of_ranks(summary: Path, capsys: Any) -> None:
    """Two ranks on one host and one on the other: where nothing is said they stay three."""
    uneven = other(summary, world_size=3)
    here = asked(uneven, "", capsys)
    assert (here["ranks"], here["extrapolated"]) == (3, [])
    assert here["rows"][0]["measured_ms"] == 253.0
    assert asked(uneven, "--nodes 4", capsys)["ranks"] == 6
    assert asked(uneven, "--nodes 4 --nproc-per-node 2", capsys)["ranks"] == 8


def test_efficiency_is_the_part_that_is_computed_under_these_settings(summary: Path, capsys: Any) -> None:
    """Threads that halve computing leave the same reductions to wait for."""
    coefficients = PROFILE["coefficients"] | {"computing": {"threads=4": 0.5}}
    place = other(summary, coefficients=coefficients)
    found = json.loads(place.read_text())
    place.write_text(encode(found | {"decision": {"configuration": {"threads": 4}}}))
    written, tuned = asked(place, "", capsys)["rows"]
    assert tuned["computing_ms"] == pytest.approx(written["computing_ms"] / 2)
    assert tuned["efficiency"] == pytest.approx(tuned["computing_ms"] / tuned["step_ms"])
    assert tuned["efficiency"] < written["efficiency"]
    one = asked(place, "--nodes 1", capsys)["rows"]
    assert [row["efficiency"] for row in one] == [1.0, 1.0]
    assert one[1]["step_ms"] == pytest.approx(one[0]["step_ms"] / 2)


def test_a_hook_that_was_measured_otherwise_is_extrapolated(summary: Path, capsys: Any) -> None:
    found = json.loads(other(summary, hooks_are_measured=True).read_text())
    refused = {"configuration": {"hook": "powersgd", "powersgd_rank": 1}, "seconds": float("inf"), "state": "refused"}
    place = summary.with_name("refused.json")
    place.write_text(encode(found | {"trials": [*SUMMARY["trials"], refused]}))
    assert asked(place, "--hook powersgd", capsys)["extrapolated"] == []
    assert asked(place, "--hook bf16", capsys)["extrapolated"] == []
    (line,) = asked(place, "--hook powersgd:8", capsys)["extrapolated"]
    assert line == 'hook="powersgd" powersgd_rank=8: trials have measured this hook with other settings only'
    (line,) = asked(place, "--hook fp16", capsys)["extrapolated"]
    assert line == "the hook fp16: no trial has measured it; what it computes was measured by itself"


def test_what_the_job_cannot_have_is_said(summary: Path, capsys: Any) -> None:
    place = summary.with_name("left.json")
    place.write_text(encode(SUMMARY | {"job": {"left_out": {"hook": "the ranks part", "bucket_cap_mb": "compiled"}}}))
    assert asked(place, "", capsys)["extrapolated"] == []
    assert asked(place, "--cap 8 --latency 0", capsys)["extrapolated"][-1:] == [
        "autoddp would leave bucket_cap_mb as it is in this job: compiled"
    ]
    assert asked(place, "--hook bf16", capsys)["extrapolated"] == [
        "autoddp would leave hook as it is in this job: the ranks part"
    ]


def test_a_step_of_several_backward_passes(summary: Path, capsys: Any) -> None:
    """In each of them the same gradients travel; deferred, they do so once."""
    place = other(summary, passes=4, reductions=4)
    found = json.loads(place.read_text())
    place.write_text(encode(found | {"decision": {"configuration": {"defer_reductions": 4}}}))
    written, tuned = asked(place, "", capsys)["rows"]
    travel = LATENCY + (MIB - 1) / MIB_PER_SECOND
    computing = 0.002 + 4 * 0.028
    assert written["step_ms"] / 1e3 == pytest.approx(computing + 4 * travel)
    assert tuned["step_ms"] / 1e3 == pytest.approx(computing + travel)
    assert run([str(place)]) == 0
    assert capsys.readouterr().out.splitlines()[:2] == [
        "2 ranks on 2 nodes, of which each computes 114 ms per step",
        "a step has 4 backward passes; as written, each of them reduces",
    ]
    no_sync = other(summary, passes=4, reductions=1)
    assert asked(no_sync, "", capsys)["rows"][0]["step_ms"] == pytest.approx(tuned["step_ms"])
    assert run([str(no_sync)]) == 0
    assert "a step has 4 backward passes; as written, 1 of them reduces" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("told", "why"),
    [
        ({"why_no_profile": "steps differ; give each as many"}, "steps differ; give each as many"),
        ({"why_no_profile": "two\nlines \x1b[31m"}, "two"),
        ({"why_no_profile": ["no text"]}, "no text"),
        ({}, "tuning ended before any step was recorded; tune again"),
    ],
)
def test_why_a_run_cannot_be_predicted(summary: Path, told: dict[str, Any], why: str) -> None:
    place = summary.with_name("refused.json")
    place.write_text(encode(SUMMARY | {"profile": None} | told))
    with pytest.raises(UsageError) as refused:
        run([str(place)])
    assert f"{place}: its run cannot be predicted: " in str(refused.value)
    assert why in str(refused.value)
    assert str(refused.value).isprintable()
    assert refused.value.exit_code == 2


def test_errors_of_which_one_is_not_known(summary: Path, capsys: Any) -> None:
    place = other(summary, large_error=None)
    assert run([str(place)]) == 0
    assert "None" not in capsys.readouterr().out


def test_a_table(summary: Path, capsys: Any) -> None:
    assert run([str(summary.parent), "--nodes", "3"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "3 ranks on 3 nodes, of which each computes 30.0 ms per step"
    assert lines[2].split() == ["ms", "per", "step", "efficiency", "measured", "configuration"]
    assert lines[-2:] == [
        "extrapolated: 3 ranks in place of 2: a ring, and computing as long as it was",
        "in tuning half of its predictions were within 3.0 %, nine of ten within 9.0 %",
    ]


def test_a_recipe_leads_to_its_run(summary: Path, tmp_path: Path, capsys: Any) -> None:
    recipe = summary.parents[2] / "train.autoddp.toml"
    save(RECIPE, recipe)
    assert run([str(recipe), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["summary"] == str(summary)
    elsewhere = tmp_path / "state"  # where the current folder takes no files
    elsewhere.mkdir()
    (tmp_path / ".autoddp").rename(elsewhere / "runs")
    save(RECIPE, elsewhere / "train.autoddp.toml")
    assert run([str(elsewhere / "train.autoddp.toml"), "--json"]) == 0
    capsys.readouterr()
    (elsewhere / "runs").rename(tmp_path / ".autoddp")
    summary.unlink()
    with pytest.raises(UsageError, match="a recipe has too little, and its run's folder 20261122-1 is not in"):
        run([str(recipe)])


def test_a_real_run(tmp_path: Path, capsys: Any) -> None:
    """Two gloo ranks on this machine: every trial is predicted, and the run's folder is what `predict` reads."""
    job = [ROOT / "benchmarks/jobs/mlp.py", "--width", "256", "--batch", "4", "--steps", "100000"]
    words = ["--nproc-per-node", "2", "--trials", "4", "--all-trials", "--tune-only", "--allow", "lossy"]
    words += ["--diagnose-budget", "0"]
    # With more cores than ranks, a trial would go to a number of threads, and what that gives is not predicted.
    ended = start(BRIEF, tmp_path / "run", [*words, *map(str, job)], {"OMP_NUM_THREADS": "1"}).wait()
    assert ended.returncode == 0, ended.stderr[-3000:]
    (place,) = (tmp_path / "run").glob(".autoddp/2*/summary.json")
    found = json.loads(place.read_text())
    tried = [trial for trial in found["trials"] if trial["seconds"]]
    assert tried
    assert all(trial["predicted"] for trial in tried)
    assert [line["rank"] for line in found["timelines"]] == [0, 1]
    assert len(found["profile"]["gradients"]) == 12
    assert found["profile"]["ready"][-1] < found["profile"]["ready"][0] <= found["profile"]["backward"]
    assert [one["label"] for one in found["what_if"]] == ["a batch twice as large", "a link twice as fast"]
    assert run([str(place.parent), "--json"]) == 0
    (row,) = [row for row in json.loads(capsys.readouterr().out)["rows"] if row["name"] == "as written"]
    assert row["measured_ms"] == pytest.approx(found["baseline"]["seconds"] * 1e3)
    modelled = step_seconds(convert(found["profile"], Profile), AS_WRITTEN)
    assert modelled is not None
    assert row["step_ms"] == pytest.approx(modelled * 1e3)
    recipe = next((tmp_path / "run").glob("*.autoddp.toml"))
    assert run([str(recipe), "--nodes", "2", "--link", "10Gbit"]) == 0


BROKEN = {
    "not JSON": "{",
    "a list": "[]",
    "deep": "[" * 100_000,
    "another object": "{}",
    "no profile": encode(SUMMARY | {"profile": None}),
    "a profile of text": encode(SUMMARY | {"profile": "text"}),
    "an unknown field": encode(SUMMARY | {"profile": PROFILE | {"more": 1}}),
    "a negative time": encode(SUMMARY | {"profile": PROFILE | {"before": -1.0}}),
    "no times": encode(SUMMARY | {"profile": PROFILE | {"ready": []}}),
    "no gradients": encode(SUMMARY | {"profile": PROFILE | {"ready": [], "gradients": []}}),
    "no link": encode(SUMMARY | {"profile": PROFILE | {"link": {"segments": []}}}),
    "no ranks": encode(SUMMARY | {"profile": PROFILE | {"world_size": 0}}),
    "no passes": encode(SUMMARY | {"profile": PROFILE | {"passes": 0, "reductions": 0}}),
    "more reductions than passes": encode(SUMMARY | {"profile": PROFILE | {"passes": 2, "reductions": 3}}),
    "endless passes": encode(SUMMARY | {"profile": PROFILE | {"passes": 10**400}}),
    "NaN": encode(SUMMARY | {"profile": PROFILE | {"backward": float("nan")}}),
    "a coefficient of 0": encode(SUMMARY | {"profile": PROFILE | {"coefficients": {"per_byte": -1.0}}}),
    "an endless time": encode(SUMMARY | {"profile": PROFILE | {"before": float("inf")}}),
    "a time of 1e300": encode(SUMMARY | {"profile": PROFILE | {"before": 1e300}}),
    "a long number of ranks": encode(SUMMARY | {"profile": PROFILE | {"world_size": 10**40, "nodes": 10**40}}),
    "a long size": encode(SUMMARY | {"profile": PROFILE | {"gradients": [{"shape": [2], "bytes": 10**400}] * MIB}}),
    "a long shape": encode(SUMMARY | {"profile": PROFILE | {"gradients": [{"shape": [2**60] * 90, "bytes": 8}] * MIB}}),
    "a shape below 0": encode(SUMMARY | {"profile": PROFILE | {"gradients": [{"shape": [-2, 3], "bytes": 8}] * MIB}}),
    "a link of NaN": encode(
        SUMMARY | {"profile": PROFILE | {"link": {"segments": [{**SEGMENT, "seconds_per_byte": float("nan")}]}}}
    ),
    "an endless latency": encode(
        SUMMARY | {"profile": PROFILE | {"link": {"segments": [{**SEGMENT, "alpha_seconds": float("inf")}]}}}
    ),
    "a latency below 0": encode(
        SUMMARY | {"profile": PROFILE | {"link": {"segments": [{**SEGMENT, "alpha_seconds": -1.0}]}}}
    ),
    "an endless coefficient": encode(SUMMARY | {"profile": PROFILE | {"coefficients": {"sharing": float("inf")}}}),
    "an error of text": encode(SUMMARY | {"profile": PROFILE | {"typical_error": "small"}}),
    "an endless error": encode(SUMMARY | {"profile": PROFILE | {"large_error": float("inf")}}),
    "a huge argument": encode(SUMMARY | {"profile": PROFILE | {"ddp_arguments": {"bucket_cap_mb": "1e308"}}}),
    "a nested argument": encode(
        SUMMARY | {"profile": PROFILE | {"ddp_arguments": {"bucket_cap_mb_list": "[" * 10_000}}}
    ),
    "a nested setting": encode(SUMMARY | {"decision": {"configuration": {"hook": "?"}}}).replace(
        '"?"', "[" * 950 + "]" * 950
    ),
    "seconds of text": encode(SUMMARY | {"trials": [SUMMARY["trials"][0] | {"seconds": "1"}]}),
    "seconds below 0": encode(SUMMARY | {"trials": [SUMMARY["trials"][0] | {"seconds": -1}]}),
    "another schema": encode(SUMMARY | {"schema": 2}),
    "no schema": encode({name: value for name, value in SUMMARY.items() if name != "schema"}),
    "no decision": encode({name: value for name, value in SUMMARY.items() if name != "decision"}),
    "trials are numbers": encode(SUMMARY | {"trials": [1]}),
    "trials are text": encode(SUMMARY | {"trials": "text"}),
    "a decision of text": encode(SUMMARY | {"decision": "text"}),
    "an unknown knob": encode(SUMMARY | {"decision": {"configuration": {"buket_cap_mb": 3}}}),
    "strange arguments": encode(SUMMARY | {"profile": PROFILE | {"ddp_arguments": {"bucket_cap_mb": "<object>"}}}),
    "\x1b[31m": "",
}


@pytest.mark.parametrize("case", list(BROKEN))
def test_a_broken_file_is_one_line(tmp_path: Path, case: str) -> None:
    place = tmp_path / "summary.json"
    place.write_text(BROKEN[case])
    with pytest.raises(UsageError) as refused:
        run([str(place)])
    assert str(refused.value).isprintable()
    assert str(refused.value).startswith("predict: ")
    assert refused.value.exit_code == 2


@pytest.mark.parametrize(
    "words",
    [
        ["--nodes", "0"],
        ["--nodes", "-1"],
        ["--nodes", "two"],
        ["--nodes", "99999999"],
        ["--nproc-per-node", "0"],
        ["--nodes", "1000000", "--nproc-per-node", "1000000"],
        ["--nodes", "1000000", "--nproc-per-node", "2"],
        ["--link", "0Gbit"],
        ["--link", "-5Gbit"],
        ["--link=-5Gbit"],
        ["--link", "25"],
        ["--link", "25 parsecs"],
        ["--link", "9" * 400 + "Gbit"],
        ["--latency", "-1us"],
        ["--latency", "fast"],
        ["--latency", "1000h"],
        ["--latency", "20"],
        ["--cap", "0"],
        ["--cap", "nan"],
        ["--hook", "bf17"],
        ["--hook", "bf16:2"],
        ["--hook", "powersgd:"],
        ["--hook", "powersgd:0"],
        ["--batch-times", "0"],
        ["--batch-times", "inf"],
        ["--nodez", "3"],
        ["another.json"],
    ],
    ids=" ".join,
)
def test_nonsense_is_one_line(summary: Path, words: list[str]) -> None:
    with pytest.raises(UsageError) as refused:
        run([str(summary), *words])
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 1000


@pytest.mark.parametrize("missing", ["nothing.json", "nothing.toml", ".", "long" * 100, f"{'long' * 100}.toml"])
def test_there_is_no_such_file(tmp_path: Path, missing: str) -> None:
    done = forks.run(["-m", "autoddp", "predict", missing], cwd=tmp_path, env=environment())
    assert done.returncode == 2
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("autoddp: error: ")


@pytest.mark.parametrize("content", ["null", "[]", '"x"', "3"])
def test_json_that_is_no_summary(tmp_path: Path, content: str) -> None:
    (tmp_path / "summary.json").write_text(content)
    with pytest.raises(UsageError, match="not the summary of a tuning run"):
        run([str(tmp_path)])


def test_an_empty_name(summary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a variable that is not set: not the summary in the current folder."""
    monkeypatch.chdir(summary.parent)
    with pytest.raises(UsageError, match="the file's name is empty"):
        run([""])


def test_a_pipe_into_which_nobody_writes(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UsageError, match="pipe: not JSON"):
        run([str(tmp_path / "pipe")])


def test_the_page_shows_what_it_prints() -> None:
    assert "autoddp predict" in (ROOT / "docs/predict.md").read_text()
