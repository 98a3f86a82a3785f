"""The files with which a job is submitted: a batch script for Slurm, and manifests for Kubeflow.

JSON is YAML too, so words and names stand in the manifests as JSON has them, and need no other quoting.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

WHOLE_NODES = "#SBATCH --exclusive  # all CPUs of the nodes: without it the one task of a node may get a single CPU"
"""A line of each batch script that starts one launcher per node."""


@dataclass(frozen=True, kw_only=True)
class JobRequest:
    """A job that is to be submitted; `FILES` prints it.

    print(FILES["slurm"](JobRequest(name="train", words=("train.py",), nodes=2)))
    """

    name: str
    words: tuple[str, ...]
    """The command line behind `autoddp`."""
    nodes: int
    gpus: int | None = None
    """GPUs of each node. None: the file asks for none."""
    time: str | None = None
    """Limit of the job's time, as Slurm writes it."""
    image: str = ""
    """The container's image, for Kubeflow."""

    @property
    def command(self) -> tuple[str, ...]:
        """The words that each node runs."""
        return ("autoddp", *self.words)


def slurm_script(job: JobRequest) -> str:
    """A batch script for sbatch."""
    asked = {
        "job-name": job.name,
        "nodes": job.nodes,
        "ntasks-per-node": 1,
        "gpus-per-node": job.gpus,
        "time": job.time,
    }
    lines = [f"#SBATCH --{option}={value}" for option, value in asked.items() if value is not None]
    return "\n".join(["#!/bin/sh", *lines, WHOLE_NODES, f"srun {shlex.join(job.command)}"])


def train_job(job: JobRequest) -> str:
    """A manifest of a TrainJob, of Kubeflow Trainer v2."""
    trainer = {
        "image": job.image,
        "numNodes": job.nodes,
        "command": _literal(job.command),
        **_gpus(job, "resourcesPerNode"),
    }
    return _yaml(
        {
            "apiVersion": "trainer.kubeflow.org/v1alpha1",
            "kind": "TrainJob",
            "metadata": {"name": job.name},
            "spec": {"runtimeRef": {"name": "torch-distributed"}, "trainer": trainer},
        }
    )


def pytorch_job(job: JobRequest) -> str:
    """A manifest of a PyTorchJob, of Kubeflow's Training Operator v1: one master, and workers for the other nodes."""
    container = {"name": "pytorch", "image": job.image, "command": _literal(job.command), **_gpus(job, "resources")}

    def replicas(count: int) -> dict[str, object]:
        return {
            "replicas": count,
            "restartPolicy": "Never",
            "template": {"spec": {"containers": [container]}},
        }

    roles = {"Master": 1, "Worker": job.nodes - 1}
    return _yaml(
        {
            "apiVersion": "kubeflow.org/v1",
            "kind": "PyTorchJob",
            "metadata": {"name": job.name},
            "spec": {
                **({} if job.gpus is None else {"nprocPerNode": str(job.gpus)}),
                "pytorchReplicaSpecs": {role: replicas(count) for role, count in roles.items() if count},
            },
        }
    )


FILES: Mapping[str, Callable[[JobRequest], str]] = {
    "slurm": slurm_script,
    "kubeflow": train_job,
    "pytorchjob": pytorch_job,
}
"""Kind of file → what makes it."""


def _gpus(job: JobRequest, field: str) -> dict[str, object]:
    return {} if job.gpus is None else {field: {"limits": {"nvidia.com/gpu": job.gpus}}}


def _literal(words: Sequence[str]) -> list[str]:
    """The words as a container gets them: in its command Kubernetes takes `$(NAME)` for a variable, and `$$` for `$`.

    >>> _literal(["$(RANK)", "a$$b", "$HOME"])
    ['$$(RANK)', 'a$$$b', '$HOME']
    """
    return [re.sub(r"\$(?=[$(])", "$$", word) for word in words]


def _yaml(value: Mapping[str, object], indent: str = "") -> str:
    """A manifest's text: mappings over lines, a list of mappings likewise, all else as JSON."""
    lines = []
    for key, item in value.items():
        if isinstance(item, Mapping):
            lines += [f"{indent}{key}:", _yaml(item, f"{indent}  ")]
        elif isinstance(item, list) and item and isinstance(item[0], Mapping):
            lines.append(f"{indent}{key}:")
            for one in item:
                first, *others = _yaml(one, f"{indent}    ").split("\n")
                lines += [f"{indent}  - {first.strip()}", *others]
        else:
            lines.append(f"{indent}{key}: {_json(item)}")
    return "\n".join(lines)


def _json(value: object) -> str:
    r"""The value as JSON that is YAML too: YAML has no pairs of \u…, by which JSON writes what lies beyond 16 bits.

    >>> print(_json(["é", "🙂"]))
    ["\U000000e9", "\U0001f642"]
    """
    text = json.dumps(value, ensure_ascii=False)
    return "".join(letter if " " <= letter <= "~" else f"\\U{ord(letter):08x}" for letter in text)
