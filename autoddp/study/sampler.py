"""Which configuration of a rung comes next: the guesses first, then Optuna chooses."""

from __future__ import annotations

from collections import deque
from collections.abc import Set

import optuna

from autoddp.knobs import AS_WRITTEN, Configuration, Setting, Value
from autoddp.study.forecast import Forecast
from autoddp.study.space import Space

_UNGUIDED = 3  # results before TPE uses them; its default of ten random draws would be half of a study of twenty trials
_CANDIDATES = 48  # draws of which TPE takes the best: twice the default, because drawing costs nothing beside a trial
_ASKS = 40  # draws before a configuration that was measured already is accepted again


class Sampler:
    """Asks Optuna's TPE for configurations of one rung, after the guesses of its space, the fastest by forecast first.

    sampler = Sampler(space, seed=0)
    configuration = sampler.ask()
    sampler.tell(0.123)

    The sequence is deterministic for a seed and the results.
    """

    def __init__(
        self, space: Space, seed: int, forecast: Forecast | None = None, as_written: float | None = None
    ) -> None:
        """`as_written`: seconds of the script as written, which is then not asked for."""
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._space = space
        tpe = optuna.samplers.TPESampler(seed=seed, n_startup_trials=_UNGUIDED, n_ei_candidates=_CANDIDATES)
        self._study = optuna.create_study(direction="minimize", sampler=tpe)
        guesses, self._waiting = space.guesses(), deque[dict[str, Setting]]()
        for place in (forecast or Forecast()).order([space.configuration(guess) for guess in guesses]):
            self._waiting.append(guesses[place])
        self._pending: optuna.trial.Trial | None = None
        self._told: dict[Configuration, float | None] = {} if as_written is None else {AS_WRITTEN: as_written}

    def ask(self, excluded: Set[tuple[str, Value]] = frozenset()) -> Configuration | None:
        """The next configuration to measure, without any of the `excluded` values, which must not be launched.

        None if none seems to be left.
        """
        for _ in range(_ASKS):
            configuration = self._draw()
            if excluded & set(configuration.items()):
                self.tell(None)
            elif configuration in self._told:
                self.tell(self._told[configuration])
            else:
                return configuration
        configuration = self._draw()
        if not excluded & set(configuration.items()):
            return configuration
        self.tell(None)
        return None

    @property
    def has_guesses(self) -> bool:
        """Whether one of the guesses has not been asked for yet."""
        return any(self._space.configuration(guess) not in self._told for guess in self._waiting)

    def prefer(self, configuration: Configuration) -> None:
        """Ask for this configuration of the space next."""
        self._waiting.appendleft(self._space.settings_of(configuration))

    def _draw(self) -> Configuration:
        if self._waiting:
            guess = self._waiting.popleft()
            places = {name: self._space.choices[name].index(setting) for name, setting in guess.items()}
            self._study.enqueue_trial(places, skip_if_exists=True)
        trial = self._study.ask()
        chosen = {
            name: settings[trial.suggest_categorical(name, range(len(settings)))]
            for name, settings in self._space.choices.items()
        }
        self._pending, self._asked = trial, self._space.configuration(chosen)
        return self._asked

    def tell(self, seconds: float | None) -> None:
        """Report the seconds per step of the configuration from the last `ask`; None if it failed."""
        assert self._pending is not None
        self._told[self._asked] = seconds
        if seconds is None:
            self._study.tell(self._pending, state=optuna.trial.TrialState.FAIL)
        else:
            self._study.tell(self._pending, seconds)
        self._pending = None
