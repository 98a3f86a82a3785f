"""What the launcher tells a worker process, in one environment variable that the process removes at once."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

VARIABLE = "AUTODDP_WORKER"
INJECT = Path(__file__).parent / "inject"


@dataclass(frozen=True)
class Order:
    """Either `tune` (socket and scratch are given) or apply `configuration` (they are not).

    environment = {**os.environ, **Order(...).environment(os.environ)}
    """

    socket: str = ""
    """Path of the launcher's Unix socket."""
    scratch: str = ""
    """Folder for whatever the script writes while tuning."""
    configuration: dict[str, Any] = field(default_factory=dict)
    parameters_digest: str = ""
    """Of the models the configuration was measured on; another model runs as written."""
    pythonpath: str | None = None
    """PYTHONPATH as the user had it, to be put back; filled in by `environment`."""

    def environment(self, present: Mapping[str, str]) -> dict[str, str]:
        """The variables that bring this order into every Python process started with them."""
        theirs = present.get("PYTHONPATH")
        order = asdict(self) | {"pythonpath": theirs}
        path = os.pathsep.join([str(INJECT), *([theirs] if theirs else [])])
        return {VARIABLE: json.dumps(order), "PYTHONPATH": path}

    @classmethod
    def parse(cls, text: str) -> Order:
        """The order back from its variable."""
        return cls(**json.loads(text))
