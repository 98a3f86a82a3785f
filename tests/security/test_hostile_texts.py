"""Names and texts of others are shown as they are, without effect: no control characters, no markup, no code."""

from __future__ import annotations

import io
import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from autoddp.cli import recipe as recipe_command
from autoddp.commandline.secret_words import without_secrets
from autoddp.errors import RecipeError
from autoddp.knobs import Configuration
from autoddp.log import show, tell
from autoddp.recipe import ENV_ALLOWED, dump, load, parse
from autoddp.report import terminal
from autoddp.report.node_svg import svg
from autoddp.report.node_text import show_node, show_outputs
from autoddp.tables import LITERAL, Harmless, aligned
from autoddp.topology import Node

SOUND = Path(__file__).resolve().parents[1] / "recipe" / "sound.autoddp.toml"
HOSTILE = (
    "\x1b[2J\x1b]0;owned\x07 [red]r[/red] [/] [link=x]l[/link] :smile: <script>a</script> $(touch x)\rz\x9b31m\u202e"
)
CONTROL = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def is_harmless(text: str) -> bool:
    return not CONTROL.search(text)


def test_lines_of_ours(capsys: pytest.CaptureFixture[str]) -> None:
    tell(HOSTILE)
    show(HOSTILE)
    terminal.say(HOSTILE)
    terminal.warn(f"{HOSTILE}\n\udcff")
    said = capsys.readouterr()
    for text, lines in ((said.out, 1), (said.err, 3)):
        assert is_harmless(text)
        assert text.count("\n") == lines
        assert text.count("[red]r[/red] [/] [link=x]l[/link] :smile: <script>") == lines


@pytest.mark.parametrize("colours", [False, True])
def test_tables(colours: bool) -> None:
    told = aligned([("a", HOSTILE), (HOSTILE + "\n", "b")])
    assert is_harmless(told)
    assert told.count("\n") == 1
    assert "[red]r[/red]" in told
    out = io.StringIO()
    console = Console(file=out, width=300, force_terminal=colours, color_system=None, **LITERAL)
    console.print(Harmless(HOSTILE))
    assert is_harmless(out.getvalue())
    assert "[link=x]l[/link] :smile:" in out.getvalue()


def test_the_study_and_its_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A trial's failure has the text of the script's exception."""
    shown = terminal.Terminal(lambda _: True, tmp_path / "tuning.log")
    record: Any = SimpleNamespace(number=1, state="failed", reason=f"{HOSTILE}\nfake", configuration=Configuration({}))
    shown.trial(record, 9, None, 3.0)
    shown.close()
    said, log = capsys.readouterr().err, (tmp_path / "tuning.log").read_text()
    assert is_harmless(said)
    assert is_harmless(log)
    assert said.count("\n") == log.count("\n") == 1


def test_a_node_as_text_and_as_a_picture(capsys: pytest.CaptureFixture[str]) -> None:
    node = replace(Node(HOSTILE), versions={"nccl": HOSTILE}, unknown={HOSTILE: HOSTILE}, gpudirect=HOSTILE)
    show_node(node, ())
    show_outputs({"nccl_log": {"missing": (HOSTILE,), HOSTILE: HOSTILE}})
    told = capsys.readouterr().out
    assert is_harmless(told)
    assert "[red]r[/red]" in told
    assert "<script>" not in svg(node)
    assert is_harmless(svg(node))


def test_a_recipe_of_a_hostile_name_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = tmp_path / f"$(touch x) {HOSTILE.replace('/', '|')}\n.toml"
    place.write_bytes(SOUND.read_bytes())
    other = tmp_path / "[bold]b.toml"
    changed = replace(load(place), evidence=replace(load(place).evidence, why="[red]because[/red] [/] <script>"))
    other.write_text(dump(changed))
    for words in (["show", str(place)], ["check", str(place)], ["diff", str(place), str(other)], ["show", str(other)]):
        recipe_command.run(words)
        told = capsys.readouterr().out
        assert is_harmless(told), words
        assert "[red]because[/red] [/] <script>" in told or words[1:] == [str(place)]
        recipe_command.run([*words, "--json"])
        assert json.loads(capsys.readouterr().out)["ok"]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("LD_PRELOAD", "/tmp/x.so"), ("PYTHONPATH", "/tmp"), ("NCCL_NET_PLUGIN", "/tmp/x.so"), ("PATH", "/tmp")),
        *(("PYTHONSTARTUP", "/tmp/x.py"), ("NCCL_DEBUG_FILE", "/etc/passwd"), ("BASH_ENV", "/tmp/x"), ("A\\nB", "c")),
        *((name, "$(touch x)") for name in sorted(ENV_ALLOWED)),
        *((name, "/tmp/x.so") for name in sorted(ENV_ALLOWED)),
    ],
)
def test_a_recipe_sets_only_what_is_on_our_list(name: str, value: str) -> None:
    text = SOUND.read_text().replace("[evidence]", f'[env]\n"{name}" = "{value}"\n\n[evidence]', 1)
    with pytest.raises(RecipeError) as refusal:
        parse(text, f"{HOSTILE}.toml")
    assert is_harmless(str(refusal.value))


def test_secrets_in_words_are_hidden() -> None:
    words = [
        "--hf-token=abc",
        "--db-password",
        "hunter2",
        "--max-tokens",
        "512",
        "-x",
        "https://me:pw@h/x",
        "--api_key",
    ]
    hidden = without_secrets(words)
    assert hidden == ["--hf-token=***", "--db-password", "***", *words[3:6], "https://me:***@h/x", "--api_key"]
