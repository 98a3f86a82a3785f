"""Every script of tests/scripts trains to the same parameters under autoddp, untuned, as under torchrun: bit by bit."""

import pytest
import torch
from launchers import SCRIPTS, SIDES, chosen, side_by_side, whole

BINDINGS = ("from_import", "torch_nn", "nn_parallel", "own_module", "local_import", "all")
# command: its folder
COMMANDS = {
    "plain.py": "plain",
    **{f"bind_name.py --how {how}": f"bind_name-how-{how}" for how in BINDINGS},
    "positional.py": "positional",
    "subclass.py": "subclass",
    "two_models.py": "two_models",
    "no_sync.py": "no_sync",
    "toggle_sync.py": "toggle_sync",
    "grad_scaler.py": "grad_scaler",
    "best_checkpoint.py": "best_checkpoint",
    "snapshot.py": "snapshot",
    "rank0_evaluates.py": "rank0_evaluates",
    "closure.py": "closure",
    "gan.py": "gan",
    "short.py": "short",
    "no_ddp.py": "no_ddp",
    "planted_failure.py --kind raise": "planted_failure-kind-raise",
    "micro_batches.py": "micro_batches",
    "large_batch.py": "large_batch",
    "compiled.py --where inside": "compiled-where-inside",
    "compiled.py --where around": "compiled-where-around",
    "no_optimizer.py": "no_optimizer",
    "odd_gradients.py noise": "odd_gradients-noise",
}
NOT_TRAINING = {
    "common.py",
    "several.py",
    "reporter.py",
    "recorded_failure.py",
    "planted_exception.py",
    "exits_at_once.py",
}
IN_A_SETTING_OF_THEIR_OWN = {"needs_a_file.py", "stateful.py"}


@pytest.fixture(scope="module")
def commands(request):
    """Those that are run."""
    return chosen(request, "test_same_parameters", "command")


@pytest.fixture(scope="module")
def trained(commands, tmp_path_factory):
    """All scripts in one launch a side."""
    words = ["--nproc-per-node", "2", str(SCRIPTS / "several.py"), *commands, "exits_at_once.py"]
    return side_by_side(tmp_path_factory.mktemp("scripts"), words)


def test_all_ran(trained):
    assert {side: launch.returncode for side, launch in trained.items()} == dict.fromkeys(SIDES, 0)
    assert trained["autoddp"].stdout.count("nothing to do") == 2


def test_no_script_is_forgotten():
    known = {command.split()[0] for command in COMMANDS} | NOT_TRAINING | IN_A_SETTING_OF_THEIR_OWN
    assert known == {path.name for path in SCRIPTS.glob("*.py")}


SAMPLE = ("plain", "bind_name-how-all", "two_models", "no_sync", "best_checkpoint", "closure", "gan", "no_ddp", "short")


@pytest.mark.parametrize("command", [name if COMMANDS[name] in SAMPLE else whole(name) for name in COMMANDS])
def test_same_parameters(trained, command):
    folders = {side: launch.folder / COMMANDS[command] for side, launch in trained.items()}
    for rank in (0, 1):
        expected, found = (torch.load(folders[side] / f"rank{rank}.pt") for side in SIDES)
        assert expected
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_ranks_agree_only_where_ddp_is(trained, commands):
    """Without this, scripts whose reduction does nothing would pass all the above."""
    for command in commands:
        folder = COMMANDS[command]
        first, second = (torch.load(trained["autoddp"].folder / folder / f"rank{rank}.pt") for rank in (0, 1))
        same = all(torch.equal(first[name], second[name]) for name in first if "running_" not in name)
        assert same == (command != "no_ddp.py"), command
