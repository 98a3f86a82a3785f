"""`autoddp completion`: what bash offers after some words, asked of bash itself."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from autoddp.cli.completion import run
from autoddp.errors import UsageError

ASKS = """
source autoddp.bash
words=({words})
COMP_WORDS=("${{words[@]}}") COMP_CWORD=$((${{#words[@]}} - 1))
_shtab_autoddp autoddp "${{words[-1]}}" "${{words[-2]}}"
printf '%s\\n' "${{COMPREPLY[@]}}"
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(["bash"]) == 0
    Path("autoddp.bash").write_text(capsys.readouterr().out)
    for name in ("train.py", "trained.toml"):
        Path(name).touch()
    Path("tries").mkdir()


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("autoddp --acc", {"--accumulate-up-to"}),
        ("autoddp --nnod", {"--nnodes"}),
        ("autoddp --allow ''", {"exact", "near", "lossy"}),
        ("autoddp dia", {"diagnose"}),
        ("autoddp tr", {"train.py", "tries/"}),
        ("autoddp --recipe tra", {"train.py", "trained.toml"}),
        ("autoddp --trials 20 tr", {"train.py", "tries/"}),
        ("autoddp train.py tra", {"train.py", "trained.toml"}),
    ],
)
def test_what_bash_offers(words: str, offered: set[str]) -> None:
    found = subprocess.run(["bash", "-c", ASKS.format(words=words)], capture_output=True, text=True, check=True)
    assert set(found.stdout.split()) == offered


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([shell]) == 0
    assert "accumulate-up-to" in capsys.readouterr().out


def test_an_unknown_shell() -> None:
    with pytest.raises(UsageError, match=r"completion: .*invalid choice: 'tcsh'"):
        run(["tcsh"])
