"""Rows of docs/compatibility.md: their headers, the page, and how a bad row is noticed. run_all.py runs all rows."""

from __future__ import annotations

import ast
import re
import shutil
import tempfile
from collections import Counter
from pathlib import Path

import pytest
import torch
from compat import page
from compat.beside_torchrun import Result, compare, never_same, other_names, run
from compat.case import AS_WRITTEN, SCRIPTS, TUNED, load, read
from launchers import ROOT, whole

QUICK = ("hydra_app", "tensorboard_writer")
"""What they need is in the extra `test`."""
PAGE = ROOT / "docs" / "compatibility.md"

HEADER = '''"""{title}"""
MODULES = ("accelerate",)
EXPECTED = "{expected}"
NOTE = "{note}"
{more}
'''
SOUND = {"title": "Accelerate: a title.", "expected": TUNED, "note": "A sentence.", "more": ""}


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", [*map(whole, QUICK)])
def test_a_row(name: str) -> None:
    result = run(load()[name])
    assert not result.skipped
    assert not result.problems, f"{result.problems}: see {result.kept}"
    assert result.tuned
    assert result.parameters == "same bits"


PLANTED = '''"""A script that trains something else under a recipe, and writes another file."""

import sys

import torch
import torch.distributed as dist
from parameters import leave
from torch import nn
from torch.nn.parallel import DistributedDataParallel

MODULES = ()
EXPECTED = "as written: there is such a line"
NOTE = "For a test of the runner."

dist.init_process_group("gloo")
torch.manual_seed(7)
model = DistributedDataParallel(nn.Linear(16, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in range(600):
    optimizer.zero_grad()
    model(torch.randn(8, 16)).square().mean().backward()
    optimizer.step()
if "autoddp" in sys.modules:
    with torch.no_grad():
        model.module.bias[dist.get_rank()] += 1e-6
    open("extra.txt", "w").close()
leave(model)
dist.destroy_process_group()
'''


@pytest.mark.whole  # `make compat` begins with it
@pytest.mark.timeout(900)
def test_a_bad_row_is_noticed() -> None:
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:  # a run may have a /tmp of its own
        script = Path(folder) / "planted.py"
        script.write_text(PLANTED)
        result = run(read(script))
    found = "\n".join(result.problems)
    try:
        assert result.is_bad
        assert "expected as written: there is such a line, but autoddp said: recipe written" in found
        assert "torchrun's has not" in found
        assert "extra.txt" in found
        assert "the parameters differ from torchrun's by" in found
        assert len(result.problems) == 3, found
        assert "autoddp: recipe" in (Path(result.kept) / "autoddp.txt").read_text()
    finally:
        shutil.rmtree(result.kept)


def test_every_header_is_sound() -> None:
    cases = load()
    assert cases.keys() == {path.stem for path in SCRIPTS.glob("*.py")}
    assert cases.keys() >= {*QUICK}
    titles = Counter(case.title for case in cases.values())
    assert titles.most_common(1)[0][1] == 1, titles


@pytest.mark.parametrize(
    ("part", "wrong"),
    [
        ("title", "No period at the end"),
        ("title", ""),
        ("expected", "as written"),
        ("expected", AS_WRITTEN),
        ("note", "no sentence"),
        ("note", ""),
        ("more", 'LAUNCH = "-x"'),
    ],
)
def test_a_header_that_is_not_sound(tmp_path, part: str, wrong: str) -> None:
    path = tmp_path / "script.py"
    path.write_text(HEADER.format(**SOUND))
    assert read(path).title == "Accelerate: a title"
    path.write_text(HEADER.format(**{**SOUND, part: wrong}))
    with pytest.raises(ValueError, match=r"script\.py: "):
        read(path)


def test_no_script_has_a_line_for_autoddp() -> None:
    for case in load().values():
        tree = ast.parse(case.script.read_text())
        own = [
            node for node in tree.body if getattr(getattr(node, "targets", [None])[0], "id", "") in ("NOTE", "EXPECTED")
        ]
        rest = [node for node in tree.body[1:] if node not in own]  # without the docstring
        assert "autoddp" not in "\n".join(map(ast.unparse, rest)).lower(), case.name


def test_the_page_has_one_row_for_each_script() -> None:
    rows, when, versions = page.parse(PAGE.read_text())
    cases = load()
    assert Counter(row.name for row in rows) == Counter(cases.keys())
    assert {row.name: (row.title, row.note) for row in rows} == {
        name: (case.title, case.note) for name, case in cases.items()
    }
    assert re.fullmatch(r"\d{4}-\d{2}-\d{2}( to \d{4}-\d{2}-\d{2})?", when)
    assert "torch" in versions
    assert not [row.name for row in rows if "BAD" in row.tuned]


ROWS = [
    page.Row("one", "Title | with a bar", 'yes; hook="bf16"', "same bits", "1 start, 3 s, 4 trials", "Note | more."),
    page.Row("two", "Another", "no: why", "not compared", "2 starts, 5 s", "Note."),
]


def test_a_page_says_what_it_was_given() -> None:
    many = ROWS + [page.Row(f"two{n}", f"Number {n}", "yes", "same bits", "1 start", "Note.") for n in range(40)]
    text = page.render(many, "2026-11-22", "Python 3.11, torch 2.13.0")
    rows, when, versions = page.parse(text)
    assert Counter(rows) == Counter(many)
    assert (when, versions) == ("2026-11-22", "Python 3.11, torch 2.13.0")


@pytest.mark.parametrize(
    "edit", [("same bits", "other  bits"), ("2 scripts.", "3 scripts."), ("# Frameworks", "# The")]
)
def test_an_edited_page_is_noticed(edit: tuple[str, str]) -> None:
    text = page.render(ROWS, "2026-11-22", "torch 2.13.0")
    assert edit[0] in text
    with pytest.raises(ValueError, match="was not made by"):
        page.parse(text.replace(*edit))


def compared(one: object, other: object, knobs: tuple[str, ...] = ()) -> Result:
    result = Result("a script")
    compare({"rank0.pt": {"w": torch.tensor(one)}}, {"rank0.pt": {"w": torch.tensor(other)}}, knobs, result)
    return result


def test_other_parameters_are_a_problem() -> None:
    nearly = [1.0, 2.0, 3.000001]
    assert compared([1.0, 2.0, 3.0], [1.0, 2.0, 3.0]).parameters == "same bits"
    assert not compared([1.0, 2.0, 3.0], [1.0, 2.0, 3.0]).problems
    assert compared([1.0, 2.0, 3.0], nearly).problems
    assert compared([1.0, 2.0, 3.0], nearly, ("bucket_cap_mb",)).problems
    assert not compared([1.0, 2.0, 3.0], nearly, ("defer_reductions",)).problems
    assert compared([1.0, 2.0, 3.0], [1.0, 2.0, 3.1], ("defer_reductions",)).problems
    for other in ([1.0, 2.0], [float("nan")] * 3, [0, 1, 2]):
        assert compared([1.0, 2.0, 3.0], other, ("defer_reductions",)).problems
    assert compared([float("nan")], [float("nan")], ("defer_reductions",)).problems


def test_parameters_of_a_rank_that_are_missing_are_a_problem() -> None:
    state = {"w": torch.ones(2)}
    result = Result("a script")
    compare({"rank0.pt": state, "rank1.pt": state}, {"rank0.pt": state}, (), result)
    assert result.problems
    nothing = Result("a script")
    compare({}, {}, (), nothing)
    assert nothing.parameters == "not compared"
    assert not nothing.problems


def test_other_names_are_a_problem() -> None:
    one = {"work/checkpoint-20", "work/last.pt"}
    assert not other_names(one, one)
    assert len(other_names(one, {"work/checkpoint-40", "work/last.pt"})) == 2


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("outputs/2026-11-22/13-05-01/last.pt", "outputs/2026-11-22/13-07-59/last.pt", True),
        ("events.out.tfevents.1795353000.vm.4242.0", "events.out.tfevents.1795353999.vm.51.0", True),
        ("runs/Nov22_13-05-01_vm", "runs/Nov22_13-07-59_vm", True),
        ("cache-0123456789abcdef.arrow", "cache-fedcba9876543210.arrow", True),
        ("checkpoint-20", "checkpoint-40", False),
        ("epoch=1-step=80.ckpt", "epoch=2-step=160.ckpt", False),
        ("rank0.pt", "rank1.pt", False),
    ],
)
def test_names_that_are_never_the_same(one: str, other: str, same: bool) -> None:
    assert (never_same(one) == never_same(other)) is same
