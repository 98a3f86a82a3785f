"""The messages, one dataclass each. A trial is a call: `Measure` goes to rank 0, `BlockDone` comes back.

    worker → launcher    Hello (every local rank), Ready, BlockDone (local rank 0), Goodbye (whoever leaves),
                         StopTuning (any process of the script)
    launcher → worker    Welcome (answers Hello), Measure, Finish

Encoded as one JSON object with the message's name under "is". An unknown name, a missing or a surplus field is a
ValueError: both ends come from one installation, so that is a fault of ours or a stranger on the socket.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any

from autoddp.knobs import GradientError
from autoddp.wire.job_facts import JobFacts

VERSION = 2
NO_LIMIT = 1e9
"""Seconds that nothing takes. JSON has no infinity."""


@dataclass(frozen=True)
class Hello:
    """A worker process has started and wraps its first DDP model."""

    version: int
    rank: int
    local_rank: int
    pid: int
    restart: int
    """How often elastic has restarted the group: TORCHELASTIC_RESTART_COUNT."""


@dataclass(frozen=True)
class Welcome:
    """`go` is False when tuning cannot go on: the worker then leaves at once with exit code 0."""

    go: bool


@dataclass(frozen=True)
class Ready:
    """The first step boundaries have passed; trials may begin."""

    facts: JobFacts


@dataclass(frozen=True)
class Measure:
    """Turn to `configuration`, let `warmup` steps pass, then time `steps` steps; see `at_once` for what a step is."""

    index: int
    """Position in the journal, the same on every node."""
    configuration: dict[str, Any]
    warmup: int
    steps: int
    reduce: bool = True
    """False: with DDP's reduction switched off, for the headroom."""
    turn: bool = True
    """False: the configuration is in effect already; measure on."""
    compare: int = 0
    """Steps after the timed ones, on which the gradients also travel whole: how far is the hook from the exact mean?"""
    at_once: int = 1
    """Steps of the script that the configuration makes one: that many are counted, and timed, as one."""
    left: float = NO_LIMIT
    """Seconds that tuning may still take, by the clock of the launcher that asks."""
    missed: tuple[dict[str, Any], ...] = ()
    """After another start: journal entries before this one that other nodes may lack; see `launch.journal`."""


@dataclass(frozen=True)
class BlockDone:
    """Seconds of each measured step (mean over ranks), and of the warm-up before them, in all."""

    index: int
    seconds: tuple[float, ...]
    warmup_seconds: float
    turn_seconds: float
    """Wall time from the last step before the turn to the first step after it."""
    measure: dict[str, Any] = field(default_factory=dict)
    """The `Measure` it answers, so that every node's launcher can keep the journal."""
    error: GradientError | None = None
    """Of the steps compared, where the configuration has a hook of ours."""
    compilations: int = 0
    """How often torch.compile was at work on rank 0, from the turn on."""
    left: float = NO_LIMIT
    """`Measure.left` of the order, which the launcher puts here."""
    slowest: tuple[float, ...] = ()
    """Seconds of each measured step on the rank that was slowest in it: where ranks run free, means hide a slow one."""
    inputs: tuple[str, ...] = ()
    """What the models have been called with since the start, on all ranks, see `recipe.inputs`."""


@dataclass(frozen=True)
class Finish:
    """The study is over: every rank leaves with exit code 0. `recipe` is the text every node writes."""

    recipe: str
    again: bool = False
    """True: this start is over, the study is not. Another start follows, with other variables."""


@dataclass(frozen=True)
class Goodbye:
    """A worker leaves before the study is over: with an exception's text, or "" when its script simply ended."""

    rank: int
    reason: str


@dataclass(frozen=True)
class StopTuning:
    """A process of the script is about to do what would outlast the tuning run: `reason` names it for the user.

    It may be the first and only message on a connection: the process need not be a rank. The answer is a `Welcome`.
    """

    reason: str
    overlay_is_to_blame: bool = False
    """True: it failed only because of the overlay; another attempt under guard makes sense."""


Message = Hello | Welcome | Ready | Measure | BlockDone | Finish | Goodbye | StopTuning
_TYPES: dict[str, type[Any]] = {
    kind.__name__: kind for kind in (Hello, Welcome, Ready, Measure, BlockDone, Finish, Goodbye, StopTuning)
}


def encode(message: Message) -> bytes:
    """One message as UTF-8 JSON."""
    return json.dumps({"is": type(message).__name__, **asdict(message)}).encode()


def decode(data: bytes) -> Message:
    """The message back; ValueError for anything that is not one."""
    try:
        fields = json.loads(data)
        kind = _TYPES[fields.pop("is")]
        if kind is Ready:
            fields["facts"] = _facts(fields["facts"])
        if kind is Measure and "missed" in fields:
            fields["missed"] = tuple(fields["missed"])
        message: Message = block_of(fields) if kind is BlockDone else kind(**fields)
    except (KeyError, TypeError, AttributeError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"not a message of this protocol: {error!r}") from error
    return message


def block_of(fields: dict[str, Any]) -> BlockDone:
    """A block back from its JSON types."""
    error = GradientError(**fields["error"]) if fields.get("error") else None
    lists = {name: tuple(fields.get(name, ())) for name in ("seconds", "slowest", "inputs")}
    return BlockDone(**{**fields, **lists, "error": error})


def _facts(fields: dict[str, Any]) -> JobFacts:
    plain: dict[str, Any] = {n: tuple(value) if isinstance(value, list) else value for n, value in fields.items()}
    return JobFacts(**plain)
