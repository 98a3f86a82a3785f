"""Every message comes back as it was sent; anything else on the socket is a ValueError."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from autoddp.bench import LinkModel
from autoddp.bench.model import Residual, Segment
from autoddp.codec import replace
from autoddp.knobs import AS_WRITTEN, Configuration, GradientError
from autoddp.wire import (
    LARGEST,
    VERSION,
    BlockDone,
    Entry,
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
    start_settings=(Configuration({"interfaces": "eth0,eth1"}),),
    link=LinkModel((Segment(0.0, 1e-4, 1e-9),), (Residual(1024, -0.01),)),
)
CONFIGURATION = Configuration({"bucket_cap_mb_list": [2, 0.5], "hook": "bf16"})
FAILED = Entry(Measure(2, AS_WRITTEN, 1, 2), None, "rank 1 killed by SIGABRT")
MEASURED = Entry(Measure(3, CONFIGURATION, 1, 2), BlockDone(3, (0.1, 0.2), 0.25, 0.001))
OVERFLOWS = GradientError(4, float("inf"), 0.5, float("inf"), "0.weight", 2.5, False)
ASKED = Measure(7, CONFIGURATION, 3, 40, reduce=False, apply=False, left=-0.5, missed=(FAILED, MEASURED))
MESSAGES: list[Message] = [
    Hello(VERSION, rank=3, local_rank=1, pid=4711, restart=2),
    Welcome(True),
    Welcome(False),
    Ready(FACTS),
    Measure(0, AS_WRITTEN, 1, 2),
    ASKED,
    BlockDone(7, (0.1, 1 / 3, 1e-9), 0.25, 0.001),
    BlockDone(7, (), 0.0, 0.0, measure=ASKED, error=OVERFLOWS, left=12.0, inputs=("0: float32[64, *]",)),
    Finish(again=True),
    Goodbye(1, "RuntimeError: Übermut"),
    Goodbye(0, ""),
    StopTuning("rm deletes /data/ck.pt"),
    StopTuning("rm deletes /data/\udcff.pt"),  # a file name that is not UTF-8
]
SOUND = encode(Hello(VERSION, 0, 0, 1, 0))
BLOCK = json.loads(encode(MESSAGES[7]))


def changed(plain: dict[str, Any], **values: Any) -> bytes:
    return json.dumps({**plain, **values}).encode()


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
    "what messages have in common": b'{"is": "Message"}',
    "name of another type": b'{"is": ["Hello"]}',
    "missing field": b'{"is": "Hello", "version": 1, "rank": 0, "local_rank": 0, "pid": 1}',
    "surplus field": SOUND[:-1] + b', "password": "x"}',
    "a field's name that is not UTF-8": SOUND[:-1] + b', "\\udcff": "x"}',
    "a text for a number": SOUND.replace(b'"rank": 0', b'"rank": "0"'),
    "a fraction for a number": SOUND.replace(b'"rank": 0', b'"rank": 0.5'),
    "true for a number": SOUND.replace(b'"rank": 0', b'"rank": true'),
    "ready without facts": b'{"is": "Ready"}',
    "facts of another type": b'{"is": "Ready", "facts": 3}',
    "facts that lack a field": b'{"is": "Ready", "facts": {"devices": [], "knobs": []}}',
    "a surplus fact": encode(Ready(FACTS)).replace(b'"nodes"', b'"is_ours": false, "nodes"'),
    "seconds of another type": changed(BLOCK, seconds=3),
    "seconds that are texts": changed(BLOCK, seconds=["0.1"]),
    "a configuration of another type": changed(BLOCK["measure"], configuration=[]),
    "a knob that does not exist": changed(BLOCK["measure"], configuration={"bucket": 3}),
    "a knob's value that breaks its rule": changed(BLOCK["measure"], configuration={"bucket_cap_mb": -1}),
    "an entry of another type": changed(BLOCK["measure"], missed=[3]),
    "nested too deep": b'{"is": "Ready", "facts": ' + b"[" * 1_000_000,
    "a number of too many digits": b'{"is": "Welcome", "go": ' + b"9" * 1_000_000 + b"}",
}


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_round_trip(message: Message) -> None:
    data = encode(message)
    assert decode(data) == message
    assert encode(decode(data)) == data
    assert json.loads(data)["is"] == type(message).__name__


def test_every_message_is_tried() -> None:
    assert {type(message) for message in MESSAGES} == set(Message.__subclasses__())


@pytest.mark.parametrize("name", GARBAGE)
def test_garbage(name: str) -> None:
    began = time.process_time()
    with pytest.raises(ValueError, match="not a message of this protocol"):
        decode(GARBAGE[name])
    assert time.process_time() - began < 2.0


def test_the_longest_message_fits() -> None:
    """After a restart all that was measured goes along: here a thousand blocks of three hundred steps."""
    entry = replace(MEASURED, done=BlockDone(3, (1 / 3,) * 300, 0.25, 0.001, slowest=(1 / 3,) * 300))
    assert len(encode(replace(ASKED, missed=(entry,) * 1000))) < LARGEST
