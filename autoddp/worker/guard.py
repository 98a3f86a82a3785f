"""While tuning, what the script saves goes to the run's scratch folder: a trial leaves no trace.

Diverted: `torch.save`, writers of `torch.distributed.checkpoint`, `safetensors.torch.save_file`, and renames of such
files (many scripts save beside the checkpoint and then replace it). A file that was diverted is also read from there.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from types import ModuleType
from typing import Any

import wrapt


def divert_writes(scratch: str) -> None:
    """Arm the diversion; each library is patched when the script imports it."""
    # A folder for each start of the script: it must not find what an earlier start has saved.
    diversion = Diversion(os.path.join(scratch, "written", os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")))
    wrapt.register_post_import_hook(diversion.patch_torch, "torch")
    wrapt.register_post_import_hook(diversion.patch_checkpoint, "torch.distributed.checkpoint.filesystem")
    wrapt.register_post_import_hook(diversion.patch_safetensors, "safetensors.torch")
    os.replace = diversion.renaming(os.replace)
    os.rename = diversion.renaming(os.rename)


class Diversion:
    """Maps the paths that the script writes to paths below `folder`."""

    def __init__(self, folder: str) -> None:
        self._folder = folder

    def write(self, path: Any) -> Any:
        """Where to write instead; open files and buffers stay as they are."""
        if not isinstance(path, (str, os.PathLike)):
            return path
        diverted = self._diverted(path)
        os.makedirs(os.path.dirname(diverted), exist_ok=True)
        return diverted

    def read(self, path: Any) -> Any:
        """Where to read: the diverted file if a rank of this node wrote one, else the real one."""
        if not isinstance(path, (str, os.PathLike)):
            return path
        diverted = self._diverted(path)
        return diverted if os.path.exists(diverted) else path

    def _diverted(self, path: Any) -> str:
        return os.path.join(self._folder, os.path.abspath(os.fsdecode(path)).lstrip(os.sep))

    def renaming(self, rename: Callable[..., None]) -> Callable[..., None]:
        """A rename that follows diverted files; all others are none of our business."""

        @functools.wraps(rename)
        def renamed(src: Any, dst: Any, **kwargs: Any) -> None:
            source = self.read(src)
            if source is src:
                return rename(src, dst, **kwargs)
            return rename(source, self.write(dst))

        return renamed

    def patch_torch(self, torch: ModuleType) -> None:
        """`torch.save` and `torch.load`."""
        self._path_argument(torch, "load", "f", 0, self.read)
        self._path_argument(torch, "save", "f", 1, self.write)
        torch.serialization.save, torch.serialization.load = torch.save, torch.load

    def patch_checkpoint(self, filesystem: ModuleType) -> None:
        """Writers and readers of `torch.distributed.checkpoint`, and whatever is built on them."""
        for owner, change in ((filesystem.FileSystemWriter, self.write), (filesystem.FileSystemReader, self.read)):
            self._path_argument(owner, "__init__", "path", 1, change)
            # save(checkpoint_id=…) and load(checkpoint_id=…) name the path a second time.
            self._path_argument(owner, "reset", "checkpoint_id", 1, change)

    def patch_safetensors(self, safetensors: ModuleType) -> None:
        """`safetensors.torch.save_file` and `load_file`."""
        self._path_argument(safetensors, "save_file", "filename", 1, self.write)
        self._path_argument(safetensors, "load_file", "filename", 0, self.read)

    @staticmethod
    def _path_argument(owner: Any, name: str, keyword: str, position: int, change: Callable[[Any], Any]) -> None:
        original = getattr(owner, name)

        @functools.wraps(original)
        def changed(*args: Any, **kwargs: Any) -> Any:
            if keyword in kwargs:
                kwargs[keyword] = change(kwargs[keyword])
            elif len(args) > position:
                args = (*args[:position], change(args[position]), *args[position + 1 :])
            return original(*args, **kwargs)

        setattr(owner, name, changed)
