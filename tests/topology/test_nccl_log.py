"""NCCL's log: real ones exactly, damaged ones as far as they are certain."""

from __future__ import annotations

import json

import pytest
from nccl_captures import CAPTURES, IDS, TEXTS, plain, transports

from autoddp.errors import NothingReadable
from autoddp.topology.nccl_log import NcclLog, read_nccl_log, transport_kind

OF_THE_CAPTURE = {"id", "kind", "source", "machine", "format", "notes", "anonymised"}

A, B = "hostA:10:11 [0] NCCL INFO ", "hostB:20:21 [1] NCCL INFO "


def unread(log: NcclLog) -> tuple[str, ...]:
    """What is missing, besides what a short log just does not say."""
    return tuple(sentence for sentence in log.missing if not sentence.startswith("the log does not say"))


@pytest.mark.parametrize("name", IDS)
def test_real_logs(name: str) -> None:
    about = json.loads((CAPTURES / f"{name}.json").read_text(encoding="utf-8"))
    expected = {key: value for key, value in about.items() if key not in OF_THE_CAPTURE}
    found = plain(read_nccl_log(TEXTS[name]))
    assert {key: found[key] for key in expected} == expected
    assert found.keys() - expected.keys() == {"warnings", "missing"}
    not_said = {"version": found["nccl_version"], "network": found["network"]}
    assert [part for part, value in not_said.items() if value is None] == [
        part for part in not_said for sentence in found["missing"] if part in sentence
    ]
    assert all(sentence.startswith(("the log does not say", "the log names several")) for sentence in found["missing"])


def test_there_are_captures() -> None:
    assert len(IDS) == 22


@pytest.mark.parametrize("name", IDS)
def test_line_by_line_is_the_same(name: str) -> None:
    with (CAPTURES / f"{name}.log").open(encoding="utf-8", newline="") as file:
        assert read_nccl_log(file) == read_nccl_log(TEXTS[name])


def test_colours_prefixes_and_carriage_returns() -> None:
    log = read_nccl_log(
        f"\x1b[32m[default0]:{A}Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM/read\x1b[0m\r\n"
        f"\r 10%|██   | 1/10 {A}Channel 00/0 : 1[1] -> 0[0] via P2P/CUMEM\r\n"
        f"12: \x1b[1mNCCL version 2.27.7+cuda13.0\x1b[0m\r\n"
    )
    assert log.transports == {"0->1": ("P2P/CUMEM/read",), "1->0": ("P2P/CUMEM",)}
    assert (log.nccl_version, log.gdrdma, unread(log)) == ("2.27.7+cuda13.0", False, ())


@pytest.mark.parametrize(
    "end",
    [
        "0[0] -> 1[1] via P2P/CUMEM/re",
        "0[0] -> 1[1] via P2P/CUMEM/read now",
        "0[0] -> 1[1] via P2P/IPC/direct",
        "0[0] -> 1[1] via direct shared mem",
        "0[0] -> 1[1] via NET/IB/0",  # over the network without a direction
        "0[0] -> 1[1] [receive] via P2P/IPC",  # a direction without a network
        "0[0] -> 1[1] [send] via NET/IB",
        "0[0] -> 1[1] [send] via NET/IB/0/GDR",
        "0[0] -> 1[1] [send] via NET//0",
        "0[0] -> 0[0] via P2P/IPC",
        "0[0] -> 1[1 via P2P/IPC -> 2 via P2P/IPC",
        "-1[0] -> 1[1] via P2P/IPC",
    ],
)
def test_what_nccl_does_not_print_is_not_read(end: str) -> None:
    log = read_nccl_log(f"{A}Using network IB\n{A}Channel 00/0 : {end}\n")
    assert (log.transports, log.gdrdma) == ({}, None)
    assert unread(log) == ("line 2 could not be read",)


def test_the_last_line_without_its_end() -> None:
    whole = f"{A}Channel 00/0 : 1[1] -> 0[0] [receive] via NET/IB/1\n"
    log = read_nccl_log(whole + f"{A}Channel 01/0 : 0[0] -> 1[1] [send] via NET/IB/1")  # perhaps 10, perhaps /GDRDMA
    assert log.transports == {"1->0": ("NET/IB/1",)}
    assert unread(log) == ("line 2 could not be read",)
    rccl = read_nccl_log(f"{A}Channel 00/0 : 1[1] -> 0[0] [receive] via NET/IB/1 comm 0x9b")
    assert rccl.transports == {"1->0": ("NET/IB/1",)}  # the next word has begun


def test_messages_glued_by_a_lost_line_end() -> None:
    log = read_nccl_log(
        f"{A}Channel 00 : 0[0] -> 1[1] via SHM/direct/direct{B}Channel 00 : 1[1] -> 0[0] via SHM/direct/direct\n"
    )
    assert log.transports == {"1->0": ("SHM/direct/direct",)}
    assert unread(log) == ("line 1 could not be read",)


def test_a_message_interrupted_by_another_process() -> None:
    log = read_nccl_log(
        f"{A}comm 0x1 rank 0 nranks 1{B}Channel 00/0 : 2[2] -> 1[{A}Channel 00/0 : 0[0] -> 1[1] via P2P/IPC\n"
        f"6 cudaDev 0\n"
        f"1] via P2P/IPC/read\n"
        f" [0] NCCL INFO comm 0x1 rank 0 nranks 1 [0] NCCL INFO Connected all rings\n"
    )
    assert log.transports == {"0->1": ("P2P/IPC",)}
    assert log.nranks is None
    assert unread(log) == ("line 3 could not be read",)


def test_ranks_outside_every_communicator() -> None:
    log = read_nccl_log(
        f"{A}comm 0x1 rank 0 nranks 2 cudaDev 0 busId 1000 - Init COMPLETE\n"
        f"{A}Channel 00/0 : 0[0] -> 11[1] via P2P/IPC\n"
        f"{A}Channel 00/0 : 0[0] -> 1[1] via P2P/IPC\n"
    )
    assert (log.nranks, log.transports) == (2, {"0->1": ("P2P/IPC",)})
    assert unread(log) == ("no communicator in the log has the ranks of 0->11",)


def test_the_largest_communicator_counts() -> None:
    sizes = "".join(f"{A}ncclCommSplit comm 0x{n:x} rank 0 nranks {n} cudaDev 0 - Init COMPLETE\n" for n in (2, 8, 4))
    assert read_nccl_log(sizes).nranks == 8


def test_ring_lines_prove_the_ranks_only_together() -> None:
    assert read_nccl_log(f"{A}Channel 00/02 : 0 1 2 3\n").nranks is None
    assert read_nccl_log(f"{A}Channel 00/02 : 0 1 2 3\n{A}Channel 01/02 : 0 2 1 3\n").nranks == 4
    assert read_nccl_log(f"{A}Channel 00/02 : 0 1 2 3\n{A}Channel 01/02 : 0 2 1 5\n").nranks is None
    twenty = " ".join(map(str, range(20)))  # as NCCL cuts a longer ring
    assert read_nccl_log(f"{A}Channel 00/02 : {twenty}\n{A}Channel 01/02 : {twenty}\n").nranks is None


def test_several_networks_and_versions_are_none() -> None:
    log = read_nccl_log(
        f"{A}NCCL version 2.19.3+cuda12.3\n{A}Using network IB\n{A}Using network Socket\nNCCL version 2.21.5+cuda12.4\n"
    )
    assert (log.network, log.nccl_version) == (None, None)
    assert unread(log) == (
        "the log names several NCCL versions: 2.19.3+cuda12.3, 2.21.5+cuda12.4",
        "the log names several networks: IB, Socket",
    )


def test_old_logs_that_do_not_say_which_network_they_use() -> None:
    lines = f"{A}NET/Socket : Using [0]eth0:10.0.0.1<0>\n{A}NET/IB : Using [0]mlx5_0:1/IB ; OOB eth0:10.0.0.1<0>\n"
    assert read_nccl_log(lines + "NCCL version 2.4.7+cuda10.0\n").network == "IB"
    assert read_nccl_log(lines).network is None
    assert read_nccl_log(lines + "NCCL version 2.27.7+cuda13.0\n").network is None


def test_pytorch_s_mention_of_a_version_is_not_nccl_s() -> None:
    error = "RuntimeError: NCCL error in: ProcessGroupNCCL.cpp:825, unhandled system error, NCCL version 21.0.3\n"
    assert read_nccl_log(error + "NCCL version 2.10.3+cuda11.3\n").nccl_version == "2.10.3+cuda11.3"
    with pytest.raises(NothingReadable):
        read_nccl_log(error)


def test_rccl() -> None:
    assert read_nccl_log("RCCL version 2.18.3+hip6.0 HEAD:2f6d59e+\n").nccl_version == "2.18.3+hip6.0"
    for begins in ("", A):  # since 2.21; of the process's own lines since 2.26
        log = read_nccl_log(f"{begins}RCCL version : 2.26.6-HEAD:f224e2c\nHIP version  : 7.0.51831-a3e329ad8\n")
        assert log.nccl_version == "2.26.6"
        assert not any("version" in sentence for sentence in log.missing)


def test_warnings_are_counted_and_kept_once() -> None:
    warning = "hostA:1:2 [0] misc/ibvwrap.cc:63 NCCL WARN Failed to open libibverbs.so[.1]"
    log = read_nccl_log(f"{warning}\n\n{warning}\n{warning}{A}Using network IB\n{warning[:-3]}")
    assert (log.warn_lines, log.network) == (4, "IB")
    assert log.warnings == ("Failed to open libibverbs.so[.1]", "Failed to open…", "Failed to open libibverbs.so[…")


def test_several_transports_of_a_pair() -> None:
    log = read_nccl_log(
        "".join(
            f"{A}Channel 0{i}/0 : 1[1] -> 0[0] {via}\n"
            for i, via in enumerate(["[receive] via NET/IB/3/GDRDMA(PCI)/Shared", "via P2P/MNNVL", "via P2P/MNNVL"])
        )
    )
    assert log.transports == {"1->0": ("NET/IB/3/GDRDMA(PCI)/Shared", "P2P/MNNVL")}
    assert log.transport_class_by_pair == {"1->0": ("NET", "P2P")}
    assert (log.transport_classes, log.gdrdma) == (("NET", "P2P"), True)


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("P2P/direct pointer/read", "P2P"),
        ("P2P/CUMEM/CE", "P2P"),
        ("P2P/indirect/3[3]", "P2P"),
        ("SHM/direct/CE", "SHM"),
        ("direct shared memory", "SHM"),
        ("NET/IB/0", "NET/IB"),
        ("NET/IB/1(2)/GDRDMA/Shared", "NET/IB/GDRDMA"),
        ("NET/IB/1/GDRDMA(PCI)", "NET/IB/GDRDMA"),
        ("NET/Socket/0", "NET/Socket"),
        ("NET/AWS Libfabric/2/GDRDMA", "NET/AWS Libfabric"),
    ],
)
def test_kinds(text: str, kind: str) -> None:
    assert transport_kind(text) == kind


@pytest.mark.parametrize("text", ["", "P2P", "NET/IB", "SHM", "NVLink", "NET/IB/0 "])
def test_no_kind(text: str) -> None:
    with pytest.raises(ValueError, match="is not a transport that NCCL prints"):
        transport_kind(text)


@pytest.mark.parametrize("text", ["", "\n", "loss 3.2\n", "NCCL\n", "NCCL INFO", "Using network IB\n", "\x00" * 100])
def test_nothing_readable(text: str) -> None:
    assert transports(text) == {}
    with pytest.raises(NothingReadable):
        read_nccl_log(text)


def test_nvlink_between_trays_joins_no_two_gpus_of_one_node() -> None:
    """NCCL names GPUs by their number on their own host: GPU 3 of one tray and GPU 0 of the next."""
    log = read_nccl_log(f"{A}Channel 00/0 : 3[3] -> 4[0] via P2P/MNNVL\n{A}Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM\n")
    assert log.transports == {"3->4": ("P2P/MNNVL",), "0->1": ("P2P/CUMEM",)}
    assert log.within_node == {("0", "1"): ("P2P/CUMEM",)}


def test_a_shared_memory_connection_of_nccl_2_30() -> None:
    assert read_nccl_log(f"{A}Channel 00/0 : 0[0] -> 1[1] via SHM/direct\n").transports == {"0->1": ("SHM/direct",)}
