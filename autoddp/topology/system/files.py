"""Small files of /sys and /proc, which may be missing, empty or refuse to be read."""

from __future__ import annotations

from pathlib import Path


def word(path: Path) -> str | None:
    """The file's text without its line end; None if it cannot be read (also EINVAL, as of a NIC that is down)."""
    try:
        return path.read_bytes().decode(errors="replace").strip()
    except OSError:
        return None


def number(path: Path) -> int | None:
    """The file's text as a number; None if it is none."""
    text = word(path)
    try:
        return int(text) if text is not None else None
    except ValueError:
        return None


def numa_node(device: Path) -> int | None:
    """The NUMA node of a device's folder in sysfs; None if it has none (the kernel writes -1)."""
    found = number(device / "numa_node")
    return found if found is not None and found >= 0 else None


def entries(folder: Path) -> list[Path]:
    """What the folder holds, by name; nothing if it cannot be listed."""
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def target(link: Path) -> str:
    """The last part of what a symbolic link points to, or nothing."""
    try:
        return link.readlink().name
    except OSError:
        return ""
