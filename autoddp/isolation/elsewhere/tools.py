"""Programs that change something elsewhere, and which of their commands only read. Adding a program is one entry.

`Tool.changes` decides by a program's arguments whether it only reads, downloads, or changes something elsewhere.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from autoddp.isolation.elsewhere.own import is_own_process
from autoddp.isolation.elsewhere.requests import READING_METHODS, judge_url

Judge = Callable[["Tool", Sequence[str]], bool]
"""Whether this call, by its arguments, changes something elsewhere."""

_ASKS = ("--help", "--version", "help")  # not -h: for some it names the host


@dataclass(frozen=True)
class Tool:
    """One program, or several of one kind. Without `reads`, `writes` and `judge` every use ends tuning."""

    names: str
    reads: str = ""
    """Commands that pass, separated by `;`: a pattern for each of their first words, options left out.

    All others end tuning, also unknown ones. `* list` is one word of any kind, then "list": not `stop listener`.
    """
    writes: str = ""
    """Or: the only commands that end tuning."""
    judge: Judge | None = None
    """Or: a function that looks at the arguments. Called when no pattern of `reads` matches."""
    copies: str = ""
    """Commands that copy, for `downloads`."""
    remote: str = ""
    """A regular expression of a place elsewhere, for `downloads` and `transfers`."""
    valued: str = ""
    """Options whose value is the next word."""
    whole: bool = False
    """Options count as words, and `writes` is over them too."""

    def changes(self, args: Sequence[str]) -> bool:
        """Whether the program, called with `args`, changes something elsewhere."""
        if not args and (self.reads or self.writes or self.judge):
            return False  # prints its usage
        if args[:1] and args[0] in _ASKS:
            return False
        words = list(args) if self.whole else self.positional(args)
        if any(_begins(words, each.split()) for each in self.reads.split(";") if each):
            return False
        if self.writes:
            return _matches(self.writes, " ".join(words))
        return self.judge(self, args) if self.judge else True

    def positional(self, args: Sequence[str]) -> list[str]:
        """The arguments without options, and without the values of those that are known to have one."""
        found, skip, valued = [], False, self.valued.split()
        for arg in args:
            if skip:
                skip = False
            elif arg.startswith("-") and len(arg) > 1:
                skip = arg in valued
            else:
                found.append(arg)
        return found

    def is_remote(self, place: str) -> bool:
        """Whether `place` is elsewhere."""
        return re.match(self.remote, place) is not None

    def comes_here(self, places: Sequence[str]) -> bool:
        """Whether the first place is elsewhere, and no other one is."""
        remote = [self.is_remote(place) for place in places]
        return remote[:1] == [True] and not any(remote[1:])


def _begins(words: Sequence[str], patterns: Sequence[str]) -> bool:
    return len(words) >= len(patterns) and all(map(fnmatchcase, words, patterns))


def _matches(patterns: str, line: str) -> bool:
    return any(fnmatchcase(line, pattern) or pattern == f"{line} *" for pattern in patterns.split(";") if pattern)


def shown(name: str, args: Sequence[str]) -> str:
    """The first words of a command up to an option: options may be followed by a password."""
    words = [name]
    for arg in args:
        if arg.startswith("-") or len(words) == 4:
            break
        words.append(arg.partition("?")[0])
    return " ".join(words)[:120]


def downloads(tool: Tool, args: Sequence[str]) -> bool:
    """False for `aws s3 cp s3://bucket/x here`: the first place after the verb is elsewhere, and no other one is."""
    words = tool.positional(args)
    verb = next((place for place, word in enumerate(words) if word in tool.copies.split()), None)
    return verb is None or not tool.comes_here(words[verb + 1 :])


def transfers(tool: Tool, args: Sequence[str]) -> bool:
    """False where rsync or scp, which need no verb, only copies to this machine or within it; see `downloads`."""
    words = tool.positional(args)
    return any(map(tool.is_remote, words)) and ("--remove-source-files" in args or not tool.comes_here(words))


_FLAGS = "[#0-46GIJLNSVZfgijknpqsv]"  # options of one letter that take no value, of curl and not of wget either
_METHOD = re.compile(rf"(?:-{_FLAGS}*X|--request|--method)[= ]?(.*)")
_BODY = re.compile(
    rf"-{_FLAGS}*[dFT].*|--data.*|--form.*|--upload-file.*|--json.*|--post-data.*|--post-file.*|--body-.*"
    r"|-[a-zA-Z]*[dFT]|-Q|--quote.*|--mail-.*"
)

_READ_FROM = re.compile(r"(https?|s?ftps?|scp|tftp|file)://", re.IGNORECASE)
"""Protocols by which curl gets something; by telnet:// and others it sends what it is given, such as its input."""


def web_writes(tool: Tool, args: Sequence[str]) -> bool:
    """curl and wget: the rule for HTTP requests decides, by the method, which is POST where a body is given."""
    method, urls, uploads, before = "", [], False, ""
    for arg in args:
        asked, expected = _METHOD.fullmatch(arg), _METHOD.fullmatch(before)
        if expected and not expected[1]:
            method = arg.upper()
        elif asked and asked[1] and not arg.startswith("--request-target"):
            method = asked[1].upper()
        elif arg.startswith("-") and _BODY.fullmatch(arg):
            uploads = True
        elif not arg.startswith("-") and re.match(r"[a-z]+://|[\w-]+(\.[\w-]+)+(:\d+)?(/|$)|localhost", arg):
            urls.append(arg)
        before = arg
    if ("-G" in args or "--get" in args) and not method:
        return False
    method = method or ("POST" if uploads else "GET")
    if not urls:
        return method not in READING_METHODS
    whole = [url if "://" in url else f"http://{url}" for url in urls]
    return any(not _READ_FROM.match(url) or judge_url(method, url) for url in whole)


def streams(tool: Tool, args: Sequence[str]) -> bool:
    """ffmpeg: whether a URL is none that it reads, which stands behind `-i`."""
    return any("://" in word and before != "-i" for before, word in zip(["", *args], args, strict=False))


def httpie_writes(tool: Tool, args: Sequence[str]) -> bool:
    """`http PUT url`, and `http url name=value`, which is a POST."""
    words = tool.positional(args)
    if words and words[0].isupper():
        return words[0] not in READING_METHODS
    return any(re.match(r"[\w-]+:?=[^=]", word) for word in words[1:])


def talks(tool: Tool, args: Sequence[str]) -> bool:
    """nc and its like: with `-z` it only looks whether a port is open, with `-l` and `-k` it waits for others."""
    return not any(re.fullmatch(r"-[a-zA-Z0-9]*[zlk][a-zA-Z0-9]*|--listen|--keep-open", arg) for arg in args)


def changes_others(tool: Tool, args: Sequence[str]) -> bool:
    """renice and its like: whether one of the processes is not the attempt's."""
    pids, asked = [], False
    for arg in args:
        option, _, value = arg.partition("=")
        if arg.startswith("-") and re.fullmatch(_OF_A_PROCESS, option) is not None:
            asked = True
            pids += [value] if value else []
        elif asked and not arg.startswith("-"):
            pids.append(arg)
        elif arg in ("-u", "--user", "-g", "--pgrp", "-P", "--pgid"):
            return True
    if "renice" in tool.names and not asked:
        pids = tool.positional(args)[0 if "-n" in args or "--priority" in args else 1 :]
    elif tool.valued == "":  # taskset and chrt: what is set comes before the process
        pids = pids[-1:]
    return any(pid.isdecimal() and not is_own_process(int(pid)) for pid in pids)


_OF_A_PROCESS = r"-[a-z]*p[a-z]*|--pid"


def mounts(tool: Tool, args: Sequence[str]) -> bool:
    """What is written to a disk, a share or a bucket that the script mounts is real: the overlay does not cover it."""
    kind = next((args[place + 1] for place, arg in enumerate(args[:-1]) if arg in ("-t", "--types")), "")
    options = {each for arg in args for each in re.split("[,=]", arg.removeprefix("-o"))}
    harmless = {*"ro bind rbind --bind --rbind --move --make-private --make-rprivate --read-only -l -r".split()}
    return kind not in ("tmpfs", "ramfs", "proc", "overlay") and not options & harmless


_GPU_SETTINGS = re.compile(
    r"-r|--gpu-reset|-(pl|pm|lgc|rgc|lmc|rmc|ac|rac|c|e|p|mig|am|caa|acp|gtt|cc|fdm)|mig|drain|clocks"
    r"|--(power-limit|lock-|reset-|applications-clocks|ecc-config|multi-instance-gpu|set-|clear-|auto-boost).*|--.*-mode"
)


def sets_gpu(tool: Tool, args: Sequence[str]) -> bool:
    """nvidia-smi: a reset, limits, clocks and modes; its other uses only report."""
    return any(_GPU_SETTINGS.fullmatch(arg.partition("=")[0]) for arg in args)


# fmt: off
TOOLS = (
    # Stores of objects. `copies` from there to here are downloads.
    Tool("aws", "s3 ls*;s3 presign*;* get-*;* list-*;* describe-*;* head-*;configure list*;sts *;sso *;"
         "codecommit credential-helper",
         judge=downloads, copies="cp sync", remote=r"s3://", valued="--profile --region --endpoint-url --output"),
    Tool("gsutil", "ls*;cat *;du *;stat *;hash *;version*", judge=downloads, copies="cp rsync", remote=r"(gs|s3)://",
         valued="-o -u -h"),
    Tool("gcloud gcloud.py", "*s list;*s describe;* *s list;* *s describe;auth list;auth print-*;auth git-helper;"
         "config list;config get*;info*;version*;storage ls*;storage cat*",
         judge=downloads, copies="cp rsync", remote=r"(gs|s3)://", valued="--project --account"),
    Tool("bq bq.py", "ls*;show*;head*"),
    Tool("az", "* list;* show;* * list;* * show;* * download;* * download-batch;account get-access-token;version*"),
    Tool("azcopy", "list*;env*", judge=downloads, copies="copy cp sync", remote=r"https?://"),
    Tool("rclone", "ls*;cat *;size *;check *;about *;version*;config *;tree *", judge=downloads,
         copies="copy sync copyto", remote=r"[^/]*:", valued="--config"),
    Tool("s3cmd", "ls*;get *;info *;du *", valued="-c --config"),
    Tool("s5cmd", "ls*;cat *;du *;head *", judge=downloads, copies="cp sync", remote=r"s3://",
         valued="--endpoint-url --profile"),
    Tool("ossutil ossutil64 coscli coscmd obsutil", "ls*;stat *;cat *;du *;list*", judge=downloads, copies="cp sync",
         remote=r"(oss|cos|obs)://"),
    Tool("ais", "get *;cat *;ls*;show *;object get *;object cat *;bucket ls*;bucket show *"),
    Tool("mc mcli", "ls*;tree *;stat *;cat *;head *;du *;diff *;get *;ping *;ready *;alias *;admin info *"),
    # Mounted places: what is written there is elsewhere.
    Tool("mount", judge=mounts),
    Tool("gcsfuse goofys s3fs ossfs cosfs sshfs mount-s3 blobfuse blobfuse2 curlftpfs mount.nfs mount.cifs mount.davfs",
         judge=mounts),
    Tool("juicefs", "info *;status *;stats *;summary *;version*"),
    Tool("b2", "ls*;get-*;list-*;download-*;file download*;file info*;bucket list*;bucket get*;account get*"),
    Tool("oci", "* * list;* * get;* * head;* * bulk-download"),
    Tool("swift", "list*;stat*;download*"),
    Tool("ibmcloud", "cos object-get;cos object-head;cos objects*;cos buckets;cos list-*;cos download"),
    Tool("bcecmd", "bos ls*"),
    Tool("hdfs hadoop", "* -ls*;* -cat*;* -get*;* -copyToLocal*;* -test*;* -du*;* -count*;* -stat*;* -tail*;* -text*;"
         "* -df*;* -find*;* -head*;version*;classpath*;getconf*", whole=True),
    # Other machines.
    Tool("rsync", judge=transfers, remote=r"([^/]*:|rsync://)", valued="-e -f --rsh --exclude --include --port"),
    Tool("scp", judge=transfers, remote=r"([^/]*:|scp://)", valued="-P -i -o -F -l -c -S -J"),
    Tool("ssh", "-V;-G *;-Q *", whole=True),
    Tool("bbcp", judge=transfers, remote=r"[^/]*:"),
    Tool("xrdcp gfal-copy", judge=transfers, remote=r"(?!file:)[a-z][a-z0-9+]*://"),
    Tool("irsync", judge=transfers, remote=r"i:"),
    Tool("iput irm imv icp imkdir gfal-rm gfal-mkdir gfal-rename"),
    Tool("hsi", "get;ls;pwd"),
    Tool("htar", writes="-c*;-vc*;-D*;-U*", whole=True),
    Tool("smbclient", writes="*put *;*del *;*rm *;*mkdir *;*rename *", whole=True),
    Tool("sftp pdsh pssh parallel-ssh clush lftp ftp tftp mosh"),
    Tool("ansible ansible-playbook salt terraform tofu pulumi packer vagrant"),
    Tool("curl", judge=web_writes),
    Tool("wget wget2", judge=web_writes),
    Tool("http https xh", judge=httpie_writes),
    Tool("ffmpeg", judge=streams),
    Tool("aria2c axel lynx ffprobe yt-dlp youtube-dl ping ping6 traceroute tracepath dig nslookup whois", "*",
         whole=True),
    Tool("kinit klist ldapsearch getent id whoami groups rpcinfo showmount quota", "*", whole=True),
    Tool("apt apt-get dnf yum apk zypper pip pip3 uv conda mamba micromamba pixi", writes="publish*"),
    Tool("nc ncat netcat socat telnet", judge=talks),
    Tool("mail mailx sendmail mutt msmtp ssmtp sendemail swaks s-nail"),
    Tool("ssh-copy-id croc wormhole globus globus-url-copy ascp unison lsyncd restic borg duplicity websocat wscat"),
    Tool("ssh-add", "-l*;-L*", whole=True),
    Tool("kcat kafkacat kafka-console-producer kafka-console-producer.sh mosquitto_pub amqp-publish"),
    Tool("rabbitmqadmin nats ntfy noti slackcat signal-cli wall write lp lpr lprm"),
    Tool("doctl flyctl fly heroku vercel netlify firebase wrangler aliyun runai beaker argo pachctl lakectl",
         "version*;list;ls;get;show;status;logs;* list;* ls;* get;* show;* status;* * list;* * get"),
    Tool("consul vault nomad", "version*;members;status;list;read;* list;* get;* read;* status;* members"),
    # Model hubs, repositories, trackers.
    Tool("hf huggingface-cli", "download*;scan-cache*;cache*;env*;version*;whoami*;auth whoami*;auth list*;"
         "models info*;models ls*;datasets info*;datasets ls*;spaces info*;spaces ls*"),
    Tool("modelscope kaggle ngc", "download*;* list;* info;* files;* status;* download;* * list;* * info;"
         "* * download-version"),
    # Of git the commands that pass are listed: any other word may be an alias of the user's for a push.
    Tool("git", "add;am;apply;archive;blame;branch;bundle;cat-file;check-*;checkout*;cherry*;clean;clone;commit*;"
         "config;describe;diff*;fetch*;for-each-ref;gc;grep;hash-object;init;lfs [!lpu]*;lfs locks;lfs ls-files;"
         "lfs pull;log;ls-*;merge*;mv;name-rev;notes;pull;rebase;reflog;remote;reset;restore;rev-*;revert;rm;shortlog;"
         "show*;stash;status;submodule [!f]*;switch;symbolic-ref;tag;update-*;upload-*;version;worktree",
         valued="-C -c --git-dir --work-tree --namespace"),
    Tool("git-lfs", writes="push*;lock *;unlock*"),
    Tool("hg datalad dolt jj bzr", writes="push*;publish*;git push*;email*", valued="-R --repository --cwd -C -d"),
    Tool("svn", writes="commit*;ci *;import *;delete *;copy *;move *;mkdir *;lock *;propset *"),
    Tool("gh glab hub", "* view;* list;* status;* download;* diff;* checkout;repo clone;gist clone;search *;status;"
         "run watch;auth git-credential", valued="-R --repo --hostname"),
    Tool("dvc", writes="push*;exp push*;exp remove*;gc*;studio *"),
    Tool("twine npm cargo poetry flit hatch", writes="upload*;publish*"),
    Tool("wandb wb", "status*;offline*;disabled*;off*;docker-*;server *;verify*"),
    Tool("mlflow", "* list;* search;* get;* describe;doctor*;artifacts download;server*;ui*"),
    Tool("comet neptune swanlab clearml-agent clearml-task clearml-data clearml-session",
         "download;list;* download;* list;watch*"),
    # Clusters and containers.
    Tool("sbatch srun salloc scancel sattach sbcast strigger"),
    Tool("squeue sinfo sacct sstat sprio sshare sdiag sreport bjobs bqueues bhosts lsload qstat pbsnodes qhost "
         "condor_q condor_status oarstat", "*", whole=True),
    Tool("scontrol", "show *;ping*;version*;write *"),
    Tool("sacctmgr", "show *;list *"),
    Tool("bsub bkill bstop bresume bmod brequeue bswitch qsub qdel qalter qhold qrls qrerun qmove qmod condor_submit "
         "condor_rm condor_hold condor_release oarsub oardel jsub jdel"),
    Tool("flux", "jobs*;job info*;job list*;resource list*;getattr *"),
    Tool("kubectl oc", "get *;describe *;logs *;version*;config view*;config get*;config current*;explain *;top *;"
         "auth can-i*;api-*;cluster-info*;diff *;wait *", valued="-n --namespace --context --kubeconfig"),
    Tool("helm", "list*;ls*;get *;status *;show *;search *;template *;version*;repo list*", valued="-n --namespace"),
    Tool("docker podman nerdctl", "ps*;images*;inspect *;version*;info*;logs *;stats*;top *;search *;* ls;* inspect *;"
         "* list;context show*", valued="--context -H --host --config"),
    Tool("docker-compose", "ps*;logs*;config*;version*;images*"),
    Tool("skopeo buildah oras", "inspect *;list-tags *;images*;version*;manifest inspect *;manifest fetch *;repo ls *"),
    Tool("crane", "ls *;manifest *;digest *;config *;version*"),
    Tool("ray", "status*;list *;summary *;logs *;memory*;job list*;job status*;job logs*"),
    Tool("sky modal vastai runpodctl dstack", "status*;list*;show*;logs*;get *;queue*;ps*;search *;app list;app logs;"
         "jobs queue;jobs logs;serve status;serve logs;volume list;volume ls;volume get"),
    # Databases.
    Tool("psql pg_restore mysql mariadb mysqladmin mongo mongosh mongoimport redis-cli clickhouse-client cqlsh snowsql "
         "etcdctl influx"),
    # This machine, beyond the script.
    Tool("renice", judge=changes_others, valued="-n --priority --relative"),
    Tool("taskset chrt", judge=changes_others),
    Tool("ionice", judge=changes_others, valued="-c --class -n --classdata"),
    Tool("prlimit cpulimit", judge=changes_others, valued="-l --limit"),
    Tool("hwclock", "-r*;--show*;--get*", whole=True),
    Tool("shutdown reboot halt poweroff init telinit"),
    Tool("systemctl", "status*;is-*;list-*;show*;cat *;--version"),
    Tool("service", "* status;--status-all", whole=True),
    Tool("nvidia-smi", judge=sets_gpu),
    Tool("rocm-smi amd-smi xpu-smi hl-smi", writes="*--set*;*--reset*;set *;reset *;*--gpureset*", whole=True),
    Tool("dcgmi", writes="config *--set*;policy *--set*;profile *--pause*;profile *--resume*;diag *;group -*",
         whole=True),
    Tool("sysctl", writes="*-w *;*=*;-p*;*--system*", whole=True),
    Tool("modprobe rmmod insmod swapoff iptables ip6tables nft nvidia-cuda-mps-control"),
    # Services of the user's on this machine, which do the work outside the run.
    Tool("tmux", "-V*;ls*;list-*;lsp*;lsw*;has*;show*;info*;display* -p*;capture* -p*", whole=True),
    Tool("screen", "-v*;-ls*;-list*;-Q *", whole=True),
    Tool("zellij", "-V*;ls*;list-*;setup --dump*;setup --check*", whole=True),
    Tool("tmate byobu dtach abduco shpool tmuxp tmuxinator teamocil", "-V*;ls*", whole=True),
    Tool("crontab", "-l*", whole=True),
    Tool("at batch atrm systemd-run systemd-cat systemd-notify systemd-mount systemd-umount run0 logger incrontab"),
    Tool("busctl", "list*;status*;tree*;introspect*;monitor*;capture*;get-property*"),
    Tool("dbus-send gdbus qdbus qdbus6 notify-send"),
    Tool("loginctl machinectl timedatectl hostnamectl localectl", "list*;show*;status*"),
    Tool("launchctl", "list*;print*;blame*"),
    Tool("supervisorctl", "status*;avail*;tail *;pid*;version*", valued="-c -s -u -p"),
    Tool("pm2", "ls*;list*;status*;jlist*;prettylist*;show *;describe *;info *;logs *;env *;ping*", valued="-n --name"),
    Tool("pueue", "status*;log*;follow *", valued="-g --group"),
    Tool("tsp initctl rc-service circusctl overmind s6-svc monit osascript emacsclient"),
    Tool("vim nvim gvim", writes="*--remote*;*--server*", whole=True),
    Tool("code code-insiders codium cursor subl", "--list-extensions*;--status*;-s*;-v*", whole=True),
    Tool("xdg-open gio-open kde-open wslview sensible-browser x-www-browser firefox google-chrome chromium"),
    Tool("gio", writes="open *;launch *;trash *;mount *"),
    Tool("gnome-terminal konsole xfce4-terminal terminator ptyxis kgx urxvtc footclient"),
    Tool("flatpak-spawn host-spawn distrobox-host-exec cmd.exe powershell.exe wsl.exe"),
    Tool("lxc incus virsh multipass", "list*;info *;dominfo *;nodeinfo*;version*;* list;* show *"),
    Tool("crictl ctr", "ps*;pods*;images*;inspect*;logs *;stats*;info*;version*;* ls;* list"),
    # Builds by a server that may run already, outside the run.
    Tool("bazel bazelisk buck2 pants gradle", "version*;info*;help*;query *;cquery *;--version*"),
    Tool("sccache", "-s*;--show-stats*;-V*", whole=True),
    Tool("cpupower", "frequency-info*;idle-info*;info*;monitor*"),
    Tool("ethtool", writes="-[ACEGKLNUWXfprst] *;--set-*;--change*;--coalesce*;--pause *;--offload*;"
         "--features*;--config-*;--negotiate*;--identify*;--flash*;--reset*", whole=True),
    Tool("ip tc", writes="* add *;* del *;* delete *;* change *;* replace *;* set *;* flush*;* append *"),
    Tool("ifconfig iwconfig", writes="* *"),
    Tool("route", writes="add *;del *;flush*"),
    Tool("nmcli", writes="* up*;* down*;* add*;* modify*;* delete*;* connect*;* disconnect*;* set*;* off*;* on*"),
    Tool("ufw firewall-cmd", "status*;version*;--list*;--get*;--state;--query*", whole=True),
    Tool("swapon", "-s*;--show*;--summary*", whole=True),
    Tool("cpufreq-set tuned-adm powerprofilesctl setenforce setpci wrmsr", "list*;get*;active*;recommend*"),
    Tool("ipmitool racadm", "get*;sensor list;sensor get;sel list;sdr list;chassis status;mc info;fru print;lan print"),
    Tool("nvidia-settings", writes="*-a *;*--assign*;*-l*;*--load-config-only*", whole=True),
    Tool("nvpmodel", writes="*-m *;*--mode*;*-f *", whole=True),
    Tool("jetson_clocks ipcrm ipcmk"),
)
# fmt: on
"""Programs that are not named here may start, but they may connect to nothing outside, see `system_calls`."""

BY_NAME = {name: tool for tool in TOOLS for name in tool.names.split()}

MODULES = {
    "azure.cli": "az",
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
