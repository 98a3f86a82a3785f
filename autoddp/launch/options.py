"""The command line: torchrun's own parser, untouched, and autoddp's options beside it."""

from __future__ import annotations

import argparse
import hashlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from autoddp.errors import UsageError, did_you_mean
from autoddp.isolation import Level
from autoddp.knobs import GRADIENT_RUNGS, LIMITS, Rung
from autoddp.launch.elastic import torchrun_parser
from autoddp.launch.script_options import divide
from autoddp.launch.usual_folders import OUTPUT, Folders, usual_folders
from autoddp.units import Allowance, seconds

DEFAULT_TRIALS = 20
_LARGEST_SEED = 2**32 - 1  # numpy's, which Optuna's samplers draw with
# A name of a file has 255 bytes at most, and ".12.autoddp.toml.12345678.toml" may stand behind these.
_LONGEST_NAME = 200  # bytes of the script's folder and name together; else the name alone is taken
_LONGEST_STEM = 220  # bytes of the name alone; what is longer is cut
_LARGEST = 2**31 - 1  # of any other number; a recipe holds some of them in 64 bits
_EXAMPLES = {
    "--trials": "a whole number of 0 or more, e.g. --trials 20",
    "--allow": "exact, near or lossy, e.g. --allow near",
    "--accumulate-up-to": "a whole number of 1 or more, e.g. --accumulate-up-to 4",
    "--job-steps": "a whole number of 1 or more, e.g. --job-steps 90000",
    "--budget": "a duration, e.g. --budget 5m",
    "--near-limit": "a share above 0, e.g. --near-limit 0.02",
    "--lossy-limit": "a share above 0, e.g. --lossy-limit 0.95",
    "--watch": "a whole number of 1 or more, or off, e.g. --watch 1000",
    "--seed": f"a whole number from 0 to {_LARGEST_SEED}, e.g. --seed 0",
    "--keep-runs": "a whole number of 1 or more, e.g. --keep-runs 20",
    "--isolation": "overlay, guard or off, e.g. --isolation guard",
    "--scratch-limit": "a size such as 20G, or a share such as 20%, e.g. --scratch-limit 20G",
}

_USES = """\
  autoddp train.py --trials 20     tune on all GPUs of this host, write a recipe, launch the job with it
  autoddp train.py                 from then on: launch with that recipe at once
  autoddp --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint host0:29400 train.py --epochs 3
                                   on each of two hosts, as with torchrun

Runs a DistributedDataParallel script as torchrun does, but first finds the settings that make it fastest here:
it measures them on the running, unmodified script. `autoddp --trials 0` is torchrun.
Other commands: autoddp probe, bench, recipe; each has a --help of its own."""


@dataclass(frozen=True)
class Request:
    """One command line, understood."""

    torchrun: argparse.Namespace
    """What torchrun's parser makes of its part."""
    ranks_given: bool = True
    """Whether the user has said how many ranks each host starts."""
    trials: int | None = None
    """None: not given."""
    recipe: Path | None = None
    allow: Rung | None = None
    """None: not given; tuning then allows near, a saved recipe is launched as it is."""
    accumulate_up_to: int | None = None
    """Steps of the script that may become one. None: not given, as with `allow`."""
    cuda_graphs: bool = False
    recompile: bool = False
    job_steps: int | None = None
    """Optimizer steps of the real job, if the user knows."""
    budget: float | None = None
    """Seconds from the command to the launch of the real job. None: not given."""
    near_limit: float = LIMITS[Rung.NEAR]
    lossy_limit: float = LIMITS[Rung.LOSSY]
    """Largest gradient errors, see `knobs.fidelity`."""
    watch: int | None = None
    """Reductions between two looks at a near or lossy hook in the real job; 0: none, None: as its cost allows."""
    tune_only: bool = False
    seed: int = 0
    output: Path = OUTPUT
    folders: Folders = field(default_factory=Folders)
    """Where files go that the user has not named."""
    keep_runs: int = 20
    """Run folders that stay in `output`, this run's own counted."""
    isolation: Level | None = None
    """None: not given; the best that the host allows."""
    scratch_limit: Allowance | None = None
    """What the script's writes may take while it is being tuned. None: not given; 20 % of what is free there."""
    fresh: bool = False
    """Whether a study that was cut off is left alone."""
    no_orphans: bool = False
    """Whether all that this process starts ends with it; see `launch.supervisor`."""
    dry_run: bool = False
    force: bool = False
    says: tuple[str, ...] = ()
    """Lines for the user about words that another of the three, autoddp, torchrun or the script, could have got."""

    @property
    def script(self) -> str:
        """The script, module or program."""
        return str(self.torchrun.training_script)

    @property
    def recipe_path(self) -> Path:
        """Where the recipe will be: as given, or in the folder for recipes, which is the current one if it takes files.

        See `launch.recipes` for the names of further recipes of the script.
        """
        return self.recipe or self.folders.recipes / self.recipe_name

    @property
    def recipe_name(self) -> str:
        """After the script and its folder."""
        if self.torchrun.module:
            return self.older_recipe_name
        folder = "" if self._is_program else Path(os.path.abspath(self.script)).parent.name
        named = f"{folder}.{Path(self.script).stem}" if folder else Path(self.script).stem
        return f"{named}.autoddp.toml" if len(os.fsencode(named)) <= _LONGEST_NAME else self.older_recipe_name

    @property
    def older_recipe_name(self) -> str:
        """What earlier versions called it, after the script alone."""
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

    @property
    def _is_program(self) -> bool:
        """Whether it is found along PATH, as `bash` is, so that the current folder says nothing of it."""
        return bool(self.torchrun.no_python) and not os.path.exists(self.script)


def own_parser() -> argparse.ArgumentParser:
    """autoddp's own options, and nothing of torchrun's."""
    parser = argparse.ArgumentParser(prog="autoddp", add_help=False, allow_abbrev=False)
    parser.error = _refuse  # type: ignore[method-assign]
    add = parser.add_argument_group("autoddp").add_argument
    add(
        "--trials",
        type=_whole("--trials", 0),
        metavar="N",
        help=f"how many configurations to measure ({DEFAULT_TRIALS}); 0: be torchrun",
    )
    add("--recipe", type=Path, metavar="FILE", help="launch with this recipe; with --trials: write it to this file")
    add(
        "--allow", choices=[r.value for r in GRADIENT_RUNGS], help="how far what is launched may change training (near)"
    )
    steps = _whole("--accumulate-up-to", 1)
    add("--accumulate-up-to", type=steps, metavar="N", help="steps of the script that may become one (1)")
    add("--cuda-graphs", action="store_true", help="try CUDA graphs too (new: not yet the default)")
    add("--recompile", action="store_true", help="try what makes torch.compile compile the model again")
    steps = _whole("--job-steps", 1)
    add("--job-steps", type=steps, metavar="N", help="how long the job is: PowerSGD begins after a tenth of it (1000)")
    add(
        "--budget",
        type=_checked("--budget", _duration),
        metavar="TIME",
        help="limit of the time from the command to the launch (5m from the first step)",
    )
    near, lossy = (LIMITS[rung] for rung in (Rung.NEAR, Rung.LOSSY))
    limit = _checked("--near-limit", _above_zero)
    add("--near-limit", type=limit, default=near, metavar="X", help=f"largest gradient error of near ({near:g})")
    limit = _checked("--lossy-limit", _above_zero)
    add(
        "--lossy-limit",
        type=limit,
        default=lossy,
        metavar="X",
        help=f"largest gradient error of lossy, over some steps ({lossy:g})",
    )
    watch = _checked("--watch", _watch)
    add("--watch", type=watch, metavar="N|off", help="reductions between two looks at the gradient error in the job")
    add("--tune-only", action="store_true", help="write the recipe and stop")
    add("--seed", type=_whole("--seed", 0, _LARGEST_SEED), default=0, metavar="N", help="seed of the search (0)")
    add(
        "--output",
        type=Path,
        metavar="DIR",
        help="folder for logs and summary.json (.autoddp/)",
    )
    add(
        "--keep-runs",
        type=_whole("--keep-runs", 1),
        default=20,
        metavar="N",
        help="how many runs stay in that folder (20)",
    )
    levels = "|".join(level.value for level in Level)
    add("--isolation", type=_checked("--isolation", Level), metavar=levels, help="how your files are kept from changes")
    limit = _checked("--scratch-limit", Allowance.parse)
    add("--scratch-limit", type=limit, metavar="SIZE", help="disk for what the script writes in tuning (20%% of free)")
    add("--fresh", action="store_true", help="begin a new study, also where one of the same job was cut off")
    add("--no-orphans", action="store_true", help="end all that the job has started as soon as the launcher has gone")
    add("--dry-run", action="store_true", help="print what would be run")
    add("--force", action="store_true", help="launch a recipe made for another machine or other inputs")
    return parser


def option_names(*parsers: argparse.ArgumentParser) -> list[str]:
    """Every spelling of every option."""
    return [option for parser in parsers for option in parser._option_string_actions]


def help_text() -> str:
    """Three uses, autoddp's options, then torchrun's."""
    parser = argparse.ArgumentParser(
        prog="autoddp",
        usage="autoddp [options of autoddp and torchrun] train.py [its arguments]",
        description=_USES,
        add_help=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parts = (
        ("autoddp's options (before the script; --trials N and --recipe FILE.toml also after it)", own_parser()),
        ("torchrun's options (before the script)", torchrun_parser()),
    )
    for title, part in parts:
        group = parser.add_argument_group(title)
        for action in part._actions:
            if action.option_strings:
                group._add_action(action)
    return parser.format_help()


def parse(argv: Sequence[str]) -> Request:
    """Understand a command line; UsageError, one line, for one that cannot be."""
    own = own_parser()
    torchrun = torchrun_parser()
    torchrun.error = _refuse  # type: ignore[method-assign]
    torchrun.format_help = help_text  # type: ignore[method-assign]
    values = {
        option: "" if action.nargs == 0 else _EXAMPLES.get(option, f"{option} {action.metavar}")
        for action in own._actions
        for option in action.option_strings
    }
    look_alikes = {option for option in option_names(torchrun, own) if option.startswith("--")} - {"--help"}
    words = divide(
        argv, values, torchrun.parse_args, lambda own_words: own.parse_args(own_words).trials == 0, look_alikes
    )
    found = own.parse_args(words.own)
    if "PET_NPROC_PER_NODE" not in os.environ:
        torchrun.set_defaults(nproc_per_node=None)
    understood = torchrun.parse_args(words.torchrun)
    ranks_given = understood.nproc_per_node is not None
    if not ranks_given:
        understood.nproc_per_node = torchrun_parser().get_default("nproc_per_node")
    folders = usual_folders()
    return Request(
        torchrun=understood,
        ranks_given=ranks_given,
        says=tuple(words.says),
        folders=folders,
        **{
            **vars(found),
            "allow": Rung(found.allow) if found.allow else None,
            "output": found.output or folders.output,
        },
    )


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
        raise UsageError(f"unknown option {unknown}{did_you_mean(unknown, known)}; autoddp --help lists all")
    if "training_script" in message:
        raise UsageError("no script given: autoddp [options] train.py [its arguments]; autoddp --help lists all")
    raise UsageError(message.replace("argument ", "", 1))


def _checked(name: str, convert: Callable[[str], Any]) -> Callable[[str], Any]:
    """A converter for argparse whose error says the rule and shows an example."""

    def converted(text: str) -> Any:
        try:
            return convert(text)
        except ValueError:
            raise UsageError(f"{name} {text!r}: must be {_EXAMPLES[name]}") from None

    return converted


def _duration(text: str) -> float:
    if not 0 < seconds(text) <= _LARGEST:
        raise ValueError(text)
    return seconds(text)


def _watch(text: str) -> int:
    if text != "off" and not 1 <= int(text) <= _LARGEST:
        raise ValueError(text)
    return 0 if text == "off" else int(text)


def _above_zero(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise ValueError(text)
    return value


def _whole(name: str, low: int, high: int = _LARGEST) -> Callable[[str], int]:
    def convert(text: str) -> int:
        if not low <= int(text) <= high:
            raise ValueError(text)
        return int(text)

    return _checked(name, convert)
