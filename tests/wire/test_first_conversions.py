"""Several threads of a launcher convert to the same types for the first time, and processes are forked meanwhile."""

from __future__ import annotations

import subprocess
import sys
import textwrap

PROGRAM = """
    import os, sys, threading, types
    from autoddp import codec

    sys.setswitchinterval(1e-6)

    def new_union(number):
        lines = ["from __future__ import annotations", "from autoddp.codec import Struct"]
        for place in range(30):
            lines += [f"class S{place}(Struct, tag=True):", "    a: int"]
            lines += [f"    b: S{place} | S{place // 2} | None = None"]
        module = sys.modules[f"new{number}"] = types.ModuleType(f"new{number}")
        exec("\\n".join([*lines, "Any = " + " | ".join(f"S{place}" for place in range(30))]), module.__dict__)
        return module.Any

    def convert(kind):
        codec.convert({"type": "S7", "a": 1, "b": {"type": "S3", "a": 2}}, kind)

    for number in range(100):
        kind, gate = new_union(number), threading.Barrier(3)
        threads = [threading.Thread(target=lambda: (gate.wait(), convert(kind))) for _ in range(3)]
        for thread in threads:
            thread.start()
        if number % 10 == 0:
            child = os.fork()
            if child == 0:
                convert(kind)
                os._exit(0)
            assert os.waitpid(child, 0)[1] == 0
        for thread in threads:
            thread.join()
    print("converted")
"""


def test_threads_that_meet_a_new_type_at_once() -> None:
    # In a process of its own: without the lock it ends by a segmentation fault.
    words = [sys.executable, "-X", "faulthandler", "-c", textwrap.dedent(PROGRAM)]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=100)
    assert (ended.returncode, ended.stdout) == (0, "converted\n"), ended.stderr[-2000:]
