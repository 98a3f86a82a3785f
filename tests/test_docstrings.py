"""Each docstring is understood by itself: none opens with a word that leans on a name or on the docstring before it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
LEANING = ("Of", "That", "Those", "The same", "As", "In", "Where", "Such", "Its", "Their", "They")
_OPENS = re.compile(rf"\s*({'|'.join(LEANING)})\b", re.IGNORECASE)


def docstrings(source: str) -> Iterator[tuple[int, str]]:
    """Line and text of every string that stands alone: of modules, classes and functions, and below attributes."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value


def leaning(file: str, source: str) -> list[str]:
    return [f"{file}:{line}: {text.strip()[:60]}" for line, text in docstrings(source) if _OPENS.match(text)]


def test_each_docstring_opens_with_its_subject() -> None:
    """A noun, or in a function a verb: "Seconds of a step", not "Of a step"."""
    files = sorted((ROOT / "autoddp").rglob("*.py"))
    assert [
        fault for path in files for fault in leaning(str(path.relative_to(ROOT)), path.read_text(encoding="utf-8"))
    ] == []


@pytest.mark.parametrize("opening", LEANING)
def test_the_check_sees_each_opening(opening: str) -> None:
    for text in (opening, opening.lower(), f"\n{opening}"):
        assert len(leaning("x.py", f'def f():\n    """{text} a step."""')) == 1


@pytest.mark.parametrize(
    "source",
    [
        '"""Of a step."""',
        'class C:\n    """Of a step."""',
        'class C:\n    def f(self):\n        """Of a step."""',
        'async def f():\n    """Of a step."""',
        'class C:\n    x: int = 0\n    """Of a step."""',
        'def f(self):\n    self.x = 0\n    """Of a step."""',
        'if True:\n    X = 0\n    """Of a step.\n\n    More of it.\n    """',
    ],
)
def test_the_check_sees_each_kind_of_docstring(source: str) -> None:
    assert len(leaning("x.py", source)) == 1


@pytest.mark.parametrize("word", ["Offers", "Assigns", "Inputs", "Whereabouts", "It", "The samples", "Thats", "See"])
def test_the_check_leaves_other_words(word: str) -> None:
    assert leaning("x.py", f'"""{word} of a step."""\nx = "Of a step."') == []
