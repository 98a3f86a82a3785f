"""Prints the table of `autoddp/timing/sequential.py`: Student's t that a gain must reach at each look at the rounds.

    python campaigns/bounds.py                  # half a minute on one core

Of 20 million rows of normal noise, those that have reached no bound yet go on to the next look; the bound there is the
value that so many of them exceed as the error spending function allows. So the looks depend on each other as those of a
study do, and the small numbers of rounds are treated exactly, where tables of the normal distribution would not be.
"""

from __future__ import annotations

import argparse
import math

import numpy as np

from autoddp.timing.sequential import ERROR, LOOKS, TESTS

_AT_ONCE = 1_000_000  # rows in memory


def spent(share: float, error: float) -> float:
    """The error that may have been spent when `share` of all rounds are over: Lan and DeMets, of Pocock's type."""
    return error * math.log(1 + (math.e - 1) * share)


def statistics_of(rows: int, seed: int) -> np.ndarray:
    """Student's t of each row at each look; the shape is (rows, looks)."""
    chance = np.random.default_rng(seed)
    parts = []
    for _ in range(0, rows, _AT_ONCE):
        noise = chance.standard_normal((_AT_ONCE, LOOKS[-1]), dtype=np.float32).astype(np.float64)
        sums, squares = np.cumsum(noise, axis=1), np.cumsum(noise**2, axis=1)
        places = np.array(LOOKS) - 1
        count = np.array(LOOKS, dtype=np.float64)
        mean = sums[:, places] / count
        variance = (squares[:, places] - count * mean**2) / (count - 1)
        parts.append((mean / np.sqrt(variance / count)).astype(np.float32))
    return np.concatenate(parts)


def bounds(found: np.ndarray, tests: int) -> list[float]:
    """The bound of each look, where so many configurations share the error."""
    alive, before, result = np.ones(len(found), dtype=bool), 0.0, []
    for place, rounds in enumerate(LOOKS):
        now = spent(rounds / LOOKS[-1], ERROR / tests)
        crossing = round((now - before) * len(found))
        values = found[alive, place]
        bound = float(np.partition(values, len(values) - crossing)[len(values) - crossing])
        alive &= found[:, place] <= bound
        result.append(bound)
        before = now
    return result


def main() -> None:
    """Print one line for each number of configurations."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=20_000_000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    found = statistics_of(args.rows, args.seed)
    for tests in TESTS:
        print(f"    {tests}: ({', '.join(f'{bound:#.4g}' for bound in bounds(found, tests))}),")


if __name__ == "__main__":
    main()
