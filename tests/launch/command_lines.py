"""Random command lines, and what a script gets of each under a real torchrun and under autoddp. Run as a program.

    python command_lines.py FOLDER COUNT      # prints one JSON line about COUNT lists and the first that differ

torchrun gets a list without autoddp's own words, autoddp gets it whole. All launches happen in this one process:
torchrun's own code starts a program that leaves its arguments, in the place of Python (PYTHON_EXEC) or as the user's
program. Under `--trials 0` autoddp launches likewise; elsewhere it would tune first, so torchrun's own code says what
would be started. What scripts with parsers of all kinds make of their words is compared with what was meant.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import random
import runpy
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

LEAVES_ITS_ARGUMENTS = """#!/bin/sh
for word in "$@"; do printf '%s\\0' "$word"; done > "$OUT"
"""
ARGPARSE = """
import argparse

def parser():
    found = argparse.ArgumentParser(allow_abbrev=False)
    found.add_argument("--seed", type=int)
    found.add_argument("--lr", type=float)
    found.add_argument("--output")
    found.add_argument("--budget")
    found.add_argument("--nproc-per-node", dest="nproc_per_node")
"""
FILES = {
    "plain.py": "import json, sys\nprint(json.dumps(sys.argv[1:]))\n",
    "my scripts/two words.py": "import json, sys\nprint(json.dumps(sys.argv[1:]))\n",
    "package/__init__.py": "",
    "package/plain.py": "import json, sys\nprint(json.dumps(sys.argv[1:]))\n",
    "packaged/train.py": "import json\nfrom helpers.options import parser\n"
    "print(json.dumps(vars(parser().parse_args())))\n",
    "packaged/helpers/__init__.py": "",
    "packaged/helpers/options.py": ARGPARSE + "    return found\n",
    "declared/train.py": "import json\nfrom utils import opts\nprint(json.dumps(vars(opts.parser().parse_args())))\n",
    "declared/utils/opts.py": ARGPARSE
    + "    found.add_argument('--trials', type=int)\n    found.add_argument('--recipe')\n    return found\n",
    "huggingface.py": """
import dataclasses, json
from transformers import HfArgumentParser

@dataclasses.dataclass
class Arguments:
    seed: int = None
    lr: float = None
    output: str = None
    budget: str = None
    nproc_per_node: str = None

(found,) = HfArgumentParser(Arguments).parse_args_into_dataclasses()
print(json.dumps(dataclasses.asdict(found)))
""",
    "fired.py": """
import json
import fire

def train(seed=None, lr=None, output=None, budget=None, nproc_per_node=None):
    print(json.dumps(dict(seed=seed, lr=lr, output=output, budget=budget, nproc_per_node=nproc_per_node)))

fire.Fire(train)
""",
    "hydraed.py": """
import json
import hydra
from omegaconf import OmegaConf

@hydra.main(version_base=None, config_path="conf", config_name="config")
def train(found):
    print(json.dumps(OmegaConf.to_container(found)))

train()
""",
    "conf/config.yaml": "seed: null\nlr: null\noutput: null\nbudget: null\nnproc_per_node: null\n"
    "hydra: {run: {dir: .}, output_subdir: null}\ndefaults: [override hydra/hydra_logging: disabled, "
    "override hydra/job_logging: disabled]\n",
}
OPTIONS = {
    "seed": (42, 0, 7),
    "lr": (0.5, 3.0, -1.5),
    "output": ("out", "a/b"),
    "budget": ("5m",),
    "nproc_per_node": ("x",),
}
"""Options that the scripts with parsers have, most of which autoddp or torchrun have too."""
BEFORE = [["--nnodes", "1"], ["--nnodes=1:1"], ["--nproc-per-node", "1"], ["--nproc_per=1"], ["--role", "trainer"]]
BEFORE += [["--max-restarts=1"], ["--max_re", "0"], ["--rdzv-id", "--x y"], ["--standalone"], ["--stand"], ["-r", "0"]]
BEFORE += [["-t0"], ["--monitor-interval", "0.01"], ["--log-dir={out}"], ["--node-rank", "0"], ["--master-addr", "a b"]]
OWN = [["--recipe", "r.toml"], ["--recipe=folder"], ["--seed", "3"], ["--allow=exact"], ["--tune-only"], ["--fresh"]]
OWN += [
    ["--budget", "1h"],
    ["--output", "--out"[2:]],
    ["--keep-runs=3"],
    ["--trials=7"],
    ["--force"],
    ["--watch", "off"],
    ["--no-orphans"],
]
TAKEN = [["--trials", "20"], ["--trials=3"], ["--trials", "0"], ["--recipe", "r.toml"], ["--recipe=a b/c.toml"]]
WORDS = [["--seed", "42"], ["--lr", "3"], ["--output", "out"], ["--recipe", "x"], ["--trials", "many"], ["--trials="]]
WORDS += [["--trials=-1"], ["--trials", "2.0"], ["--recipe=cake"], ["--nproc-per-node", "4"], ["--nproc_per_node=4"]]
WORDS += [["-m"], ["-t", "3"], ["-h"], ["--help"], ["--standalone"], ["--no-python"], ["--tune-only"], ["-"], ["---"]]
WORDS += [[""], ["two words"], ["--two words"], ["é"], ["a\nb"], ["*"], ["$HOME"], ["$$"], ["${local_rank}"], ["-1"]]
WORDS += [["1e-3"], ["@file"], ["--tri", "5"], ["a=b"], ["--=x"], ["--seed", "1", "--seed", "2"], ["--trials\n", "5"]]
WORDS += [
    ["--m", "3"],
    ["--nproc"],
    ["x.toml"],
    ["20"],
    ["--trials"],
    ["--recipe"],
    ["--local_rank", "0"],
    ["--no-orphans"],
]
VARIABLES = [("PET_ROLE", "worker"), ("PET_NPROC_PER_NODE", "1"), ("PET_MAX_RESTARTS", "2"), ("PET_STANDALONE", "1")]
WAYS = {  # how the script is named, and what its words are
    "plain": (["plain.py"], "anything"),
    "spaces": (["my scripts/two words.py"], "anything"),
    "module": (["-m", "package.plain"], "anything"),
    "program": (["--no-python", "./program"], "unknown"),
    "separated": (["--", "plain.py"], "shielded"),
    "packaged": (["packaged/train.py"], "options"),
    "declared": (["declared/train.py"], "declared"),
    "huggingface": (["huggingface.py"], "options"),
    "fire": (["fired.py"], "options"),
    "hydra": (["hydraed.py"], "overrides"),
}


@dataclass
class Line:
    """A command line, in autoddp's and in torchrun's words."""

    way: str
    autoddp: list[str] = field(default_factory=list)
    torchrun: list[str] = field(default_factory=list)
    own_before: list[str] = field(default_factory=list)
    """The words before the script's name, autoddp's among them."""
    taken: int = 0
    """Options after the script that are autoddp's."""
    variables: dict[str, str] = field(default_factory=dict)
    meant: dict[str, Any] | None = None
    """What a script with a parser has to understand."""

    def add(self, words: list[str], own: bool = False) -> None:
        self.autoddp += words
        if not own:
            self.torchrun += words


def random_line(dice: random.Random, out: str) -> Line:
    """Every choice is the dice's; the oracle of whose word it is is written here, and not the launcher's code."""
    way = dice.choice(list(WAYS))
    name, kind = WAYS[way]
    line = Line(way, variables=dict(dice.sample(VARIABLES, dice.choice((0, 0, 1, 2)))))
    zero = dice.random() < 0.4
    before = [(words, False) for words in dice.sample(BEFORE, dice.randint(0, 4))]
    before += [(words, True) for words in dice.sample(OWN, dice.randint(0, 3))]
    dice.shuffle(before)
    before += [(["--trials", "0"], True)] * zero
    for words, own in before:
        line.add([word.replace("{out}", out) for word in words], own)
    line.own_before = list(line.autoddp)
    line.add(name)
    groups = [(words, False) for words in _script_words(dice, kind, line)]
    for _ in range(dice.choice((0, 0, 1, 2))):
        groups.insert(dice.randint(0, len(groups)), (dice.choice(TAKEN), True))
    shielded = zero or kind in ("unknown", "shielded", "declared")
    for words, ours in groups:
        if line.autoddp[-1] in ("--trials", "--recipe") and words[0] in ("20", "x.toml"):
            continue  # would be an option of autoddp by chance
        if ours and shielded and kind == "declared" and line.meant is not None:
            option, _, value = "=".join(words).removeprefix("--").partition("=")
            line.meant[option] = int(value) if option == "trials" else value
        elif ours and shielded:
            line.meant = None  # the script's parser refuses it
        line.taken += ours and not shielded
        line.add(words, ours and not shielded)
        shielded |= "--" in words
    return line


def _script_words(dice: random.Random, kind: str, line: Line) -> Iterator[list[str]]:
    if kind in ("options", "declared", "overrides"):
        chosen = {name: dice.choice(values) for name, values in OPTIONS.items() if dice.random() < 0.5}
        line.meant = {
            **dict.fromkeys(OPTIONS),
            **({"trials": None, "recipe": None} if kind == "declared" else {}),
            **chosen,
        }
        for name, value in chosen.items():
            option = name.replace("_", "-") if kind == "declared" or line.way == "packaged" else name
            if kind == "overrides":
                yield [f"{name}={value}"]
            else:
                yield (
                    [f"--{option}={value}"]
                    if dice.random() < 0.5 or str(value)[0] == "-"
                    else [f"--{option}", str(value)]
                )
        return
    for _ in range(dice.randint(0, 6)):
        yield ["--"] if dice.random() < 0.08 else dice.choice(WORDS)


class Batch:
    """Launches in this process."""

    def __init__(self, folder: Path) -> None:
        self._out = folder / "arguments"
        for name, text in {**FILES, "program": LEAVES_ITS_ARGUMENTS}.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)
        (folder / "program").chmod(0o755)
        os.chdir(folder)
        os.environ.update(OUT=str(self._out), PYTHON_EXEC=str(folder / "program"), OMP_NUM_THREADS="1")
        logging.disable()
        pause = time.sleep  # elastic waits for others who never come
        mock.patch("time.sleep", lambda seconds: pause(min(seconds, 0.002))).start()

    def under_torchrun(self, line: Line) -> Any:
        """The arguments of the process that torchrun starts; 2 for a command line that it refuses."""
        from torch.distributed.run import main

        return self._launched(lambda: main(line.torchrun))

    def under_autoddp(self, line: Line) -> Any:
        """The same of autoddp."""
        from torch.distributed.elastic.utils import macros
        from torch.distributed.run import config_from_args

        from autoddp.cli.main import Job, launch
        from autoddp.commandline.words import parse
        from autoddp.errors import UsageError

        try:
            request = parse(line.autoddp)
            if request.trials == 0:
                return self._launched(lambda: launch(Job(request, {})))
            _, command, words = config_from_args(request.torchrun)
        except UsageError:
            return 2
        assert command == ("./program" if line.way == "program" else os.environ["PYTHON_EXEC"])
        return macros.substitute(words, "0")  # as elastic does it before it starts a process

    def _launched(self, launch: Any) -> Any:
        self._out.unlink(missing_ok=True)
        with contextlib.redirect_stderr(io.StringIO()):
            try:
                launch()
            except SystemExit as refused:
                return refused.code
        return self._out.read_bytes().decode().split("\0")[:-1]

    def understood(self, arguments: list[str]) -> Any:
        """What the script makes of its words."""
        script, *words = arguments[1:]  # after -u
        with (
            mock.patch("sys.argv", [script, *words]),
            mock.patch("sys.path", [str(Path(script).parent), *sys.path]),
            contextlib.redirect_stdout(io.StringIO()) as said,
        ):
            runpy.run_path(script, run_name="__main__")
        for name in [name for name in sys.modules if name.partition(".")[0] in ("helpers", "utils")]:
            del sys.modules[name]
        return json.loads(said.getvalue())


def main() -> None:
    folder, count = Path(sys.argv[1]), int(sys.argv[2])
    dice, batch = random.Random(20261122), Batch(folder)
    from autoddp.commandline.words import parse
    from autoddp.errors import UsageError

    ways, refused, differ, taken = dict.fromkeys(WAYS, 0), 0, [], 0
    for _ in range(count):
        line = random_line(dice, str(folder))
        with mock.patch.dict(os.environ, line.variables):
            expected, found = batch.under_torchrun(line), batch.under_autoddp(line)
            try:
                request = parse(line.autoddp)
            except UsageError:
                assert expected == 2
                says = [""] * line.taken
            else:
                says = [said for said in request.says if "is taken by autoddp; for " in said]
                assert request.no_orphans == ("--no-orphans" in line.own_before), line
        makes = batch.understood(found) if line.meant is not None and found != 2 else line.meant
        if expected != found or makes != line.meant or len(says) != line.taken:
            differ.append({**vars(line), "expected": expected, "found": found, "makes": makes, "says": says})
        ways[line.way] += 1
        taken += line.taken
        refused += expected == 2
    print(json.dumps({"ways": ways, "refused": refused, "taken": taken, "differ": differ[:5]}))


if __name__ == "__main__":
    main()
