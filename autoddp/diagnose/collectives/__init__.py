"""Floor 5. Scripts that communicate by themselves: what their collectives cost, why, and what to change.

recording    what the ranks have recorded, as plain data
recording_files  the files in which it lies, read
table        each place with its calls, bytes, time, waiting, and the rank that comes last
ends         when steps end, while the script runs
steps        where a step ends in a script that may have no optimizer
stretches    the part of a recording that is done again
program      that part in a form that can be done again
merging      several calls as one, or side by side
fewer_threads  whether ranks with fewer threads would be faster, tried while the script runs
standing     where each rank stands when they hang
cause        what a cause is: when it is suspected, what is changed to price it
causes/      every cause, one file each
examination  suspicions, then replays
call_trace   some steps of all ranks as a picture
findings     what was found, as plain data
"""

from autoddp.diagnose.collectives.call_trace import trace_of_calls
from autoddp.diagnose.collectives.causes import CAUSES
from autoddp.diagnose.collectives.examination import examined
from autoddp.diagnose.collectives.fewer_threads import planned
from autoddp.diagnose.collectives.findings import CommunicationDiagnosis
from autoddp.diagnose.collectives.recording_files import calls_made, recorded
from autoddp.diagnose.collectives.standing import SILENCE, where_ranks_stand
from autoddp.diagnose.collectives.steps import steps_of

__all__ = [
    "CAUSES",
    "SILENCE",
    "CommunicationDiagnosis",
    "calls_made",
    "examined",
    "planned",
    "recorded",
    "steps_of",
    "trace_of_calls",
    "where_ranks_stand",
]
