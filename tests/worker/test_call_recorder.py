"""The recorder of collectives, in two real gloo ranks: it changes nothing, and sees every call with its place."""

from __future__ import annotations

import _thread
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import recorder_checks
import torch
import torch.distributed as dist
from launchers import PATIENCE
from on_ranks import on_ranks
from torch.distributed.algorithms.model_averaging import utils as averaging
from torch.distributed.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode

from autoddp import codec
from autoddp.diagnose.collectives.ends import StepEnds
from autoddp.diagnose.collectives.recording_files import recorded
from autoddp.wire.recorded_calls import TRIAL, WATCH, BuildsNamed, RecordingPlan, ThreadsTrial, UsedNamed
from autoddp.worker.observe.call_recorder import _DECORATORS, CallRecorder
from autoddp.worker.observe.collectives import methods_that_start_something
from autoddp.worker.observe.first_uses import FirstUses


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("recorded")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RECORDED", str(folder))
        return on_ranks(2, recorder_checks.checks, tmp_path_factory.mktemp("ranks"))


def _line_of(text: str, nth: int = 0) -> int:
    lines = Path(recorder_checks.__file__).read_text().splitlines()
    return [number for number, line in enumerate(lines, 1) if text in line][nth]


def test_the_script_is_given_what_it_is_given_without_it(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["alike"], rank["seen"]
        assert rank["forked"] == 0
        assert rank["said"] == []
        assert rank["seen"][0] == pytest.approx([2.4] * 3)


def test_it_opens_one_file_of_its_own_for_all_places_and_groups(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["opened"] == [".calls"]


def test_each_place_has_its_calls(ranks: list[dict[str, Any]]) -> None:
    rows = {(row["line"], row["collective"]): row for row in ranks[0]["rows"]}
    several = rows[_line_of("op=dist.ReduceOp.MAX"), "all_reduce"]
    assert (several["calls"], several["bytes_per_call"], several["blocking"]) == (4, 8, True)
    sparse = _line_of("dist.all_reduce(sparse)")
    assert rows[sparse, "sparse all_reduce"]["calls"] == 2
    assert (sparse, "all_reduce") not in rows
    later = rows[_line_of("async_op=True"), "all_reduce"]
    assert (later["blocking"], later["waiting"], later["calls"]) == (False, None, 2)
    assert rows[_line_of("dist.all_gather_object"), "all_gather_object"]["calls"] == 2, "of two parts each"
    assert rows[_line_of("dist.all_gather_into_tensor"), "all_gather_into_tensor"]["bytes_per_call"] == 12
    assert rows[_line_of("dist.send"), "send"]["ranks"] == [0]
    assert rows[_line_of("group.allreduce"), "allreduce"]["groups"] == [[0, 1]]
    assert rows[_line_of("dist.broadcast"), "broadcast"]["waiting"] is not None
    assert Path(several["file"]).name == "recorder_checks.py"
    paused = _line_of("dist.all_reduce(torch.ones(1))")
    assert (paused, "all_reduce") not in rows


def test_a_send_waits_for_its_end(ranks: list[dict[str, Any]]) -> None:
    """`send` and `recv` wait in torch for what its `isend` and `irecv` have asked for."""
    for what, rank in zip(("send", "recv"), ranks, strict=True):
        (row,) = [row for row in rank["rows"] if (row["line"], row["collective"]) == (_line_of(f"dist.{what}"), what)]
        assert row["blocking"]


def test_a_function_for_objects_is_seen_as_a_whole(ranks: list[dict[str, Any]]) -> None:
    """It pickles before its calls, and afterwards."""
    for rank in ranks:
        (whole,) = [one for one in rank["wholes"] if one[0] == _line_of("dist.all_gather_object")]
        _, began, ended, parts = whole
        assert len(parts) == 2
        assert all(began < at < ended for at in parts)


def test_a_group_is_seen_whoever_makes_it(ranks: list[dict[str, Any]]) -> None:
    """A mesh of devices makes its groups by a name of its own for torch's function."""
    for rank in ranks:
        assert set(rank["groups"]) == {_line_of("dist.new_group("), _line_of("init_device_mesh(")}


def test_who_is_late_and_who_waits(ranks: list[dict[str, Any]]) -> None:
    rows = {row["line"]: row for row in ranks[0]["rows"]}
    late = rows[_line_of("torch.ones(1000)")]
    assert late["waiting"] > late["transfer"]
    barrier = rows[_line_of("dist.barrier(group=group)")]
    assert barrier["waiting"] > 0


def test_where_results_are_used_first(ranks: list[dict[str, Any]]) -> None:
    """By any name; a view is no use. The modes that see it end with it."""
    for rank in ranks:
        calls, share, where = rank["uses"][_line_of("dist.all_reduce(flat)")]
        assert (calls, where) == (1, f"recorder_checks.py:{_line_of('part.add_')}"), "behind the barrier"
        assert 0.05 < share < 0.7  # the least of several, of which a standstill makes one smaller
        calls, share, where = rank["uses"][_line_of("dist.all_reduce(counts)")]
        assert (calls, where) == (0, f"recorder_checks.py:{_line_of('counts.tolist')}")
        assert share < 0.05
        assert _line_of("dist.all_reduce(never)") not in rank["uses"]
        assert not rank["is_left"]
    row = next(row for row in ranks[0]["rows"] if row["line"] == _line_of("dist.all_reduce(flat)"))
    assert (row["calls"], row["groups"]) == (16, [[0, 1]]), "a watch changes nothing of what is recorded"


@pytest.mark.parametrize("read", [torch.Tensor.untyped_storage, torch.Tensor.__dlpack__, torch.Tensor.numpy])
def test_what_reads_past_the_dispatcher_is_seen(read: Callable[[torch.Tensor], Any]) -> None:
    assert _first_uses(lambda tensor: getattr(tensor, read.__name__)()) == [7]


class Holding(torch.Tensor):
    """Holds another tensor, and does operations on that one, as DTensor does."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Any:
        one = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)  # type: ignore[attr-defined]
        one.inner = inner
        return one

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*(one.inner if isinstance(one, Holding) else one for one in args), **(kwargs or {}))


class Telling(Holding):
    """Says what it holds."""

    def __tensor_flatten__(self) -> Any:
        return ["inner"], None


@pytest.mark.parametrize(("kind", "seen"), [(Telling, [7]), (Holding, [])])
def test_what_another_tensor_holds_is_seen_or_nothing_is_said(kind: Any, seen: list[int]) -> None:
    """Below such a tensor no mode sees what is done. It would seem to be used only where it is used directly."""

    def use(result: torch.Tensor) -> None:
        torch.add(kind(result), 1)
        result.add_(1)

    assert _first_uses(use) == seen


@pytest.fixture
def compiled_add() -> Iterator[Any]:
    yield torch.compile(torch.add, backend="eager")
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()


COMPILES_IN_MODES = hasattr(TorchDispatchMode, "ignore_compile_internals")


@pytest.mark.skipif(not COMPILES_IN_MODES, reason="needs torch 2.9, which compiles while a mode looks at operations")
def test_nothing_is_said_of_first_uses_where_functions_are_compiled(compiled_add: Any) -> None:
    """What a compiled function reads does not pass the dispatcher."""
    assert _first_uses(lambda tensor: compiled_add(tensor, 1)) == []


def test_functions_that_are_compiled_stay_so_while_first_uses_are_looked_for(compiled_add: Any) -> None:
    """An older torch runs them uncompiled in a mode that looks at operations: there it does not begin."""
    compiled_add(torch.ones(4), 1)
    watch = FirstUses(time.perf_counter, lambda: None, lambda _: None)
    assert watch.begin(0.0) is COMPILES_IN_MODES
    if COMPILES_IN_MODES:
        watch.stop()


def _first_uses(use: Callable[[torch.Tensor], Any]) -> list[int]:
    """The places of which a first use is told, of one call of place 7 whose result is used so."""
    said: list[Any] = []
    methods, result = dict(vars(torch.Tensor)), torch.ones(4)
    watch = FirstUses(time.perf_counter, lambda: None, said.append)
    assert watch.begin(0.0)
    watch.called(1, 7, [result], 1.0, 2.0)
    watch.waited(1, 2.0, 3.0, is_blocking=True)
    use(result)
    watch.called(2, 7, [result], 4.0, 5.0)
    watch.end()
    assert dict(vars(torch.Tensor)) == methods, "the class is as it was"
    return [one.place for one in said if isinstance(one, UsedNamed)]


def test_no_fault_of_a_watch_reaches_the_script() -> None:
    """What is open may change at that moment: other threads, which pickle tensors, read results too."""
    said: list[Any] = []

    def changes() -> Any:
        raise RuntimeError("dictionary changed size during iteration")

    watch, result = FirstUses(time.perf_counter, changes, said.append), torch.ones(4)
    assert watch.begin(0.0)
    watch.called(1, 7, [result], 1.0, 2.0)
    watch.waited(1, 2.0, 3.0, is_blocking=True)
    assert result.tolist() == [1.0] * 4
    watch.called(2, 8, [], 4.0, 5.0)
    watch.end()
    assert not any(isinstance(one, UsedNamed) for one in said)


def test_calls_that_are_given_what_the_call_before_has_brought() -> None:
    """Of place 2; those of place 1 are each of another tensor, whatever is done with the results."""
    said: list[Any] = []
    watch = FirstUses(time.perf_counter, lambda: None, said.append)
    assert watch.begin(0.0)
    first, values, number = torch.ones(4), torch.ones(4), 0
    for _ in range(4):
        made = [first.clone(), torch.tensor([1.0])]
        for one in made:
            watch.called(number := number + 1, 1, [one], number, number + 0.5)
            one /= 2
        square = ((values - made[1]) ** 2).sum()
        watch.called(number := number + 1, 2, [square], number, number + 0.5)
    watch.end()
    assert [one for one in said if isinstance(one, BuildsNamed)] == [BuildsNamed(2)]


def test_calls_that_are_given_what_a_call_before_the_last_has_brought() -> None:
    """The variance needs the mean, and the count between them travels in a call of its own."""
    said: list[Any] = []
    watch = FirstUses(time.perf_counter, lambda: None, said.append)
    assert watch.begin(0.0)
    values, number = torch.ones(4), 0
    for _ in range(4):
        mean, count = values.mean(), torch.tensor([4])
        watch.called(number := number + 1, 1, [mean], number, number + 0.5)
        watch.called(number := number + 1, 2, [count], number, number + 0.5)
        watch.called(number := number + 1, 3, [((values - mean) ** 2).mean()], number, number + 0.5)
    watch.end()
    assert [one for one in said if isinstance(one, BuildsNamed)] == [BuildsNamed(3, 2)]


@pytest.mark.parametrize(("tensors", "steps"), [(2, 7), (2, 8), (3, 7), (32, 5)])
def test_calls_of_a_step_are_given_what_the_step_before_has_brought(tensors: int, steps: int) -> None:
    """A script that updates its weights by hand has no optimizer that would tell where a step ends.

    How many calls back the result comes from differs from call to call of the line: it is that of the step before.
    """
    said: list[Any] = []
    watch = FirstUses(time.perf_counter, lambda: None, said.append)
    assert watch.begin(0.0)
    weights, number, over = [torch.ones(4) for _ in range(tensors)], 0, []
    for _ in range(steps):
        over.append(watch.is_over(1.5))
        out = torch.stack(weights).sum()
        for weight, gradient in [(weight, weight * out) for weight in weights]:
            watch.called(number := number + 1, 1, [gradient], number, number + 0.5)
            weight -= 0.1 * gradient
    watch.end()
    assert over == [False] * 3 + [True] * (steps - 3), "it goes on until a step was seen whole"
    assert [one for one in said if isinstance(one, BuildsNamed)] == [BuildsNamed(1, tensors)]


def test_calls_of_two_loops_in_each_step_do_not_limit_each_other() -> None:
    """Five gradients travel to the ranks that own them, then two weights come back."""
    said: list[Any] = []
    watch = FirstUses(time.perf_counter, lambda: None, said.append)
    assert watch.begin(0.0)
    weights, number = [torch.ones(4) for _ in range(5)], 0
    for _ in range(6):
        out = torch.stack(weights).sum()
        gradients = [weight * out for weight in weights]
        for gradient in gradients:
            watch.called(number := number + 1, 1, [gradient], number, number + 0.5)
        for weight in weights[:2]:
            weight -= torch.stack(gradients).sum()
            watch.called(number := number + 1, 2, [weight], number, number + 0.5)
    watch.end()
    assert not [one for one in said if isinstance(one, BuildsNamed)]


@pytest.mark.parametrize(
    ("between", "builds"),
    [
        (lambda all_of_it, nth: None, False),
        (lambda all_of_it, nth: torch.empty_like(all_of_it[nth]), False),
        (lambda all_of_it, nth: all_of_it[nth].add_(all_of_it[nth - 1]), True),
        (lambda all_of_it, nth: all_of_it.mul_(2.0), True),
    ],
)
def test_pieces_of_one_tensor_do_not_come_from_each_other(between: Any, builds: bool) -> None:
    """Tokens of each expert are a row of one tensor, and what comes back lies in one that is made for it."""
    said: list[Any] = []
    watch = FirstUses(time.perf_counter, lambda: None, said.append)
    assert watch.begin(0.0)
    all_of_it, number = torch.ones(4, 8), 0
    for _ in range(3):
        for nth in range(4):
            got = between(all_of_it, nth)
            result = got if got is not None and not builds else torch.empty_like(all_of_it[nth])
            # The call itself passes the dispatcher, too, before it is told.
            watch._made(torch.ops.c10d.alltoall_base_.default, ((result, all_of_it[nth]), {}), result, ())
            watch.called(number := number + 1, 1, ([result], [all_of_it[nth]]), number, number + 0.5)
    watch.end()
    assert [one.place for one in said if isinstance(one, BuildsNamed)] == [1] * builds


def _uses_in_a_loop(averages: Callable[[torch.Tensor], Any]) -> dict[int, UsedNamed]:
    """First uses of three results of one line in each step, all of which the optimizer uses."""
    said: list[Any] = []
    frame: Any = SimpleNamespace(f_code=SimpleNamespace(co_filename="train.py"), f_lineno=12)
    watch = FirstUses(time.perf_counter, lambda: frame, said.append)
    assert watch.begin(0.0)
    results, number = [torch.ones(4) for _ in range(3)], 0
    for _ in range(6):
        for result in results:
            watch.called(number := number + 1, 7, [result], number, number + 0.5)
            watch.waited(number, number + 0.5, number + 0.7, is_blocking=True)
            averages(result)
        watch.used(results)
        watch.stepped()
    watch.end()
    return {one.nth: one for one in said if isinstance(one, UsedNamed)}


class DTensor(Telling):
    """Is called as torch's, whose operations may communicate."""


def test_what_communicates_past_the_methods_of_groups_is_told() -> None:
    """Else the answer would say that such a script hardly communicates."""
    said: list[Any] = []
    watch = FirstUses(time.perf_counter, lambda: None, said.append)
    assert watch.begin(0.0)
    torch.add(Telling(torch.ones(2)), 1)
    watch.end()
    assert said == []
    watch = FirstUses(time.perf_counter, lambda: None, said.append)
    assert watch.begin(0.0)
    torch.add(DTensor(torch.ones(2)), 1)
    torch.ops._c10d_functional.wait_tensor(torch.ones(2))
    watch.end()
    assert [one.what for one in said] == ["DTensor", "functional collectives"]


def test_each_call_of_a_line_in_a_loop_has_a_first_use_of_its_own() -> None:
    """The last one of a step is used at once. To make a mean of a sum in place is no use: it could wait as well."""
    found = _uses_in_a_loop(lambda result: result.div_(2))
    assert {nth: (one.calls, one.scaled) for nth, one in found.items()} == {
        -1: (0, 12),
        0: (2, 12),
        1: (1, 12),
        2: (0, 12),
    }
    assert {(one.file, one.scaled_in) for one in found.values()} == {("train.py", "train.py")}
    other = torch.ones(4)
    assert {one.calls for one in _uses_in_a_loop(lambda result: result.mul_(other)).values()} == {0}
    assert {one.scaled for one in _uses_in_a_loop(lambda result: result.add_(2)).values()} == {0}


def test_turns_with_other_threads(ranks: list[dict[str, Any]]) -> None:
    """As written, twice three, as written; what is called meanwhile is in no row."""
    for rank in ranks:
        assert rank["threads"] == [1, 3, 1]
        assert rank["tried"] > 3
    (row,) = (row for row in ranks[0]["rows"] if row["line"] == _line_of("dist.all_reduce(goes_on"))
    # The calls at either end of the turns may be on either side.
    assert row["calls"] <= sum(rank["made"] - rank["tried"] for rank in ranks) + 4


def test_the_methods_are_found_by_their_signatures() -> None:
    found = set(methods_that_start_something())
    assert {"allreduce", "broadcast", "allgather", "send", "recv", "barrier", "_end_coalescing"} <= found
    assert not {"rank", "size", "monitored_barrier", "_start_coalescing", "set_timeout"} & found
    assert all(callable(getattr(dist.ProcessGroup, name)) for name in found)


def test_a_batch_of_sends_is_no_call_of_all_ranks(tmp_path: Path) -> None:
    """NCCL ends each of them by a call: the last rank of a pipeline makes fewer than the others."""
    recorder = CallRecorder(RecordingPlan(str(tmp_path)), is_launched=True)

    def call_of(method: str) -> None:
        recorder.noting(method)(group, (), None, 1.0, 2.0)

    group = object()
    for method in ("allreduce", "_end_coalescing", "allreduce"):
        call_of(method)
    (process,) = recorded(tmp_path).processes
    assert [(one.place.method, one.number) for one in process.calls] == [
        ("allreduce", 0),
        ("_end_coalescing", -1),
        ("allreduce", 1),
    ]


def test_calls_that_torch_makes_for_a_line_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The line of the script has no call that could be changed."""
    recorder, group = CallRecorder(RecordingPlan(str(tmp_path)), is_launched=True), object()

    def method(*_args: Any, **_kwargs: Any) -> None:
        recorder.noting("allreduce")(group, (), None, 1.0, 2.0)

    monkeypatch.setattr(dist, "all_reduce", method)
    monkeypatch.setattr(dist, "_rank_not_in_group", lambda _group: False)
    monkeypatch.setattr(dist, "get_world_size", lambda _group: 1)
    averaging.average_parameters(iter([torch.nn.Parameter(torch.ones(1))]), group)  # type: ignore[arg-type]
    dist.all_reduce()  # type: ignore[call-arg]
    # As the line of `functional.all_reduce`, which is deprecated and warns: gradients pass through that call.
    functional._AllReduce.apply(dist.ReduceOp.SUM, group, torch.ones(1))
    (process,) = recorded(tmp_path).processes
    assert [one.place.by for one in process.calls] == [
        "distributed/algorithms/model_averaging/utils.py",
        "",
        "distributed/nn/functional.py",
    ]


_MULTIPLIES = """
class Multiplies(Function):
    @staticmethod
    def forward(ctx, given):
        return given * 2

    @staticmethod
    def backward(ctx, given):
        method()
        return given
"""


def test_calls_of_a_backward_pass_are_made_by_the_function_in_there(tmp_path: Path) -> None:
    """The line `loss.backward()` has no call that could be changed, and autograd has no options for it."""
    recorder, group = CallRecorder(RecordingPlan(str(tmp_path)), is_launched=True), object()
    names: dict[str, Any] = {
        "Function": torch.autograd.Function,
        "method": lambda: recorder.noting("allreduce")(group, (), None, 1.0, 2.0),
    }
    exec(compile(_MULTIPLIES, functional.__file__, "exec"), names)
    names["Multiplies"].apply(torch.ones(1, requires_grad=True)).backward()
    (process,) = recorded(tmp_path).processes
    assert [one.place.by for one in process.calls] == ["distributed/nn/functional.py"]


def test_a_function_of_torch_that_no_line_calls_ends_no_recording(tmp_path: Path) -> None:
    """As a hook that C++ calls in a thread of its own. Nor are other calls of the function taken for it."""
    recorder, group, made = CallRecorder(RecordingPlan(str(tmp_path)), is_launched=True), object(), threading.Event()
    names: dict[str, Any] = {"method": lambda: recorder.noting("allreduce")(group, (), None, 1.0, 2.0)}
    exec(compile("def all_reduce():\n    method()\n", dist.distributed_c10d.__file__, "exec"), names)
    exec(compile("def wrapper(tell=None):\n    all_reduce()\n    tell and tell()\n", _DECORATORS, "exec"), names)
    names["wrapper"]()
    _thread.start_new_thread(names["wrapper"], (made.set,))
    assert made.wait(PATIENCE)
    names["wrapper"]()
    (process,) = recorded(tmp_path).processes
    assert recorder.on
    assert [Path(one.place.file).name for one in process.calls] == [
        Path(__file__).name,
        Path(_DECORATORS).name,
        Path(__file__).name,
    ]


def test_lists_of_one_line_may_differ_in_length(tmp_path: Path) -> None:
    recorder, group = CallRecorder(RecordingPlan(str(tmp_path)), is_launched=True), object()
    note, one = recorder.noting("allreduce_coalesced"), torch.ones(2)
    for given in ([one], [one, one, one]):
        (lambda args: note(group, args, None, 1.0, 2.0))((given, dist.AllreduceCoalescedOptions()))
    (process,) = recorded(tmp_path).processes
    assert [call.bytes for call in process.calls] == [8, 24]


def test_gaps_are_not_looked_at_while_fewer_threads_are_tried(tmp_path: Path) -> None:
    """With these the ranks wait for a core less, and what is done again is the script as written."""
    recorder = CallRecorder(RecordingPlan(str(tmp_path)), is_launched=True)
    sgd = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], 0.1)
    trial = ThreadsTrial(torch.get_num_threads(), time.perf_counter() - 3.0, 1.0, 4)
    (tmp_path / TRIAL).write_text(codec.encode(trial), encoding="utf-8")
    recorder.stepped(sgd)
    assert recorder.begins is None
    recorder._core_waits.waited = 1.0
    time.sleep(max(0.0, trial.ends - time.perf_counter()) + 0.2)
    recorder.stepped(sgd)
    assert recorder.begins is not None
    assert recorder._core_waits.waited == 0.0, "what was seen before the trial may be the start of the script"


def test_the_accounts_of_two_threads_are_not_compared(tmp_path: Path) -> None:
    """The CPU time of one, less that of the other, would be what a rank computes between its calls.

    Nor does a thread that logs now and then take away what was seen of the one that trains.
    """
    recorder = CallRecorder(RecordingPlan(str(tmp_path)), is_launched=True)
    sgd = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], 0.1)
    for _ in range(2):
        recorder._look_after = 0.0
        recorder.stepped(sgd)
    (before,) = recorded(tmp_path).processes
    recorder._look_after = 0.0
    beside = threading.Thread(target=recorder.stepped, args=(sgd,))
    beside.start()
    beside.join()
    (process,) = recorded(tmp_path).processes
    assert (len(before.calls), len(process.calls)) == (2, 3)
    assert process.look == before.look
    assert process.look.seconds > 0.0


@pytest.mark.parametrize("who", ["a thread", "the same thread", "a thread of C++"])
def test_a_thread_that_calls_beside_the_training_is_told_apart(who: str, tmp_path: Path) -> None:
    """It sends gradients from a queue while the first one computes the next ones: they never stand in calls at once.

    Done again one after another, its calls were proved to cost a third of a step that they did not take.
    """
    recorder = CallRecorder(RecordingPlan(str(tmp_path)), is_launched=True)
    sgd, group = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], 0.1), object()

    def sends() -> None:
        for _ in range(3):
            recorder.noting("allreduce")(group, (), None, 1.0, 2.0)

    def trains() -> None:
        for _ in range(3):
            recorder.stepped(sgd)

    def both() -> None:
        trains()
        sends()

    recorder.made("init_process_group", None, 0.5, 0.0, 1.0)
    if who == "a thread of C++":  # to Python's list of threads it is as one of those
        over = threading.Lock()
        over.acquire()
        trains()
        _thread.start_new_thread(lambda: (sends(), over.release()), ())
        assert over.acquire(timeout=60)
    else:
        if who == "a thread":
            trains()
        beside = threading.Thread(target=sends if who == "a thread" else both)
        beside.start()
        beside.join()
    (process,) = recorded(tmp_path).processes
    assert {one.place.method: one.place.repeats_in_steps for one in process.calls} == {
        "init_process_group": False,
        "step of SGD": True,
        "allreduce": True,
    }
    assert process.in_threads is (who == "a thread")


def test_steps_are_seen_in_a_process_that_calls_no_collective(tmp_path: Path) -> None:
    recorder = CallRecorder(RecordingPlan(str(tmp_path)), is_launched=True)
    sgd = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], 0.1)
    for _ in range(3):
        recorder.stepped(sgd)
    made = StepEnds(tmp_path)
    made.look()
    assert [len(ends) for ends in made.of_optimizers().values()] == [3]


def test_a_pause_before_the_first_call_is_no_part_of_the_recording(tmp_path: Path) -> None:
    """A script with DDP is recorded only in the blocks of its diagnosis, the first of which comes after a while."""
    recorder = CallRecorder(RecordingPlan(str(tmp_path)), is_launched=True)
    sgd = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], 0.1)
    recorder.begin_anew()
    recorder.pause()
    time.sleep(0.3)
    recorder.resume()
    for _ in range(2):
        recorder.stepped(sgd)
        time.sleep(0.1)
        recorder.pause()
        recorder.resume()
    recorder.stepped(sgd)
    (process,) = recorded(tmp_path).processes
    assert process.seconds > 0.15


def test_what_is_lost_between_a_call_and_its_wait_counts_where_calls_were_lost_too(tmp_path: Path) -> None:
    """The sums of places stand for the calls that the ring has lost, and say what those would have said."""
    recorder, group, work = CallRecorder(RecordingPlan(str(tmp_path)), is_launched=True), object(), object()
    names = {
        "method": lambda: recorder.noting("allreduce")(group, (), work, 1.0, 2.0),
        "wait": lambda: recorder.waited(work, 5.0, 6.0),
    }
    exec(compile("def all_reduce():\n    method()\n    wait()\n", dist.distributed_c10d.__file__, "exec"), names)
    names["all_reduce"]()
    (process,) = recorded(tmp_path).processes
    assert [one.seconds for one in process.calls] == [5.0]
    assert [one.in_calls + one.in_waits for one in recorder._all] == [5.0]


def test_each_optimizer_ends_a_step_though_several_step_in_one_line(tmp_path: Path) -> None:
    """`for one in optimizers: one.step()` with two of a class: a step is as long as from one to the same one."""
    recorder = CallRecorder(RecordingPlan(str(tmp_path)), is_launched=True)
    optimizers = [torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], 0.1) for _ in range(2)]
    for _ in range(3):
        for one in optimizers:
            recorder.stepped(one)
    (process,) = recorded(tmp_path).processes
    assert [sums.count for place, sums in process.sums.items() if place.is_step] == [3, 3]


def test_an_optimizer_that_each_epoch_makes_anew_is_one(tmp_path: Path) -> None:
    """Python gives the third one the memory of the first: a step would be as long as the epoch between them."""
    recorder = CallRecorder(RecordingPlan(str(tmp_path)), is_launched=True)
    two = [torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], 0.1) for _ in range(2)]
    for epoch in range(4):
        for _ in range(40):
            recorder.stepped(two[epoch % 2])
    (process,) = recorded(tmp_path).processes
    assert [sums.count for place, sums in process.sums.items() if place.is_step] == [160]


def test_optimizers_that_each_round_makes_anew_are_the_same_ones(tmp_path: Path) -> None:
    """Federated training makes its optimizers anew in each round of a few steps, at any place in memory."""
    recorder = CallRecorder(RecordingPlan(str(tmp_path)), is_launched=True)
    parameters = [torch.nn.Parameter(torch.zeros(1)) for _ in range(2)]
    between = []
    for _ in range(5):
        optimizers = [torch.optim.SGD([one], 0.1) for one in parameters]
        between.append(torch.optim.SGD(parameters, 0.1))  # so that the next round's are not where these are
        for _ in range(3):
            for one in optimizers:
                recorder.stepped(one)
        del optimizers, one
    (process,) = recorded(tmp_path).processes
    assert [sums.count for place, sums in process.sums.items() if place.is_step] == [15, 15]


def test_an_optimizer_uses_its_gradients_though_it_may_read_them_in_code_of_its_own(tmp_path: Path) -> None:
    """Those of apex and DeepSpeed read them in C++, past torch's dispatcher: a wait behind them would be too late."""
    recorder, said = CallRecorder(RecordingPlan(str(tmp_path)), is_launched=True), list[Any]()
    parameter = torch.nn.Parameter(torch.zeros(2))
    parameter.grad = torch.ones(2)
    sgd = torch.optim.SGD([parameter], 0.1)
    recorder._watch = watch = FirstUses(time.perf_counter, lambda: None, said.append)
    assert watch.begin(0.0)
    watch.called(1, 7, [parameter.grad], 1.0, 2.0)
    watch.waited(1, 2.0, 3.0, is_blocking=True)
    recorder.steps(sgd)
    watch.called(2, 8, [], 4.0, 5.0)
    watch.end()
    assert [one.place for one in said if isinstance(one, UsedNamed)] == [7]


def test_a_watch_neither_begins_nor_ends_in_a_backward_pass() -> None:
    """Behind each function of it torch brings back the modes from before: it would be lost, or come back for good."""
    said: list[Any] = []
    watch, parameter = FirstUses(time.perf_counter, lambda: None, said.append), torch.ones(2, requires_grad=True)
    parameter.register_hook(lambda _: said.append(watch.begin(0.0)))
    (parameter * 2).sum().backward()
    assert said == [False]
    assert watch.begin(0.0)
    other = torch.ones(2, requires_grad=True)
    other.register_hook(lambda _: said.append(watch.is_over(10.0)))
    (other * 2).sum().backward()
    assert said == [False, False]
    assert watch.is_over(10.0)
    watch.end()
    assert _get_current_dispatch_mode() is None


def test_behind_a_trial_not_every_call_is_followed_by_a_look(tmp_path: Path) -> None:
    """It takes a millisecond or two, in the seconds that are to show the script as written again."""
    recorder = CallRecorder(RecordingPlan(str(tmp_path)), is_launched=True)
    sgd = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], 0.1)
    trial = ThreadsTrial(torch.get_num_threads(), time.perf_counter() - 2.6, 0.5, 4)
    (tmp_path / TRIAL).write_text(codec.encode(trial), encoding="utf-8")
    for _ in range(20):
        recorder.stepped(sgd)
    assert recorder._looks_made < 8


def test_what_is_tried_ends_where_the_recording_begins_anew(tmp_path: Path) -> None:
    """A script may communicate before it builds a DDP model: from there on it is measured as it is written."""
    recorder = CallRecorder(RecordingPlan(str(tmp_path)), is_launched=True)
    sgd = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], 0.1)
    threads = torch.get_num_threads()
    (tmp_path / WATCH).touch()
    trial = ThreadsTrial(threads + 1, time.perf_counter() - 6.0, 5.0, 4)
    (tmp_path / TRIAL).write_text(codec.encode(trial), encoding="utf-8")
    recorder.stepped(sgd)
    assert (_get_current_dispatch_mode() is not None, torch.get_num_threads()) == (True, threads + 1)
    recorder.begin_anew()
    recorder.stepped(sgd)
    assert (_get_current_dispatch_mode(), torch.get_num_threads()) == (None, threads)
    assert "tolist" not in vars(torch.Tensor)
