"""Every script of tests/scripts is tuned and launched, or run as written with the reason; the result is torchrun's.

Only exact settings are allowed here, so the launched job's parameters may differ from torchrun's by rounding alone.
"""

import json
import re
from pathlib import Path

import pytest
import torch
from launchers import AUTODDP, BRIEF, SCRIPTS, Launch, free_port, start, whole
from scripts.several import folder_of
from torch.distributed.launcher.api import LaunchConfig

from autoddp.recipe import load
from autoddp.topology import numa_nodes

TUNED = [
    whole("bind_name.py --how all"),
    whole("positional.py"),
    whole("subclass.py"),
    whole("two_models.py"),
    whole("no_sync.py"),  # of the others here, alike.py is tuned below; the equality matrix turns knobs under no_sync
    whole("toggle_sync.py"),
    whole("grad_scaler.py"),
    whole("best_checkpoint.py"),  # traces have its ways to write, at each level of isolation
    whole("snapshot.py"),
    whole("rank0_evaluates.py"),
    whole("closure.py"),
    whole("gan.py"),
    whole("no_optimizer.py"),
    whole("compiled.py --where around"),
]
RANKS = torch.cuda.device_count() or max(2, len(numa_nodes()))  # of a host, where nobody says how many
LONG = {"TUNED_TIMES_LONGER": "12"}
UNDIAGNOSED = ("--diagnose-budget", "0")


def run(
    command: tuple[str, ...], folder: Path, script: str, *options: str, env: dict[str, str] | None = None
) -> Launch:
    """One launch of two ranks in its own folder, to the end."""
    name, *arguments = script.split()
    words = ["--nproc-per-node", "2", *options, str(SCRIPTS / name), *arguments]
    return start(command, folder, words, env).wait()


def summary(launch: Launch) -> dict:
    """The newest summary.json that a launch left behind."""
    return summary_in(launch.folder)


def summary_in(folder: Path) -> dict:
    """The newest one in a launch's folder."""
    return json.loads(max(folder.glob(".autoddp/2*/summary.json")).read_text())


def ranks_said(launch: Launch) -> list[int]:
    """The numbers of ranks that autoddp has chosen and said."""
    return [int(number) for number in re.findall(r"^autoddp: (\d+) ranks? on this host, ", launch.stderr, re.MULTILINE)]


def same_parameters(found: Path, expected: Path) -> bool:
    """Whether both runs trained both ranks to the same parameters, up to rounding."""
    pairs = [(torch.load(found / f"rank{r}.pt"), torch.load(expected / f"rank{r}.pt")) for r in (0, 1)]
    return all(torch.allclose(a[name], b[name], rtol=1e-3, atol=1e-4) for a, b in pairs for name in b)


BY_TORCHRUN = {
    "test_tuned_and_launched": lambda script: [script],
    "test_the_plainest_script_is_tuned_and_launched": lambda: ["plain.py"],
}


@pytest.mark.parametrize("script", TUNED)
def test_tuned_and_launched(script, by_torchrun, tmp_path):
    tuned = run(BRIEF, tmp_path / "tuned", script, "--trials", "1", "--allow", "exact", *UNDIAGNOSED, env=LONG)
    assert tuned.returncode == 0, tuned.stderr[-2000:]
    check_tuned_and_launched(script, tuned.folder, by_torchrun, 1)


def test_the_plainest_script_is_tuned_and_launched(by_torchrun, tuned_plain):
    check_tuned_and_launched("plain.py", tuned_plain, by_torchrun, 2)


@pytest.mark.whole
@pytest.mark.skipif(not hasattr(LaunchConfig, "virtual_local_rank"), reason="this torchrun has no such option")
def test_ranks_are_tuned_that_torchrun_itself_has_told_that_each_is_local_rank_0(tmp_path):
    words = ["--virtual-local-rank", "--trials", "1", "--allow", "exact", "--tune-only", *UNDIAGNOSED]
    tuned = run(AUTODDP, tmp_path / "tuned", "plain.py", *words, env=LONG)
    assert tuned.returncode == 0, tuned.stderr[-2000:]
    assert "not tuned" not in tuned.stderr
    assert summary(tuned)["baseline"]["seconds"] > 0


def check_tuned_and_launched(script, folder, by_torchrun, trials):
    study = summary_in(folder)
    assert study["baseline"]["seconds"] > 0
    # no trial where next to nothing can be won (no_sync reduces once in four backward passes)
    assert len(study["trials"]) == (trials if study["headroom"]["interval"][1] >= 0.03 else 0)
    assert all(trial["state"] != "failed" for trial in study["trials"])
    compiled = "the module is compiled, and a new cap would compile it again: --recompile tries a few"
    assert (study["job"]["left_out"].get("bucket_cap_mb") == compiled) is script.startswith("compiled.py")
    assert same_parameters(folder, by_torchrun / folder_of(script))


@pytest.mark.whole
def test_a_script_of_thirty_steps_is_started_again_until_the_study_is_over(tmp_path):
    tuned = run(AUTODDP, tmp_path / "tuned", "short.py", "--trials", "1", "--allow", "exact")
    assert tuned.returncode == 0, tuned.stderr[-2000:]
    assert len(summary(tuned)["trials"]) == 1
    assert len(list(tuned.folder.glob(".autoddp/2*/attempt*"))) > 1
    assert (tuned.folder / "rank0.pt").exists()


@pytest.mark.parametrize("script", [whole("no_ddp.py"), whole("exits_at_once.py")])  # below is one that stays
def test_without_ddp_the_script_runs_as_written_and_the_reason_is_said(script, tmp_path):
    launch = run(AUTODDP, tmp_path / "run", script, "--trials", "2")
    assert launch.returncode == 0
    assert "not tuned, launching as written: the script built no DistributedDataParallel model" in launch.stderr
    assert not list(launch.folder.glob("*.toml"))
    assert script == "exits_at_once.py" or (launch.folder / "rank0.pt").exists()


def test_uneven_inputs_under_join_end_tuning_and_that_is_said(tmp_path):
    """A rank without inputs takes no orders: the others must not wait for it until they count as hung."""
    launch = run(AUTODDP, tmp_path / "run", "uneven.py", "--trials", "2")
    assert launch.returncode == 0, launch.stderr[-2000:]
    assert "not tuned, launching as written: inside join() a rank has no more inputs" in launch.stderr
    assert not list(launch.folder.glob("*.toml"))
    assert (launch.folder / "rank1.pt").exists()


def test_a_script_that_checks_its_ranks_is_tuned_without_a_headroom(tmp_path):
    """The headroom needs steps without reduction. What its optimizer keeps of them parts the ranks later, too."""
    options = ("--trials", "1", "--allow", "exact", "--diagnose-budget", "0")
    launch = run(BRIEF, tmp_path / "run", "alike.py --every 1", *options, env=LONG)
    assert launch.returncode == 0, launch.stderr[-2000:]
    said = r"fails in steps without DDP's reduction, or after them: rank 1: Assertion"
    assert re.search(said, launch.stderr), launch.stderr[-2000:]
    study = summary(launch)
    assert study["headroom"] == {"share": 0.0, "interval": [0.0, 1.0], "without_reduction": []}
    assert [trial["state"] for trial in study["trials"]] == ["measured"]
    assert (launch.folder / "rank1.pt").exists()


IN_THREADS = """
import threading
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
torch.manual_seed(7)
models = [DDP(torch.nn.Linear(16, 16), process_group=dist.new_group()) for _ in range(2)]

def train(model):
    sgd = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(400):
        sgd.zero_grad()
        model(torch.ones(4, 16)).sum().backward()
        sgd.step()

threads = [threading.Thread(target=train, args=(model,)) for model in models]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print("trained")
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.whole  # tests/worker/test_trainer_threads.py has when it is seen
def test_models_that_threads_train_at_the_same_time_end_tuning_and_that_is_said(tmp_path):
    """Where a step of one ended, the other got another reducer in the middle of a pass, and all waited to the end.

    torch may end a rank by SIGSEGV before that is seen: it allows no hook to go while another thread runs backward.
    """
    script = tmp_path / "in_threads.py"
    script.write_text(IN_THREADS)
    launch = run(AUTODDP, tmp_path / "run", str(script), "--trials", "2")
    assert launch.returncode == 0, launch.stderr[-2000:]
    why = "(the script trains several DDP models in a thread each|rank . (was )?killed by SIG)"
    assert re.search(f"not tuned, launching as written: {why}", launch.stderr), launch.stderr[-2000:]
    assert launch.stdout.count("trained") == 2


@pytest.mark.whole  # tests/worker/test_fitting.py has the reason, and how one is said is above
def test_an_unpickled_model_ends_tuning_and_that_is_said(tmp_path):
    """DDP's constructor does not run for it. The first launch writes the file; the second one finds it."""
    assert run(AUTODDP, tmp_path / "run", "whole_object.py", "--trials", "0").returncode == 0
    launch = run(AUTODDP, tmp_path / "run", "whole_object.py", "--trials", "2")
    assert launch.returncode == 0, launch.stderr[-2000:]
    said = "the script trains a DDP object that it has unpickled or copied: no configuration can be applied to that one"
    assert f"not tuned, launching as written: {said}" in launch.stderr
    assert not list(launch.folder.glob("*.toml"))


PASSES_BY_DDP = """
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

class WithTrainStep(DDP):
    def train_step(self, inputs):  # as MMDistributedDataParallel of mmcv 1
        self.reducer._rebuild_buckets()
        output = self.module(inputs)
        self.reducer.prepare_for_backward([])
        return output

dist.init_process_group("gloo")
torch.manual_seed(7)
model = WithTrainStep(torch.nn.Linear(16, 16))
sgd = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in range(400):
    sgd.zero_grad()
    model.train_step(torch.ones(4, 16)).sum().backward()
    sgd.step()
del model
dist.destroy_process_group()
"""
UNDER_NO_SYNC = PASSES_BY_DDP.replace(
    """        self.reducer._rebuild_buckets()
        output = self.module(inputs)
""",
    """        with self.no_sync():  # as torch.distributed.pipelining, and Accelerate's trigger_sync_in_backward
            output = self(inputs)
""",
)


@pytest.mark.whole  # tests/worker/test_apply.py has the reason, and how one is said is above
@pytest.mark.parametrize("code", [PASSES_BY_DDP, UNDER_NO_SYNC], ids=["past forward", "under no_sync"])
def test_passes_that_do_not_begin_in_ddps_forward_end_tuning_and_that_is_said(tmp_path, code):
    """They reduce, and "the script reduces nothing through DDP" would be wrong."""
    script = tmp_path / "passes_by.py"
    script.write_text(code)
    launch = run(AUTODDP, tmp_path / "run", str(script), "--trials", "2")
    assert launch.returncode == 0, launch.stderr[-2000:]
    said = "the script prepares the reducer of a DDP object itself, where no forward pass of the object does: such"
    assert f"not tuned, launching as written: {said}" in launch.stderr
    assert not list(launch.folder.glob("*.toml"))


WORKS_ON_ITS_OWN_FILE = """
import os
with open("counted", "a") as file:
    print(os.environ["WORLD_SIZE"], "AUTODDP_TUNING" in os.environ, file=file)
assert len(open("counted").readlines()) <= 1 or "AUTODDP_TUNING" in os.environ
"""


def test_a_script_without_ddp_is_not_run_several_times_over_its_own_files(tmp_path):
    script = tmp_path / "alone.py"
    script.write_text(WORKS_ON_ITS_OWN_FILE)
    launch = start(AUTODDP, tmp_path / "run", [str(script), "--trials", "2"]).wait()
    assert launch.returncode == 0, launch.stderr[-2000:]
    assert ranks_said(launch) == [RANKS]
    assert "not tuned, launching as written: the script built no DistributedDataParallel model" in launch.stderr
    assert "\nautoddp: --objective steps tunes a script that reduces gradients without DDP\n" in launch.stderr
    assert not list(launch.folder.glob("*.toml"))
    assert launch.stderr.count("autoddp: launching 1 rank, as torchrun does: ") == 1
    assert (launch.folder / "counted").read_text() == "1 False\n"


MEETS_BEFORE = """
import os
import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous
from torch.nn.parallel import DistributedDataParallel as DDP

store, rank, size = next(rendezvous("env://"))
dist.init_process_group("gloo", store=dist.PrefixStore("before", store), rank=rank, world_size=size)
if rank == 0:
    layer = torch.nn.Linear(16, 16)
    alone = torch.optim.SGD(layer.parameters(), lr=0.01)
    for _ in range(60):
        alone.zero_grad()
        layer(torch.ones(4, 16)).sum().backward()
        alone.step()
dist.barrier()  # until rank 0 has prepared the data, and found its rate
layer = torch.nn.Linear(16, 16)
teacher = torch.optim.SGD(layer.parameters(), lr=0.01)
for _ in range(60):  # on all ranks
    teacher.zero_grad()
    layer(torch.ones(4, 16)).sum().backward()
    dist.all_reduce(layer.weight.grad)
    teacher.step()
dist.destroy_process_group()
dist.init_process_group("gloo")
torch.manual_seed(7)
model = DDP(torch.nn.Linear(16, 16))
sgd = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in range(10_000 if os.environ.get("AUTODDP_TUNING") == "1" else 20):
    sgd.zero_grad()
    model(torch.ones(4, 16)).sum().backward()
    sgd.step()
if rank == 0:
    print("trained by", size)
del model
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def met_before(tmp_path_factory):
    """A launch for which nobody gives a number of ranks: tuned and launched with those that this host has by itself."""
    folder = tmp_path_factory.mktemp("met_before")
    (folder / "meets_before.py").write_text(MEETS_BEFORE)
    words = ["--trials", "1", "--allow", "exact", "--diagnose-budget", "0", "../meets_before.py"]
    launch = start(BRIEF, folder / "run", words).wait()
    assert launch.returncode == 0, launch.stderr[-2000:]
    assert launch.stdout == f"trained by {RANKS}\n"
    return launch


def test_a_group_that_is_destroyed_and_steps_without_ddp_do_not_end_tuning_before_training(met_before):
    """Else the script would count as one without DDP, and be launched with one rank."""
    launch = met_before
    assert "built no DistributedDataParallel model" not in launch.stderr
    assert summary(launch)["baseline"]["seconds"] > 0


TAKES_A_PORT = """
import os, socket, time
server = socket.create_server(("127.0.0.1", int(os.environ["OWN_PORT"])))
time.sleep(60 * (int(os.environ["WORLD_SIZE"]) - 1))
print("alone with its port, of", os.environ["WORLD_SIZE"])
"""


def test_a_script_without_ddp_that_fails_as_several_ranks_runs_as_one(tmp_path):
    """As under torchrun. The failure says nothing about DDP: the script has built no model before."""
    script = tmp_path / "server.py"
    script.write_text(TAKES_A_PORT)
    launch = start(AUTODDP, tmp_path / "run", [str(script), "--trials", "2"], {"OWN_PORT": free_port()}).wait()
    assert "OSError" in launch.stderr
    assert launch.returncode == 0, launch.stderr[-2000:]
    assert launch.stdout == "alone with its port, of 1\n"


@pytest.mark.whole
def test_a_snapshot_written_while_tuning_is_not_there_to_resume_from(tmp_path):
    tuned = run(AUTODDP, tmp_path / "tuned", "snapshot.py", "--trials", "1", "--tune-only", env=LONG)
    assert tuned.returncode == 0
    assert not (tuned.folder / "snapshot.pt").exists()


def test_a_saved_recipe_is_launched_without_trials(met_before):
    """Nobody gives a number of ranks here either."""
    (recipe,) = met_before.folder.glob("*.toml")
    assert recipe.name.endswith(".meets_before.autoddp.toml")
    fits = load(recipe).fits
    assert fits.script.endswith("/meets_before.py")
    assert fits.inputs == ("0: float32[4, 16]",)
    before, said = recipe.read_text(), met_before.stderr
    again = start(AUTODDP, met_before.folder, ["../meets_before.py"]).wait()
    assert again.returncode == 0
    says = again.stderr.removeprefix(said)
    assert ranks_said(again) == [RANKS, RANKS]
    assert again.stdout == f"trained by {RANKS}\n" * 2
    assert f"recipe {recipe.name}: launching" in says
    assert "trial" not in says
    assert recipe.read_text() == before
    assert len(list(again.folder.glob(".autoddp/2*"))) == 1
