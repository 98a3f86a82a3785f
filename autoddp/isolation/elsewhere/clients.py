"""Model hubs, experiment trackers, databases, queues and mail. Adding a client is one entry.

A tracker passes while its own variable switches it off (`trackers.TRACKERS_OFF`). If an argument in the script switches
it on again, it ends tuning here.
"""

from __future__ import annotations

import functools
import os
import re
from typing import Any
from urllib.parse import urlsplit

from autoddp.isolation.elsewhere.own import is_own_process
from autoddp.isolation.elsewhere.patch import Call, Client, plain
from autoddp.isolation.elsewhere.requests import is_own

_TRUE = ("1", "true", "yes", "on")


def _hub(call: Call) -> str:
    if os.environ.get("HF_HUB_OFFLINE", "").lower() in _TRUE:
        return ""  # the library itself refuses
    target = call.argument("repo_id", "from_id", "bucket_id", "repo_name", default="the Hub")
    return f"{'uploads to' if call.operation.startswith(('upload', 'push')) else 'changes'} {plain(target)}"


def _mlflow(call: Call) -> str:
    """Requests to a server on this machine count too: what it records belongs to the user."""
    method, endpoint = str(call.argument("method", default="GET")), str(call.argument("endpoint", default=""))
    if method in ("GET", "HEAD") or endpoint.endswith("/search") or "/get" in endpoint:
        return ""
    host = getattr(call.argument("host_creds"), "host", "a tracking server")
    return f"sends {method} {endpoint} to {plain(host)}"


def _mode(call: Call, variable: str, off: tuple[str, ...]) -> str:
    settings: Any = call.argument("settings")
    if isinstance(settings, dict):
        settings = settings.get("mode")
    else:
        fields = getattr(settings, "model_fields_set", ())
        settings = settings.mode if "mode" in fields else None
    mode = call.argument("mode") or settings or os.environ.get(variable) or "online"
    return "" if mode in off else f"starts a run in mode {mode}"


_wandb = functools.partial(_mode, variable="WANDB_MODE", off=("disabled", "offline", "dryrun", "dry-run"))
_swanlab = functools.partial(_mode, variable="SWANLAB_MODE", off=("disabled", "offline", "local", "backup"))


def _comet(call: Call) -> str:
    return "" if call.kwargs.get("disabled") else "starts an online experiment"


def _neptune(call: Call) -> str:
    mode = getattr(call.argument("mode"), "value", call.argument("mode")) or os.environ.get("NEPTUNE_MODE") or "async"
    return f"starts a run in mode {mode}" if mode in ("async", "sync") else ""


def _clearml(call: Call) -> str:
    return "" if call.owner.is_offline() else "starts a task online"


def _trackio(call: Call) -> str:
    where = call.argument("space_id", "server_url", "bucket_id", "dataset_id")
    where = where or next(
        (v for n, v in os.environ.items() if n.startswith("TRACKIO_") and n[8:] in _TRACKIO and v), ""
    )
    return f"starts a run on {plain(where)}" if where else ""


_TRACKIO = ("SPACE_ID", "SERVER_URL", "BUCKET_ID", "DATASET_ID")


def _sqlalchemy(call: Call) -> str:
    name = getattr(call.owner, "name", "a database")
    return "" if name in ("sqlite", "duckdb") else f"connects to {name}"


def _manager(call: Call) -> str:
    """A manager or a listener of multiprocessing on another machine, or one that the attempt has not started."""
    address: Any = call.argument("address")
    return "" if not isinstance(address, tuple) or is_own(*address[:2]) else f"connects to {address[0]}"


def _zmq(call: Call) -> str:
    """Native code sends. Threads and Unix sockets pass; where nobody listens yet, the attempt may do so later."""
    address = str(call.argument("addr", default=""))
    place = urlsplit(re.sub("//.*;", "//", address))  # before a semicolon stands this end's address
    if place.scheme not in ("tcp", "udp", "pgm", "epgm", "ws", "wss"):
        return ""
    return "" if place.port and is_own(place.hostname or "", place.port) else f"connects to {place.hostname}"


def _ray(call: Call) -> str:
    """A node that only connects is one of a cluster that runs already. Workers of a cluster connect to their own."""
    if not call.argument("connect_only") or call.argument("default_worker"):
        return ""
    host, _, port = str(getattr(call.argument("ray_params"), "gcs_address", "")).rpartition(":")
    return "" if port.isdigit() and is_own(host, int(port)) else f"gives work to the cluster at {host or 'an address'}"


def _psutil(call: Call) -> str:
    """What a method of psutil.Process changes; "" for own processes, and without arguments: it then only asks."""
    values = (*call.args, *call.kwargs.values())
    if not any(value is not None for value in values[call.operation == "rlimit" :]) or is_own_process(call.owner.pid):
        return ""
    return f"changes process {call.owner.pid}, which this run did not start"


_CONNECTS = "connects to a database"
_SHARES = "shares memory or messages with other programs"

# fmt: off
HUBS = (
    Client("huggingface_hub", "huggingface_hub.hf_api", "HfApi.*", judge=_hub,
           reads="get_* list_* *_info *_exists hf_hub_download snapshot_download download_* fetch_* inspect_* whoami "
           "auth_check verify_* wait_for_* parse_* read_* search_* resolve_* run_as_future sync_bucket endpoint token"),
    Client("huggingface_hub", "huggingface_hub._commit_scheduler", "CommitScheduler.__init__", judge=_hub),
    Client("huggingface_hub", "huggingface_hub.hub_mixin", "ModelHubMixin.push_to_hub", judge=_hub),
    Client("huggingface_hub", "huggingface_hub._upload_large_folder", "upload_large_folder_internal", judge=_hub),
    # Before version 1, where git pushes a clone. The program git is checked too; this gives the better reason.
    Client("huggingface_hub", "huggingface_hub.repository", "Repository.git_push .push_to_hub", judge=_hub),
    Client("transformers", "transformers.utils.hub", "PushToHubMixin.push_to_hub", judge=_hub),
    Client("diffusers", "diffusers.utils.hub_utils", "PushToHubMixin.push_to_hub", judge=_hub),
    Client("datasets", "datasets.arrow_dataset datasets.dataset_dict", "Dataset.push_to_hub", judge=_hub),
    Client("datasets", "datasets.dataset_dict", "DatasetDict.push_to_hub", judge=_hub),
    Client("modelscope", "modelscope.hub.api", "HubApi.push_model .create_* .delete_* .upload_*"),
    Client("kagglehub", "kagglehub.models kagglehub.datasets", "model_upload dataset_upload", "uploads", "handle"),
    Client("GitPython", "git.remote", "Remote.push", "pushes to a remote"),
    Client("dulwich", "dulwich.porcelain", "push", "pushes to a remote", "remote_location"),
    Client("dvc", "dvc.repo", "Repo.push", "pushes to its remote"),
)

TRACKERS = (
    Client("mlflow", "mlflow.utils.rest_utils", "http_request", judge=_mlflow),
    Client("wandb", "wandb.sdk.wandb_init", "init", judge=_wandb),
    Client("wandb", "wandb.wandb_agent wandb.agents.pyagent", "agent pyagent", "runs an agent of a sweep"),
    Client("wandb", "wandb.sdk.wandb_sweep", "sweep", "creates a sweep"),
    Client("comet_ml", "comet_ml._online", "Experiment.__init__", judge=_comet),
    Client("comet_ml", "comet_ml.api", "APIExperiment.log_* .delete_* .set_*", "writes"),
    Client("neptune", "neptune.metadata_containers.metadata_container", "MetadataContainer.__init__", judge=_neptune),
    Client("clearml", "clearml.task", "Task.init .create", judge=_clearml),
    Client("swanlab", "swanlab.sdk.cmd.init swanlab.data.sdk swanlab.sdk", "init", judge=_swanlab),
    Client("trackio", "trackio", "init", judge=_trackio),
    # Its server is mostly on this machine, to which HTTP passes; but the windows in it belong to the user.
    Client("visdom", "visdom", "Visdom._send", "draws in a window"),
    Client("aim", "aim.ext.transport.client", "Client.__init__", "records on a server", "remote_path"),
    Client("prometheus_client", "prometheus_client.exposition",
           "push_to_gateway pushadd_to_gateway delete_from_gateway", "changes the metrics of", "gateway"),
    Client("prometheus_client", "prometheus_client.bridge.graphite", "GraphiteBridge.push .start", "sends metrics"),
)

DATABASES = (
    # What is written cannot be seen here, so each connection ends tuning, also one to this machine.
    Client("sqlalchemy", "sqlalchemy.engine.default", "DefaultDialect.connect", judge=_sqlalchemy),
    Client("psycopg", "psycopg.connection", "Connection.connect", _CONNECTS),
    Client("psycopg", "psycopg.connection_async", "AsyncConnection.connect", _CONNECTS),
    Client("psycopg2", "psycopg2", "connect", _CONNECTS),
    Client("asyncpg", "asyncpg.connection asyncpg", "connect", _CONNECTS),
    Client("asyncpg", "asyncpg.pool", "create_pool", _CONNECTS),
    Client("pymysql", "pymysql.connections", "Connection.connect", _CONNECTS),
    Client("MySQLdb", "MySQLdb.connections", "Connection.__init__", _CONNECTS),
    Client("mysql.connector", "mysql.connector.pooling mysql.connector", "connect", _CONNECTS),
    Client("aiomysql", "aiomysql.connection", "Connection._connect", _CONNECTS),
    Client("pymongo", "pymongo.synchronous.mongo_client pymongo.mongo_client", "MongoClient.__init__", _CONNECTS),
    Client("pymongo", "pymongo.asynchronous.mongo_client", "AsyncMongoClient.__init__", _CONNECTS),
    Client("redis", "redis.connection redis.asyncio.connection", "AbstractConnection.connect Connection.connect",
           _CONNECTS),
    Client("valkey", "valkey.connection valkey.asyncio.connection", "AbstractConnection.connect", _CONNECTS),
    Client("oracledb", "oracledb cx_Oracle", "connect create_pool", _CONNECTS),
    Client("pyodbc", "pyodbc", "connect", _CONNECTS),
    Client("pymssql", "pymssql pymssql._pymssql", "connect", _CONNECTS),
    Client("clickhouse_driver", "clickhouse_driver.connection", "Connection.connect", _CONNECTS),
    Client("clickhouse_connect", "clickhouse_connect.driver", "create_client create_async_client", _CONNECTS),
    Client("snowflake", "snowflake.connector.connection", "SnowflakeConnection.__init__", _CONNECTS),
    Client("cassandra", "cassandra.cluster", "Cluster.connect", _CONNECTS),
    Client("neo4j", "neo4j._sync.driver", "GraphDatabase.driver", _CONNECTS),
    Client("kazoo", "kazoo.client", "KazooClient.start", "connects to ZooKeeper"),
    Client("etcd3", "etcd3.client", "Etcd3Client.put .delete* .replace", "writes", "key prefix"),
)

MESSAGES = (
    Client("smtplib", "smtplib", "SMTP.sendmail .send_message .mail .data", "sends mail to", "to_addrs"),
    Client("imaplib", "imaplib", "IMAP4.append .store .copy .expunge .delete", "changes mail"),
    Client("kafka", "kafka.producer.kafka", "KafkaProducer.send", "sends to", "topic"),
    Client("confluent_kafka", "confluent_kafka.cimpl confluent_kafka", "Producer.produce", "sends a message"),
    Client("pika", "pika.adapters.blocking_connection", "BlockingConnection.__init__", "connects to a message queue"),
    Client("paho", "paho.mqtt.client", "Client.publish", "sends to", "topic"),
    Client("celery", "celery.app.task", "Task.apply_async", "sends a task to a queue"),
    Client("multiprocessing", "multiprocessing.connection", "SocketClient", judge=_manager),
    Client("zmq", "zmq.sugar.socket", "Socket.connect", judge=_zmq),
    Client("nats", "nats.aio.client", "Client.publish", "sends to", "subject"),
)

COMPUTERS = (
    Client("docker", "docker.api.client", "APIClient._post ._put ._delete", "changes containers"),
    Client("ray", "ray.job_submission", "JobSubmissionClient.submit_job .stop_job", "runs a job"),
    # Native code talks to the cluster, whose workers run outside the attempt.
    Client("ray", "ray._private.node", "Node.__init__", judge=_ray),
    Client("submitit", "submitit.core.core", "Executor.submit .map_array", "submits a job"),
)

MACHINE = (
    # What all programs of this machine share. The affinity is the calling thread's own.
    Client("pynvml", "pynvml py3nvml.py3nvml nvidia_smi",
           "nvml*Set* nvml*Reset* nvml*Clear* nvmlDeviceCreate* nvmlDeviceModify* nvmlDeviceRemove* nvmlDeviceFreeze* "
           "nvmlDevicePowerSmoothing* nvmlDeviceWorkload* nvmlGpuInstanceCreate* nvml*InstanceDestroy",
           "changes the GPU's settings",
           reads="nvml*Get* nvml*EventSet* nvmlDevice*CpuAffinity nvmlGpmSetStreamingEnabled nvml*_v[0-9]_t nvml*_t"),
    Client("amdsmi", "amdsmi.amdsmi_interface", "amdsmi_set_* amdsmi_reset_* amdsmi_clean_*",
           "changes the GPU's settings"),
    Client("psutil", "psutil", "Process.nice .ionice .cpu_affinity .rlimit", judge=_psutil),
    Client("posix_ipc", "posix_ipc",
           "SharedMemory.__init__ Semaphore.__init__ MessageQueue.__init__ unlink_shared_memory unlink_semaphore "
           "unlink_message_queue", _SHARES),
    Client("sysv_ipc", "sysv_ipc",
           "SharedMemory.__init__ Semaphore.__init__ MessageQueue.__init__ attach remove_shared_memory "
           "remove_semaphore remove_message_queue", _SHARES),
)

# fmt: on
CLIENTS = (*HUBS, *TRACKERS, *DATABASES, *MESSAGES, *COMPUTERS, *MACHINE)
"""All clients but the stores of objects, which are in `storage`."""
