"""NCCL's log cut, torn and damaged at any place: refused or read, soon, and no transport is made up."""

from __future__ import annotations

import os
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from nccl_captures import IDS, TEXTS, transports

from autoddp.topology.nccl_log import transport_kind

FUZZ = settings(
    max_examples=int(os.environ.get("FUZZ_EXAMPLES", "60")),
    deadline=None,
    derandomize="FUZZ_EXAMPLES" not in os.environ,
    suppress_health_check=[HealthCheck.too_slow],
)

FULL = {name: transports(text) for name, text in TEXTS.items()}
MESSAGES = sorted({line for text in TEXTS.values() for line in text.splitlines() if "NCCL INFO " in line})


def is_within(part: dict[str, list[str]], *wholes: dict[str, list[str]]) -> bool:
    known = {(pair, text) for whole in wholes for pair, texts in whole.items() for text in texts}
    return {(pair, text) for pair, texts in part.items() for text in texts} <= known


@FUZZ
@given(st.sampled_from(IDS), st.data())
def test_a_cut_log_has_no_other_transport(name: str, data: st.DataObject) -> None:
    text = TEXTS[name]
    assert is_within(transports(text[: data.draw(st.integers(0, len(text)))]), FULL[name])


@FUZZ
@given(st.sampled_from(IDS), st.sampled_from(MESSAGES), st.booleans(), st.data())
def test_a_line_written_anywhere_into_a_log_makes_no_other_transport(
    name: str, message: str, over: bool, data: st.DataObject
) -> None:
    text, line = TEXTS[name], message + "\n"
    place = data.draw(st.integers(0, len(text)))
    torn = text[:place] + line + text[place + over * len(line) :]
    assert is_within(transports(torn), FULL[name], transports(line))


@st.composite
def damaged(draw: st.DrawFn) -> str:
    """A capture with pieces cut out, doubled, overwritten or glued."""
    text = TEXTS[draw(st.sampled_from(IDS))]
    for _ in range(draw(st.integers(1, 6))):
        a, b = sorted(draw(st.tuples(*[st.integers(0, len(text))] * 2)))
        junk = draw(st.sampled_from(["", "\n", "\r", "\x00", "\x1b[", "…", "9" * 30, " via ", "NCCL WARN ", text[a:b]]))
        text = text[:a] + junk + text[draw(st.sampled_from([a, min(a + 1, len(text)), b])) :]
    return text if draw(st.booleans()) else text.replace("\n", "", draw(st.integers(0, 9)))


@FUZZ
@given(damaged() | st.text(max_size=400) | st.binary(max_size=400).map(lambda raw: raw.decode(errors="replace")))
def test_no_text_is_too_damaged(text: str) -> None:
    for texts in transports(text).values():
        assert {transport_kind(each).partition("/")[0] for each in texts} <= {"P2P", "SHM", "NET"}


UNPLEASANT = [
    "NCCL INFO " * 100_000,
    "NCCL WARN " * 100_000,
    "NCCL WARN :1:1 [" * 60_000,
    "NCCL WARN " + ":1" * 500_000 + "NCCL INFO ",
    "NCCL INFO Channel 00/00 :" + " " * 1_000_000,
    "NCCL INFO Channel 00/00 :" + " 1" * 500_000,
    "NCCL INFO Channel 00/0 : 1[1] -> 0[0] [send] via NET/" + "a " * 500_000,
    "NCCL INFO Channel 00/0 : 1[1] -> 0[0] [send] via NET/" + "a" * 1_000_000,
    "NCCL INFO Using network " + "a " * 500_000,
    "NCCL INFO " + "rank 1 nranks " * 70_000,
    "NCCL INFO " + "comm 0x" + "1" * 1_000_000,
    "0 via " * 160_000,
    "NCCL version 2.4.8+cuda" * 43_000,
    "".join(f"NCCL INFO Channel 00/0 : {i} -> {i + 1} via P2P/IPC\n" for i in range(20_000)),
    "".join(f"NCCL WARN {i}\n" for i in range(60_000)),
    "\n" * 1_000_000,
]


@pytest.mark.parametrize("text", UNPLEASANT, ids=range(len(UNPLEASANT)))
def test_time_is_linear(text: str) -> None:
    began = time.process_time()
    transports(text)
    assert time.process_time() - began < 15  # a hundredth of it is normal; quadratic would be minutes
