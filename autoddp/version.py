"""The version, in a file of its own so that building the package imports nothing else."""

__version__ = "0.1.0"

SUMMARY_SCHEMA = 1
"""Schema of summary.json; a reader of another schema refuses the file."""
