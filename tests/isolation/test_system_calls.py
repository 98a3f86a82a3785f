"""What a program of an attempt does beyond it ends tuning before it happens, whatever language it is written in."""

from __future__ import annotations

import json
import os
import platform
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from launchers import ROOT
from shared import once

from autoddp.isolation.elsewhere.known import tool_of

NEEDED = ["cc", "curl", "git", "bash", "make", "perl"]
pytestmark = [
    pytest.mark.skipif(platform.machine() not in ("x86_64", "aarch64"), reason="calls are held on these processors"),
    pytest.mark.skipif(not all(map(shutil.which, NEEDED)), reason=f"needs {', '.join(NEEDED)}"),
]

START = """
import os, shutil, signal, socket, subprocess, sys, threading, time
def sh(line):
    return subprocess.run(line, shell=True).returncode
def python(code):  # one that does not check itself
    return subprocess.run([sys.executable, "-I", "-S", "-c", "import os, socket, time\\n" + code]).returncode
fired = 0
def is_interrupted():  # again and again, by 300 signals
    if not fired:
        signal.signal(signal.SIGALRM, fires)
        signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
    return fired < 300
def fires(*_):
    global fired
    fired += 1
    if fired == 300:
        signal.setitimer(signal.ITIMER_REAL, 0)
def sends(kind, family, address):
    return python(f"s = socket.socket(socket.{family}, socket.{kind}); s.connect({address!r}); s.send(b'x')")
"""

UP = "aws changes something outside this run (aws s3 sync ckpt)"
STARTS = {
    "in a shell": "sh('cd /; false || aws s3 sync ckpt s3://b')",
    "in Python": "subprocess.run(['aws', 's3', 'sync', 'ckpt', 's3://b'])",
    "by another name": "subprocess.run(['x', 's3', 'sync', 'ckpt', 's3://b'], executable=shutil.which('aws'))",
    "by a variable": "sh('X=aws; UP=\"s3 sync\"; $X $UP ckpt s3://b')",
    "in a script that only the shell can find": "sh('D=`mktemp -d`; echo aws s3 sync ckpt s3://b >$D/up; sh $D/up')",
    "by find": "sh('find / -maxdepth 0 -exec aws s3 sync ckpt s3://b \\\\;')",
    "by xargs": "sh('echo ckpt s3://b | xargs aws s3 sync')",
    "by a wrapper": "sh('env -i X=1 timeout 60 nice $(which aws) s3 sync ckpt s3://b')",
    "at the end of a shell": "sh('trap \"aws s3 sync ckpt s3://b\" EXIT; true')",
    "by make": "open(f'{folder}/Makefile', 'w').write('all:\\n\\taws s3 sync ckpt s3://b\\n'); sh(f'make -C {folder}')",
    "while make reads": "open(f'{folder}/up.mk', 'w').write('X := $(shell aws s3 sync ckpt s3://b)\\nall:\\n'); "
    "sh(f'make -f {folder}/up.mk')",
    "by Perl": "subprocess.run(['perl', '-e', 'system(qw(aws s3 sync ckpt s3://b))'])",
    "by Perl in place of itself": "subprocess.run(['perl', '-e', 'exec(qw(aws s3 sync ckpt s3://b))'])",
    "by a Python without the checks": "python('os.system(\"aws s3 sync ckpt s3://b\")')",
    "by C": "import ctypes; ctypes.CDLL(None).system(b'aws s3 sync ckpt s3://b')",
    "by a descriptor": "os.execve(os.open(shutil.which('aws'), 0), 'aws s3 sync ckpt s3://b'.split(), os.environ)",
    "in the folder of a descriptor": "import ctypes; there = os.open(os.path.dirname(shutil.which('aws')), 0); "
    "words = (ctypes.c_char_p * 6)(*b'aws s3 sync ckpt s3://b'.split()); "
    "number = {'x86_64': 322, 'aarch64': 281}[os.uname().machine]; "
    "ctypes.CDLL(None).syscall(number, there, b'aws', words, None, 0)",
    "as a module": "subprocess.run([sys.executable, '-m', 'awscli', 's3', 'sync', 'ckpt', 's3://b'])",
}
"""Ways to start a program that would change something elsewhere."""

ENDS = {
    **{f"started {how}": (code, UP) for how, code in STARTS.items()},
    "a program that nobody knows": (
        "sends('SOCK_STREAM', 'AF_INET', ('127.0.0.1', outside))",
        "python connects to 127.0.0.1:PORT, and autoddp does not know what it does there",
    ),
    "a Python that lacks autoddp's packages": (
        "import venv; from autoddp.isolation.children import INJECT; venv.create(f'{folder}/venv', symlinks=True); "
        "code = f'import socket; socket.create_connection((\"127.0.0.1\", {outside}))'; "
        "subprocess.run([f'{folder}/venv/bin/python', '-c', code], env={**os.environ, 'PYTHONPATH': INJECT})",
        "python connects to 127.0.0.1:PORT, and autoddp does not know what it does there",
    ),
    "a program in C": (
        "subprocess.run([os.environ['COMPILED'], str(outside)])",
        "compiled connects to 127.0.0.1:PORT, and autoddp does not know what it does there",
    ),
    "below a shell": (
        "subprocess.run(f'cd /; true && {os.environ[\"COMPILED\"]} {outside}; echo done', shell=True)",
        "compiled connects to 127.0.0.1:PORT, and autoddp does not know what it does there",
    ),
    "left behind by its parents": (
        "subprocess.run(f'(setsid {os.environ[\"COMPILED\"]} {outside} &)', shell=True); time.sleep(60)",
        "compiled connects to 127.0.0.1:PORT, and autoddp does not know what it does there",
    ),
    "a shell": (
        "subprocess.run(['bash', '-c', f'echo hello >/dev/tcp/127.0.0.1/{outside}'])",
        "bash connects to 127.0.0.1:PORT, and autoddp does not know what it does there",
    ),
    "at the address of another family": (
        "sends('SOCK_STREAM', 'AF_INET6', ('::ffff:127.0.0.1', outside))",
        "python connects to [::ffff:127.0.0.1]:PORT, and autoddp does not know what it does there",
    ),
    "by a Unix socket": (
        "sends('SOCK_STREAM', 'AF_UNIX', by_path)",
        "python connects to FOLDER/outside, and autoddp does not know what it does there",
    ),
    "by a Unix socket with a short path": (
        "os.chdir(os.path.dirname(by_path)); sends('SOCK_STREAM', 'AF_UNIX', 'outside')",
        "python connects to FOLDER/outside, and autoddp does not know what it does there",
    ),
    "a datagram": (
        'python(\'socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"x", ("192.0.2.1", 8125))\')',
        "python sends data to 192.0.2.1:8125, and autoddp does not know what it does there",
    ),
    "a datagram of a shell": (
        "subprocess.run(['bash', '-c', 'echo hello >/dev/udp/192.0.2.1/8125'])",
        "bash connects to 192.0.2.1:8125, and autoddp does not know what it does there",
    ),
    "a known program that writes": (
        "subprocess.run(['curl', '-s', '-d', 'x', f'http://127.0.0.1:{outside}/'])",
        "curl changes something outside this run (curl)",
    ),
    "what cannot be judged": (
        "import ctypes; ctypes.CDLL(None).execve(b'aws', ctypes.c_void_p(-1), None)",
        "autoddp cannot tell what python watched_programs.py does (execve, OverflowError)",
    ),
    "git by its helper": (
        "os.chdir(folder); subprocess.run(['git', 'init', '-q']); "
        "me = ['-c', 'user.name=x', '-c', 'user.email=x']; "
        "subprocess.run(['git', *me, 'commit', '-q', '--allow-empty', '-m', 'x']); "
        "subprocess.run(['git', 'push', '-q', f'http://127.0.0.1:{outside}/x', 'HEAD'])",
        "git changes something outside this run (git push)",
    ),
    "a program that nobody knows, below one that is known": (
        "os.chdir(folder); subprocess.run(['git', 'init', '-q', 'hooked']); os.chdir('hooked'); "
        "hook = open('.git/hooks/post-commit', 'w'); "
        "hook.write(f'#!/bin/sh\\n{os.environ[\"COMPILED\"]} {outside}\\n'); hook.close(); "
        "os.chmod(hook.name, 0o755); me = ['-c', 'user.name=x', '-c', 'user.email=x']; "
        "subprocess.run(['git', *me, 'commit', '-q', '--allow-empty', '-m', 'x'])",
        "compiled connects to 127.0.0.1:PORT, and autoddp does not know what it does there",
    ),
    "a push in a hook of a commit": (
        "os.chdir(folder); subprocess.run(['git', 'init', '-q', 'pushes']); os.chdir('pushes'); "
        "hook = open('.git/hooks/post-commit', 'w'); "
        "hook.write(f'#!/bin/sh\\ngit push -q http://127.0.0.1:{outside}/x HEAD\\n'); hook.close(); "
        "os.chmod(hook.name, 0o755); me = ['-c', 'user.name=x', '-c', 'user.email=x']; "
        "subprocess.run(['git', *me, 'commit', '-q', '--allow-empty', '-m', 'x'])",
        "git changes something outside this run (git push)",
    ),
    "a signal": (
        "subprocess.run(['kill', '-TERM', str(others)])",
        "kill sends SIGTERM to process OTHERS, which this run did not start",
    ),
    "a signal of this process by a library in C": (
        "import ctypes; ctypes.CDLL(None).kill(others, 9)",
        "python watched_programs.py sends SIGKILL to process OTHERS, which this run did not start",
    ),
    "a signal with a value, as by kill -q": (
        "import ctypes; ctypes.CDLL(None).sigqueue(others, 15, None)",
        "python watched_programs.py sends SIGTERM to process OTHERS, which this run did not start",
    ),
    "a signal to a group": (
        "python(f'os.killpg({others}, 15)')",
        "python sends SIGTERM to process OTHERS, which this run did not start",
    ),
    "a signal by a folder of /proc": (
        "signal.pidfd_send_signal(os.open(f'/proc/{others}', 0), signal.SIGTERM)",
        "python watched_programs.py sends SIGTERM to process OTHERS, which this run did not start",
    ),
    "a signal to every process": ("python('os.kill(-1, 15)')", "python sends SIGTERM to every process"),
}
if os.geteuid() == 0:
    ENDS["the clock"] = (
        "python('time.clock_settime(time.CLOCK_REALTIME, time.time())')",
        "python changes this machine (clock_settime)",
    )

PASSES = {
    "what is not started": """
sh("false && aws s3 sync ckpt s3://b; echo aws s3 sync ckpt s3://b; # aws s3 rm")
sh("if false; then aws s3 rm s3://b; fi; alias up='aws s3 rm'; type aws")
""",
    "what is not there": "assert sh('PATH=/nowhere; aws s3 rm s3://b 2>/dev/null') == 127",
    "what only reads": "assert sh('aws s3 ls s3://b && aws s3 cp s3://b/x . && aws --version') == 0",
    "a script of the user's that has a known name": """
open(f"{folder}/batch.py", "w").write("import os, sys; sys.exit(os.system('git --version && date'))")
subprocess.run([sys.executable, f"{folder}/batch.py"], check=True)
""",
    "files with names of known programs": """
assert sh(f"mkdir -p {folder}/from/code {folder}/from/batch {folder}/from/init") == 0
assert sh(f"cp -r {folder}/from/code {folder}/code; find {folder}/from/code -name x; ls {folder}/from/batch") == 0
""",
    "a URL that is none": "assert sh('curl -s -d x http://localhost:PORT/') == 3",
    "a known program for itself": "assert sh('taskset -cp 0 $$ && date +%s && hostname') == 0",
    "odd words": """
import ctypes
libc, aws = ctypes.CDLL(None), os.fsencode(shutil.which("aws"))
for words in (8, 1 << 46):  # where no memory is
    assert libc.execve(aws, ctypes.c_void_p(words), None) == -1
assert subprocess.run([b"\\xff", b"\\xfe"], executable="true").returncode == 0
assert subprocess.run(["true", *["x" * 10] * 100000]).returncode == 0
assert subprocess.run(["taskset", "-p", "\u00b2"], stderr=subprocess.DEVNULL).returncode
if not os.fork():
    libc.execve(os.fsencode(shutil.which("true")), None, None)
assert os.wait()[1] == 0
""",
    "parts of git": """
git = f"git -c user.name=x -c user.email=x -c protocol.file.allow=always -C {folder}"
assert sh(f"{git} init -q a && {git}/a commit -q --allow-empty -m x && {git} init -q b") == 0
assert sh(f"{git}/b submodule --quiet add {folder}/a a && {git}/b commit -qm x && {git} clone -q b c") == 0
assert sh(f"{git}/c submodule --quiet update --init && {git}/c pull -q && {git}/c gc -q") == 0
""",
    "parts of git-lfs": """
os.makedirs(f"{folder}/bin")
with open(f"{folder}/bin/git-lfs", "w") as lfs:
    lfs.write("#!/bin/sh\\necho url=http://user:x@store.invalid | git credential fill >$0.asked\\n")
os.chmod(lfs.name, 0o755)
assert sh(f"PATH={folder}/bin:$PATH git lfs pull && test -s {folder}/bin/git-lfs.asked") == 0
""",
    "nobody listens": "assert sends('SOCK_STREAM', 'AF_INET', ('127.0.0.1', 1)) == 1",
    "a server of the attempt": """
with socket.create_server(("127.0.0.1", 0)) as own:
    assert sends('SOCK_STREAM', 'AF_INET', own.getsockname()) == 0
    assert sends('SOCK_STREAM', 'AF_INET', ("0.0.0.0", own.getsockname()[1])) == 0
""",
    "a server that another program of the attempt runs": """
server = subprocess.Popen([sys.executable, "-I", "-S", "-c", '''
import socket
own = socket.create_server(("127.0.0.1", 0))
print(own.getsockname()[1], flush=True)
own.accept()
'''], stdout=subprocess.PIPE, text=True)
assert sends('SOCK_STREAM', 'AF_INET', ("127.0.0.1", int(server.stdout.readline()))) == 0
assert server.wait() == 0
""",
    "a Unix socket of the attempt": """
with socket.socket(socket.AF_UNIX) as own:
    own.bind(f"{folder}/own")
    own.listen()
    assert sends('SOCK_STREAM', 'AF_UNIX', f"{folder}/own") == 0
""",
    "a Python that checks itself": "socket.create_connection(('127.0.0.1', outside)).close()",
    "a fork of it": """
child = os.fork()
if not child:
    socket.create_connection(("127.0.0.1", outside)).close()
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
""",
    "a known program that reads": """
subprocess.run(["curl", "-s", f"http://127.0.0.1:{outside}/"])
subprocess.run(["sh", "-c", f"curl -s http://127.0.0.1:{outside}/ | cat"])
""",
    "its helper": """
os.makedirs(f"{folder}/cloned")
assert subprocess.run(["git", "clone", "-q", f"http://127.0.0.1:{outside}/x", f"{folder}/cloned"]).returncode
""",
    "names of users and hosts": """
subprocess.run(["id"], stdout=subprocess.DEVNULL)
python("socket.getaddrinfo('localhost', 80)")
""",
    "to connect for datagrams": """
python("socket.socket(socket.AF_INET, socket.SOCK_DGRAM).connect(('192.0.2.1', 443))")
""",
    "signals of its own": """
child = subprocess.Popen(["sleep", "60"])
subprocess.run(["kill", "-TERM", str(child.pid)])
assert child.wait() == -signal.SIGTERM
assert subprocess.run("kill -KILL $$", shell=True).returncode == -signal.SIGKILL
os.kill(others, 0)
""",
    "a call that is begun anew after signals": """
is_interrupted()
signal.siginterrupt(signal.SIGALRM, False)
while is_interrupted():
    try:
        socket.create_connection(("127.0.0.1", 1))
    except ConnectionRefusedError:
        pass
""",
    "a connection of a Python that checks itself, interrupted": """
from autoddp.isolation.elsewhere.sockets import watch_sockets
watch_sockets(sys.exit)
own = socket.create_server(("127.0.0.1", 0))
def serves():
    while True:
        own.accept()[0].close()
threading.Thread(target=serves, daemon=True).start()
while is_interrupted():
    with socket.create_connection(own.getsockname()) as connection:
        connection.getpeername()
""",
    "a signal that other signals interrupt": """
child = subprocess.Popen(["sleep", "60"])
while is_interrupted():
    child.send_signal(signal.SIGCONT)
child.kill()
""",
    "a datagram of a shell for itself": """
own = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
own.bind(("127.0.0.1", 0))
assert sh(f"bash -c 'echo hello >/dev/udp/localhost/{own.getsockname()[1]}'") == 0
assert own.recv(9) == b"hello\\n"
""",
    "many threads": """
threads = [threading.Thread(target=sends, args=('SOCK_STREAM', 'AF_INET', ('127.0.0.1', 1))) for _ in range(8)]
for thread in threads: thread.start()
for thread in threads: thread.join()
""",
}

READS = 1 + 1 + 2 + 1
"""How often `PASSES` reach the server outside."""
IN_C = """
#include <arpa/inet.h>
#include <stdlib.h>
#include <unistd.h>
int main(int count, char **words) {
    struct sockaddr_in place = {.sin_family = AF_INET, .sin_port = htons(atoi(words[1]))};
    inet_pton(AF_INET, "127.0.0.1", &place.sin_addr);
    int end = socket(AF_INET, SOCK_STREAM, 0);
    return connect(end, (void *)&place, sizeof place) || write(end, "weights", 7) != 7;
}
"""


def run_all(folder: Path) -> None:
    """Run all cases, in one process."""
    aws = folder / "path" / "aws"
    aws.parent.mkdir()
    aws.write_text(f"#!/bin/sh\necho $* >>{folder}/ran\n")
    aws.chmod(0o755)
    (folder / "compiled.c").write_text(IN_C)
    compiled = folder / "compiled"
    subprocess.run(["cc", "-o", str(compiled), str(folder / "compiled.c")], check=True)
    cases = {name: START + code for name, (code, _) in ENDS.items()}
    cases |= {name: START + code for name, code in PASSES.items()}
    cases["nobody hears it"] = cases["a program in C"]
    run = subprocess.run(
        [sys.executable, str(ROOT / "tests" / "isolation" / "watched_programs.py")],
        input=json.dumps(cases),
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "COMPILED": str(compiled),
            "PATH": f"{aws.parent}{os.pathsep}{os.environ['PATH']}",
        },
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr
    (folder / "told").write_text(run.stdout)


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Told:
    """What became of each case."""
    folder = once(tmp_path_factory, "held-calls", run_all)
    answers, outside = map(json.loads, (folder / "told").read_text().splitlines()[-2:])
    port, others, room, reached, by_path, lives = outside
    ran = (folder / "ran").read_text().splitlines()
    return Told(answers, ran, {"PORT": str(port), "OTHERS": str(others), "FOLDER": room}, reached, by_path, lives)


@dataclass(frozen=True)
class Told:
    """What became of each case."""

    answers: dict[str, tuple[str, int]]
    """Why tuning would have ended, and the exit code."""
    ran: list[str]
    """The words with which the program `aws` was started."""
    names: dict[str, str]
    """What stands for the port, the process and the folder in `ENDS`."""
    reached: int
    """How often the server outside was reached, and the one with a path."""
    by_path: int
    lives: bool
    """Whether the process outside lives."""


@pytest.mark.parametrize("name", ENDS)
def test_what_ends_tuning(name: str, told: Told) -> None:
    why = ENDS[name][1]
    for mark, value in told.names.items():
        why = why.replace(mark, value)
    said, code = told.answers[name]
    assert (said, code) == (why, -signal.SIGKILL)


@pytest.mark.parametrize("name", PASSES)
def test_what_does_not(name: str, told: Told) -> None:
    assert told.answers[name] == ["", 0]


def test_an_attempt_ends_where_nobody_hears_why(told: Told) -> None:
    """Its program would wait for ever."""
    assert told.answers["nobody hears it"] == ["", -signal.SIGKILL]


def test_nothing_outside_was_changed(told: Told) -> None:
    assert told.lives
    assert told.ran == ["s3 ls s3://b", "s3 cp s3://b/x .", "--version"]
    assert told.by_path == 0
    assert told.reached == READS


@pytest.mark.parametrize(
    ("line", "known"),
    [
        ("id -u", "id reads"),
        ("squeue -u me", "squeue reads"),
        ("aws s3 cp s3://b/k -", "aws reads"),
        ("aws s3 cp k s3://b/k", "aws changes"),
        ("python3 -S /sdk/lib/gcloud.py storage cat gs://b/k", "gcloud.py reads"),
        ("python3 -Im azure.cli storage blob download", "az reads"),
        ("python3 -Im azure.cli storage blob upload", "az changes"),
        ("java -Dx org.apache.hadoop.fs.FsShell -cat /x", "hdfs reads"),
        ("java -Dx org.apache.hadoop.fs.FsShell -put x /x", "hdfs changes"),
        ("ffmpeg -i http://store.invalid/x.mp4 out.mp4", "ffmpeg reads"),
        ("ffmpeg -i x.mp4 rtmp://store.invalid/live", "ffmpeg changes"),
        ("uv pip install x", "uv reads"),
        ("uv publish", "uv changes"),
        ("perl /usr/bin/slackcat x", "slackcat changes"),
        ("/bin/busybox crontab x", "crontab changes"),
        ("busybox sh -c git", ""),
        ("busybox", ""),
        ("bash -c git", ""),
        ("bash -lc /usr/bin/aws", ""),
        ("train curl", ""),
        ("train /runs/wandb", ""),
        ("train -m wandb", ""),
        ("python -I ./hf.py", ""),
        ("cp -r /data/code /out", ""),
    ],
)
def test_a_program_that_is_known(line: str, known: str) -> None:
    found = tool_of(line.split())
    says = "" if found is None else f"{found.name} {'changes' if found.tool.changes(found.arguments) else 'reads'}"
    assert says == known


PARENTS_END = """
import os, signal
from autoddp.isolation.elsewhere import own
from autoddp.isolation.elsewhere.known import starters_of
from autoddp.isolation.kernel.syscalls import adopt_orphans
adopt_orphans()
own.count_below(os.getpid())
signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # who ends is gone at once
for _ in range(200):
    reads, writes = os.pipe()
    parent = os.fork()
    if parent == 0:
        child = os.fork()
        if child == 0:
            signal.pause()
        os.write(writes, str(child).encode())
        os._exit(0)
    child = int(os.read(reads, 20))
    try:
        while own.parent_of(child) == parent:
            list(starters_of(child))
    finally:
        os.kill(child, signal.SIGKILL)
    os.close(reads)
    os.close(writes)
"""


def test_a_starter_that_ends_while_it_is_looked_at_hides_nothing() -> None:
    """A program that it has left behind, as in `(renice 5 123 &)`, passed as one that had ended itself."""
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", PARENTS_END], env=env, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
