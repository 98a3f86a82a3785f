"""Redirected, teed and filtered output: the same files with the same content, the same lines on the console."""

import logging
import os

import pytest
from launchers import REPORTER, SIDES, side_by_side, whole

from autoddp.torchrun.surroundings import quiet_elastic

LOGS = ["--nproc-per-node", "2", "--log-dir", "{out}/logs"]
FILTERS = ["--local-ranks-filter", "1", "--duplicate-stdout-filters", "rank"]
# name: words, files below the job's log folder, one line that the console shows and one that it does not
OUTPUTS = {
    "redirects": (
        [*LOGS, "-r", "0:3,1:1", REPORTER],
        ["0/stderr.log", "0/stdout.log", "1/stdout.log"],
        "rank 1 on stderr",
        "rank 0 on stderr",
    ),
    "tee": (
        [*LOGS, "--tee", "3", "--role", "trainer", REPORTER],
        ["0/stderr.log", "0/stdout.log", "1/stderr.log", "1/stdout.log"],
        "[trainer1]:rank 1 on stdout",
        "rank 1 on stdout",
    ),
    "filtered": (
        [*LOGS, "-t", "3", "--role", "trainer", *FILTERS, REPORTER],
        ["0/stderr.log", "0/stdout.log", "1/stderr.log", "1/stdout.log", "filtered_stdout.log"],
        "[trainer1]:rank 1 on stderr",
        "[trainer0]:rank 0 on stderr",
    ),
}


@pytest.fixture(scope="module", params=["redirects", whole("tee"), "filtered"])
def output(request, tmp_path_factory):
    words, files, shown, hidden = OUTPUTS[request.param]
    return side_by_side(tmp_path_factory.mktemp(request.param), words), files, shown, hidden


def logs(launch) -> dict[str, str]:
    """All log files by their place in the job's folder, whose name is random."""
    (job,) = (launch.folder / "logs").iterdir()
    return {str(path.relative_to(job)): path.read_text() for path in job.rglob("*") if path.is_file()}


def console(launch) -> list[str]:
    """What came from workers; their order among each other is chance."""
    return sorted(line for text in (launch.stdout, launch.stderr) for line in text.splitlines() if "rank " in line)


def test_log_files(output):
    both, files, _, _ = output
    expected = logs(both["torchrun"])
    assert expected.keys() == {f"attempt_0/{file}" for file in files}
    assert any("rank 0 on stdout" in text for text in expected.values())
    assert logs(both["autoddp"]) == expected


def test_console(output):
    both, _, shown, hidden = output
    expected = console(both["torchrun"])
    assert shown in expected
    assert hidden not in expected
    assert console(both["autoddp"]) == expected


def test_ends_well(output):
    both, _, _, _ = output
    assert {side: launch.returncode for side, launch in both.items()} == dict.fromkeys(SIDES, 0)


def test_elastics_log_takes_paths_of_any_encoding(tmp_path, capsys):
    """Such as that of Python, in the line that says which rank has failed."""
    with quiet_elastic(tmp_path / "elastic.log"):
        for name in ("elastic", "launcher.api"):  # the latter tells under LOGLEVEL=INFO what is started
            logging.getLogger(f"torch.distributed.{name}").error("of binary: %s", "/home/jos\udce9/bin/python")
    assert capsys.readouterr().err == ""
    assert (tmp_path / "elastic.log").read_text().count("of binary: /home/jos\\udce9/bin/python\n") == 2


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")
def test_elastics_log_on_a_full_disk_says_nothing(tmp_path, capsys):
    (tmp_path / "elastic.log").symlink_to("/dev/full")
    with quiet_elastic(tmp_path / "elastic.log"):
        logging.getLogger("torch.distributed.elastic").error("a rank has failed")
    assert capsys.readouterr().err == ""
