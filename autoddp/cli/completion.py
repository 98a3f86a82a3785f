"""`autoddp completion SHELL`: a script that lets the shell complete autoddp's options, commands and scripts."""

from __future__ import annotations

import argparse

from autoddp.cli.parser import Parser
from autoddp.commandline.parsers import all_options
from autoddp.commandline.script import COMMANDS
from autoddp.log import show_exactly

_WHERE = {
    "bash": "d=~/.local/share/bash-completion/completions; mkdir -p $d; autoddp completion bash > $d/autoddp",
    "zsh": 'autoddp completion zsh > "${fpath[1]}/_autoddp"',
    "fish": "mkdir -p ~/.config/fish/completions; autoddp completion fish > ~/.config/fish/completions/autoddp.fish",
}
"""Shell → the command that sets it up for all new shells."""
_FIRST_WORD = f"""
_autoddp_first_word_file() {{
  compgen -W "{" ".join(COMMANDS)}" -- "$1"
  compgen -d -S / -- "$1"
  compgen -f -X '!*.py' -- "$1"
}}
"""


def run(arguments: list[str]) -> int:
    """The exit code of `autoddp completion` with these arguments; it prints the script and nothing else.

    run(["bash"])
    """
    shell = _parser().parse_args(arguments).shell
    import shtab  # only this needs it

    parser = all_options()
    for action in parser._actions:
        if action.metavar in ("FILE", "DIR"):
            action.complete = shtab.FILE if action.metavar == "FILE" else shtab.DIRECTORY  # type: ignore[attr-defined]
    script = parser.add_argument("script", help="the training script, or a command")
    files = {**shtab.FILE, "bash": "_autoddp_first_word_file", "preamble": {"bash": _FIRST_WORD}}
    script.complete = files  # type: ignore[attr-defined]
    arguments_of_the_script = parser.add_argument("arguments", nargs="*", help="the script's own")
    arguments_of_the_script.complete = shtab.FILE  # type: ignore[attr-defined]
    show_exactly(shtab.complete(parser, shell))
    return 0


def _parser() -> argparse.ArgumentParser:
    lines = "\n".join(f"  {line}" for line in _WHERE.values())
    parser = Parser(
        prog="autoddp completion",
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description=f"Print a script that lets your shell complete autoddp's words. Set it up once:\n\n{lines}",
    )
    parser.add_argument("shell", choices=sorted(_WHERE), help="your shell")
    return parser
