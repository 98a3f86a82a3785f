"""A client that would change something elsewhere ends tuning first, and what only reads passes.

Real libraries, in fresh processes: one process imports the libraries of a group after it was armed, and each case is
a fork of it. The other machine is store.invalid, and asking for its address is already too late.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

ROOT = Path(__file__).resolve().parents[2]

DRIVER = """
import contextlib, importlib, json, os, socket, sys
from autoddp.isolation.elsewhere import watch_clients
from autoddp.isolation.pipes import Pipes
from forked_cases import end, outcome, stop

def resolve(host, *rest, **options):
    if host in ("127.0.0.1", "localhost", None):
        return genuine(host, *rest, **options)
    end(78, f"asked for the address of {host}")

def case(code):
    os.dup2(2, 1)
    exec(code, {"__name__": "__main__", "url": order["url"]})

order = json.load(sys.stdin)
watch_clients(stop, Pipes(0), by_kernel=order["by_kernel"])
for module in order["imports"]:
    with contextlib.suppress(ImportError):
        importlib.import_module(module)
genuine, socket.getaddrinfo = socket.getaddrinfo, resolve
print(json.dumps([outcome(lambda: case(code)) for code in order["cases"]]))
"""

HUB = """
import huggingface_hub as hub
api = hub.HfApi(token="hf_x", endpoint="http://store.invalid")
"""
BOTO = """
import boto3
keys = dict(aws_access_key_id="a", aws_secret_access_key="b", region_name="us-east-1")
s3 = boto3.client("s3", endpoint_url="http://store.invalid", **keys)
"""
FSSPEC = """
import fsspec
class Remote(fsspec.AbstractFileSystem):
    protocol = "far"
    def _open(self, path, mode="rb", **options):
        import io
        return io.BytesIO(b"read")
    def info(self, path, **options):
        return {"name": path, "size": 4, "type": "file"}
    def cp_file(self, path1, path2, **options):
        raise AssertionError("copied")
    def _rm(self, path):
        raise AssertionError("removed")
far = Remote()
"""
ARROW = """
from pyarrow import dataset, fs, table as make
table = make({"x": [1]})
"""
SPOOL = """
import asyncio, fsspec.asyn
class Spool(fsspec.asyn.AsyncFileSystem):
    protocol = ("spool", "spools")
    async def _pipe_file(self, path, value, **options):
        raise AssertionError("written")
    async def _cat_file(self, path, **options):
        return b"read"
spool = Spool()
"""
AIO = """
import aiohttp, asyncio
async def ask(method, url):
    async with aiohttp.ClientSession() as session:
        async with session.request(method, url) as answer:
            return await answer.read()
"""
HTTPX = """
import asyncio, httpx
async def ask(method, url):
    async with httpx.AsyncClient(trust_env=False) as client:
        return await client.request(method, url)
"""
AIOBOTO = """
import asyncio
from aiobotocore.session import get_session
keys = dict(aws_access_key_id="a", aws_secret_access_key="b", region_name="us-east-1")
async def put():
    async with get_session().create_client("s3", endpoint_url="http://store.invalid", **keys) as s3:
        await s3.put_object(Bucket="bucket", Key="k", Body=b"")
"""
REMOTE = 'from http.client import HTTPConnection as C; c = C("store.invalid");'

# library needed, code, how the reason begins; "" where the case must run to its end
STOPS = {
    "hub": (
        ("huggingface_hub", HUB + 'api.upload_file(path_or_fileobj=b"x", path_in_repo="x", repo_id="user/model")',
         "huggingface_hub uploads to user/model (upload_file)"),
        ("huggingface_hub", HUB + 'hub.upload_folder(folder_path=".", repo_id="user/model")',
         "huggingface_hub uploads to user/model (upload_folder)"),
        ("huggingface_hub", HUB + 'api.create_repo("user/model", exist_ok=True)',
         "huggingface_hub changes user/model (create_repo)"),
        ("huggingface_hub", HUB + 'from huggingface_hub import delete_repo; delete_repo("user/model")',
         "huggingface_hub changes user/model (delete_repo)"),
        ("huggingface_hub", HUB + 'api.move_repo("a/b", "a/c")', "huggingface_hub changes a/b (move_repo)"),
        ("huggingface_hub", HUB + 'api.super_squash_history("a/b")', "huggingface_hub changes a/b"),
        ("huggingface_hub", HUB + 'api.create_commit("a/b", [], commit_message="m")', "huggingface_hub changes a/b"),
        ("huggingface_hub", HUB + 'hub.CommitScheduler(repo_id="a/b", folder_path=".")',
         "huggingface_hub changes a/b (__init__)"),
        ("huggingface_hub", HUB + 'class M(hub.ModelHubMixin): pass\nM.push_to_hub(object.__new__(M), "a/b")',
         "huggingface_hub uploads to a/b (push_to_hub)"),
        ("huggingface_hub", HUB + 'hub.HfFileSystem(token="x").rm("datasets/a/b/c")', "fsspec writes to hf://"),
        ("huggingface_hub", HUB + 'hub.HfFileSystem(token="x").open("datasets/a/b/c", "wb")', "fsspec writes to hf://"),
        ("huggingface_hub", 'import hf_xet; hf_xet.upload_files(["x"], None, None, None, None, None)',
         "hf_xet uploads (upload_files)"),
        ("transformers", "from transformers.utils.hub import PushToHubMixin as P; P.push_to_hub(object(), 'a/b')",
         "transformers uploads to a/b"),
    ),
    "stores": (
        ("boto3", BOTO + 's3.put_object(Bucket="bucket", Key="k", Body=b"")',
         "boto3 calls PutObject of s3 on bucket (_make_api_call)"),
        ("boto3", BOTO + 's3.upload_file(__import__("sys").executable, "bucket", "k")',
         "boto3 writes to S3 bucket (upload_file)"),
        ("boto3", BOTO + 's3.delete_objects(Bucket="b", Delete={"Objects": [{"Key": "k"}]})',
         "boto3 calls DeleteObjects of s3 on b"),
        ("boto3", BOTO + 'boto3.resource("s3", endpoint_url=url, **keys).Bucket("bucket").create()',
         "boto3 calls CreateBucket of s3 on bucket"),  # on this machine too: a store is the user's
        ("boto3", BOTO + 'boto3.client("sqs", **keys).send_message(QueueUrl="http://store.invalid/q", MessageBody="m")',
         "boto3 calls SendMessage of sqs"),
        ("aiobotocore", AIOBOTO + "asyncio.run(put())", "boto3 calls PutObject of s3 on bucket"),
        ("minio", 'import minio; minio.Minio("store.invalid").remove_object("bucket", "k")',
         "minio writes to bucket (remove_object)"),
        ("minio", 'import minio; minio.Minio("store.invalid").fput_object("bucket", "k", "/etc/hosts")',
         "minio writes to bucket (fput_object)"),
        ("paramiko", "from paramiko import SFTPClient as S; S.put(object.__new__(S), 'a', 'remote')",
         "paramiko writes remote (put)"),
        ("paramiko", "from paramiko import SFTPClient as S; S.open(object.__new__(S), 'remote', 'w')",
         "paramiko writes remote (open)"),
        ("paramiko", "from paramiko import SSHClient as S; S().exec_command('rm x')",
         "paramiko runs a command on another machine (exec_command)"),
        ("paramiko", "from paramiko import Channel as C; C.exec_command(C(1), 'rm x')",
         "paramiko runs a command on another machine (exec_command)"),
        ("google.cloud.storage",
         "from google.cloud import storage as s\n"
         "from google.auth.credentials import AnonymousCredentials as A\n"
         "s.Client('p', A()).bucket('b').blob('k').upload_from_string('x')", "google-cloud-storage writes to a bucket"),
        ("google.cloud.storage",
         "from google.cloud import storage as s\n"
         "from google.auth.credentials import AnonymousCredentials as A\n"
         "s.Client('p', A()).bucket('b').delete_blob('k')", "google-cloud-storage changes a bucket (delete_blob)"),
        ("google.cloud.storage",
         "from google.cloud import storage as s\n"
         "from google.auth.credentials import AnonymousCredentials as A\n"
         "s.Client('p', A()).create_bucket('b')", "google-cloud-storage creates b (create_bucket)"),
        ("google.cloud.storage",
         "from google.cloud import storage as s\n"
         "from google.auth.credentials import AnonymousCredentials as A\n"
         "s.Client('p', A()).bucket('b').blob('k').open('w')", "google-cloud-storage writes"),
        ("azure.storage.blob",
         "from azure.storage.blob import BlobClient as B\n"
         "B('http://store.invalid', 'c', 'b').upload_blob(b'x')", "azure-storage-blob writes to a container"),
        ("azure.storage.blob",
         "from azure.storage.blob import ContainerClient as C\n"
         "C('http://store.invalid', 'c').delete_blob('b')", "azure-storage-blob writes to a container (delete_blob)"),
        ("azure.storage.blob",
         "from azure.storage.blob import BlobServiceClient as C\n"
         "C('http://store.invalid').create_container('b')", "azure-storage-blob changes b (create_container)"),
        ("oss2",
         "import oss2; oss2.Bucket(oss2.AnonymousAuth(), 'http://store.invalid', 'bucket').put_object('k', b'')",
         "oss2 writes k (put_object)"),
        ("qcloud_cos",
         "import qcloud_cos as q\n"
         "c = q.CosConfig(Region='ap-guangzhou', SecretId='a', SecretKey='b')\n"
         "q.CosS3Client(c).put_object(Bucket='b-1', Body=b'', Key='k')",
         "cos writes to b-1 (put_object)"),
        ("s3torchconnector",
         "from s3torchconnector._s3client import S3Client as S; S('r').put_object('bucket', 'k')",
         "s3torchconnector writes to bucket (put_object)"),
        ("pyarrow", "from pyarrow import fs; fs.S3FileSystem(region='r').delete_file('b/k')", "pyarrow writes b/k"),
        ("pyarrow", ARROW + "dataset.write_dataset(table, 's3://bucket/x?region=r', format='parquet')",
         "pyarrow writes s3://bucket/x"),
        ("pyarrow", ARROW + "s3 = fs.S3FileSystem(region='r')\n"
         "dataset.write_dataset(table, 'bucket/x', format='csv', filesystem=s3)",
         "pyarrow writes bucket/x (write_dataset)"),
        ("pyarrow", ARROW + "import pyarrow.parquet as p\n"
         "p.write_to_dataset(table, 'x', filesystem=fs.SubTreeFileSystem('bucket', fs.S3FileSystem(region='r')))",
         "pyarrow writes x (write_dataset)"),
        ("polars", "import polars as p; p.DataFrame({'x': [1]}).write_parquet('s3://bucket/x')",
         "polars writes s3://bucket/x (write_parquet)"),
        ("polars", "import polars as p; p.LazyFrame({'x': [1]}).sink_csv('gs://bucket/x')",
         "polars writes gs://bucket/x (sink_csv)"),
    ),
    "fsspec": (
        ("fsspec", FSSPEC + 'far.open("a/b", "wb")', "fsspec writes to far://a/b (open)"),
        ("fsspec", FSSPEC + 'far.open("a/b", "a")', "fsspec writes to far://a/b (open)"),
        ("fsspec", FSSPEC + 'far.pipe("a/b", b"x")', "fsspec writes to far://a/b (pipe)"),
        ("fsspec", FSSPEC + 'far.rm("a/b")', "fsspec writes to far://a/b (rm)"),
        ("fsspec", FSSPEC + 'far.cp_file("a", "b")', "fsspec writes to far://a (cp_file)"),
        ("fsspec", FSSPEC + 'far.mkdirs("a", exist_ok=True)', "fsspec writes to far://a (mkdirs)"),
        ("fsspec", FSSPEC + 'far.touch("a")', "fsspec writes to far://a (touch)"),
        ("fsspec", FSSPEC + 'far.mv("a", "b")', "fsspec writes to far://a (mv)"),
        ("fsspec", FSSPEC + 'far._rm("a")', "fsspec writes to far://a (_rm)"),
        ("fsspec", FSSPEC + 'import fsspec.implementations.dirfs as d; d.DirFileSystem("p", far).rm_file("a")',
         "fsspec writes to far://p/a (rm_file)"),
        ("fsspec", SPOOL + 'spool.pipe_file("a", b"x")', "fsspec writes to spool://a (_pipe_file)"),
        ("fsspec", SPOOL + 'asyncio.run(spool._pipe_file("a", b"x"))', "fsspec writes to spool://a (_pipe_file)"),
        ("aiohttp", 'import fsspec; fsspec.filesystem("http").put_file(__import__("sys").executable, "http://store.invalid/x")',
         "fsspec writes to http://"),
        ("s3fs", 'import fsspec; fsspec.filesystem("s3", anon=True).pipe_file("bucket/k", b"x")',
         "fsspec writes to s3://bucket/k"),
        ("s3fs", 'import fsspec; fsspec.filesystem("s3", anon=True).open("bucket/k", "wb")',
         "fsspec writes to s3://bucket/k"),
    ),
    "http": (
        ("", REMOTE + 'c.request("PUT", "/x", b"")', "http.client sends PUT to store.invalid (putrequest)"),
        ("", REMOTE + 'c.request("DELETE", "/x")', "http.client sends DELETE to store.invalid"),
        ("", REMOTE + 'c.request("PATCH", "/x")', "http.client sends PATCH to store.invalid"),
        ("", REMOTE + 'c.request("POST", "/graphql")', "http.client sends POST to store.invalid"),
        ("", REMOTE + 'c.request("MKCOL", "/x")', "http.client sends MKCOL to store.invalid"),
        ("", "from urllib.request import urlopen; urlopen('http://store.invalid/x', b'data')",
         "http.client sends POST to store.invalid"),
        ("", "import os; os.environ['http_proxy'] = url\n"
         "from urllib.request import urlopen; urlopen('http://store.invalid/x', b'data')",
         "http.client sends POST to store.invalid"),  # the proxy is on this machine, the store is not
        ("", "import os; os.environ['MASTER_ADDR'] = 'node0.invalid'; os.environ['MASTER_PORT'] = '29500'\n"
         "from http.client import HTTPConnection as C; C('node0.invalid', 8086).putrequest('POST', '/write')",
         "http.client sends POST to node0.invalid"),  # a service beside the rendezvous
        ("", "from http.client import HTTPSConnection as C; c = C('127.0.0.1', 9); c.set_tunnel('store.invalid')\n"
         "c.putrequest('PUT', '/x')", "http.client sends PUT to store.invalid"),
        ("", "from urllib.request import urlopen; urlopen('https://api.telegram.org/bot1:x/sendMessage?text=a')",
         "http.client sends GET to api.telegram.org"),
        ("requests", "import requests; requests.post('http://store.invalid/x', json={})", "http.client sends POST"),
        ("requests", "import requests; requests.delete('http://store.invalid/x')", "http.client sends DELETE"),
        ("urllib3", "import urllib3; urllib3.request('PUT', 'http://store.invalid/x')", "http.client sends PUT"),
        ("httpx", HTTPX + "httpx.post('http://store.invalid/x')",
         "httpx sends POST to store.invalid (handle_request)"),
        ("httpx", HTTPX + "asyncio.run(ask('DELETE', 'http://store.invalid/x'))",
         "httpx sends DELETE to store.invalid (handle_async_request)"),
        ("httpx2", "import httpx2; httpx2.put('http://store.invalid/x')", "httpx sends PUT to store.invalid"),
        ("aiohttp", AIO + "asyncio.run(ask('PUT', 'http://store.invalid/x'))",
         "aiohttp sends PUT to store.invalid (__init__)"),
        ("grpc",
         "import grpc\n"
         "grpc.insecure_channel('store.invalid:1').unary_unary('/a.B/Write', lambda m: m, lambda m: m)(b'')",
         "grpc calls Write on store.invalid"),
        ("tornado", "from tornado.httpclient import HTTPRequest as R; R('http://store.invalid', 'PUT')",
         "tornado sends PUT to store.invalid (__init__)"),
    ),
    "others": (
        ("", "from ftplib import FTP; FTP().storbinary('STOR x', None)", "ftplib writes STOR x (storbinary)"),
        ("", "from ftplib import FTP; FTP().delete('x')", "ftplib writes x (delete)"),
        ("zmq", "import zmq; zmq.Context().socket(zmq.PUSH).connect('tcp://192.0.2.1:5555')",
         "zmq connects to 192.0.2.1 (connect)"),
        ("zmq", "import zmq, zmq.asyncio as z; z.Context().socket(zmq.SUB).connect('tcp://eth0:0;192.0.2.1:5555')",
         "zmq connects to 192.0.2.1 (connect)"),
        ("", "from smtplib import SMTP; SMTP().sendmail('a@x', 'b@x', 'm')", "smtplib sends mail to b@x (sendmail)"),
        ("", "import smtplib, email.message as e; smtplib.SMTP().send_message(e.EmailMessage())", "smtplib sends mail"),
        ("", "import imaplib as i; i.IMAP4.append(object.__new__(i.IMAP4), 'box', None, None, b'')",
         "imaplib changes mail (append)"),
        ("redis", "import redis; redis.Redis('store.invalid').get('x')", "redis connects to a database (connect)"),
        ("redis", "import redis; redis.Redis('127.0.0.1').get('x')", "redis connects to a database (connect)"),
        ("redis", "import asyncio, redis.asyncio as r; asyncio.run(r.Redis(host='store.invalid').get('x'))",
         "redis connects to a database (connect)"),
        ("pymysql", "import pymysql; pymysql.connect(host='store.invalid')",
         "pymysql connects to a database (connect)"),
        ("pymysql", "import sqlalchemy as s; s.create_engine('mysql+pymysql://u@store.invalid/d').connect()",
         "sqlalchemy connects to mysql (connect)"),
        ("pymysql", "import optuna; optuna.storages.RDBStorage('mysql+pymysql://u@store.invalid/d')",
         "sqlalchemy connects to mysql (connect)"),
        ("psycopg", "import psycopg; psycopg.connect('host=store.invalid')", "psycopg connects to a database"),
        ("psycopg2", "import psycopg2; psycopg2.connect('host=store.invalid')", "psycopg2 connects to a database"),
        ("pymongo", "import pymongo; pymongo.MongoClient('store.invalid')", "pymongo connects to a database"),
        ("mlflow",
         "import mlflow; mlflow.set_tracking_uri(url); mlflow.create_experiment('e')",
         "mlflow sends POST /api/2.0/mlflow"),
        ("wandb", "import wandb; wandb.init(project='p', mode='online')", "wandb starts a run in mode online (init)"),
        ("wandb", "import wandb; wandb.agent('x/y/z', function=print)", "wandb runs an agent of a sweep"),
        ("wandb", "import wandb; wandb.sweep({}, project='p')", "wandb creates a sweep"),
        ("comet_ml", "import comet_ml; comet_ml.Experiment(api_key='x')", "comet_ml starts an online experiment"),
        ("neptune", "import neptune; neptune.init_run(mode='sync', project='a/b', api_token='x')",
         "neptune starts a run in mode sync"),
        ("clearml", "import clearml; clearml.Task.init('p', 't')", "clearml starts a task online"),
        ("swanlab", "import swanlab; swanlab.init(mode='cloud')", "swanlab starts a run in mode cloud"),
        ("trackio", "import trackio; trackio.init('p', space_id='a/b')", "trackio starts a run on a/b (init)"),
        ("aim", "import aim; aim.Run(repo='aim://localhost:53800')",
         "aim records on a server localhost:53800 (__init__)"),
        ("prometheus_client", "import prometheus_client as p; p.push_to_gateway('localhost:9', 'job', p.REGISTRY)",
         "prometheus_client changes the metrics of localhost:9 (push_to_gateway)"),
        ("prometheus_client", "from prometheus_client.bridge.graphite import GraphiteBridge as G; G(('::1', 9)).push()",
         "prometheus_client sends metrics (push)"),
        ("clickhouse_connect", "import clickhouse_connect as c; c.get_client(host='localhost')",
         "clickhouse_connect connects to a database"),
        ("dulwich", "from dulwich import porcelain; porcelain.push('.', 'http://store.invalid/x')", "dulwich pushes"),
    ),
    # Where the kernel does not show what programs do.
    "programs": (
        ("", "import subprocess; subprocess.run(['aws', 's3', 'cp', 'x', 's3://b/x'])",
         "aws changes something outside this run (aws s3 cp x)"),
        ("", "import os; os.system('git push origin main')", "git changes something"),
        ("", "import os; os.popen('ls | scancel 1')", "scancel changes something"),
        ("", "import os; os.execvp('git', ['git', 'push'])", "git changes something"),
        ("", "import os; os.posix_spawn('/usr/bin/git', ['git', 'push'], {})", "git changes something"),
        ("", "import subprocess; subprocess.run(['x', 'push'], executable='/usr/bin/git')", "git changes something"),
        ("", "import asyncio\n"
         "async def run(): await asyncio.create_subprocess_exec('rclone', 'sync', '.', 'far:b')\n"
         "asyncio.run(run())", "rclone changes something"),
        ("", "import subprocess; subprocess.run('cd / && git push', shell=True)",
         "sh may change something outside this run, and this kernel does not show what it does there"),
        ("", "import os; os.system('X=$(git push)')", "sh may change something"),
        ("", "import subprocess; subprocess.run(['bash', 'up.sh'])", "bash may change something"),
        ("", "import subprocess; subprocess.run(['env', 'git', 'push'])", "env may change something"),
        ("", "import subprocess; subprocess.run(['./mine'])", "mine may change something"),
        ("", "import subprocess, sys; subprocess.run([sys.executable, '-I', 'x.py'])", "python may change something"),
    ),
    "processes": (
        ("", "import os; os.kill(1, 18)", "os.kill sends signal 18 to process 1, which this run did not start"),
        ("", "import sys; sys.audit('os.kill', -1, 9)", "os.kill sends signal 9 to every process"),
        ("", "import os; os.killpg(1, 18)", "os.killpg sends signal 18 to group 1"),
        ("", "import os, signal; signal.pidfd_send_signal(os.pidfd_open(1), 18)",
         "os.kill sends signal 18 to process 1"),
        ("", "import os; os.setpriority(os.PRIO_PROCESS, 1, os.getpriority(os.PRIO_PROCESS, 1))",
         "os.setpriority changes process 1, which this run did not start"),
        ("", "import os; os.setpriority(os.PRIO_USER, 65533, 5)", "os.setpriority changes all processes of a user"),
        ("", "import os; os.setpriority(which=os.PRIO_PROCESS, who=1, priority=os.getpriority(os.PRIO_PROCESS, 1))",
         "os.setpriority changes process 1, which this run did not start"),
        ("", "from os import sched_setaffinity as s, sched_getaffinity as g; s(1, g(1))",
         "os.sched_setaffinity changes process 1"),
        ("", "import os; os.sched_setscheduler(1, os.sched_getscheduler(1), os.sched_getparam(1))",
         "os.sched_setscheduler changes process 1"),
        ("", "import resource as r; r.prlimit(1, r.RLIMIT_CORE, r.prlimit(1, r.RLIMIT_CORE))",
         "resource.prlimit changes process 1"),
        ("", "import psutil; p = psutil.Process(1); p.nice(p.nice())", "psutil changes process 1"),
        ("", "import psutil; p = psutil.Process(1); p.cpu_affinity(p.cpu_affinity())", "psutil changes process 1"),
        ("", "import psutil as p; p.Process(1).rlimit(p.RLIMIT_CORE, p.Process(1).rlimit(p.RLIMIT_CORE))",
         "psutil changes process 1"),
    ),
    "machine": (
        ("pynvml", "import pynvml; pynvml.nvmlDeviceSetPowerManagementLimit(None, 200000)",
         "pynvml changes the GPU's settings (nvmlDeviceSetPowerManagementLimit)"),
        ("pynvml", "from pynvml import *; nvmlDeviceResetGpuLockedClocks(None)", "pynvml changes the GPU's settings"),
        ("posix_ipc", "import posix_ipc; posix_ipc.SharedMemory('/autoddp-none')",
         "posix_ipc shares memory or messages with other programs"),
        ("posix_ipc", "import posix_ipc; posix_ipc.unlink_message_queue('/autoddp-none')", "posix_ipc shares memory"),
        ("sysv_ipc", "import sysv_ipc; sysv_ipc.SharedMemory(12345)", "sysv_ipc shares memory or messages"),
        ("sysv_ipc", "import sysv_ipc; sysv_ipc.remove_shared_memory(-1)", "sysv_ipc shares memory or messages"),
        ("ray", "from ray._private.node import Node as N; p = type('P', (), {'gcs_address': 'store.invalid:6379'})\n"
         "N.__init__(object.__new__(N), p, connect_only=True)", "ray gives work to the cluster at store.invalid"),
        # None of these would change anything: nothing is written, or there is no such file.
        ("", "open('/proc/sys/vm/overcommit_memory', 'w')",
         "the script changes /proc/sys/vm/overcommit_memory, which all programs of this machine share"),
        ("", "import os; os.symlink('/sys/kernel', 'link'); open('link/none/x', 'w')",
         "the script changes /sys/kernel/none/x"),
        ("", "import os, pathlib; os.chdir('/sys/kernel'); pathlib.Path('none').write_text('1')",
         "the script changes /sys/kernel/none"),
        ("", "import os; os.open('/dev/mqueue/autoddp', os.O_RDWR)", "the script changes /dev/mqueue/autoddp"),
        ("", "import os; os.unlink('/dev/mqueue/autoddp')", "the script changes /dev/mqueue/autoddp"),
        ("", "open('/proc/1/root/dev/null', 'w')",
         "the script changes /proc/1/root/dev/null, which belongs to another process"),
        ("", "import os; os.symlink(f'/proc/{os.getppid()}/root', 'all'); open('all/dev/null', 'a')",
         "the script changes /proc/"),
        ("", "import os; os.system('echo 1 >> /proc/1/fd/1')",
         "a command changes /proc/1/fd/1, which belongs to another process"),
        ("", "import os; os.open('/proc/1/oom_score_adj', os.O_WRONLY)",
         "the script changes /proc/1/oom_score_adj, which belongs to another process"),
        ("", "import os; os.mkdir('/sys/fs/cgroup/none/none')", "the script changes /sys/fs/cgroup/none/none"),
        ("", "open('/sys/fs/cgroup/none/memory.max', 'w')", "the script changes /sys/fs/cgroup/none/memory.max"),
        ("", "import os; os.system('mkdir -p /sys/fs/cgroup/none/none')", "a command changes /sys/fs/cgroup/none/none"),
        ("", "import os; os.system('echo 9 > /sys/fs/cgroup/none/memory.max')", "a command changes /sys/fs/cgroup/"),
        ("", "import time; time.clock_settime(time.CLOCK_REALTIME, 0.0)", "the script sets this machine's clock"),
        ("", "import socket; socket.sethostname(socket.gethostname())", "the script changes the name of this machine"),
        ("", "import os; os.system('echo never > /sys/kernel/none/enabled')",
         "a command changes /sys/kernel/none/enabled, which all programs of this machine share"),
        ("", "import subprocess as s; s.run('echo 1 | sudo tee -a /proc/sys/none >/dev/null', shell=True)",
         "a command changes /proc/sys/none"),
        ("", "import subprocess as s; s.run(['tee', '/sys/none'], input=b'')", "a command changes /sys/none"),
        ("", "import os; os.popen('dd if=/dev/null of=/sys/none').read()", "a command changes /sys/none"),
        ("", "import os; os.execvp('cp', ['cp', '/dev/null', '/proc/sys/none'])", "a command changes /proc/sys/none"),
    ),
}  # fmt: skip

PASSES = {
    "hub": (
        ("huggingface_hub", HUB + "assert hub.HfApi(endpoint=url).model_info('a/b').id == 'a/b'"),
        ("huggingface_hub", HUB + "hub.HfApi(endpoint=url).get_paths_info('a/b', ['x'])"),
        ("huggingface_hub", HUB + "hub.utils.send_telemetry('x')"),
        ("huggingface_hub",
         HUB + "import os; os.environ['HF_HUB_OFFLINE'] = '1'\n"
         "class Reached(Exception): pass\n"
         "def refuse(*a, **k): raise Reached\n"
         "hub.hf_api.get_session = refuse\n"
         "try: api.create_repo('a/b')\nexcept Reached: pass"),
    ),
    "stores": (
        ("boto3", BOTO + "boto3.client('s3', endpoint_url=url, **keys).get_object(Bucket='b', Key='k')['Body'].read()"),
        ("boto3", BOTO + "boto3.client('s3', endpoint_url=url, **keys).download_file('b', 'k', 'here')"),
        ("boto3", BOTO + "assert 'Signature' in s3.generate_presigned_url('put_object', {'Bucket': 'b', 'Key': 'k'})"),
        ("boto3",
         BOTO + "import socket\nclass Asked(Exception): pass\n"
         "def resolve(*a, **k): raise Asked\n"
         "socket.getaddrinfo = resolve\n"  # a read that is a POST: it gets as far as the network
         "db = boto3.client('dynamodb', endpoint_url='http://store.invalid', **keys)\n"
         "try: db.get_item(TableName='ttt', Key={})\nexcept Exception as e: assert 'unhandled' in repr(e), e"),
        ("pyarrow", ARROW + "dataset.write_dataset(table, 'arrow', format='parquet', filesystem=fs.LocalFileSystem())\n"
         "dataset.write_dataset(table, f'file://{__import__(\"os\").getcwd()}/by_url', format='parquet')"),
        ("polars", "import polars as p; p.DataFrame({'x': [1]}).write_parquet('here.parquet')\n"
         "import io; p.DataFrame({'x': [1]}).write_csv(io.BytesIO()); assert p.DataFrame({'x': [1]}).write_csv()"),
    ),
    "fsspec": (
        ("fsspec", FSSPEC + "assert far.open('a/b').read() == b'read'; assert far.info('x')['size'] == 4"),
        ("fsspec", SPOOL + "assert spool.cat_file('x') == b'read'"),
        ("fsspec", SPOOL + "assert asyncio.run(spool._cat_file('x')) == b'read'"),
        ("fsspec", "import fsspec; fsspec.filesystem('memory').pipe('/a', b'x')"),
        ("fsspec", "import fsspec; fsspec.open('here', 'w').open().close()"),
        ("fsspec", "import fsspec; f = fsspec.filesystem('file'); f.mkdirs('d'); f.touch('d/x'); f.rm('d', True)"),
        ("aiohttp", "import fsspec; assert fsspec.open(url + '/x').open().read()"),
    ),
    "http": (
        ("", "from urllib.request import urlopen; urlopen(url, b'data').read()"),  # this machine
        ("", "import os; os.environ['MASTER_ADDR'] = 'node0.invalid'; os.environ['MASTER_PORT'] = '29500'\n"
         "from http.client import HTTPConnection as C; c = C('node0.invalid', 29500)\n"
         "c.connect = lambda: None; c.sock = type('S', (), {'sendall': print})()\n"
         "c.putrequest('PUT', '/x')"),
        ("requests", "import requests; requests.put(url + '/x', b''); requests.get(url)"),
        ("httpx", HTTPX + "httpx.post(url + '/x', trust_env=False); asyncio.run(ask('PUT', url))"),
        ("aiohttp", AIO + "asyncio.run(ask('POST', url + '/x'))"),
    ),
    "others": (
        ("zmq", "import zmq; c = zmq.Context(); s = c.socket(zmq.PULL); port = s.bind_to_random_port('tcp://127.0.0.1')\n"
         "p = c.socket(zmq.PUSH); p.connect(f'tcp://127.0.0.1:{port}'); p.send(b'x'); assert s.recv() == b'x'\n"
         "p.connect('inproc://x'); p.close(0); s.close(0); c.term()"),
        ("", "import sqlite3; sqlite3.connect('here.db').execute('create table t (x)')"),
        ("", "import sqlalchemy as s; s.create_engine('sqlite:///here2.db').connect().close()"),
        ("", "import optuna; optuna.create_study(storage='sqlite:///here3.db')"),
        ("mlflow", "import mlflow; mlflow.set_tracking_uri(url); mlflow.search_experiments"),
        ("wandb", "import os; os.environ['WANDB_MODE'] = 'disabled'; import wandb; wandb.init(project='p').finish()"),
        ("neptune", "import neptune; neptune.init_run(mode='debug').stop()"),
    ),
    "programs": (
        ("", "import subprocess; assert subprocess.run('echo git push | cat', shell=True).returncode == 0"),
        ("", "import os; os.system('git rev-parse HEAD 2>/dev/null'); os.system('nvidia-smi -L')"),
        ("", "import subprocess as s; s.run(['cp', s.__file__, 'here']); s.run(['grep', 'x', 'here']); s.run(['ls'])"),
        ("", "import subprocess, sys; subprocess.run([sys.executable, '-c', 'print(1)'], check=True)"),
        ("", "import subprocess as s\ntry: s.run(['squeue'])\nexcept FileNotFoundError: pass"),
    ),
    "processes": (
        ("", "import subprocess; assert subprocess.run('echo git push', shell=True).returncode == 0"),
        ("", "import subprocess; p = subprocess.Popen(['sleep', '9']); p.terminate(); p.wait()"),
        ("", "import os, signal; signal.signal(signal.SIGUSR1, lambda *a: None); os.kill(os.getpid(), signal.SIGUSR1)"),
        ("", "import os; os.kill(1, 0); os.kill(os.getppid(), 0)"),
        ("", "import os, signal; signal.pidfd_send_signal(os.pidfd_open(1), 0)"),
        ("", "import os, resource as r; os.nice(1); os.setpriority(os.PRIO_PROCESS, os.getpid(), 5)\n"
         "os.setpriority(which=os.PRIO_PROCESS, who=0, priority=6)\n"
         "for pid in (0, os.getpid()): os.sched_setaffinity(pid, os.sched_getaffinity(pid))\n"
         "r.prlimit(1, r.RLIMIT_CORE); r.prlimit(0, r.RLIMIT_CORE, (0, 0))"),
        ("", "import os, threading as t\n"
         "def work(): os.sched_setaffinity(t.get_native_id(), os.sched_getaffinity(0))\n"
         "x = t.Thread(target=work); x.start(); x.join()"),
        ("", "import psutil, subprocess as s; psutil.Process(1).nice(); p = psutil.Process(); p.nice(5)\n"
         "p.cpu_affinity([]); c = psutil.Popen(['sleep', '9']); c.nice(6); c.kill(); c.wait()"),
        ("", "import subprocess as s; p = s.Popen(['sh', '-c', 'sleep 9 & echo $!; wait'], stdout=s.PIPE, text=True)\n"
         "import os; os.kill(int(p.stdout.readline()), 15); p.wait()"),  # a grandchild
        ("", "import multiprocessing as m, time\n"
         "p = m.get_context('fork').Process(target=time.sleep, args=(9,)); p.start(); p.kill(); p.join()"),
    ),
    "machine": (
        ("pynvml", "import pynvml as n\ntry: n.nvmlDeviceGetPowerManagementLimit(None)\nexcept n.NVMLError: pass"),
        ("pynvml", "import pynvml as n\ntry: n.nvmlDeviceSetCpuAffinity(None)\nexcept n.NVMLError: pass"),
        ("", "open('/proc/self/oom_score_adj', 'r+').write('1000'); open('/proc/sys/vm/overcommit_memory').read()"),
        ("", "import os; open('/dev/null', 'w').write('x'); open(f'/proc/{os.getpid()}/comm', 'w').write('name')"),
        ("", "import os; read, write = os.pipe(); open(f'/proc/{os.getpid()}/fd/{write}', 'w').write('x')"),
        ("", "import os; open(f'/proc/{os.getpid()}/root/dev/null', 'w'); open('/dev/fd/1', 'a')"),
        ("", "open('/dev/stdout', 'a')"),
        ("", "import os; os.symlink('here', 'here'); os.path.exists('here') or os.remove('here')"),
        ("", "import os; os.system(f'cat /dev/null >> /proc/{os.getpid()}/fd/1')"),
        ("", "import os; read, write = os.pipe(); open(f'/proc/self/fd/{write}', 'w').write('x')"),
        ("", "import os; os.system('cat /proc/sys/vm/swappiness 2>/dev/null >here; cp /proc/sys/vm/swappiness x')"),
        ("", "import os; os.system('echo $$ > /sys/fs/cgroup/none/cgroup.procs 2>/dev/null')\n"
         "try: open('/sys/fs/cgroup/none/tasks', 'w')\nexcept OSError: pass"),
        ("", "import os; os.system('echo 1000 > /proc/self/oom_score_adj; echo 1 > /proc/$$/oom_score_adj')"),
    ),
}  # fmt: skip

IMPORTS = {
    "hub": ["huggingface_hub", "huggingface_hub.hf_api", "huggingface_hub.hf_file_system"],
    "stores": ["boto3", "minio", "paramiko"],
    "fsspec": ["fsspec", "fsspec.asyn", "aiohttp"],
    "http": ["requests", "httpx", "aiohttp"],
    "others": ["sqlalchemy", "redis", "pymysql", "optuna"],
    "programs": ["asyncio"],
    "processes": ["psutil"],
    "machine": ["pynvml"],
}


def absent(library: str) -> bool:
    try:
        return bool(library) and importlib.util.find_spec(library) is None
    except ModuleNotFoundError:  # google.cloud.storage without google
        return True


class Store(BaseHTTPRequestHandler):
    """A server on this machine that knows every answer."""

    def answer(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        body = b"[]" if "paths-info" in self.path else b'{"id": "a/b", "siblings": []}'
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = answer

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""


@cache
def answers(group: str) -> dict[str, tuple[int, str]]:
    """What became of each case of a group: its exit code and the reason or the error. One process a group."""
    cases = [case[1] for case in (*STOPS[group], *PASSES[group]) if not absent(case[0])]
    server = ThreadingHTTPServer(("127.0.0.1", 0), Store)
    Thread(target=server.serve_forever, daemon=True).start()
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, "-c", DRIVER],
            input=json.dumps(
                {
                    "imports": IMPORTS[group],
                    "cases": cases,
                    "url": f"http://127.0.0.1:{server.server_port}",
                    "by_kernel": group != "programs",
                }
            ),
            capture_output=True,
            text=True,
            cwd=folder,
            timeout=120,
            env={
                **os.environ,
                "PYTHONPATH": f"{ROOT}:{Path(__file__).parent}",
                "HOME": folder,
                "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}",
                "AWS_EC2_METADATA_DISABLED": "true",
            },
        )
    server.shutdown()
    assert done.stdout, done.stderr
    return {case: (code, said) for case, (code, said) in zip(cases, json.loads(done.stdout), strict=True)}


def name(case: tuple[str, ...]) -> str:
    return case[1].strip().splitlines()[-1][-60:]


@pytest.mark.parametrize(
    ("group", "case"),
    [(group, case) for group, its in STOPS.items() for case in its],
    ids=lambda v: v if isinstance(v, str) else name(v),
)
def test_ends_tuning_first(group: str, case: tuple[str, str, str]) -> None:
    library, code, reason = case
    if absent(library):
        pytest.skip(f"{library} is not installed")
    status, said = answers(group)[code]
    assert (status, said[: len(reason)]) == (77, reason), said


@pytest.mark.parametrize(
    ("group", "case"),
    [(group, case) for group, its in PASSES.items() for case in its],
    ids=lambda v: v if isinstance(v, str) else name(v),
)
def test_passes(group: str, case: tuple[str, str]) -> None:
    library, code = case
    if absent(library):
        pytest.skip(f"{library} is not installed")
    assert answers(group)[code] == (0, "")
