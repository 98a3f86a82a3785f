"""What is read of a start of a script without DDP: numbers that it prints, and steps that were recorded."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from autoddp.attempts.starts.progress import FirstStart, PrintedNumbers, StepsMade, Unusable, is_reached
from autoddp.diagnose.collectives import ends as ends_module
from autoddp.settings import Objective
from autoddp.wire.recorded_calls import (
    CALL,
    CALLS,
    CALLS_FROM,
    OF_A_CALL,
    GroupNamed,
    Header,
    PlaceNamed,
    ProcessNamed,
    WorldNamed,
    add_name,
    made_file,
)


def log(folder: Path, rank: int, stream: str = "stdout") -> Path:
    place = folder / "job_x" / "attempt_0" / str(rank) / f"{stream}.log"
    place.parent.mkdir(parents=True, exist_ok=True)
    return place


def printed(folder: Path, text: str, **ranks: str) -> PrintedNumbers:
    for rank, content in ranks.items():
        log(folder, int(rank[1:])).write_text(content)
    return PrintedNumbers(Objective.parse(text), folder)


LOSS, RATE = "regex:min:loss ([^ ]+)", "regex:max:rate ([^ ]+)"


def test_numbers_are_found_as_they_are_printed(tmp_path: Path) -> None:
    found = printed(tmp_path, LOSS, r0="loss 3 \nloss 2 of")
    found.look()
    assert found.counts == {0: 1}
    with log(tmp_path, 0).open("a") as file:
        file.write(" x\rloss 1 \rloss 7 ")
    log(tmp_path, 0, "stderr").write_text("loss 5 \n")
    found.look()
    assert found.counts == {0: 4}  # tqdm ends its lines by \r, and a logger writes to stderr
    found.ends()
    assert found.counts == {0: 5}, "the last line need not end"
    assert found.cost({0: 2}) == 4.0  # the median of 3 and 5: in each look what stderr has comes first
    assert found.cost({0: 9}) == 3.0


def test_a_look_that_comes_within_a_letter_loses_no_number(tmp_path: Path) -> None:
    found, whole = printed(tmp_path, "regex:max:débit ([^ ]+)", r0=""), "débit 3 \ndébit 2 \n".encode()
    for end in (2, len(whole)):  # é has two bytes
        log(tmp_path, 0).write_bytes(whole[:end])
        found.look()
    assert found.counts == {0: 2}


def test_of_two_ranks_that_print_it_the_worse_one_counts(tmp_path: Path) -> None:
    ranks = {"r0": "rate 10 \nrate 30 \nrate 20 \n", "r1": "rate 8 \nrate 4 \n"}
    found = printed(tmp_path, RATE, **ranks)
    found.look()
    assert found.cost({0: 3, 1: 2}) == pytest.approx(1 / 6)
    found = printed(tmp_path, RATE.replace("max", "min"), **ranks)
    found.look()
    assert found.cost({0: 3, 1: 2}) == 20


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("loss nan \n", "rank 0 prints 'nan', which cannot be compared"),
        ("loss 1 \nloss 1e999 \nloss 2 \n", "'1e999', which cannot be compared"),
        (f"loss {'9' * 5000} \n", "which cannot be compared"),
        ("loss 1e-320 \n", "9.99989e-321: too large or too small"),
        ("loss 0.0 \n", "rank 0 prints 0: gains are ratios, so the number must be above 0"),
        ("loss -3.5 \n", "-3.5: gains are ratios"),
        ("loss 1.2.3 \n", "rank 0 prints '1.2.3' where regex:"),
        ("loss \x1b[31m \n", r"rank 0 prints '\x1b[31m' where regex:"),
        ("", "the script has ended, and has printed nothing that regex:max:loss ([^ ]+) finds"),
    ],
)
def test_what_is_no_number_to_compare_is_said_in_one_line(tmp_path: Path, content: str, why: str) -> None:
    found = printed(tmp_path, LOSS.replace("min", "max"), r0=content)

    def cost() -> float:
        found.look()
        found.ends()
        return found.cost({0: 9})

    with pytest.raises(Unusable) as error:
        cost()
    assert why in str(error.value)
    assert len(str(error.value).splitlines()) == 1
    assert len(str(error.value)) < 200


def test_a_rank_that_prints_no_more_is_named(tmp_path: Path) -> None:
    found = printed(tmp_path, LOSS, r0="loss 1 \n")
    found.look()
    with pytest.raises(Unusable, match="rank 1 has printed nothing"):
        found.cost({0: 1, 1: 1})


def test_a_pattern_that_would_search_for_years_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autoddp.attempts.starts.progress._MATCHING", 0.05)
    found = printed(tmp_path, "regex:min:((?:a+)+)$", r0=f"{'a' * 40}b\n")
    with pytest.raises(Unusable, match="write a simpler pattern, or print less"):
        found.look()


def test_an_alarm_of_the_users_still_comes(tmp_path: Path) -> None:
    """`perl -e 'alarm 3600; exec @ARGV' autoddp …` ends the job after an hour: alarms live on in the next program."""
    before = signal.signal(signal.SIGALRM, signal.SIG_IGN)
    theirs = signal.setitimer(signal.ITIMER_REAL, 1000.0)
    try:
        printed(tmp_path, LOSS, r0="loss 3 \n").look()
        left, again = signal.getitimer(signal.ITIMER_REAL)
        assert 900 < left <= 1000
        assert again == 0
        assert signal.getsignal(signal.SIGALRM) is signal.SIG_IGN
    finally:
        signal.setitimer(signal.ITIMER_REAL, *theirs)
        signal.signal(signal.SIGALRM, before)


def test_a_line_without_an_end_does_not_fill_memory(tmp_path: Path) -> None:
    found = printed(tmp_path, LOSS, r0="x" * 2**20)
    found.look()
    assert len(found._logs[log(tmp_path, 0)]._rest) == 2**16


class Recorded:
    """A file of recorded calls, as a process of the script writes it."""

    def __init__(self, folder: Path, rank: int) -> None:
        name = folder / "calls" / f"{100 + rank}-1"
        name.parent.mkdir(exist_ok=True)
        shared = made_file(f"{name}.calls")
        self._shared = memoryview(shared)[: 8 * (CALLS_FROM + CALLS * OF_A_CALL)].cast("d")
        self._made = 0
        said = [
            ProcessNamed(pid=100 + rank, parent=1, is_launched=True, launched_rank=rank, host="h", cores=2),
            WorldNamed(rank=rank, ranks=2, threads=1),
            GroupNamed(group=0, name="0", ranks=(0, 1), backend="gloo"),
            self._place(0, "step of SGD", -1),
            self._place(1, "allreduce", 0),
            self._place(2, "barrier", 0),
            self._place(3, "new_group", -1),
        ]
        for one in said:
            add_name(shared, one)

    @staticmethod
    def _place(number: int, method: str, group: int) -> PlaceNamed:
        return PlaceNamed(
            place=number,
            file="train.py",
            line=number,
            function="main",
            collective=method,
            method=method,
            part=0,
            group=group,
            device="cpu",
            dtype="",
        )

    def call(self, place: int, at: float) -> None:
        begin = CALLS_FROM + self._made % CALLS * OF_A_CALL
        for offset, number in enumerate((place, -1, 8, at, at, 0.0, 0.0, 1)):
            self._shared[begin + offset] = number
        self._made += 1
        self._shared[Header.CALLS_MADE] = self._made


def test_steps_are_those_of_optimizers_on_the_slowest_rank(tmp_path: Path) -> None:
    ranks = [Recorded(tmp_path, rank) for rank in (0, 1)]
    made = StepsMade(tmp_path)
    for number in range(16):
        ranks[0].call(1, 100 + number * 0.1)
        ranks[0].call(0, 100 + number * 0.1)
        ranks[1].call(0, 100 + number * 0.2 + (50 if number < 2 else 0))  # its first steps take long
        if number == 7:
            made.look()
            assert made.counts == {0: 8, 1: 8}
    made.look()
    assert made.period == 0
    assert made.counts == {0: 16, 1: 16}
    assert made.cost(made.counts) == pytest.approx(0.2)
    assert made.cost({0: 8}) == pytest.approx(0.1)


def test_a_rank_that_hardly_steps_does_not_count(tmp_path: Path) -> None:
    ranks = [Recorded(tmp_path, rank) for rank in (0, 1)]
    for number in range(16):
        ranks[0].call(0, float(number))
    ranks[1].call(0, 1.0)
    made = StepsMade(tmp_path)
    made.look()
    assert made.counts == {0: 16}


def test_without_an_optimizer_steps_are_where_the_calls_repeat(tmp_path: Path) -> None:
    rank = Recorded(tmp_path, 0)
    rank.call(3, 1.0)
    for number in range(40):
        rank.call(1, 10.0 + number)
        rank.call(1, 10.1 + number)
        rank.call(2, 10.2 + number)
    made = StepsMade(tmp_path)
    made.look()
    assert made.counts == {}
    made.ends()
    assert made.period == 3
    assert made.counts == {0: 40}
    assert made.cost({0: 40}) == pytest.approx(1.0)
    again = StepsMade(tmp_path, period=3)
    again.look()
    assert again.counts == {0: 40}


def test_an_optimizer_is_waited_for_as_long_as_a_script_may_only_prepare(tmp_path: Path) -> None:
    rank, now = Recorded(tmp_path, 0), [100.0]
    made = StepsMade(tmp_path, clock=lambda: now[0])
    for half in range(60):
        now[0] = 100 + half / 2
        rank.call(1, now[0])
        made.look()
        assert (made.period is None) == (now[0] < 120), now
    assert made.counts == {0: 60}
    seldom, now = Recorded(tmp_path, 1), [100.0]
    made = StepsMade(tmp_path, clock=lambda: now[0])
    for second in range(60):
        now[0] = 200.0 + second
        if second % 4 == 0:
            seldom.call(1, now[0])
        made.look()
    assert made.period is None


@pytest.mark.parametrize("calls", [(), (1, 2), (1, 1, 2, 1, 2, 2, 2, 1, 1, 1, 2)])
def test_where_nothing_repeats_that_is_said(tmp_path: Path, calls: tuple[int, ...]) -> None:
    rank = Recorded(tmp_path, 0)
    for number, place in enumerate(calls):
        rank.call(place, float(number + 1))
    made = StepsMade(tmp_path)
    made.look()
    with pytest.raises(Unusable, match="no optimizer steps"):
        made.ends()


def test_what_the_ring_has_lost_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ends_module, "CALLS", 4)
    monkeypatch.setattr(f"{__name__}.CALLS", 4)
    rank = Recorded(tmp_path, 0)
    made = StepsMade(tmp_path)
    for number in range(10):
        rank.call(0, float(number + 1))
    made.look()
    assert made.counts == {0: 4}
    assert len(CALL) == OF_A_CALL


class Shown(PrintedNumbers):
    """So many numbers of one rank."""

    def __init__(self) -> None:
        super().__init__(Objective.parse(LOSS), Path("nowhere"))
        self.count = 0

    @property
    def counts(self) -> dict[int, int]:
        return {0: self.count} if self.count else {}


@pytest.mark.parametrize(
    ("shows", "ends_at"),
    [
        ({3: 1, 4: 2, 5: 3}, 8),  # five seconds from the first number
        ({20: 3}, 40),  # as long as it took to the first number
        ({1: 1, 30: 2}, 101),  # two are few, and the third does not come
        ({1: 1, 30: 3}, 30),
        ({}, None),
    ],
)
def test_when_the_first_start_has_shown_enough(shows: dict[int, int], ends_at: int | None) -> None:
    now = [0.0]
    shown = Shown()
    first = FirstStart(shown, longest=99.5, clock=lambda: now[0])
    for second in range(1, 400):
        now[0] = float(second)
        shown.count = shows.get(second, shown.count)
        if first.is_over():
            assert second == ends_at
            assert first.needed == {0: shown.count}
            break
    else:
        assert ends_at is None
        assert not first.has_begun


def test_steps_count_up_to_the_end_of_the_window(tmp_path: Path) -> None:
    rank, began = Recorded(tmp_path, 0), time.monotonic()
    made = StepsMade(tmp_path)
    first = FirstStart(made, longest=10.0)
    for number in range(100):
        rank.call(0, began + 0.1 * number)
    made.look()
    first.clock = lambda: began + 9.9
    assert first.is_over()
    assert 49 <= first.needed[0] <= 51
    assert is_reached(first.needed, {0: 51})
    assert not is_reached(first.needed, {0: 48})
