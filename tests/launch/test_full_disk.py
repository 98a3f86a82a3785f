"""A disk without room, a folder that is gone: tuning ends with a line, and the job runs as written."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from launchers import AUTODDP, popen_behind, start
from traces.room import may_bind

TRAINS = "import os; os.environ['RANK'] == '0' and print('tuned' if 'AUTODDP_TUNING' in os.environ else 'trained')"


def may_mount_an_image(folder: Path) -> bool:
    """Whether an image of a small disk can be made and mounted here."""
    if shutil.which("mkfs.ext4") is None or not may_bind():
        return False
    image = folder / "image"
    with open(image, "wb") as file:
        file.truncate(8 * 2**20)
    subprocess.run(["mkfs.ext4", "-q", "-N", "64", image], check=True)
    mount = ["unshare", "-m", "--propagation", "private", "mount", "-o", "loop", image, "/mnt"]
    return subprocess.run(mount, capture_output=True).returncode == 0


NAMES_ANOTHER = "autoddp: --output .autoddp: cannot be written (No space left on device); name a folder that can"


@pytest.mark.parametrize(
    ("free", "home", "told"),
    # The run's folder, its .gitignore and the mark of the run in it are three files.
    [
        (2, "", NAMES_ANOTHER),
        (2, "work", NAMES_ANOTHER),
        (3, "", "/attempt0 cannot be written (No space left on device); --output names another place"),
    ],
    ids=["no run folder", "no run folder, and the home is on that disk", "no attempt"],
)
def test_the_job_runs_where_the_current_folder_is_on_a_full_disk(
    tmp_path: Path, free: int, home: str, told: str
) -> None:
    if not may_mount_an_image(tmp_path):
        pytest.skip("needs root, mkfs.ext4 and a loop device")
    work = tmp_path / "work"
    work.mkdir()
    (tmp_path / "train.py").write_text(TRAINS)
    lines = f"""
        set -e
        mount -o loop {tmp_path}/image {work}
        cd {work}
        mkdir .autoddp
        cp ../train.py .
        touch $(seq $(($(stat -f -c %d .) - {free})))
        exec "$@"
    """
    with popen_behind(["unshare", "-m", "--propagation", "private", "bash", "-c", lines, "bash"]) as popen:
        variables = {"HOME": str(tmp_path / home), "TMPDIR": str(tmp_path)}
        launch = start(AUTODDP, work, ["--nproc-per-node", "2", "train.py"], variables, popen).wait()
    assert launch.returncode == 0, launch.stderr
    assert launch.stdout == "trained\n"
    assert "Traceback" not in launch.stderr
    assert told in launch.stderr


def test_the_job_runs_where_the_temporary_folder_is_gone(tmp_path: Path) -> None:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    removes = f"import shutil; shutil.rmtree({str(temporary)!r}, ignore_errors=True)"
    (tmp_path / "train.py").write_text(f"{TRAINS}\n{removes}")
    words = ["--isolation", "off", "--nproc-per-node", "2", "train.py"]
    launch = start(AUTODDP, tmp_path, words, {"TMPDIR": str(temporary)}).wait()
    assert launch.returncode == 0, launch.stderr
    assert launch.stdout == "trained\n"
    assert "launching as written" in launch.stderr
