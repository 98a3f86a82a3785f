"""The speed-up and its interval: known values, coverage over many seeded experiments, and what it refuses."""

from __future__ import annotations

import math
import random

import pytest

from autoddp.timing import Block, Speedup, headroom, median, speedup

ROUNDS = 6


def test_equal_ratios_keep_a_small_interval() -> None:
    gain = speedup([1.0, 2.0, 4.0], [0.5, 1.0, 2.0])
    assert gain.ratio == pytest.approx(2.0)
    # the spread that is believed at least, 0.3 %, times t for 2 degrees of freedom over the root of 3 rounds
    half = 9.925 * 0.003 / math.sqrt(3)
    assert (gain.low, gain.high) == pytest.approx((2 * math.exp(-half), 2 * math.exp(half)))


def test_the_interval_is_students() -> None:
    before, after = [1.0, 1.1, 0.9, 1.0], [0.8, 0.9, 0.75, 0.82]
    logs = [math.log(b / a) for b, a in zip(before, after, strict=True)]
    mean = sum(logs) / 4
    half = 5.841 * math.sqrt(sum((x - mean) ** 2 for x in logs) / 3 / 4)
    gain = speedup(before, after)
    expected = (math.exp(mean), math.exp(mean - half), math.exp(mean + half))
    assert (gain.ratio, gain.low, gain.high) == pytest.approx(expected)


def test_swapping_the_two_inverts() -> None:
    before, after = [1.0, 1.2, 0.9], [0.7, 0.9, 0.8]
    there, back = speedup(before, after), speedup(after, before)
    assert (back.ratio, back.low, back.high) == pytest.approx((1 / there.ratio, 1 / there.high, 1 / there.low))


def test_pairing_cancels_what_both_sides_share() -> None:
    """The machine slows down from round to round; side by side the two still differ by the same factor."""
    before = [1.0 * 1.3**i for i in range(ROUNDS)]
    gain = speedup(before, [b / 1.1 for b in before])
    assert gain.sure
    assert gain.high - gain.low < 0.02


def experiments(true_ratio: float, noise: float, count: int = 600) -> list[Speedup]:
    source = random.Random(5)
    return [
        speedup(
            [true_ratio * math.exp(source.gauss(0, noise)) for _ in range(ROUNDS)],
            [math.exp(source.gauss(0, noise)) for _ in range(ROUNDS)],
        )
        for _ in range(count)
    ]


def test_the_interval_holds_the_truth_99_times_of_100() -> None:
    held = sum(gain.low <= 1.3 <= gain.high for gain in experiments(1.3, noise=0.05))
    assert 0.98 <= held / 600 < 1


def test_no_gain_is_rarely_called_sure() -> None:
    """One-sided: 0.5 % of the experiments in which nothing differs."""
    sure = sum(gain.sure for gain in experiments(1.0, noise=0.05))
    assert sure / 600 <= 0.015


def test_many_rounds_are_not_trusted_more_than_the_table_knows() -> None:
    source = random.Random(1)
    values = [1 + source.gauss(0, 0.1) for _ in range(60)]
    gain = speedup(values, [1.0] * 60)
    logs = [math.log(v) for v in values]
    mean = sum(logs) / 60
    error = math.sqrt(sum((x - mean) ** 2 for x in logs) / 59 / 60)
    assert math.log(gain.high / gain.ratio) == pytest.approx(2.947 * error)


@pytest.mark.parametrize(("before", "after"), [([], []), ([1.0], [1.0]), ([1.0, 1.0], [1.0, 1.0, 1.0])])
def test_no_interval_without_pairs(before: list[float], after: list[float]) -> None:
    with pytest.raises(ValueError, match=f"got {len(before)} and {len(after)}"):
        speedup(before, after)


@pytest.mark.parametrize(
    ("gain", "sure", "text"),
    [
        (Speedup(1.5, 1.4, 1.6), True, "×1.50 (1.40 to 1.60)"),
        (Speedup(1.02, 0.99, 1.05), False, "×1.02 (0.990 to 1.05)"),
        (Speedup(1.0, 1.0, 1.0), False, "×1.00 (1.00 to 1.00)"),
        (Speedup(16.42, 15.83, 17.04), True, "×16.4 (15.8 to 17.0)"),
    ],
)
def test_what_people_read(gain: Speedup, sure: bool, text: str) -> None:
    assert gain.sure is sure
    assert str(gain) == text


def test_a_block_is_its_median() -> None:
    assert Block((0.1, 0.1, 5.0)).median == 0.1  # the step in which the script saved a checkpoint
    assert Block((0.1, 0.3)).median == pytest.approx(0.2)
    with pytest.raises(ValueError, match="no values"):
        median([])


def test_steps_without_reduction_that_take_longer_do_not_show_that_reduction_is_free() -> None:
    """It takes nothing away from a step, so another program, say, does; it may have hidden as much as it added."""
    as_written = [Block((1.0, 1.0))] * 2
    shorter, longer = (headroom(as_written, [Block((one, one))] * 2) for one in (0.9, 1.25))
    assert shorter.low < 0.1 < shorter.high
    assert shorter.share == pytest.approx(0.1)
    assert (longer.share, longer.low, longer.high) == pytest.approx((0.0, 0.0, 0.25))
