"""What comes of tuning: lines on the terminal, the recipe, the summary, and the mode to launch the job in."""

from __future__ import annotations

import array
import contextlib
import fcntl
import platform
import shlex
import sys
import termios
from collections.abc import Callable, Mapping
from dataclasses import asdict, fields, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from autoddp.attempts.job.machine import NO_DDP
from autoddp.attempts.tune import Tuned
from autoddp.commandline.mode import Mode
from autoddp.commandline.options import Options
from autoddp.commandline.rank_count import set_one
from autoddp.commandline.saved_recipes import arguments_digest, is_looked_for, place_for, remove_notes, script_names
from autoddp.commandline.secret_words import without_secrets
from autoddp.commandline.words import TAKEN_AFTER_THE_SCRIPT, given_words
from autoddp.diagnose.collectives import CommunicationDiagnosis, trace_of_calls
from autoddp.errors import AutoddpError, NotTuned, PlaceTaken, RecipeError, UnfitRecipe, first_line
from autoddp.hosts.late_hosts import Plan, Running, differs
from autoddp.knobs import Configuration
from autoddp.knobs.hook import POWERSGD_RANK, POWERSGD_START_STEP, start_step
from autoddp.log import get_logger
from autoddp.network.own_network import Network
from autoddp.recipe import Evidence, Fits, LadderEntry, MadeBy, Recipe, dump, load, parse, save
from autoddp.report import (
    Terminal,
    Ways,
    answer,
    say,
    summary,
    summary_of_diagnosis,
    summary_without_study,
    try_next,
    warn,
    what_was_won,
    write_summary,
)
from autoddp.report.node_text import node_text
from autoddp.runs.folder import RunFolder
from autoddp.runs.latest import as_latest
from autoddp.runs.nccl_logs import transports
from autoddp.runs.usual_folders import elsewhere
from autoddp.study import Outcome
from autoddp.topology import Node, verdicts
from autoddp.topology.probe import probe
from autoddp.torchrun.options import node_range
from autoddp.torchrun.surroundings import FRESH_STORE
from autoddp.trace import trace_of, write_trace
from autoddp.units import data_size
from autoddp.version import __version__

logger = get_logger(__name__)


class Results:
    """The `attempts.tune.Reporter` of one tuning job. Its `with` is left when the job has ended, before `mode`.

    with Results(options, folder, network) as results:
        tuned = Tuning(…, results).run()
    mode = results.mode(mode, tuned)
    """

    say = staticmethod(say)
    warn = staticmethod(warn)

    def __init__(self, options: Options, folder: RunFolder, network: Network) -> None:
        self._options = options
        self._folder = folder
        self._network = network
        what = "diagnosing" if options.diagnose_only else "tuning"
        objective = options.study.objective
        aim = f" for {objective.text}" if objective is not None and not options.diagnose_only else ""
        most = options.study.trials
        trials = "" if options.diagnose_only else f"{aim}: {most} trial{'s' * (most != 1)}"
        logs = f"; logs in {folder.path}" if options.verbose or options.diagnose_only else " at most"
        say(f"{what} {options.script}{trials}{logs}")
        self.observer = Terminal(
            options.study.allows, folder.log, not options.tune_only, options.verbose, options.study.objective
        )
        self.progress = self.observer.progress
        self._outcome: Outcome | None = None
        self._made = ""
        self._not_sound = ""

    def __enter__(self) -> Results:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        """Write what was measured where no job follows: tuning was interrupted, or too few hosts are left."""
        self.observer.close()
        if kind is not None and self._outcome is not None:
            self._write_summary(summary(self._outcome, {}, "") | {"recipe_text": ""})
            if self._folder.path.is_dir():
                say(f"what was measured is in {self._folder.path}; the next start of the same job goes on with it")

    def recipe(self, outcome: Outcome, inputs: tuple[str, ...]) -> str:
        """The recipe's text; "" where too little was measured to decide, so that the next start tunes again."""
        self._outcome = outcome
        if outcome.decision.is_open:
            return ""
        recipe = recipe_of(outcome, self._options.job_steps, self._folder.path.name)
        of_job = replace(recipe.fits, script=script_names(self._options)[0], inputs=inputs)
        made_by = replace(recipe.made_by, arguments=arguments_digest(self._options))
        text = dump(replace(recipe, fits=of_job, made_by=made_by))
        try:
            parse(text, self._options.recipe_path)
        except RecipeError as error:  # a process of the script has said what no recipe may hold: no host gets it
            self._not_sound = f"the recipe that was found is not sound: {error}"
            return ""
        self._made = text
        return text

    def mode(self, mode: Mode, tuned: Tuned) -> Mode:
        """The mode to launch in. Whatever went wrong, the job can still run as written."""
        options, folder = self._options, self._folder
        self._outcome = tuned.outcome  # a host that follows learns it only now
        if tuned.outcome is not None and tuned.outcome.facts.own_ranks:
            mode = replace(mode, own_ranks=True)
        place = None
        if tuned.recipe:
            try:
                if tuned.recipe != self._made:
                    tuned.recipe = _as_known_here(tuned.recipe, options)
                place = place_for(options, parse(tuned.recipe, options.recipe_path), say)
            except RecipeError as error:
                # Not by the version's name, which many commits share: the host that leads has read it, and launches it.
                if not options.tune_only and tuned.recipe != self._made:
                    same = "let all hosts have one version of autoddp"
                    raise UnfitRecipe(f"the other hosts launch what this one cannot read: {error}; {same}") from None
                tuned.why = f"the recipe that was found is not sound: {error}"
        if tuned.outcome is not None:
            found = summary(tuned.outcome, tuned.wall_seconds, str(place or options.recipe_path))
            self._write_summary(found | {"recipe_text": tuned.recipe})
        elif tuned.built_ddp:
            self._write_summary(summary_without_study(tuned.why, tuned.wall_seconds) | {"recipe_text": tuned.recipe})
        if place is None:
            not_tuned, why = "warning: not tuned, ", tuned.why or self._not_sound or "the leading host gave up"
            if tuned.outcome is not None and tuned.outcome.decision.is_open:
                not_tuned, why = "", tuned.outcome.decision.why
            if options.tune_only:
                raise NotTuned(f"no recipe was written: {why}{folder.see}")
            if tuned.outcome is not None and not options.verbose and not self._not_sound:
                self._answer(tuned.outcome, tuned.outcome.decision.configuration, "")
                say(f"launching as written{folder.see}")
            else:
                say(f"{not_tuned}launching as written: {why}{folder.see}")
            if tuned.why == NO_DDP:
                say("--objective steps tunes a script that reduces gradients without DDP")
            if not tuned.built_ddp and _input_is_left():
                say("standard input is a pipe, kept for the job: while tuned, the script read nothing; use < FILE")
            if not options.ranks_given and not tuned.built_ddp:
                say(set_one(options.torchrun, is_known=tuned.why == NO_DDP))
            return mode
        recipe = parse(tuned.recipe, place)
        # Studies with one --budget end together: meanwhile that of another job may have taken the place.
        place = place_for(options, recipe, lambda _: None)
        if tuned.outcome is not None and tuned.outcome.ended:
            say(f"tuning ended early, and what was measured until then decides: {tuned.outcome.ended}")
            verb = "chosen:" if options.tune_only else "launching"
            self.observer.detail(f"{verb} {recipe.configuration}: {recipe.evidence.why}")
        if _is_worth_more(place, recipe):
            if tuned.outcome is not None:
                self._answer(tuned.outcome, recipe.configuration, "")
            if not options.tune_only:
                say("launching as written")
            # On other hosts none may stand there: what a host launches with is alike on all, as written or not.
            return replace(mode, recipe=recipe, path=place)
        detail = self.observer.detail if tuned.outcome is not None else say
        place = keep(tuned.recipe, place, options, folder.previous_recipe, detail)
        if tuned.outcome is not None:
            self._close(tuned.outcome, place, recipe.configuration)
        return replace(mode, recipe=recipe, path=place)

    def keep_diagnosis(self, tuned: Tuned, communication: CommunicationDiagnosis | None) -> None:
        """Write a diagnosis that was all that was asked for to the run's folder, in place of a study's results.

        `communication`: that of a script without DDP. A page shows the stages of steps, which it has not: none is made.
        """
        if tuned.diagnosis is None and communication is not None:
            found = summary_of_diagnosis(communication.document(), tuned.wall_seconds)
            self._save(found | {"script": self._options.script, "run": self._folder.path.name})
            self._write_trace(lambda: trace_of_calls(communication.recording, communication.steps))
        if tuned.diagnosis is not None:
            found = summary_of_diagnosis(tuned.diagnosis.plain(), tuned.wall_seconds)
            self._write_summary(found | ({"timelines": tuned.timelines} if tuned.timelines else {}))

    def _write_summary(self, results: dict[str, Any]) -> None:
        if not self._folder.path.is_dir():
            say(f"no report is written: {self._folder.path} was removed meanwhile")
            return
        node = _this_node()
        found = transports(self._folder.path, node)
        content = results | {
            "script": self._options.script,
            "run": self._folder.path.name,
            "network": asdict(self._network),
            "transports": found,
            "topology": node_text(node, verdicts(node)) if node.host else "",
        }
        commands = self._commands(str(results.get("recipe", "")) if results.get("recipe_text") else "")
        if commands and not self._options.diagnose_only:
            content["commands"] = commands
        self._save(content)
        for finding in found.get("findings", ()):
            say(finding)
        self._write_report(content)
        if self._options.trace or self._options.diagnose_only:
            if content.get("timelines"):
                self._write_trace(lambda: trace_of(content["timelines"]))
            elif content.get("objective") is not None:
                say("no trace was written: with --objective no steps are recorded; autoddp diagnose writes one")
            else:
                say("no trace was written: no steps were recorded")

    def _save(self, content: dict[str, Any]) -> None:
        try:
            write_summary(self._folder.summary, content)
        except OSError as error:  # a full disk must not cost the launch
            say(f"warning: {self._folder.summary} could not be written: {error.strerror}")

    def _write_trace(self, trace: Callable[[], Mapping[str, Any]]) -> None:
        try:
            for line in write_trace(self._folder.trace, trace()):
                say(line)
        except Exception as error:  # as with the report
            logger.exception("no trace was written")
            say(f"warning: {self._folder.trace} could not be written: {first_line(error)}")

    def _write_report(self, content: dict[str, Any]) -> None:
        try:
            from autoddp.report.page import write_page  # takes jinja2, which only this needs

            write_page(self._folder.report, content)
        except Exception as error:  # whatever it is, it must not cost the launch: the summary has the same content
            logger.exception("no report was written")
            say(f"warning: {self._folder.report} could not be written: {first_line(error)}")
        else:
            (say if self._outcome is None else self.observer.detail)(f"report: {self._folder.report}")

    def _close(self, outcome: Outcome, place: Path, configuration: Configuration) -> None:
        """The last lines before the job's own: what was won and why, and what to do with it."""
        for line in what_was_won(outcome):
            self.observer.detail(line)
        self.observer.detail(try_next(outcome, str(place), self._same_job))
        self._answer(outcome, configuration, str(place))
        if not self._options.tune_only:
            say("starting the job")

    @property
    def _same_job(self) -> list[str]:
        """The words that start the same script on one host; empty where that takes more than one command."""
        options, torchrun = self._options, self._options.torchrun
        theirs = without_secrets(given_words(torchrun, ("nproc_per_node", "module", "no_python", "run_path")))
        arguments = without_secrets(torchrun.training_script_args)
        are_the_scripts = any(word.partition("=")[0] in TAKEN_AFTER_THE_SCRIPT for word in arguments)
        apart = ["--"] if are_the_scripts else []  # as the user has written it, else autoddp might take them
        words = ["--nproc-per-node", str(torchrun.nproc_per_node), *theirs, *self._kind, *apart, options.script]
        return [*words, *arguments] if node_range(torchrun)[1] == 1 else []

    @property
    def _kind(self) -> list[str]:
        """The options that say how torchrun starts the script, where that is not by `python FILE`."""
        torchrun = self._options.torchrun
        given = {"-m": torchrun.module, "--run-path": torchrun.run_path, "--no-python": torchrun.no_python}
        return [option for option, is_given in given.items() if is_given]

    def _named(self, recipe: str) -> list[str]:
        """The option that names the recipe, where the script's next start would not find it by itself."""
        return ["--recipe", recipe] if recipe and not is_looked_for(Path(recipe), self._options) else []

    def _commands(self, recipe: str) -> dict[str, str]:
        """Program → the command that starts the same script with it; empty where that takes more than one command.

        `recipe`: the file in which the settings are saved; "" where they are not.
        """
        job = self._same_job
        commands = {"autoddp": ["autoddp", *self._named(recipe), *job], "torchrun": ["torchrun", *job]}
        return {program: shlex.join(words) for program, words in commands.items()} if job else {}

    def _answer(self, outcome: Outcome, configuration: Configuration, recipe: str) -> None:
        options, here = self._options, self._commands(recipe)
        undo = here.get("torchrun", "the same commands with --trials 0")
        # A recipe fits one number of ranks: where the user has given it, the next start needs it too.
        ranks = ["--nproc-per-node", str(options.torchrun.nproc_per_node)] if options.ranks_given else []
        next_start = shlex.join(["autoddp", *ranks, *self._named(recipe), *self._kind, options.script])
        if not here:
            without = " without --trials" if options.trials is not None else ""
            next_start = f"start with the same commands{without}"
        if outcome.objective is not None and here and options.ranks_given:
            next_start = here["autoddp"]  # without a DDP model nobody knows how many ranks the script needs
        report = str(_from_here(as_latest(self._folder.report))) if self._folder.report.exists() else ""
        ways = Ways(recipe, next_start if recipe else "", report, undo)
        self.observer.answer(answer(outcome, configuration, ways))


def _input_is_left() -> bool:
    """Whether something that the script could not read while it was tuned waits at standard input."""
    waiting = array.array("i", [0])
    with contextlib.suppress(OSError, ValueError, AttributeError):  # there is none, or nothing tells
        fcntl.ioctl(sys.stdin.fileno(), termios.FIONREAD, waiting)
        return waiting[0] > 0 and not (sys.stdin.seekable() or sys.stdin.isatty())
    return False


def _from_here(path: Path) -> Path:
    """The path as the user would type it: relative where it lies below the current folder."""
    try:
        return path.relative_to(Path.cwd())
    except (ValueError, OSError):
        return path


def _is_worth_more(place: Path, new: Recipe) -> bool:
    """Whether the recipe that stands there has final rounds that decided it, and the new one decides nothing.

    It has none itself, or they differ too much: on a busy machine nothing is known against what was proved before.
    """
    if _is_decided(new) or not place.exists():
        return False
    try:
        stands = load(place)
    except RecipeError:
        return False
    rounds = stands.evidence.final_rounds
    # An undecided one proves nothing; of hosts that share a folder, another one may have written this very recipe.
    if not rounds or not _is_decided(stands):
        return False
    has = "not decided" if new.evidence.final_rounds else "made none"
    say(f"{place} stays: {rounds} final rounds have decided it, and this tuning run has {has}")
    return True


def _is_decided(recipe: Recipe) -> bool:
    """Whether it launches something, or its final rounds have shown that nothing is faster."""
    evidence = recipe.evidence
    return bool(recipe.configuration or (evidence.final_rounds and not evidence.why.startswith("undecided: ")))


def keep(text: str, place: Path, options: Options, previous: Path | None, detail: Callable[[str], None] = say) -> Path:
    """Save the recipe and return its file, also where it could not be saved. `previous`: where an older one is kept.

    `detail` prints lines that the answer at the end tells in other words.
    """
    try:
        place, kept = _saved(text, place, options, previous)
    except (AutoddpError, OSError) as error:
        if options.tune_only:
            raise NotTuned(f"the recipe could not be saved: {error}") from None
        say(f"warning: the recipe is used, but could not be saved: {error}")
        return place
    remove_notes(options)
    detail(f"recipe written: {place}" + (f" (the older one is kept as {kept})" if kept else ""))
    recipe = parse(text, place)
    start = POWERSGD_START_STEP.of(recipe.configuration)
    if start:
        memory = data_size(recipe.fits.gradient_bytes)
        detail(
            f"PowerSGD begins after {start} exact reductions (powersgd_start_step in the recipe), and keeps the "
            f"error that it feeds back: {memory} of memory on each rank"
        )
    return place


def _as_known_here(text: str, options: Options) -> str:
    """A recipe that another host has made, with this host's name of the script and digest of its arguments.

    Hosts may have the script in other places, seen from their current folders, and arguments of their own. The next
    start here would not find a recipe that says those of another host, and would not launch what the others launch.
    """
    recipe = parse(text, "the job's recipe")
    names, arguments = script_names(options), arguments_digest(options)
    if recipe.fits.script in names and recipe.made_by.arguments == arguments:
        return text
    script = recipe.fits.script if recipe.fits.script in names else names[0]
    made_by = replace(recipe.made_by, arguments=arguments)
    return dump(replace(recipe, fits=replace(recipe.fits, script=script), made_by=made_by))


def joined(options: Options, mode: Mode, plan: Plan, running: Running, previous: Path | None) -> Mode:
    """The mode of a host that comes when the job runs already: what the others launch, whose recipe is kept here too.

    UsageError if this host is about to do something else.
    """
    if options.tune_only:
        raise NotTuned(f"the job runs already on other hosts with {running.reads}: there is nothing to tune")
    if mode.recipe is not None and mode.digest(options) not in (plan.digest, running.digest):
        raise differs(running, mode.reads(options))
    if not running.recipe:
        if mode.tune and not options.ranks_given and not running.builds_ddp:
            say(set_one(options.torchrun))
        return mode.as_written
    text = _as_known_here(running.recipe, options)
    found = replace(mode, tune=False, recipe=parse(text, "the job's recipe"), chosen=running.chosen)
    if found.digest(options) != running.digest:
        raise differs(running, found.reads(options))
    if mode.recipe is not None or found.recipe is None:
        return found
    return replace(found, path=keep(text, place_for(options, found.recipe, say), options, previous))


def _this_node() -> Node:
    try:
        return probe()
    except Exception:  # what a summary says of the host is not worth the launch
        logger.exception("the topology of this host could not be learned")
        return Node("")


def _saved(
    recipe: str, place: Path, options: Options, previous: Path | None, tries: int = 99
) -> tuple[Path, Path | None]:
    """Save the recipe; its path, and the path at which another recipe that stood there is kept, if any.

    It goes elsewhere if the current folder takes no file, as on a full disk, and to the next free place where a job
    that was tuned beside this one, perhaps on another host, has taken this one.
    """
    try:
        return place, save(recipe, place, previous=previous)
    except PlaceTaken:
        if not tries:
            raise
        return _saved(recipe, place_for(options, parse(recipe, place), say), options, previous, tries - 1)
    except AutoddpError as error:
        for other in elsewhere() if place.parent == Path() else ():
            with contextlib.suppress(AutoddpError, OSError):
                other.make()
                kept = save(recipe, other.recipes / place.name, previous=previous)
                say(f"warning: {error}; this one goes to {other.recipes}")
                return other.recipes / place.name, kept
        raise


def recipe_of(outcome: Outcome, job_steps: int | None, run: str = "") -> Recipe:
    """The recipe that a study's outcome amounts to.

    `job_steps`: of the real job, for the start of PowerSGD; None: not known. `run`: name of the run's folder.
    """
    launched = outcome.decision.configuration
    parts = [part.name for part in fields(Fits)]
    return Recipe(
        made_by=MadeBy(
            autoddp=__version__,
            torch=outcome.facts.torch,
            python=platform.python_version(),
            date=datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        ),
        fits=Fits(**{name: getattr(outcome.facts, name) for name in parts if hasattr(outcome.facts, name)}),
        configuration=_explicit(launched.without_variables, job_steps),
        env=launched.variables | (FRESH_STORE if outcome.facts.own_ranks else {}),
        evidence=Evidence(
            baseline_ms_per_step=_ms(outcome, outcome.baseline_seconds),
            headroom=outcome.headroom if outcome.objective is None else None,
            trials=len(outcome.trials),
            final_rounds=len(outcome.baseline_rounds),
            steps=outcome.steps.get("measured", 0),
            why=outcome.decision.why,
            run=run,
            headroom_low=outcome.headroom_interval[0] if outcome.objective is None else None,
            headroom_high=outcome.headroom_interval[1] if outcome.objective is None else None,
            objective=outcome.objective.text if outcome.objective is not None else "",
            baseline_value=_value(outcome, outcome.baseline_seconds),
        ),
        ladder=tuple(
            LadderEntry(
                rung=standing.rung,
                configuration=_explicit(standing.configuration, job_steps),
                ms_per_step=_ms(outcome, standing.seconds),
                speedup=standing.speedup.ratio,
                speedup_low=standing.speedup.low,
                speedup_high=standing.speedup.high,
                gradient_error=standing.error.relative if standing.error else None,
                gradient_error_of_sum=standing.error.of_sum if standing.error else None,
                speedup_low_over=dict(standing.speedup_low_over),
                value=_value(outcome, standing.seconds),
            )
            for standing in outcome.ladder
        ),
    )


def _ms(outcome: Outcome, seconds: float) -> float | None:
    """Milliseconds of a step; None where a number that the script prints was measured."""
    return seconds * 1e3 if outcome.objective is None or outcome.objective.of_steps else None


def _value(outcome: Outcome, cost: float) -> float | None:
    """The number that the script prints; None where steps were measured."""
    is_printed = outcome.objective is not None and not outcome.objective.of_steps
    return outcome.objective.number(cost) if outcome.objective is not None and is_printed else None


def _explicit(configuration: Configuration, job_steps: int | None) -> Configuration:
    """The configuration with the step at which PowerSGD begins: trials leave it out and measure from their first."""
    if POWERSGD_RANK.of(configuration) is None:
        return configuration
    start = start_step(job_steps, configuration.steps_per_update)
    return configuration.with_values(**{POWERSGD_START_STEP.name: start})
