"""Cells from end to end: whole launches by `autoddp --recipe` beside one by torchrun."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

import torch
from cells import WORLD, Ran
from launchers import AUTODDP, TORCHRUN, Launch, start
from torch import nn
from trainings import Branches, network, networks_of_gan

from autoddp.knobs import Configuration
from autoddp.recipe import Evidence, Fits, MadeBy, Recipe, save
from autoddp.worker.ddp.model import parameters_digest

SCRIPT = str(Path(__file__).with_name("script.py"))
TWO = ["--nproc-per-node", str(WORLD)]


def recipe_of(configuration: Mapping[str, Any], path: Path) -> None:
    """One that fits every training's models."""
    asked = Configuration(configuration)
    models = [network(), network(64), Branches(), network(256, nn.BatchNorm1d(8)), *networks_of_gan()]
    digests = "+".join(dict.fromkeys(parameters_digest(model) for model in models))
    torch_version = torch.__version__.split("+")[0]
    fits = Fits(WORLD, 1, "gloo", ("cpu",), torch_version, 1, digests)
    made_by = MadeBy("0", torch_version, "3", "2026-01-01T00:00:00Z")
    evidence = Evidence(1.0, 0.5, 1, 1, 1, "for a test")
    save(Recipe(made_by, fits, asked.without_variables, evidence, env=asked.variables), path)


def run(trainings: Sequence[str], configurations: Mapping[str, Mapping[str, Any]], folder: Path) -> dict[str, Any]:
    """ "" for torchrun, else a configuration's name → training → what it left."""
    launches: dict[str, Launch] = {"": start(TORCHRUN, folder / "torchrun", [*TWO, SCRIPT, *trainings])}
    for name, configuration in configurations.items():
        launches[""].wait()  # two launches at once have a machine of two cores
        recipe = folder / f"{name}.toml"
        recipe_of(configuration, recipe)
        words = [*TWO, "--recipe", str(recipe), "--force", SCRIPT, *trainings]
        launches[name] = start(AUTODDP, folder / name, words).wait()
    return {name: {t: _left(launch, t) for t in trainings} for name, launch in launches.items()}


def _left(launch: Launch, training: str) -> Ran:
    paths = [launch.folder / f"{training}.{rank}.pt" for rank in range(WORLD)]
    told = "\n".join(line for line in launch.stderr.splitlines() if "autoddp: warning" in line)
    if not all(path.exists() for path in paths):
        return Ran(({"error": launch.stderr[-800:]},), told)
    return Ran(tuple(torch.load(path) for path in paths), told)
