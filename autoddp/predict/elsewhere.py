"""Predicts a job elsewhere: on another number of nodes and ranks, over another link, with another batch.

    there = Elsewhere(nodes=4, rate=bit_rate("25Gbit"))
    profile, notes = moved(known, there)

All ranks together are taken as one ring, which is what gloo and NCCL mostly use: in an all-reduce each of n ranks sends
2 (n - 1)/n times the bytes, in 2 (n - 1) steps one after another. `notes` say what was not measured but extrapolated.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from autoddp.bench import LinkModel
from autoddp.bench.model import Segment
from autoddp.codec import replace
from autoddp.knobs import Configuration
from autoddp.predict.profile import Profile, first_link, ring_share
from autoddp.predict.step import computing_seconds, step_seconds
from autoddp.units import percent

_PAYLOAD = 0.956  # of a link's rate: 1448 of the 1514 bytes of an Ethernet frame are gradients


class UnknownLink(ValueError):
    """The job would send its gradients over a link of which nothing is known."""


@dataclass(frozen=True)
class Elsewhere:
    """What is different there; None where nothing is."""

    nodes: int | None = None
    ranks_per_node: int | None = None
    rate: float | None = None
    """Bytes per second of each node's link, each way."""
    latency: float | None = None
    """Seconds that a small message takes to the next node."""
    batch_times: float = 1.0
    """How many times as large the batch of each rank is."""


def moved(here: Profile, there: Elsewhere) -> tuple[Profile, list[str]]:
    """The profile of the job elsewhere, and what is extrapolated. UnknownLink where the link there must be given."""
    nodes = there.nodes or here.nodes
    # Nodes may have different numbers of ranks; then so many as they have on average.
    ranks = nodes * there.ranks_per_node if there.ranks_per_node else here.world_size * nodes // here.nodes
    notes = []
    if there.batch_times != 1:
        notes.append(
            f"a batch {there.batch_times:g} times as large: data, forward and backward take as many times longer"
        )
    if ranks != here.world_size:
        reduces = f"{ranks} ranks in place of {here.world_size}: a ring" if ranks > 1 else "one rank reduces nothing"
        notes.append(f"{reduces}, and computing as long as it was")
    if there.ranks_per_node and ranks * here.nodes != here.world_size * nodes:
        notes.append(
            "another number of ranks on a node: how much they slow each other down stays as it was in the prediction"
        )
    if not notes and nodes == here.nodes and there.rate is None and there.latency is None:
        return here, []
    profile = replace(
        here,
        world_size=ranks,
        nodes=nodes,
        before=here.before * there.batch_times,
        backward=here.backward * there.batch_times,
        ready=tuple(one * there.batch_times for one in here.ready),
        measured=None,
    )
    if ranks < 2:
        return profile, notes
    link = _scaled(here, ranks)
    is_another_link = here.world_size < 2 or (nodes > 1) != (here.nodes > 1)
    known = "one process" if here.world_size < 2 else _nodes(here.nodes)
    if is_another_link and there.rate is None:
        raise UnknownLink(f"it ran on {known}, so the link between {ranks} ranks on {_nodes(nodes)} is not known")
    if there.rate is not None:
        notes.append(
            f"a link of {there.rate * 8 / 1e9:g} Gbit/s: it carries gradients at {percent(_PAYLOAD, '.1f')} of that"
        )
        per_byte, inside = ring_share(ranks) / (there.rate * _PAYLOAD), link.segments[-1].seconds_per_byte
        if is_another_link and 1 < nodes < ranks and here.world_size > 1 and inside > per_byte:
            rate = ring_share(ranks) / inside
            notes.append(f"inside a node {rate * 8 / 1e9:.3g} Gbit/s, as on {known}: the ring is no faster than this")
        else:
            link = _with_rate(link, per_byte)
    if there.latency is not None:
        notes.append(f"a latency of {there.latency * 1e6:g} µs in each of the {2 * (ranks - 1)} steps of the ring")
        link = _with_latency(link, 2 * (ranks - 1) * there.latency)
    elif is_another_link:
        guess = "a guess" if here.world_size < 2 else f"that of {known}"
        notes.append(f"the latency of this link is not known, and {guess} is used: say it, as in --latency 20us")
    fitted = replace(here.coefficients, latency=1.0, per_byte=1.0)  # they are in the link now
    if there.rate is not None:
        fitted = replace(fitted, burst=0.0)  # what the link here saves up tells nothing of another one
    return replace(profile, link=link, coefficients=fitted), notes


def what_if(here: Profile, configuration: Configuration) -> list[dict[str, Any]]:
    """A few other places for the report: what each is, ms per step under `configuration`, and the efficiency there."""
    places = [("a batch twice as large", moved(here, Elsewhere(batch_times=2.0))[0])]
    faster = replace(here.coefficients, per_byte=here.coefficients.per_byte / 2)
    places.append(("a link twice as fast", replace(here, coefficients=faster)))
    if here.nodes > 1:
        places += [
            (f"{times * here.nodes} nodes", moved(here, Elsewhere(nodes=times * here.nodes))[0]) for times in (2, 4)
        ]
    found = [
        (label, computing_seconds(place, configuration), step_seconds(place, configuration)) for label, place in places
    ]
    return [
        {"label": label, "step_ms": seconds * 1e3, "efficiency": min(1.0, computing / seconds)}
        for label, computing, seconds in found
        if seconds
    ]


def _scaled(here: Profile, ranks: int) -> LinkModel:
    """The link of `here`, as it was fitted, for a ring of another size."""
    if here.world_size < 2:
        return first_link(here.backend, ranks)
    fitted, latency = here.coefficients, here.link.alpha
    bytes_times = ring_share(ranks) / ring_share(here.world_size)
    steps_times = (ranks - 1) / (here.world_size - 1)
    return LinkModel(
        tuple(
            Segment(
                one.from_bytes,
                latency * fitted.latency * steps_times + (one.alpha_seconds - latency) * fitted.per_byte * bytes_times,
                one.seconds_per_byte * fitted.per_byte * bytes_times,
            )
            for one in here.link.segments
        )
    )


def _with_rate(link: LinkModel, per_byte: float) -> LinkModel:
    return LinkModel((Segment(0.0, link.alpha, per_byte),))


def _with_latency(link: LinkModel, latency: float) -> LinkModel:
    change = latency - link.alpha
    return LinkModel(
        tuple(Segment(one.from_bytes, one.alpha_seconds + change, one.seconds_per_byte) for one in link.segments)
    )


def _nodes(count: int) -> str:
    return "one node" if count == 1 else f"{count} nodes"
