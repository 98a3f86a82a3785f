"""The command line, resolved once: torchrun's own parser, untouched, and autoddp's options beside it.

Before the script's name stand the options of autoddp and of torchrun, in any order. After it
everything is the script's, except `--trials N` and `--recipe FILE.toml`, so that `autoddp train.py --trials 20` works.
These two are passed to the script too
    - where its own source has an option of that name, or cannot be read,
    - after a `--`, before or after the script's name,
    - where `--trials 0` stands before the script's name: then autoddp is torchrun.

The script gets all its other words as it would get them from torchrun.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import os
import re
import shlex
from collections.abc import Callable, Collection, Container, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from autoddp.commandline.place import settle
from autoddp.commandline.script import ScriptSource, is_standard_input
from autoddp.errors import UsageError, did_you_mean
from autoddp.isolation import Level
from autoddp.knobs import GRADIENT_RUNGS, LIMITS, Rung
from autoddp.log import show_exactly
from autoddp.runs.usual_folders import OUTPUT, Folders, usual_folders
from autoddp.settings import Objective, StudySettings
from autoddp.torchrun.options import torchrun_parser
from autoddp.units import Allowance, seconds

TAKEN_AFTER_THE_SCRIPT = {"--trials": re.compile("[0-9]+"), "--recipe": re.compile(r"[^-].*\.toml|\.toml", re.DOTALL)}
"""Options of autoddp that may stand after the script's name, and the values with which they are autoddp's."""
_LARGEST_SEED = 2**32 - 1  # numpy's, which Optuna's samplers draw with
_LARGEST = 2**31 - 1  # of any other number; a recipe holds some of them in 64 bits
# A name of a file has 255 bytes at most, and ".12.autoddp.toml.12345678.toml" may stand behind these.
_LONGEST_NAME = 200  # bytes of the script's folder and name together; else the name alone is taken
_LONGEST_STEM = 220  # bytes of the name alone; what is longer is cut
_OF_A_DIAGNOSIS = frozenset(
    (
        "budget cuda_graphs diagnose_budget dry_run isolation keep_runs no_orphans output scratch_limit trace verbose"
    ).split()
)
"""Fields of the options that `autoddp diagnose` takes too. All others are for tuning and launching."""
_OTHER_MEANING = {"budget", "diagnose_budget"}
"""Options in `_OF_A_DIAGNOSIS` that have another default there: its own help says which."""
_OF_TUNING = frozenset("all_trials cuda_graphs fresh job_steps local_buffers recompile static_graph trace".split())
"""Fields that only say what tuning tries or writes: a launch with a saved recipe cannot follow them."""
_NOT_OF_AN_OBJECTIVE = (_OF_TUNING - {"all_trials"}) | set(
    "accumulate_up_to diagnose_budget lossy_limit near_limit watch".split()
)
"""Fields that a study of a script without DDP cannot follow: it has no DDP settings and no trace, and begins anew."""
_NEAR, _LOSSY = LIMITS[Rung.NEAR], LIMITS[Rung.LOSSY]

_USES = """\
  autoddp train.py --trials 20   tune here, write a recipe, launch with it
  autoddp train.py               from then on: launch with that recipe at once
  autoddp --trials 0 train.py    only what torchrun does

Runs a DistributedDataParallel script as torchrun does, with all its options,
but first finds the settings that make it fastest here: it measures them on the
running, unmodified script.

commands, each with a --help of its own:
  diagnose    why a job is slow, by experiments on the running script
  probe       what this machine is made of, and what to expect of it
  bench       how fast gradients travel here
  predict     how fast a tuned job would be elsewhere
  recipe      show, check and compare recipes; their settings as code
  job         the file that submits a job to Slurm or Kubeflow
  report      write the report of a run anew, or compare two runs
  wrap        for a command that starts torchrun itself (accelerate launch)
  completion  what your shell needs to complete these words"""
_USUAL = ("trials", "recipe", "allow", "accumulate_up_to", "budget", "tune_only", "isolation", "verbose", "dry_run")
_USUAL_OF_TORCHRUN = ("nnodes", "nproc_per_node")
"""What `--help` lists; `--help-all` lists all."""
_ALL = "All options, torchrun's too: autoddp --help-all; the version: autoddp --version"


class _Kind(NamedTuple):
    """What the value of an option may be."""

    convert: Callable[[str], Any]
    """The value from its word; ValueError for a word that breaks the rule."""
    rule: str = ""
    """What a word must be, for the error "must be …"; "" where every word is good."""


def _within(convert: Callable[[str], Any], holds: Callable[[Any], bool], rule: str) -> _Kind:
    """The values of `convert` for which a condition holds."""

    def converted(text: str) -> Any:
        value = convert(text)
        if not holds(value):
            raise ValueError(text)
        return value

    return _Kind(converted, rule)


def _whole(low: int) -> _Kind:
    return _within(int, lambda number: low <= number <= _LARGEST, f"a whole number of {low} or more")


_SEED = _within(int, lambda seed: 0 <= seed <= _LARGEST_SEED, f"a whole number from 0 to {_LARGEST_SEED}")
_DURATION = _within(seconds, lambda found: 0 < found <= _LARGEST, "a duration above 0")
_DURATION_OR_NONE = _within(seconds, lambda found: 0 <= found <= _LARGEST, "a duration, or 0 for none")
# A larger one is most likely a percentage. The sum of some lossy gradients may be off by more than it is long.
_SHARE = _within(float, lambda share: 0 < share < 1, "a share above 0 and below 1")
_SHARE_OF_SUM = _within(float, lambda share: 0 < share <= 2, "a share above 0, and 2 at most")
_INTERVAL = _Kind(lambda text: 0 if text == "off" else _whole(1).convert(text), "a whole number of 1 or more, or off")
_RUNG = _Kind(str, "exact, near or lossy")
_LEVEL = _Kind(Level, "overlay, guard or off")
_ROOM = _Kind(Allowance.parse, "a size such as 20G, or a share such as 20%")
_PATH = _Kind(Path)


def _objective(text: str) -> Objective:
    try:
        return Objective.parse(text)
    except ValueError as error:
        raise UsageError(f"--objective {text!r}: {error}") from None


_OBJECTIVE = _Kind(_objective, "steps, or regex:min:PATTERN, or regex:max:PATTERN")


def _option(says: str, metavar: str | None, kind: _Kind, example: str = "", default: Any = None, **more: Any) -> Any:
    """A field that an option with a value sets. `says` is its line in --help, `example` a good word for its value.

    `more`: as `ArgumentParser.add_argument` has it.
    """
    return field(default=default, metadata={"help": says, "metavar": metavar, "type": kind, "example": example, **more})


def _switch(says: str) -> Any:
    """A field that is set by an option without a value."""
    return field(default=False, metadata={"help": says, "action": "store_true"})


@dataclass(frozen=True, kw_only=True)
class Options:
    """One command line, understood. Each option of autoddp is declared here, as the field of its name."""

    torchrun: argparse.Namespace
    """What torchrun's parser makes of its part. `commandline.mode` sets the number of ranks in it."""
    is_standard_input: bool = False
    """Whether the script is what Python reads from standard input."""
    ranks_given: bool = True
    """Whether the user has said how many ranks each host starts."""
    folders: Folders = field(default_factory=Folders)
    """Folders for files for which the user has named no place."""
    says: tuple[str, ...] = ()
    """Lines for the user about words that could have been meant for another: autoddp, torchrun or the script."""
    given: frozenset[str] = frozenset()
    """Fields below that the command line sets."""
    variables: dict[str, str] = field(default_factory=dict)
    """Fields below that the environment sets → the variable, also where the command line overrules it."""
    usual_trials: int = StudySettings.trials
    """Trials of a study where `trials` is not given."""
    study: StudySettings = field(init=False)
    """What is asked of a study: the options below, with defaults for those that are not given."""

    trials: int | None = _option(
        f"how many configurations to measure ({StudySettings.trials}); 0: as torchrun", "N", _whole(0), "20"
    )
    """None: not given. Then a recipe that is there is launched, and a study takes its usual number of trials."""
    recipe: Path | None = _option("launch with this recipe; with --trials: write it to this file", "FILE", _PATH)
    """None: not given; see `recipe_path`."""
    all_trials: bool = _switch("measure as many as --trials says, also when no more gain is expected")
    allow: Rung | None = _option(
        "how much launched settings may change training (near)",
        None,
        _RUNG,
        "near",
        choices=[rung.value for rung in GRADIENT_RUNGS],
    )
    """None: not given; a study then allows near, and a saved recipe is launched as it is."""
    accumulate_up_to: int | None = _option("how many steps become one with a larger batch (1)", "N", _whole(1), "4")
    """None: not given, as with `allow`."""
    cuda_graphs: bool = _switch("try CUDA graphs too (new: not yet the default)")
    recompile: bool = _switch("try settings for which torch.compile compiles the model again")
    """Compiling may take minutes, so it has to be asked for."""
    local_buffers: bool = _switch("let each rank keep its own BatchNorm statistics (try it); rank 0's do not change")
    """What ranks other than rank 0 evaluate or save then differs, so it has to be asked for."""
    static_graph: bool = _switch("try static_graph=True also if the script sets find_unused_parameters")
    """The job then stops where a parameter is unused, so it has to be asked for."""
    job_steps: int | None = _option(
        "steps of the whole job: PowerSGD begins after a tenth of them (else after 1000)", "N", _whole(1), "90000"
    )
    """Optimizer steps of the real job, if the user knows."""
    budget: float | None = _option(
        "limit of the time from the command to the launch (5m from the first step; without --trials no longer than "
        "the script)",
        "TIME",
        _DURATION,
        "5m",
    )
    """Seconds. None: not given; see `attempts.deadline`."""
    diagnose_budget: float | None = _option(
        "time for finding out why a step is slow (a quarter of the time of the trials; 0: none)",
        "TIME",
        _DURATION_OR_NONE,
        "30s",
    )
    """Seconds. None: not given."""
    near_limit: float = _option(
        f"largest gradient error with which a near setting is launched ({_NEAR:g})", "X", _SHARE, "0.02", _NEAR
    )
    """`knobs.fidelity` says where the default comes from, as for `lossy_limit`."""
    lossy_limit: float = _option(
        f"the same for a lossy setting, over some steps together ({_LOSSY:g})", "X", _SHARE_OF_SUM, "0.95", _LOSSY
    )
    watch: int | None = _option(
        "measure the gradient error in the job every N reductions; off: never (as often as half a percent of its time "
        "allows)",
        "N|off",
        _INTERVAL,
        "1000",
    )
    """0: the error is not measured. None: as often as half a percent of the job's time allows."""
    objective: Objective | None = _option(
        "tune a script without DDP for more steps per second (steps), or for a number that it prints "
        "(regex:max:PATTERN, regex:min:PATTERN)",
        "WHAT",
        _OBJECTIVE,
        "steps",
    )
    """None: not given; DDP's settings are tuned, for the seconds of a step."""
    trace: bool = _switch("write trace.json: some steps of all ranks, for ui.perfetto.dev or chrome://tracing")
    tune_only: bool = _switch("write the recipe and stop")
    seed: int = _option("seed with which the settings to try are drawn (0)", "N", _SEED, "0", StudySettings.seed)
    output: Path = _option("folder for logs and summary.json (.autoddp/)", "DIR", _PATH, default=OUTPUT)
    """Another folder is the default where the current one takes no files, see `runs.usual_folders`."""
    keep_runs: int = _option("how many runs are kept in the folder of --output (20)", "N", _whole(1), "20", 20)
    """Run folders that stay in `output`, this run's own counted."""
    isolation: Level | None = _option(
        "how your files are protected (the best that works)",
        "|".join(level.value for level in Level),
        _LEVEL,
        "guard",
    )
    """None: not given; the best that the host allows."""
    scratch_limit: Allowance | None = _option(
        "disk space for what the script writes in tuning (20%% of what is free)", "SIZE", _ROOM, "20G"
    )
    """None: not given; `attempts.isolating` has the share."""
    fresh: bool = _switch("tune from the beginning, also where tuning of the same job was cut off")
    no_orphans: bool = _switch("end all processes of the job when the launcher has ended")
    """See `processes.supervisor`."""
    verbose: bool = _switch("show each trial, the diagnosis in full and what each level of --allow gives")
    dry_run: bool = _switch("print what would be run")
    diagnose_only: bool = False
    """`autoddp diagnose`: nothing is tuned, and nothing is launched."""
    force: bool = _switch("launch a recipe made for another machine or other inputs")

    def __post_init__(self) -> None:
        asked: dict[str, Any] = {"trials": self.trials, "allow": self.allow, "accumulate_up_to": self.accumulate_up_to}
        given = {name: value for name, value in asked.items() if value is not None}
        limits = {**LIMITS, Rung.NEAR: self.near_limit, Rung.LOSSY: self.lossy_limit}
        given = {"trials": self.usual_trials, **given}
        given |= {"all_trials": self.all_trials, "diagnose_budget": self.diagnose_budget}
        given |= {"objective": self.objective}
        object.__setattr__(self, "study", StudySettings(seed=self.seed, limits=limits, **given))

    @property
    def not_of_a_diagnosis(self) -> list[str]:
        """Options that were given and have no meaning for `autoddp diagnose`."""
        return [_spelled(name) for name in sorted(self.given - _OF_A_DIAGNOSIS)]

    @property
    def only_of_tuning(self) -> list[str]:
        """Options that were given and have no meaning for a launch with a saved recipe."""
        return [_spelled(name) for name in sorted(self.given & _OF_TUNING)]

    @property
    def not_of_an_objective(self) -> list[str]:
        """Options that were given and have no meaning where a script without DDP is tuned."""
        return [_spelled(name) for name in sorted(self.given & _NOT_OF_AN_OBJECTIVE)]

    @property
    def activity(self) -> str:
        """What the script is started for before any job, as messages call it."""
        return "the diagnosis" if self.diagnose_only else "tuning"

    @property
    def script(self) -> str:
        """The script, module or program."""
        return str(self.torchrun.training_script)

    @property
    def recipe_path(self) -> Path:
        """The path of the recipe: as given, or in the folder for recipes, which is the current one if it takes files.

        See `commandline.saved_recipes` for the names of further recipes of the script.
        """
        return self.recipe or self.folders.recipes / self.recipe_name

    @property
    def recipe_name(self) -> str:
        """The recipe's file name, after the script and its folder."""
        # The current folder says nothing of a module, nor of a program that is found along PATH, as `bash` is.
        is_program = self.torchrun.no_python and not os.path.exists(self.script)
        folder = "" if is_program or self.torchrun.module else Path(os.path.abspath(self.script)).parent.name
        name = f"{folder}.{Path(self.script).stem}.autoddp.toml"
        is_short = len(os.fsencode(name.removesuffix(".autoddp.toml"))) <= _LONGEST_NAME
        return name if folder and is_short else self._name_without_folder

    @property
    def _name_without_folder(self) -> str:
        """A recipe's file name after the script alone."""
        stem = self.script.replace("/", ".") if self.torchrun.module else Path(self.script).stem
        whole = os.fsencode(stem)
        if len(whole) > _LONGEST_STEM:
            digest = hashlib.sha256(whole).hexdigest()[:8]
            stem = f"{whole[:_LONGEST_NAME].decode(errors='ignore')}-{digest}"
        return f"{stem}.autoddp.toml"

    @property
    def elsewhere(self) -> str:
        """What goes elsewhere, because the current folder cannot be written; "" if nothing does."""
        says = []
        if self.output == self.folders.output != OUTPUT:
            says.append(f"run folders go to {self.output} (--output names another place)")
        if self.recipe is None and self.folders.recipes != Path():
            says.append(f"the recipe goes to {self.folders.recipes} (--recipe names another file)")
        return f"the current folder cannot be written: {'; '.join(says)}" if says else ""


def _spelled(name: str) -> str:
    """The option that sets the field of this name."""
    return f"--{name.replace('_', '-')}"


_DECLARED = {_spelled(one.name): one.metadata for one in fields(Options) if one.metadata}
"""autoddp's own options."""


def own_parser() -> argparse.ArgumentParser:
    """autoddp's own options, and nothing of torchrun's. What is not given is no attribute of its result."""
    parser = argparse.ArgumentParser(
        prog="autoddp", add_help=False, allow_abbrev=False, argument_default=argparse.SUPPRESS
    )
    parser.error = _refuse  # type: ignore[method-assign]
    group = parser.add_argument_group("autoddp")
    for option, declared in _DECLARED.items():
        more = {name: value for name, value in declared.items() if name != "example"}
        if _takes_value(option):
            more["type"] = functools.partial(_converted, option)
        group.add_argument(option, **more)
    return parser


def _takes_value(option: str) -> bool:
    return "type" in _DECLARED[option]


def _rule(option: str) -> str:
    """What the value of an option must be, with an example."""
    declared = _DECLARED[option]
    rule = declared["type"].rule
    return f"{rule}, e.g. {option} {declared['example']}" if rule else f"{option} {declared['metavar']}"


def _converted(option: str, text: str) -> Any:
    """The value of an option; UsageError with its rule for a word that breaks it."""
    kind = _DECLARED[option]["type"]
    if kind is _PATH and not text:  # Path("") is the current folder, which nobody has named
        raise UsageError(f"{option}: its value is empty: give {_rule(option)}, or leave it out")
    try:
        return kind.convert(text)
    except ValueError:
        raise UsageError(f"{option} {text!r}: must be {_rule(option)}") from None


def option_names(*parsers: argparse.ArgumentParser) -> list[str]:
    """Every spelling of every option."""
    return [option for parser in parsers for option in parser._option_string_actions]


def help_text(whole: bool = False, of_diagnose: bool = False) -> str:
    """Uses, commands and the usual options; or, where it is to be `whole`, all of autoddp's and torchrun's options.

    `of_diagnose`: no uses, and of autoddp's options those that have the same meaning for `autoddp diagnose`.
    """
    return _parser_of(whole, of_diagnose).format_help()


def all_options() -> argparse.ArgumentParser:
    """Make a parser with all options of autoddp and torchrun and no script. It lists them, and parses nothing."""
    return _parser_of(whole=True, of_diagnose=False)


def _parser_of(whole: bool, of_diagnose: bool) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="autoddp",
        usage="autoddp [options of autoddp and torchrun] train.py [its arguments]",
        description=None if of_diagnose else _USES,
        epilog=None if whole or of_diagnose else _ALL,
        add_help=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    own: Container[str] = {one.dest for one in own_parser()._actions}
    torchruns: Container[str] = {one.dest for one in torchrun_parser()._actions}
    if of_diagnose:
        own = _OF_A_DIAGNOSIS - _OTHER_MEANING
    elif not whole:
        own, torchruns = _USUAL, _USUAL_OF_TORCHRUN
    after = "; --trials N and --recipe FILE.toml also after it" if whole and not of_diagnose else ""
    parts = (
        (f"autoddp's options (before the script{after})", own_parser(), own),
        ("torchrun's options (before the script)", torchrun_parser(), torchruns),
    )
    for title, part, listed in parts:
        group = parser.add_argument_group(title)
        for action in part._actions:
            if action.option_strings and action.dest in listed:
                group._add_action(action)
    return parser


def parse(argv: Sequence[str], asks_cluster: bool = True) -> Options:
    """Understand a command line; UsageError, one line, for one that cannot be.

    With `asks_cluster`, what the user does not say of this node's place is what a cluster tells.
    """
    own, torchrun = own_parser(), _strict_torchrun_parser()
    ours, theirs, says = _divide(argv, own, torchrun)
    options = _options(ours, *_torchruns(theirs, torchrun), tuple(says))
    asks = asks_cluster and options.trials != 0
    return _with_place(options, given_to_torchrun(theirs)) if asks else options


def _with_place(options: Options, given: dict[str, str]) -> Options:
    """The options with what a cluster tells of this node's place, where the user has not said it. UsageError."""
    settled = settle(options.torchrun, given, os.environ)
    says = (*options.says, settled.says) if settled.says else options.says
    return replace(options, ranks_given=options.ranks_given or settled.ranks_told, says=says)


def given_to_torchrun(words: Sequence[str]) -> dict[str, str]:
    """Field of torchrun's options → the option among `words`, or the variable, that sets it."""
    parser = _strict_torchrun_parser()
    named = [action for action in parser._actions if action.option_strings]
    variables = {action.dest: f"PET_{action.dest.upper()}" for action in named}
    for action in named:
        action.default = argparse.SUPPRESS
    of_words = vars(parser.parse_args(words))
    set_here = {field: variable for field, variable in variables.items() if variable in os.environ}
    return set_here | {field: _spelled(field) for field in of_words if field in variables}


def given_words(torchrun: argparse.Namespace, but: Collection[str]) -> list[str]:
    """The options of torchrun that are not as they are where nobody gives them, as words; without the fields `but`.

    What a variable PET_* gives stays in the environment, and is no word.
    """
    words = []
    for action in torchrun_parser()._actions:
        value = getattr(torchrun, action.dest, action.default)
        if not action.option_strings or action.dest in but or str(value) == str(action.default):
            continue
        option = next(one for one in action.option_strings if one.startswith("--"))
        if isinstance(value, list):  # a comma in it is written twice
            value = ",".join(one.replace(",", ",,") for one in value)
        words.append(option if action.nargs == 0 else f"{option}={value}")
    return words


def parse_with_switch(argv: Sequence[str], switch: str) -> tuple[Options, bool]:
    """What `parse` returns, and whether `switch`, which no training job has, stands before the script."""
    others = [(place, word) for place, word in enumerate(argv) if word != switch]
    at, _ = _find_script([word for _, word in others], _strict_torchrun_parser())
    script_at = others[at][0]
    rest = [word for place, word in enumerate(argv) if word != switch or place > script_at]
    return parse(rest), switch in argv[:script_at]


def parse_apart(ours: Sequence[str], torchrun: Sequence[str] | argparse.Namespace) -> Options:
    """Understand torchrun's words, or what its parser has made of them, with autoddp's own options beside them.

    No word of `torchrun` is autoddp's. UsageError as for `parse`.
    """
    if not isinstance(torchrun, argparse.Namespace):
        return _options(ours, *_torchruns(torchrun, _strict_torchrun_parser()))
    understood = argparse.Namespace(**vars(torchrun))
    for action in torchrun_parser()._actions:  # a program that fills in the namespace may leave its numbers as text
        value = getattr(understood, action.dest, None)
        if action.type is int and isinstance(value, str):
            setattr(understood, action.dest, int(value))
    if getattr(understood, "run_path", False):
        understood.no_python = False  # as in `_torchruns`
    return _options(ours, understood, True)


def leading_own(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """The options of autoddp at the beginning, and the words from the first other one on; UsageError for a bad one."""
    end, places = len(argv), _without_own(argv, lenient=True)[2]
    ours, rest = list(argv[: min(places, default=end)]), list(argv[min(places, default=end) :])
    if rest and rest[0] != "--" and rest[0].startswith("-"):
        meant = did_you_mean(rest[0], option_names(own_parser()))
        torchruns = "torchrun's stand in the command, see autoddp wrap --help"
        raise UsageError(f"{rest[0]}: no option of autoddp{meant}; {torchruns}")
    _options(_without_own(ours)[0], argparse.Namespace(), True)
    return ours, rest[1:] if rest[:1] == ["--"] else rest


def _strict_torchrun_parser() -> argparse.ArgumentParser:
    torchrun = torchrun_parser()
    torchrun.error = _refuse  # type: ignore[method-assign]
    # argparse's own method ignores that the help cannot be written.
    torchrun.print_help = lambda *_: show_exactly(help_text())  # type: ignore[method-assign]
    return torchrun


def _torchruns(words: Sequence[str], torchrun: argparse.ArgumentParser) -> tuple[argparse.Namespace, bool]:
    """What torchrun's parser makes of these words, and whether they, or a variable, give a number of ranks."""
    usual_ranks = torchrun.get_default("nproc_per_node")
    if "PET_NPROC_PER_NODE" not in os.environ:
        torchrun.set_defaults(nproc_per_node=None)
    understood = torchrun.parse_args(words)
    understood.no_python = understood.no_python and not understood.run_path  # which takes precedence
    ranks_given = understood.nproc_per_node is not None
    if not ranks_given:
        understood.nproc_per_node = usual_ranks
    return understood, ranks_given


def _options(
    ours: Sequence[str], torchrun: argparse.Namespace, ranks_given: bool, says: tuple[str, ...] = ()
) -> Options:
    words, variables = of_words(ours), _from_environment()
    given = {**variables, **words}
    folders = usual_folders()
    rest = {"torchrun": torchrun, "ranks_given": ranks_given, "says": says, "folders": folders}
    is_known = "training_script" in torchrun  # `autoddp wrap` reads its options before the job that it starts
    rest["is_standard_input"] = is_known and is_standard_input(torchrun)
    named = {name: f"AUTODDP_{name.upper()}" for name in variables}
    return Options(**{"output": folders.output, **given, **rest}, given=frozenset(words), variables=named)


def of_words(words: Sequence[str]) -> dict[str, Any]:
    """Field of the options → value, for words that are all autoddp's own. UsageError for a bad one."""
    found = vars(own_parser().parse_args(words))
    return found | ({"allow": Rung(found["allow"])} if "allow" in found else {})


RESERVED = ("AUTODDP_LOG", "AUTODDP_TUNING", "AUTODDP_WRAP")
"""Variables of autoddp that are no options."""
_INTERNAL = re.compile("AUTODDP_(WORKER_.*|RECORDS_CALLS|USERS_PYTHONPATH|NAMES_ERRORS_FOR|CLOCK_AHEAD|NO_LANDLOCK)")
_ON, _OFF = ("1", "true", "yes", "on"), ("", "0", "false", "no", "off")


def _from_environment() -> dict[str, Any]:
    """The options that variables such as AUTODDP_ALLOW=exact set; the command line overrules them. UsageError."""
    options = {f"AUTODDP_{option[2:].replace('-', '_').upper()}": option for option in _DECLARED}
    words = []
    for name, value in os.environ.items():
        if not name.startswith("AUTODDP_") or name in RESERVED or _INTERNAL.fullmatch(name):
            continue
        if name not in options:
            raise UsageError(f"{name}: no variable of autoddp{did_you_mean(name, options)}; unset it")
        if _takes_value(options[name]):
            words.append(f"{options[name]}={value}")
        elif value.lower() in _ON:
            words.append(options[name])
        elif value.lower() not in _OFF:
            raise UsageError(f"{name}={value}: must be 1 or 0")
    try:
        return of_words(words)
    except UsageError as error:
        raise UsageError(f"{error} (from the environment: see `env | grep AUTODDP_`)") from None


_OF_OTHER_LAUNCHERS = {
    "--nproc-per-node": "g gpus gpus-per-node n ngpus np nproc ntasks-per-node num-gpus num-processes num-workers",
    "--nnodes": "N nodes num-machines num-nodes",
    "--node-rank": "machine-rank",
    "--master-addr": "main-process-ip master",
    "--master-port": "main-process-port port",
}
"""Our option → what mpirun, accelerate, deepspeed, srun and Lightning call it."""


def meant_by(unknown: str, known: Collection[str]) -> str:
    """` (did you mean '--nproc-per-node'?)`: what another launcher calls so, else the nearest option; "" if none."""
    named = unknown.partition("=")[0].lstrip("-").replace("_", "-").rstrip("0123456789")
    ours = next((ours for ours, others in _OF_OTHER_LAUNCHERS.items() if named in others.split()), "")
    return f" (did you mean {ours!r}?)" if ours else did_you_mean(unknown, known)


class _NoScript(UsageError):
    """No word is the script's name."""


def _refuse(message: str) -> NoReturn:
    known = option_names(torchrun_parser(), own_parser())
    prefix, _, words = message.partition("unrecognized arguments: ")
    if words and not prefix:
        unknown = next((word for word in words.split() if word.startswith("-")), words)
        if unknown.partition("=")[0] in ("--use-env", "--use_env"):
            raise UsageError(
                f"{unknown}: an option of torch.distributed.launch. Under autoddp, as under torchrun, each process "
                "always finds its local rank in the environment variable LOCAL_RANK: leave the option out"
            )
        raise UsageError(f"unknown option {unknown}{meant_by(unknown, known)}; autoddp --help-all lists all")
    if "training_script" in message:
        raise _NoScript("no script given: autoddp [options] train.py [its arguments]; autoddp --help-all lists all")
    if message.startswith("ambiguous option: "):  # argparse looks at every word, also at those behind the script
        word, _, several = message.removeprefix("ambiguous option: ").partition(" could match ")
        raise UsageError(
            f"{word} may stand for several options ({several}): write it out; if it is the script's, write -- before "
            "the script: autoddp [options] -- train.py [its arguments]"
        )
    raise UsageError(message.replace("argument ", "", 1))


# Dividing the words between autoddp, torchrun and the script


def _divide(
    argv: Sequence[str], own: argparse.ArgumentParser, torchrun: argparse.ArgumentParser
) -> tuple[list[str], list[str], list[str]]:
    """The words for autoddp's own parser, those for torchrun's, and a line for the user about each doubtful one.

    torchrun's are its options, the script and the script's words. UsageError where an option of autoddp has no value.
    """
    script_at, understood = _find_script(argv, torchrun)
    ours, rest, _ = _without_own(argv[:script_at])
    script, after = argv[script_at], list(argv[script_at + 1 :])
    theirs, says = [*rest, script], []
    end = 0 if "--" in rest else _position(after, "--")
    source = ScriptSource(understood)
    is_torchrun = vars(own.parse_args(ours)).get("trials") == 0
    takes = {} if is_torchrun else TAKEN_AFTER_THE_SCRIPT
    look_alikes = {option for option in option_names(torchrun, own) if option.startswith("--")} - {"--help"}
    passed: list[str] = []
    name = script if understood.module else Path(script).name
    position = 0
    while position < end:
        option, has_value, value = after[position].partition("=")
        following = [value] if has_value else after[position + 1 : min(position + 2, end)]
        words = after[position : position + (1 if has_value else 1 + len(following))]
        fits = option in takes and following and takes[option].fullmatch(following[0])
        if fits and not source.may_have(option):
            ours += words
            says.append(f"{shlex.join(words)} is taken by autoddp; for {name} put -- before the script")
            position += len(words)
            continue
        if fits:
            why = f"whose source has {option}" if source.readable else "whose options are not known"
            says.append(f"{shlex.join(words)} is passed to {name}, {why}; for autoddp write it before the script")
        elif option in look_alikes:
            passed.append(option)
        theirs.append(after[position])
        position += 1
    return ours, theirs + after[end:], says + _hints(name, passed, after, source)


def _hints(name: str, passed: Collection[str], after: Sequence[str], source: ScriptSource) -> list[str]:
    says = []
    if passed:
        found = list(dict.fromkeys(passed))
        are, them = ("are", "them") if len(found) > 1 else ("is", "it")
        says.append(f"{', '.join(found)} {are} passed to {name}; for autoddp write {them} before the script")
    wanted = source.wants_local_rank()
    if wanted and not any(re.match("--local[-_]rank(=|$)", word) for word in after):
        says.append(
            f"{name} has the option {wanted}, which torch.distributed.launch passed and torchrun does not: "
            "each process finds its local rank in the environment variable LOCAL_RANK"
        )
    return says


def _find_script(argv: Sequence[str], torchrun: argparse.ArgumentParser) -> tuple[int, argparse.Namespace]:
    """The position of the script's name in `argv`, and what torchrun's parser makes of its own words."""
    _, rest, places = _without_own(argv, lenient=True)
    try:
        understood = torchrun.parse_args(rest)
    except _NoScript:
        of_words(_without_own(argv)[0])  # `--trials train.py`: a value is missing, and the script was taken for it
        raise
    at = len(rest) - len(understood.training_script_args) - 1
    if rest[at] == "--":  # argparse swallows one that follows the script at once
        at -= 1
    return places[at], understood


def _without_own(argv: Sequence[str], lenient: bool = False) -> tuple[list[str], list[str], list[int]]:
    """autoddp's words up to a `--`, all others, and the positions in `argv` of those others."""
    own: list[str] = []
    rest: list[str] = []
    places: list[int] = []
    position, end = 0, _position(argv, "--")
    while position < len(argv):
        word = argv[position]
        option, has_value, _ = word.partition("=")
        if position >= end or option not in _DECLARED:
            rest.append(word)
            places.append(position)
            position += 1
            continue
        wants_value = _takes_value(option) and not has_value
        found = list(argv[position : position + (2 if wants_value else 1)])
        if wants_value and (len(found) < 2 or found[1].startswith("--")):
            if not lenient:
                raise UsageError(f"{option}: needs a value: {_rule(option)}")
            found = found[:1]
        own += found
        position += len(found)
    return own, rest, places


def _position(words: Sequence[str], word: str) -> int:
    """The position at which `word` stands first; the number of words where it does not."""
    return list(words).index(word) if word in words else len(words)
