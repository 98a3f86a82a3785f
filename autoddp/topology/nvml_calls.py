"""NVML's functions by name, and every way in which one does not answer as one exception with words."""

from __future__ import annotations

from typing import Any

# Of nvmlReturn_t; the numbers of nvml.h do not change.
INVALID_ARGUMENT = 2
NOT_SUPPORTED = 3
DRIVER_NOT_LOADED = 9
LIBRARY_NOT_FOUND = 12


class Refusal(Exception):
    """NVML will not tell. The text says which function and why; `code` is its nvmlReturn_t, None if never asked."""

    def __init__(self, text: str, code: int | None = None) -> None:
        super().__init__(text)
        self.code = code


class Library:
    """NVML behind the module `pynvml`, which the caller imports.

        library = Library(pynvml)
        library.ask("nvmlDeviceGetCount")

    By name, because the module may be another than ours: the abandoned PyPI package `pynvml` provides one too, which
    hides that of nvidia-ml-py and lacks what came later.
    """

    def __init__(self, module: Any) -> None:
        self._module = module

    def ask(self, function: str, *arguments: Any) -> Any:
        """What the function returns; Refusal if the driver, its library or the module will not."""
        found = getattr(self._module, function, None)
        if found is None:
            raise Refusal(f"{function}: the installed pynvml does not have it")
        try:
            return found(*arguments)
        except self._module.NVMLError as problem:
            raise Refusal(f"{function}: {problem}", problem.value) from None
