"""Libraries that write by themselves find the copy, with Landlock and without, and the real files stay as they were."""

from __future__ import annotations

from pathlib import Path

import pytest
from guarded import plant, run, snapshot
from launchers import whole

from autoddp.isolation.kernel import landlock

LEVELS = [False, *([True] if landlock.supported() else [])]
TORCH = """
import sqlite3, json, zipfile, tarfile, gzip, pickle, csv, logging, shelve, shutil, mmap, fcntl, tempfile
from pathlib import Path
import numpy as np, torch, safetensors, safetensors.torch, safetensors.numpy
import torch.distributed as dist, torch.distributed.checkpoint as dcp

def raised(kind, action):
    try:
        action()
    except kind as error:
        return str(error)
    raise AssertionError("not raised")

torch.save(torch.ones(2), "model.pt")
assert open("hard.pt", "rb").read() == b"old model"
assert torch.load("model.pt").sum() == 2 and torch.load(Path("model.pt"), mmap=True).sum() == 2
torch.save(torch.ones(3), "tmp.pt"); os.replace("tmp.pt", "model.pt")
assert torch.load("model.pt").sum() == 3
os.remove("model.pt"); raised(FileNotFoundError, lambda: torch.load("model.pt"))
assert "no/such" in raised(RuntimeError, lambda: torch.save(1, "no/such/x.pt"))
raised(Exception, lambda: torch._C.PyTorchFileReader("model.pt"))
scripted = torch.jit.script(torch.nn.Linear(2, 2))
torch.jit.save_jit_module_to_flatbuffer(scripted, "hard.pt"); torch.jit.jit_module_from_flatbuffer("hard.pt")
torch._C._save_parameters({"x": torch.ones(1)}, "outside/far.txt", False)
torch.jit.save(scripted, "hard.pt"); scripted.save("scripted.pt"); torch.jit.load("hard.pt")
torch.jit.load("scripted.pt")
torch.export.save(torch.export.export(torch.nn.Linear(2, 2), (torch.ones(1, 2),)), "x.pt2")
torch.export.load("x.pt2")
torch.UntypedStorage.from_file("log.txt", True, 6).fill_(65); assert open("log.txt").read() == "AAAAAA\\n"
torch.from_file("log.txt", shared=True, size=6, dtype=torch.uint8).fill_(66)
assert open("log.txt").read() == "BBBBBB\\n"
store = dist.FileStore("store", 1); store.set("a", "b"); assert store.get("a") == b"b"
dist.init_process_group("gloo", init_method=f"file://{os.getcwd()}/rendezvous", rank=0, world_size=1)
dist.destroy_process_group()
dcp.save({"x": torch.ones(2)}, checkpoint_id="ckpt/step-1", no_dist=True)
state = {"x": torch.zeros(2)}; dcp.load(state, checkpoint_id="ckpt/latest", no_dist=True)
assert state["x"].sum() == 2
with torch.profiler.profile() as profile:
    torch.ones(2) + 1
profile.export_chrome_trace("trace.json"); json.load(open("trace.json"))
safetensors.torch.save_file({"x": torch.ones(1)}, "outside/far.txt")
assert safetensors.torch.load_file("outside/far.txt")["x"] == 1
with safetensors.safe_open("outside/far.txt", "pt") as file:
    assert list(file.keys()) == ["x"]
safetensors.numpy.save_file({"x": np.ones(1)}, "n.safetensors"); safetensors.numpy.load_file("n.safetensors")

np.save("a.npy", np.arange(3)); np.load("a.npy", mmap_mode="r+")[0] = 7; assert np.load("a.npy")[0] == 7
np.savez("a.npz", x=np.arange(3)); np.load("a.npz")["x"]; np.savetxt("c.txt", np.ones(2)); np.loadtxt("c.txt")
np.arange(3).tofile("log.txt"); assert np.fromfile("log.txt", dtype=int)[2] == 2
np.memmap("ckpt/step-1/model.bin", mode="r+", shape=4)[:] = 1
with open("ckpt/step-1/model.bin", "r+b") as file, mmap.mmap(file.fileno(), 0) as mapped:
    assert mapped[:4] == b"\\1\\1\\1\\1"; mapped[0] = 2
with open("tool.sh") as file:
    fcntl.flock(file, fcntl.LOCK_EX); os.fchmod(file.fileno(), 0o600)
assert os.stat("tool.sh").st_mode & 0o777 == 0o600
c = sqlite3.connect("new.db"); c.execute("create table t(a)"); c.commit(); c.close()
c = sqlite3.connect(f"file:{os.getcwd()}/new.db?mode=ro", uri=True); c.execute("select * from t"); c.close()
c = sqlite3.connect("runs.db"); assert c.execute("select a from t").fetchall() == [(1,)]
c.execute("insert into t values (2)"); c.commit(); c.close()
c = sqlite3.connect("file:runs.db?mode=ro", uri=True); assert c.execute("select count(*) from t").fetchone() == (2,)
c.close()
sqlite3.connect(":memory:").execute("create table t(a)")
with shelve.open("shelf") as shelf: shelf["a"] = 1
with shelve.open("shelf") as shelf: assert dict(shelf) == {"a": 1}
import dbm
for name in ("gnu", "ndbm", "dumb"):
    try: kind = __import__(f"dbm.{name}", fromlist=["open"])
    except ImportError: continue
    with kind.open(f"{name}-base", "c") as base: base[b"a"] = b"b"
    with kind.open(f"{name}-base", "r") as base: assert base[b"a"] == b"b"
    assert name == "dumb" or dbm.whichdb(f"{name}-base") == f"dbm.{name}"
logging.FileHandler("log.txt", mode="w").emit(logging.makeLogRecord({"msg": "said"}))
assert open("log.txt").read() == "said\\n"
with zipfile.ZipFile("a.zip", "w") as z: z.write("log.txt")
with tarfile.open("a.tar.gz", "w:gz") as t: t.add("ckpt")
with tarfile.open("a.tar.gz") as t: t.extractall("extracted", filter="data")
assert Path("extracted/ckpt/latest/model.bin").stat().st_size == 700
shutil.make_archive("archive", "zip", "ckpt"); shutil.unpack_archive("archive.zip", "unpacked")
assert shutil.disk_usage(".").free > 0 and shutil.disk_usage("unpacked").free > 0
with gzip.open("x.gz", "wt") as file: file.write("x")
pickle.dump({}, open("x.pkl", "wb")); csv.writer(open("x.csv", "w")).writerow([1])
with tempfile.TemporaryDirectory(dir=".") as folder: Path(folder, "x").touch()
with tempfile.NamedTemporaryFile(dir="ckpt") as file: assert os.path.exists(file.name)
tempfile.TemporaryFile(dir="empty").write(b"x"); assert os.listdir("empty") == []
from PIL import Image
Image.new("RGB", (2, 2)).save("image.png"); assert Image.open("image.png").size == (2, 2)
from torch.utils.tensorboard import SummaryWriter
writer = SummaryWriter("runs/x"); writer.add_scalar("a", 1, 1); writer.close(); assert os.listdir("runs/x")
from tokenizers import Tokenizer, models
Tokenizer(models.BPE()).save("tokenizer.json"); Tokenizer.from_file("tokenizer.json")
sys.path.insert(0, os.getcwd()); Path("written.py").write_text("x = 5"); import written; assert written.x == 5

class Data(torch.utils.data.Dataset):
    def __len__(self): return 4
    def __getitem__(self, i): Path(f"item{i}").touch(); return torch.ones(2) * i

if __name__ == "__main__":
    loader = torch.utils.data.DataLoader(Data(), batch_size=2, num_workers=2)
    assert [batch.sum().item() for batch in loader] == [2, 10] and len(list(Path(".").glob("item*"))) == 4
    own = os.path.dirname(json.loads(os.environ["AUTODDP_WORKER_ISOLATION"])["socket"])
    os.environ["TMPDIR"] = os.path.relpath(own)  # short, as the launcher's: torch makes a socket there
    torch.multiprocessing.set_sharing_strategy("file_system")  # what is left of it, the keeper has to remove
    shared = [torch.ones(3).share_memory_(), *torch.utils.data.DataLoader(Data(), batch_size=2, num_workers=2)]
    names = [each.untyped_storage()._share_filename_cpu_()[1].decode().strip("/") for each in shared]
    inodes = [os.stat("/dev/shm/" + name).st_ino for name in names]
    listed = open(own + "/shared-memory").read()
    assert all(f"{inode} {name}" in listed.splitlines() for inode, name in zip(inodes, names)), (names, listed)
    assert len(set(names)) == 3
    os.makedirs("outputs/today"); os.chdir("outputs/today"); torch.save(1, "here.pt")
    assert os.listdir() == ["here.pt"] and os.getcwd().endswith("outputs/today") and torch.load("here.pt") == 1
    assert Path("../..").resolve().joinpath("outputs/today/here.pt").exists()
    print("well")
"""


@pytest.mark.parametrize("with_landlock", [*map(whole, LEVELS[:-1]), LEVELS[-1]])
def test_libraries_write_to_the_copy(tmp_path: Path, with_landlock: bool) -> None:
    import sqlite3

    tree = tmp_path / "tree"
    plant(tree)
    base = sqlite3.connect(tree / "runs.db")
    base.execute("create table t(a)")
    base.execute("insert into t values (1)")
    base.commit()
    base.close()
    before, elsewhere = snapshot(tree), snapshot(tmp_path / "elsewhere")
    ended, said = run(TORCH, tree, tmp_path / "scratch", with_landlock, inject=tmp_path / "inject")
    assert snapshot(tree) == before
    assert snapshot(tmp_path / "elsewhere") == elsewhere
    assert said.splitlines()[-1:] == ["well"], said[-3000:]
    assert ended == 0
