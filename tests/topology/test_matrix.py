"""nvidia-smi's matrix: real outputs read exactly, damaged ones never read wrongly, and nothing takes long."""

from __future__ import annotations

import doctest
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from autoddp.errors import NothingReadable
from autoddp.topology.nvidia import matrix as module
from autoddp.topology.nvidia.matrix import TopologyMatrix, read_matrix

TEXTS = {path.stem: path.read_text() for path in sorted((Path(__file__).parents[1] / "data/topo").glob("*.txt"))}
EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "60"))
FUZZ = settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))

# What a file of expectations says against its own text, and what the text says.
CORRECTIONS: dict[str, dict[str, Any]] = {
    # The NIC legend is there.
    "gcp_a4_highgpu_8g_8xB200_8nic": {"nic_names": [f"mlx5_{i}" for i in range(8)]},
    "puget_wrx90_2xRTX6000Ada_2nic": {"nic_names": ["mlx5_0", "mlx5_1"]},
    # NODE and PXB are relations to a NIC; the rows of GPU4 to GPU7 lost a cell, so their affinities are not certain.
    "dgx_h100_12nic_glued_cells_truncated": {"numa_affinity": {"0": "0", "1": "0", "2": "0", "3": "0"}},
}
FOUR = (  # two NVLink pairs, one NIC near each
    "\tGPU0\tGPU1\tGPU2\tGPU3\tNIC0\tNIC1\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\n"
    "GPU0\t X \tNV12\tSYS\tSYS\tPIX\tSYS\t0-15\t0\t\tN/A\n"
    "GPU1\tNV12\t X \tSYS\tSYS\tPHB\tSYS\t0-15\t0\t\tN/A\n"
    "GPU2\tSYS\tSYS\t X \tNV4\tSYS\tPXB\t16-31\t1\t\tN/A\n"
    "GPU3\tSYS\tSYS\tNV4\t X \tSYS\tPIX\t16-31\t1\t\tN/A\n"
    "NIC0\tPIX\tPHB\tSYS\tSYS\t X \tSYS\t\t\t\t\n"
    "NIC1\tSYS\tSYS\tPXB\tPIX\tSYS\t X \t\t\t\t\n"
    "\nLegend:\n\n  X    = Self\n  NV#  = Connection traversing a bonded set of # NVLinks\n"
    "\nNIC Legend:\n\n  NIC0: mlx5_0\n  NIC1: mlx5_3\n"
)
LINKS = {"0-1": "NV12", "0-2": "SYS", "0-3": "SYS", "1-2": "SYS", "1-3": "SYS", "2-3": "NV4"}
WHOLE = TopologyMatrix(
    gpus=(0, 1, 2, 3),
    links=LINKS,
    rows_present=(0, 1, 2, 3),
    nics=2,
    nic_names=("mlx5_0", "mlx5_3"),
    nic_links={
        0: {"NIC0": "PIX", "NIC1": "SYS"},
        1: {"NIC0": "PHB", "NIC1": "SYS"},
        2: {"NIC0": "SYS", "NIC1": "PXB"},
        3: {"NIC0": "SYS", "NIC1": "PIX"},
    },
    cpu_affinity={0: "0-15", 1: "0-15", 2: "16-31", 3: "16-31"},
    numa_affinity={0: "0", 1: "0", 2: "1", 3: "1"},
    missing=(),
)
NIC_LOST = "no header line fits the rows: the GPUs were inferred from them, the NICs are not known"


def without(*pairs: str) -> dict[str, str]:
    return {pair: link for pair, link in LINKS.items() if pair not in pairs}


def test_the_real_outputs_are_here() -> None:
    assert len(TEXTS) == 28
    assert CORRECTIONS.keys() <= TEXTS.keys()


@pytest.mark.parametrize("name", TEXTS)
def test_a_real_output_is_read_exactly(name: str) -> None:
    path = Path(__file__).parents[1] / f"data/topo/{name}.json"
    expected = json.loads(path.read_text()) | CORRECTIONS.get(name, {})
    plain = read_matrix(TEXTS[name]).plain()
    assert bool(plain.pop("missing")) is not plain["complete"]
    assert plain == {key: expected[key] for key in plain}
    assert {"gpus", "gpu_links", "nics", "nic_names", "cpu_affinity", "numa_affinity", "complete"} <= plain.keys()


def test_all_of_it() -> None:
    assert read_matrix(FOUR) == WHOLE
    assert WHOLE.complete


def test_old_drivers_name_the_nic_in_the_header() -> None:
    matrix = read_matrix(TEXTS["dgx1_p100_header_glued_soc"])
    assert matrix.nic_links[2] == {"mlx5_0": "PHB", "mlx5_2": "SOC", "mlx5_1": "PIX", "mlx5_3": "SOC"}


@pytest.mark.parametrize(
    "text",
    [
        FOUR.replace("\n", "\r\n"),
        FOUR.replace("\t", "   "),
        "\ufeff" + FOUR,
        "".join(f"    {line}\n" for line in FOUR.splitlines()),
        "$ nvidia-smi topo -m\n" + FOUR + "$ \n",
        FOUR.replace("\tGPU0\tGPU1\tGPU2", "\t\x1b[4mGPU0\tGPU1\tGPU2", 1).replace("ID\n", "ID\x1b[0m\n"),
        FOUR.replace("\tGPU0\tGPU1\tGPU2", "\t[4mGPU0\tGPU1\tGPU2", 1).replace("ID\n", "ID[0m\n"),
        FOUR.replace("\tGPU0\tGPU1", "GPU0\tGPU1", 1),
        FOUR.replace("\tGPU0\tGPU1\tGPU2\tGPU3\tNIC0\tNIC1\t", "GPU0GPU1GPU2GPU3NIC0NIC1", 1),
        FOUR.replace("\nGPU2", "GPU2"),
        FOUR.replace("\nGPU0", "GPU0"),
        FOUR.replace("GPU2\t", "G?U2\t", 1),
        FOUR.replace("GPU2\t", "GPU92\t", 1),
        FOUR + FOUR,
    ],
    ids=[
        *("crlf", "spaces", "bom", "indented", "prompt", "coloured", "colours without ESC", "header flush"),
        *(
            "header glued",
            "rows glued",
            "header glued to its row",
            "name in the header",
            "number in the header",
            "twice",
        ),
    ],
)
def test_what_costs_nothing(text: str) -> None:
    assert read_matrix(text) == WHOLE


def test_columns_are_read_by_their_names() -> None:
    swapped = (
        "\tGPU1\tGPU0\tmlx5_1\tmlx5_0\nGPU1\tX\tNV4\tPIX\tSYS\nGPU0\tNV4\tX\tSYS\tPHB\n"
        "mlx5_1\tPIX\tSYS\tX\tNODE\nmlx5_0\tSYS\tPHB\tNODE\tX\n"
    )
    matrix = read_matrix(swapped)
    assert (matrix.links, matrix.nic_names, matrix.missing) == ({"0-1": "NV4"}, ("mlx5_1", "mlx5_0"), ())
    assert matrix.nic_links == {0: {"mlx5_1": "SYS", "mlx5_0": "PHB"}, 1: {"mlx5_1": "PIX", "mlx5_0": "SYS"}}


ROWS = FOUR.splitlines(keepends=True)


@pytest.mark.parametrize(
    ("kept", "rows", "lost", "first_sentence"),
    [
        (1, (), list(LINKS), "no row could be read of GPU0, GPU1, GPU2, GPU3 and 2 more"),
        (2, (0,), ["1-2", "1-3", "2-3"], "no row could be read of GPU1, GPU2, GPU3, NIC0 and 1 more"),
        (3, (0, 1), ["2-3"], "no row could be read of GPU2, GPU3, NIC0, NIC1"),
        (4, (0, 1, 2), [], "no row could be read of GPU3, NIC0, NIC1"),
        (5, (0, 1, 2, 3), [], "no row could be read of NIC0, NIC1"),
        (6, (0, 1, 2, 3), [], "no row could be read of NIC1"),
    ],
)
def test_cut_after_a_line(kept: int, rows: tuple[int, ...], lost: list[str], first_sentence: str) -> None:
    matrix = read_matrix("".join(ROWS[:kept]))
    assert (matrix.gpus, matrix.rows_present, matrix.nics, matrix.nic_names) == ((0, 1, 2, 3), rows, 2, None)
    assert matrix.links == without(*lost)
    assert matrix.missing[0] == first_sentence


@pytest.mark.parametrize("end", ["\n", ""])
def test_without_its_header_the_rows_tell_the_gpus(end: str) -> None:
    matrix = read_matrix("".join(ROWS[1:5]).rstrip() + end)
    assert (matrix.gpus, matrix.links, matrix.nics, matrix.nic_links) == ((0, 1, 2, 3), LINKS, None, {})
    assert (matrix.cpu_affinity, matrix.numa_affinity) == (WHOLE.cpu_affinity, WHOLE.numa_affinity)
    assert matrix.missing == (NIC_LOST,)


@pytest.mark.parametrize("header", ["GPU2\tGPU3\tNIC0\tNIC1\tCPU Affinity\n", "\tGPU0\tGPU2\tGPU3\tNIC0\tNIC1\n"])
def test_a_header_that_the_rows_refute_is_left_out(header: str) -> None:
    matrix = read_matrix(header + "".join(ROWS[1:7]))
    assert (matrix.gpus, matrix.links, matrix.nics) == ((0, 1, 2, 3), LINKS, None)
    assert matrix.missing[0] == NIC_LOST


def test_a_name_that_stands_twice_is_no_name() -> None:
    matrix = read_matrix(FOUR.replace("NIC0\tNIC1", "NIC1\tNIC1", 1))
    assert (matrix.links, matrix.nics, matrix.nic_links) == (LINKS, None, {})


def test_a_header_that_lost_a_nic_still_tells_the_gpus() -> None:
    matrix = read_matrix(FOUR.replace("NIC0\t", "", 1))
    assert (matrix.gpus, matrix.links, matrix.nics, matrix.nic_links) == ((0, 1, 2, 3), LINKS, None, {})
    assert matrix.missing[0] == "the header line is damaged: how many NICs there are is not known"


@pytest.mark.parametrize(
    ("last_row", "read"),
    [
        ("GPU0\tX\tNV1", {}),  # was it NV12?
        ("GPU0\tX\tNV1\t", {"0-1": "NV1"}),
        ("GPU0\tX\tNV1\n", {}),  # cut, and a line break added: which cells are gone is not known
        ("GPU0\tX\tSYS", {"0-1": "SYS"}),
        ("GPU0\tX\tSY", {}),
        ("GPU0\tX\tNV12\tNO", {"0-1": "NV12"}),
        ("GPU1\tNV12", {}),  # without its X nothing proves the place of the others
        ("GPU1\tNV12\tX", {"0-1": "NV12"}),
    ],
)
def test_cut_inside_a_row(last_row: str, read: dict[str, str]) -> None:
    matrix = read_matrix(f"\tGPU0\tGPU1\tGPU2\n{last_row}")
    assert matrix.links == read
    assert not matrix.complete


def test_the_last_word_of_an_open_text_is_believed_if_another_row_has_it() -> None:
    header, first = "\tGPU0\tGPU1\tCPU Affinity\n", "GPU0\tX\tNV4\t0-11\n"
    assert read_matrix(f"{header}{first}GPU1\tNV4\tX\t0-11").missing == ()
    matrix = read_matrix(f"{header}{first}GPU1\tNV4\tX\t12-1")
    assert (matrix.cpu_affinity, matrix.missing) == ({0: "0-11"}, ("the CPU affinity could not be read of GPU1",))


@pytest.mark.parametrize(
    ("old", "new", "lost", "sentence"),
    [
        ("GPU1\tNV12", "GPU1\tNV2", "0-1", "contradict each other between GPUs 0-1 (NV12 or NV2)"),
        ("GPU3\tSYS\tSYS", "GPU3\tSYS\tNODE", "1-3", "contradict each other between GPUs 1-3 (NODE or SYS)"),
    ],
)
def test_two_directions_that_disagree(old: str, new: str, lost: str, sentence: str) -> None:
    matrix = read_matrix(FOUR.replace(old, new))
    assert matrix.links == without(lost)
    assert matrix.missing[0] == "1 of 6 GPU links could not be read"
    assert matrix.missing[1].endswith(sentence)


def test_a_relation_unknown_to_us_is_missing() -> None:
    matrix = read_matrix("GPU0 GPU1 CPU Affinity\nGPU0 X QPX 0-3\nGPU1 QPX X 0-3\n")
    assert (matrix.links, matrix.missing) == ({}, ("1 of 1 GPU links could not be read",))
    assert matrix.cpu_affinity == {0: "0-3", 1: "0-3"}


@pytest.mark.parametrize("pieces", [("NV12\tSYS", "NV12SYS"), ("NV12\tSYS", "SYS"), ("X \tNV12", "X \tNV12\tNV12")])
def test_a_row_with_too_few_or_too_many_cells_counts_up_to_its_x(pieces: tuple[str, str]) -> None:
    damaged = ROWS[1].replace(*pieces)
    matrix = read_matrix(FOUR.replace(ROWS[1], damaged))
    assert (matrix.links, matrix.nic_links) == (LINKS, WHOLE.nic_links)  # the other direction has them
    assert 0 not in matrix.cpu_affinity
    alone = read_matrix(ROWS[0] + damaged)
    assert (alone.links, alone.nic_links) == ({}, {})


def test_affinities_glued_to_each_other_cost_no_link() -> None:
    matrix = read_matrix(FOUR.replace("16-31\t1\t\tN/A", "16-311\t\tN/A").replace("0-15\t0\t\tN/A", "0-15\t0N/A"))
    assert (matrix.links, matrix.nic_links, matrix.cpu_affinity) == (LINKS, WHOLE.nic_links, {})
    assert matrix.missing == (
        "the CPU affinity could not be read of GPU0, GPU1, GPU2, GPU3",
        "the NUMA affinity could not be read of GPU0, GPU1, GPU2, GPU3",
    )


def test_a_legend_that_ends_inside_a_name() -> None:
    matrix = read_matrix(FOUR.rstrip())
    assert (matrix.nic_names, matrix.missing) == (None, ("the NIC legend does not name every NIC",))


def test_of_two_machines_the_wider_matrix_is_read() -> None:
    small = TEXTS["ws_2gpu_nv2_no_gpunumaid"]
    for text in (small + FOUR, FOUR + small):
        matrix = read_matrix(text)
        assert (matrix.gpus, matrix.links) == (WHOLE.gpus, LINKS)
        assert matrix.missing == ("lines that look like rows but fit no header, or belong to another matrix: 2",)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "\n \n",
        "No devices were found\n",
        "GPU0 is hot\n",
        "GPU999999999999 X NV4\n",
        "\tGPU0\tGPU1",
        "Legend:\n X = Self\n",
    ],
)
def test_nothing_readable_is_one_line(text: str) -> None:
    with pytest.raises(
        NothingReadable, match=r"^no GPU matrix in the text '.*': expected .*`nvidia-smi topo -m`"
    ) as told:
        read_matrix(text)
    assert len(str(told.value).splitlines()) == 1


@pytest.mark.parametrize(
    "text",
    [
        "\x1b[" + "0" * 400_000,
        "GPU0" * 100_000,
        "GPU0 X " + "NV4 " * 100_000,
        "GPU0 X " + "1-1," * 100_000,
        "".join(f"GPU0 X a{i}\n" for i in range(30_000)),
        " ".join(f"GPU{i} a{i}" for i in range(1000)) + "\nGPU0 X\n",
        "GPU0 " + " ".join(f"NIC{i}" for i in range(9000)) + "\n" + "GPU0 X PIX\n" * 30_000,
        "GPU" + " " * 400_000 + "NUMA" + " " * 400_000,
        "\n" * 400_000,
    ],
    ids=["escape", "names", "cells", "affinity", "rows", "columns", "nics", "blanks", "lines"],
)
def test_time_is_linear(text: str) -> None:
    began = time.process_time()
    matrix = read(text)
    assert time.process_time() - began < 3  # a tenth of it is normal; quadratic would be minutes
    assert matrix is None or all(len(sentence) < 200 for sentence in matrix.missing)


def read(text: str) -> TopologyMatrix | None:
    try:
        return read_matrix(text)
    except NothingReadable:
        return None


def assert_no_link_is_wrong(matrix: TopologyMatrix | None, name: str) -> None:
    if matrix is not None:
        true = read_matrix(TEXTS[name])
        assert matrix.links.items() <= true.links.items()
        for gpu, near in matrix.nic_links.items():
            known = true.nic_links.get(gpu, {})
            assert all(known.get(nic, relation) == relation for nic, relation in near.items())


@pytest.mark.parametrize("name", TEXTS)
def test_cut_at_every_line(name: str) -> None:
    lines = TEXTS[name].splitlines(keepends=True)
    for i in range(len(lines)):
        for kept in (lines[:i], lines[i:], lines[:i] + lines[i + 1 :]):
            assert_no_link_is_wrong(read("".join(kept)), name)


@FUZZ
@given(st.sampled_from(sorted(TEXTS)), st.data())
def test_a_piece_of_a_text_has_no_wrong_link(name: str, data: st.DataObject) -> None:
    text = TEXTS[name]
    start = data.draw(st.just(0) | st.integers(0, len(text)), "start")
    assert_no_link_is_wrong(read(text[start : data.draw(st.integers(start, len(text)), "end")]), name)


@FUZZ
@given(st.sampled_from([name for name in sorted(TEXTS) if read_matrix(TEXTS[name]).complete]), st.data())
def test_one_damaged_character_makes_no_wrong_link(name: str, data: st.DataObject) -> None:
    """Every link is printed twice; only where both are there can one damaged cell be found out."""
    text = TEXTS[name]
    at = data.draw(st.integers(0, len(text) - 1), "at")
    new = data.draw(st.sampled_from(["", *"\t\n X019NVPU-#", text[at] * 2]), "new")
    assert_no_link_is_wrong(read(text[:at] + new + text[at + 1 :]), name)


@FUZZ
@given(st.sampled_from(sorted(TEXTS)), st.data())
def test_any_damage_is_survived(name: str, data: st.DataObject) -> None:
    text = TEXTS[name]
    for _ in range(data.draw(st.integers(1, 6), "edits")):
        start = data.draw(st.integers(0, len(text)))
        end = min(len(text), start + data.draw(st.integers(0, 40)))
        new = data.draw(
            st.text(max_size=8) | st.sampled_from([text[start:end] * 2, " ", "\n", "\t", "X", "NV1", "GPU0", "\x1b[4m"])
        )
        text = text[:start] + new + text[end:]
    if data.draw(st.booleans(), "lines glued"):
        text = text.replace("\n", "")
    if matrix := read(text):
        json.dumps(matrix.plain())


@FUZZ
@given(st.binary(max_size=400))
def test_any_bytes_are_survived(content: bytes) -> None:
    read(content.decode(errors="replace"))


def test_its_example_is_true() -> None:
    assert doctest.testmod(module) == (0, 2)
