"""`autoddp probe`, typed as a user would: this machine, other machines' files, files of any bytes."""

from __future__ import annotations

import json
import os
import subprocess
import xml.etree.ElementTree as xml
from itertools import combinations
from pathlib import Path

import forks
import pytest
from launchers import AUTODDP, environment

from autoddp.cli.probe import run
from autoddp.errors import AutoddpError, UsageError
from autoddp.report.node_text import _matrix, _verdicts
from autoddp.tables import text_of
from autoddp.topology import Gpu, GpuPair, Node, Verdict

DATA = Path(__file__).resolve().parents[1] / "data"
TOPO = DATA / "topo" / "h200_8gpu_ansi_10nic.txt"


def typed(folder: Path, *words: object) -> tuple[int, str, str]:
    done = forks.run(["-m", "autoddp", "probe", *map(str, words)], cwd=folder, env=environment())
    return done.returncode, done.stdout, done.stderr


def test_this_node(tmp_path: Path) -> None:
    """By a new process: all others here are forks."""
    command = [*AUTODDP, "probe", "--svg", "here.svg"]
    done = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=100)
    out = done.stdout
    assert (done.returncode, done.stderr) == (0, "")
    assert "NUMA 0" in out or "CPU" in out
    assert xml.parse(tmp_path / "here.svg").getroot().tag.endswith("svg")
    assert list(tmp_path.iterdir()) == [tmp_path / "here.svg"]


def test_a_drawing_replaces_an_older_one_and_an_empty_file(tmp_path: Path) -> None:
    place = tmp_path / "here.svg"
    place.touch()
    for _ in range(2):
        assert run(["--svg", str(place)]) == 0
        assert place.read_text().endswith("</svg>\n")


def test_a_file_gets_no_colours(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name, value in {"TERM": "xterm", "FORCE_COLOR": "1"}.items():
        monkeypatch.setenv(name, value)
    assert run(["--topo-matrix", str(TOPO)]) == 0
    assert "\x1b" not in capsys.readouterr().out


def test_this_node_for_a_program(tmp_path: Path) -> None:
    code, out, _ = typed(tmp_path, "--json", "--checklist")
    node = json.loads(out)
    assert code == 0
    assert node["cpu"]["usable"] >= 1
    assert node["verdicts"][-1]["between"] == "nodes"
    assert {"what", "state", "found", "expected", "do"} == set(node["checklist"][0])


def test_the_checklist_fits_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--checklist"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert "graph inputs: not looked at" in lines
    assert sum(line.startswith("  found ") for line in lines) == sum(not line.startswith(" ") for line in lines)


def test_the_checklist_has_what_nccls_files_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "nccl.conf").write_text("NCCL_ALGO=Ring\n")
    monkeypatch.delenv("NCCL_ALGO", raising=False)
    monkeypatch.setenv("NCCL_CONF_FILE", str(tmp_path / "nccl.conf"))
    assert run(["--checklist", "--json"]) == 0
    found = {point["what"]: point["found"] for point in json.loads(capsys.readouterr().out)["checklist"]}
    assert found["NCCL_ALGO"] == "Ring"


def test_the_checklist_of_another_machine(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--checklist", "--json", "--sysfs", str(DATA / "rdma" / "sysfs_infiniband_h100_dgxlike")]) == 0
    points = {point["what"]: point for point in json.loads(capsys.readouterr().out)["checklist"]}
    assert points["RDMA ports"]["found"].startswith("mlx5_")
    assert points["NCCL_IB_HCA"]["state"] == "not looked at"


def test_a_checklist_needs_a_node() -> None:
    with pytest.raises(UsageError, match="--checklist looks at a node: it needs --topo-matrix or --sysfs"):
        run(["--checklist", "--nvlink-status", str(DATA / "rdma" / "nvlink_s_8xA100_sxm.txt")])


def test_another_machines_matrix(tmp_path: Path) -> None:
    code, out, err = typed(tmp_path, "--topo-matrix", TOPO, "--svg", "node.svg")
    assert (code, err) == (0, "")
    assert "P2P/NVLink" in out
    assert "18 NVLinks" in out
    names = [text.text for text in xml.parse(tmp_path / "node.svg").getroot().iter() if text.tag.endswith("text")]
    assert [f"GPU{number}" for number in range(8)] == [name for name in names if name and name.startswith("GPU")]


@pytest.mark.parametrize("columns", [40, 80, 160])
def test_a_matrix_of_many_gpus_has_every_word(columns: int) -> None:
    gpus = tuple(Gpu(number) for number in range(16))
    pairs = tuple(GpuPair(a, b, nvlinks=12) for a, b in combinations(range(16), 2))
    text = text_of(_matrix(Node("dgx2", gpus=gpus, pairs=pairs)), columns)
    assert text.count("NV12") == 16 * 15
    assert max(map(len, text.splitlines())) <= columns


def test_what_holds_gpus_back_is_not_cut() -> None:
    pairs = [f"GPU{a}-GPU{b}" for a, b in combinations(range(8), 2)]
    why = "they cross the sockets; NCCL's peer access ends at PXB here"
    found = [Verdict(pair, "SHM", 6.3, 10.1, why, "NCCL_P2P_LEVEL=SYS allows it") for pair in pairs]
    text = text_of(_verdicts(found), 80)
    assert "…" not in text
    assert "6.3-10.1" in text


def test_the_jsons_fields_are_at_the_top_for_one_file(tmp_path: Path) -> None:
    code, out, _ = typed(tmp_path, "--topo-matrix", TOPO, "--json")
    expected = json.loads(TOPO.with_suffix(".json").read_text())
    assert code == 0
    assert {name: json.loads(out)[name] for name in ("gpus", "gpu_links")} == {
        name: expected[name] for name in ("gpus", "gpu_links")
    }


def test_several_files_stand_under_their_options(tmp_path: Path) -> None:
    gids = DATA / "rdma" / "show_gids_bond_vxlan.txt"
    code, out, _ = typed(tmp_path, "--topo-matrix", TOPO, "--show-gids", gids, "--json")
    assert code == 0
    assert set(json.loads(out)) == {"topo_matrix", "show_gids"}


def test_peer_access_and_mig_change_the_verdict(tmp_path: Path) -> None:
    (tmp_path / "topo.txt").write_text("\tGPU0\tGPU1\nGPU0\tX\tPIX\nGPU1\tPIX\tX\n")
    p2p = DATA / "rdma" / "topo_p2p_r_2xL4_cns.txt"
    mig = DATA / "rdma" / "nvidia_smi_L_a100_mig_7x1g.txt"
    alone, refused, cut = (
        typed(tmp_path, "--topo-matrix", "topo.txt", *more)[1]
        for more in ((), ("--p2p-status", p2p), ("--gpu-list", mig))
    )
    assert "P2P/PCIe" in alone
    assert "SHM" not in alone
    assert "P2P/PCIe" not in refused + cut
    assert "SHM" in refused
    assert "SHM" in cut
    assert "NVIDIA A100-SXM4-80GB, MIG" in cut


@pytest.mark.parametrize(
    ("option", "file"),
    [
        ("--nccl-log", "nccl/2nodes_8gpu_shm_and_socket.log"),
        ("--ibv-devinfo", "rdma/ibv_devinfo_1x_cx7_ethernet_active.txt"),
        ("--ibv-devinfo", "rdma/ibstat_cx4_edr_active.txt"),
        ("--ibv-devinfo", "rdma/ibstatus_roce_100g.txt"),
        ("--show-gids", "rdma/show_gids_6_two_link_locals.txt"),
        ("--nvlink-status", "rdma/nvlink_s_8xA100_sxm.txt"),
        ("--sysfs", "rdma/sysfs_infiniband_h100_dgxlike"),
        ("--p2p-status", "rdma/topo_p2p_r_8gpu_ok.txt"),
        ("--gpu-list", "rdma/nvidia_smi_L_a100_mig_7x1g.txt"),
    ],
)
def test_every_kind_of_file(capsys: pytest.CaptureFixture[str], option: str, file: str) -> None:
    assert run([option, str(DATA / file)]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert len(out.splitlines()) > 1


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--topo-matrix", "rubbish"), "no GPU matrix in the text"),
        (("--topo-matrix", "absent.txt"), "--topo-matrix absent.txt: No such file or directory; name a readable file"),
        (("--topo-matrix", "."), "--topo-matrix .: Is a directory"),
        (("--topo-matrix", "pipe"), "--topo-matrix pipe: no GPU matrix in the text"),
        (("--topo-matrix", "/dev/zero"), "--topo-matrix /dev/zero: larger than 256 MiB"),
        (("--nccl-log", "rubbish"), ""),
        (("--ibv-devinfo", "rubbish"), ""),
        (("--show-gids", "rubbish"), ""),
        (("--nvlink-status", "rubbish"), ""),
        (("--p2p-status", "rubbish"), ""),
        (("--gpu-list", "rubbish"), ""),
        (("--sysfs", "rubbish"), "--sysfs rubbish: not a folder"),
        (("--sysfs", "empty"), ""),
        (("--svg", "nowhere/x.svg"), "--svg nowhere/x.svg: No such file or directory"),
        (("--svg", ""), "--svg: its value is empty: give --svg FILE, or leave it out"),
        (("--topo-matrix", ""), "--topo-matrix: its value is empty: give --topo-matrix FILE, or leave it out"),
        (("--svg", "rubbish"), "--svg rubbish: not a drawing, so it is not replaced; name another file"),
        (("--topo-matrx", "rubbish"), "--topo-matrx rubbish (did you mean '--topo-matrix'?); see autoddp probe"),
        (("surplus",), "probe: "),
    ],
)
def test_bad_input_is_one_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: tuple[str, ...],
    says: str,
) -> None:
    (tmp_path / "rubbish").write_bytes(bytes(range(256)) * 40)
    (tmp_path / "empty").mkdir()
    os.mkfifo(tmp_path / "pipe")  # into which nobody writes
    monkeypatch.chdir(tmp_path)
    with pytest.raises(AutoddpError) as error:
        run(list(words))
    assert (error.value.exit_code, capsys.readouterr().out) == (2, "")
    assert says in str(error.value)
    assert "\n" not in str(error.value)
    assert (tmp_path / "rubbish").read_bytes() == bytes(range(256)) * 40


def test_it_is_shown_as_one_line(tmp_path: Path) -> None:
    code, out, err = typed(tmp_path, "--topo-matrix", "absent.txt")
    assert (code, out) == (2, "")
    assert err.startswith("autoddp: error: probe: --topo-matrix absent.txt: ")
    assert err.count("\n") == 1
