"""Which command lines change something elsewhere: one line a case, judged as the audit hook judges them."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from autoddp.isolation.elsewhere.commands import judge_shell, judge_words, split
from autoddp.isolation.elsewhere.tools import BY_NAME, TOOLS

CHANGES = r"""
aws s3 cp f s3://b/k
aws --profile p s3 sync d s3://b --acl public
aws s3 rm s3://b/k
env X=1 aws s3 cp f s3://b
/usr/local/bin/aws s3api put-object --bucket b
cd /tmp && git push origin main
git -C d push
echo hi | mail -s done me@x
bash -c "ls; git push"
sh -lc 'env A=1 rclone copy d remote:b'
x=$(curl -X POST http://store.invalid/api -d a=1)
echo "`git push`"
curl -T f https://store.invalid/f
curl -XDELETE https://store.invalid/f
curl -d @x https://hooks.slack.com/x
wget --post-data=a http://store.invalid/
python -m awscli s3 cp f s3://b
rsync -av d host:/p
scp -P 22 f host:p
ssh host rm x
sudo -u me systemctl restart nginx
nvidia-smi -r
nvidia-smi -i 0 -pl 300
nvidia-smi --gpu-reset -i 0
pkill -f train
kill -9 1234
sbatch job.sh
scontrol update x
docker push x
docker run x
kubectl apply -f x
hf upload user/model .
huggingface-cli upload a b
gsutil -m cp d gs://b
gsutil cp gs://a gs://b
mlflow experiments create -n x
wandb sync d
dvc push
timeout 10 aws s3 cp f s3://b
nohup rsync d h: &
find . -name '*.pt' -exec aws s3 cp {} s3://b \;
ls *.pt | xargs -I{} gsutil cp {} gs://b
if true; then git push; fi
trap 'aws s3 sync ckpt s3://b' EXIT; python train.py
function up { git push; }; up
eval "git push"
http POST store.invalid a=1
http store.invalid a=1
psql -c 'delete'
aws s3 mv s3://b/k x
curl --json '{}' store.invalid
shutdown now
rclone delete remote:x
git lfs push origin main
bash -lc "aws s3 sync s3://a/b s3://c/d"
uv run hf upload x y
s5cmd cp f s3://b
poetry run hf upload a b
conda run -n x git push
aws s3 cp --recursive d s3://b
time (git push)
VAR=1 git push
kill 123
docker --context x rm y
rsync --remove-source-files host:a b
curl -sXPOST https://store.invalid
curl -sX POST https://store.invalid/run
curl -fsSX DELETE https://store.invalid/f
curl -sXDELETE https://store.invalid/f
curl -sd@x https://store.invalid
curl -X=PUT store.invalid/x
rclone sync far:a far:b
srun hostname
crontab x
sysctl -w a=b
git -c a=b push
helm install x y
redis-cli flushall
nvidia-smi -mig 1
scp f host:
cat x | ssh host tee y
gh release create v1
tmux new-session -d -s tb 'python watch.py'
tmux -L mine send-keys -t tb 'rm x' Enter
tmux kill-server
screen -dmS tb python watch.py
nohup tmux new -d python watch.py &
zellij run -- python watch.py
dtach -n s python watch.py
at now
echo 'python watch.py' | at now
batch
atrm 3
systemd-run --user python watch.py
systemd-notify --ready
sudo systemd-notify STOPPING=1
systemd-mount /dev/sdb1 /mnt
run0 python watch.py
systemctl --user start tb
crontab -
emacsclient -e '(message "done")'
code model.py
xdg-open report.html
notify-send done
dbus-send --session /x y.z
gdbus call --session -d x -o /x -m y.z
busctl --user call x /x y z
osascript -e 'display dialog "done"'
gnome-terminal -- python watch.py
supervisorctl restart web
pm2 start watch.js
pueue add python watch.py
nvim --server s --remote x
logger done
launchctl load x
bazel build //x
sccache gcc -c x.c
nvidia-cuda-mps-control -d
sudo cpupower frequency-set -g performance
ethtool -G eth0 rx 4096
ip link set eth0 mtu 9000
tc qdisc add dev eth0 root fq
nvidia-settings -a [gpu:0]/GPUFanControlState=1
nvpmodel -m 0
jetson_clocks
ipcrm -a
sshpass -p word scp f me@host:
sshpass -f file rsync -a d host:d
aws-vault exec dev -- aws s3 cp f s3://b
busybox wget --post-data=a http://store.invalid/
mc cp f minio/bucket
hg push
svn ci -m x
ssh-copy-id host
xrdcp last.pt root://eos.invalid//u/last.pt
gfal-copy file:///d/last.pt davs://store.invalid/last.pt
bbcp last.pt host:/p
irsync -r ckpt i:ckpt
iput last.pt
hsi put last.pt
htar -cvf ckpt.tar ckpt
smbclient //nas/share -c 'put last.pt'
mosquitto_pub -t loss -m 1
lpr plot.pdf
wall done
gcsfuse bucket /mnt/bucket
sshfs host:/d /mnt/d
mount -t nfs host:/d /mnt/d
mount /dev/sdb1 /mnt
sudo mount -o rw host:/d /mnt/d
renice -n 10 -p 1
renice 10 1
renice +5 -u me
taskset -pc 0-3 1
taskset -p 0xff 1
chrt -b -p 0 1
ionice -c 3 -p 1
prlimit --pid 1 --nofile=9
prlimit --pid=1 --nofile=9
date -s 12:00
date --set=12:00
hwclock --systohc
hostname me
ifconfig eth0 mtu 9000
nmcli con up x
swapon /swap
tuned-adm profile throughput-performance
b2 upload-file bucket models/best.pt
swift upload bucket models/best.pt
oci os object put -bn b --file models/best.pt
oci os object bulk-upload -bn b --src-dir models
ibmcloud cos object-put --bucket models --key best.pt --body best.pt
mcli mirror models s3/b
swift post models
az storage blob upload -c b -f list.txt
gcloud storage cp filelist.txt gs://b
aws s3 cp get-data.py s3://b/
consul kv put training/status running
vault write secret/targets a=b
gh issue comment 12 --body "status: started"
gh workflow run status.yml
docker run -v /data:/data image python lstm.py
modal run targets.py
echo a 1 | nc prod-logs.internal 2003
docker kill listener
virsh destroy listener
gh repo archive viewer
gh label clone owner/other
az ml job cancel --name list-files
gcloud compute instances reset listener
nomad job dispatch widget-train
fly apps destroy budget-app
sky down budget-run
mc anonymous set public minio/bucket
oras manifest delete host/image:1
hostname -F name.txt
git publish-all
git submodule foreach git push
rsync -a ckpt "$(cat where)"
for host in a b; do scp f $host; done
aws s3 cp s3://a/x "$(cat where)"
renice -n 10 -p $(pgrep -f train)
s3fs bucket /mnt -o rootdir=x
echo a 1 > /dev/tcp/graphite.invalid/2003
bash -c 'exec 3<>/dev/tcp/10.0.0.1/2003; echo a 1 >&3'
echo 'loss:1|g' >"/dev/udp/$STATSD_HOST/8125"
""".strip().splitlines()

READS = r"""
aws s3 ls s3://b
aws s3 cp s3://b/k here
aws s3 sync s3://b/k here --quiet --exclude x
aws s3api get-object --bucket b --key k f
git commit -m push
git stash push
git status && git log | head
git pull
git clone https://x
curl https://store.invalid/f -o f
curl -sSL https://store.invalid/f | tar xz
curl -X POST http://localhost:1/x -d 1
wget -q https://store.invalid/f
nvidia-smi
nvidia-smi --query-gpu=name,power.limit --format=csv
nvidia-smi topo -m
nvidia-smi -L
squeue -u me
scontrol show hostnames $SLURM_NODELIST
rsync -av a/ b/
rsync host:/p .
xrdcp root://eos.invalid//u/f .
irsync i:data data
hsi get data.tar
htar -xvf data.tar
smbclient //nas/share -c 'get data.tar'
scp -P 22 host:f .
hf download user/model
gsutil cp gs://b/k .
kubectl get pods
docker ps -a
kill -0 123
python -m pip list
python -c "print(1)"
bash -c "echo aws"
ls -la && rm x
echo 'git push'
gcloud storage cp gs://b/x .
mlflow ui
ninja -j4
gcc -o x x.c
uname -a
lsb_release -a
sysctl -n hw.ncpu
sysctl -a
ldconfig -p
which git
git lfs pull
kaggle datasets download x/y
ssh -V
aws --version
crontab -l
poetry run python x.py
kubectl -n x get pods
docker --version
rclone copy far:a here
s3cmd get s3://b/k
nc -z host 22
redis-cli --version
cp a b; rm -rf c; mv d e
make -j2 && ./a.out
hostname; lscpu; numactl -s
conda run -n x python y.py
gh pr view 1
curl -I https://store.invalid
curl -X GET https://store.invalid
curl -sX GET https://store.invalid
curl -H"X-Key: k" -sLo f https://store.invalid/f
tmux ls
tmux has-session -t tb
tmux display-message -p '#S'
screen -ls
zellij list-sessions
atq
systemctl --user status tb
supervisorctl status
pm2 list
busctl list
code --version
bazel --version
sccache --show-stats
nohup python watch.py &
trap 'rm -rf scratch' EXIT
trap cleanup EXIT INT
trap - EXIT
function up { ls; }; up
setsid sh -c 'python watch.py'
vim -es x
cpupower frequency-info
ethtool -i eth0
ethtool eth0
ip -br addr show
ip route get 10.0.0.1
tc qdisc show
nvidia-settings -q all
nvpmodel -q
sshpass -p word scp host:f .
mc ls minio/bucket
hg commit -m x
svn update
mount
mount -l
mount -t tmpfs none x
mount --bind a b
mount -o ro,loop image x
gcsfuse -o ro bucket /mnt/bucket
renice -n 19 $$
renice -n 19 -p $$
taskset -c 0-3 python train_tokenizer.py
taskset -cp 0-3 $$
timeout 1 bash -c '</dev/tcp/host/22'
(echo > /dev/tcp/127.0.0.1/1) &>/dev/null
ionice -c 3 python prepare.py
prlimit --nofile=9 python prepare.py
date +%s
date +model-step-%H
date -d yesterday +%F
date
hwclock -r
hostname
hostname -I
ifconfig
ifconfig eth0
nmcli device status
swapon --show
mpirun -np 2 python prepare.py
b2 ls bucket
oci os object list -bn b
az storage blob download -c b -n models/x -f x
gcloud compute instances list
aws s3api list-objects-v2 --bucket b
consul kv get job/ready
gh -R owner/name issue list
gh run list
docker image inspect x
nc -vzw1 host 22
az vm list -o table
vault kv get secret/x
nomad job status x
sky status
ngc registry model download-version x
aws sts get-caller-identity
git submodule update --init
rsync -a "$(cat where)" here
hostname --fqdn
sshfs -o uid=1,ro host:/d /mnt/d
""".strip().splitlines()


@pytest.mark.parametrize("line", CHANGES)
def test_changes_something_elsewhere(line: str) -> None:
    assert "changes something outside this run" in judge_shell(line)


@pytest.mark.parametrize("line", READS)
def test_only_reads(line: str) -> None:
    assert judge_shell(line) == ""


def test_processes_of_the_run_may_be_changed() -> None:
    for line in (
        "renice -n 19 {0}",
        "renice 19 -p {0}",
        "taskset -p 0x1 {0}",
        "taskset -cp 0 {0}",
        "ionice -c3 -p {0}",
    ):
        assert judge_shell(line.format(os.getpid())) == ""
    with subprocess.Popen(["sleep", "60"]) as child:
        assert judge_shell(f"chrt -b -p 0 {child.pid}; prlimit --pid {child.pid} --nofile=9") == ""
        child.kill()


MAKEFILE = """\
BUCKET ?= s3://b
SYNC := aws s3 sync
include more.mk
.PHONY: all up
all: data.bin
\tpython prepare.py
data.bin: prepare.py ; echo $@
up: pack
\t@echo uploading
\t-$(SYNC) ckpt $(BUCKET) \\
\t\t--quiet
pack:
\ttar cf x.tar ckpt
%.gz: %
\tcurl -T $< https://store.invalid/
twice: all
\t$(MAKE) up
loop: loop
\tfor i in 1 2; do echo $$i; done
"""


@pytest.mark.parametrize(
    "line",
    [
        "make up",
        "make -s -j 4 up",
        "make -C . BUCKET=s3://c up",
        "cd .. && make -C {folder} -f Makefile up",
        "make --directory={folder} twice",
        "make x.gz",
        "make release",
        "nice -n 19 make up",
        "sh -c 'make all up'",
    ],
)
def test_what_make_would_run_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str) -> None:
    (tmp_path / "Makefile").write_text(MAKEFILE)
    (tmp_path / "more.mk").write_text("release:\n\tgit push --tags\n")
    monkeypatch.chdir(tmp_path)
    assert "changes something outside this run" in judge_shell(line.format(folder=tmp_path))


@pytest.mark.parametrize(
    "written",
    [
        "HEAD := $(shell git push && git rev-parse HEAD)",
        "HEAD ::= ${{shell {up}}}",
        "HEAD != {up}",
        "HEAD := $(strip $(shell (cd . && {up})))",
        "$(shell {up})",
        "ifeq ($(shell {up}),)\nendif",
        "TELL = $(shell {up})\n$(info $(TELL))",
        "TELL = $(shell {up})\nall: ; echo $(TELL)",
        "all: ; @echo $(word 1,$(shell {up}))",
        "all: ; @echo ${{shell true}} ${{shell {up}}}",
        "UP = {up}\nexport HEAD := $(shell $(UP))",
    ],
)
def test_what_make_runs_while_it_reads_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: str) -> None:
    (tmp_path / "Makefile").write_text(f"{written.format(up='aws s3 sync ckpt s3://b')}\nlast:\n\ttrue\n")
    monkeypatch.chdir(tmp_path)
    assert "changes something outside this run" in judge_shell("make")


@pytest.mark.parametrize(
    "written",
    [
        "HEAD := $(shell git rev-parse HEAD)\nCPUS != nproc\nall: ; echo $(HEAD) $(shell date)",
        "TELL = $(shell aws s3 sync ckpt s3://b)",  # nothing uses it
        "# $(shell aws s3 sync ckpt s3://b)",
    ],
)
def test_what_make_only_asks_the_shell_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: str) -> None:
    (tmp_path / "Makefile").write_text(f"{written}\nlast:\n\ttrue\n")
    monkeypatch.chdir(tmp_path)
    assert judge_shell("make") == ""


@pytest.mark.parametrize("line", ["make", "make pack all", "make loop", "make -n up", "make none", "make -C none up"])
def test_what_make_would_not_run_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str) -> None:
    (tmp_path / "Makefile").write_text(MAKEFILE.replace("include more.mk\n", ""))
    monkeypatch.chdir(tmp_path)
    assert judge_shell(line) == ""


@pytest.mark.parametrize("where", ["", "hooks"])
def test_what_git_would_run_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    if where:
        subprocess.run(["git", "-C", str(tmp_path), "config", "core.hooksPath", where], check=True)
    hook = tmp_path / (where or ".git/hooks") / "post-commit"
    hook.parent.mkdir(exist_ok=True)
    hook.write_text(f"#!/bin/sh\n{UP}")
    (tmp_path / "inside").mkdir()
    monkeypatch.chdir(tmp_path / "inside")
    assert judge_shell("git commit -am x") == ""  # it is not executable, so git leaves it out
    hook.chmod(0o755)
    for line in ("git commit -am x", "cd / && git -C {0} commit -m x", "git -c a.b=c commit"):
        assert "aws changes something outside this run" in judge_shell(line.format(tmp_path))
    assert judge_shell("git add x; git status; git checkout y") == ""


@pytest.mark.parametrize("where", ["main/.git/hooks", "home/hooks"])
def test_what_git_would_run_in_a_worktree_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    """The hooks of the repository that it belongs to, or those that the user has for all repositories."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    commit = ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-q", "--allow-empty", "-m", "x"]
    for words in (["init", "-q", "main"], ["-C", "main", *commit], ["-C", "main", "worktree", "add", "-q", "../work"]):
        subprocess.run(["git", *words], cwd=tmp_path, check=True)
    hook = tmp_path / where / "post-commit"
    hook.parent.mkdir(parents=True, exist_ok=True)
    hook.write_text(f"#!/bin/sh\n{UP}")
    hook.chmod(0o755)
    if where == "home/hooks":
        (tmp_path / "home" / ".gitconfig").write_text("[core]\n\thooksPath = ~/hooks\n")
    monkeypatch.chdir(tmp_path / "work")
    for line in ("git commit -am x", "git cherry-pick abc", f"cd / && git -C {tmp_path}/work commit -m x"):
        assert "aws changes something outside this run" in judge_shell(line)
    assert judge_shell("git add x; git status; git checkout y") == ""


def test_no_program_is_declared_twice() -> None:
    assert len(BY_NAME) == sum(len(tool.names.split()) for tool in TOOLS)


def test_the_reason_names_the_program_and_no_secret() -> None:
    assert judge_shell("aws s3 cp model.pt s3://b --sse-key secret") == (
        "aws changes something outside this run (aws s3 cp model.pt)"
    )
    assert "secret" not in judge_shell("curl -H 'Authorization: secret' -X PUT https://store.invalid/x?key=secret")


def test_a_shell_script_is_read(tmp_path: Path) -> None:
    (tmp_path / "up.sh").write_text("#!/usr/bin/env bash\nset -e\nif true; then\n  aws s3 sync . s3://b\nfi\n")
    (tmp_path / "harmless.sh").write_text("#!/bin/sh\necho aws s3 sync\n")
    assert judge_words(["bash", "-e", "up.sh"], str(tmp_path))
    assert judge_words(["./up.sh"], str(tmp_path))
    assert judge_words([str(tmp_path / "up.sh")])
    assert not judge_words(["./harmless.sh"], str(tmp_path))
    assert not judge_words(["./absent.sh"], str(tmp_path))


UP = "aws s3 sync ckpt s3://b\n"
REACHED = r"""
cd scripts && ./up.sh
cd scripts; . ./up.sh
cd scripts/.. && cd scripts && bash up.sh
(cd scripts && ls); cd scripts; sh ./up.sh
if cd scripts; then ./up.sh; fi
bash -c ". scripts/up.sh"
source scripts/up.sh
. scripts/up.sh
bash ~/bin/up.sh
~/bin/up.sh
bash $DIR/up.sh
bash "${DIR}/up.sh"
bash ${NOWHERE:-scripts}/up.sh
"$HOME/bin/up.sh"
cd ~/bin && ./up.sh
cd $HOME && bin/up.sh
cd; bin/up.sh
UP=scripts/up.sh; bash $UP
export UP=scripts/up.sh && $UP
CMD="bash scripts/up.sh" && $CMD -v
sync-ckpt
env sync-ckpt
nohup sync-ckpt &
timeout 10 sync-ckpt
nice -n 5 scripts/up.sh
flock /tmp scripts/up.sh
sh scripts/through.sh
cd scripts && sh through.sh
scripts/wrap.sh git push
scripts/wrap.sh python -I push.py
bash -c '"$@"' name git push
DEST=s3://b; aws s3 cp s3://a $DEST
bash "$(pwd)/scripts/up.sh"
bash `pwd`/scripts/up.sh
. scripts/settings.sh && cd $UPLOADS && ./up.sh
sh scripts/apostrophe.sh
sh scripts/broken.sh
bash <<< "git push"
echo "# no comment"; git push
""".strip().splitlines()
"""Lines that reach the script up.sh, or what it does, in the folder that `scripts` makes."""


@pytest.fixture
def scripts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with shell scripts, which is the current one; some are in the home folder and on PATH."""
    files = {
        "scripts/up.sh": f"#!/bin/bash\n{UP}",
        "scripts/harmless.sh": "#!/bin/bash\necho git push\n",
        "scripts/through.sh": 'HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"\ncd /\n"$HERE"/up.sh\n',
        "scripts/root.sh": '#!/bin/sh\ncd "$(dirname "$0")/.."\nexport PYTHONPATH=$(pwd):$PYTHONPATH\n'
        ". scripts/harmless.sh\n"
        "python train_tokenizer.py\n",
        "scripts/wrap.sh": '#!/bin/sh\nset -e\nexec "$@"\n',
        "scripts/apostrophe.sh": f"# don't\necho \"it's\"\n{UP}",
        "scripts/broken.sh": f"cat <<END\nit's\nEND\n{UP}",
        "scripts/settings.sh": "UPLOADS=scripts\n",
        "home/bin/up.sh": f"#!/bin/bash\n{UP}",
        "path/sync-ckpt": f"#!/usr/bin/env bash\n{UP}",
        "path/tool": "#!/usr/bin/env python3\nprint(1)\n",
        "path/alone": "#!/usr/bin/python3 -I\nprint(1)\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("DIR", str(tmp_path / "scripts"))
    monkeypatch.setenv("PATH", f"{tmp_path}/path{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv("PYTHONPATH", raising=False)
    return tmp_path


@pytest.mark.parametrize("line", REACHED)
def test_a_shell_script_is_found(scripts: Path, line: str) -> None:
    assert judge_shell(line), line
    assert judge_words(["sh", "-c", line], str(scripts))


@pytest.mark.parametrize(
    "line",
    [
        "cd scripts && ./harmless.sh",
        "cd scripts && ./absent.sh",
        ". scripts/harmless.sh; source ~/.bashrc; . absent.sh",
        "sh scripts/root.sh",
        "cd scripts && ./root.sh",
        "cd $DIR && make && ./a.out",
        'cd "$(mktemp -d)" && python train.py && ls -la',
        "bash scripts/harmless.sh $NOWHERE",
        "tool --x; which tool",
        "PYTHONPATH=.:$PYTHONPATH python push.py",
        "PYTHONPATH=$(pwd):$PYTHONPATH python push.py",
        'PYTHONPATH="$(dirname $0)/..":$PYTHONPATH python -m push',
        "export PYTHONPATH=$PYTHONPATH:`pwd`; python push.py",
        "PYTHONPATH+=:. python push.py",
        "python -W ignore -u push.py -I -E",
        "python -I --version",
        "python -Em awscli s3 ls",
        "sudo ls; env -i ls; env -u PYTHONPATH ls",
        "env X=1 python push.py",
        "conda run -n x python push.py",
        "for f in *.pt; do gzip $f; done",
        "case $x in a) ls;; esac",
        "scripts/wrap.sh python push.py",
        "nohup cp scripts/up.sh elsewhere",
        "echo x > $NOWHERE/x 2>&1; ls < $NOWHERE/y",
        "ls # at last; `git push`",
        "/usr/bin/ldd /usr/bin/env",
    ],
)
def test_what_passes_all_the_same(scripts: Path, line: str) -> None:
    assert judge_shell(line) == ""


@pytest.mark.parametrize(
    "line",
    ["bash $NOWHERE/up.sh", "cd $NOWHERE && ./up.sh", "cd $(mktemp -d); sh up.sh", "source $(find . -name x)", "$NO/x"],
)
def test_a_script_that_only_the_shell_can_find(scripts: Path, line: str) -> None:
    assert "known to the shell alone" in judge_shell(line)


@pytest.mark.parametrize(
    "line",
    [
        "PYTHONPATH=. python push.py",
        "export PYTHONPATH=/x; python push.py",
        "PYTHONPATH=/x; cd scripts; python3.11 push.py",
        "unset PYTHONPATH && python -m push",
        "python -I push.py",
        "python -u -E push.py",
        "python -Sc 'print(1)'",
        "python -Im push",
        "python -W ignore -I push.py",
        "env -i python push.py",
        "env -u PYTHONPATH python push.py",
        "env - PATH=/bin python push.py",
        "env PYTHONPATH=. python push.py",
        "sudo python push.py",
        "sudo -E nohup python push.py",
        "bash -c 'PYTHONPATH=. python push.py'",
        "python2 push.py",
        "alone --x",
        "PYTHONPATH=. tool",
        "sudo -u me tool",
        "scripts/wrap.sh env -i python push.py",
    ],
)
def test_a_python_without_our_checks(scripts: Path, line: str) -> None:
    assert "would run without autoddp's checks" in judge_shell(line)


def test_the_environment_of_a_child_is_repaired_before_it_is_judged(scripts: Path) -> None:
    assert not judge_words(["python", "push.py"], env={})
    assert not judge_words(["tool"], env={"PATH": f"{scripts}/path", "PYTHONPATH": "."})
    assert judge_words(["sync-ckpt"], env={"PATH": f"{scripts}/path"})
    assert not judge_words(["sync-ckpt"], env={"PATH": "/nowhere"})
    assert judge_words(["sh", "-c", "bash $X"], env={b"X": b"scripts/up.sh"})
    assert judge_words(["./up.sh"], f"{scripts}/scripts")


@pytest.mark.parametrize(
    "line",
    [
        "echo 1 > /proc/sys/none",
        "bash scripts/set.sh",
        "cd /proc/sys/vm; echo 1 >swappiness",
        "cd /proc/sys && echo 1 | sudo tee -a vm/swappiness >/dev/null",
        "cd /proc/sys/vm && dd of=swappiness",
        "WHERE=/sys/kernel; cp harmless $WHERE/none",
        "cd /proc/self; echo 1 &> ../sys/vm/swappiness",
        "xterm -e 'echo 1 > /sys/none'",
    ],
)
def test_a_setting_of_the_machine(scripts: Path, line: str) -> None:
    (scripts / "scripts" / "set.sh").write_text("#!/bin/sh\nNAME=none\nif true; then echo 1 >/sys/$NAME; fi\n")
    assert "which all programs of this machine share" in judge_shell(line)
    assert "which all programs of this machine share" in judge_words(["sh", "-c", line])


def test_a_setting_may_be_read(scripts: Path) -> None:
    assert not judge_shell("cd /proc/sys/vm && cat swappiness 2>&1 >/dev/null; cp swappiness /tmp; cd /; echo 1 >log")
    assert not judge_shell("cd /sys; tee ../tmp/x < kernel # > /sys/none")


def test_a_script_that_runs_itself_comes_to_an_end(tmp_path: Path) -> None:
    (tmp_path / "loop.sh").write_text("#!/bin/sh\n./loop.sh\n./loop.sh\n")
    assert not judge_words(["./loop.sh"], str(tmp_path))


@pytest.mark.parametrize("text", ["", "'", '"$(', "$(", "`", ";;;", "&&", "a='", "bash -c", "env", "kill", "git", "\0"])
def test_broken_lines_are_no_error(text: str) -> None:
    judge_shell(text)


def test_commands_of_a_line() -> None:
    assert list(split("a 1 && b '2 3' | c; (d)\ne")) == [["a", "1"], ["b", "2 3"], ["c"], ["d"], ["e"]]
    assert ["d"] in list(split('a "b $(d) c"'))
    assert list(split("a >b 2>&1; >>c d <<E;>|e")) == [[">", "b"], ["a", "2"], [">>", "c"], ["d"], [">|", "e"]]
    assert list(split("a 1 > b 2; c &>> d < e")) == [[">", "b"], ["a", "1", "2"], ["&>>", "d"], ["<", "e"], ["c"]]
