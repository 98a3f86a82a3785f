"""Lines for Lightning and for Transformers' Trainer, run by plain torchrun: they train as the recipe does."""

from __future__ import annotations

import contextlib
import importlib.util
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from framework_job import network
from launchers import AUTODDP, TORCHRUN, start
from own_code_checks import RECIPE
from torch import nn

from autoddp.knobs import Configuration
from autoddp.own_code import Lines, lines_for
from autoddp.recipe import save
from autoddp.worker.ddp.model import parameters_digest

JOB = str(Path(__file__).with_name("framework_job.py"))
VERSION = torch.__version__.split("+")[0]
ARGUMENTS: dict[str, dict[str, Any]] = {
    "lightning": {"bucket_cap_mb": 1.0, "gradient_as_bucket_view": True, "static_graph": True},
    "trainer": {"bucket_cap_mb": 1.0, "static_graph": True},
}
"""Form → exact settings that it can say."""
LIBRARIES = {"lightning": "lightning", "trainer": "transformers"}
CALLS = {"lightning": "Trainer(strategy=strategy", "trainer": "TrainingArguments("}
"""Form → the beginning of the call in which the printed lines leave room for what a script has besides."""


def lines(form: str, values: dict[str, Any], **of_job: Any) -> Lines:
    fits = replace(RECIPE.fits, **of_job)
    return lines_for(replace(RECIPE, configuration=Configuration(values), fits=fits), "train.autoddp.toml", form)


def completed(form: str, values: dict[str, Any]) -> str:
    """The lines as a user completes them."""
    text, call = lines(form, values).text, CALLS[form]
    assert text.count(call) == 1
    return text.replace(call, f"{call}{', ' if call[-1] != '(' else ''}**besides{',' if call[-1] == '(' else ''}")


def ranks(folder: Path) -> list[dict[str, Any]]:
    return [torch.load(folder / f"rank{rank}.pt") for rank in range(2)]


@pytest.mark.whole
@pytest.mark.parametrize("form", ARGUMENTS)
def test_exact_settings_train_to_the_same_bits(tmp_path: Path, form: str) -> None:
    if importlib.util.find_spec(LIBRARIES[form]) is None:
        pytest.skip(f"needs {LIBRARIES[form]}")
    values = ARGUMENTS[form]
    for name in ("by_lines", "by_recipe", "as_written"):
        (tmp_path / name).mkdir()
    (tmp_path / "by_lines" / "lines.py").write_text(completed(form, values))
    model = nn.ModuleDict({"network": network()})  # what the framework gives to DDP
    fits = replace(RECIPE.fits, torch=VERSION, parameters_digest=parameters_digest(model))
    recipe = replace(RECIPE, configuration=Configuration(values), fits=fits)
    save(recipe, tmp_path / "by_recipe" / "recipe.toml")
    two = ["--nproc-per-node", "2", "--master-port", "{port}"]
    threads = {"OMP_NUM_THREADS": "1"}
    launches = [
        start(TORCHRUN, tmp_path / "by_lines", [*two, JOB, form, "{out}/lines.py"], threads).wait(),
        start(AUTODDP, tmp_path / "by_recipe", ["--recipe", "recipe.toml", "--force", *two, JOB, form], threads).wait(),
        start(TORCHRUN, tmp_path / "as_written", [*two, JOB, form], threads).wait(),
    ]
    assert [launch.returncode for launch in launches] == [0, 0, 0], [launch.stderr[-2000:] for launch in launches]
    written = ranks(tmp_path / "as_written")
    for one, other, before in zip(ranks(tmp_path / "by_lines"), ranks(tmp_path / "by_recipe"), written, strict=True):
        assert one["settings"] == other["settings"] != before["settings"]
        assert one["settings"]["bucket_cap_bytes"] == 2**20
        assert all(torch.equal(*pair) for pair in zip(one["parameters"], other["parameters"], strict=True))
        assert not all(torch.equal(*pair) for pair in zip(one["parameters"], network().parameters(), strict=True))


@pytest.fixture
def torchvision() -> None:
    """Frameworks import it where it is installed."""
    with contextlib.suppress(ImportError):
        importlib.import_module("torchvision_on_cpu")


@pytest.mark.whole
@pytest.mark.usefixtures("torchvision")
def test_lightning_takes_a_hook() -> None:
    pytest.importorskip("lightning")
    names: dict[str, Any] = {}
    exec(
        lines("lightning", {"bucket_cap_mb": 2.0, "hook": "bf16"}, backend="nccl", devices=("NVIDIA H100",)).text, names
    )
    strategy = names["strategy"]
    assert strategy._ddp_kwargs == {"bucket_cap_mb": 2.0}
    assert strategy._ddp_comm_hook.__name__ == "bf16_compress_hook"
