"""The RDMA settings that NCCL must be told, from real tables of addresses."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from autoddp.network import interface_selection
from autoddp.network.own_network import Network
from autoddp.topology.rdma.ports import Gid, RdmaPort, rdma_settings
from autoddp.topology.rdma.sysfs import SysfsRdma
from autoddp.topology.rdma.texts import read_show_gids

DATA = Path(__file__).resolve().parents[1] / "data" / "rdma"
ROCE = RdmaPort("mlx5_0", 1, "ACTIVE", link_layer="Ethernet", rate_gbps=100.0)
INFINIBAND = replace(ROCE, link_layer="InfiniBand")


def gids_of(name: str) -> tuple[Gid, ...]:
    return read_show_gids((DATA / f"{name}.txt").read_text()).gids


def test_the_usual_index_three_is_not_taken_for_granted() -> None:
    value, why = rdma_settings((ROCE,), gids_of("show_gids_6_two_link_locals"))["NCCL_IB_GID_INDEX"]
    assert value == "5"
    assert "RoCE v2" in why


def test_the_bond_itself_goes_before_what_stands_on_it() -> None:
    port = replace(ROCE, device="mlx5_bond_0")
    assert rdma_settings((port,), gids_of("show_gids_bond_vxlan"))["NCCL_IB_GID_INDEX"][0] == "5"


@pytest.mark.parametrize("ports", [(), (INFINIBAND,), (replace(ROCE, device="mlx5_7"),), (replace(ROCE, state=None),)])
def test_nothing_is_said_where_nothing_is_certain(ports: tuple[RdmaPort, ...]) -> None:
    assert rdma_settings(ports, gids_of("show_gids_6_two_link_locals")) == {}


@pytest.mark.parametrize("variable", ["NCCL_IB_ADDR_FAMILY", "NCCL_IB_ADDR_RANGE", "NCCL_IB_ROCE_VERSION_NUM"])
def test_addresses_from_which_the_user_lets_nccl_choose_are_not_overruled(
    variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With an index NCCL would not look at them: a job of IPv6 alone, say, would reach no other host."""
    here = SysfsRdma((ROCE,), gids=gids_of("show_gids_6_two_link_locals"))
    monkeypatch.setattr(interface_selection, "sysfs_rdma", lambda: here)
    found: dict[str, str] = {}
    monkeypatch.setattr(interface_selection, "nccl_conf", lambda _environment: found)
    assert interface_selection.with_rdma(Network(), ()).rdma == {"NCCL_IB_GID_INDEX": "5"}
    assert interface_selection.with_rdma(Network(), {variable}).rdma == {}
    found[variable] = "as in /etc/nccl.conf"
    assert interface_selection.with_rdma(Network(), ()).rdma == {}


def test_devices_that_differ_are_left_to_nccl() -> None:
    gids = gids_of("show_gids_6_two_link_locals")
    other = tuple(replace(gid, device="mlx5_1", index=gid.index + 1) for gid in gids)
    assert rdma_settings((ROCE, replace(ROCE, device="mlx5_1")), gids + other) == {}


def test_devices_none_of_which_is_active() -> None:
    down = replace(ROCE, state="DOWN")
    assert rdma_settings((down, replace(down, device="mlx5_1")), ()) == {
        "NCCL_IB_DISABLE": ("1", "no port of mlx5_0, mlx5_1 is active")
    }
    assert rdma_settings((down, ROCE), ()) == {}
