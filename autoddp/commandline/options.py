"""The options of autoddp: the field of each one, its line in `--help`, and the rule for its value."""

from __future__ import annotations

import argparse
import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple

from autoddp.errors import UsageError
from autoddp.isolation import Level
from autoddp.knobs import GRADIENT_RUNGS, LIMITS, Rung
from autoddp.runs.usual_folders import OUTPUT, Folders
from autoddp.settings import Objective, StudySettings
from autoddp.units import Allowance, seconds

_LARGEST_SEED = 2**32 - 1  # numpy's, which Optuna's samplers draw with
_LARGEST = 2**31 - 1  # of any other number; a recipe holds some of them in 64 bits
# A name of a file has 255 bytes at most, and ".12.autoddp.toml.12345678.toml" may stand behind these.
_LONGEST_NAME = 200  # bytes of the script's folder and name together; else the name alone is taken
_LONGEST_STEM = 220  # bytes of the name alone; what is longer is cut
OF_A_DIAGNOSIS = frozenset(
    (
        "budget cuda_graphs diagnose_budget dry_run isolation keep_runs no_orphans output scratch_limit trace verbose"
    ).split()
)
"""Fields of the options that `autoddp diagnose` takes too. All others are for tuning and launching."""
_OF_TUNING = frozenset("all_trials cuda_graphs fresh job_steps local_buffers recompile static_graph trace".split())
"""Fields that only say what tuning tries or writes: a launch with a saved recipe cannot follow them."""
_NOT_OF_AN_OBJECTIVE = (_OF_TUNING - {"all_trials"}) | set(
    "accumulate_up_to diagnose_budget lossy_limit near_limit watch".split()
)
"""Fields that a study of a script without DDP cannot follow: it has no DDP settings and no trace, and begins anew."""
_NEAR, _LOSSY = LIMITS[Rung.NEAR], LIMITS[Rung.LOSSY]


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
    """Seconds. None: not given; see `attempts.job.deadline`."""
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
        return [spelled(name) for name in sorted(self.given - OF_A_DIAGNOSIS)]

    @property
    def only_of_tuning(self) -> list[str]:
        """Options that were given and have no meaning for a launch with a saved recipe."""
        return [spelled(name) for name in sorted(self.given & _OF_TUNING)]

    @property
    def not_of_an_objective(self) -> list[str]:
        """Options that were given and have no meaning where a script without DDP is tuned."""
        return [spelled(name) for name in sorted(self.given & _NOT_OF_AN_OBJECTIVE)]

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
        """What goes elsewhere, and which folder cannot be written; "" if nothing does."""
        says = []
        if self.output == self.folders.output != OUTPUT:
            says.append(f"run folders go to {self.output} (--output names another place)")
        if self.recipe is None and self.folders.recipes != Path():
            says.append(f"the recipe goes to {self.folders.recipes} (--recipe names another file)")
        # In a folder that several users share, only that for runs may be another user's.
        which = f"the folder {OUTPUT}" if self.folders.recipes == Path() else "the current folder"
        return f"{which} cannot be written: {'; '.join(says)}" if says else ""


def spelled(name: str) -> str:
    """The option that sets the field of this name."""
    return f"--{name.replace('_', '-')}"


DECLARED = {spelled(one.name): one.metadata for one in fields(Options) if one.metadata}
"""autoddp's own options."""


def takes_value(option: str) -> bool:
    return "type" in DECLARED[option]


def rule(option: str) -> str:
    """What the value of an option must be, with an example."""
    declared = DECLARED[option]
    rule = declared["type"].rule
    return f"{rule}, e.g. {option} {declared['example']}" if rule else f"{option} {declared['metavar']}"


def converted(option: str, text: str) -> Any:
    """The value of an option; UsageError with its rule for a word that breaks it."""
    kind = DECLARED[option]["type"]
    if kind is _PATH and not text:  # Path("") is the current folder, which nobody has named
        raise UsageError(f"{option}: its value is empty: give {rule(option)}, or leave it out")
    try:
        return kind.convert(text)
    except ValueError:
        raise UsageError(f"{option} {text!r}: must be {rule(option)}") from None
