"""Optuna behind two methods: what to measure next on a rung, and what came of it."""

from __future__ import annotations

from collections.abc import Set

import optuna

from autoddp.knobs import Configuration, Value
from autoddp.study.space import Space

_UNGUIDED = 3  # results before TPE follows them; by default it draws ten at random, half of a study of twenty trials
_CANDIDATES = 48  # of which TPE takes the best: twice the default, as drawing them costs nothing beside a trial
_ASKS = 40  # draws before a configuration that was measured already is accepted once more


class Sampler:
    """Asks Optuna's TPE for one rung's configurations, the space's guesses first. Deterministic for a seed and results.

    sampler = Sampler(space, seed=0)
    configuration = sampler.ask()
    sampler.tell(0.123)
    """

    def __init__(self, space: Space, seed: int) -> None:
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._space = space
        tpe = optuna.samplers.TPESampler(seed=seed, n_startup_trials=_UNGUIDED, n_ei_candidates=_CANDIDATES)
        self._study = optuna.create_study(direction="minimize", sampler=tpe)
        for guess in space.guesses():
            places = {name: space.choices[name].index(setting) for name, setting in guess.items()}
            self._study.enqueue_trial(places, skip_if_exists=True)
        self._pending: optuna.trial.Trial | None = None
        self._told: dict[Configuration, float | None] = {}

    def ask(self, excluded: Set[tuple[str, Value]] = frozenset()) -> Configuration | None:
        """The next configuration to measure, with none of the `excluded` values, which may not be launched.

        None where none seems to be left.
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

    def _draw(self) -> Configuration:
        trial = self._study.ask()
        chosen = {
            name: settings[trial.suggest_categorical(name, range(len(settings)))]
            for name, settings in self._space.choices.items()
        }
        self._pending, self._asked = trial, self._space.configuration(chosen)
        return self._asked

    def tell(self, seconds: float | None) -> None:
        """Seconds per step of the configuration asked last; None when it failed."""
        assert self._pending is not None
        self._told[self._asked] = seconds
        if seconds is None:
            self._study.tell(self._pending, state=optuna.trial.TrialState.FAIL)
        else:
            self._study.tell(self._pending, seconds)
        self._pending = None
