"""Which interfaces of a host GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME name, by the rules of Gloo and of NCCL.

Gloo takes whole names and uses all of them. NCCL takes beginnings of names, whole names after `=`, and ports after the
names; `^` in front excludes. Both ignore a value of fewer than two characters.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

LOOPBACK = "lo"
"""The loopback interface of Linux."""
GLOO = "GLOO_SOCKET_IFNAME"
NCCL = "NCCL_SOCKET_IFNAME"


def absent(variable: str, value: str, here: Collection[str]) -> list[str]:
    """Devices that `value` asks for and that are not `here`. Also for NCCL_IB_HCA, which NCCL reads alike."""
    if value.startswith("^"):
        return []
    by_beginning = variable.startswith("NCCL_") and not value.startswith("=")
    return [word for word in _words(variable, value) if not any(_is(word, name, by_beginning) for name in here)]


def named(environment: Mapping[str, str], here: Iterable[str]) -> dict[str, list[str]]:
    """Variable that is set → the interfaces of `here` that it names, in the order of preference.

    >>> named({"NCCL_SOCKET_IFNAME": "^docker,lo"}, ["docker0", "eth0", "eth1", "lo"])
    {'NCCL_SOCKET_IFNAME': ['eth0', 'eth1']}
    """
    values = {variable: environment.get(variable, "") for variable in (GLOO, NCCL)}
    found = {}
    if len(values[GLOO]) > 1:
        order = _words(GLOO, values[GLOO])
        found[GLOO] = sorted(set(here) & set(order), key=order.index)
    if len(values[NCCL]) > 1:
        found[NCCL] = [name for name in here if _nccl_takes(values[NCCL], name)]
    return found


def preferred(variables: Mapping[str, list[str]]) -> list[str]:
    """The named interfaces, those of Gloo's variable first: it names TCP/IP networks, as the workers' store needs."""
    return list(dict.fromkeys(name for variable in (GLOO, NCCL) for name in variables.get(variable, ())))


def _nccl_takes(value: str, name: str) -> bool:
    excludes = value.startswith("^")
    by_beginning = not value.removeprefix("^").startswith("=")
    return any(_is(word, name, by_beginning) for word in _words(NCCL, value)) is not excludes


def _words(variable: str, value: str) -> list[str]:
    if variable.startswith("NCCL_"):
        value = value.removeprefix("^").removeprefix("=")
        return [word for part in value.split(",") if (word := part.partition(":")[0])]
    return value.split(",")


def _is(word: str, name: str, by_beginning: bool) -> bool:
    return name == word or (by_beginning and name.startswith(word))
