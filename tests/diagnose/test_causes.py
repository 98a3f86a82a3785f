"""Each file of diagnose/causes is a cause, and has all that a diagnosis and a report need."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from autoddp.diagnose import CAUSES
from autoddp.diagnose.causes import in_words

ROOT = Path(__file__).resolve().parents[2]
FILES = {path.stem for path in (ROOT / "autoddp" / "diagnose" / "causes").glob("*.py")} - {"__init__"}


def test_every_file_is_a_cause() -> None:
    assert set(CAUSES) == FILES
    assert [name for name, cause in CAUSES.items() if cause.name != name] == []


def test_every_cause_has_words_of_its_own() -> None:
    words = [cause.in_words for cause in CAUSES.values()]
    assert all(words)
    assert len(set(words)) == len(words)


def test_the_page_on_diagnoses_has_a_line_for_every_cause() -> None:
    page = (ROOT / "docs" / "diagnose.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)) >= FILES


@pytest.mark.parametrize("name", sorted(FILES))
def test_no_other_file_of_a_diagnosis_needs_the_name(name: str) -> None:
    """What is particular to a cause stands in its file. All others only speak of waiting for gradients."""
    if name == "exposed_communication":
        return
    rest = [path for room in ("diagnose", "report") for path in (ROOT / "autoddp" / room).rglob("*.py")]
    named = [path.name for path in rest if path.stem != name and f'"{name}"' in path.read_text(encoding="utf-8")]
    assert named == []


def test_an_unknown_name_is_shown_as_it_is() -> None:
    assert in_words("data_loader") == "waiting for data"
    assert in_words("moon") == "moon"
