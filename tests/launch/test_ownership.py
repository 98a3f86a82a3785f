"""Whose option it is: the script's source tells, however it makes its command line."""

import argparse

import pytest

from autoddp.launch.ownership import declared_by_script

SCRIPTS = {
    "argparse": "import argparse\n\ndef main():\n    p = argparse.ArgumentParser()\n    p.add_argument('--seed')\n",
    "dataclass": "class Arguments:\n    seed: int = 0\n    rate: float = 0.1\n",
    "function": "def main(seed: int = 0, *, rate=0.1):\n    pass\n",
    "beside": "from options import parse\n\ndef main():\n    parse()\n",
}


@pytest.mark.parametrize("kind", SCRIPTS)
def test_declared(kind, tmp_path):
    (tmp_path / "options.py").write_text("def parse(add):\n    add('--seed')\n")
    script = tmp_path / "train.py"
    script.write_text(SCRIPTS[kind])
    torchrun = argparse.Namespace(training_script=str(script), module=False)
    assert declared_by_script("--seed", torchrun)
    assert not declared_by_script("--budget", torchrun)


@pytest.mark.parametrize("text", ["", "not python at all (", "seed = 3\nprint(seed)\n"])
def test_not_declared(text, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(text)
    assert not declared_by_script("--seed", argparse.Namespace(training_script=str(script), module=False))


def test_nothing_to_read():
    assert not declared_by_script("--seed", argparse.Namespace(training_script="nowhere.py", module=False))
    assert not declared_by_script("--seed", argparse.Namespace(training_script="no.such.module", module=True))
