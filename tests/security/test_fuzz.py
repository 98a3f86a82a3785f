"""Whatever an input holds: its reader reads it or refuses it by its one typed error, soon, and in little memory.

`make fuzz` gives each reader 100,000 damaged inputs, `make test` some dozens. A failure names the number of the
input, and `damaged(reader, number)` makes it again.
"""

from __future__ import annotations

import contextlib
import gc
import io
import json
import os
import random
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from autoddp import codec
from autoddp.attempts.resuming import _entries
from autoddp.cli import predict
from autoddp.errors import AutoddpError, NothingReadable, RecipeError, UsageError
from autoddp.knobs import AS_WRITTEN, Configuration
from autoddp.recipe import Recipe, parse
from autoddp.report.page import page
from autoddp.runs.owner import Mark
from autoddp.topology.tool_outputs import SOURCES
from autoddp.wire import (
    VERSION,
    BlockDone,
    Entry,
    Finish,
    Goodbye,
    Hello,
    Measure,
    Message,
    Ready,
    StopTuning,
    Welcome,
    WorkerConfig,
    decode,
    encode,
)

TESTS = Path(__file__).resolve().parents[1]
EACH = 25 * int(os.environ["FUZZ_EXAMPLES"]) if "FUZZ_EXAMPLES" in os.environ else 75
PER_MEGABYTE = 1.0  # seconds of this process's CPU
TRIES = 3
SMALLEST = 0.3  # seconds: the collector may run
LEAST_MEMORY, MEMORY = 2**26, 64  # bytes, and times the input

JUNK = [
    *(b"", b"\n", b"\r", b"\t", b"\0", b"\x1b[2J", b"\xff\xfe", b"\xed\xa0\x80", "…".encode(), "\u202e".encode()),
    *(b"-", b"-1", b"0", b"1e999", b"NaN", b"Infinity", b"null", b"true", b'""', b'"', b"[", b"]", b"{", b"}", b"[["),
    *(b",", b":", b"'", b'"""', b"\\", b"\\u0000", b"\\ud800", b"#", b"$(touch x)", b"<script>", b"[red]", b"9" * 5000),
    *(b'"is": "Hello"', b"inf", b"1979-05-27T07:32:00Z", b"0x10", b"1_000", b"__import__('os')", b" " * 200, b"="),
    *(b"9" * 30, b"a." * 500),
]


def messages() -> list[bytes]:
    asked = Measure(3, Configuration({"hook": "bf16", "bucket_cap_mb_list": [1, 0.5]}), 2, 10, left=3.5)
    done = BlockDone(3, (0.01, 0.02), 0.1, 0.001, asked, slowest=(0.02,), inputs=("0: float32[64, *]",))
    every = [Hello(VERSION, 1, 1, 77, 0), Welcome(True), asked, done, Finish(), Ready(facts())]
    return [encode(one) for one in (*every, Goodbye(0, "RuntimeError"), StopTuning("it would upload"))]


def facts() -> Any:
    from autoddp.wire import JobFacts

    return JobFacts(2, 1, "gloo", ("cpu",), "2.13.0", 1 << 20, "0123456789abcdef", {"bucket_cap_mb": "25"}, ("hook",))


def journal() -> bytes:
    asked = [Measure(number, AS_WRITTEN, 2, 10) for number in range(20)]
    entries = [Entry(one, BlockDone(one.index, (0.01,) * 10, 0.1, 0.001)) for one in asked]
    entries.append(Entry(Measure(20, AS_WRITTEN, 1, 1), None, "x"))
    return "".join(codec.encode(entry) + "\n" for entry in entries).encode()


def orders() -> bytes:
    configuration = Configuration({"hook": "fp16"})
    return codec.encode(WorkerConfig(socket="/s", variables={"A": "b"}, configuration=configuration)).encode()


def mark() -> bytes:
    owner = '{"host": "a", "boot_id": "b", "pid": 5, "started": "7", "pid_namespace": "pid:[1]"}'
    rest = '"run": "r", "path": "/x", "inode": 5, "made": 1.5, "locked": true, "folders": ["/y"], "ended": false'
    return f'{{"kind": "folder of an autoddp run", "owner": {owner}, {rest}}}'.encode()


def captures(folder: str, *names: str) -> list[bytes]:
    return [path.read_bytes() for name in names for path in sorted((TESTS / "data" / folder).glob(name))]


def text_of(data: bytes) -> str:
    return data.decode(errors="replace")


@dataclass
class Reader:
    """Who reads, what it reads, and by which errors it may refuse."""

    read: Callable[[bytes], Any]
    corpus: Callable[[], list[bytes]]
    refuses: tuple[type[BaseException], ...] = ()
    answers: tuple[type, ...] = (object,)
    large: list[bytes] = field(default_factory=list)
    """As large as may be."""


def journal_entries(data: bytes) -> list[Entry]:
    file = Path(os.environ["FUZZ_FILE"])
    file.write_bytes(data)
    return list(_entries(file))


RANK = {"rank": 0, "host": "a", "data_ms": 1.5, "exposed_ms": 9.1, "waiting_ms": 3.2, "step_ms": 20.0}
FINDING = {"cause": "data_loader", "ranks": [0, 1], "ms": 1.5, "low": 1.2, "high": 1.7, "status": "proved", "fix": "x"}
SPAN = {"name": "forward", "begin": 0.001, "end": 0.004}
BUCKET = {"index": 0, "bytes": 1048576, "launched": 0.002, "ended": 0.003}
TIMELINE = {"host": "a", "began": 0.1, "error": 1e-4, "steps": [0.01, 0.02], "spans": [SPAN], "buckets": [BUCKET]}
TRIAL = {"number": 1, "rung": "near", "configuration": {"hook": "bf16"}, "seconds": 0.02, "predicted": 0.03}
SUMMARY = {
    "schema": 1,
    "script": "train.py",
    "baseline": TRIAL,
    "trials": [TRIAL, TRIAL],
    "ladder": [{**TRIAL, "speedup": {"ratio": 1.5, "low": 1.2, "high": 1.9}, "error": {"relative": 0.01}}],
    "decision": {"configuration": {"hook": "bf16"}, "why": "it is faster"},
    "diagnosis": {
        "step_ms": 20.0,
        "ranks": [RANK, {**RANK, "rank": 1}],
        "findings": [FINDING],
        "waterfall": [{"cause": "as written", "step_ms": 20.0}, {"cause": "straggler", "step_ms": 15.5}],
    },
    "timelines": [{"rank": 0, **TIMELINE}, {"rank": 1, **TIMELINE}],
    "topology": "host",
}
"""Of a run, with all that a page draws."""


PROFILE = {
    "world_size": 2,
    "nodes": 1,
    "backend": "gloo",
    "ddp_arguments": {"bucket_cap_mb": "25", "bucket_cap_mb_list": "[1, 2]"},
    "gradients": [{"shape": [512, 512], "bytes": 1048576}, {"shape": [512], "bytes": 2048}],
    "fixed": 0.002,
    "before": 0.008,
    "backward": 0.02,
    "ready": [0.02, 0.01],
    "link": {"segments": [{"from_bytes": 0.0, "alpha_seconds": 0.001, "seconds_per_byte": 1e-8}], "residuals": []},
    "coefficients": {"burst": 1000.0, "computing": {"threads=4": 0.5}},
    "measured": 0.05,
    "typical_error": 0.03,
    "large_error": 0.09,
}
STUDIED = {**SUMMARY, "profile": PROFILE, "trials": [{**TRIAL, "state": "measured"}]}
"""Of a run, with all that a prediction reads."""


def prediction(data: bytes) -> bool:
    file = Path(os.environ["FUZZ_FILE"]).with_name("summary.json")
    file.write_bytes(data)
    with contextlib.redirect_stdout(io.StringIO()) as said:
        predict.run([str(file), "--nodes", "2", "--link", "1Gbit", "--hook", "bf16", "--json"])
    answer = json.loads(said.getvalue(), parse_constant=pytest.fail)
    assert all(0 <= row["efficiency"] <= 1 for row in answer["rows"] if row["efficiency"] is not None)
    return True


M = 2**20
R = 2**16
"""The largest recipe that is read."""
NESTED = [b"[" * M, b'{"a":' * (M // 5), b"9" * M, b'"' + b"\\u0000" * (M // 6), b"[" + b"[]," * (M // 3)]
READERS = {
    "recipe": Reader(
        lambda data: parse(text_of(data), "train.autoddp.toml"),
        lambda: [path.read_bytes() for path in (TESTS / "recipe").glob("*.toml")],
        (RecipeError,),
        (Recipe,),
        [
            b"a" + b".a" * (R // 2 - 8) + b" = 1",
            (b"a" + b".a" * 60 + b"\n=1\n") * (R // 130),
            b"".join(b"a%d" % i + b".a" * 60 + b"=1\n" for i in range(R // 140)),
            b"x = " + b"[" * (R - 4),
            b"x = " + b"{a=" * (R // 3 - 4),
            b"[a]\n" * (R // 4),
            b"x = " + b"9" * (R - 4),
            b'x = """' + b"\\\n" * (R // 2 - 8),
            b"#" * R,
            b"schema = 1\n" + b"[[ladder]]\n" * (R // 11 - 2),
            b"".join(b"[a%d]\n" % i for i in range(R // 10)),
            b"".join(b"k%d = 1\n" % i for i in range(R // 12)),
            b"".join(b"[a%d.b.c.d.e]\n" % i for i in range(R // 20)),
            b"x = 1\n" * (8 * R),
        ],
    ),
    "journal": Reader(
        journal_entries,
        lambda: [journal()],
        (),
        (list,),
        [*NESTED, journal() * (M // len(journal())), b"\n" * M, b"{}\n" * (M // 3)],
    ),
    "wire": Reader(
        decode,
        messages,
        (ValueError,),
        (Message,),
        [*NESTED, b'{"is": "Goodbye", "rank": 0, "reason": "' + b"x" * M + b'"}'],
    ),
    "worker's orders": Reader(
        lambda data: WorkerConfig.parse(text_of(data)),
        lambda: [orders()],
        (ValueError,),
        (WorkerConfig,),
        NESTED,
    ),
    "summary": Reader(
        lambda data: page(codec.decode(data, dict)),
        lambda: [codec.encode(SUMMARY).encode()],
        (ValueError,),
        (str,),
        [*NESTED, b'{"schema": 1, "trials": [], "script": "' + b"<" * M + b'"}'],
    ),
    "prediction": Reader(prediction, lambda: [codec.encode(STUDIED).encode()], (UsageError,), (bool,)),
    "mark": Reader(Mark.parse, lambda: [mark()], (), (Mark, type(None)), NESTED),
    **{
        option: Reader(
            lambda data, option=option: SOURCES[option].read(text_of(data)).plain(),  # type: ignore[misc]
            lambda folder=folder, names=names: captures(folder, *names),  # type: ignore[misc]
            (NothingReadable,),
            (dict,),
        )
        for option, (folder, *names) in {
            "nccl_log": ("nccl", "*.log"),
            "topo_matrix": ("topo", "*.txt"),
            "ibv_devinfo": ("rdma", "ib*.txt"),
            "show_gids": ("rdma", "*gids*.txt"),
            "gpu_list": ("rdma", "*.txt"),
            "nvlink_status": ("rdma", "*.txt"),
            "p2p_status": ("rdma", "*.txt"),
        }.items()
    },
}


@cache
def corpus(name: str) -> list[bytes]:
    found = READERS[name].corpus()
    assert found
    return found


def damaged(name: str, number: int) -> bytes:
    """Input `number` of a reader: pieces cut out, doubled, moved, overwritten, single bits turned; or noise alone.

    The first one is whole: strict readers take next to nothing that is damaged, and must be seen to take anything.
    """
    chance = random.Random(f"{name} {number}")
    data = chance.choice(corpus(name))
    if number == 0:
        return data
    if number % 50 == 49:
        return chance.randbytes(chance.randrange(400))
    for _ in range(chance.randrange(1, 7)):
        a, b = sorted(chance.randrange(len(data) + 1) for _ in range(2))
        b = min(b, a + chance.choice([1, 4, 30, 200, len(data)]))
        match chance.randrange(6):
            case 0:
                data = data[:a] + data[b:]
            case 1:
                data = data[:a] + chance.choice(JUNK) + data[b:]
            case 2:
                data = data[:a] + chance.choice(JUNK) + data[a:]
            case 3:
                data = data[:b] + data[a:b] * chance.choice([1, 2, 5]) + data[b:]
            case 4:
                data = data[a:b] + data[:a] + data[b:]
            case _ if data:
                place = min(a, len(data) - 1)
                data = data[:place] + bytes([data[place] ^ 1 << chance.randrange(8)]) + data[place + 1 :]
    return data


def outcome(reader: Reader, data: bytes) -> bool:
    """Whether it was read. Any other error than the reader's own is raised."""
    took = []
    while len(took) < TRIES:  # the first time may import a module, or collect the garbage of other tests
        began = time.process_time()
        try:
            answer = reader.read(data)
        except reader.refuses as refusal:
            answer, said = None, str(refusal) if isinstance(refusal, AutoddpError) else ""
        else:
            said = ""
            assert isinstance(answer, reader.answers)
        took.append(time.process_time() - began)
        assert not said or said.isprintable(), said
        if took[-1] <= SMALLEST + PER_MEGABYTE * len(data) / M:
            return bool(answer)
    raise AssertionError(f"{min(took):.2f} s for {len(data)} bytes")


@pytest.fixture(autouse=True)
def _file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUZZ_FILE", str(tmp_path / "journal.jsonl"))


@pytest.mark.parametrize("name", READERS)
def test_no_input_is_too_damaged(name: str) -> None:
    reader, was_read = READERS[name], 0
    for number in range(EACH):
        data = damaged(name, number)
        try:
            was_read += outcome(reader, data)
        except BaseException as error:
            raise AssertionError(f"input {number} of {name}, {len(data)} bytes: {data[:300]!r}") from error
    assert was_read > 0  # else nothing but the first look was tried


@pytest.mark.parametrize(
    ("name", "number"), [(name, number) for name, reader in READERS.items() for number in range(len(reader.large))]
)
def test_large_inputs_take_little(name: str, number: int) -> None:
    reader = READERS[name]
    data = reader.large[number]
    outcome(reader, data)
    gc.collect()
    tracemalloc.start()
    try:
        with contextlib.suppress(*reader.refuses):
            reader.read(data)
        assert tracemalloc.get_traced_memory()[1] <= LEAST_MEMORY + MEMORY * len(data)
    finally:
        tracemalloc.stop()
