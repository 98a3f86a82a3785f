"""The forms of code that a recipe's settings can be written in, each with what it can say."""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from autoddp.cluster.job_files import WHOLE_NODES
from autoddp.errors import AutoddpError
from autoddp.knobs.base import Value
from autoddp.knobs.computing import THREADS
from autoddp.own_code.settings import Hook, Said, said
from autoddp.recipe import Recipe
from autoddp.topology.nccl.interface_names import GLOO, NCCL

_WIDTH = 88  # of comments: narrower than most people's limit for code
_HOOKS = "torch.distributed.algorithms.ddp_comm_hooks"
_OF_TRAINER = {
    "bucket_cap_mb": "ddp_bucket_cap_mb",
    "broadcast_buffers": "ddp_broadcast_buffers",
    "static_graph": "ddp_static_graph",
}
"""Argument of DDP → the argument of transformers' TrainingArguments that sets it."""
_ALL = ("bucket_cap_mb", "bucket_cap_mb_list", "gradient_as_bucket_view", "batched_grad_copy", "static_graph",
        "broadcast_buffers")  # fmt: skip
_OF_ACCELERATES_KWARGS = ("bucket_cap_mb", "gradient_as_bucket_view", "static_graph", "broadcast_buffers")


@dataclass(frozen=True)
class Form:
    """A form of code."""

    says: str
    lacks: str
    """Why an argument of DDP that is not in `takes` cannot be set in this form."""
    takes: Collection[str]
    """Arguments of DDP's constructor that this form can set."""
    no_hook: Callable[[Recipe], str]
    """Why its lines register no communication hook in this recipe's job; "" if they do."""
    code: Callable[[Recipe, Said], Sequence[str]]
    sets_variables: bool = False
    """Whether its lines set the environment; elsewhere the variables are named in a comment."""
    begins: tuple[str, ...] = ()
    """Lines that have to be the first ones of a file."""


@dataclass(frozen=True)
class Lines:
    """The lines for one form."""

    code: tuple[str, ...]
    by_hand: tuple[str, ...]
    """What the lines do not set as it was measured, and what to do about it."""
    text: str
    """Both, with comments."""


def lines_for(recipe: Recipe, file: str, form: str) -> Lines:
    """The lines for the form named `form`, a key of `FORMS`, of what the recipe in `file` launches.

    AutoddpError if the recipe sets nothing, or was made for one rank.
    """
    if recipe.fits.world_size == 1:
        raise AutoddpError(
            f"recipe code: {file} was made for one rank: it launches the script without DDP's reduction, which no "
            "setting says; start that job without DDP, or give a recipe of several ranks"
        )
    if form == "slurm" and recipe.fits.ranks_of_nodes:
        raise AutoddpError(
            f"recipe code: {file} was made for nodes with different numbers of ranks, and this script starts as many "
            "on each: write it by hand with what --for env and --for ddp say"
        )
    variables = {**recipe.env, **recipe.configuration.variables}
    if not recipe.configuration and not variables:
        raise AutoddpError(
            f"recipe code: {file} launches the script as it is written; only a recipe that changes something can be "
            "written into code"
        )
    one = FORMS[form]
    found = said(recipe.configuration, recipe.fits.backend, one.takes, one.no_hook(recipe), one.lacks)
    nothing = not (found.arguments or found.hook or one.sets_variables)
    code = () if nothing else tuple(one.code(recipe, found))
    by_hand = found.by_hand
    if variables and not one.sets_variables:
        settings = " ".join(f"{name}={shlex.quote(value)}" for name, value in sorted(variables.items()))
        by_hand = (*by_hand, f"environment: start with {settings}")
    by_hand = (*by_hand, *_numpy(recipe, variables), *_network(recipe, variables))
    text = [*one.begins, *_head(recipe, file), *code, *_comments(by_hand)]
    return Lines((*one.begins, *code), by_hand, "\n".join(text))


def _numpy(recipe: Recipe, variables: Collection[str]) -> list[str]:
    """What a launch with the recipe sets beside the number of threads; no recipe has it: builds of torch differ."""
    one_each = recipe.fits.world_size <= recipe.fits.nodes  # torchrun gives one rank of a node no number
    if THREADS.variable not in variables or recipe.evidence.objective or one_each:
        return []
    return [
        "numpy: it was measured with the one thread that torchrun gives each of several ranks; set "
        "OPENBLAS_NUM_THREADS=1 too, where torch computes by MKL"
    ]


def _network(recipe: Recipe, variables: Collection[str]) -> list[str]:
    """What autoddp does at each start on several hosts, and no recipe says: interfaces may change."""
    name = GLOO if recipe.fits.backend == "gloo" else NCCL
    if recipe.fits.nodes == 1 or name in variables:
        return []
    return [
        f"network: autoddp looks for the fastest one between the hosts at each start, and sets {name} to its "
        "interface; where a host has several interfaces, set it yourself"
    ]


def _head(recipe: Recipe, file: str) -> list[str]:
    fits = recipe.fits
    made = f"for {fits.world_size} ranks on {fits.nodes} node{'s' if fits.nodes > 1 else ''}, {fits.backend}"
    return _comment(f"From {file}, {made}, torch {fits.torch}; {recipe.evidence.why}")


def _comments(by_hand: Sequence[str]) -> list[str]:
    if not by_hand:
        return []
    return [
        "",
        "# Not set by these lines as it was measured:",
        *(line for one in by_hand for line in _comment(one, "- ")),
    ]


def _comment(text: str, mark: str = "") -> list[str]:
    return textwrap.wrap(
        text, _WIDTH, initial_indent=f"# {mark}", subsequent_indent="# " + " " * len(mark), break_long_words=False,
        break_on_hyphens=False,
    )  # fmt: skip


def _keywords(arguments: Mapping[str, Value]) -> list[str]:
    return [
        f"    {name}={list(value) if isinstance(value, tuple) else repr(value)}," for name, value in arguments.items()
    ]


def _state(hook: Hook, group: str = "None") -> str:
    """The state that the hook is registered with. `group` reduces; None is the default group, of all ranks."""
    if not hook.state:
        return group
    return f"powerSGD_hook.PowerSGDState({group}, {', '.join(f'{name}={value}' for name, value in hook.state.items())})"


def _hook_import(hook: Hook | None) -> list[str]:
    return [f"from {_HOOKS} import {hook.of_torch.function.partition('.')[0]}"] if hook else []


def _ddp(recipe: Recipe, found: Said) -> list[str]:
    lines = [*_hook_import(found.hook), "from torch.nn.parallel import DistributedDataParallel", ""]
    lines += [
        "model = DistributedDataParallel(",
        "    model,  # and what your call has besides",
        *_keywords(found.arguments),
    ]
    lines += [")"]
    if found.hook:
        # DDP may have a group of its own, of fewer ranks or another backend: torch's hooks do not look there.
        state = _state(found.hook, "model.process_group")
        lines.append(f"model.register_comm_hook({state}, {found.hook.of_torch.function})")
    return lines


def _accelerate(recipe: Recipe, found: Said) -> list[str]:
    arguments = _keywords(found.arguments)
    names = "DistributedDataParallelKwargs"
    if found.hook:
        names = f"DDPCommunicationHookType, {names}"
        arguments.append(f"    comm_hook=DDPCommunicationHookType.{found.hook.of_torch.in_accelerate},")
        arguments += [f"    comm_state_option={dict(found.hook.state)!r},"] if found.hook.state else []
    lines = ["from accelerate import Accelerator", f"from accelerate.utils import {names}", ""]
    lines += ["ddp = DistributedDataParallelKwargs(", *arguments, ")"]
    return [*lines, "accelerator = Accelerator(kwargs_handlers=[ddp])  # and what your call has besides"]


def _lightning(recipe: Recipe, found: Said) -> list[str]:
    arguments = _keywords(found.arguments)
    if found.hook:
        arguments.append(f"    ddp_comm_hook={found.hook.of_torch.function},")
        arguments += [f"    ddp_comm_state={_state(found.hook)},"] if found.hook.state else []
    lines = ["from lightning.pytorch import Trainer", "from lightning.pytorch.strategies import DDPStrategy"]
    lines += [*_hook_import(found.hook), "", "strategy = DDPStrategy(", *arguments, ")"]
    return [*lines, "trainer = Trainer(strategy=strategy)  # and what your call has besides"]


def _trainer(recipe: Recipe, found: Said) -> list[str]:
    arguments = {_OF_TRAINER[name]: value for name, value in found.arguments.items()}
    lines = ["from transformers import TrainingArguments", "", "arguments = TrainingArguments("]
    return [*lines, *_keywords(arguments), "    # and what your call has besides", ")"]


def _env(recipe: Recipe, found: Said) -> list[str]:
    variables = {**recipe.env, **recipe.configuration.variables}
    return [f"export {name}={shlex.quote(value)}" for name, value in sorted(variables.items())]


def _slurm(recipe: Recipe, found: Said) -> list[str]:
    fits = recipe.fits
    each = fits.world_size // fits.nodes
    gpus = [] if fits.devices == ("cpu",) else [f"#SBATCH --gpus-per-node={each}"]
    lines = [f"#SBATCH --nodes={fits.nodes}", "#SBATCH --ntasks-per-node=1", *gpus, WHOLE_NODES]
    lines += _env(recipe, found)
    return [
        *lines,
        'head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
        f"srun torchrun --nnodes {fits.nodes} --nproc-per-node {each} --rdzv-backend c10d \\",
        f'    --rdzv-id "$SLURM_JOB_ID" --rdzv-endpoint "$head:29500" {_script(fits.script)}  # and its arguments',
    ]


def _script(known_as: str) -> str:
    """The words by which torchrun starts the script, from the recipe's folder. A recipe may be somebody else's.

    >>> _script("proj/train.py"), _script("-m proj.train"), _script("a; b.py")
    ('proj/train.py', '-m proj.train', "'a; b.py'")
    """
    if known_as.startswith("-m "):
        return f"-m {shlex.quote(known_as.removeprefix('-m '))}"
    elsewhere = known_as.startswith("*/")  # of its path only the end is known
    return shlex.quote((known_as.rpartition("/")[2] if elsewhere else known_as) or "train.py")


def _registers(_recipe: Recipe) -> str:
    return ""


def _none(_recipe: Recipe) -> str:
    return f"these lines register no hook; {_ELSEWHERE}"


def _on_gpus_alone(recipe: Recipe) -> str:
    """Lightning 2.6 leaves a hook out where the model is not on a GPU, and says nothing."""
    return f"Lightning registers hooks on GPUs alone; {_ELSEWHERE}" if recipe.fits.devices == ("cpu",) else ""


_ELSEWHERE = "model.register_comm_hook(…) does, see --for ddp"

FORMS = {
    "ddp": Form(
        "DDP's constructor and its hook", "DistributedDataParallel has no argument for it", _ALL, _registers, _ddp
    ),
    "accelerate": Form(
        "Accelerate", "Accelerate has no argument for it", _OF_ACCELERATES_KWARGS, _registers, _accelerate
    ),
    "lightning": Form(
        "Lightning's DDPStrategy", "DDPStrategy has no argument for it", _ALL, _on_gpus_alone, _lightning
    ),
    "trainer": Form(
        "Transformers' TrainingArguments", "TrainingArguments has no argument for it", _OF_TRAINER, _none, _trainer
    ),
    "env": Form("variables for a shell", "no variable sets it", (), _none, _env, True),
    "slurm": Form("a batch script", "no variable sets it", (), _none, _slurm, True, ("#!/bin/bash",)),
}
"""Name → form, for `autoddp recipe code FILE --for NAME`."""
