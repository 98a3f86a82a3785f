"""The stages of real steps, and experiments on them, each undone: two gloo ranks with sleeps planted in each stage."""

from __future__ import annotations

import multiprocessing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from on_ranks import on_ranks
from stages_checks import (
    EPOCH,
    SAMPLES,
    SLEEP,
    STEPS,
    checks,
    compiled_collective,
    killed_workers,
    lengths_of_epochs,
    odd_batches,
    odd_scripts,
    one_reader,
    parameters_as_written,
    parameters_under_experiments,
    told,
)
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter

from autoddp.worker.observe import loader
from autoddp.worker.observe.stages import Stages


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return on_ranks(2, checks, tmp_path_factory.mktemp("stages"))


def waits_of(recorded: dict[str, Any], which: str = "") -> float:
    """Seconds of a step in which a rank waits for the other one: gloo's broadcasts of buffers wait for it already."""
    return float(recorded[f"{which}buffers"] + recorded[f"{which}exposed"])


@pytest.mark.parametrize("stage", ["data", "forward", "backward", "optimizer"])
def test_each_sleep_is_found_in_its_stage(found: list[dict[str, Any]], stage: str) -> None:
    for rank in found:
        assert rank["as written"][stage] >= SLEEP


def test_stages_add_up_to_the_step(found: list[dict[str, Any]]) -> None:
    for rank in found:
        for name in ("as written", "meets", "kept", "delayed", "not broadcast", "undone"):
            assert rank[name]["of it in stages"] == pytest.approx(1, rel=0.05)


def test_who_is_late_does_other_work_and_who_waits_is_exposed(found: list[dict[str, Any]]) -> None:
    first, second = (rank["as written"] for rank in found)
    assert second["other"] >= 3 * SLEEP > first["least other"]
    # The model has buffers, so the ranks meet at their broadcast already: gloo's waits for all of them.
    assert waits_of(first, "most ") > max(SLEEP, waits_of(second, "least "))


def test_who_waits_in_a_collective_of_the_scripts_is_exposed(found: list[dict[str, Any]]) -> None:
    """Of a barrier between two steps, as behind the saving of one rank."""
    for name in ("meets", "waits"):
        first, second = (rank[name] for rank in found)
        assert second["other"] >= 3 * SLEEP > SLEEP > first["least other"]
        assert first["most exposed"] >= 2 * SLEEP > second["least exposed"]


def test_a_call_that_torch_waits_for_is_told_with_its_wait(tmp_path: Path) -> None:
    """NCCL waits for it inside the call, on the stream of the script, and gives nothing that could be waited for."""
    pair = ["begins", "ends"]
    expected = {"barrier": pair * 2, "all_reduce": pair * 2, "started": [], "waited for": pair}
    assert on_ranks(1, told, tmp_path) == [expected]


def test_a_collective_is_compiled_with_what_is_around_it(tmp_path: Path) -> None:
    assert on_ranks(2, compiled_collective, tmp_path) == [{"mean": [0.5] * 3}] * 2


def test_samples_are_counted(found: list[dict[str, Any]]) -> None:
    assert all(rank["as written"]["samples"] == (2,) * STEPS for rank in found)


def test_stamps_cost_next_to_nothing(found: list[dict[str, Any]]) -> None:
    for rank in found:
        assert rank["as written"]["stamps"] < 20
        assert rank["as written"]["stamps"] * rank["cost of a stamp"] < 0.005 * rank["as written"]["seconds"]


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return on_ranks(2, odd_scripts, tmp_path_factory.mktemp("odd"))


@pytest.mark.parametrize("name", ["object as output", "penalizes", "trains in eval mode"])
def test_each_backward_pass_is_seen(odd: list[dict[str, Any]], name: str) -> None:
    """Where rank 0 waits for the other one: in `buffers` and `exposed`, not in what it does itself."""
    for rank in odd:
        twice = 2 if name == "penalizes" else 1
        assert twice * SLEEP <= rank[name]["least backward"] < (twice + 1) * SLEEP
        assert SLEEP <= rank[name]["least forward"] < 3.5 * SLEEP
    first, second = (rank[name] for rank in odd)
    assert waits_of(first, "most ") > max(SLEEP, waits_of(second, "least "))


def test_a_delay_hits_the_forward_pass_in_eval_mode(odd: list[dict[str, Any]]) -> None:
    first, second = (rank["trains in eval mode"] for rank in odd)
    assert first["forward"] >= 2 * SLEEP > second["least forward"]


def test_batches_may_be_objects(odd: list[dict[str, Any]]) -> None:
    for rank in odd:
        assert rank["objects as batches"]["samples"] == (2,) * STEPS
        assert rank["kept"]["kept"] == STEPS
        assert rank["kept is given"], "edits in place show"


def test_a_new_data_set_takes_the_place_of_one_that_workers_have_read(odd: list[dict[str, Any]]) -> None:
    """Nothing of the experiment may keep the old one alive."""
    for rank in odd:
        assert rank["workers in a new epoch"]["kept"] == 3


def test_a_loader_that_is_hardly_read_does_not_count(odd: list[dict[str, Any]]) -> None:
    for rank in odd:
        assert len(rank["stored"]) == 4


@pytest.mark.parametrize("name", ["evaluates", "evaluates late"])
def test_what_an_evaluation_reads_is_other_work(odd: list[dict[str, Any]], name: str) -> None:
    for rank in odd:
        assert rank[name]["samples"] == (2,) * STEPS
        assert rank[name]["least data"] < 2 * SLEEP
        assert rank[name]["other"] >= 6 * SLEEP


def test_kept_batches_take_the_place_of_the_loader(found: list[dict[str, Any]]) -> None:
    """The script edits each batch in place while they are given: each is given again as it was."""
    for rank in found:
        assert rank["kept"]["kept"] == STEPS
        assert rank["kept"]["least data"] < SLEEP
        assert rank["kept is given"], "other batches than those that were kept, or edited ones"
    alone = [rank["kept on rank 1"] for rank in found]
    assert alone[0]["data"] >= SLEEP > alone[1]["least data"]
    assert [one["kept"] for one in alone] == [0, STEPS]


def test_a_loop_over_a_whole_loader_ends(found: list[dict[str, Any]]) -> None:
    """A validation between two steps reads all batches. Without `no_grad` it is given kept ones, and ends as well."""
    assert all(rank["validated"] == rank["validated in a step"] == SAMPLES // 2 for rank in found)


def test_an_epoch_has_as_many_batches_as_written(tmp_path: Path) -> None:
    """Else ranks that are given kept batches would train on where the others meet at the end of an epoch."""
    for rank in on_ranks(2, lengths_of_epochs, tmp_path):
        for lengths in rank.values():
            assert lengths[:-1] == [EPOCH] * (len(lengths) - 1)
            assert sum(lengths) == 3 + 4 * EPOCH


def test_a_script_gets_its_batches_whatever_they_are(tmp_path: Path) -> None:
    """Nested tensors have no shape, indices and samplers of the script's own can do next to nothing."""
    assert on_ranks(2, odd_batches, tmp_path) == [{"given": [[2] * 3] * 3}] * 2


def test_workers_load_other_samples_of_the_data_set(found: list[dict[str, Any]]) -> None:
    for rank in found:
        assert rank["by workers"]["kept"] == 4 + STEPS
        assert rank["by workers"]["least data"] < SLEEP
        assert rank["workers load"], "not the samples that follow those whose batches were kept"
        assert rank["same chance"], "the script's random numbers have changed"


def test_a_data_set_that_workers_cannot_read_is_told(tmp_path: Path) -> None:
    assert on_ranks(2, one_reader, tmp_path) == [{"given": 0, "as kept": True}] * 2


def test_a_script_goes_on_when_workers_of_ours_die(tmp_path: Path) -> None:
    """torch raises in the main thread, wherever that is, as soon as a worker that it knows has died."""
    assert on_ranks(2, killed_workers, tmp_path) == [{"given from workers": 0}] * 2


class _Loading:
    """In the place of a DataLoader: an iterator without workers."""

    _worker_pids_set = False

    def __init__(self, *_: Any, **named: Any) -> None:
        self.batches = iter(named["batch_sampler"])

    def __iter__(self) -> _Loading:
        return self

    def __next__(self) -> Any:
        return next(self.batches)


@pytest.mark.parametrize(("present", "loads"), [(None, True), ("fork", True), ("forkserver", True), ("spawn", False)])
def test_a_start_method_that_python_has_chosen(present: str | None, loads: bool, monkeypatch: Any) -> None:
    """From Python 3.14 on it is "forkserver", as soon as anything in the script has made a lock or a queue."""
    monkeypatch.setattr(multiprocessing, "get_all_start_methods", lambda: ["forkserver", "spawn", "fork"])
    monkeypatch.setattr(multiprocessing, "get_start_method", lambda allow_none: present)
    monkeypatch.setattr(loader, "DataLoader", _Loading)
    like: Any = SimpleNamespace(_dataset=range(8), _auto_collation=True, _collate_fn=list, _pin_memory=False)
    kept = loader._Kept(lambda: like._dataset, "", indices=[[0, 1]])
    if loads:
        assert kept.from_workers(like, 2) == [2, 3]
    else:
        with pytest.raises(RuntimeError, match="main module once more"):
            kept.from_workers(like, 2)


def test_kept_batches_lie_where_they_are_asked_for(found: list[dict[str, Any]]) -> None:
    """Without a GPU there is no pinned memory: the script gets batches all the same, and it is told."""
    for rank in found:
        assert rank["kept on the device"]["kept"] == STEPS
        assert rank["the same there"]
        assert rank["kept in pinned memory"]["kept"] == (2 if torch.cuda.is_available() else 0)


def test_the_loader_goes_on_where_it_was(found: list[dict[str, Any]]) -> None:
    assert all(rank["goes on"] for rank in found)
    assert all(rank["undone"]["kept"] == 0 and rank["undone"]["data"] >= SLEEP for rank in found)


def test_kept_batches_are_freed(found: list[dict[str, Any]]) -> None:
    assert [rank["forgotten"] for rank in found] == [0, 0]


def test_a_delay_hits_one_rank_and_one_stage(found: list[dict[str, Any]]) -> None:
    first, second = (rank["delayed"] for rank in found)
    assert first["optimizer"] >= 2 * SLEEP > second["least optimizer"]
    assert all(rank["undone"]["least optimizer"] < 2 * SLEEP for rank in found)


def test_added_bytes_travel_in_every_step(found: list[dict[str, Any]]) -> None:
    for rank in found:
        assert rank["more bytes"]["of it in stages"] == pytest.approx(1, rel=0.05)
    last = found[1]  # for which the other rank waits: it waits for nothing but the bytes
    assert waits_of(last["more bytes"]) - waits_of(last["undone"], "least ") > 0.01


def test_arguments_of_ddp_are_undone(found: list[dict[str, Any]]) -> None:
    assert [rank["broadcasts, changed"] for rank in found] == [False, False]
    assert [rank["broadcasts"] for rank in found] == [True, True]


def test_what_changes_no_arithmetic_leaves_the_same_bits(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    tried = on_ranks(2, parameters_under_experiments, tmp_path / "a")
    written = on_ranks(2, parameters_as_written, tmp_path / "b")
    for one, other in zip(tried, written, strict=True):
        assert one["threads"]
        assert one["added in float64"] == [1000]
        assert all(torch.equal(a, b) for a, b in zip(one["parameters"], other["parameters"], strict=True))


def test_how_many_batches_may_wait_is_known_while_nothing_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A validation's loader does not count."""
    for owner, name in (
        (DataLoader, "__iter__"),
        (_BaseDataLoaderIter, "__next__"),
        (_BaseDataLoaderIter, "_next_index"),
    ):
        monkeypatch.setattr(owner, name, getattr(owner, name))
    loaders = loader.Loaders(Stages())
    loaders.install()
    assert len(list(DataLoader(range(4), num_workers=2, prefetch_factor=3))) == 4  # type: ignore[arg-type]
    with torch.no_grad():
        assert len(list(DataLoader(range(4), num_workers=4, prefetch_factor=4))) == 4  # type: ignore[arg-type]
    assert loaders.prefetched == 6
