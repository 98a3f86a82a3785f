"""Floor 5. The search: which configuration to measure next, and what the measurements allow to conclude.

The only home of Optuna. It knows no process and no socket: whoever runs it hands in a `Measure` callable.
"""

from autoddp.settings import StudySettings
from autoddp.study.measure import Measure, TrialFailed, TuningOver
from autoddp.study.observer import Observer
from autoddp.study.outcome import Decision, Outcome, Screened, Standing, TrialRecord
from autoddp.study.search import Study
from autoddp.study.semifinals import Semifinal

__all__ = [
    "Decision",
    "Measure",
    "Observer",
    "Outcome",
    "Screened",
    "Semifinal",
    "Standing",
    "Study",
    "StudySettings",
    "TrialFailed",
    "TrialRecord",
    "TuningOver",
]
