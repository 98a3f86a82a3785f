"""Lines that wait for the device, and how far the device is behind. What a GPU would give comes from the CPU here."""

from __future__ import annotations

import multiprocessing
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_cuda import FakeCuda

from autoddp.worker.observe.host_device import CopiesToDevice, DeviceWaits
from autoddp.worker.observe.stages import Stages

READS: dict[str, Any] = {
    "item": lambda t: t.item(),
    "float": float,
    "int": lambda t: int(t),
    "list": lambda t: t.tolist(),
    "text": lambda t: float(f"{t:.1f}"),
    "print": lambda t: float(repr(t).removeprefix("tensor(").removesuffix(")")),
    "cpu": lambda t: float(t.cpu().numpy()),
    "to": lambda t: float(t.to("cpu").numpy()),
    "to a device": lambda t: float(t.to(device=torch.device("cpu")).numpy()),
}


@pytest.fixture
def waits() -> Any:
    made = DeviceWaits("cpu")
    yield made
    made.give_late(False)
    made.watch(False)


@pytest.mark.parametrize("name", READS)
def test_a_line_is_given_what_it_asked_for_the_last_time(waits: DeviceWaits, name: str) -> None:
    waits.give_late(True)
    assert [READS[name](torch.tensor(float(n))) for n in range(4)] == [0, 0, 1, 2]
    waits.give_late(False)
    assert [READS[name](torch.tensor(float(n))) for n in range(4)] == [0, 1, 2, 3]


def test_each_line_has_a_value_of_its_own(waits: DeviceWaits) -> None:
    waits.give_late(True)
    found = []
    for n in range(3):
        found.append(torch.tensor(1.0 * n).item())
        found.append(torch.tensor(10.0 * n).item())
    assert found == [0, 0, 0, 0, 1, 10]


def test_a_value_that_changes_in_place_is_given_as_it_was(waits: DeviceWaits) -> None:
    waits.give_late(True)
    total = torch.zeros(())
    found = []
    for _ in range(3):
        total += 1
        found.append(total.item())
    assert found == [1, 1, 2]


def test_what_torchs_own_modules_read_is_left_alone(waits: DeviceWaits) -> None:
    """A gradient scaler, say, which must know at once whether a gradient is infinite."""
    of_torch: dict[str, Any] = {"__name__": "torch.amp.grad_scaler"}
    exec("def read(tensor):\n    return tensor.item()\n", of_torch)
    waits.give_late(True)
    assert [of_torch["read"](torch.tensor(n)) for n in range(3)] == [0, 1, 2]


def test_a_helper_keeps_its_callers_apart(waits: DeviceWaits) -> None:
    def value(tensor: torch.Tensor) -> float:
        return tensor.item()

    waits.give_late(True)
    found = []
    for n in range(3):
        loss, accuracy = value(torch.tensor(1.0 * n)), value(torch.tensor(10.0 * n))
        found.append((loss, accuracy))
    assert found == [(0, 0), (0, 0), (1, 10)]


@pytest.mark.parametrize("kind", [torch.int64, torch.bool])
def test_whole_numbers_are_never_late(waits: DeviceWaits, kind: torch.dtype) -> None:
    """They may be sizes, or say what to do next."""
    waits.give_late(True)
    assert [torch.tensor(n, dtype=kind).item() for n in range(2)] == [0, 1]
    assert [torch.full((n,), 1.0).sum().to(torch.int64).tolist() for n in range(3)] == [0, 1, 2]
    large = [torch.full((2**18 + 1,), float(n)) for n in range(2)]
    assert [one.cpu()[0].numpy() for one in large] == [0, 1]


def test_other_threads_and_processes_read_as_written(waits: DeviceWaits) -> None:
    """A loader's worker is forked with the patches."""
    waits.give_late(True)

    def read() -> list[float]:
        return [torch.tensor(1.0 * n).item() for n in range(3)]

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(read).result() == [0, 1, 2]
    with multiprocessing.get_context("fork").Pool(1) as processes:
        assert processes.apply(_read) == [0, 1, 2]


def _read() -> list[float]:
    return [torch.tensor(1.0 * n).item() for n in range(3)]


def test_only_what_leaves_the_host_is_a_copy() -> None:
    begun = []
    copies = CopiesToDevice(lambda: begun.append("begun") or "other", lambda before: None)
    copies.watch()
    torch.zeros(1).to(torch.float64).to("cpu").to(torch.zeros(1)).to(device="cpu", dtype=torch.float32)
    assert not begun
    torch.zeros(1).to("meta")
    copies.stop()
    assert begun == ["begun"]
    assert "to" not in vars(torch.Tensor)


def test_what_is_differentiated_stays_so(waits: DeviceWaits) -> None:
    waits.give_late(True)
    for n in range(3):
        weight = torch.tensor(float(n), requires_grad=True)
        (2 * weight.cpu()).backward()
        assert weight.grad == 2


def test_lines_that_wait_are_told_with_their_seconds(waits: DeviceWaits, monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(_tensor: torch.Tensor) -> float:
        time.sleep(0.02)
        return 1.0

    monkeypatch.setattr(torch.Tensor, "item", slow)
    waits.watch(True)
    for _ in range(2):
        torch.zeros(()).item()
    torch.zeros(()).tolist()
    waits.watch(False)
    first, *others = waits.longest.items()
    assert first[0].startswith(f"{Path(__file__).name}:")
    assert first[0].endswith(" .item()")
    assert 0.04 <= first[1] < 20  # seconds: whatever the machine did meanwhile
    assert [line.split(" ")[1] for line, _ in others] == [".tolist()"]


def test_a_synchronisation_of_the_scripts_is_left_out(waits: DeviceWaits, monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[Any] = []
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    waits.watch(True)
    torch.cuda.synchronize(0)
    waits.give_late(True)
    torch.cuda.synchronize(1)
    ours: dict[str, Any] = {"__name__": "autoddp.worker.process.device", "torch": torch}
    exec("torch.cuda.synchronize(2)", ours)
    waits.give_late(False)
    torch.cuda.synchronize(3)
    assert waited == [0, 2, 3]
    assert [line.partition(" ")[2] for line in waits.longest] == ["torch.cuda.synchronize()"] * 2  # 0 and 3


def test_all_is_put_back(waits: DeviceWaits) -> None:
    def methods() -> Any:
        return dict(vars(torch.Tensor)), torch.cuda.synchronize

    before = methods()
    waits.give_late(True)
    waits.watch(True)
    waits.watch(False)
    assert methods() != before
    waits.give_late(False)
    assert methods() == before


def test_how_far_the_device_is_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """The script takes 10 ms for its first step, and its device 50; then they wait for each other."""
    fake = FakeCuda()
    fake.install(monkeypatch)
    now = 0.0
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    before = dict(vars(torch.Tensor))
    stages = Stages()
    stages.start(torch.device("cuda", 0))
    now += 0.01
    fake.run(0, 0.05)
    stages.enter("forward")
    stages.lap()
    now += 0.05
    fake.run(0, 0.01)
    stages.lap()
    first, second = stages.stop().queued
    assert first == pytest.approx(0.04)
    assert second == pytest.approx(0.0)
    assert dict(vars(torch.Tensor)) == before
