"""Drives configurations through a trial and through the real job, and writes down what is then in effect.

    python effect_checks.py FOLDER            all of them; each result is a file that test_effects.py reads

The trial is the worker of the tuning job (`start_tuning`) with a launcher's end of the link that asks for one block
after another. The job is the worker under a recipe (`start_applying`). Each runs in a process of its own, forked after
torch was imported; where a configuration has variables, with these. OMP_NUM_THREADS must be set.
"""

from __future__ import annotations

import copy
import gc
import io
import json
import os
import pickletools
import socket
import sys
import warnings
import zipfile
from collections.abc import Callable
from os import sched_getaffinity  # the system's own: under a binding the script is given another answer
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
import torch._inductor.config
import torch.distributed as dist
from static_backend import StaticBackend
from static_graphs import static_callables
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from autoddp.knobs import KNOBS, Configuration, Reach, Rung
from autoddp.knobs.env import keeps_memory
from autoddp.wire import BlockDone, Finish, Measure, Message, Ready, WatchPlan, WorkerConfig
from autoddp.worker.ddp.arguments import AVAILABLE_ARGUMENTS
from autoddp.worker.ddp.model import parameters_digest
from autoddp.worker.ddp.used_parameters import UsedParameters
from autoddp.worker.gradients.accumulation import Accumulation
from autoddp.worker.gradients.deferred import ImplicitNoSync
from autoddp.worker.graphs import Graphs
from autoddp.worker.graphs.reduce_overhead import ReduceOverhead
from autoddp.worker.hooks import hook_for
from autoddp.worker.job.applying import start_applying
from autoddp.worker.trial.tuning import start_tuning

WIDTH, BLOCKS, STEPS = 256, 3, 8
BUILT_LATER = 3  # steps after a turn, in the script that builds models meanwhile

PLAIN: dict[str, dict[str, Any]] = {
    "cap": {"bucket_cap_mb": 0.5},
    "list": {"bucket_cap_mb_list": [0.5, 1.0]},
    "view": {"gradient_as_bucket_view": True},
    "no view": {"gradient_as_bucket_view": False, "bucket_cap_mb": 1},
    "copy": {"batched_grad_copy": True},
    "static": {"static_graph": True},
    "own buffers": {"broadcast_buffers": False},
    "fp16": {"hook": "fp16"},
    "bf16": {"hook": "bf16", "bucket_cap_mb": 0.5},
    "powersgd": {"hook": "powersgd", "powersgd_rank": 2},
    "batched": {"hook": "powersgd", "powersgd_rank": 1, "powersgd_batched": True, "powersgd_factors": "bf16"},
    "binding": {"numa_binding": "node"},
    "accumulation": {"accumulate_steps": 2, "hook": "bf16"},
    "model graph": {"gradient_as_bucket_view": True, "cuda_graphs": "model"},
    "block graphs": {"gradient_as_bucket_view": True, "cuda_graphs": "blocks"},
}
OF_SCRIPT: dict[str, dict[str, dict[str, Any]]] = {
    "plain": PLAIN,
    "started": {"variables": {"threads": 2, "interfaces": "lo", "malloc": keeps_memory()}},
    "micro-batches": {
        "implicit_no_sync": {"defer_reductions": 2},
        "both": {"defer_reductions": 2, "bucket_cap_mb": 0.5},
    },
    "compiled": {
        "whole": {"optimize_ddp": False, "bucket_cap_mb": 8.0},
        "pieces": {"optimize_ddp": True, "bucket_cap_mb": 1.0},
        "replayed": {"gradient_as_bucket_view": True, "cuda_graphs": "reduce-overhead"},
    },
    "sets threads": {"cap": {"bucket_cap_mb": 0.5}},
    "builds later": {"bf16": {"hook": "bf16", "bucket_cap_mb": 0.5}},
    "registers a hook": {"fp16": {"hook": "fp16", "gradient_as_bucket_view": True}},
    "registers torch's hook": {"bf16": {"hook": "bf16", "bucket_cap_mb": 0.5}},
    "sets a static graph": {"cap": {"bucket_cap_mb": 0.5}},
    "looks for unused": {"static": {"static_graph": True}},
}
"""Script → name → configuration. Each script is one way of training that some knobs need, or that once went wrong."""
NOT_HERE = {knob.name for knob in KNOBS if knob.reach is Reach.DDP} - AVAILABLE_ARGUMENTS
"""Arguments that an old torch's DDP has not, or which cannot be used with it."""
OF_SCRIPT = {
    script: {name: v for name, v in of_script.items() if Configuration(v).without(NOT_HERE).plain() == v}
    for script, of_script in OF_SCRIPT.items()
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(x)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Training:
    """The script. `step()` trains one; `models` are its DDP objects."""

    def __init__(self, script: str) -> None:
        if script == "sets threads":
            torch.set_num_threads(len(sched_getaffinity(0)) + 1)  # OpenMP's threads spin where each has a core
        torch.manual_seed(0)
        self.script = script
        self.backend = StaticBackend()
        net = torch.compile(Net(), backend=self.backend) if script == "compiled" else Net()
        self.models = [DDP(net, find_unused_parameters=script == "looks for unused")]
        if script == "registers a hook":
            self.models[0].register_comm_hook(*hook_for(Configuration({"hook": "bf16"}), dist.group.WORLD))
        if script == "registers torch's hook":
            self.models[0]._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
        if script == "sets a static graph":
            self.models[0]._set_static_graph()
            self.models[0]._set_ddp_sink_clone(False)
        self.optimizer = torch.optim.SGD(self.models[0].parameters(), lr=0.01)
        self.since_turn = STEPS  # none was turned yet

    def step(self) -> None:
        self.since_turn += 1
        if self.script == "builds later" and self.since_turn == BUILT_LATER:
            self.models[1:] = [DDP(Net()), DDP(nn.Linear(4, 4))]
        self.optimizer.zero_grad()
        for _ in range(2 if self.script == "micro-batches" else 1):
            self.models[0](torch.randn(8, WIDTH)).square().mean().backward()
        self.optimizer.step()


def in_effect(training: Training) -> dict[str, Any]:
    """All that a configuration may change in this process, in JSON types."""
    found = {
        type(one): one
        for one in gc.get_objects()
        if type(one) in (ImplicitNoSync, Accumulation, Graphs, ReduceOverhead)
    }
    implicit_no_sync, accumulation, graphs, replays = (
        found.get(ImplicitNoSync),
        found.get(Accumulation),
        found.get(Graphs),
        found.get(ReduceOverhead),
    )
    return {
        "models": [of_model(ddp) for ddp in training.models],
        "implicit_no_sync": implicit_no_sync.every if implicit_no_sync else 1,
        "accumulation": accumulation.steps if accumulation else 1,
        "graphs": graphs._mode if graphs else "",
        "stand-ins": sum("forward" in vars(module) for ddp in training.models for module in ddp.module.modules()),
        "replays": replays.on if replays else False,
        "cuts": torch._dynamo.config.optimize_ddp,
        "replayed when compiled": training.backend.compiled[-1:],
        "threads": torch.get_num_threads(),
        "affinity": sorted({str(sorted(sched_getaffinity(int(t)))) for t in os.listdir("/proc/self/task")}),
        "environment": dict(os.environ),
    }


def of_model(ddp: DDP) -> dict[str, Any]:
    """DDP's own state: every plain value on the object, what its reducer says of its buckets, and its hook."""
    plain = {name: value for name, value in vars(ddp).items() if isinstance(value, (bool, int, float, str, type(None)))}
    # Not what its logger says: that is as old as the last sample, which trials leave out.
    buckets = [bucket.buffer().nbytes for bucket in ddp.reducer._get_zeros_like_grad_buckets()]
    hooks = [of_hook(hook, state) for hook, state in ddp._comm_hooks]
    # A hook in Python has another name here where a trial compares gradients.
    named = ddp.logger._get_ddp_logging_data().strs_map.get("comm_hook", "")
    built_in = named if named.startswith("BuiltinCommHookType") else ""
    # Only those that stay: others watch the job's first steps.
    every = (hook for p in ddp.parameters() for hook in (p._post_accumulate_grad_hooks or {}).values())
    counted = sum(hook.__module__ == UsedParameters.__module__ for hook in every)
    of_object = {"plain": plain, "buckets": buckets, "hooks": hooks, "counted gradients": counted}
    return {**of_object, "torch's hook": built_in}


def saved(training: Training) -> dict[str, Any]:
    """What a script writes when it saves its objects whole, in JSON types."""
    if training.script in NOT_SAVED:
        return {}
    ddp, optimizer = training.models[0], training.optimizer
    returned = ddp(torch.zeros(2, WIDTH))
    average = torch.optim.swa_utils.AveragedModel(ddp)
    things = (ddp, ddp.module, ddp.state_dict(), optimizer, optimizer.state_dict(), average, returned)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        names = [name for thing in things for name in names_in(thing)]
        copy.deepcopy(optimizer)
    state = {name: str(value) for name, value in ddp.__getstate__().items() if name not in LEFT_OUT}
    return {"names": sorted(set(names)), "warned": [str(w.message) for w in warned], "state": state}


NOT_SAVED = ("registers a hook", "compiled")
"""Nor could these objects be saved without autoddp: the hook holds a process group, and the backend local functions."""
LEFT_OUT = (
    *("_modules", "_module_parameters", "modules_buffers", "named_module_buffers"),
    *("require_forward_param_sync", "_has_rebuilt_buckets"),
)
"""Tensors; and what no object that is loaded reads: whether its next pass broadcasts buffers, as each does that follows
a reduction, and whether its buckets were put in order, which they were not in the new reducer."""


def names_in(thing: Any) -> list[str]:
    """All classes and functions that the file of torch.save names. It must be possible to load it."""
    file = io.BytesIO()
    torch.save(thing, file)
    file.seek(0)
    torch.load(file, weights_only=False)
    pickled = zipfile.ZipFile(file).read("archive/data.pkl")
    return [str(word) for code, word, _ in pickletools.genops(pickled) if code.name == "GLOBAL"]


def of_hook(hook: Callable[..., Any], state: Any) -> dict[str, Any]:
    """A recording, a comparison and a watch may stand around it."""
    while True:
        closed = dict(zip(hook.__code__.co_freevars, hook.__closure__ or (), strict=True))
        inside = closed.get("hook") or closed.get("compared")
        if inside is None:
            break
        hook = inside.cell_contents
    values = {
        name: str(value)
        for name, value in vars(state).items()
        if isinstance(value, (bool, int, torch.dtype, type(None)))
    }
    return {"hook": hook.__name__, "state": type(state).__name__, **values}


class Launcher:
    """The launcher's end of the link: it asks for a block of each configuration, and of none after each."""

    rank = local_rank = 0

    def __init__(self, script: str, names: list[str]) -> None:
        self.script, self.training = script, None
        self.found: dict[str, Any] = {}
        self._asked = ["before", *(one for name in names for one in (name, f"after {name}"))]
        self._next = iter(self._asked)
        self._present = ""

    def hello(self) -> bool:
        return True

    def goodbye(self, reason: str) -> None:
        assert not reason, reason

    def send(self, message: Message) -> None:
        assert isinstance(message, (Ready, BlockDone))
        if isinstance(message, BlockDone):
            self.found[self._present] = {**in_effect(self.training), "saved": saved(self.training)}

    def receive(self) -> Message:
        self._present = next(self._next, "")
        self.training.since_turn = 0
        if not self._present:
            write("trial", self.script, self.found)
            return Finish()
        configuration = Configuration(OF_SCRIPT[self.script].get(self._present, {}))
        at_once = configuration.steps_per_update
        return Measure(0, configuration, 1, STEPS // at_once - 1, at_once=at_once)


def trial(script: str) -> None:
    launcher = Launcher(script, list(OF_SCRIPT[script]))
    config = WorkerConfig(socket="none", accumulates=True, cuda_graphs=True, recompiles=True)
    start_tuning(config, launcher, os.environ.get("OMP_NUM_THREADS"))
    launcher.training = Training(script)
    while True:
        launcher.training.step()


def job(script: str, name: str) -> None:
    configuration = Configuration(OF_SCRIPT[script][name])
    if configuration.get("hook") == "powersgd":
        configuration = configuration.with_values(powersgd_start_step=0)  # as a trial measures it
    digest = parameters_digest(Net())
    watch = WatchPlan(Rung.LOSSY, limit=1.0, first=1000, every=1000, steps=1)
    configuration = configuration.without_variables
    start_applying(WorkerConfig(configuration=configuration, parameters_digest=digest, watch=watch, static_graph=True))
    training = trained(script)
    write("job", f"{script} {name}", {**in_effect(training), "saved": saved(training)})


def as_written(script: str) -> None:
    write("as", f"written {script}", {} if script in NOT_SAVED else saved(trained(script)))


def trained(script: str) -> Training:
    training = Training(script)
    training.since_turn = 0
    for _ in range(STEPS):
        training.step()
    return training


def write(side: str, name: str, found: dict[str, Any]) -> None:
    (Path(sys.argv[1]) / f"{side} {name}.json").write_text(json.dumps(found))


def run(side: str, script: str, name: str = "") -> None:
    """One process's part."""
    Graphs.__init__.__defaults__ = (static_callables,)  # torch's own needs a GPU
    os.environ["MASTER_PORT"] = str(free_port())
    dist.init_process_group("gloo")
    {"trial": trial, "job": lambda script: job(script, name), "as": as_written}[side](script)
    sys.stdout.flush()
    os._exit(0)


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def forked(variables: dict[str, str], *words: str) -> None:
    """`run(*words)` in a process of its own; if there are variables, in one that has them from its start on.

    Under --whole it is started with them. Else torch is told the number of threads, and nothing here reads the others.
    """
    pid = os.fork()
    if pid == 0:
        try:
            if variables and "TESTS_START_FROM_NOTHING" in os.environ:
                os.execve(sys.executable, [sys.executable, *sys.argv, *words], {**os.environ, **variables})
            os.environ.update(variables)
            torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
            run(*words)
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            os._exit(1)
    _, status = os.waitpid(pid, 0)
    if status:
        print(f"{words}: ended with {os.waitstatus_to_exitcode(status)}", file=sys.stderr)


def compile_once() -> None:
    """What torch.compile imports and builds for the first graph of a process takes half a second: forks have it.

    First a backward pass without it: behind a compiled graph, the first one of a torch for CUDA begins threads even
    where there is no GPU (torch 2.15), and no fork could then make a backward pass.
    """
    torch.ones(1, requires_grad=True).backward()
    torch.compile(nn.Linear(2, 2), backend=StaticBackend())(torch.ones(1, 2)).sum().backward()
    torch.compiler.reset()


def main() -> None:
    compile_once()
    gc.freeze()  # so that nothing looks at what is imported here, neither for garbage nor for what is in effect
    for script, of_script in OF_SCRIPT.items():
        starts = {k: v for values in of_script.values() for k, v in Configuration(values).start_variables.items()}
        forked(starts, "trial", script)
        forked({}, "as", script)
        for name, values in of_script.items():
            forked(Configuration(values).variables, "job", script, name)


if __name__ == "__main__":
    run(*sys.argv[2:]) if sys.argv[2:] else main()
