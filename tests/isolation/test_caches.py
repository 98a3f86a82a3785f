"""Which files of an attempt the next one finds: caches, and nothing that the script goes on from."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from autoddp.isolation.caches import keep_caches
from autoddp.isolation.overlay import Layers

TEMPORARY = os.path.realpath(tempfile.gettempdir())
USUAL = ["/home/u/kvcache", "/home/u", TEMPORARY]  # the current folder, as `Shelter.important` names it first


def kept(place: Path, written: Sequence[str], working: Sequence[str], environment: Mapping[str, str]) -> set[str]:
    """What is kept of files that an attempt has written in an overlay over /."""
    layers = Layers(str(place / "scratch"), str(place / "kept"))
    upper, _ = layers.make("/")
    for path in written:
        file = Path(upper + path)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("x")
    keep_caches(layers, environment, working)
    root = Path(layers.kept, layers.name_of("/"))
    return {f"/{file.relative_to(root)}" for file in root.rglob("*") if file.is_file()}


CASES: dict[str, tuple[list[str], dict[str, str], list[str], list[str]]] = {
    "the current folder is called so": (
        USUAL,
        {},
        ["/home/u/kvcache/features_cache/x", "/home/u/kvcache/__pycache__/m.pyc"],
        ["/home/u/kvcache/last.pt", "/home/u/kvcache/out/log.txt"],
    ),
    "it is below one that is called so": (["/disk/cache/u/job", "/home/u"], {}, [], ["/disk/cache/u/job/last.pt"]),
    "it is below one that a variable names": (USUAL, {"CCACHE_BASEDIR": "/home/u"}, [], ["/home/u/kvcache/last.pt"]),
    "an argument names an output below one": ([*USUAL, "/disk/cache/run7"], {}, [], ["/disk/cache/run7/last.pt"]),
    "an argument names a cache": ([*USUAL, "/disk/cache"], {}, ["/disk/cache/x"], []),
    "a variable names a cache": (USUAL, {"HF_HOME": "/disk/hf"}, ["/disk/hf/hub/x"], []),
    "locks that nobody is left to remove": (
        USUAL,
        {},
        ["/home/u/.cache/torch_extensions/py/ext/ext.so", "/home/u/.cache/block", "/home/u/.cache/lock.mdb"],
        [
            "/home/u/.cache/torch_extensions/py/ext/lock",
            "/home/u/.cache/fonts/.matplotlib-lock",
            "/home/u/.cache/hub/x.LOCK",
            "/home/u/cache.lock",
        ],
    ),
    "temporary folders": (
        USUAL,
        {},
        [f"{TEMPORARY}/torchinductor_u/ab/x.py", f"{TEMPORARY}/mnist_data/x.gz"],
        [f"{TEMPORARY}/run/model_best.pth.tar", f"{TEMPORARY}/run/state.json", f"{TEMPORARY}/data/last.pt"],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_caches_are_kept_and_no_output(name: str, tmp_path: Path) -> None:
    working, environment, caches, others = CASES[name]
    assert kept(tmp_path, [*caches, *others], working, environment) == set(caches)


def test_a_folder_that_was_removed_and_made_again_shows_the_users_files_again(tmp_path: Path) -> None:
    layers = Layers(str(tmp_path / "scratch"), str(tmp_path / "kept"))
    upper, _ = layers.make("/")
    cache = Path(upper, "home/out/my_cache")
    cache.mkdir(parents=True)
    (cache / "x").write_text("x")
    try:
        os.setxattr(cache.parent, "user.overlay.opaque", b"y")  # as the kernel does after rmtree and makedirs
    except OSError as error:
        if error.errno != errno.ENOTSUP:
            raise
        pytest.skip("this file system has no attributes of users")
    keep_caches(layers, {}, USUAL)
    out = Path(layers.kept, layers.name_of("/"), "home/out")
    assert (out / "my_cache/x").exists()
    assert not [name for name in os.listxattr(out) if ".overlay." in name]
