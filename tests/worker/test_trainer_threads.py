"""Two threads that train a DDP object each are seen, and a pool of threads that train one is not taken for them."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from autoddp.worker.trial.trainer_threads import TrainerThreads


def _passes(*of_threads: tuple[int, int]) -> list[str]:
    """What is said of training passes one after another, each of a thread and of a model, by their numbers."""
    said: list[str] = []
    watch = TrainerThreads(said.append)
    models: list[Any] = [torch.nn.Linear(1, 1) for _ in range(2)]
    pools = [ThreadPoolExecutor(1) for _ in range(2)]
    try:
        for thread, model in of_threads:
            done: Future[None] = pools[thread].submit(watch.forward_begins, models[model])
            done.result()
    finally:
        for pool in pools:
            pool.shutdown()
    return said


def test_two_threads_that_train_a_model_each_are_seen() -> None:
    (*_, why) = _passes(*[(0, 0), (1, 1)] * 4)
    assert why.startswith("the script trains several DDP models in a thread each")


def test_one_thread_or_a_pool_is_no_reason() -> None:
    """A GAN has two models in one thread; asyncio runs each step of one model in whatever thread is free."""
    assert not _passes(*[(0, 0), (0, 1)] * 4)
    assert not _passes(*[(0, 0), (1, 0)] * 4)
    assert not _passes(*[(0, 0)] * 4, *[(1, 1)] * 2)
