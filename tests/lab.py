"""Several hosts on one machine: namespaces joined by a bridge, each with its own NIC, name and rate.

    with Lab(hosts=2, rate="200mbit") as lab:
        agents = [lab.popen(i, [*torchrun, "--rdzv-endpoint", f"{lab.address(0)}:29400", ...]) for i in range(2)]

A host is a process that sleeps in a network, host-name and mount namespace of its own. Nothing has a name outside of
those, so labs of parallel test workers cannot collide, and nothing is left to remove once the processes are dead.
Inside a host the NIC is eth0, `hostname` is host0, host1, ... and every host's name resolves (a torchrun agent gives
its own name to the others as MASTER_ADDR). Files are shared, processes see each other, the outside network is absent.

Not promised: latency (the kernels this runs on lack netem) or a limit on what a host receives (only eth0's egress is
shaped). Imports no pytest: the benchmarks use it too.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import forks

NAMESPACES = ("--net", "--uts", "--mount")
SHAPE = ("burst", "256kb", "latency", "100ms")  # 256 kB: a whole offloaded packet (64 kB) must fit several times


@functools.cache
def unavailable() -> str:
    """Why there can be no lab on this machine, or "" if there can."""
    if os.name != "posix" or os.geteuid() != 0:
        return "needs root"
    missing = [tool for tool in ("ip", "tc", "unshare", "nsenter", "mount", "hostname") if not shutil.which(tool)]
    if missing:
        return f"needs {', '.join(missing)} (iproute2, util-linux)"
    # Root in a container may still lack the rights, and a kernel may lack a driver: only trying tells.
    attempt = (
        "ip link add port0 type veth peer name eth0 && ip link add bridge0 type bridge"
        " && tc qdisc add dev eth0 root tbf rate 100mbit " + " ".join(SHAPE) + " && mount -t sysfs sysfs /sys"
    )
    tried = subprocess.run(["unshare", *NAMESPACES, "sh", "-c", attempt], capture_output=True, text=True)
    return "" if tried.returncode == 0 else f"cannot make namespaces: {tried.stderr.strip()}"


class Lab:
    """`hosts` hosts on one bridge; `rate` as tc writes it ("200mbit", "1gbit"), None for as fast as memory copies.

    `more` are further networks, interface → rate: host 1's address on the first of them is 10.78.0.2. With `trap` every
    host has a docker-like bridge with the same private address, and its own name stands for 127.0.1.1, as Debian has
    it, while nobody knows the others' names: a host as many are found. `names` has each host's own /etc/hosts instead.
    With `ipv6` there are no IPv4 addresses but the loopback's, and host 1's address is fd77::2.
    """

    def __init__(
        self,
        hosts: int = 2,
        rate: str | None = None,
        more: Mapping[str, str] | None = None,
        trap: bool = False,
        names: Sequence[str] | None = None,
        ipv6: bool = False,
    ) -> None:
        reason = unavailable()
        if reason:
            raise RuntimeError(f"no lab on this machine: {reason}")
        self._holders: list[subprocess.Popen[str]] = []
        self._folder = tempfile.TemporaryDirectory(prefix="lab-")
        self._rate: str | None = None
        try:
            self._trap = trap
            self._names = names
            self._ipv6 = ipv6
            self._build(hosts)
            self.shape(rate)
            for number, (name, speed) in enumerate((more or {}).items(), start=1):
                self._add_network(name, speed, number)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Lab:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __len__(self) -> int:
        return len(self._holders) - 1

    def address(self, host: int, network: int = 0) -> str:
        """The address of a host, for --rdzv-endpoint and --master-addr; `network` counts `more` from 1."""
        if self._ipv6:
            return f"fd{77 + network}::{host + 1:x}"
        return f"10.{77 + network}.{host // 250}.{host % 250 + 1}"

    def popen(
        self,
        host: int,
        argv: Sequence[str | os.PathLike[str]],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | os.PathLike[str] | None = None,
        **options: Any,
    ) -> subprocess.Popen[Any]:
        """Start a program on a host; the rest is as in subprocess.Popen.

        The process returned is the program itself (nsenter and the shell replace themselves by it), so signals reach
        it and its exit code is its own. GLOO_SOCKET_IFNAME is set, or Gloo would look for the outside network; not in a
        trap, nor where a host has names of its own.
        """
        env = self._environment(os.environ if env is None else env)
        # Entering the mount namespace moves a process to its root folder: the shell goes back.
        go = ["sh", "-c", 'cd "$0" && exec "$@"', os.fspath(cwd or os.getcwd())]
        return subprocess.Popen([*self._enter(host), *go, *map(os.fspath, argv)], env=env, **options)

    def fork(self, host: int, argv: Sequence[str], *, env: Mapping[str, str], **options: Any) -> forks.Fork:
        """Start a Python program on a host, as a fork of a process that has imported torch; see forks.py."""
        assert argv[0] == sys.executable
        return forks.popen(argv[1:], env=self._environment(env), host=self.holder(host), **options)

    def _environment(self, env: Mapping[str, str]) -> dict[str, str]:
        bare = self._trap or self._names is not None
        return {**({} if bare else {"GLOO_SOCKET_IFNAME": "eth0"}), **env}

    def holder(self, host: int) -> int:
        """The process whose namespaces are the host's."""
        return self._holders[host].pid

    def run(self, host: int, *command: str) -> str:
        """Run a command on a host, to its end; what it printed. RuntimeError if it fails."""
        done = subprocess.run([*self._enter(host), *command], capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
        return done.stdout

    def shape(self, rate: str | None) -> None:
        """Give every host's link this rate (None: unlimited), also while programs run."""
        for host in range(len(self)):
            if rate is not None:
                self.run(host, "tc", "qdisc", "replace", "dev", "eth0", "root", "tbf", "rate", rate, *SHAPE)
            elif self._rate is not None:
                self.run(host, "tc", "qdisc", "del", "dev", "eth0", "root")
        self._rate = rate

    def names(self, host: int, text: str) -> None:
        """Replace a host's own /etc/hosts, also while programs run there; the lab was given `names`."""
        assert self._names is not None
        Path(self._folder.name, f"hosts{host}").write_text(text)  # in place: the file is mounted

    def link(self, host: int, state: str) -> None:
        """Take a host's link "down", or "up" again."""
        self.run(host, "ip", "link", "set", "eth0", state)

    def carry(self, size: int) -> None:
        """From now on the bridge drops packets of more than `size` bytes, and tells no host."""
        for host in range(len(self)):
            # The hosts cut messages into packets themselves: the bridge would forward one that its NIC has yet to cut.
            self.run(host, "ip", "link", "set", "eth0", "gso_max_size", "1500", "gso_max_segs", "1")
            self.run(len(self), "ip", "link", "set", f"port{host}", "mtu", str(size))

    def processes(self, host: int) -> list[int]:
        """The ids of all processes on a host, however they were started, without the one that holds it open."""
        holder = self._holders[host].pid
        here = os.stat(f"/proc/{holder}/ns/net").st_ino
        found = []
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit() or int(entry.name) == holder:
                continue
            with contextlib.suppress(OSError):  # it ended while we looked; a zombie has no namespaces any more
                if os.stat(entry / "ns/net").st_ino == here:
                    found.append(int(entry.name))
        return found

    def close(self) -> None:
        """Kill everything on every host; the links and the bridge go with the last process."""
        for host, holder in enumerate(self._holders):
            # Again and again: a process may fork while its parent is being killed.
            while holder.poll() is None and (left := self.processes(host)):
                for pid in left:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                time.sleep(0.01)
            holder.kill()
            holder.communicate()
        self._holders.clear()
        self._folder.cleanup()

    def _build(self, hosts: int) -> None:
        names = Path(self._folder.name, "hosts")
        known = "".join(f"{self.address(host)} host{host}\n" for host in range(hosts))
        names.write_text("127.0.0.1 localhost\n::1 localhost\n" + known)
        # A fresh /sys shows the host's own NICs; its own hosts file lets every host's name resolve.
        for host in range(hosts):
            if self._names is not None:
                names = Path(self._folder.name, f"hosts{host}")
                names.write_text(self._names[host])
            room = f"mount -t sysfs sysfs /sys && mount --bind {names} /etc/hosts && ip link set lo up"
            self._hold(f"{room} && hostname host{host}{self._trapped(host) if self._trap else ''}")
        # The bridge comes last, so that the index of a host is that of its holder.
        self._hold("ip link add bridge0 type bridge && ip link set bridge0 up")
        for host in range(hosts):
            self._join(host)

    def _trapped(self, host: int) -> str:
        names = Path(self._folder.name, f"hosts{host}")
        names.write_text(f"127.0.0.1 localhost\n127.0.1.1 host{host}\n")
        docker = "ip link add docker0 type bridge && ip link add busy type veth peer name inside"
        up = "ip link set busy master docker0 up && ip link set inside up && ip link set docker0 up"
        docker += " && ip address add 172.17.0.1/16 dev docker0"
        return f" && mount --bind {names} /etc/hosts && {docker} && {up}"

    def _add_network(self, name: str, rate: str, number: int) -> None:
        """One more bridge, and a NIC of this name on every host."""
        bridge = len(self._holders) - 1
        self.run(bridge, "ip", "link", "add", f"bridge{number}", "type", "bridge")
        self.run(bridge, "ip", "link", "set", f"bridge{number}", "up")
        for host in range(len(self)):
            port = f"port{number}-{host}"
            peer = ("peer", "name", name, "netns", str(self._holders[host].pid))
            self.run(bridge, "ip", "link", "add", port, "type", "veth", *peer)
            self.run(bridge, "ip", "link", "set", port, "master", f"bridge{number}", "up")
            self._bring_up(host, name, number)
            self.run(host, "tc", "qdisc", "add", "dev", name, "root", "tbf", "rate", rate, *SHAPE)

    def _hold(self, setup: str) -> None:
        """Open namespaces by a process that reads its stdin: it ends by itself when this process dies."""
        command = ["unshare", *NAMESPACES, "sh", "-c", f"{setup} && echo up && exec cat"]
        holder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._holders.append(holder)
        assert holder.stdout is not None
        if holder.stdout.readline() != "up\n":
            raise RuntimeError(f"the lab could not set up a host: {setup}")

    def _join(self, host: int) -> None:
        bridge, port = len(self._holders) - 1, f"port{host}"
        peer = ("peer", "name", "eth0", "netns", str(self._holders[host].pid))
        self.run(bridge, "ip", "link", "add", port, "type", "veth", *peer)
        self.run(bridge, "ip", "link", "set", port, "master", "bridge0", "up")
        self._bring_up(host, "eth0")

    def _bring_up(self, host: int, name: str, network: int = 0) -> None:
        # Without nodad the kernel asks for seconds whether anybody else has an IPv6 address.
        size = ("/64", "nodad") if self._ipv6 else ("/16",)
        self.run(host, "ip", "address", "add", self.address(host, network) + size[0], "dev", name, *size[1:])
        self.run(host, "ip", "link", "set", name, "up")

    def _enter(self, host: int) -> list[str]:
        return ["nsenter", "--target", str(self._holders[host].pid), *NAMESPACES, "--"]
