"""`--recipe FOLDER`: the recipe that fits is taken, and why the others are not is said."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import forks
import pytest
import torch
from launchers import environment

from autoddp.knobs import Configuration
from autoddp.recipe import Evidence, Fits, MadeBy, Recipe, dump, load, save

HERE = Fits(2, 1, "gloo", ("cpu",), torch.__version__.split("+")[0], 4096, "0123456789abcdef")
EVIDENCE = Evidence(31.0, 0.1, 20, 6, 100, "the best of what you allow")
RECIPES = {
    "here.toml": replace(HERE),
    "bigger.toml": replace(HERE, world_size=8),
    "old_torch.toml": replace(HERE, torch="2.4.0"),
    "gpus.toml": replace(HERE, backend="nccl", devices=("NVIDIA H100",), links=("NV18",)),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text("print('trained')\n")
    (tmp_path / "recipes").mkdir()
    for name, fits in RECIPES.items():
        made = MadeBy("0.1.0", fits.torch, "3.11.7", "2026-01-01T00:00:00Z")
        recipe = Recipe(made, fits, Configuration({"bucket_cap_mb": 50.0}), EVIDENCE)
        save(recipe, tmp_path / "recipes" / name)
    (tmp_path / "recipes" / "notes.toml").write_text("remember = 'milk'\n")
    return tmp_path


def dry_run(folder: Path, *more: str) -> tuple[int, str, str]:
    words = ["-m", "autoddp", "--nproc-per-node", "2", "--recipe", "recipes", "--dry-run", *more, "train.py"]
    done = forks.run(words, cwd=folder, env=environment())
    return done.returncode, done.stdout, done.stderr


def test_the_fitting_one_is_taken(folder: Path) -> None:
    code, out, err = dry_run(folder)
    assert (code, out.splitlines()[-1]) == (0, "configuration: bucket_cap_mb=50.0")
    assert "recipe recipes/here.toml: launching bucket_cap_mb=50.0" in err
    assert "not bigger.toml: world size 8 in the recipe, 2 here" in err
    assert "not gpus.toml: devices NVIDIA H100 in the recipe, cpu here" in err
    assert "not old_torch.toml: torch 2.4.0 in the recipe" in err
    assert "not notes.toml: " in err


def test_another_rung_of_the_fitting_one_is_said(folder: Path) -> None:
    here = folder / "recipes" / "here.toml"
    here.write_text(dump(replace(load(here), configuration=Configuration({"hook": "bf16"}))))
    _, out, err = dry_run(folder, "--allow", "exact")
    launched = out.splitlines()[-1].removeprefix("configuration: ")
    assert "bf16" not in launched
    assert f"recipe recipes/here.toml: launching {launched}; not " in err


def test_none_fits(folder: Path) -> None:
    (folder / "recipes" / "here.toml").unlink()
    code, out, err = dry_run(folder)
    assert (code, out) == (2, "")
    assert err.startswith("autoddp: error: --recipe recipes: none of its recipes fits (bigger.toml: world size 8")
    assert err.count("\n") == 1


def test_of_many_that_do_not_fit_the_first_are_said(folder: Path) -> None:
    (folder / "recipes" / "here.toml").unlink()
    for number in range(30):
        (folder / "recipes" / f"all{number:02}.toml").write_text("schema = 1\nnosuch = 2\n")
    code, out, err = dry_run(folder)
    assert (code, out) == (2, "")
    assert "(all00.toml: nosuch: unknown key" in err
    assert "all04.toml: " in err
    assert re.search(r" \| [0-9]+ more\): name one file, or tune with --trials 20$", err)


def test_several_fit(folder: Path) -> None:
    (folder / "recipes" / "twin.toml").write_text((folder / "recipes" / "here.toml").read_text())
    code, _, err = dry_run(folder)
    assert code == 2
    assert "2 of its recipes fit (here.toml, twin.toml): name one file" in err


def test_no_recipe_there(folder: Path) -> None:
    for path in (folder / "recipes").iterdir():
        path.unlink()
    code, _, err = dry_run(folder)
    assert code == 2
    assert "--recipe recipes: no recipe in it: name one file" in err
