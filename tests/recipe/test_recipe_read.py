"""Reading: a sound recipe, and files that are not recipes at all."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from autoddp.errors import RecipeError
from autoddp.knobs import Rung
from autoddp.recipe import ENV_ALLOWED, load, parse

SOUND = Path(__file__).with_name("sound.autoddp.toml").read_text(encoding="utf-8")


def test_a_sound_recipe(tmp_path: Path) -> None:
    file = tmp_path / "train.autoddp.toml"
    file.write_text(SOUND)
    recipe = load(file)
    assert recipe.fits.devices == ("NVIDIA H100 80GB HBM3",)
    assert dict(recipe.configuration) == {"bucket_cap_mb": 50}
    assert recipe.env == {"OMP_NUM_THREADS": "4"}
    assert isinstance(recipe.evidence.baseline_ms_per_step, float)
    assert [entry.rung for entry in recipe.ladder] == [Rung.EXACT, Rung.NEAR]


def test_env_and_ladder_may_be_absent() -> None:
    text = SOUND[: SOUND.index("[[ladder]]")].replace('[env]\nOMP_NUM_THREADS = "4"\n', "")
    assert parse(text, "x").env == {}
    assert parse(text, "x").ladder == ()


def test_the_run_folder_may_be_absent() -> None:
    assert parse(SOUND, "x").evidence.run == ""  # as autoddp wrote recipes before runs had such names
    named = SOUND.replace('why = "the', 'run = "20261121-200000-node7-4711"\nwhy = "the')
    assert parse(named, "x").evidence.run == "20261121-200000-node7-4711"


def test_windows_line_ends_and_byte_order_mark(tmp_path: Path) -> None:
    file = tmp_path / "train.autoddp.toml"
    file.write_bytes(b"\xef\xbb\xbf" + SOUND.replace("\n", "\r\n").encode())
    assert load(file) == parse(SOUND, "x")


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("schema = 1\nmade_by = 3", "made_by = 3: must be a table; write [made_by] above its keys"),
        ("schema = 1\nschema = 1", "overwrite a value (at end of document)"),
        ("schema 1", "after a key in a key/value pair (at line 1, column 8)"),
        ("schema = 1\nx = " + "[" * 50_000, "nested too deep for a recipe"),
        ("schema = " + "1" * 5000, "not TOML: Exceeds the limit"),
        ("schema" + ".a" * 3000 + " = 1", "nested too deep for a recipe"),
    ],
)
def test_what_toml_itself_refuses(text: str, line: str) -> None:
    with pytest.raises(RecipeError) as caught:
        parse(text, "x.toml")
    assert str(caught.value).startswith("x.toml: ")
    assert line in str(caught.value)
    assert str(caught.value).isprintable()


def test_a_ladder_of_another_shape() -> None:
    text = SOUND[: SOUND.index("[[ladder]]")].replace("schema = 1", "schema = 1\nladder = 3")
    with pytest.raises(RecipeError, match=r"ladder = 3: must be tables; write \[\[ladder\]\] above the keys of each"):
        parse(text, "x")


def test_not_there_names_the_neighbour(tmp_path: Path) -> None:
    (tmp_path / "train.autoddp.toml").write_text(SOUND)
    (tmp_path / "bert.autoddp.toml").write_text(SOUND)
    with pytest.raises(RecipeError) as caught:
        load(tmp_path / "trian.autoddp.toml")
    near = "no such file (did you mean 'train.autoddp.toml'?); autoddp SCRIPT --trials 20 writes a recipe"
    assert str(caught.value) == f"{tmp_path / 'trian.autoddp.toml'}: {near}"
    with pytest.raises(RecipeError, match="no such file; autoddp SCRIPT"):
        load(tmp_path / "absent" / "x")


def test_a_folder_and_other_unreadable_things(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="a folder, not a recipe; name a file such as"):
        load(tmp_path)
    file = tmp_path / "latin.toml"
    file.write_bytes("schema = 1 # ü".encode("latin-1"))
    with pytest.raises(RecipeError, match=r"not UTF-8 text \(byte 13\); save it as UTF-8"):
        load(file)
    with pytest.raises(RecipeError, match="cannot be read: Not a directory; name a file that you may read"):
        load(file / "beneath")
    with pytest.raises(RecipeError, match=r"cannot be read: (stat: )?embedded null"):
        load("a\0b")


def test_a_line_stays_a_line_whatever_the_file_is_called() -> None:
    with pytest.raises(RecipeError) as caught:
        load("no\nsuch\x1b[31m")
    assert str(caught.value).isprintable()


def test_env_allows_nothing_that_loads_code_or_names_a_file() -> None:
    forbidden = {"LD_PRELOAD", "LD_LIBRARY_PATH", "PYTHONPATH", "PATH", "NCCL_NET", "NCCL_CONF_FILE", "NCCL_TOPO_FILE"}
    assert not forbidden & ENV_ALLOWED.keys()
    suspicious = ("PLUGIN", "FILE", "PATH", "PRELOAD", "DEBUG", "PYTHON", "LIB")
    others = {name for name in ENV_ALLOWED if any(word in name for word in suspicious)}
    assert others == {"GLIBC_TUNABLES"}  # which has a list of values: some of its options write files
    assert ENV_ALLOWED["GLIBC_TUNABLES"]("glibc.malloc.check=3") is not None


def test_reading_is_light() -> None:
    heavy = "import sys, autoddp.recipe; print([m for m in ('torch', 'tomlkit', 'rich', 'optuna') if m in sys.modules])"
    answer = subprocess.run([sys.executable, "-c", heavy], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "[]"
