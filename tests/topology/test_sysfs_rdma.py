"""/sys/class/infiniband: a copied tree, and small trees with what kernels refuse to tell."""

from __future__ import annotations

import errno
import io
import json
import os
from pathlib import Path
from typing import Any

import pytest

from autoddp.errors import NothingReadable
from autoddp.topology.rdma.ports import best_gid
from autoddp.topology.rdma.sysfs import read_sysfs_rdma

CAPTURE = Path(__file__).resolve().parents[1] / "data" / "rdma" / "sysfs_infiniband_h100_dgxlike"
LOCAL = "fe80:0000:0000:0000:0200:00ff:fe00:0001"
MAPPED = "0000:0000:0000:0000:0000:ffff:0a00:0001"


def test_a_real_tree() -> None:
    expected = json.loads(CAPTURE.with_suffix(".json").read_text(encoding="utf-8"))["expect"]
    found = read_sysfs_rdma(CAPTURE)
    plain = json.loads(json.dumps(found.plain()))
    assert plain["files"] == expected
    assert (found.missing, found.unread, found.fabric, found.rdma_usable) == ((), (), "InfiniBand", True)
    assert [(port.device, port.fabric, port.rate_gbps) for port in found.ports] == [
        *((f"mlx5_{i}", "InfiniBand", 400) for i in (0, 1, 4, 5, 6, 7, 8, 9)),
        ("mlx5_bond_0", "RoCE", 200),
    ]
    assert plain["devices"][0]["state"] == "ACTIVE"
    assert (found.ports[-1].firmware, found.ports[-1].ca_type) == ("32.38.3056", "MT41692")


class Tree:
    """A /sys below a temporary folder."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "sys/class/infiniband").mkdir(parents=True)

    def write(self, path: str, text: str) -> None:
        file = self.root / "sys/class/infiniband" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")

    def port(self, device: str, layer: str, state: str = "4: ACTIVE", rate: str = "100 Gb/sec (4X EDR)") -> None:
        for name, text in (("link_layer", layer), ("state", state), ("rate", rate)):
            self.write(f"{device}/ports/1/{name}", text)

    def gid(self, device: str, slot: int, address: str, kind: str = "", netdev: str = "") -> None:
        self.write(f"{device}/ports/1/gids/{slot}", address)
        if kind:
            self.write(f"{device}/ports/1/gid_attrs/types/{slot}", kind)
        if netdev:
            self.write(f"{device}/ports/1/gid_attrs/ndevs/{slot}", netdev)


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


@pytest.mark.parametrize(
    ("text", "expected"), [("3", 3), ("0", 0), ("-1", None), ("many", None), ("", None), (None, None)]
)
def test_how_often_a_link_was_lost(tree: Tree, text: str | None, expected: int | None) -> None:
    tree.port("mlx5_0", "InfiniBand")
    if text is not None:
        tree.write("mlx5_0/ports/1/counters/link_downed", text)
    found = read_sysfs_rdma(tree.root)
    assert [port.link_downed for port in found.ports] == [expected]
    assert ("link_downed" in found.ports[0].plain()) is (expected is not None)
    assert found.missing == ()


def test_addresses_and_their_interfaces(tree: Tree) -> None:
    tree.port("mlx5_0", "Ethernet")
    tree.gid("mlx5_0", 0, LOCAL, "IB/RoCE v1", "ens1f0")
    tree.gid("mlx5_0", 1, LOCAL, "RoCE v2", "ens1f0")
    tree.gid("mlx5_0", 2, MAPPED, "RoCE v2", "ens1f0.100")
    tree.gid("mlx5_0", 10, MAPPED, "RoCE v2", "ens1f0")
    tree.gid("mlx5_0", 11, "0000:" * 7 + "0000")
    tree.gid("mlx5_0", 12, "fe80:" + "0000:" * 6 + "0000")
    found = read_sysfs_rdma(tree.root)
    assert [(gid.index, gid.kind, gid.ipv4, gid.netdev) for gid in found.gids] == [
        (0, "v1", None, "ens1f0"),
        (1, "v2", None, "ens1f0"),
        (2, "v2", "10.0.0.1", "ens1f0.100"),
        (10, "v2", "10.0.0.1", "ens1f0"),
    ]
    assert best_gid(found.gids) == {"mlx5_0": 10}
    assert found.missing == ()


def test_an_infiniband_address_has_no_interface(tree: Tree) -> None:
    tree.port("mlx5_0", "InfiniBand", rate="2.5 Gb/sec (1X SDR)")
    tree.gid("mlx5_0", 0, LOCAL, "IB/RoCE v1")
    found = read_sysfs_rdma(tree.root)
    assert [(gid.kind, gid.netdev) for gid in found.gids] == [("IB", None)]
    assert (found.ports[0].rate_gbps, found.missing) == (2.5, ())


def test_where_it_stands(tree: Tree) -> None:
    tree.port("mlx5_0", "InfiniBand")
    tree.write("0000:0f:00.0/numa_node", "1")
    (tree.root / "sys/class/infiniband/mlx5_0/device").symlink_to("../0000:0f:00.0")
    port = next(port for port in read_sysfs_rdma(tree.root).ports)
    assert (port.numa, port.bus) == (1, "0000:0f:00.0")


@pytest.mark.parametrize(
    ("node_type", "transport", "fabric"),
    [("1: CA", "InfiniBand", "RoCE"), ("4: RNIC", "iWARP", None), ("7: unspecified", "unspecified", None)],
)
def test_only_infiniband_over_ethernet_is_roce(tree: Tree, node_type: str, transport: str, fabric: str | None) -> None:
    tree.port("siw0", "Ethernet")
    tree.write("siw0/node_type", node_type)
    (port,) = read_sysfs_rdma(tree.root).ports
    assert (port.transport, port.fabric, port.active) == (transport, fabric, True)


def test_what_the_kernel_refuses_is_noted(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    """No file of a test's own can be made to fail with EINVAL, and root may read everything."""
    tree.port("mlx5_0", "Ethernet")
    for slot in range(4):
        tree.gid("mlx5_0", slot, LOCAL, "RoCE v2", "ens1f0")
    tree.write("mlx5_0/fw_ver", "28.41.1000")
    refused = {"gids/1": errno.EINVAL, "gids/2": errno.EINVAL, "types/3": errno.EINVAL, "fw_ver": errno.EACCES}
    really_open = Path.open

    def refuse(path: Path, *words: Any, **named: Any) -> io.IOBase:
        for end, code in refused.items():
            if str(path).endswith(end):
                raise OSError(code, os.strerror(code))
        return really_open(path, *words, **named)  # type: ignore[no-any-return]

    monkeypatch.setattr(Path, "open", refuse)
    found = read_sysfs_rdma(tree.root)
    assert [(gid.index, gid.kind, gid.netdev) for gid in found.gids] == [(0, "v2", "ens1f0"), (3, None, "ens1f0")]
    assert found.ports[0].firmware is None
    assert found.missing == (
        "mlx5_0: fw_ver could not be read (EACCES)",
        "mlx5_0 port 1: GIDs that could not be read: 2 (EINVAL)",
        "mlx5_0 port 1: GIDs of unknown type: 1",
    )


def test_odd_trees(tree: Tree) -> None:
    tree.port("mlx5_0", "Unknown", state="9: ODD", rate="fast")
    tree.write("mlx5_0/ports/1/gids/0", "damaged")
    tree.write("mlx5_0/ports/999999999999999999999/state", "4: ACTIVE")
    (tree.root / "sys/class/infiniband/mlx5_1").symlink_to("../nowhere")
    os.mkfifo(tree.root / "sys/class/infiniband/mlx5_0/hca_type")
    found = read_sysfs_rdma(tree.root)
    assert [(port.port, port.state, port.rate_gbps, port.link_layer) for port in found.ports] == [(1, None, None, None)]
    assert (found.rdma_usable, found.fabric, found.unread) == (None, None, ("mlx5_1",))
    assert found.missing == (
        "mlx5_0 port 1: state '9: ODD' is not understood",
        "mlx5_0 port 1: rate 'fast' is not understood",
        "mlx5_0 port 1: link_layer 'Unknown' is not understood",
        "mlx5_0 port 1: GIDs that could not be read: 1 (no address)",
        "mlx5_1: no port could be read",
    )


def test_no_device_and_no_tree(tree: Tree, tmp_path: Path) -> None:
    assert read_sysfs_rdma(tree.root).rdma_usable is False
    (tmp_path / "sys/class/infiniband").rmdir()
    assert read_sysfs_rdma(tmp_path).ports == ()
    (tmp_path / "sys/class/infiniband").write_text("no folder")
    with pytest.raises(NothingReadable, match=r"expected .* a folder that can be listed"):
        read_sysfs_rdma(tmp_path)
    with pytest.raises(NothingReadable, match="expected a folder sys"):
        read_sysfs_rdma(tmp_path / "elsewhere")
