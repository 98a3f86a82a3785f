"""Does autoddp work with the versions of torch and Python that README promises? A fresh environment for each, in turn.

python campaigns/versions.py [2.6 2.8 2.11 2.13 newest] [--python FILE …] [--tests DIR …] [--folder DIR] [--keep]

For each version: the job of `make demo`, and the tests of worker, knobs, recipe and wire, or those of --tests. With
--python, each version under each of these Pythons. A build of torch with CUDA takes 5 GB, so each one is removed
before the next one is made, in DIR or in a temporary folder. pip reads no configuration file, because one that limits
versions would decide what is tried.
"""

from __future__ import annotations

import argparse
import itertools
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VERSIONS = ("2.6", "2.8", "2.11", "2.13", "newest")
TESTS = ("tests/worker", "tests/knobs", "tests/recipe", "tests/wire")
SPACE = 15  # GB on the disk for one environment and pip's downloads


def run(words: list[str], folder: Path, minutes: int) -> tuple[int, str]:
    """Exit code and output of a command; 124 if it takes longer."""
    environment = {**os.environ, "PIP_CONFIG_FILE": os.devnull, "PYTHONPATH": ""}
    try:
        done = subprocess.run(
            words, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            timeout=60 * minutes,
        )  # fmt: skip
    except subprocess.TimeoutExpired as late:
        return 124, str(late.stdout or "")
    return done.returncode, done.stdout


def tried(version: str, interpreter: str, tests: list[str], folder: Path) -> list[str]:
    """One line for each thing that was tried with this version."""
    if shutil.disk_usage(folder).free < SPACE * 10**9:
        return [f"left out: less than {SPACE} GB are free in {folder}"]
    python, demo = str(folder / "venv" / "bin" / "python"), folder / "demo"
    demo.mkdir()
    torch = "torch" if version == "newest" else f"torch=={version}.*"
    pip = [python, "-m", "pip", "install", "-q", "--no-cache-dir"]
    for words in ([interpreter, "-m", "venv", "venv"], [*pip, torch, "numpy"], [*pip, "-e", f"{ROOT}[test]"]):
        code, output = run(words, folder, 60)
        if code:
            return [f"not installed: {output.strip()[-300:]}"]
    lines = [run([python, "-c", "import torch, sys; print(torch.__version__, sys.version.split()[0])"], folder, 5)[1]]
    job = [python, "-m", "autoddp", "--nproc-per-node", "2", "--trials", "8", str(ROOT / "recipes/digits/train.py")]
    code, output = run(job, demo, 15)
    tuned = "launching" in output and not re.search(r"no tuning|as written:|could not", output)
    lines.append(f"demo: exit code {code}, {'tuned' if tuned else 'NOT tuned'}")
    if code or not tuned:
        lines += [line for line in output.splitlines() if line.startswith("autoddp:")][-12:]
    for one in tests:
        code, output = run([python, "-m", "pytest", "-q", "-n", "2", one], ROOT, 40)
        failed = [line for line in output.splitlines() if line.startswith(("FAILED", "ERROR"))]
        lines += [f"{one}: exit code {code}", *(f"  {line}" for line in failed)]
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("versions", nargs="*", default=VERSIONS)
    parser.add_argument("--python", nargs="+", default=[sys.executable], help="interpreters of the environments")
    parser.add_argument("--tests", nargs="+", default=TESTS, help="folders or files of tests")
    parser.add_argument("--folder", type=Path, help="where environments are made")
    parser.add_argument("--keep", action="store_true", help="leave the environments there")
    arguments = parser.parse_args()
    for version, interpreter in itertools.product(arguments.versions, arguments.python):
        folder = Path(tempfile.mkdtemp(prefix=f"torch-{version}-", dir=arguments.folder))
        folder.chmod(0o755)  # some tests are an ordinary user's
        try:
            found = tried(version, interpreter, arguments.tests, folder)
            print(f"\ntorch {version}, {interpreter}", *found, sep="\n  ", flush=True)
        finally:
            if not arguments.keep:
                shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
