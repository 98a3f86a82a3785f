"""Outputs of RDMA and NVLink tools: real captures, and the same ones disguised, cut and damaged."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from rdma_captures import IDS, READERS, capture, plain, read_or_none, reading


def fits(expected: Any, found: Any) -> bool:
    """Equal in all that is expected; more may have been found, but no more entries of a list."""
    if isinstance(expected, Mapping):
        return isinstance(found, Mapping) and all(k in found and fits(v, found[k]) for k, v in expected.items())
    if isinstance(expected, list):
        return len(expected) == len(found) and all(map(fits, expected, found))
    return bool(expected == found)


# What the captures' descriptions ask of one GPU or one pair, by where the readings have it.
ELSEWHERE: dict[str, Callable[[dict[str, Any]], Any]] = {
    "gpu": lambda found: found["per_gpu"][0]["gpu"],
    "gpu0_links": lambda found: found["per_gpu"][0]["links"],
    "p2p_0_1": lambda found: found["p2p"]["0-1"],
    "missing": lambda found: found["unread"],
}


@pytest.mark.parametrize("name", IDS)
def test_real_captures(name: str) -> None:
    _, about = capture(name)
    found = reading(name)
    for key, expected in about["expect"].items():
        value = ELSEWHERE[key](found) if key in ELSEWHERE else found[key]
        assert fits(expected, value), f"{key}: expected {expected}, found {value}"


def test_every_capture_is_read() -> None:
    assert len(IDS) == 20
    assert {capture(name)[1]["kind"] for name in IDS} == READERS.keys()


WHOLE = {name for name in IDS if not reading(name)["missing"]}


def test_what_is_missing_from_the_captures() -> None:
    assert {name: reading(name)["missing"] for name in IDS if name not in WHOLE} == {
        "ibstat_mixed_hdr_active_and_disabled_truncated": ["mlx5_2 port 1: not read: rate, link layer"],
        "ibstat_panics_after_partial_output": [
            "mlx5_8: the tool could not read it",
            "mlx5_7: not read: CA type, firmware",
        ],
        "nvlink_s_a6000_third_gpu_inactive": ["4 links belong to a GPU whose line could not be read"],
        "nvlink_s_gb200_shortened": [
            "line 23 could not be read",
            "GPU 1: 2 links are listed, of another NVIDIA GB200 18",
        ],
        "show_gids_bond_vxlan": ["there is no n_gids_found line: the list may go on"],
    }


# Colours, foreign line ends, and the like.


def disguises(text: str) -> list[str]:
    return [
        text.replace("\n", "\r\n"),
        "\n".join(f"\x1b[4m\x1b[1;31m{line}\x1b[0m\x1b[K" for line in text.split("\n")),
        "\n".join(f"[4m{line}[0m" for line in text.split("\n")),
        "\x1b]0;a terminal\x07" + text,
        "\ufeff" + text,
        text + "\n\n\x1b(B\x1b[m",
    ]


@pytest.mark.parametrize("name", IDS)
def test_colours_and_line_ends_change_nothing(name: str) -> None:
    text, about = capture(name)
    for other in disguises(text):
        assert plain(READERS[about["kind"]](other)) == reading(name)


# Damage: less may be read, never something else.


def agrees(part: Any, whole: Any) -> bool:
    """Whether nothing in `part` contradicts `whole`: what is there is the same, or not known."""
    if part is None or part == "" or part == whole:
        return True
    if isinstance(part, Mapping):
        return isinstance(whole, Mapping) and all(k in whole and agrees(v, whole[k]) for k, v in part.items())
    if isinstance(part, list):
        return isinstance(whole, list) and all(any(agrees(p, w) for w in whole) for p in part)
    return False


# Per kind of list: the keys that identify an entry, and what counts or sums up and so shrinks with the list.
ENTRIES = {
    "devices": ("name", "port"),
    "entries": ("device", "port", "index"),
    "links": ("device", "port"),
    "gpus": ("index",),
    "per_gpu": ("gpu",),
}
SUMMARIES = {"active", "links", "links_active", "links_inactive", "inactive", "mig", "device"}


def contradictions(part: dict[str, Any], whole: dict[str, Any]) -> list[str]:
    """Entries of `part` that say something else than their counterparts in `whole`."""
    found = []
    if not agrees(part.get("p2p", {}), whole.get("p2p", {})):
        found.append(f"p2p: {part['p2p']}")
    for key, names in ENTRIES.items():
        if not isinstance(part.get(key), list):
            continue
        known = {tuple(entry.get(name) for name in names): entry for entry in whole[key]}
        for entry in part[key]:
            other = known.get(tuple(entry.get(name) for name in names), {})
            told = {k: v for k, v in entry.items() if k not in SUMMARIES}
            if not other or not agrees(told, other):
                found.append(f"{key}: {entry}, but it is {other}")
    return found


@pytest.mark.parametrize("name", IDS)
def test_a_cut_anywhere_gives_no_wrong_value(name: str) -> None:
    text, _ = capture(name)
    whole = reading(name)
    cuts = range(len(text)) if len(text) < 900 else random.Random(1).sample(range(len(text)), 300)
    for cut in cuts:
        if (part := read_or_none(name, text[:cut])) is not None:
            assert contradictions(part, whole) == [], f"cut at {cut}"


@pytest.mark.parametrize("name", IDS)
def test_a_lost_line_gives_no_wrong_value(name: str) -> None:
    rows = capture(name)[0].split("\n")
    whole = reading(name)
    for i in range(len(rows)):
        if (part := read_or_none(name, "\n".join(rows[:i] + rows[i + 1 :]))) is not None:
            assert contradictions(part, whole) == [], f"without line {i + 1}: {rows[i]}"


@pytest.mark.parametrize("name", IDS)
def test_a_line_turned_to_rubbish_gives_no_wrong_value(name: str) -> None:
    rows = capture(name)[0].split("\n")
    whole = reading(name)
    for i in range(len(rows)):
        if (part := read_or_none(name, "\n".join([*rows[:i], "\x00\ufffd#", *rows[i + 1 :]]))) is not None:
            assert contradictions(part, whole) == [], f"rubbish for line {i + 1}: {rows[i]}"
