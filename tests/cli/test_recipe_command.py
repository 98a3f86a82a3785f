"""`autoddp recipe` as a user or a script calls it."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from terminals import terminal

from autoddp.cli.recipe import run
from autoddp.errors import AutoddpError, RecipeError, UsageError
from autoddp.knobs import AS_WRITTEN, Configuration, Rung
from autoddp.recipe import Evidence, Fits, LadderEntry, MadeBy, Recipe, save

RECIPE = Recipe(
    made_by=MadeBy("0.1.0", "2.13.0", "3.11.7", "2025-11-20T21:00:00Z"),
    fits=Fits(8, 2, "nccl", ("NVIDIA H100",), "2.13.0", 102228128, "0123456789abcdef"),
    configuration=Configuration({"bucket_cap_mb": 50}),
    evidence=Evidence(31.21, 0.384, 20, 6, 1234, "the exact rung wins"),
    ladder=(
        LadderEntry(Rung.EXACT, Configuration({"bucket_cap_mb": 50}), 28.3, 1.21, 1.19, 1.23),
        LadderEntry(Rung.NEAR, Configuration({"hook": "bf16"}), 22.3, 1.41, 1.39, 1.43, 0.0029, 0.0021),
    ),
    env={"OMP_NUM_THREADS": "4"},
)


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "train.autoddp.toml"
    save(RECIPE, path)
    return str(path)


def test_show(file: str, capsys: Any) -> None:
    assert run(["show", file]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        file,
        "",
        "made by   autoddp 0.1.0 with torch 2.13.0 and Python 3.11.7, 2025-11-20T21:00:00Z",
        "fits      8 processes on 2 nodes, NVIDIA H100, nccl, torch 2.13.0, 97.5 MiB of gradients "
        "(parameters 0123456789abcdef)",
        "launches  bucket_cap_mb=50 (exact: nothing but the order of additions)",
        "sets      OMP_NUM_THREADS=4",
        "why       the exact rung wins",
        "evidence  baseline 31.2 ms per step, headroom 38.4 %, 20 trials, 6 final rounds, 1234 steps measured",
        "",
        "rung   what changes                        ms per step  speed-up (99 %)       gradient error  configuration",
        "exact  nothing but the order of additions  28.3         ×1.21 (1.19 to 1.23)  0               "
        "bucket_cap_mb=50",
        'near   gradients travel in 16 bits         22.3         ×1.41 (1.39 to 1.43)  0.29 %          hook="bf16"',
    ]


def test_the_ladder_on_80_columns_breaks_no_word(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a table it has no room there: rich would fold settings letter by letter."""
    settings = {"bucket_cap_mb": 8.0, "gradient_as_bucket_view": True, "hook": "bf16"}
    near = LadderEntry(Rung.NEAR, Configuration(settings), 22.3, 1.41, 1.39, 1.43, 0.0029, 0.0021)
    save(replace(RECIPE, ladder=(RECIPE.ladder[0], near)), tmp_path / "a.toml")
    for name, value in {"TERM": "xterm", "COLUMNS": "80"}.items():
        monkeypatch.setenv(name, value)
    with terminal() as (theirs, written), open(theirs, "w", closefd=False) as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        assert run(["show", str(tmp_path / "a.toml")]) == 0
        monkeypatch.undo()
    lines = b"".join(written).decode().splitlines()
    assert max(map(len, lines[1:])) <= 80
    assert lines[lines.index("rung near") :] == [
        "rung near",
        "  what changes     gradients travel in 16 bits",
        "  ms per step      22.3",
        "  speed-up (99 %)  ×1.41 (1.39 to 1.43)",
        "  gradient error   0.29 %",
        '  configuration    bucket_cap_mb=8.0 gradient_as_bucket_view=true hook="bf16"',
    ]


def test_show_when_nothing_won(tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "a.toml"
    save(replace(RECIPE, configuration=AS_WRITTEN, ladder=(), env={}), path)
    assert run(["show", str(path)]) == 0
    out = capsys.readouterr().out
    assert "launches  the script's own settings, as written" in out
    assert "The ladder is empty: no configuration reached the final rounds." in out
    assert "sets" not in out


def test_show_for_a_script(file: str, capsys: Any) -> None:
    assert run(["show", file, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer == {"ok": True, "file": file, "recipe": RECIPE.plain()}


def test_check(file: str, capsys: Any) -> None:
    assert run(["check", file]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"{file}: sound",
        "fits 8 processes on 2 nodes, NVIDIA H100, nccl, torch 2.13.0, 97.5 MiB of gradients "
        "(parameters 0123456789abcdef)",
    ]
    assert run(["check", "--json", file]) == 0
    assert json.loads(capsys.readouterr().out) == {"ok": True, "file": file, "fits": RECIPE.plain()["fits"]}


@pytest.mark.parametrize("command", ["show", "check"])
def test_a_bad_recipe(tmp_path: Path, capsys: Any, command: str) -> None:
    path = tmp_path / "bad.toml"
    path.write_text("schema = 7\n")
    newer = "written by a newer autoddp; upgrade it from its checkout: git pull, then pip install -e ."
    line = f"{path}: schema = 7: {newer}"
    with pytest.raises(RecipeError) as caught:
        run([command, str(path)])
    assert str(caught.value) == line
    assert run([command, str(path), "--json"]) == 2
    assert json.loads(capsys.readouterr().out) == {"ok": False, "file": str(path), "error": line}


@pytest.mark.parametrize(
    "arguments", [[], ["show"], ["shwo", "x"], ["show", "x", "y"], ["check", "x", "--jso"], ["diff", "x"]]
)
def test_a_bad_command_line_is_one_line(arguments: list[str]) -> None:
    with pytest.raises(UsageError) as caught:
        run(arguments)
    assert "--help" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert issubclass(UsageError, AutoddpError)
    assert caught.value.exit_code == 2


def test_diff(tmp_path: Path, file: str, capsys: Any) -> None:
    other = str(tmp_path / "other.toml")
    near = replace(RECIPE.ladder[1], speedup=1.42)
    changed = replace(RECIPE, configuration=AS_WRITTEN, env={"MALLOC_ARENA_MAX": "1"}, ladder=(near,))
    save(changed, other)
    assert run(["diff", file, other]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == [file, other]
    assert [line.split() for line in lines[1:]] == [
        ["configuration.bucket_cap_mb", "50", "-"],
        ["env.OMP_NUM_THREADS", "4", "-"],
        ["ladder.exact.configuration.bucket_cap_mb", "50", "-"],
        ["ladder.exact.ms_per_step", "28.3", "-"],
        ["ladder.exact.speedup", "1.21", "-"],
        ["ladder.exact.speedup_low", "1.19", "-"],
        ["ladder.exact.speedup_high", "1.23", "-"],
        ["ladder.near.speedup", "1.41", "1.42"],
        ["env.MALLOC_ARENA_MAX", "-", "1"],
    ]
    assert run(["diff", file, other, "--json"]) == 1
    answer = json.loads(capsys.readouterr().out)
    assert (answer["ok"], answer["same"]) == (True, False)
    assert answer["differences"]["ladder.near.speedup"] == [1.41, 1.42]
    assert run(["diff", file, file]) == 0
    assert capsys.readouterr().out == f"{file} and {file} say the same\n"
    with pytest.raises(RecipeError):
        run(["diff", file, str(tmp_path / "absent.toml")])
