"""What NCCL must be told about this node's RDMA ports to work at all, as variables, and why."""

from __future__ import annotations

from autoddp.topology.rdma import Gid, RdmaPort, best_gid


def rdma_settings(ports: tuple[RdmaPort, ...], gids: tuple[Gid, ...]) -> dict[str, tuple[str, str]]:
    """Variable → (value, reason). Nothing where NCCL's own choice is as good, or the node has no RDMA device.

    RoCE needs an address that other networks can answer to: the first RoCE v2 one with a global IPv4. One variable
    serves all devices of a node, so nothing is said where they differ. InfiniBand needs none.
    """
    if not ports:
        return {}
    if all(port.active is False for port in ports):
        names = ", ".join(dict.fromkeys(port.device for port in ports))
        return {"NCCL_IB_DISABLE": ("1", f"no port of {names} is active")}
    roce = {port.device for port in ports if port.active and port.fabric == "RoCE"}
    best = best_gid(gid for gid in gids if gid.device in roce)
    indices = set(best.values())
    if not roce or set(best) != roce or len(indices) != 1:
        return {}
    index = indices.pop()
    addresses = sorted({gid.ipv4 or "" for gid in gids if gid.device in roce and gid.index == index})
    reason = f"the first RoCE v2 address with a global IPv4 on {', '.join(sorted(roce))}: {', '.join(addresses)}"
    return {"NCCL_IB_GID_INDEX": (str(index), reason)}
