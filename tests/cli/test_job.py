"""`autoddp job`: the file is whole, says what was asked, and nothing else is printed. tests/cluster submits one."""

from __future__ import annotations

import json
import shlex

import pytest
import yaml

from autoddp.cli.job import run
from autoddp.errors import UsageError

WORDS = ["--trials", "20", "train.py", "--lr", "0.1", "--note", 'it\'s "so": #1 - {x}\n$HOME é']


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert run(list(words)) == 0
    found = capsys.readouterr()
    assert found.err == ""
    return found.out


def test_a_script_for_slurm(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "slurm", "--nodes", "4", "--gpus=8", "--time", "2:00:00", *WORDS)
    head, _, command = text.partition("srun ")
    assert head.splitlines() == [
        "#!/bin/sh",
        "#SBATCH --job-name=train",
        "#SBATCH --nodes=4",
        "#SBATCH --ntasks-per-node=1",
        "#SBATCH --gpus-per-node=8",
        "#SBATCH --time=2:00:00",
        "#SBATCH --exclusive  # all CPUs of the nodes: without it the one task of a node may get a single CPU",
    ]
    assert shlex.split(command) == ["autoddp", *WORDS]


def test_a_train_job(capsys: pytest.CaptureFixture[str]) -> None:
    manifest = yaml.safe_load(printed(capsys, "kubeflow", "--image", "me/train:1", "--gpus", "8", *WORDS))
    assert manifest["kind"] == "TrainJob"
    assert manifest["metadata"] == {"name": "train"}
    assert manifest["spec"]["runtimeRef"] == {"name": "torch-distributed"}
    assert manifest["spec"]["trainer"] == {
        "image": "me/train:1",
        "numNodes": 2,
        "command": ["autoddp", *WORDS],
        "resourcesPerNode": {"limits": {"nvidia.com/gpu": 8}},
    }


@pytest.mark.parametrize("nodes", [1, 3])
def test_a_pytorch_job(capsys: pytest.CaptureFixture[str], nodes: int) -> None:
    words = ["pytorchjob", "--image", "me/train:1", "--gpus", "8", "--nodes", str(nodes), "--name", "mine", *WORDS]
    manifest = yaml.safe_load(printed(capsys, *words))
    assert manifest["kind"] == "PyTorchJob"
    assert manifest["metadata"] == {"name": "mine"}
    assert manifest["spec"]["nprocPerNode"] == "8"
    roles = manifest["spec"]["pytorchReplicaSpecs"]
    assert {role: spec["replicas"] for role, spec in roles.items()} == {
        "Master": 1,
        **({"Worker": 2} if nodes == 3 else {}),
    }
    for spec in roles.values():
        (container,) = spec["template"]["spec"]["containers"]
        assert container == {
            "name": "pytorch",
            "image": "me/train:1",
            "command": ["autoddp", *WORDS],
            "resources": {"limits": {"nvidia.com/gpu": 8}},
        }


@pytest.mark.parametrize(
    ("script", "name"), [("a/My_Train.py", "my-train"), ("7.py", "job-7"), ("é.py", "job"), ("x" * 90, "x" * 50)]
)
def test_a_job_is_named_after_its_script(capsys: pytest.CaptureFixture[str], script: str, name: str) -> None:
    assert f"#SBATCH --job-name={name}\n" in printed(capsys, "slurm", script)


def test_the_machine_on_which_the_file_is_made_does_not_matter(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The shell of salloc, where `autoddp train.py` would be refused."""
    before = printed(capsys, "slurm", *WORDS)
    for variable, value in {"SLURM_JOB_ID": "1", "SLURM_NNODES": "2"}.items():
        monkeypatch.setenv(variable, value)
    assert printed(capsys, "slurm", *WORDS) == before


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "required: kind"),
        (["lsf", "train.py"], "invalid choice: 'lsf'"),
        (["slurm"], "no script given"),
        (["slurm", "--nodes", "0", "train.py"], "'0': must be a whole number of 1 or more"),
        (["slurm", "--nodes", "two", "train.py"], "'two': must be a whole number of 1 or more"),
        (["slurm", "--nodes"], "expected one argument"),
        (["slurm", "--name", "a\nb", "train.py"], "must be lower-case letters"),
        (["slurm", "--time", "soon", "train.py"], "must be a time such as 2:00:00"),
        (["slurm", "--nnodes", "4", "train.py"], "job: --nnodes: on a cluster"),
        (["slurm", "--standalone", "train.py"], "job: --standalone: on a cluster"),
        (["slurm", "--unheard-of", "train.py"], "unknown option --unheard-of"),
        (["slurm", "--allow", "exact", "--gpus", "8", "train.py"], "job: --gpus: an option of the file: write it"),
        (["slurm", "--seed", "1", "--nodes=4", "train.py"], "job: --nodes: an option of the file: write it"),
        (["slurm", "--image", "me/train", "train.py"], "job: --image me/train: Slurm's script starts no container"),
        (["kubeflow", "train.py"], "name an image"),
        (["pytorchjob", "--time", "1:00", "--image", "x", "train.py"], "only Slurm's script has a limit of time"),
    ],
    ids=json.dumps,
)
def test_words_that_make_no_file(words: list[str], says: str) -> None:
    with pytest.raises(UsageError, match=r"^.*$") as refused:
        run(words)
    assert says in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("kind", ["kubeflow", "pytorchjob"])
def test_kubernetes_puts_no_variables_into_the_words(capsys: pytest.CaptureFixture[str], kind: str) -> None:
    """In a container's command it takes $(RANK) for a variable and $$ for $; $$(RANK) and $$$ are these words."""
    text = printed(capsys, kind, "--image", "me/train:1", "train.py", "$(RANK)", "a$$b", "$HOME", "$")
    assert '["autoddp", "train.py", "$$(RANK)", "a$$$b", "$HOME", "$"]' in text


def test_names_that_are_not_utf_8_stay_as_they_are(capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    """`--data café` in Latin-1: Slurm's script hands on the same bytes, and a manifest cannot hold them."""
    assert run(["slurm", "train.py", "--data", "caf\udce9"]) == 0
    assert b"srun autoddp train.py --data 'caf\xe9'\n" in capsysbinary.readouterr().out
    with pytest.raises(UsageError, match=r"^job: caf\\udce9: not UTF-8"):
        run(["kubeflow", "--image", "me/train:1", "train.py", "--data", "caf\udce9"])


@pytest.mark.parametrize("kind", ["kubeflow", "pytorchjob"])
def test_letters_beyond_16_bits_are_read_again(capsys: pytest.CaptureFixture[str], kind: str) -> None:
    words = ["train.py", "--name", "🙂 \x7f\u2028 \\ud83d"]
    text = printed(capsys, kind, "--image", "me/train:1", *words)
    assert text.isascii()
    manifest = yaml.safe_load(text)["spec"]
    trainer = manifest["trainer"] if kind == "kubeflow" else manifest["pytorchReplicaSpecs"]["Master"]["template"]
    found = trainer if kind == "kubeflow" else trainer["spec"]["containers"][0]
    assert found["command"] == ["autoddp", *words]


@pytest.mark.parametrize("words", [["-h"], ["slurm", "-h"], ["kubeflow", "-h"], ["slurm", "--nodes", "4", "--help"]])
def test_the_help_is_the_files_and_fits_a_terminal(
    words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as ended:
        run(words)
    assert ended.value.code == 0
    out = capsys.readouterr().out
    assert "--image IMAGE" in out
    assert max(map(len, out.splitlines())) <= 80
