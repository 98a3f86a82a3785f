"""Other programs: the shell's commands, by all ways to start them."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

from traces.trace import files, only, trace


def _system(command: str) -> None:
    assert os.system(command) == 0, command


def _run(*words: object, **options) -> None:
    subprocess.run([str(word) for word in words], check=True, stdin=subprocess.DEVNULL, **options)


@trace(prepare=files("last.txt", "best.txt"), after=only("best.txt", "last.txt"))
def system_cp(folder, rank, step):
    """os.system("cp ...") over the old file."""
    (folder / "last.txt").write_text(f"step {step}\n")
    _system(f"cp {shlex.quote(str(folder))}/last.txt {shlex.quote(str(folder))}/best.txt")
    assert (folder / "best.txt").read_text() == f"step {step}\n"


@trace(prepare=files("old1.txt", "old2.txt", "keep.txt"), after=only("keep.txt", "old1.txt", "old2.txt"))
def system_rm(folder, rank, step):
    """os.system("rm -f ...") with a pattern."""
    _system(f"rm -f {shlex.quote(str(folder))}/old*.txt")
    assert not list(folder.glob("old*"))


@trace(prepare=files("old1.txt", "keep.txt"), after=only("keep.txt", "old1.txt"), where="inside")
def system_rm_relative(folder, rank, step):
    """os.system("rm -f ...") of a name without a folder, after os.chdir."""
    _system("rm -f old1.txt")


@trace(prepare=files("old1.txt", "run/a.txt"), after=only("old1.txt", "run"), where="relative")
def system_rm_from_the_start(folder, rank, step):
    """os.system("rm -rf ...") relative to where the job was started."""
    _system(f"rm -rf {folder}/run {folder}/old1.txt")


@trace(prepare=files("a.txt", "b.txt"), after=only("a.txt", "b.txt"), where="inside")
def mv_without_a_shell(folder, rank, step):
    """subprocess.run(["mv", ...]), relative."""
    _run("mv", "a.txt", "b.txt")
    Path("a.txt").write_text(f"step {step}\n")


def _latest(folder: Path) -> None:
    files("one.txt", "two.txt")(folder)
    os.symlink("one.txt", folder / "latest")


@trace(prepare=_latest, after=only("latest", "one.txt", "two.txt"))
def ln_over(folder, rank, step):
    """subprocess with cwd: `ln -sf` over the old link, `ln` for a hard one."""
    _run("ln", "-sfn", "two.txt", "latest", cwd=folder)
    _run("ln", "-f", "one.txt", f"hard{step}", cwd=folder)


@trace(prepare=files("config.txt"), after=only("config.txt"))
def sed_in_place(folder, rank, step):
    """`sed -i`: a new file takes the old one's name."""
    _run("sed", "-i", "s/user/job/", folder / "config.txt")
    assert "job" in (folder / "config.txt").read_text()


@trace(prepare=files("a.txt", "src/b.txt"), after=only("a.txt", "src"))
def tar_both_ways(folder, rank, step):
    """`tar` packs, and unpacks over what is there."""
    _run("tar", "-cf", f"all{step}.tar", "src", cwd=folder)
    (folder / "src" / "b.txt").write_text("changed\n")
    _run("tar", "-xf", f"all{step}.tar", cwd=folder)


@trace(prepare=files("a.tmp", "deep/b.tmp", "keep.txt"), after=only("a.tmp", "deep", "keep.txt"))
def find_and_delete(folder, rank, step):
    """`find -delete`, and find into xargs rm."""
    _run("find", folder, "-name", "a.tmp", "-delete")
    subprocess.run(f"find {shlex.quote(str(folder))} -name '*.tmp' | xargs -r rm", shell=True, check=True)


@trace(prepare=files("a.log", "b.log"), after=only("a.log", "b.log"))
def truncate_and_touch(folder, rank, step):
    """`truncate -s`, `touch` of an old and a new file, with a date of its own."""
    _run("truncate", "-s", 10 + step, folder / "a.log")
    _run("touch", folder / "b.log", folder / f"flag{step}")
    _run("touch", "-d", "2001-01-01", folder / "b.log")


@trace(prepare=files("out.txt", "all.txt"), after=only("all.txt", "out.txt"), where="inside")
def redirections(folder, rank, step):
    """The shell's >, >>, here-document and tee."""
    subprocess.run("echo now > out.txt; echo more >> all.txt; date | tee -a all.txt > tee.txt", shell=True, check=True)
    subprocess.run(["bash", "-c", "cat > here.txt <<END\nlines\nEND"], check=True)


@trace(prepare=files("out.txt"), after=only("out.txt"))
def output_into_an_open_file(folder, rank, step):
    """subprocess with stdout=file: the child writes through a handle it was given."""
    with open(folder / "out.txt", "a") as file:
        _run("echo", "by the child", stdout=file)
    handle = os.open(folder / "out.txt", os.O_WRONLY | os.O_APPEND)
    _run("bash", "-c", f"echo by a passed handle >&{handle}", pass_fds=[handle])
    os.close(handle)


@trace(prepare=files("a.bin", "b.bin"), after=only("a.bin", "b.bin"))
def dd_and_install(folder, rank, step):
    """`dd` into the middle of a file, `install` over one."""
    _run("dd", "if=/dev/zero", f"of={folder / 'a.bin'}", "bs=1", "count=8", "seek=4", "conv=notrunc", "status=none")
    _run("install", "-m", "755", folder / "a.bin", folder / "b.bin")


@trace(prepare=files("a.txt", "run/b.txt"), after=only("a.txt", "run"))
def chmod_by_command(folder, rank, step):
    """`chmod -R` of a tree, `mkdir -p`, `rmdir`."""
    _run("chmod", "-R", "g+w,o-r", folder / "run")
    _run("mkdir", "-p", folder / f"new{step}" / "deep")
    _run("rmdir", folder / f"new{step}" / "deep")


@trace(prepare=files("a.txt"), after=only("a.txt"))
def popen_and_spawn(folder, rank, step):
    """os.popen, os.posix_spawn, subprocess.Popen with a pipe."""
    with os.popen(f"cat > {shlex.quote(str(folder / 'a.txt'))}", "w") as pipe:
        pipe.write(f"step {step}\n")
    pid = os.posix_spawn("/bin/sh", ["sh", "-c", 'echo spawned > "$1"', "sh", str(folder / "spawned")], os.environ)
    assert os.waitpid(pid, 0)[1] == 0
    with subprocess.Popen(["sh", "-c", 'cat >> "$0"', str(folder / "a.txt")], stdin=subprocess.PIPE) as child:
        child.communicate(b"by a pipe\n")


@trace(prepare=files("a.txt", "b.txt"), after=only("a.txt", "b.txt"))
def python_child(folder, rank, step):
    """A Python of its own that writes and removes."""
    code = "import os, sys; open('a.txt', 'w').write('child'); os.path.exists('b.txt') and os.remove('b.txt')"
    _run(sys.executable, "-c", code, cwd=folder)
    assert (folder / "a.txt").read_text() == "child"


@trace(prepare=files("a.txt", "b.txt"), after=only("a.txt", "b.txt"))
def python_child_without_environment(folder, rank, step):
    """A Python of its own with -I and an empty environment: nothing can be put into it from outside."""
    code = "import os, shutil; shutil.copy('a.txt', 'b.txt'); os.remove('a.txt'); open('a.txt', 'w').write('child')"
    _run(sys.executable, "-I", "-S", "-c", code, cwd=folder, env={})


@trace(prepare=files("a.txt", "b.txt"), after=only("a.txt", "b.txt"), programs=["perl"])
def perl_in_place(folder, rank, step):
    """A Perl one-liner edits in place, another one unlinks."""
    _run("perl", "-pi", "-e", "s/user/job/", folder / "a.txt")
    _run("perl", "-e", "unlink shift", folder / "b.txt")


@trace(prepare=files("a.txt"), after=only("a.txt"), where="inside", programs=["awk"])
def awk_writes(folder, rank, step):
    """awk prints into a file."""
    _run("awk", 'BEGIN { print "by awk" > "a.txt"; print "new" > "b.txt" }')


@trace(prepare=files("a.txt", "b.txt"), after=only("a.txt", "b.txt"))
def script_of_its_own(folder, rank, step):
    """The job writes a shell script, makes it executable and runs it."""
    script = folder / "clean.sh"
    script.write_text('#!/bin/sh\ncd "$(dirname "$0")" && rm -f b.txt && echo cleaned >> a.txt\n')
    script.chmod(0o755)
    _run(script)
    assert not (folder / "b.txt").exists()


@trace(prepare=files("a.txt"), after=only("a.txt"))
def command_in_the_background(folder, rank, step):
    """A shell command with & and nohup, which goes on when its shell has ended."""
    _system(f"(sleep 0.3; echo late >> {shlex.quote(str(folder / 'a.txt'))}) > /dev/null 2>&1 &")
    (folder / f"step{step}").touch()
