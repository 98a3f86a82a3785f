"""The traces in short: nearly all in one tuned run in an overlay, some in one under guard. At length: run_all.py."""

from __future__ import annotations

import os

import pytest
from traces.room import may_have_own_tmp
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


def usable(names: set[str]) -> list[Trace]:
    found = [one for one in load().values() if one.name in names and not one.missing()]
    return [one for one in found if not one.root or os.geteuid() == 0]


def complain(outcome: Outcome) -> str:
    """All that is wrong, readable."""
    wrong = [f"{name}: {one}" for name, one in outcome.verdicts.items() if one.is_bad or one.kind == "ended"]
    return "\n".join([*wrong, *outcome.elsewhere, outcome.ended, outcome.finished.output[-3000:]])


@pytest.mark.skipif(not may_have_own_tmp(), reason="needs the right to mount, and a checkout outside of /tmp")
def test_overlay_changes_nothing() -> None:
    outcome = tune(LEVELS["overlay"], usable(set(load()) - LONG - UNWATCHED), True, 200, ["--diagnose-budget", "0"])
    assert not outcome.ended, complain(outcome)
    assert {one.kind for one in outcome.verdicts.values()} == {"unchanged"}, complain(outcome)
    assert not outcome.elsewhere, complain(outcome)


def test_guard_changes_nothing() -> None:
    outcome = tune(LEVELS["guard"], usable(set(COVERED)), patience=200, more=["--diagnose-budget", "0"])
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
