"""When a script without DDP has been recorded for long enough."""

from __future__ import annotations

from pathlib import Path

import pytest

from autoddp.attempts import communication
from autoddp.diagnose.collectives.recording import Call, Group, Look, Place, Process, Recording, Sums
from autoddp.diagnose.collectives.steps import Steps
from autoddp.topology.system import machine
from autoddp.wire.recorded_calls import ThreadsTrial
from autoddp.wire.replayed_calls import Replay


def test_a_trial_of_fewer_threads_comes_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The script makes its group at once, reads its data for ten seconds, and only then begins to train."""
    now = 0.0
    monkeypatch.setattr(communication, "calls_made", lambda _folder: (1 if now < 10.0 else int(2 * now),))
    monkeypatch.setattr(communication, "recorded", lambda _folder: Recording())
    monkeypatch.setattr(communication, "planned", lambda _recording, _cores, at: ThreadsTrial(1, at + 1.5, 0.5, 24))
    enough = communication.Enough(tmp_path, clock=lambda: now)
    while not enough():
        now += 0.5
        assert now < 60.0
    # The fourth look with new calls is at 11.0; the trial begins 1.5 seconds later, and takes 12.
    assert 24.5 <= now <= 30.0


def test_a_container_has_no_more_cores_than_its_quota(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may show all CPUs of the host: then its ranks have more threads than cores, though not more than CPUs."""
    now, cores = 0.0, []
    monkeypatch.setattr(machine, "usable_cpus", lambda: 64)
    monkeypatch.setattr(machine, "cgroup_cpus", lambda _root: 3.0)
    monkeypatch.setattr(communication, "calls_made", lambda _folder: (int(2 * now),))
    monkeypatch.setattr(communication, "recorded", lambda _folder: Recording())
    monkeypatch.setattr(communication, "planned", lambda _recording, of_ranks, _at: cores.append(of_ranks))
    enough = communication.Enough(tmp_path, clock=lambda: now)
    while not cores and now < 60.0:
        enough()
        now += 0.5
    assert cores == [3]


@pytest.mark.parametrize(
    ("steps", "ends"),
    [
        (Steps("step", "", 0.01), 22.0),
        (Steps("step", "", 25.0), 77.0),  # the next one may well take as long
        (Steps("call", "", 0.01, 1), 300.0),  # weights that are sent at the start, by one line
        (Steps("second", "", 1.0), 300.0),
    ],
)
def test_ranks_that_hang_behind_some_steps_are_not_recorded_for_minutes(
    steps: Steps, ends: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the first step a rank may be busy with its data for as long, while the others stand at a barrier."""
    now = 0.0
    process = Process(
        0, 2, 1, True, "vm", 2, 1, 0.0, 1.0, Look(), [], {Place("a", 1, "f", "b", "b", 0, Group((0,))): Sums(1, 1, 1.0)}
    )
    monkeypatch.setattr(communication, "calls_made", lambda _folder: (int(100 * min(now, 2.0)),))
    monkeypatch.setattr(communication, "recorded", lambda _folder: Recording((process,)))
    monkeypatch.setattr(communication, "planned", lambda *_: None)
    monkeypatch.setattr(communication, "steps_of", lambda _recording: steps)
    enough = communication.Enough(tmp_path, clock=lambda: now)
    while not enough() and now < 300.0:
        now += 0.5
    assert now == pytest.approx(ends, abs=1.5)
    assert "no rank has called anything for" in enough.in_words


def test_where_ranks_stand_is_told_while_they_are_silent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They may hang, or be busy with their data: who waits for the answer sees which, and it is read once."""
    now, reads = 0.0, []
    place = Place("train.py", 7, "f", "barrier", "barrier", 0, Group((0,)))
    last = Call(place, 3, 0, 2.0, 2.1, 0.0, 0.0, False)
    process = Process(0, 2, 1, True, "vm", 2, 1, 0.0, 1.0, Look(), [last], {place: Sums(1, 1, 1.0)})
    monkeypatch.setattr(communication, "calls_made", lambda _folder: (int(100 * min(now, 2.0)),))
    monkeypatch.setattr(communication, "recorded", lambda _folder: reads.append(now) or Recording((process,)))
    monkeypatch.setattr(communication, "planned", lambda *_: None)
    monkeypatch.setattr(communication, "steps_of", lambda _recording: Steps("call", "", 0.01, 1))
    enough = communication.Enough(tmp_path, clock=lambda: now)
    told = {}
    while now < 30.0:
        assert not enough()
        before = len(reads)
        told[now] = enough.where
        assert len(reads) - before == (now == 12.0)
        now += 0.5
    assert {at: where for at, where in told.items() if where} == {
        at: "rank 0 stands in barrier (train.py:7), rank 1 has called nothing, or runs on another host"
        for at in told
        if at >= 12.0
    }


@pytest.mark.parametrize(("calls", "ends"), [(2, 20.0), (30, 12.0)])
def test_steps_that_hardly_call_anything_are_recorded_for_longer(
    calls: int, ends: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Short ones, of ranks that train apart: what they call now and then is what is to be told."""
    now = 0.0
    sums = {Place("a", 1, "f", "b", "b", 0, Group((0,))): Sums(calls, 1, 1.0)}
    process = Process(0, 2, 1, True, "vm", 2, 1, 0.0, 1.0, Look(), [], sums)
    monkeypatch.setattr(communication, "calls_made", lambda _folder: (int(100 * now),))
    monkeypatch.setattr(communication, "recorded", lambda _folder: Recording((process,)))
    monkeypatch.setattr(communication, "planned", lambda *_: None)
    monkeypatch.setattr(communication, "steps_of", lambda _recording: Steps("step", "", 0.01))
    enough = communication.Enough(tmp_path, clock=lambda: now)
    while not enough() and now < 60.0:
        now += 0.5
    assert now == pytest.approx(ends, abs=1.0)


def test_where_no_file_can_be_made_the_calls_are_not_done_again(tmp_path: Path) -> None:
    (tmp_path / "replay").touch()
    why = communication.replayed(Replay({}, 2, 1, "gloo", 8.0), tmp_path / "replay", {}, str)
    assert why == f"{tmp_path}/replay cannot be written (File exists)"


def test_where_no_file_can_be_made_recording_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the attempt ends as one that cannot be started, here and on the other hosts, and nothing is diagnosed."""
    now = 0.0
    monkeypatch.setattr(communication, "calls_made", lambda _folder: (int(2 * now),))
    monkeypatch.setattr(communication, "recorded", lambda _folder: Recording())
    monkeypatch.setattr(communication, "planned", lambda _recording, _cores, at: ThreadsTrial(1, at + 1.5, 0.5, 24))
    (tmp_path / "calls").touch()
    enough = communication.Enough(tmp_path / "calls", clock=lambda: now)
    while not enough():
        now += 0.5
        assert now < 60.0
    assert now <= 20.5, "no trial that was not begun is waited for"


def test_reading_what_busy_ranks_have_recorded_is_no_silence_of_theirs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With eight of them it takes seconds, in which nobody looks."""
    now = 0.0

    def slowly(_folder: Path) -> Recording:
        nonlocal now
        now += 8.0
        return Recording()

    monkeypatch.setattr(communication, "calls_made", lambda _folder: (int(100 * now),))
    monkeypatch.setattr(communication, "recorded", slowly)
    enough = communication.Enough(tmp_path, clock=lambda: now)
    for moment in (0.5, 1.0, 7.0):
        now = moment
        enough()
    assert now == 15.0
    assert enough.in_words == "recording what the script communicates, 14 s so far"
