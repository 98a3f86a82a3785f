"""Floor 6. What people see: a live line per trial and the ladder on the terminal, all of it in summary.json."""

from autoddp.report.answer import Ways, answer
from autoddp.report.closing import try_next, what_was_won
from autoddp.report.summary import summary, summary_of_diagnosis, summary_without_study, write_summary
from autoddp.report.terminal import Terminal, say, warn

__all__ = [
    "Terminal",
    "Ways",
    "answer",
    "say",
    "summary",
    "summary_of_diagnosis",
    "summary_without_study",
    "try_next",
    "warn",
    "what_was_won",
    "write_summary",
]
