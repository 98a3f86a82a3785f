"""When paired rounds have shown enough: bounds that may be looked at again and again, by Student's t.

A fixed number of rounds costs a gain of ×1.9 as much as one of 3 %. Looking after each round, and ending when the usual
interval leaves 1, is wrong far more often than it says. So the error of a whole study is spent look by look (Lan and
DeMets, Biometrika 70, 1983, with their spending function of Pocock's type), and each look has a bound of its own.
Tuning may end after any look, for any reason, and the error stays below `ERROR`.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

LOOKS = (3, 4, 5, 6, 8, 10, 12)
"""Numbers of rounds at which it is asked whether a gain is sure."""
ERROR = 0.005
"""The chance that any look calls a gain sure where there is none, all configurations that may be launched together.

Half of 1 %, on either side: so the intervals are 99 % intervals for all looks at once.
"""
TESTS = (1, 2, 3, 4, 6, 8, 12, 16)
_BOUNDS = {
    1: (16.58, 11.42, 8.102, 6.530, 4.865, 4.321, 4.023),
    2: (23.38, 14.84, 9.896, 7.685, 5.548, 4.854, 4.484),
    3: (28.69, 17.26, 11.09, 8.444, 5.969, 5.175, 4.772),
    4: (33.21, 19.17, 11.95, 9.024, 6.279, 5.407, 4.976),
    6: (40.84, 22.20, 13.34, 9.931, 6.731, 5.760, 5.256),
    8: (46.86, 24.52, 14.39, 10.62, 7.069, 6.001, 5.464),
    12: (57.56, 28.29, 15.96, 11.63, 7.557, 6.359, 5.750),
    16: (66.48, 31.27, 17.21, 12.34, 7.914, 6.607, 5.957),
}
"""Configurations that share the error → bound at each look. Printed by campaigns/bounds.py, which says how."""
# One-sided quantiles of Student's t for 95 %, by look.
_T95 = (2.920, 2.353, 2.132, 2.015, 1.895, 1.833, 1.796)


def bound(rounds: int, tests: int) -> float:
    """How many standard errors a gain must be above nothing after so many rounds, where `tests` share the error.

    Between two looks it is that of the later one; after the last one, the last.
    """
    of_tests = next((known for known in TESTS if known >= tests), TESTS[-1])
    return _BOUNDS[of_tests][_look(rounds)]


def likely(before: Sequence[float], after: Sequence[float]) -> tuple[float, float]:
    """The least and the most that the speed-up of `after` over `before` is likely to be (95 % to either side).

    Nothing is launched by them. They end rounds in which nothing can be won, and tell what more could be allowed. Below
    three rounds nothing is unlikely.
    """
    logs = [math.log(b / a) for b, a in zip(before, after, strict=True)]
    if len(logs) < LOOKS[0]:
        return 0.0, math.inf
    middle = statistics.fmean(logs)
    half = _T95[_look(len(logs))] * statistics.stdev(logs) / math.sqrt(len(logs))
    return math.exp(middle - half), math.exp(middle + half)


def _look(rounds: int) -> int:
    return next((place for place, known in enumerate(LOOKS) if known >= rounds), len(LOOKS) - 1)
