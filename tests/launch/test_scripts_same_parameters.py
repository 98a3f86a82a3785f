"""Every script of tests/scripts trains to the same parameters under autoddp, untuned, as under torchrun: bit by bit."""

import pytest
import torch
from launchers import SCRIPTS, SEVERAL, SIDES, chosen, start, whole
from scripts.several import folder_of

BINDINGS = ("from_import", "torch_nn", "nn_parallel", "own_module", "local_import", "all")
COMMANDS = [
    "plain.py",
    *(f"bind_name.py --how {how}" for how in BINDINGS),
    "positional.py",
    "subclass.py",
    "two_models.py",
    "no_sync.py",
    "toggle_sync.py",
    "grad_scaler.py",
    "best_checkpoint.py",
    "snapshot.py",
    "whole_object.py",
    "rank0_evaluates.py",
    "closure.py",
    "gan.py",
    "short.py",
    "no_ddp.py",
    "planted_failure.py --kind raise",
    "micro_batches.py",
    "large_batch.py",
    "compiled.py --where inside",
    "compiled.py --where around",
    "no_optimizer.py",
    "odd_gradients.py noise",
    "batch_norm.py",
    "unused.py --from-step 12",
    "uneven.py",
    "slow_loader.py --slow none --epochs 1",
    "alike.py",
]
NOT_TRAINING = {
    "bars.py",
    "common.py",
    "several.py",
    "reporter.py",
    "recorded_failure.py",
    "planted_exception.py",
    "exits_at_once.py",
    "small_calls.py",
}
IN_A_SETTING_OF_THEIR_OWN = {
    "destroys_its_group_first.py",
    "learners.py",
    "needs_a_file.py",
    "own_ranks.py",
    "own_ranks_by_fork.py",
    "stateful.py",
}


@pytest.fixture(scope="module")
def commands(request):
    """Those that are run."""
    return chosen(request, "test_same_parameters", "command")


@pytest.fixture(scope="module")
def trained(commands, tmp_path_factory):
    """All scripts in one launch."""
    words = ["--nproc-per-node", "2", SEVERAL, *commands, "exits_at_once.py"]
    return start(SIDES["autoddp"], tmp_path_factory.mktemp("scripts") / "autoddp", words).wait()


def test_all_ran(trained):
    assert trained.returncode == 0, trained.stderr[-2000:]
    assert trained.stdout.count("nothing to do") == 2


def test_no_script_is_forgotten():
    known = {command.split()[0] for command in COMMANDS} | NOT_TRAINING | IN_A_SETTING_OF_THEIR_OWN
    assert known == {path.name for path in SCRIPTS.glob("*.py")}


# test_tuned_scripts.py has plain.py and alike.py
SAMPLE = {"bind_name.py --how all", "no_sync.py", "two_models.py", "closure.py", "no_ddp.py"}
BY_TORCHRUN = {"test_same_parameters": lambda command: [command]}


@pytest.mark.parametrize("command", [name if name in SAMPLE else whole(name) for name in COMMANDS])
def test_same_parameters(trained, by_torchrun, command):
    for rank in (0, 1):
        expected, found = (
            torch.load(folder / folder_of(command) / f"rank{rank}.pt") for folder in (by_torchrun, trained.folder)
        )
        assert expected
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_ranks_agree_only_where_ddp_is(trained, commands):
    """Without this, scripts whose reduction does nothing would pass all the above."""
    for command in commands:
        first, second = (torch.load(trained.folder / folder_of(command) / f"rank{rank}.pt") for rank in (0, 1))
        same = all(torch.equal(first[name], second[name]) for name in first if "running_" not in name)
        assert same == (command != "no_ddp.py"), command
