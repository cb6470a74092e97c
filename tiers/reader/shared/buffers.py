"""Memory that one process fills and others on the same machine read, without a copy.

The memory of a buffer is an anonymous file (`memfd_create`), whose descriptor the others get. The kernel frees it when
the last process that maps it has ended.

* `SharedBuffers` belongs to the process that fills. A buffer is used again when no view of it is left here. So this
  process keeps a view of what it has lent, until the other one gives it back or ends. Fresh memory costs as much CPU
  time as receiving the bytes.
* `AttachedBuffers` belongs to a process that reads. It maps each buffer once, and tells when the last view of lent
  bytes is gone. Nothing else may decide that: a socket may keep a view for minutes.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import mmap
import os
import weakref
from collections import deque
from collections.abc import Callable
from typing import Final, NamedTuple

from tiers.reader.chunk_cache import Extent

MIN_BYTES: Final = 256 * 1024
"""Smaller data is copied into the messages between processes: a buffer costs two files and whole pages."""
_ROUND_BYTES: Final = 256 * 1024
_MAX_FREE_BYTES: Final = 64 << 20
"""The buffers that are kept for new data have at most this size in total."""


class SharedBuffer:
    """A buffer of the process that fills it."""

    def __init__(self, number: int, size_bytes: int) -> None:
        """Raises `OSError` if the process has no file left."""
        self.number = number
        self.size_bytes = size_bytes
        self.fd = os.memfd_create("tidegate-chunks")
        weakref.finalize(self, os.close, self.fd).atexit = False
        os.ftruncate(self.fd, size_bytes)
        self.map = mmap.mmap(self.fd, size_bytes)


class Place(NamedTuple):
    """Where bytes lie."""

    buffer: SharedBuffer
    start: int


class SharedBuffers:
    """The buffers of a process. `on_dropped` is called with the number of each buffer that is used no more."""

    def __init__(self, on_dropped: Callable[[int], None] = lambda number: None) -> None:
        self._on_dropped = on_dropped
        self._numbers = itertools.count(1)
        self._buffers: dict[int, SharedBuffer] = {}
        self._free: deque[SharedBuffer] = deque()
        self._of_leases: dict[int, SharedBuffer] = {}
        """The buffers with views, by the id of the lease that their views keep."""
        self._ended_leases: deque[tuple[int, SharedBuffer]] = deque()
        """Any thread may end the last view of a buffer, and `allocate` takes notice."""

    @property
    def size_bytes(self) -> int:
        """The memory of all buffers."""
        return sum(buffer.size_bytes for buffer in self._buffers.values())

    def allocate(self, size_bytes: int) -> memoryview:
        """Returns a writable view of undefined content. Its buffer is in use until the last view of it is gone.

        Raises `OSError` if the process has no file or memory left."""
        self.collect()
        buffer = self._take(size_bytes)
        if buffer is None:
            buffer = SharedBuffer(next(self._numbers), -(-size_bytes // _ROUND_BYTES) * _ROUND_BYTES)
            self._buffers[buffer.number] = buffer
        # Every view keeps the lease, and the lease keeps the mapping. A mapping itself cannot tell that it is unused.
        lease = (ctypes.c_char * size_bytes).from_buffer(buffer.map)
        self._of_leases[id(lease)] = buffer
        weakref.finalize(lease, self._ended_leases.append, (id(lease), buffer)).atexit = False
        return memoryview(lease).cast("B")

    def memory_for(self, size_bytes: int) -> memoryview:
        """Returns memory for the answer of a store: shared memory if it is large enough and there is some."""
        if size_bytes >= MIN_BYTES:
            with contextlib.suppress(OSError):
                return self.allocate(size_bytes)
        return memoryview(bytearray(size_bytes))

    def share(self, extent: Extent) -> Extent:
        """Returns the extent in shared memory: itself, or a copy if it is elsewhere and large enough."""
        size_bytes = sum(map(len, extent.chunks))
        if size_bytes < MIN_BYTES or all(self.place_of(chunk) is not None for chunk in extent.chunks):
            return extent
        try:
            copy = self.allocate(size_bytes)
        except OSError:
            return extent  # the messages between the processes then carry its bytes
        chunks, start = [], 0
        for chunk in extent.chunks:
            copy[start : start + len(chunk)] = chunk
            chunks.append(copy[start : start + len(chunk)].toreadonly())
            start += len(chunk)
        return Extent(extent.segment, extent.first_number, tuple(chunks), size_bytes)

    def place_of(self, view: memoryview) -> Place | None:
        """Returns where the bytes of a view lie. None: not in a shared buffer."""
        lease = view.obj
        if not view.nbytes or not isinstance(lease, ctypes.Array):
            return None
        buffer = self._of_leases.get(id(lease))
        return None if buffer is None else Place(buffer, _address_of(view) - ctypes.addressof(lease))

    def collect(self) -> None:
        """Takes notice of the buffers whose last view is gone."""
        while self._ended_leases:
            lease_id, buffer = self._ended_leases.popleft()
            if self._of_leases.get(lease_id) is buffer:  # else a newer lease has got the same id
                del self._of_leases[lease_id]
            self._free.append(buffer)
        while sum(each.size_bytes for each in self._free) > _MAX_FREE_BYTES:
            dropped = self._buffers.pop(self._free.popleft().number)
            self._on_dropped(dropped.number)

    def _take(self, size_bytes: int) -> SharedBuffer | None:
        """Returns a free buffer that is hardly larger than `size_bytes`, the one that was freed last."""
        for buffer in reversed(self._free):
            if size_bytes <= buffer.size_bytes <= size_bytes + max(_ROUND_BYTES, size_bytes // 8):
                self._free.remove(buffer)
                return buffer
        return None


class AttachedBuffers:
    """The buffers of another process.

    `on_unused` is called with a buffer's number when the last view of a loan is gone, in any thread."""

    def __init__(self, on_unused: Callable[[int], None]) -> None:
        self._on_unused = on_unused
        self._maps: dict[int, mmap.mmap] = {}

    def attach(self, number: int, fd: int) -> None:
        """Maps a buffer. The caller closes `fd`. Raises `OSError`."""
        self._maps[number] = mmap.mmap(fd, 0)

    def view(self, number: int, start: int, size_bytes: int) -> memoryview:
        """Returns the lent bytes, read-only."""
        lease = (ctypes.c_char * size_bytes).from_buffer(self._maps[number], start)
        weakref.finalize(lease, self._on_unused, number).atexit = False
        return memoryview(lease).cast("B").toreadonly()

    def forget(self, number: int) -> None:
        """Forgets a buffer that the other process has dropped: no bytes of it are lent any more."""
        self._maps.pop(number, None)


class _PyBuffer(ctypes.Structure):
    """The C structure `Py_buffer`: a memoryview does not tell where in its object it begins, and this does."""

    _fields_ = (
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.py_object),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_char_p),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("suboffsets", ctypes.c_void_p),
        ("internal", ctypes.c_void_p),
    )


_get_buffer = ctypes.pythonapi.PyObject_GetBuffer
_get_buffer.argtypes = (ctypes.py_object, ctypes.POINTER(_PyBuffer), ctypes.c_int)
_release_buffer = ctypes.pythonapi.PyBuffer_Release
_release_buffer.argtypes = (ctypes.POINTER(_PyBuffer),)
_release_buffer.restype = None


def _address_of(view: memoryview) -> int:
    described = _PyBuffer()
    _get_buffer(view, ctypes.byref(described), 0)  # raises the error of the view
    try:
        return int(described.buf or 0)
    finally:
        _release_buffer(ctypes.byref(described))
