"""How much the tests notice: random faults are put into autoddp, and the tests of that part are run against each.

    python campaigns/mutations.py                              # 60 faults, two at once: a table, and mutations.jsonl
    python campaigns/mutations.py --checkout ../old            # the same faults under the tests of another checkout
    python campaigns/mutations.py --compare old.jsonl new.jsonl

A fault changes one place of the syntax tree: a comparison, an operator, a condition, or a constant. Which ones are
chosen follows from --seed, and both runs of a comparison must have the same package `autoddp`. A fault that no test
notices is not always a gap: some change nothing that can be seen.
"""

from __future__ import annotations

import argparse
import ast
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MAPPED = {
    "study": ("tests/study", "tests/cli/test_one_decision.py"),
    "recipe": ("tests/recipe", "tests/cli/test_recipe_command.py", "tests/cli/test_another_rung.py"),
    "knobs": ("tests/knobs", "tests/recipe", "tests/study/test_trials.py"),
    "timing": ("tests/timing", "tests/study/test_ladder.py", "tests/study/test_search.py"),
    "wire": ("tests/wire", "tests/launch/test_job_machine.py"),
    "worker/ddp": (
        "tests/worker/test_hooks_alone.py",
        "tests/worker/test_apply.py",
        "tests/worker/test_effects.py",
    ),
    "worker/gradients": (
        *("tests/worker/test_kept_gradients.py", "tests/worker/test_gradient_access.py"),
        *("tests/worker/test_gradient_monitor.py", "tests/worker/test_apply.py"),
    ),
}
"""Where faults are put: folder, file, or files that begin so → tests that should notice them, the quickest first."""
COMPARISONS = {
    ast.Lt: "<=",
    ast.LtE: "<",
    ast.Gt: ">=",
    ast.GtE: ">",
    ast.Eq: "!=",
    ast.NotEq: "==",
    ast.Is: "is not",
    ast.IsNot: "is",
    ast.In: "not in",
    ast.NotIn: "in",
}
OPERATORS = {ast.Add: "-", ast.Sub: "+", ast.Mult: "/", ast.Div: "*", ast.FloorDiv: "*"}


@dataclass(frozen=True)
class Fault:
    """One place of a file, and what stands there instead."""

    path: str
    line: int
    begin: int
    end: int
    """Positions in the file's bytes."""
    was: str
    becomes: str

    @property
    def room(self) -> str:
        """The longest name in MAPPED with which the path begins."""
        return max((room for room in MAPPED if self.path.startswith(f"autoddp/{room}")), key=len)

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.was} → {self.becomes}"


def faults_of(path: Path) -> Iterator[Fault]:
    """Every fault that can be put into one file. Annotations and texts are left alone."""
    source = path.read_bytes()
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))

    def fault(node: ast.expr, becomes: str) -> Fault:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        begin, end = starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset
        was = " ".join(source[begin:end].decode().split())
        return Fault(str(path.relative_to(ROOT)), node.lineno, begin, end, was, becomes)

    tree = ast.parse(source)
    annotations = {
        id(part)
        for node in ast.walk(tree)
        for found in (getattr(node, "annotation", None), getattr(node, "returns", None))
        if found is not None
        for part in ast.walk(found)
    }
    for node in ast.walk(tree):
        if id(node) in annotations:
            continue
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            left, right = ast.unparse(node.left), ast.unparse(node.comparators[0])
            yield fault(node, f"({left} {COMPARISONS[type(node.ops[0])]} {right})")
        elif isinstance(node, ast.BoolOp):
            word = " or " if isinstance(node.op, ast.And) else " and "
            yield fault(node, f"({word.join(f'({ast.unparse(value)})' for value in node.values)})")
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            yield fault(node, f"bool({ast.unparse(node.operand)})")
        elif isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
            left, right = ast.unparse(node.left), ast.unparse(node.right)
            yield fault(node, f"(({left}) {OPERATORS[type(node.op)]} ({right}))")
        elif isinstance(node, ast.IfExp):
            yield fault(node, f"({ast.unparse(node.orelse)})")
        elif isinstance(node, ast.Constant) and type(node.value) in (bool, int, float):
            yield fault(node, repr(not node.value if isinstance(node.value, bool) else node.value + 1))


def chosen(number: int, seed: int) -> list[Fault]:
    """As many from each room, as far as it goes."""
    luck = random.Random(seed)
    found: dict[str, list[Fault]] = {room: [] for room in MAPPED}
    for path in sorted((ROOT / "autoddp").rglob("*.py")):
        name = str(path.relative_to(ROOT))
        if any(name.startswith(f"autoddp/{room}") for room in MAPPED):
            for fault in faults_of(path):
                found[fault.room].append(fault)
    for of_room in found.values():
        luck.shuffle(of_room)
    in_turn = itertools.zip_longest(*found.values())
    return [fault for turn in in_turn for fault in turn if fault is not None][:number]


def judged(fault: Fault, checkout: Path, python: str, seconds: float) -> dict[str, object]:
    """Whether the tests of a copy of the checkout notice the fault, and how soon."""
    place = checkout / fault.path
    sound = place.read_bytes()
    place.write_bytes(sound[: fault.begin] + fault.becomes.encode() + sound[fault.end :])
    began = time.monotonic()
    try:
        tests = [name for name in MAPPED[fault.room] if (checkout / name).exists()]
        command = [python, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
        environment = {**os.environ, "PYTHONPATH": str(checkout), "PYTHONDONTWRITEBYTECODE": "1"}
        nowhere = subprocess.DEVNULL
        run = subprocess.Popen(
            command, cwd=checkout, env=environment, stdout=nowhere, stderr=nowhere, start_new_session=True
        )
        try:
            code = run.wait(seconds)
        except subprocess.TimeoutExpired:
            os.killpg(run.pid, signal.SIGKILL)
            code = run.wait()
    finally:
        place.write_bytes(sound)
    verdict = {0: "missed", 1: "noticed"}.get(code, "missed: time" if code < 0 else "noticed")
    return {"fault": str(fault), "verdict": verdict, "seconds": round(time.monotonic() - began, 1), **asdict(fault)}


def run(
    faults: Sequence[Fault], checkout: Path, python: str, seconds: float, at_once: int
) -> Iterator[dict[str, object]]:
    """Each in one of `at_once` copies of the checkout."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        copies = [Path(folder, str(number)) for number in range(at_once)]
        leave = shutil.ignore_patterns(".git", ".venv", "__pycache__", ".*_cache", "demo", ".autoddp")
        for copy in copies:
            shutil.copytree(checkout, copy, ignore=leave, symlinks=True)

        def one(fault: Fault) -> dict[str, object]:
            copy = copies.pop()
            try:
                return judged(fault, copy, python, seconds)
            finally:
                copies.append(copy)

        with ThreadPoolExecutor(at_once) as pool:
            yield from pool.map(one, faults)


def read(path: str) -> dict[str, str]:
    """Fault → verdict."""
    return {row["fault"]: row["verdict"] for row in map(json.loads, Path(path).read_text().splitlines())}


def compare(before: str, after: str) -> int:
    """Print what the tests noticed before and what they notice now; 1 if they notice fewer."""
    old, new = read(before), read(after)
    assert old.keys() == new.keys(), "these are runs with other faults"
    noticed = [sum(verdict == "noticed" for verdict in found.values()) for found in (old, new)]
    print(f"{noticed[0]} of {len(old)} noticed before, {noticed[1]} now")
    for fault in old:
        if old[fault] != new[fault]:
            print(f"  {fault}: {old[fault]} before, {new[fault]} now")
    return int(noticed[1] < noticed[0])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--number", type=int, default=60)
    parser.add_argument("--seed", type=int, default=29)
    parser.add_argument("--at-once", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=60, help="for the tests of one fault (60); then it is missed")
    parser.add_argument("--checkout", type=Path, default=ROOT, help="whose tests are run; this one's by default")
    parser.add_argument("--python", default=sys.executable, help="the interpreter, with what the tests need")
    parser.add_argument("--results", type=Path, default=Path("mutations.jsonl"))
    parser.add_argument("--compare", nargs=2, metavar=("BEFORE", "AFTER"))
    arguments = parser.parse_args()
    if arguments.compare:
        return compare(*arguments.compare)
    faults = chosen(arguments.number, arguments.seed)
    verdicts: list[object] = []
    with open(arguments.results, "w") as file:
        for row in run(faults, arguments.checkout.resolve(), arguments.python, arguments.seconds, arguments.at_once):
            print(f"{row['verdict']:12} {row['seconds']:5} s  {row['fault']}", flush=True)
            file.write(json.dumps(row) + "\n")
            verdicts.append(row["verdict"])
    print(f"{verdicts.count('noticed')} of {len(verdicts)} noticed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
