"""Outputs that others have wrapped: containers' logs, quotes, markdown tables, Ray, Windows, two in one paste."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from autoddp.cli.probe import _read_text, run
from autoddp.errors import NothingReadable
from autoddp.topology.nccl_log import read_nccl_log
from autoddp.topology.nvidia.matrix import read_matrix
from autoddp.topology.nvidia.smi_texts import read_gpu_list, read_p2p_status
from autoddp.topology.rdma.texts import read_ibstat
from autoddp.topology.wrappers import decoded, unwrapped

DATA = Path(__file__).parents[1] / "data"
LOG = """host:77:77 [0] NCCL INFO NCCL version 2.26.2+cuda12.6
host:77:90 [0] NCCL INFO Using network IB
host:77:90 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/IPC
"""
MATRIX = """\tGPU0\tGPU1\tCPU Affinity
GPU0\t X \tPHB\t0-63
GPU1\tPHB\t X \t0-63
"""
PEERS = """ \tGPU0\tGPU1\t
 GPU0\tX\tCNS\t
 GPU1\tCNS\tX\t
"""


def docker(line: str) -> str:
    return json.dumps({"log": line + "\n", "stream": "stderr", "time": "2026-01-01T00:00:00Z"}, separators=(",", ":"))


LOGS = {
    "docker": docker,
    "quoted": lambda line: f"> {line}",
    "quoted twice": lambda line: f"> > {line}",
    "quoted docker": lambda line: docker(f"> {line}"),
    "cri": lambda line: f"2026-01-01T00:00:00.1Z stderr F {line}",
    "ray": lambda line: f"(Worker pid=7, ip=10.0.0.1) {line} [repeated 7x across cluster]",
    "coloured ray": lambda line: f"\x1b[36m(Engine_DP0 pid=742)\x1b[0m (Worker pid=7) {line}",
    "kubectl": lambda line: f"[pod/train-0/main] 2026-01-01T00:00:00.123456789Z {line}",
}


@pytest.mark.parametrize("name", LOGS)
def test_a_log_in_a_wrapper_says_the_same(name: str) -> None:
    text = "".join(LOGS[name](line) + "\n" for line in LOG.splitlines())
    assert read_nccl_log(unwrapped(text)) == read_nccl_log(LOG)


LISTED = "GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-00000000-1111-2222-3333-444444444444)\n"
PORT = "CA 'mlx5_0'\n\tNumber of ports: 1\n\tPort 1:\n\t\tState: Active\n\t\tRate: 400\n\t\tLink layer: InfiniBand\n"


@pytest.mark.parametrize("name", LOGS)
@pytest.mark.parametrize(
    ("read", "text"), [(read_matrix, MATRIX), (read_p2p_status, PEERS), (read_gpu_list, LISTED), (read_ibstat, PORT)]
)
def test_a_tools_output_in_a_wrapper_says_the_same(name: str, read: Callable[[str], Any], text: str) -> None:
    wrapped = "".join(LOGS[name](line) + "\n" for line in text.splitlines())
    assert read(unwrapped(wrapped)) == read(text)


def markdown(text: str, edges: bool, quote: str = "") -> str:
    """As GitHub has a table: with bars at its edges, or without where it was copied from the page."""
    rows = [[cell.strip() for cell in line.split("\t")] for line in text.splitlines()]
    rows.insert(1, ["--"] * len(rows[0]))
    middle = [" | ".join(row) for row in rows]
    return "".join(f"{quote}{f'| {row} |' if edges else row}\n" for row in middle)


@pytest.mark.parametrize("edges", [True, False])
@pytest.mark.parametrize("quote", ["", "> "])
def test_a_matrix_as_a_markdown_table(edges: bool, quote: str) -> None:
    assert read_matrix(unwrapped(markdown(MATRIX, edges, quote))) == read_matrix(MATRIX)


@pytest.mark.parametrize("text", [MATRIX, PEERS, LOG, "a | b\n", '{"log": 7}\n', '{"log":"half', "[repeated x]\n", ""])
def test_what_is_not_wrapped_stays_as_it_is(text: str) -> None:
    assert unwrapped(text) == text


def test_a_file_of_windows() -> None:
    assert decoded(MATRIX.encode("utf-16")) == decoded(MATRIX.encode("utf-8-sig")) == MATRIX


def test_two_matrices_in_one_paste() -> None:
    """Neither reader takes the other's cells, and nothing counts as missing."""
    paste = f"$ nvidia-smi topo -m\n{MATRIX}\nLegend:\n\n$ nvidia-smi topo -p2p r\n{PEERS}\nLegend:\n"
    matrix, peers = read_matrix(paste), read_p2p_status(paste)
    assert (matrix.links, matrix.missing) == ({"0-1": "PHB"}, ())
    assert (peers.between(0, 1), peers.missing) == ("CNS", ())


ROCM = """============ ROCm System Management Interface ============
=============== Weight between two GPUs ===============
       GPU0         GPU1         GPU2
GPU0   0            15           40
GPU1   15           0            15
GPU2   40           15           0

=============== Link Type between two GPUs ===============
       GPU0         GPU1         GPU2
GPU0   0            XGMI         PCIE
GPU1   XGMI         0            XGMI
GPU2   PCIE         {last}         0

====================== Numa Nodes ======================
GPU[0]\t\t: (Topology) Numa Node: 0
GPU[0]\t\t: (Topology) Numa Affinity: 1
============= End of ROCm SMI Log =============
"""


def test_the_links_of_amds_gpus() -> None:
    matrix = read_matrix(ROCM.format(last="XGMI"))
    assert matrix.gpus == (0, 1, 2)
    assert matrix.links == {"0-1": "XGMI", "0-2": "PCIE", "1-2": "XGMI"}
    assert (matrix.numa_affinity, matrix.missing) == ({0: "1"}, ())
    damaged = read_matrix(ROCM.format(last="X?MI"))
    assert damaged.missing == ("1 of 3 GPU links could not be read",)
    with pytest.raises(NothingReadable, match="rocm-smi's table of link types could not be read"):
        read_matrix("=== Link Type between two GPUs ===\n")


def test_the_command_reads_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "log").write_text("".join(docker(line) + "\n" for line in LOG.splitlines()))
    (tmp_path / "topo").write_bytes(ROCM.format(last="XGMI").encode("utf-16"))
    assert run(["--json", "--nccl-log", str(tmp_path / "log"), "--topo-matrix", str(tmp_path / "topo")]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert (found["nccl_log"]["network"], found["nccl_log"]["missing"]) == ("IB", [])
    assert found["topo_matrix"]["link_types"] == ["PCIE", "XGMI"]


def test_a_text_of_which_nothing_is_understood_says_of_how_many_lines() -> None:
    for read in (read_nccl_log, read_gpu_list, read_p2p_status):
        with pytest.raises(NothingReadable, match=r"^0 of 4 lines understood: expected the "):
            read("one\ntwo\nthree\nfour")


def broken(text: str, width: int) -> str:
    """As a terminal of so many columns shows it, copied."""
    lines = text.split("\n")
    return "\n".join(line[at : at + width] for line in lines for at in range(0, max(1, len(line)), width))


@pytest.mark.parametrize("width", [80, 100, 132])
@pytest.mark.parametrize("path", sorted(DATA.glob("nccl/*.log")), ids=lambda path: path.stem)
def test_a_log_that_a_terminal_has_broken_says_the_same(path: Path, width: int) -> None:
    text = unwrapped(decoded(path.read_bytes()))
    whole = _read_text(read_nccl_log, text)
    found = _read_text(read_nccl_log, broken(text, width))
    assert found.transports == whole.transports
    assert (found.network, found.nranks, found.nccl_version) == (whole.network, whole.nranks, whole.nccl_version)


@pytest.mark.parametrize("width", [80, 100, 132])
@pytest.mark.parametrize("path", sorted(DATA.glob("topo/*.txt")), ids=lambda path: path.stem)
def test_a_matrix_that_a_terminal_has_broken_says_nothing_else(path: Path, width: int) -> None:
    """It may say less, where lines were cut off before, and then says so."""
    text = unwrapped(decoded(path.read_bytes()))
    whole = _read_text(read_matrix, text)
    try:
        found = _read_text(read_matrix, broken(text, width))
    except NothingReadable:
        return
    assert found.links.items() <= whole.links.items()
    assert found.missing or found.plain() == whole.plain()
