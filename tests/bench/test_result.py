"""Results in JSON, in the cache, as tables and as a drawing."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path

import pytest

from autoddp.bench import BenchResult, HookCost, LinkFacts, Point, Sweep, busbw, fit, load_cached, sizes, store
from autoddp.bench.result import backend_variables, folder
from autoddp.report.bench_svg import svg
from autoddp.report.bench_tables import tables

FACTS = LinkFacts(4, 2, "gloo", ("cpu",), "2.13.0", {"GLOO_SOCKET_IFNAME": "eth0"})


def made(layout: str, ranks: int, beta: float, largest: int = 2**20) -> Sweep:
    points = tuple(Point(s, 1e-4 + s / beta, 0.9e-4 + s / beta, 1.2e-4 + s / beta, 50) for s in sizes(largest))
    model = fit([(p.bytes, p.seconds) for p in points]) if len(points) > 1 else None
    return Sweep(
        layout, ranks, points, "" if model else "stopped before 2.0 KiB: it needs about 9 s, 1 s are left", model
    )


RESULT = BenchResult(
    facts=FACTS,
    sweeps=(made("within", 2, 4e9), made("between", 2, 1e8, 1024), made("all", 4, 1e8)),
    hooks=(
        HookCost("fp16", 0, Point(2**18, 1e-4, 1e-4, 1e-4, 9)),
        HookCost("powersgd", 2, Point(2**18, 3e-4, 3e-4, 3e-4, 9)),
    ),
    made_by={"autoddp": "0.1.0", "date": "2025-11-20T21:00:00Z"},
)


def test_json_round_trip() -> None:
    plain = json.loads(json.dumps(RESULT.plain(), allow_nan=False))
    assert BenchResult.from_plain(plain) == RESULT
    last = plain["sweeps"][2]["points"][-1]
    assert last["busbw"] == pytest.approx(busbw(last["bytes"], last["seconds"], 4))
    assert last["busbw"] == pytest.approx(1.5 * last["algbw"])


def test_the_cache(tmp_path: Path) -> None:
    assert load_cached(tmp_path, FACTS) is None
    place = store(tmp_path, RESULT)
    assert place.parent == folder(tmp_path)
    assert load_cached(tmp_path, FACTS) == RESULT
    newer = replace(RESULT, made_by={"autoddp": "0.2.0", "date": "2025-11-21T21:00:00Z"})
    assert store(tmp_path, newer) == place
    assert load_cached(tmp_path, FACTS) == newer
    assert list(folder(tmp_path).glob("[!.]*")) == [place]


def test_git_does_not_see_results(tmp_path: Path) -> None:
    """`git add -A` in the user's project took them, where no run of tuning had made the folder."""
    ignore = store(tmp_path, RESULT).with_name(".gitignore")
    assert ignore.read_text() == "*\n"
    ignore.write_text("!*.json\n")
    store(tmp_path, RESULT)
    assert ignore.read_text() == "!*.json\n"


@pytest.mark.parametrize(
    "change",
    [
        {"world_size": 8},
        {"nodes": 4},
        {"backend": "nccl"},
        {"devices": ("NVIDIA H100",)},
        {"torch": "2.12.0"},
        {"variables": {"GLOO_SOCKET_IFNAME": "eth1"}},
        {"variables": {}},
    ],
)
def test_another_world_is_another_file(tmp_path: Path, change: dict[str, object]) -> None:
    other = replace(FACTS, **change)  # type: ignore[arg-type]
    store(tmp_path, RESULT)
    assert other.key != FACTS.key
    assert load_cached(tmp_path, other) is None


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"schema": 99}', '{"schema": 1, "facts": 3}'])
def test_a_damaged_file_is_no_result(tmp_path: Path, text: str) -> None:
    store(tmp_path, RESULT).write_text(text)
    assert load_cached(tmp_path, FACTS) is None


def test_variables_that_steer_the_backend() -> None:
    environment = {"NCCL_ALGO": "Ring", "NCCL_DEBUG_SUBSYS": "ALL", "TORCH_NCCL_X": "1", "PATH": "/bin", "GLOO_A": "b"}
    assert backend_variables(environment) == {"GLOO_A": "b", "NCCL_ALGO": "Ring"}


def test_tables() -> None:
    lines = tables(RESULT).splitlines()
    assert lines[0] == "4 ranks on 2 nodes, gloo, cpu, torch 2.13.0: all-reduce of float32, in place"
    assert lines[2] == "within: 2 ranks"
    assert lines[3].split() == [
        "size",
        "time",
        "µs",
        "99",
        "%",
        "interval",
        "algbw",
        "GB/s",
        "busbw",
        "GB/s",
        "model",
        "off",
        "by",
    ]
    assert lines[4].split()[:6] == ["1.0", "KiB", "100.3", "90.3", "to", "120.3"]
    assert "  from 0 B: 100.0 µs + bytes / 4 GB/s" in lines
    assert "stopped before 2.0 KiB: it needs about 9 s, 1 s are left" in lines
    assert lines[-3:] == ["hook             256.0 KiB", "fp16                  0.10", "powersgd rank 2       0.30"]


def test_the_drawing() -> None:
    root = ElementTree.fromstring(svg(RESULT))
    tag = "{http://www.w3.org/2000/svg}"
    dots = root.findall(f"{tag}circle")
    assert len(dots) == sum(len(sweep.points) for sweep in RESULT.sweeps)
    lines = root.findall(f"{tag}polyline")
    assert len(lines) == 2 * len(RESULT.sweeps) - 1  # a single size has no model
    box = tuple(map(float, root.attrib["viewBox"].split()[2:]))
    for line in lines:
        for place in line.attrib["points"].split():
            x, y = map(float, place.split(","))
            assert 0 <= x <= box[0]
            assert 0 <= y <= box[1]
    words = {text.text for text in root.findall(f"{tag}text")}
    assert {
        "within (2 ranks)",
        "between (2 ranks)",
        "all (4 ranks)",
        "model",
        "message size per rank",
        "1 KiB",
    } <= words
    assert "http" not in svg(RESULT).replace("http://www.w3.org/2000/svg", "")  # needs nothing from outside
