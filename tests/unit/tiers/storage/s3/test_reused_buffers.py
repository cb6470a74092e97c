"""Memory of a body is used again when its last view is gone, and never before."""

from __future__ import annotations

import ctypes
import threading

from tiers.storage.s3.buffers import LARGEST_BYTES, SMALLEST_BYTES, ReusedBuffers

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
