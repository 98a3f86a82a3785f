"""Which programs change something elsewhere, by their words: one line a case."""

from __future__ import annotations

import os
import shlex
import subprocess

import pytest

from autoddp.isolation.elsewhere.known import tool_of
from autoddp.isolation.elsewhere.tools import BY_NAME, TOOLS

CHANGES = r"""
aws s3 cp f s3://b/k
aws --profile p s3 sync d s3://b --acl public
aws s3 rm s3://b/k
/usr/local/bin/aws s3api put-object --bucket b
git -C d push
curl -T f https://store.invalid/f
curl -XDELETE https://store.invalid/f
curl -d @x https://hooks.slack.com/x
wget --post-data=a http://store.invalid/
python -m awscli s3 cp f s3://b
rsync -av d host:/p
scp -P 22 f host:p
ssh host rm x
nvidia-smi -r
nvidia-smi -i 0 -pl 300
nvidia-smi --gpu-reset -i 0
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
http POST store.invalid a=1
http store.invalid a=1
psql -c 'delete'
aws s3 mv s3://b/k x
curl --json '{}' store.invalid
shutdown now
rclone delete remote:x
git lfs push origin main
s5cmd cp f s3://b
aws s3 cp --recursive d s3://b
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
nvidia-smi -i 0 --persistence-mode=1
nvidia-smi --compute-mode=EXCLUSIVE_PROCESS
nvidia-smi compute-policy -i 0 --set-timeslice=2
nvidia-smi --accounting-mode=1
nvidia-smi --clear-accounted-apps
dcgmi profile --pause
dcgmi profile -i 0 --resume
scp f host:
gh release create v1
tmux new-session -d -s tb 'python watch.py'
tmux -L mine send-keys -t tb 'rm x' Enter
tmux kill-server
screen -dmS tb python watch.py
zellij run -- python watch.py
dtach -n s python watch.py
at now
batch
atrm 3
systemd-run --user python watch.py
systemd-notify --ready
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
ethtool -G eth0 rx 4096
ip link set eth0 mtu 9000
tc qdisc add dev eth0 root fq
nvidia-settings -a [gpu:0]/GPUFanControlState=1
nvpmodel -m 0
jetson_clocks
ipcrm -a
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
renice -n 10 -p 1
renice 10 1
renice +5 -u me
taskset -pc 0-3 1
taskset -p 0xff 1
chrt -b -p 0 1
ionice -c 3 -p 1
prlimit --pid 1 --nofile=9
prlimit --pid=1 --nofile=9
hwclock --systohc
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
git publish-all
git submodule foreach git push
s3fs bucket /mnt -o rootdir=x
git lfs lock weights.bin
git lfs unlock weights.bin
git-lfs lock weights.bin
gsutil cp gs://a/x s3://b/x
gcloud storage cp gs://a/x s3://b/x
rclone copy far:a :s3,env_auth=true:bucket/a
rclone copy far:a my.remote:b
curl -s telnet://metrics.invalid:2003
""".strip().splitlines()

READS = r"""
aws s3 ls s3://b
aws s3 cp s3://b/k here
aws s3 sync s3://b/k here --quiet --exclude x
aws s3api get-object --bucket b --key k f
git commit -m push
git stash push
git pull
git clone https://x
curl https://store.invalid/f -o f
curl -X POST http://localhost:1/x -d 1
wget -q https://store.invalid/f
nvidia-smi
nvidia-smi --query-gpu=name,power.limit --format=csv
nvidia-smi topo -m
nvidia-smi -L
nvidia-smi --query-gpu=compute_mode,persistence_mode --format=csv,noheader --loop=5 --filename=gpus.csv
dcgmi discovery -l
dcgmi profile -l -i 0
squeue -u me
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
gcloud storage cp gs://b/x .
mlflow ui
sysctl -n hw.ncpu
sysctl -a
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
systemctl --user status tb
supervisorctl status
pm2 list
busctl list
code --version
bazel --version
sccache --show-stats
vim -es x
cpupower frequency-info
ethtool -i eth0
ethtool eth0
ip -br addr show
ip route get 10.0.0.1
tc qdisc show
nvidia-settings -q all
nvpmodel -q
mc ls minio/bucket
hg commit -m x
svn update
mount
mount -l
mount -t tmpfs none x
mount --bind a b
mount -o ro,loop image x
gcsfuse -o ro bucket /mnt/bucket
taskset -c 0-3 python train_tokenizer.py
ionice -c 3 python prepare.py
prlimit --nofile=9 python prepare.py
hwclock -r
ifconfig
ifconfig eth0
nmcli device status
swapon --show
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
gh auth git-credential get
glab auth git-credential get
gcloud auth git-helper --account=me get
aws codecommit credential-helper get
sshfs -o uid=1,ro host:/d /mnt/d
git lfs locks
git lfs ls-files
git lfs fetch origin main
rclone copy my.remote:a ./b:c
curl -O ftp://store.invalid/f
""".strip().splitlines()


def changes(line: str) -> str:
    """What a known program changes when it is started with these words."""
    known = tool_of(shlex.split(line))
    assert known is not None
    return known.changes


@pytest.mark.parametrize("line", CHANGES)
def test_changes_something_elsewhere(line: str) -> None:
    assert "changes something outside this run" in changes(line)


@pytest.mark.parametrize("line", READS)
def test_only_reads(line: str) -> None:
    assert changes(line) == ""


def test_processes_of_the_run_may_be_changed() -> None:
    own = ["renice -n 19 {0}", "renice 19 -p {0}", "taskset -p 0x1 {0}", "taskset -cp 0 {0}", "ionice -c3 -p {0}"]
    for line in own:
        assert changes(line.format(os.getpid())) == ""
    with subprocess.Popen(["sleep", "60"]) as child:
        assert changes(f"chrt -b -p 0 {child.pid}") == changes(f"prlimit --pid {child.pid} --nofile=9") == ""
        child.kill()


def test_no_program_is_declared_twice() -> None:
    assert len(BY_NAME) == sum(len(tool.names.split()) for tool in TOOLS)


def test_the_reason_names_the_program_and_no_secret() -> None:
    assert changes("aws s3 cp model.pt s3://b --sse-key secret") == (
        "aws changes something outside this run (aws s3 cp model.pt)"
    )
    assert "secret" not in changes("curl -H 'Authorization: secret' -X PUT https://store.invalid/x?key=secret")


@pytest.mark.parametrize("words", [[], [""], ["-"], ["--"], ["-p"], ["=", "$(", "\0"]])
def test_no_words_are_an_error(words: list[str]) -> None:
    for tool in TOOLS:
        tool.changes(words)
