"""Several processes share one view: ranks at the same time, spawned workers, and processes that are killed."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from guarded import finished, plant, run, snapshot

ROTATE = """
import shutil, json, time
rank, error = int(os.environ["RANK"]), None
for step in range(60):
    folder = f"ckpt/step-{step}"
    try:
        os.makedirs(folder, exist_ok=True)
        with open(f"{folder}/rank{rank}.tmp", "w") as file:
            file.write("x" * 1000)
        os.replace(f"{folder}/rank{rank}.tmp", f"{folder}/rank{rank}")
    except (FileNotFoundError, FileExistsError):
        # A rank that is two steps ahead has removed the folder. Without the guard os.makedirs(exist_ok=True) fails here
        # too: it finds the folder, and no folder any more when it looks whether it is one.
        pass
    with open("shared.tmp" + str(rank), "w") as file:
        json.dump({"step": step}, file)
    os.replace("shared.tmp" + str(rank), "model.pt")
    assert json.load(open("model.pt"))["step"] >= 0
    with open("log.txt", "a") as file:
        file.write(f"{rank} {step}\\n")
    shutil.rmtree(f"ckpt/step-{step - 2}", ignore_errors=True)
    assert os.path.exists("empty") and "log.txt" in os.listdir()
print("well")
"""
WATCH = """
import time
while not os.path.exists("started"): time.sleep(0.01)
end, seen = time.monotonic() + 1.5, 0
while time.monotonic() < end:
    text = open("model.pt").read()
    assert text in ("old model", "new model"), text
    names = os.listdir("ckpt")
    assert "again" not in names or not os.path.exists("ckpt/again/model.bin"), os.listdir("ckpt/again")
    seen += 1
print("well")
"""
REPLACE = """
import shutil, time
os.rename("ckpt/step-1", "ckpt/again"); shutil.rmtree("ckpt/again")
open("started", "w")
for i in range(150):
    open("tmp", "w").write("new model"); os.replace("tmp", "model.pt")
    os.mkdir("ckpt/again"); os.rmdir("ckpt/again")
print("well")
"""


def test_ranks_rotate_the_same_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = tmp_path / "tree"
    plant(tree)
    before = snapshot(tree)
    ranks = []
    for rank in range(3):
        monkeypatch.setenv("RANK", str(rank))
        ranks.append(run(ROTATE, tree, tmp_path / "scratch", wait=False))
    results = [finished(rank) for rank in ranks]
    assert snapshot(tree) == before
    assert [result == (0, "well\n") for result in results] == [True] * 3, results
    code = "lines = open('log.txt').read().splitlines(); print(len(lines), lines[0], 'step-59' in os.listdir('ckpt'))"
    ended, said = run(code, tree, tmp_path / "scratch")
    assert (ended, said) == (0, "181 line 1 True\n")


def test_a_reader_never_sees_a_change_half_done(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    plant(tree)
    before = snapshot(tree)
    scripts = [
        run(code, tree, tmp_path / "scratch", wait=False) for code in (WATCH, REPLACE) if time.sleep(0.3) is None
    ]
    assert [finished(script) for script in scripts] == [(0, "well\n")] * 2
    assert snapshot(tree) == before


def test_a_killed_process_blocks_nobody(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    plant(tree)
    before = snapshot(tree)
    code = "import itertools\nprint('on', flush=True)\nfor i in itertools.count():\n open('a','w'); os.rename('a','b')"
    for _ in range(3):
        victim = run(code, tree, tmp_path / "scratch", wait=False)
        victim.stdout.readline()
        time.sleep(0.1)
        os.kill(victim.pid, signal.SIGKILL)
        victim.communicate()
        ended, said = run("open('c','w').write('x'); print(open('c').read())", tree, tmp_path / "scratch")
        assert (ended, said) == (0, "x\n")
    assert snapshot(tree) == before


SPAWNED = """
import multiprocessing, threading, warnings
from pathlib import Path

def work(name):
    Path(name).write_text(Path("log.txt").read_text() + str(os.path.exists("model.pt")))
    os.remove("hard.pt")

if __name__ == "__main__":
    os.remove("model.pt")
    Path("log.txt").write_text("seen ")
    context = multiprocessing.get_context("METHOD")
    process = context.Process(target=work, args=("spawned.txt",))
    process.start(); process.join()
    assert process.exitcode == 0, process.exitcode
    assert Path("spawned.txt").read_text() == "seen False" and not os.path.exists("hard.pt")
    with context.Manager() as manager:
        assert list(manager.list([1])) == [1]
    with context.Pool(2) as pool:
        assert pool.map(abs, [-1, 2]) == [1, 2]
    # Threads that write while others fork must not leave a lock taken in the child; Python 3.12 warns of such forks.
    warnings.simplefilter("ignore", DeprecationWarning)
    stop = []
    def write():
        while not stop: Path("busy").write_text("x"); os.remove("busy")
    thread = threading.Thread(target=write); thread.start()
    for _ in range(20):
        pid = os.fork()
        if not pid:
            Path("child").write_text("x"); os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
    stop.append(1); thread.join()
    print("well")
"""


def test_processes_of_multiprocessing(tmp_path: Path) -> None:
    for method in ("spawn", "forkserver"):
        tree = tmp_path / method / "tree"
        plant(tree)
        before = snapshot(tree)
        scratch = tmp_path / method / ("a long name " * 12)  # a path in it is too long for a socket's name
        scratch.parent.mkdir(exist_ok=True)
        ended, said = run(SPAWNED.replace("METHOD", method), tree, tmp_path / "scratch", inject=tmp_path / "inject")
        assert snapshot(tree) == before
        assert (ended, said) == (0, "well\n")
