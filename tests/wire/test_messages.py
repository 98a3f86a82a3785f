"""Every message comes back as it was sent; anything else on the socket is a ValueError."""

from __future__ import annotations

import json

import pytest

from autoddp.wire import (
    VERSION,
    BlockDone,
    Finish,
    Goodbye,
    Hello,
    JobFacts,
    Measure,
    Message,
    Ready,
    StopTuning,
    Welcome,
    decode,
    encode,
)

FACTS = JobFacts(
    world_size=4,
    nodes=2,
    backend="gloo",
    devices=("cpu", "NVIDIA H100"),
    torch="2.13.0",
    gradient_bytes=123_456_789_012,
    parameters_digest="0123456789abcdef",
    ddp_arguments={"bucket_cap_mb": "25"},
    knobs=("bucket_cap_mb", "hook"),
    left_out={"static_graph": "gradients did not become ready once per step in one order"},
    micro_batches=2.5,
)
FAILED = {"asked": {"index": 2}, "done": None, "failure": "rank 1 killed by SIGABRT"}
MESSAGES: list[Message] = [
    Hello(VERSION, rank=3, local_rank=1, pid=4711, restart=2),
    Welcome(True),
    Welcome(False),
    Ready(FACTS),
    Measure(0, {}, 1, 2),
    Measure(7, {"bucket_cap_mb_list": [2, 0.5], "hook": "bf16"}, 3, 40, reduce=False, turn=False, missed=(FAILED,)),
    BlockDone(7, (0.1, 1 / 3, 1e-9), 0.25, 0.001),
    BlockDone(7, (), 0.0, 0.0, measure={"index": 7, "configuration": {"hook": "bf16"}, "missed": [FAILED]}),
    Finish('# ein Rezept: ×2\n[made_by]\nautoddp = "0.1.0"\n'),
    Goodbye(1, "RuntimeError: Übermut"),
    Goodbye(0, ""),
    StopTuning("rm deletes /data/ck.pt"),
]
SOUND = encode(Hello(VERSION, 0, 0, 1, 0))
GARBAGE = {
    "empty": b"",
    "not json": b"GET / HTTP/1.1\r\n\r\n",
    "not utf-8": b'{"is": "\xff\xfe"}',
    "cut": SOUND[:-3],
    "number": b"7",
    "list": b'["Hello"]',
    "null": b"null",
    "no name": b'{"rank": 1}',
    "unknown name": b'{"is": "Quit"}',
    "a class that is no message": b'{"is": "JobFacts"}',
    "name of another type": b'{"is": ["Hello"]}',
    "missing field": b'{"is": "Hello", "version": 1, "rank": 0, "local_rank": 0, "pid": 1}',
    "surplus field": SOUND[:-1] + b', "password": "x"}',
    "ready without facts": b'{"is": "Ready"}',
    "facts of another type": b'{"is": "Ready", "facts": 3}',
    "facts that lack a field": b'{"is": "Ready", "facts": {"devices": [], "knobs": []}}',
    "seconds of another type": b'{"is": "BlockDone", "index": 1, "seconds": 3, "warmup_seconds": 0, "turn_seconds": 0}',
}


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_round_trip(message: Message) -> None:
    data = encode(message)
    assert decode(data) == message
    assert encode(decode(data)) == data
    assert json.loads(data)["is"] == type(message).__name__


def test_every_message_is_tried() -> None:
    assert {type(message) for message in MESSAGES} == set(Message.__args__)


@pytest.mark.parametrize("name", GARBAGE)
def test_garbage(name: str) -> None:
    with pytest.raises(ValueError, match="not a message of this protocol"):
        decode(GARBAGE[name])
