"""What each form of code says of a recipe, and what it leaves to be done by hand."""

from __future__ import annotations

import ast
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

from autoddp.cli.recipe import run
from autoddp.errors import AutoddpError
from autoddp.knobs import AS_WRITTEN, BY_NAME, KNOBS, Configuration, Reach
from autoddp.own_code import FORMS, Lines, lines_for
from autoddp.recipe import Evidence, Fits, MadeBy, Recipe, save

FITS = Fits(8, 2, "nccl", ("NVIDIA H100",), "2.13.0", 102228128, "0123456789abcdef", script="*/proj/train.py")
RECIPE = Recipe(
    made_by=MadeBy("0.1.0", "2.13.0", "3.11.7", "2025-11-20T21:00:00Z"),
    fits=FITS,
    configuration=Configuration({"bucket_cap_mb": 50.0, "gradient_as_bucket_view": True, "hook": "bf16"}),
    evidence=Evidence(31.21, 0.384, 20, 6, 1234, "the near rung wins"),
    env={"OMP_NUM_THREADS": "4"},
)
POWERSGD: dict[str, Any] = {"hook": "powersgd", "powersgd_rank": 4, "powersgd_start_step": 1000}


def lines(form: str, backend: str = "nccl", **values: Any) -> Lines:
    configuration = Configuration(values) if values else RECIPE.configuration
    recipe = replace(RECIPE, configuration=configuration, fits=replace(FITS, backend=backend))
    return lines_for(recipe, "train.autoddp.toml", form)


def test_ddp() -> None:
    assert lines("ddp").text.splitlines() == [
        "# From train.autoddp.toml, for 8 ranks on 2 nodes, nccl, torch 2.13.0; the near rung",
        "# wins",
        "from torch.distributed.algorithms.ddp_comm_hooks import default_hooks",
        "from torch.nn.parallel import DistributedDataParallel",
        "",
        "model = DistributedDataParallel(",
        "    model,  # and what your call has besides",
        "    bucket_cap_mb=50.0,",
        "    gradient_as_bucket_view=True,",
        ")",
        "model.register_comm_hook(model.process_group, default_hooks.bf16_compress_hook)",
        "",
        "# Not set by these lines as it was measured:",
        "# - environment: start with OMP_NUM_THREADS=4",
        "# - numpy: it was measured with the one thread that torchrun gives each of several",
        "#   ranks; set OPENBLAS_NUM_THREADS=1 too, where torch computes by MKL",
        "# - network: autoddp looks for the fastest one between the hosts at each start, and sets",
        "#   NCCL_SOCKET_IFNAME to its interface; where a host has several interfaces, set it",
        "#   yourself",
    ]


def test_slurm_is_a_whole_file() -> None:
    assert lines("slurm", bucket_cap_mb=8.0).text.splitlines()[:11] == [
        "#!/bin/bash",
        "# From train.autoddp.toml, for 8 ranks on 2 nodes, nccl, torch 2.13.0; the near rung",
        "# wins",
        "#SBATCH --nodes=2",
        "#SBATCH --ntasks-per-node=1",
        "#SBATCH --gpus-per-node=4",
        "#SBATCH --exclusive  # all CPUs of the nodes: without it the one task of a node may get a single CPU",
        "export OMP_NUM_THREADS=4",
        'head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
        "srun torchrun --nnodes 2 --nproc-per-node 4 --rdzv-backend c10d \\",
        '    --rdzv-id "$SLURM_JOB_ID" --rdzv-endpoint "$head:29500" train.py  # and its arguments',
    ]


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("proj/train.py", "proj/train.py"),
        ("*/proj/train.py", "train.py"),
        ("-m proj.train", "-m proj.train"),
        ("my jobs/train.py", "'my jobs/train.py'"),
        ("train.py; touch gone", "'train.py; touch gone'"),
        ("-m proj.train $(touch gone)", "-m 'proj.train $(touch gone)'"),
        ("", "train.py"),
    ],
)
def test_the_batch_script_starts_the_recipes_script_and_nothing_else(script: str, words: str) -> None:
    """In the recipe's folder another train.py may stand; and a recipe of somebody else's must not run code."""
    recipe = replace(RECIPE, fits=replace(FITS, script=script))
    last = lines_for(recipe, "train.autoddp.toml", "slurm").code[-1]
    assert last == f'    --rdzv-id "$SLURM_JOB_ID" --rdzv-endpoint "$head:29500" {words}  # and its arguments'


OF_EACH: tuple[dict[str, Any], ...] = (
    {"bucket_cap_mb": 7.0},
    {"bucket_cap_mb_list": [4.0, 3.0]},
    {"gradient_as_bucket_view": True},
    {"batched_grad_copy": True},
    {"static_graph": True},
    {"broadcast_buffers": False},
    {"optimize_ddp": False},
    {"gradient_as_bucket_view": True, "cuda_graphs": "model"},
    {"defer_reductions": 6},
    {"accumulate_steps": 4},
    {"hook": "fp16"},
    POWERSGD,
    {**POWERSGD, "powersgd_batched": True},
    {**POWERSGD, "powersgd_factors": "bf16"},
    {"numa_binding": "node"},
    {"threads": 3},
)


@pytest.mark.parametrize("form", FORMS)
def test_every_setting_is_said_or_named(form: str) -> None:
    """Those of START are variables; a value of each of the others stands in the code, or in what is left to be done."""
    assert {name for values in OF_EACH for name in values} == {k.name for k in KNOBS if k.reach is not Reach.START}
    for values in OF_EACH:
        found = lines(form, **values)
        by_hand = " ".join(found.by_hand)
        for name in values:
            if name.startswith("powersgd") or name == "hook":
                continue
            known = BY_NAME[name].variable or name
            assert known in by_hand or any(known in line for line in found.code), (name, found.text)
        if "hook" in values:
            assert "hook" in by_hand or any("hook" in line for line in found.code)


@pytest.mark.parametrize("form", ["ddp", "accelerate", "lightning", "trainer"])
def test_python_is_python(form: str) -> None:
    for values in ({"bucket_cap_mb": 7.0, "static_graph": True}, POWERSGD, {"bucket_cap_mb_list": [4.0, 3.0]}):
        ast.parse(lines(form, **values).text)


def test_what_torchs_own_hooks_cannot_do_is_named() -> None:
    on_gloo = lines("ddp", backend="gloo", hook="bf16")
    assert "model.register_comm_hook(model.process_group, default_hooks.fp16_compress_hook)" in on_gloo.code
    assert "65,504" in on_gloo.by_hand[0]
    assert "ends the process on gloo" in lines("ddp", backend="gloo", **POWERSGD).by_hand[0]
    assert lines("ddp", backend="gloo", **POWERSGD).code == ()
    early = lines("ddp", hook="powersgd", powersgd_rank=2, powersgd_start_step=0)
    assert "from step 2 on at the earliest" in early.by_hand[0]
    assert "start_powerSGD_iter=2" in early.code[-1]


def test_torchs_powersgd_is_given_what_the_recipes_own_does() -> None:
    """A recipe that does not say when it begins is launched with 1000; and it sends all factors that are smaller."""
    found = lines("ddp", hook="powersgd", powersgd_rank=2)
    state = "powerSGD_hook.PowerSGDState(model.process_group, matrix_approximation_rank=2, start_powerSGD_iter=1000, "
    assert found.code[-1].startswith(f"model.register_comm_hook({state}min_compression_rate=1), ")
    said = lines("accelerate", hook="powersgd", powersgd_rank=2, powersgd_start_step=7).code
    state = "{'matrix_approximation_rank': 2, 'start_powerSGD_iter': 7, 'min_compression_rate': 1}"
    assert f"    comm_state_option={state}," in said


def test_torchs_batched_powersgd_is_never_registered() -> None:
    """It stops a job at its first compressed step, perhaps after hours. When torch mends it, this test says so."""
    with pytest.raises(AssertionError):
        powerSGD_hook._orthogonalize(torch.ones(4, 1))  # what batched_powerSGD_hook gives it: no batch of matrices
    for form in FORMS:
        found = lines(form, **POWERSGD, powersgd_batched=True)
        assert not any("batched" in line.lower() for line in found.code if "hook" in line)
    found = lines("ddp", **POWERSGD, powersgd_batched=True)
    assert found.code[-1].endswith(", powerSGD_hook.powerSGD_hook)")
    assert "takes each gradient for a matrix" in found.by_hand[0]


@pytest.mark.parametrize("form", ["ddp", "accelerate", "lightning"])
def test_what_torchs_own_hooks_do_not_survive_is_named(form: str) -> None:
    """The recipe's hooks move gradients into float16's range, and forget what a GradScaler lets overflow."""
    assert "infinite, and very small ones 0" in lines(form, hook="fp16").by_hand[0]
    assert "GradScaler" in lines(form, **POWERSGD).by_hand[0]
    assert not any(line.startswith("hook") for line in lines(form, hook="bf16").by_hand)


def test_a_larger_batch_by_hand_clips_what_the_recipe_clips() -> None:
    """Clipped after each of the steps, a rank's own part of the sum would be."""
    (said,) = [line for line in lines("ddp", accumulate_steps=4).by_hand if line.startswith("accumulate_steps")]
    assert "unscale and clip gradients, step the optimizer, update a GradScaler and zero gradients only after" in said
    assert "a learning-rate scheduler after each one" in said


def test_the_network_that_autoddp_chooses_is_named() -> None:
    """On several hosts every launch sets it, and the recipe does not say it."""
    for form in FORMS:
        assert "NCCL_SOCKET_IFNAME" in lines(form, bucket_cap_mb=8.0).by_hand[-1]
        assert "GLOO_SOCKET_IFNAME" in lines(form, backend="gloo", bucket_cap_mb=8.0).by_hand[-1]
    alone = replace(RECIPE, fits=replace(FITS, world_size=8, nodes=1))
    assert not any("network" in line for line in lines_for(alone, "train.autoddp.toml", "ddp").by_hand)


@pytest.mark.parametrize("form", FORMS)
def test_the_threads_that_numpy_keeps_are_named(form: str) -> None:
    assert any("OPENBLAS_NUM_THREADS=1" in one for one in lines(form).by_hand)
    without = lines_for(replace(RECIPE, env={}), "train.autoddp.toml", form)
    assert not any("OPENBLAS" in one for one in without.by_hand)


def test_lightning_leaves_hooks_out_where_there_is_no_gpu() -> None:
    """And says nothing of it, so the lines must."""
    configuration = Configuration({"hook": "fp16"})
    on_cpus = replace(RECIPE, configuration=configuration, fits=replace(FITS, backend="gloo", devices=("cpu",)))
    found = lines_for(on_cpus, "train.autoddp.toml", "lightning")
    assert not any("hook" in line for line in found.code)
    assert found.by_hand[0].startswith("hook = 'fp16': Lightning registers hooks on GPUs alone")
    assert "    ddp_comm_hook=default_hooks.fp16_compress_hook," in lines("lightning", hook="fp16").code


def test_a_list_of_bucket_sizes_becomes_its_largest() -> None:
    found = lines("accelerate", bucket_cap_mb_list=[1.0, 4.0, 2.0])
    assert "    bucket_cap_mb=4.0," in found.code
    assert "was not measured" in found.by_hand[0]


@pytest.mark.parametrize(
    ("recipe", "said"),
    [
        (replace(RECIPE, fits=replace(FITS, world_size=1, nodes=1)), "was made for one rank"),
        (replace(RECIPE, configuration=AS_WRITTEN, env={}), "launches the script as it is written"),
    ],
)
def test_recipes_that_no_code_can_say(
    recipe: Recipe, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "train.autoddp.toml"
    save(recipe, file)
    with pytest.raises(AutoddpError, match=said) as raised:
        run(["code", str(file)])
    assert "\n" not in str(raised.value)
    assert raised.value.exit_code == 2
    assert run(["code", str(file), "--json"]) == 2
    assert json.loads(capsys.readouterr().out) == {"ok": False, "file": str(file), "error": str(raised.value)}


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "train.autoddp.toml"
    save(RECIPE, file)
    assert run(["code", str(file), "--for", "env"]) == 0
    assert "export OMP_NUM_THREADS=4" in capsys.readouterr().out.splitlines()
    assert run(["code", str(file), "--json"]) == 0
    assert '"form": "ddp"' in capsys.readouterr().out


def test_no_batch_script_for_nodes_with_different_numbers_of_ranks() -> None:
    """It would start 6 on each in the place of 8 and 4."""
    uneven = replace(RECIPE, fits=replace(FITS, world_size=12, ranks_of_nodes=(4, 8)))
    assert "for 12 ranks on 2 nodes" in lines_for(uneven, "train.autoddp.toml", "ddp").text
    with pytest.raises(AutoddpError, match="nodes with different numbers of ranks"):
        lines_for(uneven, "train.autoddp.toml", "slurm")
