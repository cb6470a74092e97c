"""Threads that may be stuck: their number, the errors of their callers, and their end."""

from __future__ import annotations

import asyncio
import threading
from functools import partial

import pytest

from tests.support.tiers.waiting import until
from tiers.storage.activity import MAX_ABANDONED, BlockingCalls, Call, note_progress


def threads_of(name: str) -> int:
    return sum(thread.name == name for thread in threading.enumerate())


async def test_one_thread_serves_the_calls_in_order_with_results_and_errors() -> None:
    calls = BlockingCalls("one-after-another", 2)
    for number in range(3):
        assert await calls.run(lambda _, number=number: number, 10.0) == number  # type: ignore[misc]

    def fails(_: Call[None]) -> None:
        raise OSError("broken")

    with pytest.raises(OSError, match="broken"):
        await calls.run(fails, 10.0)

    def panics(_: Call[None]) -> None:
        raise BaseException("read past the end")

    with pytest.raises(RuntimeError, match="read past the end"):
        await calls.run(panics, 10.0)
    assert threads_of("one-after-another") == 1
    for _ in range(2):
        calls.close()
    await until(lambda: threads_of("one-after-another") == 0)
    with pytest.raises(RuntimeError, match="closed"):
        await calls.run(lambda _: None, 10.0)


async def test_stuck_calls_meet_their_deadlines_and_are_replaced() -> None:
    calls = BlockingCalls("stuck", 2)
    healed = threading.Event()
    seen: list[bool] = []

    def stuck(begun: threading.Event, call: Call[None]) -> None:
        begun.set()
        healed.wait()
        seen.append(call.is_abandoned)
        call.check()

    async def one_more_is_stuck() -> None:
        """A busy machine may not begin a call before its deadline: that one ends by itself, and is made again."""
        begun, before = threading.Event(), calls.abandoned
        while not begun.is_set():
            with pytest.raises(TimeoutError):
                await calls.run(partial(stuck, begun), 0.01)
            await until(lambda: begun.is_set() or calls.abandoned == before)
        assert calls.abandoned == before + 1

    for _ in range(2 * MAX_ABANDONED):
        await one_more_is_stuck()
    assert calls.abandoned == 2 * MAX_ABANDONED
    assert await calls.run(lambda _: "works", 10.0) == "works"

    for _ in range(2):  # the last two places: now nothing can run
        await one_more_is_stuck()
    with pytest.raises(TimeoutError):
        await calls.run(lambda _: "never", 0.01)
    await until(lambda: threads_of("stuck") == 2 * MAX_ABANDONED + 2)

    healed.set()
    assert await calls.run(lambda _: "works again", 30.0) == "works again"
    await until(lambda: calls.abandoned == 0)
    assert all(seen)
    await until(lambda: threads_of("stuck") <= 2)
    calls.close()
    await until(lambda: threads_of("stuck") == 0)


async def test_a_call_that_waits_lives_on_while_those_before_it_move() -> None:
    calls = BlockingCalls("moving", 1)
    go_on = threading.Event()

    def moves(_: Call[str]) -> str:
        while not go_on.wait(0.01):
            note_progress()
        return "moved"

    async with asyncio.TaskGroup() as group:
        first = group.create_task(calls.run(moves, None))
        waiting = [group.create_task(calls.run(lambda _: "ran", 2.0)) for _ in range(3)]
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        await until(lambda: loop.time() - began_s > 3.0)  # longer than their deadline
        assert not any(each.done() for each in waiting)
        go_on.set()
    assert (first.result(), [each.result() for each in waiting]) == ("moved", ["ran"] * 3)
    calls.close()
