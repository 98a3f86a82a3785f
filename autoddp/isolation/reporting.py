"""Programs of the system that only report something, or only read files, by their names and words."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping

SHELLS = frozenset("sh bash dash zsh ksh ash".split())
READERS = frozenset("cat head tail wc ls du md5sum sha1sum sha256sum grep ldd readelf nm stat".split())
"""Programs that only read the files they are given."""
COMPILERS = re.compile(r"([a-z0-9_]+-[a-z0-9_-]*)?(gcc|g\+\+|cc|c\+\+|clang|clang\+\+|ptxas)(-[0-9.]+)?$")
_NO_EFFECT = re.compile(r"\s*([12&]?>>?\s*/dev/null|2>&1)(?=\s|$|\|)")
_SHELL_SYNTAX = re.compile(r"[;&<>$`*?\[\]{}~()\n\\#!]")
_SHELL_COMMANDS = frozenset("cd exec eval source . trap export alias".split())
_GPU_WORDS = re.compile(
    r"-L|-q|-x|-i|-d|-B|topo|-m|-mp|nvlink|-s|--(query|format|id|list|display|show)[a-z-]*(=.*)?|[A-Z0-9,.]+"
)
_ALLOWED_WORDS: dict[str, re.Pattern[str]] = {
    **dict.fromkeys(
        "uname lscpu nproc whoami id arch uptime free getconf locale lspci lsmod ibstat ibv_devinfo ibv_devices sw_vers"
        " which true false echo printf sleep pwd ps lsb_release tput printenv groups tty df".split(),
        re.compile("(?s).*"),
    ),
    "date": re.compile("(?s)(?!-s|--set).*"),
    "hostname": re.compile("-[sfdiIA]|--(short|fqdn|long|ip-address|domain)"),
    "nvidia-smi": _GPU_WORDS,
    "rocm-smi": _GPU_WORDS,
}
"""Programs that only report something when each of their arguments is of this form."""
_GIT_READS = frozenset("rev-parse rev-list log show cat-file ls-files ls-tree version --version describe".split())
_GIT_WITH_INDEX = frozenset(("status", "diff"))  # both write a fresher index beside their answer


def only_reports(name: str, arguments: list[str], env: Mapping[str, str], landlock: bool) -> bool:
    """Whether a program of the system changes nothing when it is called like this."""
    if name in _ALLOWED_WORDS:
        return all(map(_ALLOWED_WORDS[name].fullmatch, arguments))
    if name == "ldconfig":
        return arguments in (["-p"], ["--print-cache"])
    if name in ("nvcc", "cmake", "ninja", "gcc", "g++", "ffmpeg", "java", "tensorboard"):
        return arguments in (["--version"], ["-version"], ["-V"])
    if name == "ld":
        return arguments[:3] == ["-t", "-o", "/dev/null"] or arguments[-3:-1] == ["-o", "/dev/null"]
    if name == "git":
        return _git_only_reads(arguments, env, landlock)
    return False


def pipeline(arguments: list[str]) -> list[list[str]]:
    """The programs, each with its words, that a shell with these arguments runs in one simple pipeline.

    None of them if it is a script, or if the line has any other syntax of the shell.
    """
    if len(arguments) != 2 or arguments[0] != "-c":
        return []
    line = _NO_EFFECT.sub(" ", arguments[1])
    try:
        parts = [shlex.split(part) for part in line.split("|")]
    except ValueError:
        return []
    if not all(parts) or _SHELL_SYNTAX.search(line):
        return []
    return [] if any("=" in part[0] or part[0] in _SHELL_COMMANDS for part in parts) else parts


def _git_only_reads(arguments: list[str], env: Mapping[str, str], landlock: bool) -> bool:
    rest, quiet = list(arguments), env.get("GIT_OPTIONAL_LOCKS") == "0"
    while rest and rest[0] in ("-C", "--no-pager", "--no-optional-locks"):
        quiet = quiet or rest[0] == "--no-optional-locks"
        del rest[: 2 if rest[0] == "-C" else 1]
    if not rest or any(word.startswith(("--output", "--ext-diff", "--textconv")) for word in rest):
        return False
    command, options = rest[0], rest[1:]
    if command == "config":
        return bool(options) and options[0] in ("--get", "--list", "-l", "--get-all")
    if command == "remote":
        return options == ["-v"] or options[:1] == ["get-url"]
    if command == "branch":
        return options in (["--show-current"], ["-a"], ["-v"], ["--list"], [])
    if command in _GIT_WITH_INDEX or (command == "describe" and any("dirty" in word for word in options)):
        # With Landlock the index cannot be written; git leaves it then.
        return landlock or (quiet and command == "status")
    return command in _GIT_READS
