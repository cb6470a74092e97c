"""The parts of a large object, how many of them are in flight, and the memory that bodies use again."""

from __future__ import annotations

import asyncio
import ctypes
import threading
from contextlib import suppress

from hypothesis import given
from hypothesis import strategies as st

from tiers.errors import RemoteStorageError, RetriableRemoteStorageError, StoreOverloadedError
from tiers.storage.s3.buffers import LARGEST_BYTES, SMALLEST_BYTES, ReusedBuffers
from tiers.storage.s3.upload import MAX_PARTS, PartWindow, parts_of


@given(size_bytes=st.integers(1, 1 << 44), least_bytes=st.integers(1 << 20, 1 << 30))
def test_all_parts_have_one_size_and_the_last_may_have_less(size_bytes: int, least_bytes: int) -> None:
    parts = parts_of(size_bytes, least_bytes)
    sizes = [size for _, size in parts]
    assert [start for start, _ in parts] == [number * sizes[0] for number in range(len(parts))]
    assert (len(set(sizes[:-1])) <= 1, sizes[-1] <= sizes[0], sum(sizes)) == (True, True, size_bytes)
    assert len(parts) <= MAX_PARTS
    assert len(parts) == 1 or sizes[0] >= least_bytes


def test_an_object_of_up_to_two_parts_is_one() -> None:
    assert parts_of(0, 8) == [(0, 0)]
    assert parts_of(16, 8) == [(0, 16)]
    assert parts_of(17, 8) == [(0, 9), (9, 8)]


class Parts:
    """Parts of many uploads, which stay in flight until the test ends them."""

    def __init__(self, window: PartWindow, group: asyncio.TaskGroup) -> None:
        self.window = window
        self.in_flight: list[asyncio.Future[None]] = []
        self.tasks = [group.create_task(self._send()) for _ in range(60)]

    async def _send(self) -> None:
        ends: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        with suppress(RemoteStorageError):
            async with self.window.part():
                self.in_flight.append(ends)
                await ends

    async def end(self, count: int, error: Exception | None = None) -> int:
        """Ends the parts that are in flight longest. Returns how many are in flight then."""
        ended, self.in_flight = self.in_flight[:count], self.in_flight[count:]
        for one in ended:
            if error is None:
                one.set_result(None)
            else:
                one.set_exception(error)
        for _ in range(10):
            await asyncio.sleep(0)
        return len(self.in_flight)


OVERLOADED = StoreOverloadedError("no answer in time")


async def test_overload_halves_the_window_once_and_successes_raise_it_again() -> None:
    async with asyncio.TaskGroup() as group:
        parts = Parts(PartWindow(8), group)
        assert await parts.end(0) == 8
        assert await parts.end(4, RetriableRemoteStorageError("500")) == 8
        assert [await parts.end(1, OVERLOADED) for _ in range(8)] == [7, 6, 5, 4, 4, 4, 4, 4]
        assert await parts.end(4, OVERLOADED) == 2
        assert [await parts.end(2, OVERLOADED), await parts.end(1, OVERLOADED)] == [1, 1]
        sizes = [await parts.end(1) for _ in range(25)]
        assert sizes == sorted(sizes)
        assert (sizes[0], sizes[-1]) == (2, 7)
        while parts.in_flight:
            assert await parts.end(1) <= 8


async def test_places_that_are_free_go_with_the_limit() -> None:
    window = PartWindow(16)
    for _ in range(4):
        with suppress(StoreOverloadedError):
            async with window.part():
                raise OVERLOADED
    async with asyncio.TaskGroup() as group:
        parts = Parts(window, group)
        assert await parts.end(0) == 1
        while parts.in_flight:
            assert await parts.end(1) <= 16


async def test_a_cancelled_wait_loses_no_place() -> None:
    async with asyncio.TaskGroup() as group:
        parts = Parts(PartWindow(1), group)
        assert await parts.end(0) == 1
        parts.tasks[1].cancel()
        parts.in_flight[0].set_result(None)  # its place is given in the same moment in which the next is cancelled
        await asyncio.sleep(0)
        parts.tasks[2].cancel()
        parts.in_flight.clear()
        assert await parts.end(0) == 1
        for task in parts.tasks:
            task.cancel()


MIB = 1 << 20


def place(view: memoryview) -> int:
    """The address of the first byte."""
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


def test_the_memory_of_a_body_that_any_thread_drops_is_used_again() -> None:
    buffers = ReusedBuffers()
    bodies = [buffers.allocate(8 * MIB)]
    where = place(bodies[0])
    thread = threading.Thread(target=bodies.clear)
    thread.start()
    thread.join()
    small = buffers.allocate(MIB)
    assert (place(small) != where, memoryview(small.obj).nbytes) == (True, MIB)  # not the much larger one
    again = buffers.allocate(8 * MIB - 1000)
    assert place(again) == where
    assert (again.nbytes, again.format, again.readonly) == (8 * MIB - 1000, "B", False)


def test_a_slice_keeps_the_memory_of_its_body() -> None:
    buffers = ReusedBuffers()
    body = buffers.allocate(MIB)
    body[:] = b"x" * MIB
    part, where = body[5:10].toreadonly(), place(body)
    del body
    other = buffers.allocate(MIB)
    other[:] = b"y" * MIB
    assert (place(other) != where, part.tobytes(), memoryview(part.obj).nbytes) == (True, b"xxxxx", MIB)
    del part
    assert place(buffers.allocate(MIB)) == where


def test_little_memory_is_kept_free() -> None:
    buffers = ReusedBuffers(max_free=2)
    bodies = [buffers.allocate(MIB) for _ in range(5)]
    where = [place(body) for body in bodies]
    while bodies:
        del bodies[0]
    taken = [buffers.allocate(MIB) for _ in range(2)]
    assert [place(body) for body in taken] == where[-2:]
    for length in (0, 1, SMALLEST_BYTES - 1, LARGEST_BYTES + 1):
        body = buffers.allocate(length)
        assert (body.nbytes, body.format, type(body.obj)) == (length, "B", bytearray)
