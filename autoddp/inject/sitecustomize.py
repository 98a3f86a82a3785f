"""Runs at the start of every Python process of an autoddp job, because its folder stands first in PYTHONPATH.

It arms the worker, takes its own traces out of the environment and gives way to a sitecustomize of the user's, if there
is one. Whatever goes wrong here must not stop the script: it is said in one line and the script runs as written.

In the real job the worker is armed at the first sight of torch, and until then this file imports nothing: wrapt alone
costs five times a bare start of Python (asyncio, importlib.metadata). A process that never imports torch pays nothing.

It also runs in the processes of a command that `autoddp wrap` has started. There it only waits for torchrun.
"""

import os
import sys

TYPE_CHECKING = False  # typing's own would import typing
if TYPE_CHECKING:
    from collections.abc import Callable
    from importlib.machinery import ModuleSpec
    from typing import Any


class FirstSight:
    """An import finder that calls `then` at a module's first import. It finds no module, and removes itself then."""

    def __init__(self, module: str, then: "Callable[[str], None]", value: str) -> None:
        self.module = module
        self.then = then
        self.value = value

    def find_spec(self, name: str, path: object = None, target: object = None) -> "ModuleSpec | None":
        """Called by the import system. It looks the module up afresh, past a finder that `then` puts in front."""
        if name != self.module:
            return None
        from importlib.util import find_spec

        sys.meta_path.remove(self)
        self.then(self.value)
        return find_spec(name)


def arm(config: str, began: "dict[str, str]") -> None:
    """Hand over to the package; a failure is a warning. `began`: the environment when this process began."""
    try:
        _package()
        from autoddp.imports import past_the_script

        with past_the_script():
            from autoddp.worker.process.bootstrap import arm

            arm(config, began)
    except Exception as error:
        print(f"autoddp: warning: the script runs as written, the worker could not start: {error!r}", file=sys.stderr)


def record(plan: str, is_launched: bool) -> None:
    """Let the collectives of this process be recorded; a failure is a warning."""
    try:
        _package()
        from autoddp.worker.process.bootstrap import arm_recording

        arm_recording(plan, is_launched)
    except Exception as error:
        print(f"autoddp: warning: collectives of this process are not seen: {error!r}", file=sys.stderr)


def _package() -> None:
    """autoddp from the checkout this file lies in, without putting that folder on the script's sys.path."""
    if "autoddp" not in sys.modules:
        from importlib.util import module_from_spec, spec_from_file_location

        root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
        spec = spec_from_file_location("autoddp", os.path.join(root, "__init__.py"), submodule_search_locations=[root])
        assert spec is not None
        assert spec.loader is not None
        module = module_from_spec(spec)
        sys.modules["autoddp"] = module
        spec.loader.exec_module(module)


def replace_torchrun(options: str) -> None:
    """Make torch.distributed.run, which is about to be imported, autoddp with these options."""
    try:
        _package()
        from autoddp.cli.wrap import replace_torchrun

        replace_torchrun(options)
    except Exception as error:
        print(f"autoddp: warning: torchrun stays torchrun in {sys.executable}: {error!r}", file=sys.stderr)


def _put_back_pythonpath() -> None:
    """The script and what it starts see the environment that torchrun would give them.

    What a program between torchrun and this process has added stays: a shell script under --no-python may do so.
    """
    theirs = os.environ.pop("AUTODDP_USERS_PYTHONPATH", None)
    here, present = os.path.dirname(os.path.abspath(__file__)), os.environ.get("PYTHONPATH")
    rest = [] if present is None else [entry for entry in present.split(os.pathsep) if entry != here]
    if rest:
        os.environ["PYTHONPATH"] = os.pathsep.join(rest)
    elif theirs is not None:
        os.environ["PYTHONPATH"] = theirs
    else:
        os.environ.pop("PYTHONPATH", None)


def _give_way() -> None:
    """Import the sitecustomize that would have run without this one."""
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [entry for entry in sys.path if os.path.normpath(entry) != here]
    this = sys.modules.pop("sitecustomize", None)
    try:
        __import__("sitecustomize")  # theirs: this one's folder is gone from the path
    except ImportError:
        if this is not None:
            sys.modules["sitecustomize"] = this


def isolate(plan: str) -> None:
    """Start this process's part of the isolation. A process of a tuning attempt must not run without it."""
    can_run = False
    try:
        _package()
        from autoddp.imports import past_the_script

        with past_the_script():
            from autoddp.worker.process.isolated import start

            can_run = True
            start(plan, os.environ.pop("AUTODDP_WORKER_KEEPER", ""))
    except BaseException as error:  # this may be another Python, which lacks a package of autoddp's or is too old
        if _runs_a_program_of_the_system() or (not can_run and _may_be_any_program(plan)):
            return
        print(f"autoddp: error: the isolation of this tuning attempt could not start: {error!r}", file=sys.stderr)
        sys.stderr.flush()
        try:
            from json import loads

            from autoddp.isolation.stopping import stopper

            stopper(loads(plan)["socket"])(f"the script starts {sys.executable}, where autoddp cannot run: {error!r}")
        finally:
            os._exit(1)


def _may_be_any_program(plan: str) -> bool:
    """Whether this process needs no checks of its own, such as a tool that was installed with a Python of its own.

    The overlay keeps what it writes, and the kernel shows what it sends, as of any program that nobody knows. A rank,
    and what stands in its place before it begins, is no such program.
    """
    from json import loads

    told = loads(plan)
    is_rank = "AUTODDP_WORKER_TUNES" in os.environ
    return bool(told["programs_are_watched"] and told["level"] != "guard" and not is_rank)


def _runs_a_program_of_the_system() -> bool:
    """Whether this process runs a program of the system, such as lsb_release.

    Such programs are judged by their names, whatever language they are written in.
    """
    try:
        with open("/proc/self/cmdline", "rb") as file:
            words = file.read().split(b"\0")
    except OSError:
        return False
    script = next((word for word in words[1:] if not word.startswith(b"-")), b"")
    return script.startswith((b"/bin/", b"/sbin/", b"/usr/bin/", b"/usr/sbin/"))


def _end_with_gloo_at_rest() -> None:
    """See `worker.process.gloo_threads`. Called first: what is registered first at exit is called last."""

    def at_exit() -> None:
        if "torch" in sys.modules:
            try:
                _package()
                from autoddp.worker.process.gloo_threads import wait_for_rest

                wait_for_rest()
            except Exception as error:
                print(f"autoddp: warning: the threads of gloo are not waited for: {error!r}", file=sys.stderr)

    from atexit import register

    register(at_exit)


def _name_the_error_at_exit() -> None:
    """Leave this rank's exception for elastic's summary, at its exit. Processes that the rank forks leave nothing."""
    place, pid = os.environ.get("TORCHELASTIC_ERROR_FILE"), os.getpid()
    if not place:  # "" under --log-dir /dev/null: elastic wants no such file
        return

    def at_exit() -> None:
        if os.getpid() != pid or not (hasattr(sys, "last_exc") or hasattr(sys, "last_value")):
            return
        try:
            _package()
            from autoddp.worker.process.error_file import name_the_error

            name_the_error(place)
        except Exception as error:
            print(f"autoddp: warning: the cause is not in elastic's summary: {error!r}", file=sys.stderr)

    from atexit import register

    register(at_exit)


def _in_c(name: str) -> "str | None":
    """A variable as the next program gets it: os.environ does not know what a script has set by os.putenv."""
    try:
        from ctypes import CDLL, c_char_p

        getenv = CDLL(None).getenv
        getenv.restype = c_char_p
        value = getenv(os.fsencode(name))
    except Exception:  # a Python without ctypes
        return os.environ.get(name)
    return None if value is None else os.fsdecode(value)


def _stay_armed(orders: "dict[str, str]") -> None:
    """Keep the orders where this process becomes another program, as a script that starts itself anew by numactl.

    What it forks and starts is no rank, and gets none. `execvp` and the others call one of these two.
    """
    here, rank = os.path.dirname(os.path.abspath(__file__)), os.getpid()
    execv_before, execve_before = os.execv, os.execve

    def armed(env: "Any") -> "Any":
        distributed = sys.modules.get("torch.distributed")
        has_met = distributed is not None and distributed.is_available() and distributed.is_initialized()
        patch = sys.modules.get("autoddp.worker.ddp.patch")
        has_trained = patch is not None and patch.Patch.has_built  # its group may be destroyed by now
        is_usual = hasattr(env, "keys") and all(isinstance(name, str) for name in env)
        if os.getpid() != rank or has_met or has_trained or not is_usual:  # it does something else afterwards
            return env
        new = {**env, **orders}
        bootstrap = sys.modules.get("autoddp.worker.process.bootstrap")
        if bootstrap is not None and "OMP_NUM_THREADS" in bootstrap.written:
            # Also where it is the number from before, which the launched job's may not be.
            new["AUTODDP_WORKER_THREADS"] = "by the script"
        path = os.fsdecode(env["PYTHONPATH"]) if "PYTHONPATH" in env else None
        if here not in (path or "").split(os.pathsep):
            new["PYTHONPATH"] = os.pathsep.join([here, *([path] if path else [])])
            if path is not None:
                new["AUTODDP_USERS_PYTHONPATH"] = path
        return new

    def execv(path: "Any", argv: "Any") -> "Any":
        # Not by execve: what the script has set by os.putenv, or in C, is not in os.environ. So only ours is written,
        # and PYTHONPATH, of which ours is a part, is read where the next program will find it.
        theirs = _in_c("PYTHONPATH")
        present = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        if theirs is not None:
            present["PYTHONPATH"] = theirs
        ours = {name: value for name, value in armed(present).items() if present.get(name) != value}
        for name, value in ours.items():
            os.putenv(name, value)
        try:
            return execv_before(path, argv)
        finally:  # reached only where the call has failed
            for name in ours:
                if name in present:
                    os.putenv(name, present[name])
                else:
                    os.unsetenv(name)

    def execve(path: "Any", argv: "Any", env: "Any") -> "Any":
        return execve_before(path, argv, armed(env))

    os.execv, os.execve = execv, execve
    if execve_before in os.supports_fd:
        os.supports_fd.add(execve)


isolation = os.environ.get("AUTODDP_WORKER_ISOLATION")
if isolation is not None:
    # Both variables stay, so that Python processes which the script starts are isolated too.
    isolate(isolation)
tune, apply = os.environ.pop("AUTODDP_WORKER_TUNES", None), os.environ.pop("AUTODDP_WORKER_APPLIES", None)
launcher = os.environ.pop("AUTODDP_NAMES_ERRORS_FOR", None)
# By torchrun; "" for none. The script may set another number where it starts itself anew: then it is the script's.
threads = os.environ.pop("AUTODDP_WORKER_THREADS", os.environ.get("OMP_NUM_THREADS", ""))
records = os.environ.get("AUTODDP_RECORDS_CALLS")
if records is not None and tune is not None and records.startswith(":"):
    # The port of the agent's store, for this rank and for what it starts: the script may change MASTER_PORT. Both
    # variables stay, so that the ranks which a script starts by itself are seen.
    records = os.environ["AUTODDP_RECORDS_CALLS"] = os.environ.get("MASTER_PORT", "") + records
if isolation is None and records is None and (tune is not None or apply is not None or launcher is not None):
    _put_back_pythonpath()
if launcher != str(os.getppid()):
    launcher = None  # that of the rank which has started this process
if tune is not None or apply is not None or launcher is not None:
    _end_with_gloo_at_rest()
if launcher is not None:
    _name_the_error_at_exit()
orders = {
    "AUTODDP_WORKER_TUNES": tune,
    "AUTODDP_WORKER_APPLIES": apply,
    "AUTODDP_NAMES_ERRORS_FOR": launcher,
    "AUTODDP_WORKER_THREADS": threads,
}
if tune is not None or apply is not None or launcher is not None:
    _stay_armed({name: order for name, order in orders.items() if order is not None})
# Now, and not where torch is imported: many scripts set LOCAL_RANK, or other variables of torchrun's, before that.
environment = {**os.environ, "OMP_NUM_THREADS": threads}
if records is not None:
    record(records, tune is not None)
if tune is not None:
    arm(tune, environment)
elif apply is not None or launcher is not None:
    if "torch" in sys.modules:  # a .pth file may import it
        arm(apply or "", environment)
    else:
        sys.meta_path.insert(0, FirstSight("torch", lambda order: arm(order, environment), apply or ""))
options = os.environ.get("AUTODDP_WRAP")
if options is not None:  # it stays, with PYTHONPATH, until one of the processes imports torchrun
    sys.meta_path.insert(0, FirstSight("torch.distributed.run", replace_torchrun, options))
_give_way()  # last: it may raise, and it is to find the environment as the user had it
