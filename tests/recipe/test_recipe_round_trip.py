"""For any recipe: what is dumped is read back equal; for any damage: one line, never a traceback."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("hypothesis")

from hypothesis import given, settings
from hypothesis import strategies as some

from autoddp.errors import RecipeError
from autoddp.knobs import Configuration, Rung
from autoddp.knobs.env import keeps_memory
from autoddp.recipe import ENV_ALLOWED, Evidence, Fits, LadderEntry, MadeBy, Recipe, dump, parse

printable = some.characters(exclude_categories=("C", "Z")) | some.just(" ")
words = some.text(printable, min_size=1, max_size=20).filter(lambda text: bool(text.strip()))
counts = some.integers(0, 2**40)
positive = some.floats(min_value=0, exclude_min=True, allow_infinity=False)
caps = some.one_of(some.integers(1, 512), some.floats(0.5, 512))

exact = some.one_of(
    some.fixed_dictionaries({}, optional={"bucket_cap_mb": caps, "static_graph": some.booleans()}),
    some.fixed_dictionaries({"bucket_cap_mb_list": some.lists(caps, min_size=1, max_size=32)}),
)
near = some.fixed_dictionaries({"hook": some.sampled_from(["fp16", "bf16"])}, optional={"bucket_cap_mb": caps})
lossy = some.fixed_dictionaries(
    {"hook": some.just("powersgd"), "powersgd_rank": some.integers(1, 64)},
    optional={"powersgd_start_step": some.integers(0, 10**9)},
)
errors = some.one_of(some.just((None, None)), some.tuples(some.floats(0, 1e9), some.floats(0, 1e9)))
configurations = some.one_of(exact, near, lossy).map(Configuration)


VALUES = ["0", "1", "2", "64", "SYS", "AF_INET", "GROUP", "LAZY", "true", "close", "static,4", "passive", "a:b", "eth0"]
VALUES.append(keeps_memory())
GOOD = {name: [value for value in VALUES if rule(value) is None] for name, rule in ENV_ALLOWED.items()}
assert all(GOOD.values())
variables = some.lists(some.sampled_from(sorted(GOOD)), max_size=4, unique=True).flatmap(
    lambda names: some.fixed_dictionaries({name: some.sampled_from(GOOD[name]) for name in names})
)


@some.composite
def fits(draw: some.DrawFn) -> Fits:
    each = tuple(draw(some.one_of(some.just([]), some.lists(some.integers(1, 99), min_size=2, max_size=5))))
    world = sum(each) or draw(some.integers(1, 10**6))
    devices = tuple(draw(some.lists(words, min_size=1, max_size=3)))
    nodes = len(each) or draw(some.integers(1, world))
    base = Fits(world, nodes, draw(words), devices, draw(words), draw(counts), draw(words), each)
    several = some.lists(words, max_size=2).map(tuple)
    return replace(base, links=draw(several), networks=draw(several), cuda=draw(words), nccl=draw(words))


@some.composite
def ladders(draw: some.DrawFn) -> tuple[LadderEntry, ...]:
    entries = []
    for rung, values in ((Rung.EXACT, exact), (Rung.NEAR, near), (Rung.LOSSY, lossy)):
        if draw(some.booleans()):
            low, middle, high = sorted(draw(some.tuples(positive, positive, positive)))
            milder = some.sampled_from([entry.rung for entry in entries]) if entries else some.nothing()
            entries.append(
                LadderEntry(
                    rung,
                    Configuration(draw(values)),
                    draw(positive),
                    middle,
                    low,
                    high,
                    *draw(errors),
                    speedup_low_over=draw(some.dictionaries(milder, positive)),
                )
            )
    return tuple(entries)


recipes = some.builds(
    Recipe,
    made_by=some.builds(MadeBy, words, words, words, words),
    fits=fits(),
    configuration=configurations,
    evidence=some.builds(Evidence, positive, some.floats(0, 1), counts, counts, counts, words, words | some.just("")),
    ladder=ladders(),
    env=variables,
)


@settings(max_examples=80, deadline=None, database=None)
@given(recipes)
def test_any_recipe_is_read_back_equal(recipe: Recipe) -> None:
    text = dump(recipe)
    again = parse(text, "x")
    assert again == recipe
    assert dump(again) == text


@settings(max_examples=150, deadline=None, database=None)
@given(recipe=some.shared(recipes), place=some.floats(0, 1), cut=some.integers(0, 8), put=some.text(max_size=4))
def test_any_damage_is_one_line(recipe: Recipe, place: float, cut: int, put: str) -> None:
    text = dump(recipe)
    start = int(place * len(text))
    assert complaint(text[:start] + put + text[start + cut :]).isprintable()


def complaint(text: str) -> str:
    try:
        parse(text, "x")
    except RecipeError as problem:
        return str(problem)
    return "none: the damage hit a comment, or made another sound recipe"
