"""Summaries of runs for the tests of report.html: a study of a simulated job, with a diagnosis and timelines."""

from __future__ import annotations

import json
import math
import random
from functools import cache
from typing import Any

from study.simulated import SimulatedJob, facts

from autoddp.codec import encode, replace
from autoddp.knobs import AS_WRITTEN, Configuration, Rung
from autoddp.report import summary as summary_of
from autoddp.settings import Objective
from autoddp.study import Observer, StartStudy, Study, StudySettings, TrialFailed
from autoddp.timing.anatomy import STAGES

STEPS = 3
HOSTILE = (
    "<script>alert(1)</script> \"'><img src=x onerror=alert(1)> ]]> --> </style></title></svg></pre> "
    "{{ 7 * 7 }} {% if %} &amp; \x1b[31m \u202e\u2066 \x00 \udcff https://example.org/x.png javascript:alert(1)"
)


def summary(ranks: int = 2, trials: int = 9) -> dict[str, Any]:
    """As it is read from summary.json: with all that the page can show."""
    found = diagnosis(ranks)
    content: dict[str, Any] = json.loads(_study(trials))
    content |= {
        "script": "train.py",
        "run": "20251121-200000-host-4711",
        "network": {"interface": "eth1", "says": "eth1 carries the gradients: 25 Gbit/s"},
        "transports": {"findings": ["NCCL used SHM between GPU0-GPU3, and P2P/NVLink was predicted"]},
        "topology": "host\n└── NUMA 0: CPUs 0-1, 23.5 GiB\n    └── eth0  physical, up\n" + "wide " * 60,
        "recipe_text": '[configuration]\nhook = "bf16"\n',
        "diagnosis": found,
        "timelines": timelines(found["ranks"]),
        "what_if": [{"label": "4 hosts, 25 Gbit/s", "step_ms": 51.23, "efficiency": 0.713}],
    }
    content["job"]["world_size"] = ranks
    for number, trial in enumerate(content["trials"]):
        if trial["seconds"] is not None:
            trial["predicted"] = trial["seconds"] * (0.93 + 0.017 * (number % 9))
    return content


@cache
def _study(trials: int) -> str:
    """Trials and final rounds of one study, more of the former where more are asked for."""
    settings = StudySettings(trials=min(trials, 9), allow=Rung.LOSSY)
    left_out = {"numa_binding": "its CPUs are on one NUMA node"}
    outcome = Study(SimulatedJob(), facts(left_out=left_out), settings, Observer()).run()
    content = json.loads(encode(summary_of(outcome, {"total": 61.0}, "train.autoddp.toml")))
    known = content["trials"]
    content["trials"] = [
        {**known[number % len(known)], "number": number + 1, "seconds": known[number % len(known)]["seconds"]}
        for number in range(trials)
    ]
    if trials > 2:
        content["trials"][2] |= {"state": "failed", "seconds": None, "reason": "RuntimeError: no memory"}
    return json.dumps(content)


def starts(objective: str = "regex:max:rate ([0-9.]+)") -> dict[str, Any]:
    """As it is read from summary.json after `--objective`: one setting gains, one does not, one fails."""
    aim, chance = Objective.parse(objective), random.Random(1)
    slow, fast, fails = (Configuration({"threads": count}) for count in (2, 1, 4))
    numbers = {AS_WRITTEN: 0.1, slow: 0.11, fast: 0.05}

    def measure(configuration: Configuration) -> float:
        if fails["threads"] == configuration.get("threads"):
            raise TrialFailed("RuntimeError: planted")
        return numbers[configuration] * chance.lognormvariate(0, 0.01)

    settings = StudySettings(trials=9, objective=aim)
    described = replace(
        facts(left_out={"malloc": "its steps fill no memory"}), start_settings=(slow, fast, fails), gradient_bytes=0
    )
    outcome = StartStudy(measure, lambda: math.inf, settings, Observer()).run(lambda: described)
    content: dict[str, Any] = json.loads(encode(summary_of(outcome, {"total": 61.0}, "train.autoddp.toml")))
    content |= {"script": "train.py", "run": "20251121-200000-host-4711", "recipe_text": "[env]\n"}
    content |= {"topology": "host\n", "commands": {"autoddp": "autoddp train.py", "torchrun": "torchrun train.py"}}
    return content


def diagnosis(ranks: int) -> dict[str, Any]:
    """The last rank computes longer than the others, and all wait for batches."""
    rows = [stages(number, ranks) for number in range(ranks)]
    step = max(row["step_ms"] for row in rows)
    late = {"cause": "straggler", "ranks": [ranks - 1], "ms": 9.314, "low": 8.827, "high": 9.931, "status": "proved"}
    loader = {"cause": "data_loader", "ranks": [*range(ranks)], "ms": 6.132, "low": 5.741, "high": 6.557}
    return {
        "step_ms": step,
        "samples_per_second": 1234.0,
        "ranks": rows,
        "findings": [
            late | {"text": f"Rank {ranks - 1} computes longer.", "fix": "nvidia-smi -q -d CLOCK"},
            loader | {"status": "proved", "text": "All wait for batches.", "fix": "DataLoader(num_workers=4)"},
            {"cause": "small_batch", "ranks": [], "ms": None, "low": None, "high": None, "status": "suspected"}
            | {"text": "Computing takes less than the latency.", "fix": "a larger batch"},
        ],
        "waterfall": [
            {"cause": "as written", "step_ms": step},
            {"cause": "straggler", "step_ms": step - 9.211},
            {"cause": "data_loader", "step_ms": step - 14.663},
        ],
        "scaling": {"ranks": ranks, "samples_per_second": 1234.0, "of_one": 701.0, "efficiency": 0.88}
        | {"text": "All ranks together give 88 % of what as many would give alone."},
        "not_measured": ["host_device_copy: the job runs on CPUs."],
        "verdict": ["One rank computes 9.31 ms longer in every step.", "Loading batches costs 6.13 ms of every step."],
    }


def stages(rank: int, ranks: int) -> dict[str, Any]:
    late = 9.417 if rank == ranks - 1 and ranks > 1 else 0.0
    waiting = 9.417 - late if ranks > 1 else 0.0
    row = {"data": 6.231, "copy": 0.413, "buffers": 0.827, "forward": 9.733, "backward": 17.719 + late}
    row |= {"exposed": waiting + 8.139, "optimizer": 2.213, "other": 0.917}
    times = {f"{name}_ms": ms + 0.0137 * rank for name, ms in row.items()}
    named = {"rank": rank, "host": f"node{rank // 8}", "waiting_ms": waiting}
    return named | times | {"step_ms": sum(times.values())}


def timelines(ranks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Three steps of each rank, with four buckets that are launched while the gradients are computed."""
    found = []
    for row in ranks:
        now, ends, spans, buckets = 0.0, [], [], []
        for _ in range(STEPS):
            for name in STAGES:
                spans.append({"name": name, "begin": now, "end": now + row[f"{name}_ms"] / 1e3})
                now = spans[-1]["end"]
            back = next(span for span in reversed(spans) if span["name"] == "backward")
            each = (back["end"] - back["begin"]) / 4
            for index in range(4):
                launched = back["begin"] + (index + 1) * each
                buckets.append({"index": index, "bytes": 6 << 20, "launched": launched, "ended": launched + 0.007})
            ends.append(now)
        place = {"rank": row["rank"], "host": row["host"], "began": 0.0001 * row["rank"], "error": 0.0004}
        found.append(place | {"steps": ends, "spans": spans, "buckets": buckets})
    return found


def saying(words: str) -> dict[str, Any]:
    """Every text that a run may take from others is `words`."""
    content = summary()
    content |= dict.fromkeys(("script", "run", "recipe", "topology", "recipe_text"), words)
    content["network"]["says"] = content["transports"]["findings"][0] = content["what_if"][0]["label"] = words
    content["decision"]["why"] = words
    content["job"] |= {"backend": words, "torch": words, "left_out": {words: words}}
    content["job"] |= {key: [words] for key in ("devices", "links", "networks")}
    for one in (*content["trials"], *content["ladder"]):
        one |= {"rung": words, "configuration": {words: words}, "reason": words, "state": words}
    content["decision"]["configuration"] = {words: words}
    found = content["diagnosis"]
    found |= {"verdict": [words] * 3, "not_measured": [words], "scaling": {"text": words}}
    for one in found["findings"]:
        one |= dict.fromkeys(("cause", "status", "text", "fix"), words)
    for one in found["waterfall"]:
        one["cause"] = words
    for row, timeline in zip(found["ranks"], content["timelines"], strict=True):
        row["host"] = timeline["host"] = words
        timeline["spans"] = [{**span, "name": words} for span in timeline["spans"]]
    return content
