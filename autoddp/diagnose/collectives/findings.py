"""What a diagnosis of a script's own communication says, as plain data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from autoddp.diagnose.collectives.recording import Recording
from autoddp.diagnose.collectives.steps import Steps
from autoddp.diagnose.collectives.table import Row
from autoddp.diagnose.findings import NOTHING, Finding


@dataclass(frozen=True)
class CommunicationDiagnosis:
    """All that was found of a script that communicates by itself."""

    steps: Steps
    recording: Recording
    rows: Sequence[Row]
    findings: Sequence[Finding]
    """What is proved first, in order of price."""
    not_measured: Sequence[str]
    verdict: Sequence[str]
    """The answer, at most three lines, behind one that says where ranks hang."""
    replayed: str = ""
    """How the steps as written compare when they are done again, as a sentence without a period."""

    def document(self) -> dict[str, Any]:
        """The whole answer for JSON, in the form of `Diagnosis.plain`."""
        return {
            **NOTHING,
            "findings": [one.plain() for one in self.findings],
            "not_measured": list(self.not_measured),
            "verdict": list(self.verdict),
            "communication": self.plain(),
        }

    def plain(self) -> dict[str, Any]:
        """For JSON, under `communication`."""
        return {
            "unit": self.steps.unit,
            "step_ms": round(self.steps.seconds * 1e3, 4),
            "steps_by": self.steps.how,
            "seconds": round(self.recording.seconds, 3),
            "world": self.recording.world,
            "rows": [row.plain() for row in self.rows],
            "processes": [
                {
                    "rank": one.rank,
                    "pid": one.pid,
                    "host": one.host,
                    "started_by": "autoddp" if one.is_launched else "the script",
                    "seconds": round(one.seconds, 3),
                    "calls": one.made,
                    "threads": one.threads,
                    "cores": one.cores,
                    "waited_for_core_seconds": round(one.look.waited_of_thread + one.look.waited_of_helpers, 4),
                    "cpu_seconds": round(one.look.cpu_of_process, 4),
                }
                for one in self.recording.of_rank.values()
            ],
            "replayed": self.replayed,
        }
