"""The window of parts in flight: time-outs lower it, successes raise it again, and no place is lost."""

from __future__ import annotations

import asyncio

import pytest

from tiers.errors import RetriableRemoteStorageError, StoreOverloadedError
from tiers.storage.part_window import PartWindow


class Parts:
    """Parts that stay in flight until the test ends them."""

    def __init__(self, window: PartWindow, group: asyncio.TaskGroup) -> None:
        self.window, self.group = window, group
        self.in_flight: list[asyncio.Future[None]] = []

    async def _send(self) -> None:
        ends: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        try:
            async with self.window.part():
                self.in_flight.append(ends)
                await ends
        except RetriableRemoteStorageError:
            return
        finally:
            if ends in self.in_flight:
                self.in_flight.remove(ends)

    async def begin(self, count: int) -> list[asyncio.Task[None]]:
        tasks = [self.group.create_task(self._send()) for _ in range(count)]
        await settled()
        return tasks

    async def end(self, count: int = 1, error: Exception | None = None) -> None:
        for ends in self.in_flight[:count]:
            if error is None:
                ends.set_result(None)
            else:
                ends.set_exception(error)
        await settled()


async def settled() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


OVERLOADED = StoreOverloadedError("no answer in time")


async def test_time_outs_of_parts_in_flight_together_halve_the_limit_once() -> None:
    window = PartWindow(8)
    async with asyncio.TaskGroup() as group:
        parts = Parts(window, group)
        await parts.begin(20)
        assert len(parts.in_flight) == 8
        await parts.end(8, OVERLOADED)
        assert window.limit == 4
        assert len(parts.in_flight) == 4
        await parts.end(4, OVERLOADED)
        assert window.limit == 2
        while parts.in_flight:
            await parts.end(1, OVERLOADED)
        assert window.limit == 1


async def test_successes_raise_the_limit_again_up_to_its_maximum() -> None:
    window = PartWindow(4)
    async with asyncio.TaskGroup() as group:
        parts = Parts(window, group)
        for _ in range(3):
            await parts.begin(1)
            await parts.end(1, OVERLOADED)
        assert window.limit == 1
        limits = []
        for _ in range(20):
            await parts.begin(1)
            await parts.end()
            limits.append(window.limit)
    assert limits == sorted(limits)
    assert (limits[0], limits[-1]) == (2, 4)


async def test_other_errors_leave_the_limit_alone() -> None:
    window = PartWindow(4)
    async with asyncio.TaskGroup() as group:
        parts = Parts(window, group)
        await parts.begin(4)
        await parts.end(4, RetriableRemoteStorageError("503"))
    assert window.limit == 4


@pytest.mark.parametrize("is_admitted", [False, True])
async def test_a_cancelled_waiter_loses_no_place(is_admitted: bool) -> None:
    window = PartWindow(1)
    async with asyncio.TaskGroup() as group:
        parts = Parts(window, group)
        await parts.begin(1)
        (waiting,) = await parts.begin(1)
        if is_admitted:  # its place is given in the same moment in which it is cancelled
            parts.in_flight[0].set_result(None)
            await asyncio.sleep(0)
        waiting.cancel()
        await settled()
        await parts.end()
        await parts.begin(1)
        assert len(parts.in_flight) == 1
        await parts.end()
