"""Hosts that cannot meet: one line, exit code 2, nothing started."""

from launchers import AUTODDP, SCRIPTS, start


def test_an_unknown_rendezvous_is_one_line(tmp_path):
    words = ["--nnodes", "2", "--rdzv-backend", "bogus", "--rdzv-endpoint", "127.0.0.1:29777", "--trials", "3"]
    launch = start(AUTODDP, tmp_path / "run", [*words, str(SCRIPTS / "plain.py")]).wait()
    assert launch.returncode == 2
    errors = [line for line in launch.stderr.splitlines() if line.startswith("autoddp: error: the hosts cannot meet")]
    assert len(errors) == 1
    assert "--rdzv-backend bogus" in errors[0]
    assert "Traceback" not in launch.stderr
    assert not list(launch.folder.glob("*.toml"))
