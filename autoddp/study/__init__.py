"""Floor 5. The search: which configuration to measure next, and what the measurements allow to conclude.

Only this package imports Optuna. It knows nothing of processes and sockets: its caller passes a `Measure` callable.
"""

from autoddp.settings import StudySettings
from autoddp.study.measure import INTERRUPTED, Measure, TrialFailed, TuningOver
from autoddp.study.observer import Observer
from autoddp.study.outcome import Decision, Outcome, Screened, Standing, TrialRecord
from autoddp.study.search import Study
from autoddp.study.semifinals import Semifinal
from autoddp.study.starts import StartStudy

__all__ = [
    "INTERRUPTED",
    "Decision",
    "Measure",
    "Observer",
    "Outcome",
    "Screened",
    "Semifinal",
    "Standing",
    "StartStudy",
    "Study",
    "StudySettings",
    "TrialFailed",
    "TrialRecord",
    "TuningOver",
]
