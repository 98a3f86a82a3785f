"""Judges the commands that the script runs, given as a list of words or as a line for the shell.

A Python process checks itself if it starts with the environment that `isolation.children` makes. So a Python program is
judged by its options and its environment. A shell script is read, because nothing else checks what it runs.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from autoddp.isolation.children import is_watched, watched
from autoddp.isolation.elsewhere.makefiles import recipes
from autoddp.isolation.elsewhere.own import receives, serves_port
from autoddp.isolation.elsewhere.patch import words as word_set
from autoddp.isolation.elsewhere.requests import is_this_machine
from autoddp.isolation.elsewhere.settings import changed_by
from autoddp.isolation.elsewhere.tools import BY_NAME, MODULES, shown
from autoddp.isolation.pipes import OTHERS

_SHELLS = word_set("sh bash dash zsh ksh ash fish busybox")
_MAKES = word_set("make gmake")
_PYTHON = re.compile(r"python[\d.]*|pypy[\d.]*")
_WRAPPERS = word_set(
    "env sudo doas nohup time nice ionice timeout exec command builtin eval stdbuf setsid xargs parallel watch taskset "
    "numactl unbuffer script flock chrt strace ltrace find uv uvx pipx poetry pdm conda mamba micromamba pixi "
    "coproc chroot unshare nsenter su runuser catchsegv proxychains "
    "pkexec apptainer singularity sshpass gosu su-exec tini dumb-init setpriv systemd-inhibit caffeinate fakeroot "
    "dbus-run-session xvfb-run aws-vault doppler op chamber direnv dotenv pipenv hatch rye pyenv npx bunx mise asdf "
    "perf nsys ncu valgrind gdb rr heaptrack cgexec chpst eatmydata nocache torsocks tsocks proxychains4 trickle trap "
    "mpirun mpiexec busybox toybox firejail bwrap nix-shell retry entr watchexec cpulimit faketime chronic"
)
"""Programs and commands of the shell that run the command that follows them. Their options are not parsed: the command
begins at the first word that is a known program."""
_OWN_ENVIRONMENT = word_set("sudo doas pkexec su runuser chroot apptainer singularity")
"""Wrappers that set another PYTHONPATH, or whose programs do not see the folders in it."""
_KEYWORDS = word_set("then do else elif if while until ! {")
_EXPORTS = word_set("export declare typeset local readonly")
_OF_THE_SYSTEM = ("/bin/", "/sbin/", "/usr/bin/", "/usr/sbin/")
"""Scripts in these folders are not looked for on PATH: `tools` names those of them that matter."""
_SEPARATORS = frozenset("();<>|&\n")
_REDIRECTION = re.compile(r"&?[<>]+[&|]?\Z")
_DESCRIPTOR = re.compile(r"\d*-?")  # after >& or <&
_CONNECTION = re.compile(r"/dev/(tcp|udp)/([^/]+)/(.+)")
"""For bash no file, but a connection to a host and a port."""
_DEPTH = 6  # of shells in shells
_SCRIPT_SIZE = 64 * 1024  # bytes of a shell script that are looked at
_VALUE_SIZE = 8 * 1024  # characters of a variable's value that is looked at
_FOLDERS = 8  # in which a program with a relative path is looked for
_UNKNOWN = "\1"  # stands for the output of a command
_ASSIGNMENT = re.compile(r"(\w+)(\+?)=(.*)", re.DOTALL)
_VARIABLE = re.compile(r"\$(?:(\w+|@|\*)|\{([^{}]*)\})")
_SUBSTITUTION = re.compile(r"\$\(([^()]*)\)|`([^`]*)`")
_OUTPUTS = tuple(
    (re.compile(rf"\s*{command}\s*"), output)
    for command, output in (
        (r"pwd( -\w)?", "${PWD}"),
        (r"""dirname (?:-- )?["']?\$\{?(?:0|BASH_SOURCE(?:\[0\])?)\}?["']?""", "${0%/*}"),
        (r"""dirname (?:-- )?["']?(\$\{0%/\*\}[^\s"']*)["']?""", r"\1/.."),
        (r"""(?:realpath|readlink -f) (?:-- )?["']?([^\s"']+)["']?""", r"\1"),
        (r"""cd (?:-P )?(?:-- )?["']?([^\s"';&>]+)["']?\s*(?:&?>\s*/dev/null)?\s*(?:&&|;)\s*pwd( -\w)?""", r"\1"),
    )
)
"""Commands whose output is known without running them: by these shell scripts ask where they are."""


AreOthers = Callable[[str], bool]


@dataclass(frozen=True)
class _Place:
    """The place where a command runs. A shell text changes the folders and the variables of its own place."""

    folders: list[str]
    """The working folder, or several where a shell text changes it: nobody knows which `cd` was in a subshell."""
    variables: dict[str, str]
    """Variables of the command's environment, and of the shell that starts it."""
    are_others: AreOthers
    """Whether a path is a named pipe whose other end is outside the attempt."""
    arguments: tuple[str, ...] = ()
    """Arguments of the shell script."""
    depth: int = 0
    of_the_system: bool = False
    """Whether a script of the system runs it, which may start what cannot be found."""

    def inner(self, arguments: tuple[str, ...] = ()) -> _Place:
        """The place of a program that is started here: what it changes in it does not come back."""
        return replace(
            self,
            folders=list(self.folders),
            variables=dict(self.variables),
            arguments=arguments or self.arguments,
            depth=self.depth + 1,
        )


def _no_pipes(_path: str) -> bool:
    return False


def judge_shell(text: str, folder: str = "", env: Any = None, are_others: AreOthers = _no_pipes) -> str:
    """ "" if this shell line changes nothing elsewhere, else what it changes.

    It runs in `folder`, "" for this process's own. `env` is as for subprocess; `are_others` as of `pipes.Pipes`.
    """
    return next(_judge_text(text, _Place([folder], watched(env), are_others, depth=1)), "")


def judge_words(words: Sequence[str], folder: str = "", env: Any = None, are_others: AreOthers = _no_pipes) -> str:
    """What `judge_shell` says, for a command that is split into words already."""
    place = _Place([folder], watched(env), are_others)
    return next((said for judge in (_judge_files, _judge) for said in judge(list(words), place)), "")


def _judge_text(text: str, place: _Place) -> Iterator[str]:
    if place.depth > _DEPTH:
        return
    for words in split(text):
        known = [each for word in words for each in _expanded(word, place)]
        if known[:1] == ["function"]:
            del known[:2]  # its first command may stand in the same line
        while known and known[0] in _KEYWORDS:
            del known[0]
        yield from _judge_files(known, place)
        if _REDIRECTION.fullmatch(words[0]):
            continue
        if known and (known[0] in _EXPORTS or all(map(_ASSIGNMENT.match, known))):
            _assign(known, place)
        elif known and known[0] == "unset":
            for name in known[1:]:
                place.variables.pop(name, None)
        elif known and known[0] in ("cd", "pushd"):
            _change_folder(known[1:], place)
        else:
            yield from _judge(known, place)


def _judge_files(words: list[str], place: _Place) -> Iterator[str]:
    """Named pipes of others among the words of a command or a redirection, connections, and settings of the machine."""
    for word in words:
        for named in filter(None, (word, word.partition("=")[2])):
            if any(place.are_others(os.path.join(folder, named)) for folder in place.folders):
                by_shell = _REDIRECTION.fullmatch(words[0]) or _ASSIGNMENT.match(words[0]) or words[0] in _EXPORTS
                yield f"{'the shell' if by_shell else os.path.basename(words[0])} opens {named}, {OTHERS}"
    if words and _REDIRECTION.fullmatch(words[0]) and words[0] != "<":
        yield from filter(None, map(_sent_by, words[1:]))
    yield from filter(None, (changed_by(words, folder) for folder in place.folders))


def _sent_by(redirection: str) -> str:
    """ "" if a redirection to this word is none to a server outside the attempt, else where it goes."""
    found = _CONNECTION.fullmatch(redirection)
    if found is None:
        return ""
    protocol, host, port = found.groups()
    if is_this_machine(host) and port.isdecimal() and (serves_port if protocol == "tcp" else receives)(int(port)):
        return ""
    return f"the shell changes something outside this run (it sends data to {_plain(host)}:{_plain(port)})"


def split(text: str) -> Iterator[list[str]]:
    """The simple commands of a shell line, and those in `$( )` and backticks.

    A redirection comes as a command of its own, before the one that it belongs to: `a >b` is [">", "b"] and ["a"].
    """
    text, inner = _without_substitutions(_without_comments(text.replace("\0", "")).replace("\\\n", " "))
    for each in inner:
        yield from split(each)
    words: list[str] = []
    redirection = ""
    for token in _tokens(text.replace("`", "$(")):
        if token and _SEPARATORS.issuperset(token):
            if words and not _REDIRECTION.fullmatch(token):
                yield words
                words = []
            found = _REDIRECTION.search(token)
            redirection = found[0] if found else ""
            continue
        if redirection in ("", "<<<"):
            if "$(" in token:
                yield from split(token.partition("$(")[2].replace(")", "\n"))
            if redirection:
                yield from split(token)  # a shell may read it
            else:
                words.append(token)
        elif redirection != "<<" and not (redirection.endswith("&") and _DESCRIPTOR.fullmatch(token)):
            yield [redirection, token]  # after << the word ends the text that follows
        redirection = ""
    if words:
        yield words


def _tokens(text: str) -> list[str]:
    """Words and separators. Where a quote has no end, each line is taken alone."""
    lexer = shlex.shlex(text, posix=True, punctuation_chars="();<>|&\n")
    lexer.whitespace, lexer.commenters, lexer.whitespace_split = " \t\r", "", True
    try:
        return list(lexer)
    except ValueError:
        if "\n" in text:
            return [token for line in text.split("\n") for token in (*_tokens(line), "\n")]
        return [token for token in re.split(r"\s+|([();<>|&]+)", text) if token]


def _without_comments(text: str) -> str:
    """A comment begins with a # that begins a word. An apostrophe in it begins no quote."""
    quote, kept, last, skipping = "", [], "\n", False
    for each in text:
        if skipping:
            skipping = each != "\n"
        elif quote:
            quote = "" if each == quote and (last != "\\" or quote == "'") else quote
        elif each in "\"'" and last != "\\":
            quote = each
        elif each == "#" and last in " \t\r\n;&|()":
            skipping = True
        if not skipping:
            kept.append(each)
        last = each
    return "".join(kept)


def _without_substitutions(text: str) -> tuple[str, list[str]]:
    """A text with the output of each command in `$( )` or backticks, where it is known, and these commands."""
    inner: list[str] = []

    def output(found: re.Match[str]) -> str:
        command = found[1] or found[2] or ""
        inner.append(command.replace(_UNKNOWN, ""))
        for pattern, known in _OUTPUTS:
            match = pattern.fullmatch(command)
            if match:
                return match.expand(known)
        return _UNKNOWN

    replaced = 1
    while replaced:
        text, replaced = _SUBSTITUTION.subn(output, text)
    return text, inner


def _expanded(word: str, place: _Place) -> list[str]:
    """A word with the values of its variables. A variable without a known value stays as it is written."""
    if word in ("$@", "$*", "${@}", "${*}"):
        return list(place.arguments)

    def value(found: re.Match[str]) -> str:
        name, _, default = (found[1] or found[2] or "").partition(":-")
        if name.isdigit() and 0 < int(name) <= len(place.arguments):
            return place.arguments[int(name) - 1]
        if name == "PWD":
            return os.path.abspath(place.folders[-1])
        known = place.variables.get(name)
        return default or found[0] if known is None or len(known) > _VALUE_SIZE else known or default

    home, slash, rest = word.partition("/")
    if home == "~":
        word = place.variables.get("HOME", "~") + slash + rest
    elif home.startswith("~"):
        word = os.path.expanduser(home) + slash + rest
    new = _VARIABLE.sub(value, word)
    return [new] if new or not word else []


def _is_known(word: str) -> bool:
    return "$" not in word and _UNKNOWN not in word


def _assign(words: Sequence[str], place: _Place) -> None:
    for word in words:
        match = _ASSIGNMENT.match(word)
        if match:
            before = place.variables.get(match[1], "") if match[2] else ""
            place.variables[match[1]] = before + match[3]


def _change_folder(args: list[str], place: _Place) -> None:
    target = next((arg for arg in args if not arg.startswith("-") or arg == "-"), place.variables.get("HOME", ""))
    if not _is_known(target):
        place.folders.append(_UNKNOWN)
    elif target != "-":
        more = filter(os.path.isdir, [os.path.join(folder, target) for folder in place.folders])
        place.folders[:] = list(dict.fromkeys((*place.folders, *more)))[-_FOLDERS:]


def _judge(words: list[str], place: _Place) -> Iterator[str]:
    assigned = 0
    while assigned < len(words) and _ASSIGNMENT.match(words[assigned]):
        assigned += 1
    if assigned:
        place = place.inner()
        _assign(words[:assigned], place)
        words = words[assigned:]
    if not words or place.depth > _DEPTH:
        return
    name, args = os.path.basename(words[0]), words[1:]
    tool = BY_NAME.get(name)
    if tool is not None:
        if tool.changes(args):
            yield f"{name} changes something outside this run ({_plain(shown(name, args))})"
        if name == "git":
            yield from _judge_hooks(tool.positional(args), args, place)
    elif name in _SHELLS:
        yield from _judge_shell_program(args, place)
    elif name in _MAKES:
        yield from _judge_make(args, place)
    elif words[0] in (".", "source"):
        yield from _judge_script(args, place, shell=True, sourced=True)
    elif _PYTHON.fullmatch(name):
        yield from _judge_python(words, place)
    elif place.depth and " " in words[0] and not any(_found(words[0], place)):
        yield from _judge_text(f"{words[0]} {shlex.join(args)}", place.inner())  # a variable with a whole command
    elif name not in _WRAPPERS:
        yield from _judge_script(words, place)
    if name in _WRAPPERS:  # also after the checks above: poetry publishes, and it runs programs
        yield from _judge_wrapped(name, args, place)


def _judge_wrapped(wrapper: str, args: list[str], place: _Place) -> Iterator[str]:
    place = place.inner()
    if wrapper in _OWN_ENVIRONMENT:
        place.variables.pop("PYTHONPATH", None)
    for index, word in enumerate(args):
        name, before = os.path.basename(word), args[max(index - 1, 0)]
        if wrapper == "env" and word in ("-", "-i", "--ignore-environment"):
            place.variables.clear()
        elif wrapper == "env" and (before in ("-u", "--unset") or word.startswith(("--unset=", "-u"))):
            place.variables.pop(word.removeprefix("--unset=").removeprefix("-u"), None)
        elif _ASSIGNMENT.match(word):
            _assign([word], place)
        elif name in BY_NAME or name in _SHELLS or name in _WRAPPERS or name in _MAKES or _PYTHON.fullmatch(name):
            yield from _judge(args[index:], place)
            return
        elif " " in word:  # `eval "git push"`, `su -c "…"`
            yield from _judge_text(word, place)
    for index, word in enumerate(args):
        if not word.startswith("-") and not _ASSIGNMENT.match(word):
            yield from _judge_script(args[index:], place)
            if any(os.access(path, os.X_OK) for path in _found(word, place, everywhere=True)):
                return


def _judge_hooks(words: list[str], args: list[str], place: _Place) -> Iterator[str]:
    """The user's own scripts that git runs with a command."""
    hooks = _HOOKS.get(words[0] if words else "", "").split()
    inside = args[args.index("-C") + 1 : args.index("-C") + 2] if "-C" in args else [""]
    for folder in place.folders if hooks else ():
        here = os.path.abspath(os.path.join(folder, *inside))
        while here != os.path.dirname(here) and not os.path.exists(os.path.join(here, ".git")):
            here = os.path.dirname(here)
        for hook in hooks:
            path = os.path.join(here, _hooks_of(here, place), hook)
            if os.access(path, os.X_OK):
                yield from _judge_file(path, [path], replace(place.inner(), folders=[here]), shell=False, sourced=False)


def _hooks_of(here: str, place: _Place) -> str:
    """The folder with the hooks of a repository, by its own settings or by those of the user."""
    git = os.path.join(here, ".git")
    if os.path.isfile(git):  # in a worktree and in a submodule it names the folder
        git = os.path.join(here, _beginning(git).removeprefix("gitdir:").strip())
        git = os.path.join(git, _beginning(os.path.join(git, "commondir")).strip())  # what all worktrees share
    home = place.variables.get("HOME", "")
    more = place.variables.get("XDG_CONFIG_HOME") or os.path.join(home, ".config")
    for config in (f"{git}/config", f"{home}/.gitconfig", f"{more}/git/config", "/etc/gitconfig"):
        set_to = _HOOKS_PATH.search(_beginning(config))
        if set_to:
            return os.path.expanduser(set_to[1].strip())
    return os.path.join(git, "hooks")


def _beginning(path: str) -> str:
    """The first part of a file's text; "" if it cannot be read."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read(_SCRIPT_SIZE)
    except OSError:
        return ""


_COMMITS = "pre-commit prepare-commit-msg commit-msg post-commit"
_HOOKS = {
    "commit": _COMMITS,
    "merge": f"pre-merge-commit post-merge {_COMMITS}",
    "pull": f"pre-merge-commit post-merge post-checkout {_COMMITS}",
    "am": "applypatch-msg pre-applypatch post-applypatch",
    "rebase": f"pre-rebase post-rewrite post-checkout {_COMMITS}",
    **dict.fromkeys(("cherry-pick", "revert"), "prepare-commit-msg commit-msg post-commit"),
    **dict.fromkeys(("checkout", "switch", "clone", "worktree"), "post-checkout"),
}
"""Command of git → the hooks that it runs."""
_HOOKS_PATH = re.compile(r"^\s*hooksPath\s*=\s*(.+)$", re.IGNORECASE | re.MULTILINE)


def _judge_make(args: list[str], place: _Place) -> Iterator[str]:
    if {"-n", "--dry-run", "--just-print", "--recon", "-q", "--question", "--version", "-v"}.intersection(args):
        return
    for folder in place.folders:
        for inside, text in recipes(args, folder):
            yield from _judge_text(text, replace(place.inner(), folders=[inside]))


def _judge_shell_program(args: list[str], place: _Place) -> Iterator[str]:
    for index, word in enumerate(args):
        if re.fullmatch(r"-[a-zA-Z]*c", word):
            if index + 1 < len(args):
                yield from _judge_text(args[index + 1], place.inner(tuple(args[index + 3 :])))
            return
        if not word.startswith(("-", "+")):
            yield from _judge_script(args[index:], place, shell=True)
            return


def _judge_python(words: list[str], place: _Place) -> Iterator[str]:
    """A known program that is called through its Python, and a Python that would run without autoddp's checks."""
    args, options, valued = words[1:], "", False
    for index, word in enumerate(args):
        name, rest = os.path.basename(word), args[index + 1 :]
        if valued:
            valued = False
            continue
        valued = word in ("-X", "-W", "--check-hash-based-pycs")
        if word in ("-V", "-VV", "--version", "-h", "--help"):
            return
        if word.startswith("-") and not word.startswith(("--", "-X", "-W")):
            options += word[1:]
        if options.endswith("m") and rest:  # also `-Im module`
            if rest[0] in MODULES:
                yield from _judge([MODULES[rest[0]], *rest[1:]], place.inner())
                return
            break
        if options.endswith("c") or word == "-":
            break
        # A console script may be called through its Python: `python /venv/bin/aws s3 cp …`.
        if name in BY_NAME:
            yield from _judge(args[index:], place.inner())
            return
        if not word.startswith("-"):
            break
    program, shown = os.path.basename(words[0]), [word for word in args[:2] if len(word) < 80 and "\n" not in word]
    if not is_watched(place.variables) or set(options) & set("EIS") or program.startswith("python2"):
        yield f"{_plain(' '.join([program, *shown]))} would run without autoddp's checks"


def _judge_script(words: list[str], place: _Place, shell: bool = False, sourced: bool = False) -> Iterator[str]:
    """Judge a script's lines if it is one of the shell, its interpreter if that is a Python.

    With `shell` the first word is a script of the shell for sure.
    """
    if not words:
        return
    name = words[0]
    found = list(_found(name, place, shell))
    is_path = (shell or os.sep in name) and not re.search(r"\s", name)
    may_be_unknown = bool(place.depth) and not place.of_the_system
    if may_be_unknown and not found and is_path and (not _is_known(name) or _UNKNOWN in place.folders):
        yield f"nothing is known about the script {_plain(name)}, whose place is known to the shell alone"
    for path in found:
        yield from _judge_file(path, words, place, shell, sourced)


def _found(name: str, place: _Place, shell: bool = False, everywhere: bool = False) -> Iterator[str]:
    """The files that a command's first word may name. Those of the system only with `everywhere`."""
    if os.sep in name or shell:
        for folder in place.folders:
            path = os.path.join(folder, name)
            if os.path.isfile(path):
                yield path
    if os.sep not in name:
        on_path = shutil.which(name, path=place.variables.get("PATH", os.defpath))
        if on_path is not None and (everywhere or not on_path.startswith(_OF_THE_SYSTEM)):
            yield on_path


def _judge_file(path: str, words: list[str], place: _Place, shell: bool, sourced: bool) -> Iterator[str]:
    try:
        with open(path, "rb") as script:
            head = script.read(2)
            if head != b"#!" and not shell:
                return
            text = (head + script.read(_SCRIPT_SIZE)).decode(errors="replace")
    except (OSError, ValueError):
        return
    interpreter = text.partition("\n")[0][2:].split() if text.startswith("#!") else []
    names = [os.path.basename(word) for word in interpreter]
    python = next((index for index, name in enumerate(names) if _PYTHON.fullmatch(name)), None)
    if python is not None and not shell:
        if not path.startswith(_OF_THE_SYSTEM):
            yield from _judge_python([*interpreter[python:], *words], place)
    elif _SHELLS.intersection(names) or (shell and not interpreter and "\0" not in text):
        arguments = tuple(words[1:])
        if sourced:  # what it changes stays changed
            inside = replace(place, arguments=arguments or place.arguments, depth=place.depth + 1)
        else:
            inside = replace(place.inner(), arguments=arguments, of_the_system=path.startswith(_OF_THE_SYSTEM))
        values = {"": path, "%/*": os.path.dirname(path) or ".", "##*/": os.path.basename(path)}
        own = {name + form: value for name in ("0", "BASH_SOURCE", "BASH_SOURCE[0]") for form, value in values.items()}
        before = {name: value for name, value in place.variables.items() if name in own}
        inside.variables.update(own)
        yield from _judge_text(text, inside)
        if sourced:
            place.variables.update(before)


def _plain(word: str) -> str:
    return word.replace(_UNKNOWN, "$(…)")
