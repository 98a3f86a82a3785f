"""Programs that change something elsewhere, and which of their commands only read. Adding a program is one entry."""

from __future__ import annotations

from autoddp.isolation.elsewhere.tool import (
    Tool,
    downloads,
    httpie_writes,
    kills_others,
    sets_gpu,
    transfers,
    web_writes,
)

# fmt: off
TOOLS = (
    # Stores of objects. `copies` from there to here are downloads.
    Tool("aws", "s3 ls*;s3 presign*;* get-*;* list-*;* describe-*;* head-*;configure list*;sts *;sso *",
         judge=downloads, copies="cp sync", remote=r"s3://", valued="--profile --region --endpoint-url --output"),
    Tool("gsutil", "ls*;cat *;du *;stat *;hash *;version*", judge=downloads, copies="cp rsync", remote=r"gs://",
         valued="-o -u -h"),
    Tool("gcloud", "*list*;*describe*;auth print-*;config get*;info*;version*;storage ls*;storage cat*",
         judge=downloads, copies="cp rsync", remote=r"gs://", valued="--project --account"),
    Tool("bq", "ls*;show*;head*"),
    Tool("az", "* list*;* show*;* download*;account get-access-token*;version*"),
    Tool("azcopy", "list*;env*", judge=downloads, copies="copy cp sync", remote=r"https?://"),
    Tool("rclone", "ls*;cat *;size *;check *;about *;version*;config *;tree *", judge=downloads,
         copies="copy sync copyto", remote=r"[\w-]+:", valued="--config"),
    Tool("s3cmd", "ls*;get *;info *;du *", valued="-c --config"),
    Tool("s5cmd", "ls*;cat *;du *;head *", judge=downloads, copies="cp sync", remote=r"s3://",
         valued="--endpoint-url --profile"),
    Tool("ossutil ossutil64 coscli coscmd obsutil", "ls*;stat *;cat *;du *;list*", judge=downloads, copies="cp sync",
         remote=r"(oss|cos|obs)://"),
    Tool("b2 oci swift ibmcloud bcecmd mcli", "*ls*;*list*;*download*;*get*;stat*"),
    Tool("hdfs hadoop", "* -ls*;* -cat*;* -get*;* -copyToLocal*;* -test*;* -du*;* -count*;* -stat*;* -tail*;* -text*;"
         "* -df*;* -find*;* -head*;version*;classpath*;getconf*", whole=True),
    # Other machines.
    Tool("rsync", judge=transfers, remote=r"([^/]*:|rsync://)", valued="-e -f --rsh --exclude --include --port"),
    Tool("scp", judge=transfers, remote=r"([^/]*:|scp://)", valued="-P -i -o -F -l -c -S -J"),
    Tool("ssh sftp pdsh pssh parallel-ssh clush lftp ftp tftp mosh", "-V;-G *;-Q *", whole=True),
    Tool("ansible ansible-playbook salt terraform tofu pulumi packer vagrant"),
    Tool("curl", judge=web_writes),
    Tool("wget wget2", judge=web_writes),
    Tool("http https xh", judge=httpie_writes),
    Tool("nc ncat netcat socat telnet", "*-z*;*-l*;*-k*", whole=True),
    Tool("mail mailx sendmail mutt msmtp swaks s-nail"),
    # Model hubs, repositories, trackers.
    Tool("hf huggingface-cli", "download*;scan-cache*;cache*;env*;version*;whoami*;auth whoami*;auth list*;repo list*;"
         "models *;datasets *;spaces *"),
    Tool("modelscope kaggle ngc", "*download*;*list*;*info*;*files*;*status*"),
    Tool("git", writes="push*;send-email*;lfs push*;svn dcommit*;p4 submit*;annex copy*;annex sync*;subtree push*",
         valued="-C -c --git-dir --work-tree --namespace"),
    Tool("git-lfs", writes="push*"),
    Tool("gh glab hub", "* view*;* list*;* status*;* clone*;* download*;* diff*;* checkout*;search *;status*"),
    Tool("dvc", writes="push*;exp push*;exp remove*;gc*;studio *"),
    Tool("twine npm cargo poetry flit hatch", writes="upload*;publish*"),
    Tool("wandb wb", "status*;offline*;disabled*;off*;docker-*;server *;verify*"),
    Tool("mlflow", "* list*;* search*;* get*;* describe*;doctor*;artifacts download*;server*;ui*"),
    Tool("comet neptune swanlab clearml-agent clearml-task clearml-data clearml-session", "*download*;*list*;watch*"),
    # Clusters and containers.
    Tool("sbatch srun salloc scancel sattach sbcast strigger"),
    Tool("scontrol", "show *;ping*;version*;write *"),
    Tool("sacctmgr", "show *;list *"),
    Tool("bsub bkill bstop bresume bmod brequeue bswitch qsub qdel qalter qhold qrls qrerun qmove qmod condor_submit "
         "condor_rm condor_hold condor_release oarsub oardel jsub jdel"),
    Tool("flux", "jobs*;job info*;job list*;resource list*;getattr *"),
    Tool("kubectl oc", "get *;describe *;logs *;version*;config view*;config get*;config current*;explain *;top *;"
         "auth can-i*;api-*;cluster-info*;diff *;wait *", valued="-n --namespace --context --kubeconfig"),
    Tool("helm", "list*;ls*;get *;status *;show *;search *;template *;version*;repo list*", valued="-n --namespace"),
    Tool("docker podman nerdctl", "ps*;images*;inspect *;version*;info*;logs *;stats*;top *;search *;* ls*;* inspect *;"
         "* list*;context show*", valued="--context -H --host --config"),
    Tool("docker-compose", "ps*;logs*;config*;version*;images*"),
    Tool("skopeo crane buildah oras", "inspect *;list-tags *;ls *;manifest *;images*;digest *;version*"),
    Tool("ray", "status*;list *;summary *;logs *;memory*;job list*;job status*;job logs*"),
    Tool("sky modal vastai runpodctl dstack", "*status*;*list*;*show*;*logs*;*get*"),
    # Databases.
    Tool("psql pg_restore mysql mariadb mysqladmin mongo mongosh mongoimport redis-cli clickhouse-client cqlsh snowsql "
         "etcdctl influx"),
    # This machine, beyond the script.
    Tool("kill", judge=kills_others),
    Tool("pkill killall killall5 skill"),
    Tool("fuser", writes="*-k*", whole=True),
    Tool("shutdown reboot halt poweroff init telinit"),
    Tool("systemctl", "status*;is-*;list-*;show*;cat *;--version"),
    Tool("service", "* status;--status-all", whole=True),
    Tool("nvidia-smi", judge=sets_gpu),
    Tool("rocm-smi amd-smi xpu-smi hl-smi", writes="*--set*;*--reset*;set *;reset *;*--gpureset*", whole=True),
    Tool("dcgmi", writes="config *--set*;policy *--set*;diag *;group -*", whole=True),
    Tool("sysctl", writes="*-w *;*=*;-p*;*--system*", whole=True),
    Tool("crontab", "-l*", whole=True),
    Tool("at batch systemd-run modprobe rmmod insmod swapoff iptables nft"),
)
# fmt: on
"""What is not named here passes."""

BY_NAME = {name: tool for tool in TOOLS for name in tool.names.split()}

MODULES = {
    "awscli": "aws",
    "awscli.__main__": "aws",
    "huggingface_hub.cli.hf": "hf",
    "huggingface_hub.commands.huggingface_cli": "hf",
    "mlflow": "mlflow",
    "mlflow.cli": "mlflow",
    "wandb": "wandb",
    "dvc": "dvc",
    "twine": "twine",
    "ray.scripts.scripts": "ray",
    "httpie": "http",
}
"""`python -m MODULE` is this program."""
