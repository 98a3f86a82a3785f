"""For any value of any field: each message, and what the launcher tells a worker, comes back as it was sent."""

from __future__ import annotations

import dataclasses
import functools
import types
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import pytest

pytest.importorskip("hypothesis")

from hypothesis import given, settings
from hypothesis import strategies as some

from autoddp.codec import Struct
from autoddp.knobs import Configuration, Rung
from autoddp.wire import Entry, Message, WorkerConfig, decode, encode
from autoddp.wire.worker_config import APPLY, TUNE

LEAVES: dict[Any, Any] = {
    bool: some.booleans(),
    int: some.integers(),
    float: some.floats(allow_nan=False),
    str: some.text(some.characters(exclude_categories=())),  # file names may have bytes that are not UTF-8
    type(None): some.none(),
    Rung: some.sampled_from(Rung),
    Configuration: some.sampled_from(
        [{}, {"hook": "bf16"}, {"bucket_cap_mb_list": [1, 0.5]}, {"static_graph": True}, {"interfaces": "a,b"}]
    ).map(Configuration),
}


@functools.cache
def values_of(kind: Any) -> Any:
    """A strategy for all values of a type, as its fields are declared."""
    if kind in LEAVES:
        return LEAVES[kind]
    parts = get_args(kind)
    if get_origin(kind) is Annotated:
        assert parts[0] is int, kind
        return some.integers(min_value=next(m.ge if m.gt is None else m.gt + 1 for m in parts[1:]))
    if get_origin(kind) is tuple:
        # An entry holds a measurement, and that may hold entries: three of them, and not without end.
        return some.deferred(lambda: some.lists(values_of(parts[0]), max_size=1 if parts[0] is Entry else 3).map(tuple))
    if get_origin(kind) is dict:
        return some.dictionaries(*map(values_of, parts), max_size=3)
    if get_origin(kind) in (Union, types.UnionType):
        return some.one_of(*map(values_of, parts))
    assert issubclass(kind, Struct) or dataclasses.is_dataclass(kind), kind
    return some.deferred(lambda: some.builds(kind, **{n: values_of(hint) for n, hint in fields_of(kind).items()}))


def fields_of(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind, include_extras=True)


@pytest.mark.parametrize("kind", Message.__subclasses__(), ids=lambda kind: kind.__name__)
def test_any_message_comes_back(kind: type[Message]) -> None:
    @settings(max_examples=60, deadline=None, database=None)
    @given(values_of(kind))
    def check(message: Message) -> None:
        data = encode(message)
        assert decode(data) == message
        assert encode(decode(data)) == data

    check()


@settings(max_examples=60, deadline=None, database=None)
@given(values_of(WorkerConfig))
def test_any_worker_config_comes_back(config: WorkerConfig) -> None:
    variables = config.environment({})
    assert (TUNE in variables, APPLY in variables) == (bool(config.socket), not config.socket)
    text = variables.get(TUNE) or variables[APPLY]
    assert text.isascii()  # whatever the locale and the names of files: it is a variable's value
    assert WorkerConfig.parse(text) == config


@pytest.mark.parametrize(
    "text",
    ["", "[]", "3", '{"surplus": 1}', '{"bypass": 1}', '{"configuration": {"hook": 1}}', '{"watch": {}}'],
)
def test_what_is_no_worker_config(text: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011
        WorkerConfig.parse(text)


@settings(max_examples=200, deadline=None, database=None)
@given(
    message=values_of(Union[tuple(Message.__subclasses__())]),  # noqa: UP007
    place=some.floats(0, 1),
    cut=some.integers(0, 8),
    put=some.binary(max_size=4),
)
def test_any_damage_is_a_value_error_or_a_message(message: Message, place: float, cut: int, put: bytes) -> None:
    data = encode(message)
    start = int(place * len(data))
    try:
        found = decode(data[:start] + put + data[start + cut :])
    except ValueError:
        return
    assert isinstance(found, Message)
