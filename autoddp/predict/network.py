"""All-reduces on a link, in time: gloo moves two buckets at once, which share the link; NCCL moves one after another.

    network = Network(Link(latency=2e-4, per_byte=8e-9), at_once=2)
    first = network.launch(now=0.01, size=4_000_000)
    network.until_done(first)                                # seconds at which it has ended

A launch must not be earlier than the one before it, because ranks issue their collectives in one order.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

_EPSILON = 1e-12  # seconds; less is left over by rounding only


@dataclass(frozen=True)
class Link:
    """What a reduction of all ranks costs."""

    latency: float
    """Seconds that pass in each reduction, however small; several reductions at once have theirs at the same time."""
    transfer: Callable[[float], float]
    """Bytes of each rank → seconds on the link, which several reductions at once have to share."""
    sharing: float = 1.0
    """How many times longer the link takes in all if reductions share it."""
    burst: float = 0.0
    """Seconds of transfer that the link makes up for at once, if nothing has travelled for as long before."""


@dataclass(slots=True)
class _Flight:
    number: int
    latency: float
    transfer: float
    after: float
    """Seconds in which the result is converted; another reduction has to wait for that, the link does not."""


class Network:
    """Reductions in the order of their launch, of which `at_once` are under way at the same time."""

    def __init__(self, link: Link, at_once: int) -> None:
        self._link = link
        self._at_once = at_once
        self.now = 0.0
        self._saved = 0.0  # seconds of `Link.burst`; none is left at the begin of a step, where gradients came last
        self._waiting: deque[_Flight] = deque()
        self._active: list[_Flight] = []
        self._ended: list[float] = []
        # Of `_active` as it is, see `_look`: a study simulates thousands of steps, and asks for them at each turn.
        self._transferring, self._rate, self._until_change = 0, 1.0, math.inf

    @property
    def busy(self) -> bool:
        """Whether a reduction is under way."""
        return bool(self._active)

    def launch(self, now: float, size: float, after: float = 0.0) -> int:
        """All ranks have issued a reduction of `size` bytes. Returns its number."""
        self.advance(now)
        number, link = len(self._ended), self._link
        self._ended.append(math.inf)
        flight = _Flight(number, _less(link.latency, 0.0), _less(link.transfer(size), 0.0), _less(after, 0.0))
        self._waiting.append(flight)
        self._start()
        return number

    @property
    def next_change(self) -> float:
        """Seconds at which a reduction ends or changes its phase next; infinite if none is under way."""
        return self.now + self._until_change

    def advance(self, now: float) -> None:
        """Let time pass up to `now`; an earlier time changes nothing."""
        while self._active and self.now + self._until_change <= now:
            self.change()
        if self.now < now:
            self._pass(now - self.now)
            self.now = now
            if self._active:
                self._look()

    def change(self) -> None:
        """Let time pass until the next change."""
        passed = self._until_change
        self._pass(passed)
        self.now += passed
        self._spend()
        for flight in self._active[:]:
            if flight.latency <= 0 and flight.transfer <= 0 and flight.after <= 0:
                self._active.remove(flight)
                self._ended[flight.number] = self.now
        self._start()

    def until_done(self, number: int) -> float:
        """Let time pass until a reduction has ended, if it has not yet. Returns the seconds at which it ended."""
        while self._ended[number] == math.inf:
            self.change()
        return self._ended[number]

    def _pass(self, seconds: float) -> None:
        if not self._transferring:
            self._saved = min(self._link.burst, self._saved + seconds)
        for flight in self._active:
            if flight.latency > 0:
                flight.latency = _less(flight.latency, seconds)
            elif flight.transfer > 0:
                flight.transfer = _less(flight.transfer, seconds * self._rate)
            else:
                flight.after = _less(flight.after, seconds)

    def _spend(self) -> None:
        """Transfer at once what the link has saved up."""
        if self._saved <= 0:
            return
        for flight in self._active:
            if flight.latency <= 0 and flight.transfer > 0:
                used = min(self._saved, flight.transfer)
                flight.transfer = _less(flight.transfer, used)
                self._saved -= used

    def _start(self) -> None:
        while self._waiting and len(self._active) < self._at_once:
            flight = self._waiting.popleft()
            if flight.latency <= 0 and flight.transfer <= 0 and flight.after <= 0:
                self._ended[flight.number] = self.now
            else:
                self._active.append(flight)
        self._spend()
        self._look()

    def _look(self) -> None:
        """Find out how many reductions are on the link now, its part that each has, and when something changes next."""
        transferring = 0
        for flight in self._active:
            if flight.latency <= 0 and flight.transfer > 0:
                transferring += 1
        rate = 1.0 if transferring < 2 else 1.0 / (transferring * self._link.sharing)
        soonest = math.inf
        for flight in self._active:
            if flight.latency > 0:
                left = flight.latency
            elif flight.transfer > 0:
                left = flight.transfer / rate
            else:
                left = flight.after
            if left < soonest:
                soonest = left
        self._transferring, self._rate, self._until_change = transferring, rate, soonest


def _less(value: float, passed: float) -> float:
    left = value - passed
    return left if left > _EPSILON else 0.0
