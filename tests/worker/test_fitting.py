"""A recipe made for another job: no rank trains a single step with it, all decide alike, and one line says so."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import forks
import pytest
import torch
import torch.distributed as dist
from fitting_checks import BATCH, CASES, FEATURES, HAS_VIEWS, WORLD, Network, order_of
from launchers import environment
from on_ranks import on_ranks
from torch.nn.parallel import DistributedDataParallel as DDP

from autoddp.worker.ddp.private import time_limit_of
from autoddp.worker.job import applying, fitting
from autoddp.worker.job.applying import start_applying

REFUSED = {
    "hook refused": "plain",
    "hook refused, alone": "plain",
    "hook refused, moves": "plain, moves",
    "hook refused by one": "plain, odd",
    "powersgd refused": "plain",
    "accumulation refused": "plain",
    "accumulation refused, clips": "plain, clips",
    "accumulation and hook refused": "plain, clips",
    "implicit_no_sync refused": "plain, micro-batches",
    "caps refused": "plain",
    "caps refused, groups": "plain",
    "static refused": "plain",
    "other parameters": "plain",
    "started elsewhere": "plain",
    "another backend": "plain",
    "nothing to launch, refused": "plain",
}
"""Case → the training without a recipe that it must be, step by step."""
RESTORED = {
    "hook, restored": "plain",
    "static graph, restored": "plain",
    "accumulation, restored": "plain",
    "implicit_no_sync, restored": "plain, micro-batches",
}
"""The same of what is trained after it was unpickled, under a recipe that fits."""
FIT = (
    "hook fits",
    "as many ranks",
    "hook fits, alone",
    "hook, free batch",
    "hook, nothing known",
    "accumulation fits",
    "caps fit",
)
ALONE = [("accumulation fits, alone", "accumulation fits"), ("implicit_no_sync fits, alone", "plain, micro-batches")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of what each rank has left: `NAME RANK.pt`."""
    folder = tmp_path_factory.mktemp("fitting")
    program = [str(Path(__file__).with_name("fitting_checks.py")), str(folder)]
    ranks = [
        forks.popen([*program, str(rank)], env=environment(RANK=str(rank), LOCAL_RANK=str(rank)))
        for rank in range(WORLD)
    ]
    for rank in ranks:
        rank.wait(300)
    return folder


def ranks(folder: Path, name: str) -> list[dict[str, Any]]:
    return [torch.load(folder / f"{name} {rank}.pt") for rank in range(WORLD)]


def far(one: dict[str, Any], other: dict[str, Any]) -> float:
    """The largest difference of any parameter after any step."""
    steps = zip(one["steps"], other["steps"], strict=True)
    return max(float((a - b).abs().max()) for mine, theirs in steps for a, b in zip(mine, theirs, strict=True))


def note(folder: Path, name: str) -> str:
    path = folder / f"{name}.unfit"
    return path.read_text() if path.exists() else ""


@pytest.mark.parametrize("name", CASES)
def test_all_ranks_stay_together(folder: Path, name: str) -> None:
    first, other = ranks(folder, name)
    assert far(first, other) == 0
    assert (first["views"], first["static"], first["hooks"]) == (other["views"], other["static"], other["hooks"])


@pytest.mark.parametrize("name", REFUSED)
def test_a_refused_recipe_changes_no_step(folder: Path, name: str) -> None:
    found, plain = ranks(folder, name)[0], ranks(folder, REFUSED[name])[0]
    assert far(found, plain) < 1e-6
    assert (found["views"], found["static"], found["hooks"]) == ([False], [False], [0])


def test_no_recipe_goes_on_where_torch_mixes_up_gradients(folder: Path) -> None:
    """They lie in the buckets of the recipe's first step as torch has laid them out before the weight was moved."""
    first, other = ranks(folder, "caps refused, moves")
    assert (first["views"], other["views"]) == ([False], [False])
    (line,) = first["told"]
    assert "(the script gives parameters another memory format after DDP was built" in line
    assert line.endswith("the next launch tunes again")


@pytest.mark.parametrize("name", RESTORED)
def test_what_was_unpickled_trains_as_written(folder: Path, name: str) -> None:
    found, plain = ranks(folder, name)[0], ranks(folder, RESTORED[name])[0]
    assert far(found, plain) < 1e-6
    assert (found["views"], found["static"], found["hooks"]) == ([False], [False], [0])
    (line,) = found["told"]
    assert line == (
        "warning: the script trains a DDP object that it has unpickled or copied: that one runs as written, "
        "without the recipe"
    )


@pytest.mark.parametrize("name", REFUSED)
def test_one_line_says_so_and_the_next_launch_knows(folder: Path, name: str) -> None:
    (line,) = ranks(folder, name)[0]["told"]
    assert line.startswith("warning: proj.train.autoddp.toml was made for another job (")
    assert "runs as written, but OMP_NUM_THREADS=1 was set at its start and stays; the next launch tunes again" in line
    assert note(folder, name).startswith("# a note\n")
    assert note(folder, name).splitlines()[-1] in line


@pytest.mark.parametrize("name", ["caps fit", "hook fits"])
def test_a_model_may_have_a_method_parameters_of_its_own(folder: Path, name: str) -> None:
    found, usual = ranks(folder, f"{name}, groups")[0], ranks(folder, name)[0]
    assert far(found, usual) == 0
    assert (found["told"], found["hooks"]) == ([], usual["hooks"])


@pytest.mark.parametrize("name", FIT)
def test_a_recipe_that_fits_is_used_in_silence(folder: Path, name: str) -> None:
    found = ranks(folder, name)[0]
    assert found["told"] == []
    assert not note(folder, name)


@pytest.mark.parametrize("name", ["hook fits", "hook fits, alone", "hook, nothing known", "accumulation fits"])
def test_what_fits_has_an_effect(folder: Path, name: str) -> None:
    """Else the tests of what is refused would say nothing."""
    assert far(ranks(folder, name)[0], ranks(folder, "plain")[0]) > 1e-5


@pytest.mark.parametrize(("name", "other"), ALONE)
def test_a_pass_that_one_rank_runs_alone_changes_no_step(folder: Path, name: str, other: str) -> None:
    """Nobody goes backward from it, so it is no part of a step, nor of what is counted of one."""
    found = ranks(folder, name)[0]
    assert far(found, ranks(folder, other)[0]) < 1e-6
    assert found["told"] == []


@pytest.mark.parametrize(("name", "is_static"), [("searches", False), ("searches as tuned", True)])
def test_a_search_for_unused_parameters_goes_on_where_the_tuned_script_had_none(
    folder: Path, name: str, is_static: bool
) -> None:
    """A static graph ends it, and then stops the job at the first unused parameter."""
    found = ranks(folder, f"static graph, {name}")[0]
    assert far(found, ranks(folder, "plain")[0]) < 1e-6
    assert (found["static"], found["searches"]) == ([is_static], [not is_static])
    said = "the recipe's static_graph is left out: the script sets find_unused_parameters, and did not when tuned"
    assert [line.partition("; ")[0] for line in found["told"]] == ([] if is_static else [f"warning: {said}"])


def test_nothing_is_left_out_where_the_script_has_a_static_graph_itself(folder: Path) -> None:
    found = ranks(folder, "static graph, searches, static itself")[0]
    assert (found["static"], found["told"]) == ([True], [])


def test_a_pass_without_gradients_before_the_backward_pass_changes_no_step(folder: Path) -> None:
    """What the pass before it has put off is reduced all the same, as in scripts that compare two views of a sample."""
    found = ranks(folder, "implicit_no_sync fits, looks")[0]
    assert far(found, ranks(folder, "plain, micro-batches")[0]) < 1e-6
    assert found["told"] == []


@pytest.mark.parametrize(("name", "tuned"), [("fewer passes", 4), ("no_sync", 2)])
def test_steps_of_fewer_reductions_are_told(folder: Path, name: str, tuned: int) -> None:
    """As where a script that was tuned with --accumulate 4 is launched with less: then nothing overlaps.

    So it is where it has got `no_sync` since, which leaves the number of its backward passes as it was.
    """
    found = ranks(folder, f"implicit_no_sync, {name}")[0]
    assert far(found, ranks(folder, "plain, micro-batches")[0]) < 1e-6
    (line,) = found["told"]
    had = f"the {tuned} backward passes with a reduction that they had when tuned"
    assert f"steps have fewer than {had}; tune it with --trials 20" in line


def test_what_changes_training_is_not_used_by_another_number_of_ranks(folder: Path) -> None:
    """As where a host of `--nnodes 1:2` is lost, and torchrun starts the ranks of the others again."""
    found = ranks(folder, "other ranks")[0]
    assert far(found, ranks(folder, "plain")[0]) == 0
    assert (found["views"], found["hooks"]) == ([False], [0])
    (line,) = found["told"]
    assert (
        "proj.train.autoddp.toml changes training and was made for 3 ranks: this start has 2, and runs as written"
        in line
    )
    assert not note(folder, "other ranks")


def test_a_parameter_that_the_model_returns_changes_no_step(folder: Path) -> None:
    """It outlives each pass: what was said of a pass that reduces must not hold for one that is put off."""
    found = ranks(folder, "implicit_no_sync fits, shares")[0]
    assert far(found, ranks(folder, "plain, shares")[0]) < 1e-6
    assert found["told"] == []


def test_a_training_pass_of_one_rank_before_the_backward_pass_changes_no_step(folder: Path) -> None:
    """What the backward pass gives is not taken for that pass's, or that rank would count one more than the others."""
    found = ranks(folder, "implicit_no_sync fits, peeks")[0]
    assert far(found, ranks(folder, "plain, peeks")[0]) < 1e-6
    assert found["told"] == []


def test_a_first_pass_that_does_not_reduce_is_one_without_a_static_graph(folder: Path) -> None:
    """As where the recipe was measured without accumulation: torch launches the buckets there, and fails."""
    found = ranks(folder, "static graph, no_sync")[0]
    assert far(found, ranks(folder, "plain, no_sync")[0]) < 1e-6
    assert found["static"] == [False]
    (line,) = found["told"]
    assert line.startswith("warning: the recipe's static_graph is left out: the script does not reduce in the first")


def test_arguments_that_fit_stay(folder: Path) -> None:
    assert ranks(folder, "caps fit")[0]["views"] == [HAS_VIEWS]


def test_small_buckets_do_not_cut_a_compiled_model(folder: Path) -> None:
    """torch.compile would make a piece of each, and refuses caps below 1 MiB."""
    found = ranks(folder, "caps fit, compiled")[0]
    assert far(found, ranks(folder, "plain")[0]) < 1e-6
    assert (found["told"], found["views"]) == ([], [HAS_VIEWS])


def test_the_rank_that_differs_is_named(folder: Path) -> None:
    (line,) = ranks(folder, "hook refused by one")[0]["told"]
    assert "(rank 1: input 0 float32[8, 16] in the recipe, float32[9, 16] here)" in line


def test_of_two_models_one_is_refused(folder: Path) -> None:
    found, plain = ranks(folder, "one of two refused")[0], ranks(folder, "plain, two")[0]
    assert found["hooks"] == [1, 0]
    (line,) = found["told"]
    assert "this model runs as written" in line
    first = slice(0, 4)
    assert far({"steps": [s[4:] for s in found["steps"]]}, {"steps": [s[4:] for s in plain["steps"]]}) < 1e-6
    assert far({"steps": [s[first] for s in found["steps"]]}, {"steps": [s[first] for s in plain["steps"]]}) > 1e-5


def test_a_model_that_tuning_could_not_see_does_not_ask_for_another(folder: Path) -> None:
    """Else a script that trains a second model later would be tuned again and again."""
    (line,) = ranks(folder, "a later model")[0]["told"]
    assert "parameter shapes and types are others" in line
    assert line.startswith("warning: proj.train.autoddp.toml was made for another model (")
    assert line.endswith("; tuning sees only the first models")
    assert not note(folder, "a later model")


def test_a_later_model_with_other_inputs_is_told_how_it_gets_the_recipe(folder: Path) -> None:
    (line,) = ranks(folder, "named hook, again with other inputs")[0]["told"]
    assert line.endswith("; tuning sees only the first models; --force uses the recipe all the same")


def test_no_hook_divides_by_ranks_that_have_no_inputs_any_more(folder: Path) -> None:
    """Inside `join()` DDP divides by the others, if the script wants that; it tells no hook how many these are."""
    found, plain = ranks(folder, "hook, joins")[0], ranks(folder, "plain, joins")[0]
    assert far(found, plain) < 1e-6
    assert found["hooks"] == [0]
    (line,) = found["told"]
    assert line.startswith("warning: the recipe's hook is left out from here on: the script uses join()")


def without_autoddp_on_one(rank: int) -> dict[str, Any]:
    """Rank 1 trains as written, as where autoddp could not begin: it never says whether the recipe fits."""
    patient = DDP(Network(), process_group=dist.new_group(timeout=timedelta(hours=5)))
    found: dict[str, Any] = {"limits": [time_limit_of(patient), time_limit_of(DDP(Network()))], "said": []}
    if rank == 0:
        fitting._SILENT = 0.1
        fitting.time_limit_of = lambda ddp: 1.0  # type: ignore[attr-defined]
        applying._warn = found["said"].append
        start_applying(order_of(CASES["hook fits"], Path(), ""))
    model = DDP(Network())
    try:
        model(torch.ones(BATCH, FEATURES)).sum().backward()
    except BaseException as error:  # `JobStops`, and nobody else's
        found["said"].append(str(error))
        dist.all_reduce(torch.zeros(sum(p.numel() for p in model.parameters())))  # for which rank 1 waits
    return found


def test_a_rank_without_autoddp_is_told_of_and_not_waited_for_for_ever(tmp_path: Path) -> None:
    found, other = on_ranks(WORLD, without_autoddp_on_one, tmp_path)
    word, end = found["said"]
    assert word.startswith("1 of 2 ranks have come to their first reduction, and wait for the others")
    assert "the job stops after 1 s" in end
    assert other["said"] == []
    for limits in (found["limits"], other["limits"]):  # else a job could stop that torchrun would train
        assert limits == [pytest.approx(5 * 3600, abs=1), pytest.approx(100, abs=1)]
