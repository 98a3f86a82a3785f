"""Runs several scripts one after another in one launch, each in a fork: `several.py a.py 'b.py --option x'`.

A test that launches twenty scripts pays for the launcher and for `import torch` once. Each script gets its own working
folder and its own OUT, named by `folder_of`. Rank 0 prints a line `heading(command)` before the script's own lines.
"""

import os
import runpy
import shlex
import socket
import sys
from pathlib import Path

SCRIPTS = Path(__file__).parent


def folder_of(command: str) -> str:
    """The name of a command's folder in the launch's OUT: `plain.py --steps 3` has plain-steps-3."""
    script, *arguments = shlex.split(command)
    return "-".join([Path(script).stem, *arguments]).replace("---", "-").replace("/", "_")


def heading(command: str) -> str:
    return f"several.py: {command}"


_kept: list[socket.socket] = []


def kept_port() -> int:
    """A free port that the kernel gives to nobody else until this process has ended, and at which a store may listen.

    Its socket is bound and does not listen. Were it closed, another test might be given the port before the store is.
    """
    _kept.append(socket.socket())
    _kept[-1].setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    _kept[-1].bind(("", 0))
    return int(_kept[-1].getsockname()[1])


def own_store(number: int) -> None:
    """Let rank 0 host a new store: in the launcher's, Gloo would find the addresses that the script before left."""
    from torch.distributed import TCPStore

    launchers = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    if os.environ["RANK"] == "0":
        launchers.set(f"several/{number}", str(kept_port()))
    os.environ["MASTER_PORT"] = launchers.get(f"several/{number}").decode()
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"


def run(number: int, command: str) -> None:
    script, *arguments = shlex.split(command)
    folder = Path(os.environ["OUT"], folder_of(command))
    folder.mkdir(exist_ok=True, parents=True)
    os.chdir(folder)
    os.environ["OUT"] = str(folder)
    own_store(number)
    sys.argv = [script, *arguments]
    sys.path[0] = str((SCRIPTS / script).parent)
    runpy.run_path(str(SCRIPTS / script), run_name="__main__")


def main() -> None:
    import torch._dynamo  # noqa: F401  (the first optimizer imports it: seconds that each fork would spend again)

    for number, command in enumerate(sys.argv[1:]):
        if os.environ["RANK"] == "0":
            print(heading(command), flush=True)
        child = os.fork()
        if child == 0:
            run(number, command)
            sys.stdout.flush()
            os._exit(0)  # the interpreter's own end takes longer than most of the scripts
        _, status = os.waitpid(child, 0)
        if status:
            sys.exit(f"{command} ended with {os.waitstatus_to_exitcode(status)}")


if __name__ == "__main__":
    main()
