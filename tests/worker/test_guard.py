"""While tuning, what a script saves is diverted and found again; what it owns stays as it was.

One script in a process of its own, in a folder full of its earlier results.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from launchers import environment

OLD = "as it was before tuning"
OWNED = ["model.pt", "renamed.pt", "best.pt", "model.safetensors", "other.txt", "later.txt", "checkpoint/old.txt"]
SCRIPT = """
import io, json, os, sys
from pathlib import Path
from autoddp.worker.guard import divert_writes
divert_writes(sys.argv[1])

import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp

def loaded(path):
    return float(torch.load(path))

found = {}
torch.save(torch.tensor(1.0), "model.pt")
found["relative"] = loaded("model.pt")
found["same file by another name"] = loaded(Path.cwd() / "model.pt")
torch.save(obj=torch.tensor(2.0), f=Path("new_folder_of_the_script") / "new.pt")
found["keywords and a path"] = float(torch.load(f=os.path.abspath("new_folder_of_the_script/new.pt")))
torch.save(torch.tensor(3.0), "renamed.pt.tmp")
os.replace("renamed.pt.tmp", "renamed.pt")
found["saved beside, then replaced"] = loaded("renamed.pt")
torch.save(torch.tensor(4.0), "best.pt.tmp")
os.rename("best.pt.tmp", Path("best.pt"))
found["renamed"] = loaded("best.pt")
buffer = io.BytesIO()
torch.save(torch.tensor(5.0), buffer)
buffer.seek(0)
found["buffer"] = loaded(buffer)
found["saved by nobody"] = loaded("given.pt")

safetensors.torch.save_file({"x": torch.tensor(6.0)}, "model.safetensors")
found["safetensors"] = float(safetensors.torch.load_file("model.safetensors")["x"])
found["safetensors by keyword"] = float(safetensors.torch.load_file(filename="model.safetensors")["x"])

state = {"x": torch.tensor(7.0)}
dcp.save(state, checkpoint_id="checkpoint", no_dist=True)
state = {"x": torch.tensor(0.0)}
dcp.load(state, checkpoint_id="checkpoint", no_dist=True)
found["distributed checkpoint"] = float(state["x"])

writer = dcp.FileSystemWriter("checkpoint_by_writer")
dcp.save({"x": torch.tensor(9.0)}, storage_writer=writer, no_dist=True)
dcp.load(state, storage_reader=dcp.FileSystemReader(Path("checkpoint_by_writer")), no_dist=True)
found["distributed checkpoint by writer"] = float(state["x"])

os.rename("other.txt", "moved.txt")
os.replace("moved.txt", "other.txt")
os.replace("later.txt.tmp", "later.txt")
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The script's folder after it has run; `found.json` is what it says."""
    parent = tmp_path_factory.mktemp("guard")
    work, scratch = parent / "work", parent / "scratch"
    for name in OWNED:
        (work / name).parent.mkdir(parents=True, exist_ok=True)
        (work / name).write_text(OLD)
    (work / "later.txt.tmp").write_text("the script's own business")
    given = f"import torch; torch.save(torch.tensor(8.0), {str(work / 'given.pt')!r})"
    subprocess.run([sys.executable, "-c", given], check=True)
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(scratch)], cwd=work, env=environment(), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    (parent / "found.json").write_text(done.stdout)
    return work


EXPECTED = {
    "relative": 1.0,
    "same file by another name": 1.0,
    "keywords and a path": 2.0,
    "saved beside, then replaced": 3.0,
    "renamed": 4.0,
    "buffer": 5.0,
    "safetensors": 6.0,
    "safetensors by keyword": 6.0,
    "distributed checkpoint": 7.0,
    "distributed checkpoint by writer": 9.0,
    "saved by nobody": 8.0,
}


@pytest.mark.parametrize("name", EXPECTED)
def test_what_was_saved_is_found_again(folder: Path, name: str) -> None:
    assert json.loads((folder.parent / "found.json").read_text())[name] == EXPECTED[name]


@pytest.mark.parametrize("name", [name for name in OWNED if name != "later.txt"])
def test_what_the_script_owns_stays(folder: Path, name: str) -> None:
    assert (folder / name).read_text() == OLD


def test_other_files_are_none_of_our_business(folder: Path) -> None:
    assert (folder / "later.txt").read_text() == "the script's own business"
    assert not (folder / "later.txt.tmp").exists()


def test_nothing_new_lies_in_the_scripts_folder(folder: Path) -> None:
    found = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert found == {*OWNED, "given.pt"}
    assert {path.name for path in folder.iterdir() if path.is_dir()} == {"checkpoint"}


def test_it_lies_in_the_scratch_folder(folder: Path) -> None:
    written = folder.parent / "scratch" / "written" / "0" / str(folder).lstrip("/")
    assert (written / "model.pt").stat().st_size > 100
    assert (written / "model.safetensors").exists()
    assert list((written / "checkpoint").glob("*.distcp"))


def test_a_restarted_script_does_not_find_what_it_saved(folder: Path) -> None:
    program = (
        "import sys; from autoddp.worker.guard import divert_writes; divert_writes(sys.argv[1])\n"
        "import torch; torch.load('new_folder_of_the_script/new.pt')"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(folder.parent / "scratch")],
        cwd=folder,
        env=environment(TORCHELASTIC_RESTART_COUNT="1"),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert "FileNotFoundError" in done.stderr.splitlines()[-1]
