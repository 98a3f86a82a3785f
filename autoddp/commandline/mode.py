"""What a command line amounts to: launch as torchrun would, launch with a recipe, or tune first."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from autoddp.commandline.local_fingerprint import known_here, not_here
from autoddp.commandline.options import Options
from autoddp.commandline.rank_count import idle_gpus, one_rank, set_ranks
from autoddp.commandline.saved_recipes import (
    Note,
    arguments_digest,
    found_recipes,
    hidden_recipes,
    preference,
    recipe_may_be_anothers,
    script_names,
    tuned_for_objective,
)
from autoddp.commandline.watching import watch_plan
from autoddp.cpus import usable_cpus
from autoddp.errors import NotTuned, RecipeError, UnfitRecipe, UsageError
from autoddp.isolation import Level
from autoddp.knobs import AS_WRITTEN, KNOBS, LIMITS, Configuration, Rung
from autoddp.knobs.computing import THREADS
from autoddp.knobs.micro_batches import larger_batch
from autoddp.recipe import LadderEntry, Recipe, best_allowed, differences, load, require_fit
from autoddp.torchrun.options import (
    FORKED,
    forks_ranks,
    node_range,
    nodes_and_ranks,
    processes_per_node,
    torchrun_parser,
)
from autoddp.torchrun.surroundings import FRESH_STORE
from autoddp.units import percent

_OF_A_JOB = (
    *("log_dir", "redirects", "tee", "local_ranks_filter", "max_restarts", "monitor_interval"),
    *("logs_specs", "event_log_handler", "duplicate_stdout_filters", "duplicate_stderr_filters"),
    "log_line_prefix_template",  # since torch 2.15
)
"""Fields of torchrun's options that have no effect on what `torchrun.jobs.run_tuning_job` starts."""
_OF_A_RECIPE = ("near_limit", "lossy_limit")
"""Options beside --watch and --tune-only that must be the same on all hosts which launch with a recipe."""
_TRIES_MORE = ("cuda_graphs", "recompile", "local_buffers", "static_graph")
"""Options by which a study tries more."""
_OPEN_FILES = "/proc/self/fd"
"""By it an attempt closes what it must not have; a process and its children are found beside it."""
_OF_A_STUDY = (*_OF_A_RECIPE, "diagnose_budget", *_TRIES_MORE, "objective", "force")
"""Options that must be the same on all hosts which tune."""


@dataclass(frozen=True)
class Mode:
    """What is about to be done."""

    tune: bool
    """Whether a study comes first; without one, without a recipe and without `bypass` it is a launch as torchrun's."""
    several_nodes: bool
    recipe: Recipe | None = None
    """What the job is launched with; None: nothing, or what the study finds."""
    path: Path | None = None
    """The recipe's file."""
    chosen: tuple[Rung, int] | None = None
    """Which entry of a saved recipe's ladder is asked for: its rung, and how many steps it makes one.

    None: the entry that the recipe launches.
    """
    bypass: bool = False
    """A world of one: where DDP's process group has one rank too, it has nothing to reduce."""
    notes: bool = False
    """Whether a job that turns out not to be the recipe's is noted, so that the next launch tunes again."""
    says: str = ""
    """One line for the user."""
    own_ranks: bool = False
    """Whether tuning has seen that the script starts its ranks by itself, without DDP."""
    is_unfit: bool = False
    """On several hosts: whether the job is launched as written because no recipe fits here; one may fit elsewhere."""
    ranks: str = ""
    """Another about the number of ranks, where the user has given none."""

    @property
    def as_torchrun(self) -> bool:
        """Whether autoddp does only what torchrun would do."""
        return not self.tune and self.recipe is None and not self.bypass and not self.is_unfit

    @property
    def as_written(self) -> Mode:
        """This mode without a recipe and without tuning."""
        return replace(self, tune=False, recipe=None, path=None, chosen=None, notes=False)

    @property
    def configuration(self) -> Configuration:
        """What the workers will be given."""
        if self.recipe is None:
            return AS_WRITTEN
        return self.recipe.configuration if self.chosen is None else _of_ladder(self.recipe, *self.chosen)

    @property
    def variables(self) -> dict[str, str]:
        """What the workers' environment gets: the recipe's, or another rung's in the place of what was launched."""
        if self.recipe is None:
            return dict(FRESH_STORE) if self.own_ranks else {}
        if self.configuration == self.recipe.configuration:
            return self.recipe.env | self.configuration.variables
        knobs = {knob.variable for knob in KNOBS}
        others = {name: value for name, value in self.recipe.env.items() if name not in knobs}
        return others | self.configuration.variables

    def waits_for_hosts(self, options: Options) -> bool:
        """Whether only the hosts that come tell if this is the recipe's world.

        Under a range their number is open; and where hosts have different numbers of ranks, each knows its own alone.
        """
        fewest, most = node_range(options.torchrun)
        return self.recipe is not None and (fewest != most or bool(self.recipe.fits.ranks_of_nodes))

    def digest(self, options: Options) -> str:
        """Equal on two nodes if they are about to do the same. Not for a launch as torchrun's."""
        # What ranks do must be the same on all, and so must be whether there will be a job.
        watched = f"{options.watch} {options.near_limit} {options.lossy_limit} {options.tune_only}"
        is_real = options.isolation is Level.OFF  # all hosts would write to the user's files then
        if options.diagnose_only:
            return f"diagnose {options.diagnose_budget} {is_real}"
        if self.recipe is not None:
            # What is decided by the hosts that come must be decided alike on all, see `for_hosts`.
            fits, waits = self.recipe.fits, self.waits_for_hosts(options)
            decides = f" {fits.world_size} {fits.nodes} {options.force}" if waits else ""
            # One rank that compares inputs, or gradients at another reduction, would wait for those that do not.
            compared = () if options.force or not fits.inputs else (fits.backend, *fits.inputs)
            job = f"{fits.parameters_digest} {compared} {watch_plan(options, self.recipe, self.configuration)!r}"
            return f"launch {self.configuration!r} {sorted(self.variables.items())} {watched} {job}{decides}"
        if not self.tune:
            return f"as written {sorted(self.variables.items())}"
        study = options.study
        more = f"{study.diagnose_budget} {[getattr(options, name) for name in _TRIES_MORE]}"
        aim = study.objective.text if study.objective is not None else ""
        return f"tune {study.trials} {study.allowed} {more} {watched} {options.force} {is_real} {aim}"

    def reads(self, options: Options) -> str:
        """What is about to be done, in a few words for people: two plans whose digests differ read differently."""
        off = ", --isolation off" if options.isolation is Level.OFF else ""
        if options.diagnose_only:
            return f"diagnosing{_given(options, ('diagnose_budget',))}{off}"
        if self.recipe is None and not self.tune:
            return "no recipe that fits there, launching as written"
        found = f"no recipe, tuning with {options.study.trials} trials, up to rung {options.study.allowed}"
        if self.recipe is not None:
            set_to = "".join(f", {name}={value}" for name, value in sorted(self.variables.items()))
            found = f"a recipe with {self.configuration}{set_to}{self._of_job(options)}"
        names = _OF_A_RECIPE if self.recipe is not None else _OF_A_STUDY
        if self.recipe is not None and self.waits_for_hosts(options):
            found += f", made for {self.recipe.fits.world_size} ranks on {self.recipe.fits.nodes} nodes"
        if self.recipe is not None and (self.waits_for_hosts(options) or self.recipe.fits.inputs):
            names = (*names, "force")
        watched = "" if options.watch is None else f", --watch {options.watch or 'off'}"
        more = _given(options, names) + (off if self.tune else "")
        return f"{found}{watched}{more}{', --tune-only' if options.tune_only else ''}"

    def _of_job(self, options: Options) -> str:
        """A clause: of which job the recipe is, and how often the ranks compare gradients because of it."""
        assert self.recipe is not None
        plan = watch_plan(options, self.recipe, self.configuration)
        compared = "" if plan is None else f", comparing gradients every {plan.every} reductions"
        return f" (of job {self.recipe.fits.digest}{compared})"


def _of_ladder(recipe: Recipe, rung: Rung, accumulate_up_to: int) -> Configuration:
    """What a study would have launched for a user who allows this; what was written by hand stays, if it is allowed."""
    if _is_by_hand(recipe) and recipe.configuration.allowed_by(rung, accumulate_up_to):
        return recipe.configuration
    best = best_allowed(recipe.ladder, rung, accumulate_up_to)
    return best.configuration if best else AS_WRITTEN


def _is_by_hand(recipe: Recipe) -> bool:
    """Whether no study would have launched this: it is not in the ladder, or not surely faster."""
    launched = next((entry for entry in recipe.ladder if _launches(recipe, entry)), None)
    if launched is None:
        return bool(recipe.configuration)
    own = launched.configuration
    return best_allowed(recipe.ladder, own.gradient_rung, own.steps_per_update) is not launched


def _launches(recipe: Recipe, entry: LadderEntry) -> bool:
    """Whether this entry is what the recipe launches. Variables stand in [env], and not under [configuration]."""
    variables = entry.configuration.variables.items()
    return entry.configuration.without_variables == recipe.configuration and variables <= recipe.env.items()


def _given(options: Options, names: Sequence[str]) -> str:
    """The options among these that have another value than the usual one, as they are spelled."""
    values = {name: getattr(options, name) for name in names}
    words = {name: "" if value is True else f" {getattr(value, 'text', value)}" for name, value in values.items()}
    unusual = [name for name, value in values.items() if value != getattr(Options, name)]
    return "".join(f", --{name.replace('_', '-')}{words[name]}" for name in unusual)


def choose(options: Options) -> Mode:
    """The mode for a command line. AutoddpError for a recipe that cannot be used.

    Where the user has given no number of ranks it is set, because a recipe is compared with it.
    """
    ranks = "" if options.ranks_given else _settle_ranks(options)
    mode = replace(_chosen_mode(options), ranks=ranks)
    if forks_ranks(options.torchrun) and not mode.as_torchrun:
        if options.tune_only:
            raise NotTuned(f"{FORKED}: nothing was tuned; use --start-method spawn")
        without = "launching as torchrun would, without tuning and without a recipe; --start-method spawn has both"
        return _by_torchrun(mode, options, f"{FORKED}: {without}")
    if mode.recipe is not None:
        return replace(mode, says=_says_of_launch(mode, options))
    if options.objective is not None and mode.tune and (left_out := options.not_of_an_objective):
        why = "which tunes what a process reads when it starts"
        line = f"{', '.join(left_out)} {'have' if left_out[1:] else 'has'} no effect with --objective, {why}"
        mode = replace(mode, says="; ".join(filter(None, (mode.says, line))))
    why, mend = _why_not_started(options) if mode.tune else ("", "")
    if not why:
        return mode
    if options.tune_only:
        raise NotTuned(f"{why}: nothing was tuned; {mend}")
    return _by_torchrun(mode, options, f"{why}: launching as torchrun would, without tuning (to tune: {mend})")


def _by_torchrun(mode: Mode, options: Options, says: str) -> Mode:
    """A launch as torchrun's, also in the number of ranks where the user has given none.

    Nothing tells that the script shares its work: each of several ranks might do all of it. Of a pipe, one rank alone
    gets the script.
    """
    if not options.ranks_given:
        options.torchrun.nproc_per_node = "1"
        mode = replace(mode, ranks=idle_gpus())
    return replace(mode.as_written, bypass=False, is_unfit=False, says=says)


def _says_of_launch(mode: Mode, options: Options) -> str:
    """The line of a launch with a saved recipe, also about what was asked for and only tuning would do."""
    again = "--trials 20 tunes again"
    if options.tune_only:
        return f"recipe {mode.path} is there: nothing is tuned, and under --tune-only no job is started; {again}"
    recipe, steps = mode.recipe, options.accumulate_up_to or 1
    assert recipe is not None
    unmeasured = steps > 1 and mode.configuration.steps_per_update == 1
    unmeasured = unmeasured and not any(entry.rung is Rung.BATCH for entry in recipe.ladder)
    left_out = [*options.only_of_tuning, *(["--accumulate-up-to"] if unmeasured else [])]
    if not left_out:
        return mode.says
    return f"{mode.says}; {', '.join(left_out)} {'are' if left_out[1:] else 'is'} for tuning, and left out: {again}"


def for_hosts(mode: Mode, options: Options, nodes: int, ranks: int) -> Mode:
    """The mode with a recipe once all hosts have come: how many they are, and what each starts, is known only then.

    Made for another number of nodes or ranks, a recipe that changes training is not used, except under --force.
    """
    unlike = differences(mode.recipe.fits, nodes=nodes, world_size=ranks) if mode.recipe is not None else []
    if not unlike:
        return mode
    what = f"{mode.path}: made for another job: {'; '.join(unlike)}"
    if not mode.waits_for_hosts(options):  # some host uses --force, or a recipe of its own with the same settings
        why = "of --force" if options.force else "each host is about to do so"
        return replace(mode, says=f"warning: {what}; it is used all the same, because {why}")
    rung, again = mode.configuration.rung, _tunes_again(mode, options, "; ".join(unlike))
    if rung is Rung.EXACT or options.force:
        why = "" if rung is not Rung.EXACT else "; it changes no gradients, and is used all the same"
        return replace(mode, says=f"{what}{why or '; it is used because of --force'}{again}")
    says = f"warning: {what}; it is on the {rung.value} rung: launching as written; --force launches it all the same"
    return replace(mode.as_written, says=f"{says}{again}")


def _tunes_again(mode: Mode, options: Options, unlike: str) -> str:
    """A clause: where a recipe was found, and the number of hosts is fixed, the next launch tunes again."""
    fewest, most = node_range(options.torchrun)
    if fewest != most or not mode.notes or mode.recipe is None or mode.path is None or mode.recipe.evidence.objective:
        return ""
    return "; the next launch tunes again" if Note(mode.path, options).write(options, mode.recipe, unlike) else ""


def choose_to_diagnose(options: Options) -> Mode:
    """The mode of `autoddp diagnose`. AutoddpError for what makes no sense. Sets the number of ranks, as `choose`."""
    for name in ("trials", "recipe"):
        if name in options.given:
            raise UsageError(f"diagnose: --{name} is for tuning and launching: leave it out")
    if options.trials == 0:  # by a variable; it has also kept this node's place from being looked for
        raise UsageError(f"diagnose: {options.variables['trials']}=0 makes autoddp torchrun: unset it")
    if options.diagnose_budget == 0:
        raise UsageError("diagnose: --diagnose-budget 0: nothing would be done; allow some time, e.g. 60s")
    ranks = "" if options.ranks_given else set_ranks(options.torchrun)
    _, most, _ = _size(options)
    why, mend = _why_not_started(options)
    if why:
        raise NotTuned(f"{why}: {mend}")
    return Mode(tune=True, several_nodes=most > 1, ranks=ranks, says=_without_effect(options))


def _without_effect(options: Options) -> str:
    """A line about options that only tuning or a job follows. They may stay in the command."""
    usual = torchrun_parser()
    ours = options.not_of_a_diagnosis
    theirs = [name for name in _OF_A_JOB if str(getattr(options.torchrun, name, None)) != str(usual.get_default(name))]
    given = [*ours, *(f"--{name.replace('_', '-')}" for name in theirs)]
    if not given:
        return ""
    reasons = []
    if ours:
        reasons.append("a diagnosis measures the script as written, tunes nothing and launches no job")
    if theirs:
        reasons.append("a diagnosis keeps the ranks' output in its own folder, and restarts no job")
    has = "has" if len(given) == 1 else "have"
    return f"{', '.join(given)} {has} no effect here: {'; '.join(reasons)}"


def _why_not_started(options: Options) -> tuple[str, str]:
    """Why the script cannot be started to be tuned on this host, and what to do; ("", "") where it can."""
    if _is_read_once(options.torchrun):
        return f"{options.script} is no regular file, so it can be read only once", "copy it into a file"
    if options.is_standard_input:
        return "standard input can be read only once", "copy the script into a file"
    if sys.platform == "linux" and not os.path.exists(_OPEN_FILES):
        why = "/proc is not mounted here, so nobody could find and end all that the script starts"
        return why, "mount -t proc proc /proc"
    return "", ""


def _is_read_once(torchrun: argparse.Namespace) -> bool:
    """Whether the script is a pipe or a device: a tuning run would take it away from the real job."""
    path = Path(torchrun.training_script)
    is_path = not torchrun.module and not torchrun.no_python
    return is_path and os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path)


def _settle_ranks(options: Options) -> str:
    without_ddp = options.objective is not None or tuned_for_objective(options)
    if options.trials == 0 or without_ddp:
        return idle_gpus()
    return one_rank() if recipe_may_be_anothers(options) else set_ranks(options.torchrun)


def _chosen_mode(options: Options) -> Mode:
    fewest, most, world = _size(options)
    here: dict[str, object] = {"torch": torch_version()}
    if fewest == most:
        here |= {"world_size": world, "nodes": fewest, "ranks_of_nodes": (world // fewest,)}
    mode = Mode(tune=True, several_nodes=most > 1)

    def saved(path: Path) -> _Saved:
        return _Saved(path, options, here, mode.several_nodes)

    if options.trials is None and options.recipe is not None:
        if os.path.isdir(options.recipe):
            return _the_one_that_fits([saved(path) for path in sorted(options.recipe.glob("*.toml"))], options.recipe)
        _require_its_objective(saved(options.recipe), options)
        return _with_given_recipe(saved(options.recipe), options.force)
    if options.trials == 0:
        if options.tune_only:
            raise UsageError("--tune-only --trials 0: nothing would be done; allow trials, e.g. --trials 20")
        named = "recipe" in options.given
        left_out = f"--trials 0 does what torchrun does, without the recipe {options.recipe}"
        return replace(mode, tune=False, says=f"{left_out}: to use it, leave --trials out" if named else "")
    without_ddp = options.objective is not None or tuned_for_objective(options)
    if world == 1 and not mode.several_nodes and not without_ddp:
        if options.tune_only:
            raise NotTuned("with one rank there is nothing to tune; start two ranks or more, e.g. --nproc-per-node 2")
        says = (
            "with one rank there is nothing to tune: launching as torchrun would; if DDP's process group has one "
            "rank too, its reduction is left out (exact). A script that starts its own ranks needs --objective steps"
        )
        return replace(mode, tune=False, bypass=True, says=says)
    found = [saved(path) for path in found_recipes(options)] if options.trials is None else []
    hidden = hidden_recipes(options) if options.trials is None else []
    if options.objective is not None:  # a recipe of another objective, or of none, may be right for that one alone
        found = [one for one in found if one.recipe.evidence.objective == options.objective.text]
    if not found and hidden:
        return replace(mode, says=f"{hidden[0]} cannot be read by this user: tuning")
    return _with_found_recipe(found, mode, options) if found else mode


def _require_its_objective(saved: _Saved, options: Options) -> None:
    """UsageError where the named recipe was not made for the objective that is asked for."""
    made_for = saved.recipe.evidence.objective
    if options.objective is not None and options.objective.text != made_for:
        raise UsageError(
            f"--objective {options.objective.text}: {saved.path} was tuned for {made_for or 'the steps of a DDP job'}, "
            "and would be launched as it is: leave the option out, or tune again with --trials 20"
        )


def _size(options: Options) -> tuple[int, int, int]:
    """Fewest and most nodes, and the ranks on the fewest. UsageError for numbers with which no job can start."""
    torchrun = options.torchrun
    fewest, most, ranks = nodes_and_ranks(torchrun)
    by_itself = most == 1 and not torchrun.rdzv_endpoint and torchrun.master_port is None  # torchrun makes it c10d
    is_static = torchrun.rdzv_backend == "static" and not (torchrun.standalone or by_itself)
    if is_static and not 0 <= torchrun.node_rank < most:
        raise UsageError(f"--node-rank {torchrun.node_rank}: must be from 0 to {most - 1} with --nnodes {most}")
    return fewest, most, fewest * ranks


@dataclass(frozen=True)
class _Saved:
    """A saved recipe, and what speaks against it here. RecipeError for one that is not sound."""

    path: Path
    options: Options
    here: Mapping[str, object]
    """What is known of the job, as `recipe.differences` has it."""
    several_nodes: bool

    @cached_property
    def recipe(self) -> Recipe:
        return load(self.path)

    @cached_property
    def launching(self) -> Mode:
        """Launching with it. What is not asked for is as in the configuration that the recipe launches."""
        launched, allow, steps = self.recipe.configuration, self.options.allow, self.options.accumulate_up_to
        asked = allow is not None or steps is not None
        chosen = (allow or launched.gradient_rung, steps or launched.steps_per_update) if asked else None
        mode = Mode(False, self.several_nodes, self.recipe, self.path, chosen)
        means = larger_batch(mode.configuration.steps_per_update)
        # What the user has set otherwise stays, and a line of its own says so.
        set_here = {name: value for name, value in mode.variables.items() if os.environ.get(name, value) == value}
        set_to = " ".join(f"{name}={value}" for name, value in sorted(set_here.items()))
        of_ddp = mode.configuration.without_variables
        settings = [*([str(of_ddp)] if of_ddp or not set_to else []), *([f"with {set_to}"] if set_to else [])]
        return replace(mode, says=f"recipe {self.path}: launching {', '.join(settings)}{means}")

    @cached_property
    def elsewhere(self) -> list[str]:
        """How the script differs."""
        return differences(self.recipe.fits, script=script_names(self.options))

    @cached_property
    def known(self) -> dict[str, object]:
        """What is known of the job, and of this machine as far as the recipe depends on it."""
        known = {**self.here, **known_here(self.recipe.fits)}
        # Where hosts have different numbers of ranks, this one knows no more than its own until they have met.
        return known | {"world_size": None} if self.recipe.fits.ranks_of_nodes else known

    @property
    def absent(self) -> list[str]:
        """Network devices of the recipe that are not here. Of several hosts each leaves out its own."""
        variables = {} if self.several_nodes else self.launching.variables
        return [f"env.{name} = {variables[name]!r}: {why}" for name, why in not_here(variables).items()]

    @cached_property
    def unlike(self) -> list[str]:
        """How the job, apart from its script, or the machine differs."""
        return differences(self.recipe.fits, **self.known) + self.absent + self.crowded + self.too_inexact

    @property
    def of_another_objective(self) -> list[str]:
        """What it was tuned for, where --objective asks for something else."""
        asked, made_for = self.options.objective, self.recipe.evidence.objective
        return [f"tuned for {made_for or 'the steps of a DDP job'}"] if asked and asked.text != made_for else []

    @property
    def crowded(self) -> list[str]:
        """More threads of a rank than a study would try on this host, as after `--cpus-per-task` has changed.

        Who names the recipe means it, and several hosts must all do the same.
        """
        count = "" if self.several_nodes else self.launching.variables.get(THREADS.variable, "")
        ranks, cpus = processes_per_node(self.options.torchrun), usable_cpus()
        if not count.isdecimal() or THREADS.variable in os.environ or int(count) <= max(1, cpus // ranks):
            return []
        return [f"env.{THREADS.variable} = {count!r}: {ranks} ranks on {cpus} CPUs here"]

    @property
    def too_inexact(self) -> list[str]:
        """A gradient error in the recipe that is above a limit given here: a study would have refused it.

        Only above one that is stricter than usual. The recipe may come of a study with a laxer one, and must then be
        what the next start launches, as was said when it was saved.
        """
        launched, ladder = self.launching.configuration.without_variables, self.recipe.ladder
        entry = next((one for one in ladder if one.configuration.without_variables == launched), None)
        rung = launched.gradient_rung
        limit = self.options.study.limits.get(rung)
        if entry is None or limit is None or limit >= LIMITS[rung]:
            return []
        error = entry.gradient_error_of_sum if rung.has_error_feedback else entry.gradient_error
        if error is None or error <= limit:
            return []
        return [f"gradient error {percent(error, '.2f')}, above --{rung.value}-limit ({percent(limit, '.2f')})"]


def _with_given_recipe(saved: _Saved, force: bool) -> Mode:
    path, recipe, launching = saved.path, saved.recipe, saved.launching
    # A recipe that was copied, or is used for a script that was moved: who names it means it, and the worker looks on.
    if force and saved.unlike:
        return replace(launching, says=_overruled(launching.says, saved.elsewhere + saved.unlike))
    if differences(recipe.fits, **saved.known):
        require_fit(recipe, path, **saved.known, script=script_names(saved.options))
    if saved.absent:
        fix = "correct [env], tune again with --trials 20, or leave it out with --force"
        raise UnfitRecipe(f"{path}: {'; '.join(saved.absent)}: {fix}")
    if saved.too_inexact:
        fix = "allow less, as by --allow exact, raise the limit, tune again with --trials 20, or launch it with --force"
        raise UnfitRecipe(f"{path}: {saved.too_inexact[0]}: {fix}")
    if saved.elsewhere:
        return replace(launching, says=f"{launching.says} ({saved.elsewhere[0]}; parameters and inputs are compared)")
    return launching


_MOST_UNLIKE = 5
"""Recipes of a folder of which a line says why they do not fit."""


def _the_one_that_fits(recipes: Sequence[_Saved], folder: Path) -> Mode:
    """The one recipe of a folder that fits; why the others do not is said, also where there is none or several."""
    fitting, others = [], []
    for saved in recipes:
        try:
            unlike = saved.of_another_objective + saved.unlike
        except RecipeError as problem:
            unlike = [str(problem).removeprefix(f"{saved.path}: ")]
        if unlike:
            others.append(f"{saved.path.name}: {'; '.join(unlike)}")
        else:
            fitting.append(saved)
    fitting = _surest(fitting)
    if len(others) > _MOST_UNLIKE:  # of a folder with the recipes of many jobs the line would fill the terminal
        others = [*others[:_MOST_UNLIKE], f"{len(others) - _MOST_UNLIKE} more"]
    if len(fitting) == 1:
        return replace(fitting[0].launching, says="; not ".join([fitting[0].launching.says, *others]))
    if fitting:
        found = f"{len(fitting)} of its recipes fit ({', '.join(saved.path.name for saved in fitting)})"
    else:
        found = f"none of its recipes fits ({' | '.join(others)})" if others else "no recipe in it"
    raise UnfitRecipe(f"--recipe {folder}: {found}: name one file, or tune with --trials 20")


def _surest(fitting: list[_Saved]) -> list[_Saved]:
    """Leave only those of which this host knows that the world is theirs, if there are any.

    One for hosts of 8 and 4 ranks may fit wherever 8 are started, and must not take the place of one for 8 and 8.
    """
    return [saved for saved in fitting if saved.known.get("world_size") is not None] or fitting


def _with_found_recipe(recipes: Sequence[_Saved], mode: Mode, options: Options) -> Mode:
    """The one of the script's recipes that fits, as far as that can be known before the start; else tuning."""
    of_script = [saved for saved in recipes if not saved.elsewhere]
    usable = _surest([saved for saved in of_script if not saved.unlike]) or (of_script if options.force else [])
    if not usable:
        others = [f"{saved.path} does not fit ({'; '.join(saved.elsewhere + saved.unlike)})" for saved in recipes]
        return _again(mode, "; ".join(others), of_script or recipes, options)
    best = _preferred(usable, arguments_digest(options))
    why = Note(best.path, options).why(best.recipe, options)
    if options.force:
        unlike = best.unlike + ([f"the last launch with it was of another job ({why})"] if why else [])
        return replace(best.launching, says=_overruled(best.launching.says, unlike) if unlike else best.launching.says)
    if why:
        return replace(mode, says=f"the last launch with {best.path} was of another job ({why}): tuning again")
    return replace(best.launching, notes=True, says=best.launching.says + _of_others(best.recipe, options))


def _of_others(recipe: Recipe, options: Options) -> str:
    """A clause for a recipe of which neither model nor inputs tell that this is another job; "" where it is not."""
    unlike = recipe.made_by.arguments != arguments_digest(options)
    return ", tuned with other arguments of the script" if recipe.evidence.objective and unlike else ""


def _again(mode: Mode, why: str, recipes: Sequence[_Saved], options: Options) -> Mode:
    """Tuning again, as no recipe fits. What was tuned for an objective has no DDP settings and needs its option."""
    objective = recipes[0].recipe.evidence.objective
    if options.objective is not None or not objective or not tuned_for_objective(options):
        return replace(mode, says=f"{why}: tuning again")
    fix = f"--objective {shlex.quote(objective)} tunes again"
    if options.tune_only:
        raise NotTuned(f"{why}: {fix}")
    own_ranks = FRESH_STORE.items() <= recipes[0].recipe.env.items()
    says = f"{why}: launching as written; {fix}"  # the hosts meet nevertheless: it may fit another one
    return replace(mode, tune=False, own_ranks=own_ranks, is_unfit=mode.several_nodes, says=says)


def _overruled(says: str, unlike: Sequence[str]) -> str:
    """The line of a launch with a recipe that is used because of --force."""
    return f"{says}, though it was made for another job ({'; '.join(unlike)}), because of --force"


def _preferred(usable: Sequence[_Saved], arguments: str) -> _Saved:
    """The best of several recipes that fit, as far as the launcher can know."""
    return max(usable, key=lambda saved: preference(saved.recipe, arguments))


def torch_version() -> str:
    """The version of torch, without the build that follows a `+`."""
    from torch import __version__

    return str(__version__).split("+")[0]
