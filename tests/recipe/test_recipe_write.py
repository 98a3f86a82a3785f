"""Writing: readable, exact, whole or not at all, and never over somebody's file."""

from __future__ import annotations

import os
import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autoddp.errors import RecipeError
from autoddp.knobs import AS_WRITTEN, BY_NAME, Configuration, Rung
from autoddp.recipe import Evidence, Fits, LadderEntry, MadeBy, Recipe, dump, load, parse, save

RECIPE = Recipe(
    made_by=MadeBy("0.1.0", "2.13.0", "3.11.7", "2025-11-20T21:00:00Z"),
    fits=Fits(8, 2, "nccl", ("NVIDIA H100 80GB HBM3",), "2.13.0", 102228128, "0123456789abcdef"),
    configuration=Configuration({"bucket_cap_mb_list": [32, 8.5, 1], "gradient_as_bucket_view": True}),
    evidence=Evidence(31.21, 0.384, 20, 6, 1234, 'the exact rung wins ×1.21, "surely" \\ C:'),
    ladder=(
        LadderEntry(Rung.EXACT, Configuration({"bucket_cap_mb": 50}), 28.3, 1.21, 1.19, 1.23),
        LadderEntry(Rung.LOSSY, Configuration({"hook": "powersgd", "powersgd_rank": 2}), 0.1 + 0.2, 1e-7, 5e-324, 1e22),
    ),
    env={"OMP_NUM_THREADS": "4", "NCCL_ALGO": "Ring"},
)


def test_what_is_written_is_read_back() -> None:
    assert parse(dump(RECIPE), "x") == RECIPE
    assert dump(parse(dump(RECIPE), "x")) == dump(RECIPE)


def test_no_fit_part_is_left_out_of_the_digest() -> None:
    assert f'digest = "{RECIPE.fits.digest}"' in dump(RECIPE)


def test_the_run_folder_is_named_where_it_is_known() -> None:
    assert "run =" not in dump(RECIPE)
    named = replace(RECIPE, evidence=replace(RECIPE.evidence, run="20261121-200000-node7-4711"))
    assert 'run = "20261121-200000-node7-4711"  # ' in dump(named)
    assert parse(dump(named), "x") == named


def test_the_order_of_sections() -> None:
    text = dump(RECIPE)
    sections = [line for line in text.splitlines() if line.startswith("[")]
    assert sections == ["[made_by]", "[fits]", "[configuration]", "[env]", "[evidence]", "[[ladder]]", "[[ladder]]"]
    assert text.startswith("# A recipe of autoddp")


def test_each_launched_knob_is_explained() -> None:
    text = dump(RECIPE)
    for name in RECIPE.configuration:
        assert f"# {BY_NAME[name].says}\n{name} = " in text
    assert "bucket_cap_mb_list = [32, 8.5, 1]\n" in text
    assert "nothing but the order of additions" in text


def test_an_empty_configuration_says_so() -> None:
    plain = replace(RECIPE, configuration=AS_WRITTEN, env={}, ladder=())
    text = dump(plain)
    assert "[configuration]\n# Empty: the script's own settings stay.\n" in text
    assert "[env]" not in text
    assert parse(text, "x") == plain


def test_save_then_load(tmp_path: Path) -> None:
    file = tmp_path / "train.autoddp.toml"
    assert save(RECIPE, file) is None
    assert load(file) == RECIPE
    assert os.listdir(tmp_path) == ["train.autoddp.toml"]


def test_the_file_is_shared_as_the_umask_says(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        save(RECIPE, tmp_path / "a.toml")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "a.toml").stat().st_mode) == 0o644


MINE = "schema = 1\n# written by hand\n"


@pytest.mark.parametrize("content", [b"mine", b"PK\x03\x04" + bytes(5000) + b"\nschema = 1\n", b"[tool]\nname = 1\n"])
def test_what_is_no_recipe_stays(tmp_path: Path, content: bytes) -> None:
    """A checkpoint, or pyproject.toml, that was named by mistake."""
    file = tmp_path / "model.pt"
    file.write_bytes(content)
    with pytest.raises(RecipeError) as caught:
        save(RECIPE, file, tmp_path / "previous.toml")
    assert str(caught.value) == f"{file}: this file is not a recipe, so it is not replaced; name another file"
    assert file.read_bytes() == content
    assert list(tmp_path.iterdir()) == [file]


def test_a_recipe_that_is_read_only_stays(tmp_path: Path) -> None:
    """For root too, to whom the system refuses nothing."""
    file = tmp_path / "a.toml"
    file.write_text(MINE)
    file.chmod(0o444)
    with pytest.raises(RecipeError) as caught:
        save(RECIPE, file, tmp_path / "previous.toml")
    assert str(caught.value) == f"{file}: this recipe is read-only, so it is not replaced; name another file"
    assert file.read_text() == MINE
    assert list(tmp_path.iterdir()) == [file]


def test_an_empty_file_is_written(tmp_path: Path) -> None:
    (tmp_path / "a.toml").touch()
    save(RECIPE, tmp_path / "a.toml", tmp_path / "previous.toml")
    assert load(tmp_path / "a.toml") == RECIPE


def test_the_older_file_is_kept(tmp_path: Path) -> None:
    file, previous = tmp_path / "a.toml", tmp_path / "deep" / "previous.toml"
    file.write_text(MINE)
    assert save(RECIPE, file, previous) == previous
    assert previous.read_text() == MINE
    assert stat.S_IMODE(previous.stat().st_mode) == 0o600  # it lies in a run's folder
    assert load(file) == RECIPE


def test_the_kept_file_is_kept_too(tmp_path: Path) -> None:
    file, previous = tmp_path / "a.toml", tmp_path / "previous.toml"
    for number, text in enumerate(["one", "two", "three"]):
        file.write_text(f"schema = 1  # {text}")
        assert (
            save(RECIPE, file, previous)
            == (previous, tmp_path / "previous.toml.2", tmp_path / "previous.toml.3")[number]
        )
    kept = sorted(path.read_text().split()[-1] for path in tmp_path.glob("previous*"))
    assert kept == ["one", "three", "two"]


def test_the_same_text_is_left_alone(tmp_path: Path) -> None:
    file = tmp_path / "a.toml"
    save(RECIPE, file)
    before = file.stat().st_ino
    assert save(dump(RECIPE), file) is None
    assert file.stat().st_ino == before


def test_another_file_is_never_lost(tmp_path: Path) -> None:
    file = tmp_path / "a.toml"
    file.write_text(MINE)
    with pytest.raises(RecipeError) as caught:
        save(RECIPE, file)
    assert str(caught.value) == f"{file}: another file is there already; move it away, or name another file"
    assert file.read_text() == MINE


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    link, target = tmp_path / "a.toml", tmp_path / "shared" / "real.toml"
    link.symlink_to(target)
    save(RECIPE, link)
    assert link.is_symlink()
    assert load(target) == RECIPE


@pytest.mark.parametrize("call", ["replace", "fsync"])
def test_a_failing_write_leaves_the_folder_as_it_was(tmp_path: Path, monkeypatch: Any, call: str) -> None:
    file = tmp_path / "a.toml"
    file.write_text(MINE)

    def full(*_arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, call, full)
    with pytest.raises(RecipeError) as caught:
        save(RECIPE, file, tmp_path / "previous.toml")
    assert str(caught.value) == f"{file}: cannot be written: No space left on device; name a file you may write to"
    assert os.listdir(tmp_path) == ["a.toml"]
    assert file.read_text() == MINE


def test_an_interrupted_write_leaves_no_scratch_file(tmp_path: Path, monkeypatch: Any) -> None:
    def interrupt(_number: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        save(RECIPE, tmp_path / "a.toml")
    assert os.listdir(tmp_path) == []


def test_places_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="cannot be written: No such file or directory"):
        save(RECIPE, tmp_path / "absent" / "a.toml")
    (tmp_path / "file").touch()
    with pytest.raises(RecipeError, match="cannot be written: Not a directory"):
        save(RECIPE, tmp_path / "file" / "a.toml")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_without_permission(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(RecipeError, match="cannot be written: Permission denied"):
        save(RECIPE, tmp_path / "a.toml")


def test_nothing_is_written_that_could_not_be_read(tmp_path: Path) -> None:
    file = tmp_path / "a.toml"
    wrong = replace(RECIPE, evidence=replace(RECIPE.evidence, headroom=float("nan")))
    with pytest.raises(RecipeError, match=r"evidence\.headroom = NaN: must be a number from 0 to 1"):
        save(wrong, file)
    assert not file.exists()
