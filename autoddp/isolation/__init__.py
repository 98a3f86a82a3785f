"""Floor 1. Keeps a tuning run from changing anything that the user owns.

    overlay   the attempt runs in a mount namespace of its own: reads are real, writes vanish with the namespace
    guard     where the host allows no namespace: Python's path operations follow an overlay kept in a scratch folder,
              and what that cannot cover ends tuning before it happens
    off       nothing is isolated, as under torchrun

`Level` names the three. `attempt_namespace` builds the first, `guard/` is the second, `elsewhere` ends tuning before a
client library changes anything on another machine, and `inside` starts what a process of the script needs of them.
"""

from autoddp.isolation.levels import Level

__all__ = ["Level"]
