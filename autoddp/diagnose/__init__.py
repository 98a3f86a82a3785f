"""Floor 5. Why a job is slow: suspected by the anatomy of its steps, then proved and priced by experiments on it.

cause        what a cause is: when it is suspected, how it is proved, what mends it
causes/      every cause, one file each
collectives/ the same for scripts that communicate without DDP, by doing their calls again
evidence     the steps of a block as tables, and what follows from them
signs        arithmetic that several causes need
events       causes that are at work in some steps only
experiments  the kinds of experiments that prove a cause
rounds       blocks under several conditions in turns, within a budget
proofs       what an experiment says of a suspicion
examination  the course of a diagnosis
words        scaling, what is not measured, the verdict
findings     what a diagnosis has found, as plain data
"""

from autoddp.diagnose.cause import Surroundings
from autoddp.diagnose.causes import CAUSES
from autoddp.diagnose.examination import Examination
from autoddp.diagnose.findings import NOTHING, Diagnosis, Finding, Level
from autoddp.diagnose.rounds import MeasureAnatomy

__all__ = ["CAUSES", "NOTHING", "Diagnosis", "Examination", "Finding", "Level", "MeasureAnatomy", "Surroundings"]
