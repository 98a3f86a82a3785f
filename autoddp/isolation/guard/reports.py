"""Programs that only report something, and the options with which they would do more."""

from __future__ import annotations

import re
from collections.abc import Mapping

_GPU_REPORTS = re.compile(
    r"-L|-q|-x|-i|-d|-B|topo|-m|-mp|nvlink|-s|--(query|format|id|list|display|show)[a-z-]*(=.*)?|[A-Z0-9,.]+"
)

# Options by which a program that only reports would change something.
_REPORTS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("uname", "lscpu", "nproc", "whoami", "id", "arch", "uptime", "free", "getconf", "locale"), ()),
    **dict.fromkeys(
        ("lspci", "lsmod", "ibstat", "ibv_devinfo", "ibv_devices", "sw_vers", "which", "true", "false"), ()
    ),
    **dict.fromkeys(("echo", "printf", "sleep", "pwd", "ps", "lsb_release", "tput", "printenv", "groups", "tty"), ()),
    "date": ("-s", "--set"),
    "df": (),
}
_GIT_READS = {
    "rev-parse",
    "rev-list",
    "log",
    "show",
    "cat-file",
    "ls-files",
    "ls-tree",
    "version",
    "--version",
    "describe",
}
_GIT_WITH_INDEX = {"status", "diff"}  # both write a fresher index beside their answer


def only_reports(name: str, arguments: list[str], env: Mapping[str, str], landlock: bool) -> bool:
    """Whether a program of the system changes nothing when it is called like this."""
    if name in _REPORTS:
        return not any(word.startswith(bad) for word in arguments for bad in _REPORTS[name])
    if name == "hostname":
        return all(re.fullmatch("-[sfdiIA]|--(short|fqdn|long|ip-address|domain)", word) for word in arguments)
    if name in ("nvidia-smi", "rocm-smi"):
        return all(_GPU_REPORTS.fullmatch(word) for word in arguments)
    if name == "ldconfig":
        return arguments in (["-p"], ["--print-cache"])
    if name in ("nvcc", "cmake", "ninja", "gcc", "g++", "ffmpeg", "java", "tensorboard"):
        return arguments in (["--version"], ["-version"], ["-V"])
    if name == "ld":
        return arguments[:3] == ["-t", "-o", "/dev/null"] or arguments[-3:-1] == ["-o", "/dev/null"]
    if name == "git":
        return _git_only_reads(arguments, env, landlock)
    return False


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
