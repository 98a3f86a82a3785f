"""The traces in short: nearly all in one tuned run in an overlay, some in one under guard. At length: run_all.py."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Mapping, Sequence

import pytest
from launchers import FROM_NOTHING, Launch, environment, popen_behind
from traces.room import Finished, Room, may_have_own_tmp
from traces.trace import Trace, load
from traces.tuned import LEVELS, Outcome, tune

# Slow ones that run_all.py has: a fresh Python that imports torch, an export.
LONG = {"loader_by_spawn", "export_save"}
# Programs that end tuning at every level, because what they send elsewhere would not be seen.
UNWATCHED = {"python_child_without_environment"}
# What every guard must cover, as nearly all scripts do it: Python's own files, and torch's.
COVERED = (
    *("save_over", "remove_then_save", "backup_by_replace", "remove_tree_and_recreate", "rotate_by_glob_and_time"),
    *("copy_last_to_best", "write_aside_sync_rename", "snapshot_in_a_fresh_folder", "snapshot_goes_on"),
    *("pathlib_write", "pathlib_unlink", "append_a_log", "json_counter", "csv_rows", "pickle_state", "numpy_save"),
)
# What the fork of a process that has imported it writes by an `io.open` from before the guard: numpy.savetxt.
NOT_BY_FORKS = {"numpy_save"}
SHORT = ("--trials", "1", "--allow", "exact", "--diagnose-budget", "0")


def usable(names: set[str]) -> list[Trace]:
    found = [one for one in load().values() if one.name in names and not one.missing()]
    return [one for one in found if not one.root or os.geteuid() == 0]


def complain(outcome: Outcome) -> str:
    """All that is wrong, readable."""
    wrong = [f"{name}: {one}" for name, one in outcome.verdicts.items() if one.is_bad or one.kind == "ended"]
    return "\n".join([*wrong, *outcome.elsewhere, outcome.ended, outcome.finished.output[-3000:]])


def by_forks(room: Room, command: Sequence[str], env: Mapping[str, str], patience: float) -> Finished:
    """`Room.run`, with a launcher that is a fork of a process that has imported torch, and so are its ranks."""
    if FROM_NOTHING in os.environ or not room.private:
        return room.run(command, env, patience)
    with (
        popen_behind(room.prefix()) as popen,
        tempfile.TemporaryFile("w+", errors="replace") as said,
        open(os.devnull) as nothing,
    ):
        # Python's own variables as all forks have them: so they have one server. The job needs no other path.
        given = room.environment({**env, "PYTHONPATH": environment()["PYTHONPATH"]})
        del given["PYTHONDONTWRITEBYTECODE"]
        process = popen(command, cwd=room.work, env=given, stdin=nothing, stdout=said, stderr=said)
        timed_out = False
        try:
            process.wait(patience)
        except subprocess.TimeoutExpired:
            timed_out = True
            Launch(process, room.work, str(room.base), command).kill()  # all of the run have that folder in their HOME
            process.wait(10)
        said.seek(0)
        return Finished(process.returncode, said.read(), timed_out)


@pytest.mark.skipif(not may_have_own_tmp(), reason="needs the right to mount, and a checkout outside of /tmp")
def test_overlay_changes_nothing() -> None:
    chosen = usable(set(load()) - LONG - UNWATCHED)
    outcome = tune(LEVELS["overlay"], chosen, True, 200, SHORT, by_forks)
    assert not outcome.ended, complain(outcome)
    assert {one.kind for one in outcome.verdicts.values()} == {"unchanged"}, complain(outcome)
    assert not outcome.elsewhere, complain(outcome)


def test_guard_changes_nothing() -> None:
    left_out = set() if FROM_NOTHING in os.environ or not may_have_own_tmp() else NOT_BY_FORKS
    outcome = tune(LEVELS["guard"], usable(set(COVERED) - left_out), patience=200, more=SHORT, run=by_forks)
    assert not outcome.ended, complain(outcome)
    assert {one.kind for one in outcome.verdicts.values()} == {"unchanged"}, complain(outcome)
    assert not outcome.elsewhere, complain(outcome)


@pytest.mark.whole  # tests/isolation has each of these programs by itself
@pytest.mark.skipif(not may_have_own_tmp(), reason="needs the right to mount, and a checkout outside of /tmp")
def test_what_cannot_be_watched_ends_tuning_and_changes_nothing() -> None:
    outcome = tune(LEVELS["overlay"], usable(UNWATCHED), tune_only=True, patience=200)
    assert "would run without autoddp's checks" in outcome.ended, complain(outcome)
    assert {one.kind for one in outcome.verdicts.values()} == {"ended"}, complain(outcome)
    assert not outcome.elsewhere, complain(outcome)


@pytest.mark.whole  # tests/isolation has each of these programs by itself
def test_guard_ends_tuning_before_it_changes_something() -> None:
    """A foreign program may be covered or end tuning; either way nothing has changed."""
    outcome = tune(LEVELS["guard"], usable({"libc_unlink_and_rename"}), tune_only=True, patience=200)
    verdict = outcome.verdicts["libc_unlink_and_rename"]
    assert verdict.kind in ("unchanged", "ended"), complain(outcome)
    assert not outcome.elsewhere, complain(outcome)


def test_there_are_enough_traces() -> None:
    assert len(load()) >= 66
    assert LONG | set(COVERED) <= set(load())
