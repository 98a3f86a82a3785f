"""What a program's arguments say: whether it only reads, downloads, or changes something elsewhere."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from autoddp.isolation.elsewhere.requests import READING_METHODS, judge_url

Judge = Callable[["Tool", Sequence[str]], bool]
"""Whether this call, by its arguments, changes something elsewhere."""

_ASKS = ("--help", "--version", "help")  # not -h: for some it names the host


@dataclass(frozen=True)
class Tool:
    """One program, or several of one kind. Without `reads`, `writes` and `judge` every use counts."""

    names: str
    reads: str = ""
    """Commands that pass, as patterns over the arguments without options, separated by `;`. All others count."""
    writes: str = ""
    """Or: the only commands that count."""
    judge: Judge | None = None
    """Or: what looks at the arguments itself. Asked when `reads` do not match."""
    copies: str = ""
    """Commands that copy, for `downloads`."""
    remote: str = ""
    """A regular expression of a place elsewhere, for `downloads` and `transfers`."""
    valued: str = ""
    """Options that take the next word."""
    whole: bool = False
    """The patterns are over all arguments, with options."""

    def changes(self, args: Sequence[str]) -> bool:
        """Whether the program, called with `args`, changes something elsewhere."""
        if not args and (self.reads or self.writes or self.judge):
            return False  # prints its usage
        if args[:1] and args[0] in _ASKS:
            return False
        line = " ".join(args if self.whole else self.positional(args))
        if _matches(self.reads, line):
            return False
        if self.writes:
            return _matches(self.writes, line)
        return self.judge(self, args) if self.judge else True

    def positional(self, args: Sequence[str]) -> list[str]:
        """The arguments without options, and without the values of those that are known to have one."""
        found, skip, valued = [], False, self.valued.split()
        for arg in args:
            if skip:
                skip = False
            elif arg.startswith("-") and len(arg) > 1:
                skip = arg in valued
            else:
                found.append(arg)
        return found

    def is_remote(self, place: str) -> bool:
        """Whether `place` is elsewhere."""
        return re.match(self.remote, place) is not None


def _matches(patterns: str, line: str) -> bool:
    return any(fnmatchcase(line, pattern) or pattern == f"{line} *" for pattern in patterns.split(";") if pattern)


def downloads(tool: Tool, args: Sequence[str]) -> bool:
    """False for `aws s3 cp s3://bucket/x here`: the first place after the verb is elsewhere, and no other one is."""
    words = tool.positional(args)
    verb = next((place for place, word in enumerate(words) if word in tool.copies.split()), None)
    if verb is None:
        return True
    return not _from_there_to_here(tool, words[verb + 1 :])


def transfers(tool: Tool, args: Sequence[str]) -> bool:
    """As `downloads`, of rsync and scp, which need no verb. Between two folders of this machine nothing leaves it."""
    words = tool.positional(args)
    if "--remove-source-files" in args:
        return any(map(tool.is_remote, words))
    return any(map(tool.is_remote, words)) and not _from_there_to_here(tool, words)


def _from_there_to_here(tool: Tool, places: Sequence[str]) -> bool:
    remote = [tool.is_remote(place) for place in places]
    return remote[:1] == [True] and not any(remote[1:])


_METHOD = re.compile(r"(?:-X|--request|--method)[= ]?(.*)")
_BODY = re.compile(
    r"-d|-d.+|--data.*|-F|-F.+|--form.*|-T|-T.+|--upload-file.*|--json.*|--post-data.*|--post-file.*|--body-.*"
    r"|-[a-zA-Z]*[dFT]|-Q|--quote.*|--mail-.*"
)


def web_writes(tool: Tool, args: Sequence[str]) -> bool:
    """curl and wget: the method asked for, or POST where a body is given. The rule for HTTP requests decides."""
    method, urls, uploads, before = "", [], False, ""
    for arg in args:
        asked = _METHOD.fullmatch(arg)
        if before in ("-X", "--request", "--method"):
            method = arg.upper()
        elif asked and asked[1] and not arg.startswith("--request-target"):
            method = asked[1].upper()
        elif arg.startswith("-") and _BODY.fullmatch(arg):
            uploads = True
        elif not arg.startswith("-") and re.match(r"[a-z]+://|[\w-]+(\.[\w-]+)+(:\d+)?(/|$)|localhost", arg):
            urls.append(arg)
        before = arg
    if ("-G" in args or "--get" in args) and not method:
        return False
    method = method or ("POST" if uploads else "GET")
    if not urls:
        return method not in READING_METHODS
    return any(judge_url(method, url if "://" in url else f"http://{url}") for url in urls)


def httpie_writes(tool: Tool, args: Sequence[str]) -> bool:
    """`http PUT url`, and `http url name=value`, which is a POST."""
    words = tool.positional(args)
    if words and words[0].isupper():
        return words[0] not in READING_METHODS
    return any(re.match(r"[\w-]+:?=[^=]", word) for word in words[1:])


def kills_others(tool: Tool, args: Sequence[str]) -> bool:
    """`kill -0 PID` and `kill -l` ask only; ending a child of its own, a script does through Python."""
    return args[0] not in ("-0", "-l", "-L", "--list")


_GPU_SETTINGS = re.compile(
    r"-r|--gpu-reset|-(pl|pm|lgc|rgc|lmc|rmc|ac|rac|c|e|p|mig|am|caa|acp|gtt|cc|fdm)|mig|drain|clocks"
    r"|--(power-limit|persistence-mode|lock-|reset-|applications-clocks|compute-mode|ecc-config|multi-instance-gpu).*"
)


def sets_gpu(tool: Tool, args: Sequence[str]) -> bool:
    """nvidia-smi: a reset, limits, clocks and modes; it asks otherwise."""
    return any(_GPU_SETTINGS.fullmatch(arg.partition("=")[0]) for arg in args)
