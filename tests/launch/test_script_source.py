"""What a script's source says of its options, however it makes its command line. Nothing of it is run."""

import argparse
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
from launchers import environment

from autoddp.commandline.mode import choose
from autoddp.commandline.script import ScriptSource, script_digest, script_path
from autoddp.commandline.words import parse
from autoddp.errors import NotTuned

HAVE_IT = {
    "argparse": {"train.py": "import argparse\np = argparse.ArgumentParser()\np.add_argument('-t', '--trials')\n"},
    "a longer option, of which it is an abbreviation": {"train.py": "add_argument('--trials-per-worker')\n"},
    "sys.argv": {"train.py": "import sys\nif '--trials' in sys.argv:\n    pass\n"},
    "getopt": {"train.py": "import getopt, sys\ngetopt.getopt(sys.argv[1:], 't:', ['trials='])\n"},
    "absl": {"train.py": "from absl import flags\nflags.DEFINE_integer('trials', 3, 'how many')\n"},
    "click": {"train.py": "import click\n@click.option('--trials/--no-trials')\ndef f(**more): pass\n"},
    "docopt": {"train.py": '"""Usage: train.py [--trials=<n>]"""\nfrom docopt import docopt\n'},
    "a dataclass's field": {"train.py": "class Arguments:\n    trials: int = 0\n    rate: float = 0.1\n"},
    "attrs": {"train.py": "class Arguments:\n    trials = attrib()\n"},
    "a function's parameter": {"train.py": "def run(*, trials=0): pass\nimport fire\nfire.Fire(run)\n"},
    "a method's parameter": {"train.py": "class Run:\n    def train(self, trials=0): pass\n"},
    "a global that the command line overrides": {"train.py": "trials = 3\nexec(open('configurator.py').read())\n"},
    "a key": {"train.py": "defaults = {'trials': 3}\nfor k in defaults:\n    add_argument('--' + k)\n"},
    "a keyword": {"train.py": "defaults = dict(trials=3)\n"},
    "read from what an unknown parser returns": {"train.py": "import theirs\nprint(theirs.parse().trials)\n"},
    "a module beside it": {"train.py": "from opts import parse\n", "opts.py": "add('--trials')\n"},
    "a package beside it": {
        "train.py": "def main():\n    from utils.opts import parse\n",
        "utils/__init__.py": "",
        "utils/opts.py": "add('--trials')\n",
    },
    "a folder beside it that is no package": {"train.py": "import utils.opts\n", "utils/opts.py": "add('--trials')\n"},
    "a package's own __init__": {"train.py": "import utils.log\n", "utils/__init__.py": "add('--trials')\n"},
    "a module of a module": {
        "train.py": "import utils\n",
        "utils/__init__.py": "from .cli import parse\n",
        "utils/cli/__init__.py": "from ..opts import add as parse\n",
        "utils/opts.py": "from . import table\n",
        "utils/table.py": "ROWS = ['--trials']\n",
    },
    "a module that hides one of Python's": {"train.py": "import statistics\n", "statistics.py": "add('--trials')\n"},
    "another version's syntax": {"train.py": "print '--trials'\n"},
    "another encoding": {"train.py": "# coding: latin-1\nname = 'é'\nadd('--trials')\n"},
}
HAVE_IT_NOT = {
    "nothing": {"train.py": ""},
    "a comment and a docstring": {"train.py": '"""autoddp train.py --trials 20"""\n# --trials\n'},
    "a part of another word": {"train.py": "add('--mistrials')\nmistrials = 1\nadd('--no-trials')\n"},
    "a module that is not imported": {"train.py": "import utils\n", "utils.py": "", "opts.py": "add('--trials')\n"},
    "modules that cannot be found": {"train.py": "import nowhere.at_all\nfrom . import x\nfrom ...up import y\n"},
    "installed packages": {"train.py": "import optuna, torch.distributed, os.path\n"},
    "modules that import each other": {"train.py": "import a\n", "a.py": "import b\n", "b.py": "import a, train\n"},
}


def source_of(folder: Path, files: dict[str, str]) -> ScriptSource:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="latin-1")
    script = str(folder / "train.py")
    return ScriptSource(argparse.Namespace(training_script=script, module=False, no_python=False))


@pytest.mark.parametrize("kind", HAVE_IT)
def test_a_script_that_may_have_the_option(kind, tmp_path):
    source = source_of(tmp_path, HAVE_IT[kind])
    assert source.readable
    assert source.may_have("--trials")
    assert not source.may_have("--recipe")


@pytest.mark.parametrize("kind", HAVE_IT_NOT)
def test_a_script_that_has_not(kind, tmp_path):
    source = source_of(tmp_path, HAVE_IT_NOT[kind])
    assert source.readable
    assert not source.may_have("--trials")


@pytest.mark.parametrize("kind", ["a package beside it", "a module of a module", "argparse"])
def test_modules(kind, tmp_path, monkeypatch):
    """`-m` looks in the current folder first; the parent packages are not imported to find out."""
    source_of(tmp_path, HAVE_IT[kind])
    (tmp_path / "pack").mkdir()
    for entry in [entry for entry in tmp_path.iterdir() if entry.name != "pack"]:
        entry.rename(tmp_path / "pack" / entry.name)
    (tmp_path / "pack" / "__init__.py").write_text("raise SystemExit('imported')\n")
    (tmp_path / "pack" / "__main__.py").write_text("from pack import train\n")
    train = tmp_path / "pack" / "train.py"
    train.write_text(
        train.read_text().replace("from utils", "from .utils").replace("import utils", "from . import utils")
    )
    monkeypatch.chdir(tmp_path)
    for module in ("pack.train", "pack"):
        torchrun = argparse.Namespace(training_script=module, module=True, no_python=False)
        assert ScriptSource(torchrun).may_have("--trials")
        assert not ScriptSource(torchrun).may_have("--recipe")
    assert script_path(argparse.Namespace(training_script="pack.nowhere", module=True)) is None
    assert script_path(argparse.Namespace(training_script="pack", module=True)) == tmp_path / "pack" / "__main__.py"


def test_a_package_that_holds_the_parser_of_its_modules(tmp_path, monkeypatch):
    source_of(tmp_path, {"pack/__init__.py": "add('--trials')\n", "pack/train.py": ""})
    monkeypatch.chdir(tmp_path)
    assert ScriptSource(argparse.Namespace(training_script="pack.train", module=True, no_python=False)).may_have(
        "--trials"
    )


def test_a_module_of_pythonpath(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "more"))
    source = source_of(tmp_path, {"train.py": "import opts\n", "more/opts.py": "add('--trials')\n"})
    assert source.may_have("--trials")


def test_a_project_into_which_packages_were_installed(tmp_path, monkeypatch):
    """As by `pip install --target=/app` in an image whose PYTHONPATH is /app: the script lost its --trials."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(tmp_path)  # as in a launcher
    files = {"project/options.py": "add('--trials')\n", "library-1.0.dist-info/METADATA": ""}
    source_of(tmp_path, files)
    source = source_of(tmp_path / "scripts", {"train.py": "from project.options import parse\n"})
    assert source.may_have("--trials")


def test_of_a_huge_library_that_is_developed_the_rest_is_not_read(tmp_path, monkeypatch):
    """Each start read all of it, for minutes on a slow disk. What may have the option then gets it."""
    monkeypatch.syspath_prepend(tmp_path / "checkout")  # as `pip install -e` does it
    parts = {f"checkout/huge/part{n}.py": f"TEXT = {'x' * 2**21!r}\nfrom huge import part{n + 1}\n" for n in range(9)}
    files = {"train.py": "import huge.part0, opts\n", "opts.py": "", "checkout/torch/huge.py": "", **parts}
    source = source_of(tmp_path, files)
    assert [path.stem for path in source.files] == ["train", "part0", "opts", "part1", "part2", "part3"]
    assert not source.readable
    assert source.may_have("--trials")
    (tmp_path / "train.py").write_text("import torch.huge\n")
    (tmp_path / "checkout/torch/huge.py").write_text("add('--trials')\n")
    assert not source_of(tmp_path, {}).may_have("--trials")


@pytest.mark.parametrize("folder", ["", "site-packages"])
def test_packages_that_were_installed_beside_the_script_do_not_count(folder, tmp_path, monkeypatch):
    """Such as torch in /app, or where a package brings scripts: each start read it, for more than a minute."""
    place = tmp_path / folder
    monkeypatch.setenv("PYTHONPATH", str(place))
    monkeypatch.syspath_prepend(place)  # as in a launcher
    listed = {"library-1.0.dist-info/METADATA": "", "library-1.0.dist-info/RECORD": "library/__init__.py,,\n"}
    source_of(place, {"library/__init__.py": "add('--trials')\n", "options.py": "add('--recipe')\n", **listed})
    source = source_of(place / "scripts", {"train.py": "import library, options\n"})
    assert not source.may_have("--trials")
    assert source.may_have("--recipe")
    assert not source_of(place, {"train.py": "import library\n"}).may_have("--trials")


@pytest.mark.parametrize("script", ["train.py", "./train.py", "sub/../train.py"])
def test_a_script_of_the_current_folder_that_is_a_part_of_a_package_too(script, tmp_path, monkeypatch):
    """`try: from ..opts import parse` and `except ImportError: from opts import parse`: it was a traceback."""
    text = f"try:\n    from ..opts import parse\nexcept ImportError:\n    from {'.' * 20} import x\n"
    source_of(tmp_path, {"pack/train.py": text, "opts.py": "add('--trials')\n", "pack/sub/x.py": ""})
    monkeypatch.chdir(tmp_path / "pack")
    source = ScriptSource(argparse.Namespace(training_script=script, module=False, no_python=False))
    assert source.readable
    assert source.may_have("--trials")


@pytest.mark.parametrize("folder", ["target", "lib/python3.11/site-packages"])
def test_packages_that_are_installed_in_pythonpath_do_not_count(folder, tmp_path, monkeypatch):
    """On many clusters torch itself is there: each start of autoddp read it, for more than a minute."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / folder))
    monkeypatch.syspath_prepend(tmp_path / folder)  # as in a launcher
    files = {f"{folder}/library.py": "add('--trials')\n", f"{folder}/library-1.0.dist-info/METADATA": ""}
    source = source_of(tmp_path, {"train.py": "import library\n", **files})
    assert source.readable
    assert not source.may_have("--trials")


@pytest.mark.parametrize("folder", ["n" * 300, "of_another_user/lib"])
def test_a_folder_of_pythonpath_that_cannot_be_looked_at(folder, tmp_path, monkeypatch):
    """As one in another user's home: it was a traceback."""
    (tmp_path / "of_another_user").mkdir(0o000)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / folder))
    assert source_of(tmp_path, {"train.py": "import other\n"}).readable


def test_a_linked_script_s_modules_lie_beside_its_file(tmp_path):
    source_of(tmp_path / "project", HAVE_IT["a module beside it"])
    (tmp_path / "linked.py").symlink_to("project/train.py")
    torchrun = argparse.Namespace(training_script=str(tmp_path / "linked.py"), module=False, no_python=False)
    assert ScriptSource(torchrun).may_have("--trials")


def test_an_installed_module_s_own_package_counts():
    """optuna.cli has --n-trials and --direction; its parser lies in the module itself, its storages beside it."""
    source = ScriptSource(argparse.Namespace(training_script="optuna.cli", module=True, no_python=False))
    assert source.readable
    assert source.may_have("--study-name")
    assert not source.may_have("--nproc-per-node")


@pytest.mark.parametrize(
    ("script", "module", "no_python"),
    [
        *(("nowhere.py", False, False), ("no.such.module", True, False), ("bash", False, True)),
        *(("/dev/null", False, False), (".train", True, False)),
    ],
)
def test_what_cannot_be_read_may_have_any_option(script, module, no_python, monkeypatch):
    monkeypatch.chdir("/")
    source = ScriptSource(argparse.Namespace(training_script=script, module=module, no_python=no_python))
    assert not source.readable
    assert source.may_have("--trials")
    assert source.wants_local_rank() == ""


@pytest.mark.parametrize("filtered", ["always", "error"])
def test_nothing_is_said_of_doubtful_escapes(filtered, tmp_path):
    """From Python 3.12 on the parser warns of them on stderr. As an error the warning would be one of syntax."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter(filtered)
        source = source_of(tmp_path, {"train.py": "import re\n# --trials\nre.compile('\\d+')\n"})
    assert not said
    assert source.readable
    assert not source.may_have("--trials")


LOCAL_RANK = {
    "add('--local_rank', type=int)\n": "--local_rank",
    "add('--local-rank', '--local_rank', type=int)\n": "--local-rank",
    "add('--local_rank', default=int(os.environ['LOCAL_RANK']))\n": "",
    "local_rank = 0\n": "",
    "add('--local_ranks_filter')\n": "",
    "": "",
}


@pytest.mark.parametrize("text", LOCAL_RANK)
def test_scripts_that_want_their_local_rank_from_the_launcher(text, tmp_path):
    assert source_of(tmp_path, {"train.py": text}).wants_local_rank() == LOCAL_RANK[text]


def test_a_pipe_is_left_to_the_real_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")
    words = ["--nproc-per-node", "2", "--trials", "3"]
    plan = choose(parse([*words, "pipe"]))
    assert plan.as_torchrun
    assert plan.says.startswith("pipe is no regular file, so it can be read only once: launching as torchrun would")
    with pytest.raises(NotTuned, match="pipe is no regular file"):
        choose(parse([*words, "--tune-only", "pipe"]))
    options = parse(["pipe"])  # a second rank would find the pipe empty
    assert choose(options).as_torchrun
    assert options.torchrun.nproc_per_node == "1"
    (tmp_path / "train.py").touch()
    assert choose(parse([*words, "train.py"])).tune


def test_standard_input_is_left_to_the_real_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`torchrun - < train.py`: Python takes `-` for standard input, also where a file has that name."""
    monkeypatch.chdir(tmp_path)
    Path("-").write_text("add('--trials')\n")
    plan = choose(parse(["--nproc-per-node", "2", "-"]))
    assert plan.as_torchrun
    assert plan.says.startswith("standard input can be read only once: launching as torchrun would")
    options = parse(["-"])
    assert choose(options).as_torchrun
    assert options.torchrun.nproc_per_node == "1"
    assert not ScriptSource(options.torchrun).files
    Path("train.py").write_text("import sys\nprint(sys.argv)\n")
    with open("train.py") as script:
        words = [sys.executable, "-m", "autoddp", "-", "--x"]
        done = subprocess.run(words, stdin=script, env=environment(), capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "['-', '--x']\n"), done.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nothing is read in /proc")
def test_a_host_without_proc_launches_as_torchrun_would(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As after a chroot into which nobody has mounted it: torchrun trains there."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("autoddp.commandline.mode._OPEN_FILES", str(tmp_path / "none"))
    (tmp_path / "train.py").touch()
    options = parse(["train.py"])
    plan = choose(options)
    assert plan.as_torchrun
    assert options.torchrun.nproc_per_node == "1"
    assert plan.says == (
        "/proc is not mounted here, so nobody could find and end all that the script starts: launching as torchrun "
        "would, without tuning (to tune: mount -t proc proc /proc)"
    )
    with pytest.raises(NotTuned, match="nothing was tuned; mount -t proc proc /proc"):
        choose(parse(["--tune-only", "train.py"]))


def test_hosts_know_whether_they_have_the_same_script(tmp_path: Path) -> None:
    """Wherever it stands there, and with all modules of the user's: a file may be forgotten when they are copied."""
    digests = []
    for host, rate in enumerate((0.1, 0.1, 0.01)):
        folder = tmp_path / f"host{host}"
        folder.mkdir()
        (folder / "train.py").write_text("import model\n")
        (folder / "model.py").write_text(f"rate = {rate}\n")
        digests.append(script_digest(parse([str(folder / "train.py")]).torchrun))
    assert digests[0] == digests[1] != digests[2]
    assert "" not in digests
    assert script_digest(parse(["--no-python", "true"]).torchrun) == ""
