"""Trackers are off by their own variables, and a run that somebody else handed over is not tuned."""

from __future__ import annotations

import pytest

from autoddp.isolation.trackers import TRACKERS_OFF, is_server, why_not

HANDED_OVER = {
    "WANDB_SWEEP_ID is set: a wandb agent": {"WANDB_SWEEP_ID": "abc"},
    "WANDB_RUN_ID and WANDB_RESUME are set": {"WANDB_RUN_ID": "a", "WANDB_RESUME": "must"},
    "CLEARML_TASK_ID is set": {"CLEARML_TASK_ID": "abc"},
    "COMET_OPTIMIZER_ID is set": {"COMET_OPTIMIZER_ID": "abc"},
    "NNI_TRIAL_JOB_ID is set": {"NNI_TRIAL_JOB_ID": "abc"},
    "MLFLOW_RUN_ID is set: this job is a run that the tracking server mlflow.example.com has begun": {
        "MLFLOW_RUN_ID": "a",
        "MLFLOW_TRACKING_URI": "https://me:secret@mlflow.example.com/",
    },
}

FREE = (
    {},
    {"WANDB_SWEEP_ID": ""},
    {"WANDB_RUN_ID": "a"},
    {"WANDB_PROJECT": "p", "WANDB_API_KEY": "k"},
    {"MLFLOW_RUN_ID": "a"},
    {"MLFLOW_RUN_ID": "a", "MLFLOW_TRACKING_URI": "file:///runs"},
    {"MLFLOW_TRACKING_URI": "https://mlflow.example.com"},  # ends tuning at the first write, if there is one
    TRACKERS_OFF,
)


@pytest.mark.parametrize(("reason", "environment"), HANDED_OVER.items())
def test_a_run_handed_over_is_not_tuned(reason: str, environment: dict[str, str]) -> None:
    assert why_not(environment).startswith(reason)
    assert "secret" not in why_not(environment)


@pytest.mark.parametrize("environment", FREE)
def test_others_are_tuned(environment: dict[str, str]) -> None:
    assert why_not(environment) == ""


@pytest.mark.parametrize(
    ("uri", "server"),
    [
        ("", False),
        ("./mlruns", False),
        ("file:///x", False),
        ("sqlite:///x.db", False),
        ("http://localhost:5000", True),
        ("databricks", True),
        ("databricks://profile", True),
        ("azureml://eastus.api.azureml.ms", True),
        ("postgresql+psycopg2://u:p@h/d", True),
    ],
)
def test_which_mlflow_uris_are_servers(uri: str, server: bool) -> None:
    assert is_server(uri) is server


def test_variables_are_strings_that_can_be_set() -> None:
    assert all(name.isupper() and value for name, value in TRACKERS_OFF.items())
    assert TRACKERS_OFF["WANDB_MODE"] == "disabled"


def test_the_trackers_themselves_are_off() -> None:
    """By the library, where it is installed: the variable's spelling is what can be wrong."""
    neptune = pytest.importorskip("neptune.types.mode", reason="neptune is not installed")
    assert neptune.Mode(TRACKERS_OFF["NEPTUNE_MODE"])
