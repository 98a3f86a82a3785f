"""A real Slurm cluster on the hosts of a lab: Debian's slurm-wlm, one slurmd per host, nothing of it left afterwards.

    with Lab(hosts=2) as hosts, Slurm(hosts, folder) as cluster:
        job = cluster.popen(["srun", "-N", "2", *AUTODDP, "train.py"])

The controller and all commands run on host 0. Munge, which signs what they send each other, has a socket of its own,
which the network namespaces share. Tasks run as root, without cgroups.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lab import Lab
from lab import unavailable as no_lab

PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "scancel", "squeue", "scontrol")
_PATIENCE = 60  # seconds, for a cluster that is up in one or two
_CONFIGURATION = """\
ClusterName=lab
SlurmctldHost=host0({address})
SlurmctldPort=6817
SlurmdPort=6818
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket{more_of_munge}
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
ReturnToService=2
SchedulerParameters=sched_min_interval=1,batch_sched_delay=0
KillWait=10
"""


@functools.cache
def unavailable() -> str:
    """Why there can be no cluster on this machine, or "" if there can."""
    missing = [program for program in PROGRAMS if not shutil.which(program)]
    return no_lab() or (f"needs {', '.join(missing)} (slurm-wlm, munge)" if missing else "")


class Slurm:
    """A cluster of all hosts of a lab, up once this has returned; `folder` has its files and its logs.

    With `requeues` a job that is put back into the queue starts again after ten seconds, not after two minutes: when
    what Slurm has signed for its first start has expired. On a busy machine that may be too soon for a start.
    """

    def __init__(self, hosts: Lab, folder: Path, cpus: int = 4, requeues: bool = False) -> None:
        self._hosts, self._folder = hosts, folder
        self._daemons: list[subprocess.Popen[Any]] = []
        (folder / "munge").mkdir(parents=True)
        (folder / "state").mkdir()
        more = ",cred_expire=10" if requeues else ""
        text = _CONFIGURATION.format(folder=folder, address=hosts.address(0), more_of_munge=more)
        for host in range(len(hosts)):
            text += f"NodeName=host{host} NodeAddr={hosts.address(host)} CPUs={cpus} RealMemory=1000 State=UNKNOWN\n"
        text += f"PartitionName=all Nodes=host[0-{len(hosts) - 1}] Default=YES MaxTime=INFINITE State=UP\n"
        (folder / "slurm.conf").write_text(text)
        (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        self.environment = {"SLURM_CONF": str(folder / "slurm.conf")}
        with self._cleaned_up():
            self._start_all(len(hosts))

    def __enter__(self) -> Slurm:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def popen(
        self, argv: Sequence[str], *, env: Mapping[str, str] | None = None, **options: Any
    ) -> subprocess.Popen[Any]:
        """Start a command on host 0, where srun, sbatch and scancel know the cluster."""
        full = {**(os.environ if env is None else env), **self.environment}
        return self._hosts.popen(0, argv, env=full, **options)

    def run(self, *argv: str) -> str:
        """Run a command on host 0 to its end; what it prints."""
        done = self.popen(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        printed, _ = done.communicate(timeout=_PATIENCE)
        assert done.returncode == 0, f"{' '.join(argv)}: {printed}{self.logs()}"
        return str(printed)

    def logs(self) -> str:
        """The ends of the daemons' logs."""
        return "".join(f"\n--- {path.name}\n{path.read_text()[-2000:]}" for path in sorted(self._folder.glob("*.log")))

    def close(self) -> None:
        """End the daemons; what a job has left on a host ends with its lab."""
        for daemon in reversed(self._daemons):
            with contextlib.suppress(ProcessLookupError):
                os.kill(daemon.pid, signal.SIGKILL)
            daemon.wait()
        self._daemons.clear()

    def _start_all(self, hosts: int) -> None:
        munge = self._folder / "munge"
        (munge / "key").write_bytes(os.urandom(128))
        (munge / "key").chmod(0o600)
        places = {name: munge / name for name in ("socket", "pid-file", "log-file", "seed-file")}
        told = [f"--{name}={path}" for name, path in places.items()]
        # --force: the folders above belong to pytest, and munged would want them closed to others.
        self._daemon(0, ["munged", "--foreground", "--force", f"--key-file={munge / 'key'}", *told], "munged")
        self._wait(lambda: places["socket"].exists(), "munged")
        self._daemon(0, ["slurmctld", "-D"], "slurmctld.out")
        for host in range(hosts):
            (self._folder / f"spool.host{host}").mkdir()
            self._daemon(host, ["slurmd", "-D", "-N", f"host{host}"], f"slurmd{host}.out")
        self._wait(lambda: self._idle() == hosts, "slurmd on all hosts")

    def _idle(self) -> int:
        asked = self.popen(
            ["sinfo", "-h", "-N", "-t", "idle", "-o", "%N"],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        return len(asked.communicate()[0].split())

    def _daemon(self, host: int, argv: Sequence[str], name: str) -> None:
        with open(self._folder / f"{name}.log", "a") as log:
            full = {**os.environ, **self.environment}
            daemon = self._hosts.popen(host, argv, env=full, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        self._daemons.append(daemon)

    def _wait(self, condition: Any, what: str) -> None:
        deadline = time.monotonic() + _PATIENCE
        while not condition():
            ended = [daemon for daemon in self._daemons if daemon.poll() is not None]
            assert not ended, f"a daemon ended: {ended[0].args}{self.logs()}"
            assert time.monotonic() < deadline, f"waited {_PATIENCE} s for {what}{self.logs()}"
            time.sleep(0.05)

    @contextlib.contextmanager
    def _cleaned_up(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.close()
            raise
