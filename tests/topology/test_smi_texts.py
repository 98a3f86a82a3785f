"""Texts of nvidia-smi: NVLinks, GPUs, MIG, peer access; cut, damaged, or saying that there is none."""

from __future__ import annotations

import pytest
from rdma_captures import capture, plain

from autoddp.topology.nvidia.smi_texts import read_gpu_list, read_nvlink_status, read_p2p_status


@pytest.mark.parametrize("nothing", ["", "\n", "\x1b[0m\r\n  \n"])
def test_no_nvlink_is_no_text(nothing: str) -> None:
    found = read_nvlink_status(nothing)
    assert (found.gpus, found.links_per_gpu, found.speed_gbs, found.missing) == ((), 0, None, ())


def test_fewer_links_than_another_of_its_model() -> None:
    text = capture("nvlink_s_8xA100_sxm")[0]
    found = read_nvlink_status(text[: text.rindex("Link 8") - 1])
    assert found.missing == ("GPU 7: 8 links are listed, of another NVIDIA A100-SXM4-80GB 12",)
    assert (found.links_per_gpu, found.speed_gbs) == (None, 25)


def test_links_after_a_lost_gpu_are_stray() -> None:
    rows = capture("nvlink_s_8xA100_sxm")[0].split("\n")
    found = read_nvlink_status("\n".join(rows[:13] + rows[14:]))
    assert [gpu.index for gpu in found.gpus] == [0, 2, 3, 4, 5, 6, 7]
    assert {len(gpu.links) for gpu in found.gpus} == {12}
    assert found.missing == ("12 links belong to a GPU whose line could not be read",)


def test_a_damaged_speed_is_a_missing_link() -> None:
    found = read_nvlink_status(capture("nvlink_s_v100_two_links_inactive")[0].replace("2: 25.781", "2: 2\x005.781"))
    assert [(link.number, link.gbs) for link in found.gpus[0].links] == [(0, 25.781), (1, 25.781)]
    assert [link.number for link in found.stray] == [3, 4, 5]
    assert found.missing == ("line 4 could not be read", "3 links belong to a GPU whose line could not be read")


def test_a_list_without_devices() -> None:
    assert plain(read_gpu_list("No devices found.\n")) == {
        "physical_gpus": 0,
        "mig_devices": 0,
        "mig": False,
        "gpus": [],
        "stray": [],
        "missing": [],
    }


def test_mig_devices_of_a_lost_gpu() -> None:
    text = capture("nvidia_smi_L_a100_mig_7x1g")[0]
    found = read_gpu_list(text + text.partition("\n")[2] + text.replace("GPU 0:", "GPU 3:"))
    assert [(gpu.index, len(gpu.mig)) for gpu in found.gpus] == [(0, 7), (3, 7)]
    assert len(found.stray) == 7
    assert found.missing == ("2 of GPUs 0 to 3 are not listed",)


MATRIX = "\tGPU0\tGPU1\tGPU2\nGPU0\tX\tOK\tCNS\nGPU1\tOK\tX\tOK\nGPU2\tCNS\tOK\tX\n"


@pytest.mark.parametrize(
    ("text", "all_ok", "pairs", "missing"),
    [
        (MATRIX, False, 6, ()),
        (MATRIX.replace("CNS", "OK"), True, 6, ()),
        (
            MATRIX.replace("CNS", "OK").replace("GPU2\tOK\tOK\tX\n", ""),
            None,
            4,
            ("GPU2: 2 of 2 pairs could not be read",),
        ),
        (MATRIX.replace("GPU1\tOK\tX\tOK", "GPU1\tX\tOK"), False, 4, ("GPU1: 2 of 2 pairs could not be read",)),
        (
            MATRIX.replace("\tGPU2\n", "\tGPU7\n"),
            None,
            2,
            (
                "GPU0: 1 of 2 pairs could not be read",
                "GPU1: 1 of 2 pairs could not be read",
                "GPU7: 2 of 2 pairs could not be read",
            ),
        ),
        (MATRIX.replace("GPU1\tOK\tX", "GPU1\t0K\tX"), False, 5, ("GPU1: 1 of 2 pairs could not be read",)),
    ],
)
def test_peer_access(text: str, all_ok: bool | None, pairs: int, missing: tuple[str, ...]) -> None:
    found = read_p2p_status(text)
    assert (found.all_ok, len(found.status), found.missing) == (all_ok, pairs, missing)


@pytest.mark.parametrize(
    ("there", "back", "said"),
    [("OK", "OK", "OK"), ("OK", "CNS", "CNS"), ("DR", "OK", "DR"), ("OK", "U", ""), ("U", "U", ""), ("OK", "?", "")],
)
def test_peer_access_of_a_pair(there: str, back: str, said: str) -> None:
    found = read_p2p_status(f"\tGPU0\tGPU1\nGPU0\tX\t{there}\nGPU1\t{back}\tX\n")
    assert (found.between(0, 1), found.between(1, 0)) == (said, said)


def test_two_lines_that_became_one() -> None:
    row = "GPU 0: NVIDIA A100 MIG 1g.10gb     Device  3: (UUID: MIG-36c795f2-5cf7-55d6-af30-e535e79b7bb6)\n"
    (gpu,) = read_gpu_list(row).gpus
    assert (gpu.name, gpu.uuid) == ("", "")
