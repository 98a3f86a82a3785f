"""A script, or a recipe, that belongs to another user."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from other_user import as_another_user, needs_root

from autoddp.commandline.mode import choose
from autoddp.commandline.script import require_script
from autoddp.commandline.words import parse
from autoddp.errors import UsageError


@needs_root
def test_a_script_that_cannot_be_read_is_an_error_before_anything_starts() -> None:
    """Under torchrun each rank fails with a line of Python's, and elastic's table follows."""
    folder = Path(tempfile.mkdtemp(prefix="autoddp-test-"))  # another user cannot enter pytest's folders
    folder.chmod(0o755)
    place = folder / "train.py"
    place.touch(mode=0o600)

    def says() -> str:
        try:
            require_script(parse(["--trials", "0", str(place)]).torchrun)
        except UsageError as error:
            return str(error)
        return ""

    try:
        assert says() == ""
        assert as_another_user(says) == f"{place} cannot be read by this user: see its mode and its owner (ls -l)"
    finally:
        shutil.rmtree(folder)


@needs_root
def test_a_recipe_that_another_user_keeps_to_himself_is_not_in_the_way() -> None:
    """In a folder that two users share, his umask ended each start of hers, also after she had tuned."""
    folder, here = Path(tempfile.mkdtemp(prefix="autoddp-test-")), os.getcwd()
    folder.chmod(0o777)
    (folder / "train.py").touch()

    def says() -> str:
        mode = choose(parse(["--nproc-per-node", "2", "train.py"]))
        return mode.says if mode.tune else "launching"

    try:
        os.chdir(folder)
        assert says() == ""
        (folder / f"{folder.name}.train.autoddp.toml").touch(mode=0o600)
        assert as_another_user(says) == f"{folder.name}.train.autoddp.toml cannot be read by this user: tuning"
    finally:
        os.chdir(here)
        shutil.rmtree(folder)
