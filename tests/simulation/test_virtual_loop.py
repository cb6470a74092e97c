"""Tests the virtual event loop of the simulation."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine
from contextvars import copy_context
from typing import Any

import pytest

from tests.support.simulation.environment import simulated_environment
from tests.support.simulation.loop import START_S, DeadlockError, VirtualLoop, current_process


class Process:
    def __init__(self) -> None:
        self.is_dead = self.is_paused = False
        self.backlog: deque[Any] = deque()
        self.graveyard: list[object] = []

    def blocking_call(self, executor: object, work: Callable[[], Any]) -> Any:
        return work()

    def thread_latency_s(self) -> float:
        return 0.5

    def start(self, loop: VirtualLoop, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        context = copy_context()
        context.run(current_process.set, self)
        return loop.create_task(work, context=context)


@pytest.fixture
def loop() -> Any:
    made = VirtualLoop()
    yield made
    made.close()


def test_an_hour_passes_at_once(loop: VirtualLoop) -> None:
    began_s = time.perf_counter()
    loop.run_virtual(asyncio.sleep(3_600))
    assert loop.time() == START_S + 3_600
    assert time.perf_counter() - began_s < 60


def test_a_run_that_nothing_can_end_is_a_deadlock(loop: VirtualLoop) -> None:
    async def wait() -> None:
        await loop.create_future()

    with pytest.raises(DeadlockError):
        loop.run_virtual(wait())


def test_a_dead_process_runs_no_finally(loop: VirtualLoop) -> None:
    process, seen = Process(), list[str]()

    async def work() -> None:
        try:
            await asyncio.sleep(1)
            seen.append("went on")
        finally:
            seen.append("cleaned up")

    async def crash() -> None:
        process.start(loop, work())
        await asyncio.sleep(0.5)
        process.is_dead = True
        await asyncio.sleep(5)
        assert seen == []

    loop.run_virtual(crash())


def test_a_paused_process_goes_on_where_it_was(loop: VirtualLoop) -> None:
    process, seen = Process(), list[float]()

    async def work() -> None:
        await asyncio.sleep(1)
        seen.append(loop.time() - START_S)

    async def pause() -> None:
        process.start(loop, work())
        await asyncio.sleep(0.5)
        process.is_paused = True
        await asyncio.sleep(10)
        assert seen == []
        loop.go_on(process)
        await asyncio.sleep(1)

    loop.run_virtual(pause())
    assert seen == [10.5]


def test_a_call_in_a_thread_takes_virtual_time(loop: VirtualLoop) -> None:
    process = Process()

    async def work() -> float:
        await asyncio.to_thread(lambda: None)
        return loop.time() - START_S

    async def run() -> float:
        took_s: float = await process.start(loop, work())
        return took_s

    assert loop.run_virtual(run()) == 0.5


def test_the_clocks_are_virtual(loop: VirtualLoop) -> None:
    async def read() -> tuple[int, float]:
        before_ns = time.monotonic_ns()
        await asyncio.sleep(7)
        return time.monotonic_ns() - before_ns, time.time()

    with simulated_environment(loop, 1):
        elapsed_ns, now_s = loop.run_virtual(read())
    assert elapsed_ns == 7_000_000_000
    assert now_s == pytest.approx(1_700_000_000 + START_S + 7)


def test_a_generator_whose_reader_ends_early_is_closed(loop: VirtualLoop) -> None:
    closed: list[bool] = []

    async def numbers() -> AsyncIterator[int]:
        try:
            while True:
                yield 1
        finally:
            closed.append(True)

    async def read_one() -> None:
        async for _ in numbers():
            return

    async def work() -> None:
        await read_one()
        await asyncio.sleep(1)

    loop.run_virtual(work())
    assert closed == [True]
