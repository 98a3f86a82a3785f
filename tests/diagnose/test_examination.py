"""Causes planted in a job of arithmetic: the right one comes first, on the right ranks, at the right price."""

from __future__ import annotations

import random
import re
import statistics
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "study"))

from slow_job import MS, Failed, Over, SlowJob

from autoddp.codec import replace
from autoddp.diagnose import CAUSES, Diagnosis, Examination, Finding, Surroundings
from autoddp.diagnose.causes import suspicions
from autoddp.diagnose.events import priced_by_events
from autoddp.diagnose.evidence import Evidence, joined
from autoddp.diagnose.examination import told_apart
from autoddp.diagnose.experiments import Events
from autoddp.knobs import AS_WRITTEN
from autoddp.knobs.micro_batches import CHANGES_GRADIENTS, DISCARDS_GRADIENTS, FINDS_UNUSED, READS_GRADIENTS
from autoddp.timing import STAGES, RankSteps
from autoddp.units import milliseconds
from autoddp.wire import AS_IT_IS


def examined(job: SlowJob, budget: float = 90.0) -> Diagnosis:
    return Examination(job, Surroundings(job.facts), budget, Failed, Over).run()


def uneven(rank: int, step: int) -> int:
    return 500 + (step * 7919 + rank * 104729) % 1000


def test_bytes_travel_within_ddps_process_group() -> None:
    whole, halves = (Surroundings(SlowJob(ranks=4, more={"ranks_per_group": ranks}).facts) for ranks in (0, 2))
    assert (whole.travels(100.0), halves.travels(100.0)) == (150.0, 100.0)


BETWEEN: dict[str, Any] = {"nodes": 2, "gradient_bytes": 25_000_000}  # 20 ms at 10 Gbit/s
PASSES = {"micro_batches": 4.0, "knobs": ("defer_reductions",)}
MANY = {"find_unused_parameters": True}
PLANTED: dict[str, tuple[dict[str, Any], str, tuple[int, ...], float]] = {
    "all loaders": ({"data": 10.0}, "data_loader", (0, 1), 10.0),
    "a loader": ({"data": [0.1, 10.0]}, "data_loader", (1,), 9.9),
    "slow workers": ({"data": 10.0, "from_workers": 4.0}, "data_loader", (0, 1), 6.0),
    "workers that do not help": ({"data": 10.0, "from_workers": 9.9}, "data_loader", (0, 1), 10.0),
    "a small loader": ({"data": 1.0}, "data_loader", (0, 1), 1.0),
    "straggler": ({"forward": [5.0, 15.0]}, "straggler", (1,), 10.0),
    "straggler of four": ({"backward": [10, 10, 14, 10], "ranks": 4}, "straggler", (2,), 4.0),
    "uneven": ({"sizes": uneven}, "uneven_batches", (0, 1), 2.6),
    "work that depends on the data": (
        {"hidden": lambda rank, batch: 10.0 * ((rank + batch) % 2)},
        "uneven_work",
        (0, 1),
        5.0,
    ),
    "communication": ({"transfer": 12.0}, "exposed_communication", (0, 1), 12.0),
    "no overlap": (
        {"transfer": 12.0, "overlaps": 0.2, "more": {"ddp_arguments": {"bucket_cap_mb": "2000"}}},
        "no_overlap",
        (0, 1),
        9.6,
    ),
    "needless reductions": ({"transfer": 12.0, "more": PASSES}, "needless_reductions", (0, 1), 9.0),
    "slow link": ({"transfer": 100.0, "more": BETWEEN | {"network_gbps": 10.0}}, "slow_link", (0, 1), 80.0),
    "slow link of unknown rate": ({"transfer": 800.0, "more": BETWEEN}, "slow_link", (0, 1), 600.0),
    # 50 ms travel while the ranks compute. The network that is due takes 20 ms in all: it gives 130 to 150.
    "slow link in part": (
        {"transfer": 150.0, "link": 4 / 3, "more": BETWEEN | {"network_gbps": 10.0}},
        "slow_link",
        (0, 1),
        135.0,
    ),
    "link as it should be": ({"transfer": 250.0, "more": BETWEEN}, "exposed_communication", (0, 1), 250.0),
    "unused": ({"unused": 3.0, "more": MANY}, "find_unused_parameters", (0, 1), 3.0),
    "buffers": ({"buffers": 6.0, "more": {"buffer_bytes": 2**20}}, "buffer_broadcast", (0, 1), 6.0),
    "threads": ({"oversubscribed": 2.0, "threads": 8}, "threads_oversubscribed", (0, 1), 15.0),
    "a rank that sleeps": ({"other": [0.5, 0.5, 9.5], "ranks": 3}, "straggler", (2,), 9.0),
    "a rank that checks": (
        {"event": lambda r, n: {"other": 60.0} if r == 1 and n % 10 == 3 else {}, "ranks": 3},
        "periodic_stall",
        (1,),
        6.0,
    ),
    "a rank that checks while it computes": (
        {"event": lambda r, n: {"forward": 60.0} if r == 1 and n % 10 == 3 else {}, "transfer": 3.0},
        "periodic_stall",
        (1,),
        6.0,
    ),
    "logging": ({"other": [6.5, 0.5]}, "rank0_work", (0,), 6.0),
    "saving": ({"event": lambda r, n: {"other": 60.0} if r == 0 and n % 10 == 3 else {}}, "rank0_work", (0,), 6.0),
    "logging while it computes": (
        {"event": lambda r, n: {"backward": 60.0} if r == 0 and n % 10 == 3 else {}, "transfer": 3.0},
        "rank0_work",
        (0,),
        6.0,
    ),
    "epochs": (
        {"event": lambda r, n: {"data": 80.0} if n % 16 == 0 else {}, "epochs": lambda n: n % 16 == 0},
        "epoch_start",
        (0, 1),
        5.0,
    ),
    "saving in turn": (
        {"event": lambda r, n: {"other": 60.0 if r == 0 else 25.0} if n % 10 == 3 else {}},
        "periodic_stall",
        (0, 1),
        6.0,
    ),
    "saving by turns": (
        {"event": lambda r, n: {"other": 60.0} if n % 10 == 3 and r == n * n // 100 % 3 % 2 else {}},
        "periodic_stall",
        (0, 1),
        6.0,
    ),
    "pageable copies": ({"copy": 8.0}, "host_device_copy", (0, 1), 5.6),
    "copies that pinning does not help": ({"copy": 8.0, "pinned": 0.99}, "host_device_copy", (0, 1), 8.0),
    "small kernels": (
        {"launches": 9.0, "queued": 0.1, "more": {"cuda_graphs": ("model",)}},
        "launch_bound",
        (0, 1),
        9.0,
    ),
    "values that are read": ({"reads": 4.0, "queued": 0.1}, "sync_points", (0, 1), 4.0),
    "collector": ({"event": lambda r, n: {"other": 40.0} if n % 12 == 5 else {}}, "periodic_stall", (0, 1), 3.3),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_cause_comes_first(name: str) -> None:
    planted, cause, ranks, price = PLANTED[name]
    found = examined(SlowJob(**planted))
    assert found.findings, "nothing found"
    first = found.findings[0]
    assert (first.cause, first.ranks, first.status) == (cause, ranks, "proved")
    assert first.seconds * 1e3 == pytest.approx(price, rel=0.15)
    assert first.low is not None
    assert first.high is not None
    assert 0 < first.low <= first.seconds <= first.high
    assert first.fix
    assert first.text
    assert cause in " ".join(found.verdict[:1])


def test_what_is_proved_stands_first_and_a_part_before_its_whole() -> None:
    def finding(cause: str, seconds: float, proved: bool) -> Finding:
        ends = (0.9 * seconds, 1.1 * seconds) if proved else (None, None)
        return Finding(cause, (0, 1), seconds, *ends, "proved" if proved else "suspected", "seen", "mend it")

    findings = [
        finding("straggler", 15.6, proved=False),
        finding("data_loader", 10.0, proved=True),
        finding("exposed_communication", 17.0, proved=True),
        finding("find_unused_parameters", 4.7, proved=True),
    ]
    found = told_apart(findings, least=1.0)
    assert [(one.cause, round(one.seconds, 1)) for one in found] == [
        ("data_loader", 10.0),
        ("find_unused_parameters", 4.7),
        ("exposed_communication", 12.3),
        ("straggler", 15.6),
    ]
    found = told_apart([*findings, finding("small_batch", 16.0, proved=False)], least=1.0)
    assert [(one.cause, round(one.seconds, 1), one.status) for one in found[1:3]] == [
        ("find_unused_parameters", 4.7, "proved"),
        ("small_batch", 12.3, "proved"),
    ]


@pytest.mark.parametrize(("price", "first"), [(4.0, "uneven_work"), (1.0, "exposed_communication")])
def test_the_whole_stands_before_a_part_that_hardly_counts(price: float, first: str) -> None:
    findings = [
        Finding("uneven_work", (0, 1), price, 0.9 * price, 1.1 * price, "proved", "seen", "mend it"),
        Finding("exposed_communication", (0, 1), 15.0, 14.0, 16.0, "proved", "seen", "tune"),
    ]
    assert told_apart(findings, least=0.1)[0].cause == first


def test_small_batches_stand_before_the_little_that_ranks_wait_for_each_other() -> None:
    findings = [
        Finding("small_batch", (0, 1), 5.9, None, None, "suspected", "seen; not proved: not tried", "more rows"),
        Finding("uneven_work", (0, 1), 0.7, 0.6, 0.8, "proved", "seen", "mend it"),
        Finding("exposed_communication", (0, 1), 5.0, 4.0, 6.0, "proved", "seen", "tune"),
    ]
    first, second = told_apart(findings, least=0.1)
    assert (first.cause, first.status, second.cause) == ("small_batch", "proved", "uneven_work")
    assert first.seconds == pytest.approx(4.3)
    assert "not tried" in first.text
    assert "not proved" not in first.text
    assert first.fix == "more rows"


def test_no_more_than_the_backward_pass_can_be_hidden_behind_it() -> None:
    job = SlowJob(transfer=1000.0, more={"ddp_arguments": {"bucket_cap_mb": "2000"}})
    for budget in (1.0, 17.0, 60.0):
        assert [one.cause for one in examined(job, budget).findings] == ["exposed_communication"]


def test_steps_without_reduction_are_counted_as_short() -> None:
    first, *_ = examined(SlowJob(transfer=1000.0), budget=31.0).findings
    assert (first.cause, first.status) == ("exposed_communication", "proved")


def test_small_batches_cost_what_steps_without_reduction_save() -> None:
    job = SlowJob(forward=0.3, backward=0.5, optimizer=0.1, other=0.1, transfer=3.0, more={"gradient_bytes": 4096})
    found = examined(job)
    first, *others = found.findings
    assert (first.cause, first.status) == ("small_batch", "proved")
    assert first.seconds == pytest.approx(3e-3, rel=0.15)
    assert not others
    assert found.verdict[0].startswith("small_batch costs 3")
    assert "another training" in found.verdict[0]


@pytest.mark.parametrize(("stage", "cause"), [("forward", "straggler"), ("other", "rank0_work")])
def test_ranks_that_are_unsteady_wait_for_each_other_when_mended_too(stage: str, cause: str) -> None:
    slow = [20.0, 26.0] if cause == "straggler" else [26.0, 20.0]

    def step(**stages: Any) -> float:
        job = SlowJob(noise=0.15, **stages)
        written: dict[str, Any] = {"reduce": True, "apply": False, "experiment": AS_IT_IS}
        return statistics.fmean(job(AS_WRITTEN, 0, 4000, **written).seconds)

    gain = step(**{stage: slow}) - step(**{stage: 20.0})
    assert gain < 5.2e-3
    first = examined(SlowJob(noise=0.15, **{stage: slow}), budget=600).findings[0]
    assert (first.cause, first.status) == (cause, "proved")
    assert first.seconds == pytest.approx(gain, rel=0.15)


@pytest.mark.parametrize("noise", [0.01, 0.05])
def test_a_clean_job_has_no_finding(noise: float) -> None:
    found = examined(SlowJob(noise=noise))
    assert not found.findings
    assert "Nothing found" in found.verdict[0]


def test_the_fix_of_a_loader_is_the_one_that_was_tried() -> None:
    first = examined(SlowJob(data=10.0)).findings[0]
    assert "num_workers=2" in first.fix
    assert "proved with 2 workers" in first.text
    in_vain = examined(SlowJob(data=10.0, from_workers=9.9)).findings[0]
    assert "num_workers" not in in_vain.fix
    assert "2 workers were tried and save next to nothing" in in_vain.text
    fails = SlowJob(data=10.0, fails=lambda experiment: experiment.loader_workers > 0)
    untried = examined(fails).findings[0]
    assert (untried.status, untried.seconds) == ("proved", pytest.approx(10e-3, rel=0.15))
    assert "fails with 2 workers" in untried.text
    assert "num_workers=2" in untried.fix
    assert "prepare the data" in untried.fix


def test_more_rounds_change_the_words_with_the_price() -> None:
    """The sentence keeps no number of the first rounds, which the price beside it would contradict."""
    found = examined(SlowJob(data=10.0, from_workers=9.9, noise=0.3)).findings[0]
    assert "2 workers were tried, but the rounds differed too much" in found.text
    assert f"a step would be {milliseconds(found.seconds)} ms shorter" in found.text


def test_a_cause_without_a_guess_that_cannot_be_tried_is_told() -> None:
    job = SlowJob(unused=3.0, more=MANY, fails=lambda experiment: bool(experiment.ddp_arguments))
    found = examined(job)
    assert not found.findings
    assert [one for one in found.not_measured if "find_unused_parameters" in one and "fails" in one]
    assert not [one for one in examined(SlowJob(more=MANY)).not_measured if "find_unused" in one]  # tried, and nothing


def test_workers_are_thought_of_for_a_stream_too() -> None:
    """They are not tried: whether each reads another part of it, only the script knows."""
    job = SlowJob(data=10.0, stream=True)
    first = examined(job).findings[0]
    assert (first.cause, first.status) == ("data_loader", "proved")
    assert "not tried, because the data set is a stream" in first.text
    assert "num_workers=2" in first.fix
    assert "get_worker_info" in first.fix
    assert "prepare the data" in first.fix
    assert not any(one.loader_workers for one in job.asked)


def test_the_fix_of_a_late_epoch_is_for_the_workers_that_it_has() -> None:
    late: dict[str, Any] = {
        "event": lambda r, n: {"data": 80.0} if n % 16 == 0 else {},
        "epochs": lambda n: n % 16 == 0,
    }
    fixes = [
        examined(SlowJob(**late, **workers)).findings[0].fix
        for workers in ({"workers": 2}, {"workers": 2, "persistent": True}, {})
    ]
    assert ["persistent_workers=True" in fix for fix in fixes] == [True, False, False]
    assert ["longer" in fix for fix in fixes] == [False, True, True]
    assert ["scheduler" in fix for fix in fixes] == [False, True, True], "who steps it once an epoch trains otherwise"


def test_a_rank_that_does_more_between_two_steps_is_told_that_too() -> None:
    """It logs, and waits for a core while it does: on a busy machine other programs are not all of the reason."""
    first = examined(SlowJob(other=[0.5, 12.0], waited=[0.1, 9.0], transfer=3.0, noise=0.002)).findings[0]
    assert first.cause == "straggler"
    assert "let rank 1 do no more between two steps than the others" in first.fix
    assert "or keep other programs off the cores of rank 1" in first.fix


def test_events_that_become_longer_cost_no_more_than_the_step() -> None:
    """A heap that grows, or a machine that becomes busy: later records give the price, and the first one the step."""
    job = SlowJob(event=lambda rank, step: {"other": 150.0 + 12.0 * step} if step % 10 == 0 else {}, noise=0.002)
    said = examined(job)
    first = said.findings[0]
    assert first.cause == "periodic_stall"
    assert first.seconds < 0.95 * said.seconds
    assert said.waterfall[-1].seconds > 0


def test_events_that_were_priced_stay_so_where_more_steps_do_not_show_them() -> None:
    """A machine becomes so busy that every second step takes long: the saves of rank 0 are not told apart any more."""

    def saves(rank: int, step: int) -> dict[str, float]:
        if step > 200 and step % 2:
            return {"other": 60.0}
        return {"other": 30.0 + 40.0 * (step // 10 % 3)} if rank == 0 and step % 10 == 4 else {}

    first = examined(SlowJob(event=saves)).findings[0]
    assert (first.cause, first.status) == ("rank0_work", "proved")
    assert "too few" not in first.text


class Slower(SlowJob):
    """The machine becomes busy after the record of the first steps."""

    def _of(self, values: Any, rank: int) -> float:
        return super()._of(values, rank) * (1.0 if self._step < 200 else 4.0)


@pytest.mark.parametrize("planted", [{"forward": [5.0, 60.0]}, {"transfer": 40.0}, {"data": 40.0}])
def test_nothing_saves_more_than_the_step(planted: dict[str, Any]) -> None:
    said = examined(Slower(**planted, readers=(0, 1)))
    assert said.findings[0].status == "proved"
    assert 0.5 * said.seconds < said.findings[0].seconds < said.seconds


def test_who_lets_workers_stay_is_told_what_they_do_not_see() -> None:
    """A data set that a script tells the epoch, or that has a generator: workers keep it as it is at their start."""
    late: dict[str, Any] = {
        "event": lambda r, n: {"data": 80.0} if n % 16 == 0 else {},
        "epochs": lambda n: n % 16 == 0,
    }
    for job in (SlowJob(**late, workers=2), SlowJob(data=10.0), SlowJob(data=10.0, stream=True)):
        fix = examined(job).findings[0].fix
        assert "persistent_workers=True" in fix
        assert "where the script changes the data set between epochs" in fix
        assert ("worker_init_fn" in fix) is ("num_workers" in fix)


def test_a_rank_that_reads_for_all_is_not_compared_with_others() -> None:
    reads_for_all = examined(SlowJob(data=[10.0, 0.0], readers=(0,), from_workers=9.9)).findings[0]
    assert (reads_for_all.cause, reads_for_all.ranks) == ("data_loader", (0,))
    assert "rank 0 reading for all waits" in reads_for_all.text
    assert "the others" not in reads_for_all.fix
    reads_slowly = examined(SlowJob(data=[10.0, 0.1], from_workers=9.9)).findings[0]
    assert "rank 0 alone waits" in reads_slowly.text
    assert "as fast as the others do" in reads_slowly.fix


def test_loading_that_is_not_seen_is_thought_of() -> None:
    for other, cause in (([9.5, 0.5], "rank0_work"), ([0.5, 9.5], "straggler")):
        seen, unseen = (
            examined(SlowJob(other=other, **more)).findings[0] for more in ({"data": 0.01}, {"readers": ()})
        )
        assert (seen.cause, unseen.cause) == (cause, cause)
        assert "loads" not in seen.fix
        assert "if it loads its data there" in unseen.fix
        assert cause == "rank0_work" or "between two steps" in seen.fix


@pytest.mark.parametrize(("other", "cause"), [([9.5, 0.5], "rank0_work"), ([0.5, 9.5], "straggler")])
def test_a_rank_that_waits_for_a_thread_of_its_own_is_no_slack(other: list[float], cause: str) -> None:
    """A delay there lets the thread load on, so steps grow no longer, though the other rank waits for this one."""
    (first, *_) = examined(SlowJob(other=other, readers=(), absorbs=True)).findings
    assert (first.cause, first.status) == (cause, "suspected")
    assert first.seconds * 1e3 == pytest.approx(9.0, rel=0.15)
    assert "a thread that loads batches" in first.text
    rank = other.index(max(other))
    assert first.fix.startswith(f"make what rank {rank} waits for there, such as a thread")
    assert re.search(r"(ms there made a step 0[.0-9]* ms longer|made no step longer), because", first.text)


@pytest.mark.parametrize(("stage", "where"), [("other", "between two steps"), ("optimizer", "in the optimizer")])
def test_what_the_scripts_own_code_takes_is_told_where_nothing_is_found(stage: str, where: str) -> None:
    taking: Any = {stage: 20.0}
    found = examined(SlowJob(**taking))
    assert not found.findings
    assert re.search(f"of which the script spends 20[.0-9]* ms {where}$", found.verdict[0])
    told = next(one for one in found.not_measured if f"{where} on every rank (`{stage}`)" in one)
    assert ("fused=True" in told) == (stage == "optimizer")
    assert where not in " ".join(examined(SlowJob()).verdict)
    assert f"{where} (`{stage}`)" in " ".join(examined(SlowJob(transfer=3.0, **taking)).verdict)
    unproved = examined(SlowJob(transfer=3.0, **taking), budget=0.3).verdict
    assert unproved[0].startswith("Suspected: ")
    assert f"{where} (`{stage}`)" in unproved[1]
    assert len(unproved) == 3


def test_ranks_that_have_no_core_are_told_that_where_it_takes_more_than_what_is_found() -> None:
    """Other programs may be what makes the job slow, and no experiment can take them away."""
    line = r"Every rank waits (19|20)[.0-9]* of [.0-9]* ms for a core, which other ranks, threads or programs use"
    for planted in ({}, {"transfer": 6.0}, {"transfer": 6.0, "data": 2.0}):
        first, second, last = examined(SlowJob(waited=20.0, forward=40.0, **planted)).verdict
        assert "for a core" not in first + last
        assert re.match(line, second)
    for planted in ({"transfer": 30.0}, {"helpers": [19.0, 19.0]}, {"oversubscribed": 2.0, "threads": 8}):
        assert "for a core" not in " ".join(examined(SlowJob(waited=20.0, **planted)).verdict)
    assert "for a core" not in " ".join(examined(SlowJob(waited=[20.0, 0.1], forward=40.0)).verdict)


def test_threads_that_compute_on_every_rank_are_told() -> None:
    """Such as those that tokenize ahead. One rank's are a straggler's; those of operators are part of the training.

    So are those that move what the script's own collectives send.
    """
    every, *none = (
        examined(SlowJob(**({"transfer": 6.0, "helpers_ran": [9.0, 8.0]} | of))).not_measured
        for of in ({}, {"helpers_ran": [9.0, 0.5]}, {"threads": 4}, {"meets": 2.0})
    )
    assert any("threads beside the one that trains cost: they compute for 8" in sentence for sentence in every)
    assert not any("threads beside" in sentence for of_it in none for sentence in of_it)


def test_no_fix_of_the_loader_gives_more_than_batches_in_memory() -> None:
    """As rounds may say on a machine on which other programs come and go."""
    first = examined(SlowJob(data=10.0, from_workers=-10.0)).findings[0]
    assert "proved with 2 workers" in first.text
    assert first.seconds * 1e3 == pytest.approx(10.0, rel=0.15)


def test_what_names_the_change_stands_before_the_whole_also_where_nothing_is_proved() -> None:
    prices = {"exposed_communication": 20.0, "data_loader": 17.0, "needless_reductions": 15.0}
    findings = [Finding(cause, (0,), price, None, None, "suspected", "", "") for cause, price in prices.items()]
    found = told_apart(findings, least=1.0)
    assert [one.cause for one in found] == ["data_loader", "needless_reductions", "exposed_communication"]


def test_two_things_that_come_regularly_are_told_apart() -> None:
    def event(rank: int, step: int) -> dict[str, float]:
        return {"other": 80.0} if step % 20 == 15 or (rank == 0 and step % 20 == 4) else {}

    found = {one.cause: one for one in examined(SlowJob(event=event)).findings}
    assert {cause: one.ranks for cause, one in found.items()} == {"rank0_work": (0,), "periodic_stall": (0, 1)}
    assert all(one.seconds == pytest.approx(4e-3, rel=0.15) for one in found.values())
    assert "save" in found["periodic_stall"].fix


@pytest.mark.parametrize(("ranks", "cause"), [((0, 1), "periodic_stall"), ((0,), "rank0_work")])
def test_an_evaluation_and_a_late_batch_in_one_step_have_each_its_own_price(ranks: tuple[int, ...], cause: str) -> None:
    """Most scripts evaluate where an epoch ends, so the next one begins in the same step."""

    def event(rank: int, step: int) -> dict[str, float]:
        return {"data": 150.0, "other": 100.0 if rank in ranks else 0.0} if step % 16 == 0 else {}

    found = {one.cause: one for one in examined(SlowJob(event=event, epochs=lambda step: step % 16 == 0)).findings}
    assert found.keys() == {"epoch_start", cause}
    assert found["epoch_start"].seconds * 1e3 == pytest.approx(150 / 16, rel=0.1)
    assert found[cause].seconds * 1e3 == pytest.approx(100 / 16, rel=0.1)
    assert all(one.status == "proved" for one in found.values())


def test_the_fix_of_collecting_is_not_that_of_saving() -> None:
    collector = {"event": lambda rank, step: {"other": 2000.0} if step % 12 == 5 else {}}
    found = examined(SlowJob(**collector, collects=True))
    first = found.findings[0]
    assert not any("saving" in sentence for sentence in found.not_measured)
    assert (first.cause, first.fix.split("(")[0]) == ("periodic_stall", "gc.freeze")
    assert " take 2000 ms longer" in first.text or " take 1999 ms longer" in first.text


def test_the_fix_of_copies_is_the_one_that_was_tried() -> None:
    pinned = examined(SlowJob(copy=8.0)).findings[0]
    assert "proved with pinned batches; with all batches on the device" in pinned.text
    assert pinned.fix.startswith("DataLoader(pin_memory=True)")
    in_vain = examined(SlowJob(copy=8.0, pinned=0.99)).findings[0]
    assert "pin_memory" not in in_vain.fix
    assert "stream" in in_vain.fix
    full = SlowJob(copy=8.0, no_room=("pinned", "device"))
    untried = examined(full).findings[0]
    assert (untried.cause, untried.status) == ("host_device_copy", "suspected")
    assert "no memory" in untried.text
    on_the_device = SlowJob(copy=8.0, fails=lambda experiment: experiment.memory == "device")
    fixed = examined(on_the_device).findings[0]
    assert (fixed.cause, fixed.status, fixed.seconds) == ("host_device_copy", "proved", pytest.approx(5.6e-3, rel=0.15))
    assert "proved with pinned batches" in fixed.text


def test_a_step_takes_no_negative_time_where_a_cause_grows_while_it_is_examined() -> None:
    found = examined(SlowJob(data=10.0, event=lambda _rank, step: {"data": 80.0} if step > 100 else {}))
    assert [level.cause for level in found.waterfall] == ["as written", "data_loader"]
    assert 0.0 <= found.waterfall[1].seconds < found.seconds / 2


def test_copies_do_not_take_the_loaders_place_in_the_waterfall() -> None:
    found = examined(SlowJob(data=10.0, from_workers=9.9, copy=20.0, pinned=0.0))
    assert [one.cause for one in found.findings] == ["host_device_copy", "data_loader"]
    levels = [level.seconds * 1e3 for level in found.waterfall]
    assert [a - b for a, b in pairwise(levels)] == pytest.approx([20, 10], rel=0.15)


def test_collectives_of_the_scripts_own_are_no_communication() -> None:
    exposed, steps = STAGES.index("exposed"), 4
    stages = tuple(tuple(5 * MS if n == exposed else 1 * MS for n in range(len(STAGES))) for _ in range(steps))
    ranks = [RankSteps(r, "a", (12 * MS,) * steps, stages, meeting=(4 * MS,) * steps) for r in range(2)]
    assert Evidence(ranks).transfer == pytest.approx([1 * MS] * steps)


def test_small_kernels_without_graphs_are_suspected() -> None:
    first = examined(SlowJob(launches=9.0, queued=0.1, more={"left_out": {"cuda_graphs": "an odd model"}})).findings[0]
    assert (first.cause, first.status, first.low) == ("launch_bound", "suspected", None)
    assert "an odd model" in first.text


def test_a_device_that_is_behind_is_not_launch_bound() -> None:
    assert not examined(SlowJob(queued=9.0, more={"cuda_graphs": ("model",)})).findings


def test_lines_that_wait_are_named() -> None:
    (first, *_) = examined(SlowJob(reads=4.0, queued=0.1)).findings
    assert "train.py:41 .item() (4.00 ms)" in first.text


def test_a_stream_stays_one_in_joined_blocks() -> None:
    steps = RankSteps(0, "a", (1.0,), ((0.0,) * len(STAGES),), indexed=False, waits={"a:1 .item()": 1.0})
    both = joined([Evidence([steps]), Evidence([steps])]).ranks[0]
    assert not both.indexed
    assert both.waits == {"a:1 .item()": 2.0}


def test_what_is_found_is_part_of_the_contract() -> None:
    plain = examined(SlowJob(data=10.0)).plain()
    assert {one["cause"] for one in plain["findings"]} <= set(CAUSES)
    assert plain["waterfall"][0] == {"cause": "as written", "step_ms": plain["step_ms"]}
    assert plain["waterfall"][1]["step_ms"] == pytest.approx(plain["step_ms"] - 10.0, rel=0.1)
    for rank in plain["ranks"]:
        parts = ("data", "copy", "buffers", "forward", "backward", "exposed", "optimizer", "other")
        assert sum(rank[f"{part}_ms"] for part in parts) == pytest.approx(rank["step_ms"], rel=0.05)
        assert 0 <= rank["waiting_ms"] <= rank["exposed_ms"]


def test_two_causes_and_the_waterfall() -> None:
    found = examined(SlowJob(data=10.0, transfer=6.0))
    assert [one.cause for one in found.findings] == ["data_loader", "exposed_communication"]
    assert [one.cause for one in found.waterfall] == ["as written", "data_loader", "exposed_communication"]
    steps = [one.seconds * 1e3 for one in found.waterfall]
    assert steps == pytest.approx([32.5, 22.5, 16.5], rel=0.05)
    assert len(found.verdict) <= 3


def test_an_experiment_that_fails_costs_only_its_proof() -> None:
    found = examined(SlowJob(data=10.0, transfer=6.0, fails=lambda experiment: bool(experiment.kept_batches)))
    by_cause = {one.cause: one for one in found.findings}
    assert by_cause["data_loader"].status == "suspected"
    assert "it cannot" in by_cause["data_loader"].text
    assert by_cause["exposed_communication"].status == "proved"


def test_a_script_that_ends_leaves_what_was_seen() -> None:
    found = examined(SlowJob(data=10.0, transfer=6.0, ends_after=170))
    assert {one.status for one in found.findings} == {"suspected"}
    assert all("the script ended" in one.text for one in found.findings)


@pytest.mark.parametrize("noise", [0.01, 0.05])
def test_what_cannot_be_decided_leaves_time_for_others(noise: float) -> None:
    """The link has exactly the rate below which it counts as slow, so no number of rounds is enough."""
    job = SlowJob(transfer=40.0, backward=[30.0, 45.0], noise=noise, more=BETWEEN | {"network_gbps": 10.0})
    status = {one.cause: one.status for one in examined(job, budget=30.0).findings}
    assert status == {"exposed_communication": "proved", "slow_link": "suspected", "straggler": "proved"}


@pytest.mark.parametrize("seed", [10, 17])
def test_what_rounds_leave_open_is_not_said_to_cost_nothing(seed: int) -> None:
    """On a busy machine few rounds may come to no gain on average, and to half of a step either way."""
    job = SlowJob(transfer=1.5, noise=0.6, meets=0.5)
    job._random = random.Random(seed)
    found = examined(job, budget=4.0)
    assert found.findings == []
    assert found.verdict[0].startswith("Nothing found for sure that costs 3 %")
    assert "exposed_communication cost" in found.verdict[0]
    (told,) = [one for one in found.not_measured if one.startswith("whether exposed_communication costs anything: -")]
    assert told.endswith("ms per step, because the rounds differed too much")


def test_the_time_that_is_left_makes_prices_more_precise() -> None:
    planted = {"transfer": 2.0, "data": [2.0, 2.0], "noise": 0.1}
    short, long = (examined(SlowJob(**planted), budget) for budget in (30.0, 90.0))
    for found in short, long:
        assert {one.cause for one in found.findings} == {"data_loader", "exposed_communication"}
        assert [one.cause for one in found.waterfall[1:]] == [one.cause for one in found.findings]
    for one in long.findings:
        assert one.low is not None
        assert one.high is not None
        assert (one.high - one.low) / 2 <= 0.1 * one.seconds
    assert 30.5 < long.spent <= 90.5


def test_what_a_first_look_leaves_open_is_decided_in_the_time_that_is_left() -> None:
    """Here the rate of the link is not sure at first. Its price is what a faster link saves, not what bytes cost."""
    job = SlowJob(transfer=40.0, backward=[30.0, 45.0], noise=0.05, more=BETWEEN | {"network_gbps": 10.5})
    found = examined(job, budget=120.0)
    link = next(one for one in found.findings if one.cause == "slow_link")
    assert link.status == "proved"
    assert "proved: " in link.text
    assert link.seconds * 1e3 == pytest.approx(21.2, rel=0.1)
    assert "slow_link" in [one.cause for one in found.waterfall]


@pytest.mark.parametrize("stalls", [True, False])
def test_every_nth_step_is_told_from_what_the_machine_does_while_a_rank_computes(stalls: bool) -> None:
    def event(rank: int, step: int) -> dict[str, float]:
        chance = random.Random(2 * step + rank)
        by_the_machine = chance.uniform(10, 40) if chance.random() < 0.15 else 0.0
        return {"forward": 60.0 if stalls and rank == 1 and step % 10 == 3 else by_the_machine}

    found = {one.cause: one for one in examined(SlowJob(event=event)).findings}
    assert ("periodic_stall" in found) == stalls
    if stalls:
        assert (found["periodic_stall"].ranks, found["periodic_stall"].status) == ((1,), "proved")
        assert "rank 1" in found["periodic_stall"].fix


@pytest.mark.parametrize("first", range(10))
def test_events_of_every_tenth_step_are_counted_as_a_tenth(first: int) -> None:
    """Wherever in a period a record begins."""
    steps = [0.05 + (0.1 if (n - first) % 10 == 0 else 0.0) + 1e-5 * (n % 3) for n in range(34)]
    other = STAGES.index("other")
    stages = tuple(
        tuple(s - 0.04 if i == other else 0.04 if i == 0 else 0.0 for i in range(len(STAGES))) for s in steps
    )
    ranks = [RankSteps(rank, "host", tuple(steps), stages) for rank in range(2)]
    price = priced_by_events(Evidence(ranks), Events(lambda of, n: n in of.events))
    assert price is not None
    assert price.seconds == pytest.approx(0.01, rel=0.01)


def test_a_small_budget_leaves_suspicions() -> None:
    found = examined(SlowJob(data=10.0), budget=0.3)
    assert [one.cause for one in found.findings] == ["data_loader"]
    assert "--diagnose-budget" in found.findings[0].text
    assert found.spent <= 0.5


def test_the_budget_is_kept() -> None:
    for budget in (0.5, 1.0, 2.0, 5.0, 20.0):
        for prefetched in (0, 32):
            job = SlowJob(data=10.0, transfer=6.0, other=[6.0, 0.5], prefetched=prefetched)
            assert examined(job, budget).spent <= budget + 0.5


class Locked(SlowJob):
    """Each rank holds a lock for 10 ms of each step. While ranks reduce, both ask for it at once; else by turns."""

    def __call__(self, *positional: Any, reduce: bool, **named: Any) -> Any:
        self.event = lambda rank, step: {"other": 10.0 * (1 + (rank + step) % 2 if reduce else 1)}
        return super().__call__(*positional, reduce=reduce, **named)


def test_without_the_reduction_ranks_that_share_a_lock_do_not_wait_for_each_other() -> None:
    found = examined(Locked(transfer=2.0))
    first, rest = found.findings
    assert (first.cause, first.status) == ("uneven_work", "proved")
    assert first.seconds == pytest.approx(10 * MS, rel=0.05)  # with a lock each, no step waits for the second one
    assert "they wait as well when each rank is given one batch again and again, so it is not the data" in first.text
    assert "none is late while one rank at a time makes its steps and the others stand still" in first.text
    assert first.fix.startswith("find what the ranks share and use by turns: a file lock")
    assert first.fix in found.verdict[0]
    assert (rest.cause, rest.status) == ("exposed_communication", "proved")
    assert rest.seconds == pytest.approx(2 * MS, rel=0.1)  # while they reduce, they ask for the lock at once
    assert "so the price may be more than the gradients cost" in rest.text
    assert rest.fix.startswith("find what makes the ranks late by turns")


@pytest.mark.parametrize("late", [0, 1])
def test_whichever_rank_is_given_the_longer_batch_again_and_again(late: int) -> None:
    """It is in the data, also if the other rank waits in each step then."""
    first = examined(SlowJob(hidden=lambda rank, batch: 10.0 * ((rank + batch + late) % 2), noise=0.0)).findings[0]
    assert (first.cause, first.status) == ("uneven_work", "proved")
    assert "they hardly wait when each rank is given one batch again and again, so it is in the data" in first.text


def test_a_batch_that_is_ready_is_not_waited_for() -> None:
    """Taking it over takes some milliseconds on a slow machine; no worker and no other data make that shorter."""
    found = examined(SlowJob(data=1.2, workers=1, ready=True))
    assert not found.findings
    assert any("taking batches over" in sentence for sentence in found.not_measured)
    late = examined(SlowJob(data=1.2, workers=1)).findings[0]
    assert (late.cause, late.status) == ("data_loader", "proved")


def test_ranks_that_are_late_by_their_data_do_not_make_the_gradients_cheaper() -> None:
    """Steps without the reduction take as long as the longest batch too, so what they save is the transfer alone."""
    found = examined(SlowJob(hidden=lambda rank, batch: 10.0 * ((rank + batch) % 2), transfer=12.0)).findings
    prices = {one.cause: one.seconds * 1e3 for one in found}
    assert prices == pytest.approx({"uneven_work": 5.0, "exposed_communication": 12.0}, rel=0.15)
    fix = next(one.fix for one in found if one.cause == "exposed_communication")
    assert fix.startswith("tune the job with autoddp")  # it comes first, as most of the time is the gradients'
    assert "; then find what makes the ranks late by turns" in fix


def test_what_was_not_tried_stays_suspected_beside_a_part_of_it_that_was() -> None:
    findings = [
        Finding("buffer_broadcast", (0, 1), 2.0, 1.8, 2.2, "proved", "seen", "mend it"),
        Finding("exposed_communication", (0, 1), 9.0, None, None, "suspected", "seen; not proved: no time", "tune"),
    ]
    first, second = told_apart(findings, least=1.0, transfer=9.0)
    assert (first.cause, second.cause) == ("buffer_broadcast", "exposed_communication")
    assert (second.status, second.seconds, second.low, second.high) == ("suspected", 9.0, None, None)


def test_nobody_who_tunes_is_told_to_tune() -> None:
    job = SlowJob(transfer=12.0)
    alone, tuned = (
        Examination(job, Surroundings(job.facts, is_tuned=tuned), 90.0, Failed, Over).run().findings[0].fix
        for tuned in (False, True)
    )
    assert alone.startswith("tune the job with autoddp")
    assert "tune the job" not in tuned
    assert tuned.startswith("beyond what this run has tried, use a faster network")


def test_a_shared_lock_is_proved_without_a_loader_of_torchs() -> None:
    first = examined(Locked(transfer=2.0, readers=())).findings[0]
    assert (first.cause, first.status) == ("uneven_work", "proved")
    assert first.seconds == pytest.approx(10 * MS, rel=0.05)
    assert first.fix.startswith("find what the ranks share")


def by_chance(rank: int, step: int) -> dict[str, float]:
    return {"other": 10.0 * random.Random(5000 * rank + step).random()}


@pytest.mark.parametrize("readers", [None, ()])
def test_ranks_that_are_late_by_turns_and_share_nothing(readers: tuple[int, ...] | None) -> None:
    first = examined(SlowJob(event=by_chance, readers=readers)).findings[0]
    assert (first.cause, first.status) == ("uneven_work", "proved")
    assert "their steps differ as much while one rank at a time makes its steps" in first.text
    assert first.seconds == pytest.approx(10 / 6 * MS, rel=0.15)  # what a rank waits on average
    assert first.fix.startswith("make the work of each step alike: it depends on chance")
    assert ("data of the step" in first.fix) == (readers == ())


@pytest.mark.parametrize("readers", [None, ()])
def test_what_a_busy_machine_does_is_not_laid_to_the_steps(readers: tuple[int, ...] | None) -> None:
    """Other programs make a rank late also while it alone makes its steps."""
    first = examined(SlowJob(event=by_chance, readers=readers, waited=20.0)).findings[0]
    assert (first.cause, first.status) == ("uneven_work", "suspected" if readers == () else "proved")
    assert "ms for a core then" in first.text
    assert "make the work of each step alike" not in first.fix
    assert "use by turns: first of all cores, for which they wait" in first.fix


class NeedEachOther(Locked):
    """In each step the ranks also wait for each other in a way that is not seen."""

    def __call__(self, *positional: Any, experiment: Any, **named: Any) -> Any:
        done = super().__call__(*positional, experiment=experiment, **named)
        ranks = tuple(replace(one, alone=not experiment.by_turns or one.rank == 0) for one in done.ranks)
        return replace(done, ranks=ranks)


def test_where_ranks_cannot_make_their_steps_by_turns_the_price_is_the_least() -> None:
    first = examined(NeedEachOther(transfer=2.0)).findings[0]
    assert (first.cause, first.status) == ("uneven_work", "proved")
    assert first.seconds == pytest.approx(5 * MS, rel=0.05)
    assert "mending it gives that at least (a rank alone does not come to the end of its steps" in first.text


class Noisy(Locked):
    """While one rank at a time makes its steps, somebody else uses the machine."""

    def __call__(self, *positional: Any, experiment: Any, **named: Any) -> Any:
        self.noise = 0.8 if experiment.by_turns else 0.01
        return super().__call__(*positional, experiment=experiment, **named)


def test_what_they_wait_stays_proved_where_rounds_by_turns_say_nothing() -> None:
    first = next(one for one in examined(Noisy(transfer=2.0)).findings if one.cause == "uneven_work")
    assert first.status == "proved"
    assert first.seconds == pytest.approx(5 * MS, rel=0.05)
    assert "mending it gives that at least (while one rank at a time makes its steps" in first.text


def test_whether_they_share_anything_may_not_be_known() -> None:
    found = examined(NeedEachOther(transfer=2.0, readers=())).findings
    late = next(one for one in found if one.cause == "uneven_work")
    assert (late.status, late.low) == ("suspected", None)
    assert "; or find what the ranks share" in late.fix


def test_ranks_that_wait_for_a_core_are_told_to_look_there_first() -> None:
    """On all ranks: one that waits alone has a cause of its own. Threads that move gradients do not count."""
    busy, *free = (
        next(one for one in examined(NeedEachOther(readers=(), **waits)).findings if one.cause == "uneven_work")
        for waits in ({"waited": 20.0}, {"waited": [20.0, 0.1]}, {"waited": 20.0, "helpers": [19.0, 19.0]})
    )
    assert re.search("; on each the training waits (19|20)[.0-9]* ms or more of a step for a core", busy.text)
    assert "use by turns: first of all cores, for which they wait" in busy.fix
    assert all("use by turns: a file lock" in one.fix and "a core" not in one.text for one in free)


def test_rank_0_does_no_other_work_if_it_does_less_than_the_others() -> None:
    """Ranks wait for a lock in a random order, and rank 0 waits less than the other on average."""
    first = [random.Random(5000 + step).random() < 0.55 for step in range(100)]
    job = SlowJob(event=lambda rank, step: {"other": 10.0 if first[step] == (rank == 0) else 20.0})
    done = job(AS_WRITTEN, 0, 100, reduce=True, apply=True, experiment=AS_IT_IS)
    found = suspicions(Evidence(done.ranks), Surroundings(job.facts))
    assert "rank0_work" not in [one.cause for one in found]


@pytest.mark.parametrize("job", [SlowJob(transfer=12.0), SlowJob(transfer=12.0, forward=[5.0, 15.0])])
def test_ranks_that_are_not_late_by_turns_are_not_said_to_be(job: SlowJob) -> None:
    found = examined(job)
    first = next(one for one in found.findings if one.cause == "exposed_communication")
    assert "by turns" not in first.text + first.fix
    assert found.verdict[0].startswith(
        ("Mending exposed_communication saves 12", "Mending exposed_communication saves 11.9")
    )


def test_what_can_be_mended_is_tried_before_what_it_is_a_part_of() -> None:
    """Where time is short: without the reduction a step saves more than a single reduction does."""
    job = SlowJob(transfer=12.0, more=PASSES)
    done = job(AS_WRITTEN, 0, 20, reduce=True, apply=True, experiment=AS_IT_IS)
    found = [one.cause for one in suspicions(Evidence(done.ranks), Surroundings(job.facts))]
    assert found.index("needless_reductions") < found.index("exposed_communication")


@pytest.mark.parametrize("why", [READS_GRADIENTS, CHANGES_GRADIENTS, FINDS_UNUSED])
def test_needless_reductions_that_cannot_be_left_out_in_a_trial_are_suspected(why: str) -> None:
    """As where the script divides its gradients after the last pass: its user can enter no_sync() all the same."""
    more = {"micro_batches": 4.0, "backward_passes": 4, "left_out": {"defer_reductions": why}}
    found = {one.cause: one for one in examined(SlowJob(transfer=12.0, more=more)).findings}
    needless = found["needless_reductions"]
    assert (needless.status, needless.seconds * 1e3) == ("suspected", pytest.approx(9.0, rel=0.15))
    assert why in needless.text
    assert "no_sync()" in needless.fix
    assert "defer_reductions" not in needless.fix
    # Two forward passes of one backward pass, or several models, reduce once; gradients may be needed in between.
    for other in ({"backward_passes": 1}, {"left_out": {"defer_reductions": DISCARDS_GRADIENTS}}):
        found = {one.cause: one for one in examined(SlowJob(transfer=12.0, more=more | other)).findings}
        assert "needless_reductions" not in found


def test_scaling() -> None:
    found = examined(SlowJob(transfer=30.0)).scaling
    assert found.efficiency == pytest.approx(16.5 / 46.5, rel=0.05)
    assert found.text.endswith("times what one gives: one alone would be faster")
    assert "one would do as well" in examined(SlowJob(transfer=16.5)).scaling.text
    assert found.samples_per_second == pytest.approx(16 / 0.0465, rel=0.05)
    evaluates = examined(SlowJob(event=lambda rank, step: {"other": 300.0} if step % 10 == 3 else {})).scaling
    assert evaluates.efficiency > 0.95, "one rank would evaluate as well"
    alone = examined(SlowJob(ranks=1, data=5.0))
    assert alone.scaling.text.startswith("One rank")
    assert [one.cause for one in alone.findings] == ["data_loader"]


def test_every_block_after_an_experiment_undoes_it() -> None:
    job = SlowJob(data=10.0, forward=[5.0, 9.0])
    examined(job)
    kinds = {bool(one.kept_batches) for one in job.asked}
    assert kinds == {True, False}
    assert any(one.delay for one in job.asked)


@pytest.mark.parametrize(
    ("planted", "seen", "fix"),
    [
        (
            {"waited": [0.1, 5.0]},
            "ms of each step for a core, those of the others 0.",
            "keep other programs off the cores",
        ),
        (
            {"waited": [0.1, 5.0], "helpers_ran": [0.1, 6.0]},
            "threads of its own, beside the one that trains, compute for ",
            "in a process of its own",
        ),
        ({"helpers_ran": [0.1, 6.0], "threads": 2}, "they wait for it; proved by", "look at its device"),
        (
            {"waited": [0.1, 5.0], "threads": [1, 16]},
            "; its operators use 16 threads, those of the others 1, and its threads wait ",
            "give rank 1 as many threads as the others have: torch.set_num_threads(1)",
        ),
        ({"threads": [1, 16]}, "they wait for it; proved by", "look at its device"),
        ({"anew": [1.0, 7.0]}, "gets 3,500 pages of memory anew from the system", "GLIBC_TUNABLES=glibc.malloc"),
        ({"anew": [6.0, 7.0]}, "they wait for it; proved by", "look at its device"),
        ({"waited": [4.0, 5.0]}, "they wait for it; proved by", "look at its device"),
        ({"mhz": [(1980, 1980), (1005, 1980)], "held_back": "it is too hot"}, "1,005 MHz of 1,980 because", "cooling"),
        ({"mhz": [(1980, 1980), (1900, 1980)]}, "they wait for it; proved by", "look at its device"),
        ({"mhz": [(1980, 1980), (1410, 1410)]}, "they wait for it; proved by", "look at its device"),
        ({"mhz": [(1980, 1980), ()]}, "they wait for it; proved by", "look at its device"),
    ],
)
def test_why_a_rank_is_slow(planted: dict[str, Any], seen: str, fix: str) -> None:
    first, *_ = examined(SlowJob(forward=[5.0, 12.0], **planted)).findings
    assert (first.cause, first.ranks, first.status) == ("straggler", (1,), "proved")
    assert seen in first.text
    assert fix in first.fix


def test_the_threads_of_one_rank_are_not_told_of_all() -> None:
    for threads, told in (([1, 16], "2 ranks with up to 16 threads each"), (16, "2 ranks with 16 threads each")):
        found = examined(SlowJob(oversubscribed=2.0, threads=threads)).findings
        assert any(one.text.startswith(told) for one in found)


@pytest.mark.parametrize(("helpers", "threads", "price"), [(2.0, 1, 9.0), (9.0, 1, 10.0), (2.0, 2, 7.0), (0.0, 1, 7.0)])
def test_gradients_that_are_late_because_their_threads_wait_for_a_core(
    helpers: float, threads: int, price: float
) -> None:
    """They take part in the price, up to all the time for which gradients travel: 3 ms here."""
    planted = SlowJob(
        forward=[5.0, 12.0], transfer=3.0, waited=[0.1, 9.0], helpers=[0.0, helpers], threads=threads, noise=0.002
    )
    first = next(one for one in examined(planted).findings if one.cause == "straggler")
    assert first.status == "proved"
    assert first.seconds == pytest.approx(price * MS, rel=0.03)


def test_a_rank_with_larger_batches() -> None:
    first, *_ = examined(SlowJob(sizes=lambda rank, step: 1500 if rank == 0 else 1000)).findings
    assert (first.cause, first.ranks) == ("straggler", (0,))
    assert "its batches have 1.5 times as many numbers as those of the others" in first.text
    assert "DistributedSampler" in first.fix


def test_many_ranks() -> None:
    job = SlowJob(ranks=64, forward=[5.0] * 40 + [11.0] + [5.0] * 23, noise=0.002)
    first, *_ = examined(job, budget=10.0).findings
    assert (first.cause, first.ranks) == ("straggler", (40,))
    assert first.seconds * 1e3 == pytest.approx(6.0, rel=0.15)


def test_a_step_with_all_mended() -> None:
    for planted in ({"data": 10.0}, {"data": 10.0, "transfer": 6.0}):
        (first, *_) = examined(SlowJob(**planted)).plain()["mended"]
        assert first["data_ms"] < 1.0
        assert first["step_ms"] == pytest.approx(16.6, rel=0.05)


def test_buffers_are_not_counted_as_communication_once_more() -> None:
    found = examined(SlowJob(buffers=6.0, transfer=3.0, more={"buffer_bytes": 2**20})).findings
    prices = {one.cause: one.seconds * 1e3 for one in found}
    assert prices == pytest.approx({"buffer_broadcast": 6.0, "exposed_communication": 3.0}, rel=0.2)


def test_what_no_object_can_be_given_is_not_refuted() -> None:
    """DDP's own mixed_precision, for example, forbids any change: steps are then as written in the experiment too."""
    (first,) = examined(SlowJob(buffers=6.0, untouchable=True, more={"buffer_bytes": 2**20})).findings
    assert (first.cause, first.status) == ("buffer_broadcast", "suspected")
    assert first.seconds * 1e3 == pytest.approx(6.0, rel=0.15)
    assert "can be given other arguments" in first.text


def test_the_waterfall_keeps_events_apart_from_usual_steps() -> None:
    """Saving costs 6 ms of a step on average, whatever else is mended."""
    saves = {"event": lambda rank, step: {"other": 60.0} if rank == 0 and step % 10 == 3 else {}}
    found = examined(SlowJob(data=10.0, transfer=8.0, **saves))
    steps = {one.cause: one.seconds * 1e3 for one in found.waterfall}
    expected = {"as written": 40.5, "data_loader": 30.5, "exposed_communication": 22.5, "rank0_work": 16.5}
    assert steps == pytest.approx(expected, rel=0.06)
