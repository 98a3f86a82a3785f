"""A capture that other threads do not disturb, and that leaves no trace where it fails; on a CUDA that is not there.

`torch.cuda.graph` and `torch.cuda.make_graphed_callables` are torch's own. tests/gpu does the same on a real device.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fake_cuda import FakeCuda
from torch import nn

from autoddp.worker.graphs.capture import Sample, _Aliased, _ByPosition
from autoddp.worker.graphs.safe_capture import safe_captures
from autoddp.worker.graphs.signature import signature_of

SECOND = torch.device("cuda", 1)
POOL = (0, 7)


class Machine(FakeCuda):
    """What a capture changes besides the current stream."""

    def __init__(self) -> None:
        super().__init__()
        self.modes: list[str] = []
        self.open: list[tuple[int, Any]] = []
        """Pools, by device, into which the allocator puts what is asked for."""
        self.released: list[tuple[int, Any]] = []
        self.capturing = False
        """Whether the random generator takes itself for one under capture."""
        self.refuses_to_begin = self.broken = False
        self.cleared: list[int] = []
        """Captures begun when what cuBLAS works in was given back."""

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().install(monkeypatch)
        machine = self

        class Graph:
            def capture_begin(self, pool: Any, capture_error_mode: str = "global", **_: Any) -> None:
                machine.modes.append(capture_error_mode)
                machine.open.append((machine.current, pool))
                if machine.refuses_to_begin:
                    raise RuntimeError("no capture begins")
                machine.capturing = True
                self.stream = machine.current_stream()

            def capture_end(self) -> None:
                assert machine.current_stream() is self.stream
                if machine.broken:  # as torch has it: before anything is put right
                    raise RuntimeError("the capture was invalidated")
                machine.open.pop()
                machine.capturing = False

            def replay(self) -> None:
                pass

        class Generator:
            def clone_state(self) -> Generator:
                return Generator()

            def graphsafe_set_state(self, other: Generator) -> None:
                machine.capturing = False

        def rand(*_: Any, device: torch.device) -> None:
            assert device == SECOND
            if machine.capturing:
                raise RuntimeError("offset increment outside graph capture encountered unexpectedly")

        def end(device: int, pool: Any) -> None:
            machine.open.remove((device, pool))

        monkeypatch.setattr(torch, "rand", rand)
        monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
        monkeypatch.setattr(torch.cuda, "default_generators", (None, Generator()))
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
        monkeypatch.setattr(torch.cuda.graphs, "graph_pool_handle", lambda: POOL)
        monkeypatch.setattr(torch._C, "_host_emptyCache", lambda: None, raising=False)
        monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", end, raising=False)
        clear = lambda: self.cleared.append(len(self.modes))  # noqa: E731
        monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", clear, raising=False)
        releases = lambda device, pool: self.released.append((device, pool))  # noqa: E731
        monkeypatch.setattr(torch._C, "_cuda_releasePool", releases, raising=False)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    fake = Machine()
    fake.current = 1  # `capture` makes the model's device the current one
    fake.install(monkeypatch)
    return fake


@pytest.fixture(autouse=True)
def nothing_stays(machine: Machine) -> Any:
    before, graph = machine.streams[1], torch.cuda.graph
    yield
    assert machine.streams[1] is before
    assert torch.cuda.graph is graph
    assert machine.open == []
    assert not machine.capturing
    assert set(machine.modes) == {"thread_local"}


def captured(body: Any) -> None:
    with safe_captures(SECOND), torch.cuda.graph(torch.cuda.CUDAGraph(), pool=POOL):
        body()


def test_other_threads_may_do_what_they_like(machine: Machine) -> None:
    captured(lambda: None)
    assert machine.released == []


def test_a_capture_has_workspaces_of_its_own_and_leaves_none(machine: Machine) -> None:
    captured(lambda: None)
    assert machine.cleared == [0, 1]


def test_workspaces_that_a_graph_of_the_script_may_use_stay(machine: Machine) -> None:
    graph = torch.cuda.CUDAGraph()
    captured(lambda: None)
    assert machine.cleared == []
    del graph


def test_what_fails_inside_is_undone_and_told(machine: Machine) -> None:
    def fails() -> None:
        machine.broken = True
        raise RuntimeError("operation not permitted when stream is capturing")

    with pytest.raises(RuntimeError, match="not permitted"):
        captured(fails)
    assert machine.released == [(1, POOL)]


def test_a_capture_that_cannot_be_ended_is_undone(machine: Machine) -> None:
    with pytest.raises(RuntimeError, match="was invalidated"):
        captured(lambda: setattr(machine, "broken", True))


def test_a_capture_that_cannot_begin_is_undone(machine: Machine) -> None:
    machine.refuses_to_begin = True
    with pytest.raises(RuntimeError, match="no capture begins"):
        captured(lambda: None)


class Layer(nn.Linear):
    def forward(self, x: torch.Tensor, scale: float = 1.0) -> dict[str, torch.Tensor]:
        return {"out": super().forward(x) * scale}


def aliased_layers() -> tuple[list[_Aliased], list[tuple[torch.Tensor, ...]]]:
    calls, given = [], []
    for _ in range(2):
        layer, x = Layer(3, 3), torch.ones(2, 3, requires_grad=True)
        signature, tensors = signature_of((x,), {"scale": 2.0})
        sample = Sample(layer, layer, signature, [t.detach() for t in tensors], None)
        calls.append(_Aliased(_ByPosition(sample)))
        given.append((*sample.inputs(), *calls[-1].aliases()))
    return calls, given


def test_torchs_own_function_takes_what_it_gets(machine: Machine) -> None:
    calls, given = aliased_layers()
    with safe_captures(SECOND):
        made = torch.cuda.make_graphed_callables(tuple(calls), tuple(given), num_warmup_iters=0)
    assert len(machine.modes) == 4  # each layer's forward and backward
    graphed = calls[0].graphed(made[0])
    x = given[0][0].detach().clone().requires_grad_()
    out = graphed(x)["out"]
    assert torch.equal(out, calls[0](*given[0])["out"])
    gradients = torch.autograd.grad(out, (x, *calls[0].parameters), torch.ones_like(out))
    assert [g.shape for g in gradients] == [(2, 3), (3, 3), (3,)]


def test_torchs_own_function_fails_without_a_trace(machine: Machine) -> None:
    calls, given = aliased_layers()

    def fails(*_: torch.Tensor) -> None:
        machine.broken = True
        raise RuntimeError("operation not permitted when stream is capturing")

    with pytest.raises(RuntimeError, match="not permitted"), safe_captures(SECOND):
        torch.cuda.make_graphed_callables((calls[0], fails), tuple(given), num_warmup_iters=0)
