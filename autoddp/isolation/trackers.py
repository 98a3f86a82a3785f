"""Switches experiment trackers off while tuning, and says when a job must not be tuned at all."""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import urlsplit

TRACKERS_OFF = {
    "WANDB_MODE": "disabled",
    "WANDB_ERROR_REPORTING": "false",
    "WEAVE_DISABLED": "true",
    "COMET_MODE": "disabled",  # read by transformers' callback
    "COMET_START_ONLINE": "false",
    "NEPTUNE_MODE": "offline",  # the one value that both of Neptune's clients know
    "CLEARML_OFFLINE_MODE": "1",
    "SWANLAB_MODE": "disabled",
    "DVC_STUDIO_OFFLINE": "true",  # dvclive's live metrics
    "DVC_NO_ANALYTICS": "true",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "POLYAXON_IS_OFFLINE": "true",
    "LANGSMITH_TRACING": "false",
    "LANGCHAIN_TRACING_V2": "false",
    "OTEL_SDK_DISABLED": "true",
    "DISABLE_SAFETENSORS_CONVERSION": "1",  # from_pretrained would ask the Hub for a pull request
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "GRADIO_ANALYTICS_ENABLED": "False",
    "RAY_USAGE_STATS_ENABLED": "0",
    "DO_NOT_TRACK": "true",
}
"""Environment variables of the trackers. Steps of a tuning run are no experiment, and libraries should not count them.

MLflow, Aim and trackio have no such variable: the files that they write are isolated. Their servers end tuning, also
those on this machine, see `elsewhere.clients`.
"""


def why_not(environment: Mapping[str, str]) -> str:
    """Why this job must not be tuned at all, asked before tuning: "" or one line.

    In each of these cases something else has begun the run and hands it over: a server supplies the hyperparameters, or
    has a record of the run already. With the tracker switched off the script would do something else.
    """
    for variable, says in _HANDED_OVER.items():
        if environment.get(variable):
            return f"{variable} is set: {says}"
    if environment.get("WANDB_RUN_ID") and environment.get("WANDB_RESUME", "") in ("must", "allow", "auto"):
        return "WANDB_RUN_ID and WANDB_RESUME are set: the job resumes a run that W&B has recorded"
    uri = environment.get("MLFLOW_TRACKING_URI", "")
    if environment.get("MLFLOW_RUN_ID") and is_server(uri):
        return f"MLFLOW_RUN_ID is set: this job is a run that the tracking server {_host(uri)} has begun"
    return ""


_HANDED_OVER = {
    "WANDB_SWEEP_ID": "a wandb agent supplies the hyperparameters",
    "CLEARML_TASK_ID": "a clearml-agent runs this job, from a task that its server holds",
    "TRAINS_TASK_ID": "a trains-agent runs this job, from a task that its server holds",
    "COMET_OPTIMIZER_ID": "Comet's optimizer supplies the hyperparameters",
    "NNI_TRIAL_JOB_ID": "NNI supplies the hyperparameters",
    "DET_TRIAL_ID": "Determined supplies the hyperparameters",
    "POLYAXON_RUN_UUID": "Polyaxon runs this job and records it",
}


def is_server(uri: str) -> bool:
    """Whether an MLflow URI is a server or a database on one; a file, also SQLite's, is not."""
    scheme = urlsplit(uri).scheme.partition("+")[0].lower()
    return scheme not in ("", "file", "sqlite") or uri.startswith("databricks")


def _host(uri: str) -> str:
    return urlsplit(uri).hostname or uri  # no user name, no password
