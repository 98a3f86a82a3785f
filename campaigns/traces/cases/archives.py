"""Archives and compressed files."""

import bz2
import gzip
import lzma
import shutil
import tarfile
import zipfile
from pathlib import Path

from traces.trace import files, only, trace


def _zip(folder: Path) -> None:
    with zipfile.ZipFile(folder / "code.zip", "w") as archive:
        archive.writestr("user.py", "print('user')\n")


@trace(prepare=_zip, after=only("code.zip"))
def zip_append(folder, rank, step):
    """zipfile with mode "a"."""
    with zipfile.ZipFile(folder / "code.zip", "a") as archive:
        archive.writestr(f"step{step}.py", "print('job')\n")


@trace(prepare=_zip, after=only("code.zip"))
def zip_extract_over(folder, rank, step):
    """zipfile extracts into the folder."""
    with zipfile.ZipFile(folder / "code.zip") as archive:
        archive.extractall(folder / f"code{step}")


@trace(prepare=files("src/a.py", "code.tar.gz"), after=only("code.tar.gz", "src"))
def tar_the_code(folder, rank, step):
    """tarfile packs the sources over the old archive."""
    with tarfile.open(folder / "code.tar.gz", "w:gz") as archive:
        archive.add(folder / "src", arcname="src")


@trace(prepare=files("src/a.py", "out/a.py"), after=only("out", "src"))
def make_and_unpack(folder, rank, step):
    """shutil.make_archive and unpack_archive over files that are there."""
    made = shutil.make_archive(str(folder / f"backup{step}"), "zip", folder / "src")
    shutil.unpack_archive(made, folder / "out")


@trace(prepare=files("a.log"), after=only("a.log"))
def compress_and_remove(folder, rank, step):
    """A log is compressed by gzip, bz2 and lzma, and then removed."""
    source = folder / "a.log"
    for module, ending in ((gzip, "gz"), (bz2, "bz2"), (lzma, "xz")):
        with open(source, "rb") as plain, module.open(folder / f"a.log.{ending}", "wb") as packed:
            shutil.copyfileobj(plain, packed)
    source.unlink()
    source.write_text(f"step {step}\n")
