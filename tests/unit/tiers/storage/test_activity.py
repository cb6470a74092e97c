"""A deadline that follows progress, in virtual time."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

import pytest

from tests.support.simulation.loop import VirtualLoop
from tiers.storage.activity import Activity, note_progress, while_active, working_for


def elapsed_s(work: Callable[[], Awaitable[object]]) -> float:
    """Runs `work` in virtual time and returns how long it took; it may end by a time-out."""
    loop = VirtualLoop()

    async def run() -> float:
        with contextlib.suppress(TimeoutError):
            await work()
        return loop.time()

    try:
        began_s = loop.time()
        return loop.run_until_complete(run()) - began_s
    finally:
        loop.close()


async def moves(activity: Activity, times: int) -> None:
    for _ in range(times):
        await asyncio.sleep(20)
        activity.moved()


def test_a_call_that_moves_bytes_lives_on() -> None:
    async def work() -> None:
        async with while_active(30) as activity:
            await moves(activity, 100)

    assert elapsed_s(work) == pytest.approx(2000)


def test_a_call_that_stops_moving_ends_a_deadline_later() -> None:
    async def work() -> None:
        async with while_active(30) as activity:
            await moves(activity, 5)
            await asyncio.sleep(3600)

    assert elapsed_s(work) == pytest.approx(130)


def test_an_answer_may_take_as_long_again_as_the_body_took() -> None:
    async def work() -> None:
        async with while_active(30) as activity:
            await moves(activity, 5)
            activity.handed_over()
            await asyncio.sleep(3600)

    assert elapsed_s(work) == pytest.approx(100 + 30 + 100)


def test_progress_of_a_call_is_progress_of_the_call_around_it() -> None:
    heard: list[float] = []

    async def work() -> None:
        loop = asyncio.get_running_loop()
        async with while_active(30, lambda: heard.append(loop.time())), while_active(25) as inner:
            await moves(inner, 3)
        async with while_active(30) as after:
            inner.moved()  # too late: it is over, and extends nothing
            await asyncio.sleep(3600)
        del after

    assert elapsed_s(work) == pytest.approx(90)
    assert len(heard) == 3


async def test_a_thread_tells_the_progress_of_its_work() -> None:
    heard = asyncio.Event()
    async with while_active(None, heard.set) as activity:
        note_progress()  # this thread works for no activity
        assert not heard.is_set()
        await asyncio.to_thread(working_for, activity, note_progress)
        await heard.wait()
