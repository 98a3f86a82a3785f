"""NVIDIA's daemon that lets several processes share a GPU (MPS).

It and CUDA's programs exchange data by files in /dev/shm, and by a socket and a named pipe in a folder of the daemon's.
Under an overlay, what a program of the attempt makes there would not reach the daemon.
"""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Mapping

_VARIABLE, _USUAL = "CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps"
_ANSWERS = 1.0  # seconds


def mps_folder(environment: Mapping[str, str]) -> str:
    """The folder of the daemon that CUDA's programs of this environment use; "" if none listens there."""
    folder = environment.get(_VARIABLE) or _USUAL
    with socket.socket(getattr(socket, "AF_UNIX", -1), socket.SOCK_STREAM) as client:
        client.settimeout(_ANSWERS)
        try:
            client.connect(os.path.join(folder, "control"))
        except TimeoutError:
            pass  # it is busy
        except OSError as why:
            if why.errno not in (errno.EAGAIN, errno.EPROTOTYPE):  # busy too, or it listens for packets
                return ""
    return folder
