"""Any text at all: the readers refuse it or read something, soon, and nothing else happens."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rdma_captures import IDS, READERS, Result, capture, try_to_read

from autoddp.errors import NothingReadable

FUZZ = settings(
    max_examples=int(os.environ.get("FUZZ_EXAMPLES", "15")),
    deadline=None,
    derandomize="FUZZ_EXAMPLES" not in os.environ,
    suppress_health_check=[HealthCheck.too_slow],
)


@st.composite
def damaged(draw: st.DrawFn) -> str:
    """A capture with some pieces cut out, doubled, swapped or overwritten."""
    text = capture(draw(st.sampled_from(IDS)))[0]
    for _ in range(draw(st.integers(1, 6))):
        a, b = sorted(draw(st.tuples(*[st.integers(0, len(text))] * 2)))
        junk = draw(st.sampled_from(["", "\n", "\t", "\x00", "\x1b[", "…", "9" * 30, ":", text[a:b] * 2]))
        text = text[:a] + junk + text[draw(st.sampled_from([a, min(a + 1, len(text)), b])) :]
    return text


@pytest.mark.parametrize("read", dict.fromkeys(READERS.values()))
@FUZZ
@given(text=damaged() | st.text(max_size=400) | st.binary(max_size=400).map(lambda raw: raw.decode(errors="replace")))
def test_no_text_is_too_damaged(read: Callable[[str], Result], text: str) -> None:
    found = try_to_read(read, text)
    if found is not None:
        assert all(isinstance(sentence, str) and "\n" not in sentence for sentence in found["missing"])


UNPLEASANT = [
    "\x1b[" * 500_000,
    "\x1b]" + "0" * 1_000_000,
    "[1;" * 330_000,
    "9" * 1_000_000,
    " " * 1_000_000,
    "CA '" * 250_000,
    "GPU 0: " + "a (UUID: " * 100_000,
    "MIG " + " " * 1_000_000 + "Device",
    "CA 'a'\nPort 1:\nState: Active\n" * 35_000,
    "hca_id: a\nport: 1\nstate: x\n" * 38_000,
    "".join(f"CA 'a{i}'\nPort 1:\n" for i in range(45_000)),
    "GPU 0: a\nLink 0: 1 GB/s\n" * 43_000,
    "\tGPU0\tGPU1\n" + "GPU0\tX\tOK\nGPU0\tOK\tX\n" * 45_000,
    " ".join(f"GPU{i}" for i in range(1000)) + "\n" + "GPU0 " * 200_000,
    "mlx5_0 1 3 0000:0000:0000:0000:0000:ffff:0a00:0001 10.0.0.1 v2 a\n" * 16_000,
]


@pytest.mark.parametrize("text", UNPLEASANT, ids=range(len(UNPLEASANT)))
def test_four_times_the_text_takes_about_four_times_as_long(text: str) -> None:
    """A pattern that looks at every pair of places takes sixteen times as long."""

    def seconds(read: Callable[[str], Any], length: int) -> float:
        began = time.process_time()
        with contextlib.suppress(NothingReadable):
            read(text[:length]).plain()
        return time.process_time() - began

    for read in READERS.values():
        # Others use the machine too: the fastest of a few tells, and one that is fast enough.
        times = []
        while len(times) < 3 and min(times, default=1.0) >= 0.5:
            times.append(seconds(read, len(text)))
        whole = min(times)
        assert whole < 0.5 or whole < 10 * min(seconds(read, len(text) // 4) for _ in range(3))
