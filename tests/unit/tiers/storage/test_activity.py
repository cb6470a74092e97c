"""A deadline that follows progress, in virtual time."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

import pytest

from tests.support.simulation.loop import VirtualLoop
from tiers.storage.activity import Activity, note_progress, while_active


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


@pytest.mark.parametrize(
    ("times", "is_handed_over", "then_s", "lives_s"),
    [(100, False, 0, 2000), (5, False, 3600, 100 + 30), (5, True, 3600, 100 + 30 + 100)],
    ids=["moves bytes", "stops moving", "an answer may take as long again as the body took"],
)
def test_a_call_lives_while_it_moves_and_a_deadline_longer(
    times: int, is_handed_over: bool, then_s: float, lives_s: float
) -> None:
    async def work() -> None:
        async with while_active(30) as activity:
            await moves(activity, times)
            if is_handed_over:
                activity.handed_over()
            await asyncio.sleep(then_s)

    assert elapsed_s(work) == pytest.approx(lives_s)


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
    note_progress()  # of no activity
    heard = asyncio.Event()
    async with while_active(None, heard.set):
        await asyncio.to_thread(note_progress)
        await heard.wait()
