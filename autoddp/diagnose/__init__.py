"""Floor 5. Why a job is slow: suspected by the anatomy of its steps, then proved and priced by experiments on it."""

from autoddp.diagnose.examination import Examination
from autoddp.diagnose.findings import CAUSES, NOTHING, Diagnosis, Finding, Level
from autoddp.diagnose.rounds import MeasureAnatomy
from autoddp.diagnose.suspicions import Surroundings

__all__ = ["CAUSES", "NOTHING", "Diagnosis", "Examination", "Finding", "Level", "MeasureAnatomy", "Surroundings"]
