"""Variables that NCCL reads from files: it takes them for its environment, unless the environment has them already."""

from __future__ import annotations

import contextlib
import os
import pwd
from collections.abc import Mapping
from pathlib import Path

_OF_THE_HOST = Path("/etc/nccl.conf")


def as_nccl_sees(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment with what NCCL's files set beside it."""
    return {**nccl_conf(environment), **environment}


def nccl_conf(environment: Mapping[str, str], of_the_host: Path = _OF_THE_HOST) -> dict[str, str]:
    """What the user's file and the host's set, by NCCL's rules: of two values of a variable the first counts."""
    found: dict[str, str] = {}
    own = environment.get("NCCL_CONF_FILE", "")
    with contextlib.suppress(KeyError):  # a user who is in no list, as in many containers
        own = own or os.path.join(pwd.getpwuid(os.getuid()).pw_dir, ".nccl.conf")
    for path in (own, of_the_host):
        try:
            text = Path(path).read_text(encoding="utf-8", errors="replace") if os.path.isfile(path) else ""
        except OSError:  # NCCL cannot read it either
            continue
        for line in text.splitlines():
            name, equals, value = line.partition("=")
            if equals and not name.startswith("#"):
                found.setdefault(name, value)
    return found
