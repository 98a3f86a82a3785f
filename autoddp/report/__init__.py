"""Floor 5. What people see: a live line per trial and the ladder on the terminal, all of it in summary.json."""

from autoddp.report.summary import summary, write_summary
from autoddp.report.terminal import Terminal, say, warn

__all__ = ["Terminal", "say", "summary", "warn", "write_summary"]
