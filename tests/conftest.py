"""Fixtures for all tests, the order of the tests, and the record of what they cost."""

import contextlib
import gc
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import costs
import cpu_time
import forks
import pytest
from forks import STARTS
from lab import Lab, unavailable
from launchers import BRIEF, FROM_NOTHING, SCRIPTS, start
from shared import once

_BEGAN = time.monotonic()
gc.disable()  # what is collected is no garbage: to look for some takes a quarter of the collection's time
_STARTED_BEFORE = pytest.StashKey[Counter[str]]()
_CPU_BEFORE = pytest.StashKey[float]()


@pytest.fixture
def lab() -> Iterator[Callable[..., Lab]]:
    """Builds labs, `lab(hosts=2, rate="200mbit")`, and takes them down; skips where there can be none."""
    if reason := unavailable():
        pytest.skip(f"no lab: {reason}")
    with contextlib.ExitStack() as open_labs:
        yield lambda **options: open_labs.enter_context(Lab(**options))


@pytest.fixture(scope="session")
def tuned_plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a tuned launch of plain.py left, with a trace: its folder, and `stderr` beside it."""

    def tune(folder: Path) -> None:
        words = ["--nproc-per-node", "2", "--trials", "2", "--allow", "exact", "--diagnose-budget", "0", "--trace"]
        env = {"TUNED_TIMES_LONGER": "12"}
        launch = start(BRIEF, folder / "out", [*words, str(SCRIPTS / "plain.py")], env).wait()
        assert launch.returncode == 0, launch.stderr[-2000:]

    return once(tmp_path_factory, "tuned_plain", tune) / "out"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--whole", action="store_true", help="also what is marked whole: the long matrices, not sampled")
    parser.addoption("--shuffle", type=int, metavar="SEED", help="files, and the tests in each, in a random order")
    parser.addoption("--record-costs", action="store_true", help="write tests/costs.json, see tests/costs.py")


def pytest_configure(config: pytest.Config) -> None:
    """A fork is not quite a start: `make test-whole` has the real ones."""
    if config.getoption("--whole"):
        os.environ[FROM_NOTHING] = "1"
    if config.getoption("--record-costs"):
        forks.run_id = str(os.getpid())  # only what a process of pytest's has started itself is counted as its own
    with contextlib.suppress(ImportError):  # the checks on a GPU do without it
        from hypothesis import HealthCheck, settings

        # An example has 200 ms by default, and a busy machine stands still for longer now and then.
        settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
        settings.load_profile("any machine")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Files that take long go first: one that began last would run on when nothing is left to run beside it."""
    if not config.getoption("--whole"):
        config.hook.pytest_deselected(items=[item for item in items if item.get_closest_marker("whole")])
        items[:] = [item for item in items if not item.get_closest_marker("whole")]
    seed = config.getoption("--shuffle")
    if seed is None:
        recorded = costs.read()
        items.sort(key=lambda item: -recorded.get(item.nodeid.partition("::")[0], costs.Cost()).seconds)
    else:
        luck = random.Random(seed)
        place = {path: luck.random() for path in dict.fromkeys(item.path for item in items)}
        items.sort(key=lambda item: (place[item.path], luck.random()))


def pytest_collection_finish() -> None:
    """Nor is it for a fork, which would copy each page there that it looks at."""
    gc.freeze()
    gc.enable()
    if "torch" in sys.modules:  # a second thread would wait for the next call by counting: twice the CPU time
        sys.modules["torch"].set_num_threads(1)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    item.stash[_STARTED_BEFORE] = Counter(STARTS)
    if item.config.getoption("--record-costs"):
        item.stash[_CPU_BEFORE] = cpu_time.of_family()
    return (yield)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item) -> None:
    """What a test has used goes with its report, from the process that ran it to the one that records."""
    if item.config.getoption("--record-costs"):
        used = {"cpu": cpu_time.of_family() - item.stash[_CPU_BEFORE]}
        item.user_properties.append(("used", {**used, **(Counter(STARTS) - item.stash[_STARTED_BEFORE])}))


class _Recorder:
    """Adds up what the reports say, in the process that hears of all tests."""

    def __init__(self) -> None:
        self.files: dict[str, costs.Cost] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        cost = self.files.setdefault(report.nodeid.partition("::")[0], costs.Cost())
        ended = report.when == "teardown"
        used = dict(report.user_properties).get("used", {}) if ended else {}
        cost.add(costs.Cost(tests=int(ended), seconds=report.duration, **used))

    def pytest_sessionfinish(self) -> None:
        costs.write(self.files, time.monotonic() - _BEGAN)


def pytest_sessionstart(session: pytest.Session) -> None:
    if session.config.getoption("--record-costs") and not os.environ.get("PYTEST_XDIST_WORKER"):
        session.config.pluginmanager.register(_Recorder())
