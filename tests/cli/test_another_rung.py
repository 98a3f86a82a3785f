"""Another rung of a saved recipe than the one it launches."""

from __future__ import annotations

from pathlib import Path

import pytest

from autoddp.commandline.mode import choose
from autoddp.commandline.words import parse
from autoddp.errors import UnfitRecipe
from autoddp.knobs import AS_WRITTEN, Configuration, Rung
from autoddp.recipe import Evidence, Fits, LadderEntry, MadeBy, Recipe, save

EXACT, NEAR, LOSSY, BATCH, SLOWER, BY_HAND = (
    Configuration(values)
    for values in (
        {"bucket_cap_mb": 50},
        {"hook": "bf16"},
        {"hook": "powersgd", "powersgd_rank": 1},
        {"hook": "bf16", "accumulate_steps": 4},
        {"bucket_cap_mb": 1},
        {"hook": "fp16", "bucket_cap_mb": 7},
    )
)


def recipe(path: Path, launched: Configuration, exact: Configuration = EXACT) -> str:
    import torch

    version = torch.__version__.split("+")[0]
    slower = exact == SLOWER
    save(
        Recipe(
            made_by=MadeBy("0.1.0", version, "3.11.7", "2026-11-20T21:00:00Z"),
            fits=Fits(2, 1, "gloo", ("cpu",), version, 1024, "0123456789abcdef"),
            configuration=launched,
            evidence=Evidence(31.21, 0.384, 20, 6, 1234, "the best of what you allow"),
            ladder=(
                LadderEntry(Rung.EXACT, exact, 28.3, 0.9 if slower else 1.21, 0.8 if slower else 1.19, 1.23),
                LadderEntry(Rung.NEAR, NEAR, 22.3, 1.41, 1.39, 1.43, 0.0029),
                LadderEntry(Rung.LOSSY, LOSSY, 12.3, 2.41, 2.39, 2.43, 0.29),
                LadderEntry(Rung.BATCH, BATCH, 8.3, 3.41, 3.39, 3.43),
            ),
        ),
        path / "r.toml",
    )
    return str(path / "r.toml")


@pytest.mark.parametrize(
    ("launched", "words", "expected"),
    [
        (NEAR, "", NEAR),
        (BATCH, "", BATCH),
        (NEAR, "--allow exact", EXACT),
        (NEAR, "--allow lossy", LOSSY),
        (NEAR, "--allow near", NEAR),
        (AS_WRITTEN, "--allow near", NEAR),
        (LOSSY, "--allow near", NEAR),
        (NEAR, "--accumulate-up-to 8", BATCH),
        (NEAR, "--accumulate-up-to 2", NEAR),
        (EXACT, "--accumulate-up-to 8", EXACT),  # the batch rung of this recipe rounds gradients to 16 bits
        (BY_HAND, "--allow near", BY_HAND),
        (BY_HAND, "--allow exact", EXACT),
        (BATCH, "--accumulate-up-to 8", BATCH),
        (BATCH, "--accumulate-up-to 2", NEAR),
        (BATCH, "--accumulate-up-to 1", NEAR),
        (BATCH, "--allow exact", EXACT),
        (BATCH, "--allow lossy", BATCH),
        (BATCH, "--allow near", BATCH),
    ],
)
def test_what_is_launched(tmp_path: Path, launched: Configuration, words: str, expected: Configuration) -> None:
    words = f"--recipe {recipe(tmp_path, launched)} --nproc-per-node 2 {words} train.py"
    plan = choose(parse(words.split()))
    assert plan.configuration == expected
    assert ("the batch is 4 times as large" in plan.says) is (expected is BATCH)


def test_a_stricter_limit_holds_for_a_saved_recipe(tmp_path: Path) -> None:
    """The recipe itself says that its hook is off by more: a study would have refused it."""
    job = f"--recipe {recipe(tmp_path, NEAR)} --nproc-per-node 2 train.py".split()
    assert choose(parse(["--near-limit", "0.0029", *job])).configuration == NEAR
    with pytest.raises(UnfitRecipe, match=r"gradient error 0\.29 %, above --near-limit \(0\.10 %\): allow less"):
        choose(parse(["--near-limit", "0.001", *job]))
    assert choose(parse(["--near-limit", "0.001", "--allow", "exact", *job])).configuration == EXACT
    forced = choose(parse(["--near-limit", "0.001", "--force", *job]))
    assert forced.configuration == NEAR
    assert "gradient error 0.29 %" in forced.says


def test_nothing_allowed_wins(tmp_path: Path) -> None:
    words = f"--recipe {recipe(tmp_path, NEAR, SLOWER)} --nproc-per-node 2 --allow exact train.py"
    assert choose(parse(words.split())).configuration == AS_WRITTEN
