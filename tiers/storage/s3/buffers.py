"""`ReusedBuffers`: memory for bodies, which is used again when the last view of it is gone.

The kernel clears each page of fresh memory, which costs about as much CPU time as receiving the bytes. A cache of
chunks drops one body for each new one, so nearly every body finds used memory. Fresh memory is mapped, so that the
kernel clears a page when its bytes arrive. A `bytearray` would clear all of them before the first byte, for 3 ms in a
body of 8 MiB (`python -m bench.micro_reads`, pass 1).
"""

from __future__ import annotations

import ctypes
import mmap
import weakref
from collections import deque
from typing import Final

MAX_FREE: Final = 8
"""The number of buffers that are kept while no view needs them."""
SMALLEST_BYTES: Final = 256 << 10
LARGEST_BYTES: Final = 16 << 20
"""Smaller bodies get fresh memory, which the allocator itself uses again. Larger ones are too rare to keep memory."""
_ROUND_BYTES: Final = 256 << 10


class ReusedBuffers:
    """The caller of `allocate` owns the view. Views and slices of it may be dropped in any thread.

    `allocate` itself may be called in one thread only."""

    def __init__(self, max_free: int = MAX_FREE) -> None:
        self._free: deque[mmap.mmap] = deque(maxlen=max_free)

    def allocate(self, length: int) -> memoryview:
        """Returns a writable view of `length` bytes of undefined content. Raises `MemoryError` and `OverflowError`."""
        if not SMALLEST_BYTES <= length <= LARGEST_BYTES:
            return memoryview(bytearray(length))
        buffer = self._take(length) or _mapped(-(-length // _ROUND_BYTES) * _ROUND_BYTES)
        # Each view keeps the lease, and the lease keeps the buffer. A map itself cannot tell when it is unused.
        lease = (ctypes.c_char * length).from_buffer(buffer)
        weakref.finalize(lease, self._free.append, buffer).atexit = False
        return memoryview(lease).cast("B")

    def _take(self, length: int) -> mmap.mmap | None:
        """Returns a free buffer that is hardly larger than `length`. Meanwhile other threads may append to the end."""
        for _ in range(len(self._free)):
            buffer = self._free.popleft()
            if length <= len(buffer) <= length + max(_ROUND_BYTES, length // 8):
                return buffer
            self._free.append(buffer)
        return None


def _mapped(length: int) -> mmap.mmap:
    """Raises `MemoryError` and `OverflowError`, as `bytearray` does."""
    try:
        return mmap.mmap(-1, length, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(str(error)) from error
