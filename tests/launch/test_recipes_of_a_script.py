"""Whose recipe is it? Two scripts of one name, one script with several models, a checkout that has moved."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from launchers import AUTODDP, SCRIPTS, start
from torch import nn

from autoddp import topology
from autoddp.commandline import local_fingerprint
from autoddp.commandline.environment import job_environment
from autoddp.commandline.mode import Mode, choose, for_hosts
from autoddp.commandline.options import Options
from autoddp.commandline.saved_recipes import (
    Note,
    arguments_digest,
    found_recipes,
    place_for,
    recipe_may_be_anothers,
    remove_notes,
    script_names,
)
from autoddp.commandline.words import parse
from autoddp.errors import NotTuned, UnfitRecipe
from autoddp.knobs import Configuration, Rung
from autoddp.network.own_network import Network
from autoddp.recipe import Evidence, Fits, LadderEntry, MadeBy, Recipe, load, save
from autoddp.wire.worker_config import APPLY
from autoddp.worker.ddp.model import parameters_digest

TWO = ["--nproc-per-node", "2"]
VERSION = torch.__version__.split("+")[0]
HERE = Fits(2, 1, "gloo", ("cpu",), VERSION, 4096, "0123456789abcdef", script="train.py", inputs=("0: float32[8, 16]",))
OF_PLAIN = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))
"""The model of tests/scripts/plain.py."""
EVIDENCE = Evidence(31.0, 0.1, 20, 6, 100, "the best of what you allow")


@pytest.fixture(autouse=True)
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where everything is launched: `proj/` with train.py, a/exp/train.py and b/exp/train.py."""
    folder = tmp_path / "proj"
    for place in (folder, folder / "a" / "exp", folder / "b" / "exp"):
        place.mkdir(parents=True, exist_ok=True)
        (place / "train.py").write_text("print('trained')\n")
    monkeypatch.chdir(folder)
    return folder


def recipe(
    words: list[str] | None = None, date: str = "2026-01-01T00:00:00Z", cap: float = 50.0, **fits: object
) -> Recipe:
    """What a launcher writes that was called with these words."""
    arguments = arguments_digest(parse([*TWO, *words])) if words else ""
    made_by = MadeBy("0.1.0", VERSION, "3.11.7", date, arguments)
    return Recipe(made_by, replace(HERE, **fits), Configuration({"bucket_cap_mb": cap}), EVIDENCE)  # type: ignore[arg-type]


def plan(*words: str) -> Mode:
    return choose(parse([*TWO, *words]))


def test_a_recipe_that_is_named_for_another_script() -> None:
    """Such a script may build no DDP model, and would be run by several ranks over its own files."""
    save(recipe(), "known.toml")
    Path("folder").mkdir()
    save(recipe(script="b/exp/train.py"), "folder/b.toml")
    assert recipe_may_be_anothers(parse(["--recipe", "known.toml", "a/exp/train.py"]))
    assert recipe_may_be_anothers(parse(["--recipe", "folder", "train.py"]))
    assert not recipe_may_be_anothers(parse(["--recipe", "known.toml", "train.py"]))
    assert not recipe_may_be_anothers(parse(["--recipe", "known.toml", "--trials", "3", "a/exp/train.py"]))
    assert not recipe_may_be_anothers(parse(["train.py"]))
    save(recipe(script="*/proj/train.py"), "folder/own.toml")
    assert not recipe_may_be_anothers(parse(["--recipe", "folder", "train.py"]))
    with pytest.raises(UnfitRecipe, match="world size 2 in the recipe, 1 here"):
        choose(parse(["--nproc-per-node", "1", "--recipe", "known.toml", "a/exp/train.py"]))


def test_two_scripts_of_one_name_have_recipes_of_their_own() -> None:
    """The second was launched with the first one's recipe, and never tuned."""
    save(recipe(), "proj.train.autoddp.toml")
    assert plan("train.py").path == Path("proj.train.autoddp.toml")
    other = plan("a/exp/train.py")
    assert other.tune
    assert other.recipe is None


def test_what_a_launch_with_a_recipe_does_not_do_is_said() -> None:
    """Under --tune-only it said "launching", started nothing, and ended with exit code 0."""
    save(recipe(), "proj.train.autoddp.toml")
    there = "recipe proj.train.autoddp.toml is there: nothing is tuned, and under --tune-only no job is started"
    assert plan("--tune-only", "train.py").says == f"{there}; --trials 20 tunes again"
    launching = plan("train.py").says
    says = plan("--job-steps", "90000", "train.py").says
    assert says == f"{launching}; --job-steps is for tuning, and left out: --trials 20 tunes again"
    says = plan("--trace", "--cuda-graphs", "--recipe", "proj.train.autoddp.toml", "train.py").says
    assert says == f"{launching}; --cuda-graphs, --trace are for tuning, and left out: --trials 20 tunes again"
    assert plan("--seed", "1", "--verbose", "train.py").says == launching
    # No study of the recipe has tried a larger batch, so nobody knows whether one would have gained.
    says = plan("--accumulate-up-to", "4", "train.py").says
    assert says == f"{launching}; --accumulate-up-to is for tuning, and left out: --trials 20 tunes again"
    assert plan("--accumulate-up-to", "1", "train.py").says == launching


def test_what_is_launched_is_told_with_its_variables() -> None:
    """Beside settings of DDP, those that a process reads when it starts were not told."""
    made = replace(recipe(), env={"OMP_NUM_THREADS": "1"})
    save(made, "proj.train.autoddp.toml")
    assert plan("train.py").says.endswith(": launching bucket_cap_mb=50.0, with OMP_NUM_THREADS=1")


def test_a_named_recipe_without_trials_is_not_left_out_without_a_word() -> None:
    """`--trials 0 --recipe FILE` may mean: launch with it, and try nothing. autoddp is torchrun then."""
    save(recipe(), "proj.train.autoddp.toml")
    found = plan("--trials", "0", "--recipe", "proj.train.autoddp.toml", "train.py")
    assert found.as_torchrun
    without = "--trials 0 does what torchrun does, without the recipe proj.train.autoddp.toml"
    assert found.says == f"{without}: to use it, leave --trials out"
    assert plan("--trials", "0", "train.py").says == ""


def test_two_folders_of_one_name() -> None:
    save(recipe(script="a/exp/train.py"), "exp.train.autoddp.toml")
    assert not plan("a/exp/train.py").tune
    other = plan("b/exp/train.py")
    assert other.tune
    assert "script a/exp/train.py in the recipe, b/exp/train.py here" in other.says
    said: list[str] = []
    place = place_for(parse([*TWO, "b/exp/train.py"]), recipe(script="b/exp/train.py"), said.append)
    assert place == Path("exp.train.2.autoddp.toml")
    assert said == ["exp.train.autoddp.toml is another job's recipe and stays"]
    save(recipe(script="b/exp/train.py"), place)
    assert plan("a/exp/train.py").path == Path("exp.train.autoddp.toml")
    assert plan("b/exp/train.py").path == place


@pytest.mark.parametrize(
    "other", [{"inputs": ("0: float32[64, 16]",)}, {"parameters_digest": "f" * 16}, {"world_size": 4}]
)
def test_no_recipe_of_another_job_is_overwritten(other: dict[str, object]) -> None:
    request = parse([*TWO, "train.py"])
    save(recipe(), request.recipe_path)
    before = request.recipe_path.read_bytes()
    assert place_for(request, recipe(cap=1.0), lambda line: None) == request.recipe_path  # its own is
    place = place_for(request, recipe(**other), lambda line: None)
    save(recipe(**other), place)
    assert place == Path("proj.train.2.autoddp.toml")
    assert request.recipe_path.read_bytes() == before
    assert place_for(request, recipe(**other), lambda line: None) == place
    assert found_recipes(request) == [request.recipe_path, place]


def test_without_ddp_other_arguments_and_other_objectives_are_other_jobs() -> None:
    """Nothing else tells their recipes apart: no model and no inputs are known of them."""
    small, large = ["train.py", "--model", "small"], ["train.py", "--model", "large"]

    def without_ddp(words: list[str], objective: str) -> Recipe:
        found = recipe(words, parameters_digest="no DDP model", inputs=())
        return replace(found, evidence=replace(EVIDENCE, objective=objective))

    request = parse([*TWO, *small])
    save(without_ddp(small, "steps"), request.recipe_path)
    for words, objective, name in (
        (small, "steps", "proj.train.autoddp.toml"),
        (large, "steps", "proj.train.2.autoddp.toml"),
        (small, "regex:min:loss (.*)", "proj.train.2.autoddp.toml"),
    ):
        assert place_for(request, without_ddp(words, objective), lambda line: None) == Path(name)


def test_a_name_given_is_the_users_own() -> None:
    request = parse([*TWO, "--recipe", "mine.toml", "--trials", "3", "train.py"])
    save(recipe(), "mine.toml")
    assert place_for(request, recipe(world_size=4), lambda line: None) == Path("mine.toml")


def test_of_several_the_one_made_with_these_arguments_goes_first() -> None:
    small, large = ["train.py", "--model", "small"], ["train.py", "--model", "large"]
    save(recipe(small), "proj.train.autoddp.toml")
    save(recipe(large, "2026-02-01T00:00:00Z"), "proj.train.2.autoddp.toml")
    assert plan(*small).path == Path("proj.train.autoddp.toml")
    assert plan(*large).path == Path("proj.train.2.autoddp.toml")
    assert plan("train.py", "--seed", "1").path == Path("proj.train.2.autoddp.toml")  # the newest


def test_an_objective_of_other_arguments_takes_no_ranks_from_a_ddp_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """The job was launched with one rank on all GPUs of the host, once the script was tuned without DDP as well."""
    monkeypatch.setattr("autoddp.commandline.rank_count.visible_gpus", lambda: 2)
    ddp, own = ["train.py", "--parallel", "ddp"], ["train.py", "--parallel", "own"]
    save(recipe(ddp), "proj.train.autoddp.toml")
    alone = recipe(own, "2026-02-01T00:00:00Z", world_size=1, parameters_digest="no DDP model", inputs=())
    save(replace(alone, evidence=replace(EVIDENCE, objective="steps")), "proj.train.2.autoddp.toml")
    for words, number in ((ddp, "2"), (own, "1")):
        asked = parse(words)
        mode = choose(asked)
        assert mode.recipe is not None
        assert mode.recipe.made_by.arguments == arguments_digest(asked)
        assert asked.torchrun.nproc_per_node == number
        assert "other arguments" not in mode.says
    assert choose(parse([*own, "--seed", "1"])).says.endswith(", tuned with other arguments of the script")


def test_without_ddp_a_recipe_that_does_not_fit_is_no_reason_to_tune_for_ddp() -> None:
    """Ranks that such a script starts by itself would wait for ever in an attempt that expects a DDP model."""
    old = recipe(["train.py"], world_size=1, torch="1.0.0", parameters_digest="no DDP model", inputs=())
    old = replace(old, env={"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}, evidence=replace(EVIDENCE, objective="steps"))
    save(old, "proj.train.autoddp.toml")
    mode = choose(parse(["train.py"]))
    assert (mode.tune, mode.recipe, mode.variables) == (False, None, old.env)
    assert mode.says.endswith(": launching as written; --objective steps tunes again")
    assert choose(parse(["--objective", "steps", "train.py"])).tune
    with pytest.raises(NotTuned, match="--objective steps tunes again"):
        choose(parse(["--tune-only", "train.py"]))


def test_hosts_of_which_one_alone_has_a_recipe_that_fits_meet_and_are_told_so() -> None:
    """The other one was launched as torchrun would, and both waited in vain for a quarter of an hour."""
    two = ["--nnodes", "2", "--nproc-per-node", "1", "train.py"]
    fits = recipe(["train.py"], world_size=2, nodes=2, parameters_digest="no DDP model", inputs=())
    modes = []
    for version in (VERSION, "1.0.0"):
        made = replace(fits, fits=replace(fits.fits, torch=version), evidence=replace(EVIDENCE, objective="steps"))
        save(made, "proj.train.autoddp.toml", previous=Path("older.toml"))
        modes.append(choose(parse(two)))
    assert [mode.recipe is None for mode in modes] == [False, True]
    assert [(mode.tune, mode.as_torchrun) for mode in modes] == [(False, False)] * 2
    assert len({mode.digest(parse(two)) for mode in modes}) == 2
    assert modes[1].reads(parse(two)) == "no recipe that fits there, launching as written"


def test_hosts_of_which_one_starts_no_job_are_not_about_to_do_the_same() -> None:
    """As where AUTODDP_TUNE_ONLY is left in one shell: the other host would wait for this one's ranks."""
    save(recipe(world_size=4, nodes=2), "proj.train.autoddp.toml")
    for words in (["--trials", "3"], []):  # tuning, and launching with a recipe
        both = [parse(["--nnodes", "2", *TWO, *words, *only, "train.py"]) for only in ([], ["--tune-only"])]
        modes = [choose(one) for one in both]
        assert len({mode.digest(one) for mode, one in zip(modes, both, strict=True)}) == 2
        says = [mode.reads(one) for mode, one in zip(modes, both, strict=True)]
        assert says[1] == f"{says[0]}, --tune-only"


@pytest.mark.parametrize(
    ("more", "shown"),
    [
        (["--cuda-graphs"], ", --cuda-graphs"),
        (["--near-limit", "0.01"], ", --near-limit 0.01"),
        (["--diagnose-budget", "30s"], ", --diagnose-budget 30.0"),
        (["--objective", "steps"], ", --objective steps"),
        (["--isolation", "off"], ", --isolation off"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_plans_that_differ_read_differently(more: list[str], shown: str) -> None:
    """The error said of two hosts that they differ, and the same words of both."""
    both = [parse(["--nnodes", "2", *TWO, *words, "train.py"]) for words in ([], more)]
    modes = [choose(one) for one in both]
    assert len({mode.digest(one) for mode, one in zip(modes, both, strict=True)}) == 2
    says = [mode.reads(one) for mode, one in zip(modes, both, strict=True)]
    assert says[1] == f"{says[0]}{shown}"


def test_recipes_whose_variables_differ_read_differently() -> None:
    """As where each host has tuned by itself, and keeps its recipe on its own disk."""
    two, says = parse(["--nnodes", "2", *TWO, "train.py"]), []
    for threads in ("4", "8"):
        made = replace(recipe(world_size=4, nodes=2), env={"OMP_NUM_THREADS": threads})
        save(made, "proj.train.autoddp.toml", previous=Path("older.toml"))
        says.append(choose(two).reads(two))
    assert says[0].replace("OMP_NUM_THREADS=4", "OMP_NUM_THREADS=8") == says[1] != says[0]


def with_hook(nears_ms: float = 10.0, **fits: object) -> Recipe:
    near = LadderEntry(Rung.NEAR, Configuration({"hook": "bf16"}), nears_ms, 1.5, 1.4, 1.6)
    made = recipe(world_size=4, nodes=2, **fits)
    return replace(made, configuration=near.configuration, ladder=(near,))


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (with_hook(), ["--force"]),
        (with_hook(parameters_digest="fedcba9876543210"), []),
        (with_hook(inputs=()), []),
        (with_hook(backend="nccl"), []),
        (with_hook(nears_ms=5.0), []),
    ],
    ids=["one compares no inputs", "another model", "other inputs", "another backend", "another study"],
)
def test_hosts_whose_ranks_would_wait_for_each_other_are_not_about_to_do_the_same(
    other: Recipe, words: list[str]
) -> None:
    """The settings are the same. The ranks of one host asked whether the job is the recipe's, the others did not."""
    both = [parse(["--nnodes", "2", *TWO, *more, "train.py"]) for more in ([], words)]
    modes = [Mode(False, True, made) for made in (with_hook(), other)]
    assert len({mode.digest(one) for mode, one in zip(modes, both, strict=True)}) == 2
    assert len({mode.reads(one) for mode, one in zip(modes, both, strict=True)}) == 2


def test_hosts_of_which_one_has_found_an_empty_recipe_and_one_names_it_both_compare_inputs() -> None:
    """The one that had found it was to note an unfit job. Its ranks waited ten seconds for those of the other."""
    name = "proj.train.autoddp.toml"
    save(replace(recipe(world_size=4, nodes=2), configuration=Configuration({})), name)
    both = [parse(["--nnodes", "2", *TWO, *words, "train.py"]) for words in ([], ["--recipe", name])]
    assert len({choose(one).digest(one) for one in both}) == 1
    assert [APPLY in job_environment(one, choose(one), Network()) for one in both] == [True, True]


def test_force_on_one_of_the_hosts_that_tune() -> None:
    """It concerns what is launched with the recipe that they find."""
    both = [parse(["--nnodes", "2", *TWO, "--trials", "3", *more, "train.py"]) for more in ([], ["--force"])]
    assert len({choose(one).digest(one) for one in both}) == 2
    says = [choose(one).reads(one) for one in both]
    assert says[1] == f"{says[0]}, --force"


UNEVEN = {"world_size": 12, "nodes": 2, "ranks_of_nodes": (4, 8)}


def of_two_hosts(ranks: int, *words: str) -> Options:
    return parse(["--nnodes", "2", "--nproc-per-node", str(ranks), *words, "train.py"])


def test_hosts_with_different_numbers_of_ranks_use_their_recipe() -> None:
    """Each host knows its own number alone, and took the others for as many: 16 and 8 ranks in the place of 12."""
    save(recipe(**UNEVEN), "proj.train.autoddp.toml")
    for words in ([], ["--recipe", "proj.train.autoddp.toml"]):
        asked = [of_two_hosts(ranks, *words) for ranks in (8, 4)]
        modes = [choose(one) for one in asked]
        assert [mode.recipe is not None for mode in modes] == [True, True]
        assert len({mode.digest(one) for mode, one in zip(modes, asked, strict=True)}) == 1
        assert [for_hosts(mode, one, 2, 12) for mode, one in zip(modes, asked, strict=True)] == modes
    assert "ranks of a node 4 and 8 in the recipe, 3 here): tuning again" in choose(of_two_hosts(3)).says
    with pytest.raises(UnfitRecipe, match="ranks of a node 4 and 8 in the recipe, 3 here: start as many ranks"):
        choose(of_two_hosts(3, "--recipe", "proj.train.autoddp.toml"))
    assert choose(parse(["--nnodes", "3", "--nproc-per-node", "8", "train.py"])).tune
    assert choose(parse(["--nproc-per-node", "8", "train.py"])).tune
    save(recipe(world_size=12, nodes=2), "proj.train.autoddp.toml", previous=Path("older.toml"))
    assert [choose(of_two_hosts(ranks)).tune for ranks in (8, 6, 4)] == [True, False, True]


@pytest.mark.parametrize(
    ("launches", "says"),
    [
        ({"bucket_cap_mb": 50.0}, "it changes no gradients, and is used all the same"),
        ({"hook": "bf16"}, "it is on the near rung: launching as written; --force launches it all the same"),
    ],
    ids=["exact", "near"],
)
def test_hosts_of_another_world_than_each_could_know(launches: dict[str, object], says: str) -> None:
    """Two hosts of eight ranks each, where a recipe is for eight and four: all see it when they have met."""
    made = replace(recipe(**UNEVEN), configuration=Configuration(launches))  # type: ignore[arg-type]
    save(made, "proj.train.autoddp.toml")
    asked = of_two_hosts(8)
    mode = for_hosts(choose(asked), asked, 2, 16)
    assert (mode.recipe is None) is ("as written" in says)
    unlike = "made for another job: world size 12 in the recipe, 16 here"
    assert mode.says.endswith(f"proj.train.autoddp.toml: {unlike}; {says}; the next launch tunes again")
    assert choose(asked).tune
    remove_notes(asked)
    forced, named = of_two_hosts(8, "--force"), of_two_hosts(8, "--recipe", "proj.train.autoddp.toml")
    assert for_hosts(choose(forced), forced, 2, 16).recipe is not None
    assert len({choose(one).digest(one) for one in (asked, forced)}) == 2  # all must have it, or none
    assert for_hosts(choose(named), named, 2, 16).says.endswith(says)
    assert not choose(asked).tune


def test_no_recipe_is_launched_in_another_world_without_a_word() -> None:
    """One for eight ranks on each host, where the other host has four of them and uses --force."""
    save(recipe(world_size=16, nodes=2), "proj.train.autoddp.toml")
    asked = of_two_hosts(8)
    mode = choose(asked)
    assert for_hosts(mode, asked, 2, 16) == mode
    says = for_hosts(mode, asked, 2, 12).says
    assert says.startswith("warning: proj.train.autoddp.toml: made for another job: world size 16 in the recipe, 12")


def test_a_recipe_for_other_numbers_of_ranks_is_another_job() -> None:
    request = parse([*TWO, "train.py"])
    save(recipe(world_size=12, nodes=2), request.recipe_path)
    assert place_for(request, recipe(**UNEVEN), lambda line: None) == Path("proj.train.2.autoddp.toml")


@pytest.mark.parametrize("words", [[], ["--recipe", "both"]], ids=["found", "folder"])
def test_a_recipe_of_hosts_with_different_numbers_does_not_displace_that_of_equal_ones(words: list[str]) -> None:
    """Also where it is the newer one: it may fit every host that starts as many ranks as one of its hosts."""
    Path("both").mkdir()
    for folder in (".", "both"):
        save(recipe(date="2026-01-01T00:00:00Z", world_size=16, nodes=2), f"{folder}/proj.train.autoddp.toml")
        save(recipe(date="2026-02-01T00:00:00Z", **UNEVEN), f"{folder}/proj.train.2.autoddp.toml")
    found = [choose(of_two_hosts(ranks, *words)).recipe for ranks in (8, 4)]
    assert [one.fits.world_size for one in found if one is not None] == [16, 12]


def test_a_folder_of_recipes_of_a_script_without_ddp(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks were started for a recipe of one, and under another --objective it was launched without a word."""
    monkeypatch.setattr("autoddp.commandline.rank_count.visible_gpus", lambda: 2)
    Path("folder").mkdir()
    of_one = {"world_size": 1, "script": "*/proj/train.py", "parameters_digest": "no DDP model", "inputs": ()}
    alone = recipe(["train.py"], **of_one)  # type: ignore[arg-type]
    save(replace(alone, evidence=replace(EVIDENCE, objective="steps")), "folder/alone.toml")
    for words in ([], ["--objective", "steps"]):
        asked = parse([*words, "--recipe", "folder", "train.py"])
        assert choose(asked).path == Path("folder/alone.toml")
        assert asked.torchrun.nproc_per_node == "1"
    with pytest.raises(UnfitRecipe, match=r"none of its recipes fits \(alone.toml: tuned for steps\)"):
        choose(parse(["--objective", "regex:max:rate (.*)", "--recipe", "folder", "train.py"]))


def test_more_threads_than_this_host_has_cores_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A recipe made under `--cpus-per-task 32` gave two ranks 16 threads each on four CPUs."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    for cpus, threads, tunes in ((32, 16, False), (4, 16, True), (1, 1, False)):
        monkeypatch.setattr("os.sched_getaffinity", lambda _pid, count=cpus: set(range(count)))
        path = "proj.train.autoddp.toml"
        save(replace(recipe(), env={"OMP_NUM_THREADS": str(threads)}), path, previous=Path("older.toml"))
        assert plan("train.py").tune is tunes
        assert not plan("--recipe", path, "train.py").tune
    monkeypatch.setenv("OMP_NUM_THREADS", "2")  # the user's own value is what counts
    save(replace(recipe(), env={"OMP_NUM_THREADS": "16"}), path, previous=Path("older.toml"))
    assert not plan("train.py").tune


def test_a_recipe_that_a_stricter_limit_refuses_is_tuned_again() -> None:
    """As where a project has set near-limit since."""
    near = Configuration({"hook": "bf16"})
    entry = LadderEntry(Rung.NEAR, near, 22.3, 1.41, 1.39, 1.43, 0.0029)
    save(replace(recipe(), configuration=near, ladder=(entry,)), "proj.train.autoddp.toml")
    assert plan("train.py").configuration == near
    again = plan("--near-limit", "0.001", "train.py")
    assert again.tune
    assert "(gradient error 0.29 %, above --near-limit (0.10 %)): tuning again" in again.says


@pytest.mark.parametrize("words", [[], ["--near-limit", "0.1"], ["--recipe", "proj.train.autoddp.toml"]])
def test_a_recipe_of_a_study_with_a_laxer_limit_is_launched(words: list[str]) -> None:
    """`--near-limit 0.1 --trials 20` has made it, and said that the next start without options launches with it."""
    near = Configuration({"hook": "bf16"})
    entry = LadderEntry(Rung.NEAR, near, 22.3, 1.41, 1.39, 1.43, 0.03)
    save(replace(recipe(), configuration=near, ladder=(entry,)), "proj.train.autoddp.toml")
    assert plan(*words, "train.py").configuration == near


def test_hosts_of_which_one_overrules_the_recipe_read_differently() -> None:
    """The recipe of uneven hosts is judged when all have come, and --force is a part of that."""
    save(recipe(**UNEVEN), "proj.train.autoddp.toml")
    asked = [of_two_hosts(8), of_two_hosts(4, "--force")]
    modes = [choose(one) for one in asked]
    assert len({mode.digest(one) for mode, one in zip(modes, asked, strict=True)}) == 2
    says = [mode.reads(one) for mode, one in zip(modes, asked, strict=True)]
    assert says[1] == f"{says[0]}, --force"


def test_of_several_only_those_that_fit() -> None:
    save(recipe(world_size=8), "proj.train.autoddp.toml")
    save(recipe(), "proj.train.2.autoddp.toml")
    assert plan("train.py").path == Path("proj.train.2.autoddp.toml")


@pytest.mark.parametrize(
    ("of_ranks", "of_the_driver", "fits"),
    [
        ("AMD Instinct MI300X", (), True),  # there, and under WSL, no driver of NVIDIA's tells its GPUs
        ("NVIDIA A100-SXM4-40GB MIG 3g.20gb", ("NVIDIA A100-SXM4-40GB",), True),
        ("NVIDIA A100-SXM4-40GB", ("NVIDIA H100 80GB HBM3",), False),
    ],
)
def test_gpus_by_the_names_that_ranks_and_drivers_give(
    of_ranks: str, of_the_driver: tuple[str, ...], fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(topology, "fingerprint", lambda: topology.Fingerprint(of_the_driver))
    monkeypatch.setattr(local_fingerprint, "visible_gpus", lambda: 2)
    save(recipe(devices=(of_ranks,)), "proj.train.autoddp.toml")
    assert plan("train.py").tune is not fits


def test_a_note_makes_the_next_launch_tune_once() -> None:
    words = ["train.py", "--model", "small"]
    save(recipe(["train.py"]), "proj.train.autoddp.toml")
    note = Note(Path("proj.train.autoddp.toml"), parse([*TWO, *words]))
    note.path.write_text(note.begins(parse([*TWO, *words]), recipe()) + "input 0 differs\n")
    again = plan(*words)
    assert again.tune
    assert again.says == (
        "the last launch with proj.train.autoddp.toml was of another job (input 0 differs): tuning again"
    )
    assert not plan("train.py").tune  # the job whose recipe it is
    assert not plan("--recipe", "proj.train.autoddp.toml", *words).tune  # the user has said which
    assert not plan("--force", *words).tune
    remove_notes(parse([*TWO, *words]))
    assert not plan(*words).tune
    assert not note.path.exists()


@pytest.mark.parametrize("text", ["", "\n", "# only comments\n", "\0\x1b[31m\n", "x" * 10**6])
def test_any_note_is_one(text: str) -> None:
    save(recipe(), "proj.train.autoddp.toml")
    Note(Path("proj.train.autoddp.toml"), parse([*TWO, "train.py"])).path.write_text(text)
    found = plan("train.py")
    assert found.tune
    assert found.says.isprintable()


@pytest.mark.parametrize("name", ["pro\nject", "pro\udce9t"])
def test_a_note_about_a_recipe_with_a_strange_name(name: str, checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A line break ended the comment. A name that is not UTF-8 ended the job, whose worker could not write the note."""
    (checkout / name).mkdir()
    monkeypatch.chdir(checkout / name)
    Path("train.py").touch()
    request = parse([*TWO, "train.py"])
    save(recipe(["train.py"]), request.recipe_path)
    assert Note(request.recipe_path, request).write(request, recipe(), "input 0 differs")
    assert "was of another job (input 0 differs)" in plan("train.py").says


@pytest.mark.parametrize("letter", ["x", "é"])
def test_a_name_that_is_too_long_for_more_is_cut(letter: str) -> None:
    stem = letter * (250 // len(letter.encode()))
    Path(f"{stem}.py").touch()
    before = recipe(script=f"{stem}.py")
    place = place_for(parse([*TWO, f"{stem}.py"]), before, lambda _: None)
    save(before, place)
    assert plan(f"{stem}.py").path == place
    other = letter + stem[1:-1] + "y"
    Path(f"{other}.py").touch()
    assert plan(f"{other}.py").tune
    assert parse([*TWO, f"{other}.py"]).recipe_path != place
    save(recipe(script=f"-m {other}"), parse([*TWO, "-m", other]).recipe_path)
    assert not plan("-m", other).tune


def test_a_checkout_that_moved_is_the_same_job(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(recipe(script="a/exp/train.py"), "exp.train.autoddp.toml")
    moved = checkout.rename(checkout.with_name("elsewhere"))
    monkeypatch.chdir(moved)
    assert not plan("a/exp/train.py").tune
    assert not plan(str(moved / "a" / "exp" / "train.py")).tune


def test_a_folder_with_another_name_has_its_recipes(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was renamed, copied for one job, or mounted as /workspace: each start there tuned anew, without a word."""
    save(recipe(["train.py"]), "proj.train.autoddp.toml")
    save(recipe(script="a/exp/train.py"), "exp.train.autoddp.toml")
    save(recipe(["train.py", "--big"], inputs=("0: float32[9, 16]",)), "proj.train.2.autoddp.toml")
    Path("bad.train.autoddp.toml").write_text("schema = 1\n")
    renamed = checkout.rename(checkout.with_name("workspace"))
    monkeypatch.chdir(renamed)
    assert plan("train.py").path == Path("proj.train.autoddp.toml")
    assert plan("train.py", "--big").path == Path("proj.train.2.autoddp.toml")
    request = parse([*TWO, "train.py"])
    new = recipe(["train.py"], date="2026-02-02T00:00:00Z")
    assert place_for(request, new, lambda _: None) == Path("workspace.train.autoddp.toml")
    save(new, "workspace.train.autoddp.toml")
    assert plan("train.py").path == Path("workspace.train.autoddp.toml")
    assert Note(Path("proj.train.autoddp.toml"), request).write(request, recipe(), "input 0 differs")
    remove_notes(request)
    assert not list(Path().glob("*.unfit"))
    (renamed / "other.py").touch()
    assert plan("other.py").tune


def test_a_note_from_before_the_recipe_says_nothing_of_it() -> None:
    """In a folder with a sticky bit nobody can remove the note of another user, and each start tuned anew."""
    request = parse([*TWO, "train.py"])
    old, new = (recipe(["train.py"], date=f"2026-0{month}-02T00:00:00Z") for month in (1, 2))
    note = Note(Path("proj.train.autoddp.toml"), request)
    save(old, "proj.train.autoddp.toml")
    assert note.write(request, old, "input 0 differs")
    assert plan("train.py").tune
    save(new, "proj.train.autoddp.toml", previous=Path("previous.toml"))
    assert not plan("train.py").tune


@pytest.mark.parametrize("date", ["2026-02-02T00:00:00Z", "2126-02-02T00:00:00Z", "yesterday"])
def test_the_age_of_a_note_is_by_no_clock(date: str) -> None:
    """Where the clock of the host that leads is ahead, a recipe is of a later time than the note that is about it.

    The note counted for nothing then, and the job was launched as written again and again.
    """
    request, made = parse([*TWO, "train.py"]), recipe(["train.py"], date=date)
    save(made, "proj.train.autoddp.toml")
    note = Note(Path("proj.train.autoddp.toml"), request)
    assert note.write(request, made, "input 0 differs")
    os.utime(note.path, (1.7e9, 1.7e9))  # in 2023
    assert plan("train.py").tune


def test_a_script_elsewhere_is_known_by_folder_and_name(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hosts mount a shared file system at other places, and each of them looks at one recipe."""
    monkeypatch.chdir(checkout / "b")
    assert script_names(parse([*TWO, "../a/exp/train.py"])) == ("*/exp/train.py",)
    assert script_names(parse([*TWO, str(checkout / "a" / "exp" / "train.py")])) == ("*/exp/train.py",)


def test_a_link_is_the_script_it_stands_for() -> None:
    os.symlink("a/exp/train.py", "linked.py")
    save(recipe(script="a/exp/train.py"), "proj.linked.autoddp.toml")
    assert not plan("linked.py").tune


def test_a_module_is_known_by_its_name() -> None:
    assert script_names(parse([*TWO, "-m", "package.train"])) == ("-m package.train",)
    assert script_names(parse([*TWO, "--no-python", "bash", "run.sh"])) == ("bash",)


def test_named_it_is_refused_with_all_that_differs_and_not_for_the_path_alone() -> None:
    save(recipe(script="old/place.py", world_size=8), "given.toml")
    with pytest.raises(UnfitRecipe, match=r"world size 8 in the recipe, 2 here; script old/place\.py in the recipe"):
        plan("--recipe", "given.toml", "train.py")
    save(recipe(script="old/place.py"), "moved.toml")
    found = plan("--recipe", "moved.toml", "train.py")
    assert not found.notes
    assert "(script old/place.py in the recipe, train.py here; parameters and inputs are compared)" in found.says


def test_what_stays_the_same_of_a_recipe(checkout: Path) -> None:
    made = recipe(["train.py"])
    save(made, "proj.train.autoddp.toml")
    assert load("proj.train.autoddp.toml") == made


def test_a_job_that_is_not_the_recipes_runs_as_written(tmp_path: Path) -> None:
    """From end to end: the job ends well, one line says what differs, and the next launch would tune."""
    folder = tmp_path / "job"
    folder.mkdir()
    place = folder / "scripts.plain.autoddp.toml"
    of_job = {"script": "*/scripts/plain.py", "parameters_digest": parameters_digest(OF_PLAIN)}
    made = recipe(inputs=("0: float32[64, 16]",), **of_job)
    save(replace(made, configuration=Configuration({"hook": "bf16"}), env={"OMP_NUM_THREADS": "1"}), place)
    before = place.read_bytes()
    words = [*TWO, str(SCRIPTS / "plain.py"), "--steps", "3"]
    launch = start(AUTODDP, folder, words).wait()
    assert launch.returncode == 0, launch.stderr[-2000:]
    (line,) = [line for line in launch.stderr.splitlines() if "another job" in line]
    assert line == (
        "autoddp: warning: scripts.plain.autoddp.toml was made for another job "
        "(input 0 float32[64, 16] in the recipe, float32[8, 16] here): this job runs as written, "
        "but OMP_NUM_THREADS=1 was set at its start and stays; the next launch tunes again"
    )
    assert (folder / "rank1.pt").exists()
    assert place.read_bytes() == before
    assert sorted(path.name for path in folder.glob("*autoddp*")) == [
        "scripts.plain.autoddp.toml",
        "scripts.plain.autoddp.unfit",
    ]
    dry = start(AUTODDP, folder, ["--dry-run", *words]).wait()
    assert "would tune: 20 trials" in dry.stdout
    assert "or under the next free number if that is another job's\n" in dry.stdout
    assert "would launch: " in dry.stdout
    said = dry.stdout
    dry = start(AUTODDP, folder, ["--dry-run", "--tune-only", *words]).wait()
    more = dry.stdout.removeprefix(said)
    assert "would tune: 20 trials" in more
    assert "would launch" not in more


def test_force_says_what_it_overrules() -> None:
    """Whether the recipe is named or found; where nothing differs there is nothing to say."""
    save(recipe(), "proj.train.autoddp.toml")
    own = plan("--force", "train.py").says
    assert own == plan("train.py").says
    Path("proj.train.autoddp.toml").unlink()
    save(recipe(world_size=8), "proj.train.autoddp.toml")
    because = "though it was made for another job (world size 8 in the recipe, 2 here), because of --force"
    assert plan("--force", "train.py").says == f"{own}, {because}"
    named = ["--force", "--recipe", "proj.train.autoddp.toml"]
    assert plan(*named, "train.py").says == f"{own}, {because}"
    other = plan(*named, "a/exp/train.py").says
    assert "a/exp/train.py here; world size 8 in the recipe, 2 here), because of --force" in other
    note = Note(Path("proj.train.autoddp.toml"), parse([*TWO, "train.py"]))
    note.path.write_text(note.begins(parse([*TWO, "train.py"]), recipe()) + "input 0 differs\n")
    assert (
        "; the last launch with it was of another job (input 0 differs)), because" in plan("--force", "train.py").says
    )
