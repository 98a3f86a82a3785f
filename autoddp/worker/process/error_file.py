"""Reports the exception that ends a rank to elastic, if the script's main function is not decorated with `@record`.

The variable TORCHELASTIC_ERROR_FILE names the file to which a process should write its exception. Without `@record` no
code does so, and the summary of a failed job says "error_file: <N/A>" for the rank that failed first.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from pathlib import Path
from types import TracebackType

from autoddp.files import write_whole


def name_the_error(place: str) -> None:
    """Write the exception that ends this process to `place`, in the format of elastic's own handler; called at exit.

    Nothing is written if the process ends without an exception, by `sys.exit` or by Ctrl-C. A file that exists is kept,
    because it is from `@record`.
    """
    error = error_of_the_script()
    if not isinstance(error, Exception) or os.path.exists(place):
        return
    said = {
        "message": f"{type(error).__name__}: {error}",
        "extraInfo": {
            "py_callstack": "".join(traceback.format_exception(type(error), error, error.__traceback__)),
            "timestamp": str(int(time.time())),
        },
    }
    # Elastic itself ends at a file that is not whole, as on a full disk, and starts no rank again.
    write_whole(Path(place), json.dumps({"message": said}))


def error_of_the_script() -> BaseException | None:
    """The exception that has ended the script, asked at exit; None where none has."""
    error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    return error if isinstance(error, BaseException) and _ended_the_script(error.__traceback__) else None


def _ended_the_script(trace: TracebackType | None) -> bool:
    """Whether the exception came from the main module. An interactive session in the script leaves other ones."""
    while trace is not None and trace.tb_frame.f_globals.get("__name__") == "runpy":  # frames of python -m
        trace = trace.tb_next
    return trace is not None and trace.tb_frame.f_globals.get("__name__") == "__main__"
