"""What two processes of one proxy share on one machine: messages over a Unix socket, and memory.

* `Channel` passes whole messages and file descriptors. The listener has a name in the kernel alone, so no file stays
  behind. Each side talks to processes of its own user only: the messages are pickles. A message that is too large for
  the socket goes in an anonymous file.
* `SharedBuffers` has memory that one process fills and others read, without a copy: anonymous files, whose descriptors
  the others get. A buffer is used again when no view of it is left in the process that fills. So that process keeps a
  view of what it has lent, until the other one gives it back or ends. Fresh memory costs as much CPU time as receiving
  the bytes.
* `BorrowedBuffers` belongs to a process that reads, and notices when the last view of lent bytes is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import itertools
import logging
import mmap
import os
import pickle
import socket
import struct
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple
from weakref import WeakValueDictionary

from tiers.reader.chunk_cache import Extent

logger = logging.getLogger(__name__)

MAX_FDS: Final = 100
"""The most descriptors of a message; the kernel takes 253."""
_INLINE_BYTES: Final = 64 * 1024
_RECEIVE_BYTES: Final = _INLINE_BYTES + 1
_BUFFER_BYTES: Final = 4 << 20
"""The requested size of the socket's buffer; the kernel may grant less."""
_MESSAGES_PER_TURN: Final = 16
_INLINE, _IN_FILE = b"\0", b"\1"
_CREDENTIALS: Final = struct.Struct("3i")
MIN_BYTES: Final = 256 * 1024
"""Smaller data is copied into the messages between processes: a buffer costs two files and whole pages."""
_ROUND_BYTES: Final = 256 * 1024
_MAX_FREE_BYTES: Final = 64 << 20
"""The buffers that are kept for new data have at most this size in total."""
_RETRY_S: Final = 1.0
"""The pause after a failed accept, for example if the process has no file descriptor left."""

Address = bytes | str


def listen() -> socket.socket:
    """Returns a listener with a name that the kernel chooses. Processes that inherit it may accept."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind("")
    listener.listen(128)
    listener.setblocking(False)
    return listener


def connect(address: Address) -> socket.socket:
    """Returns a connection to a process of this user. It does not wait for `accept`.

    Raises `OSError`, also if too many connections wait; `PermissionError` if another user listens."""
    peer = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        peer.setblocking(False)
        peer.connect(address)
    except BaseException:
        peer.close()
        raise
    return _of_own_user(peer)


def accept(listener: socket.socket) -> socket.socket:
    """Returns the next connection. Raises `OSError`; `PermissionError` if it is that of another user."""
    peer, _ = listener.accept()
    return _of_own_user(peer)


class Acceptor:
    """Accepts the connections of this user's processes while it is open. The caller owns `listener`.

    `on_peer` is called with each connection, and owns it. `wanted` is what the processes connect for."""

    def __init__(self, listener: socket.socket, wanted: str, on_peer: Callable[[socket.socket], object]) -> None:
        self._listener = listener
        self._wanted = wanted
        self._on_peer = on_peer
        self._again: asyncio.TimerHandle | None = None

    def open(self) -> None:
        self._listener.setblocking(False)
        asyncio.get_running_loop().add_reader(self._listener.fileno(), self._accept)

    def close(self) -> None:
        if self._again is not None:
            self._again.cancel()
        asyncio.get_running_loop().remove_reader(self._listener.fileno())

    def _accept(self) -> None:
        try:
            peer = accept(self._listener)
        except (BlockingIOError, InterruptedError, ConnectionError):
            return
        except PermissionError:
            logger.warning("a process of another user is refused: it asked for %s", self._wanted)
            return
        except OSError as error:
            logger.error("a process of the proxy cannot connect, trying again: %s", error.strerror or error)
            loop, fd = asyncio.get_running_loop(), self._listener.fileno()
            loop.remove_reader(fd)
            self._again = loop.call_later(_RETRY_S, loop.add_reader, fd, self._accept)
            return
        self._on_peer(peer)


def _of_own_user(peer: socket.socket) -> socket.socket:
    if _user_of(peer) != os.geteuid():
        peer.close()
        raise PermissionError("the process at the other end is that of another user")
    return peer


def _user_of(peer: socket.socket) -> int:
    credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(credentials)[1])


class Channel:
    """One end of a connection; it owns the socket. Only one event loop may use it.

    `on_message` is called with each message and its descriptors, which the receiver closes. `on_lost` is called once,
    when the peer has closed the connection or died, and not after `close`. `on_cut` is called when a message did not
    pass although the peer lives, for example because a process has no descriptor left. The connection stays open then,
    because its end would tell the peer that the memory it has lent is unused."""

    def __init__(
        self,
        peer: socket.socket,
        on_message: Callable[[Any, list[int]], None],
        on_lost: Callable[[], None],
        on_cut: Callable[[], None],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._peer = peer
        self._on_message = on_message
        self._on_lost = on_lost
        self._on_cut = on_cut
        self._unsent: deque[tuple[bytes, list[int]]] = deque()
        self._is_closed = False
        peer.setblocking(False)
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
        self._loop.add_reader(peer.fileno(), self._receive)

    def send(self, message: object, fds: Sequence[int] = ()) -> bool:
        """Sends a message when the socket takes it. The caller keeps `fds`. Does nothing after the end.

        Returns False if the process has no descriptor left: the message is cut."""
        if self._is_closed:
            return True
        body = pickle.dumps(message, protocol=5)
        kept: list[int] = []
        try:
            kept += map(os.dup, fds)
            if len(body) > _INLINE_BYTES:
                kept.append(_file_of(body))
                body = b""
        except OSError as error:
            close_all(kept)
            self._cut(error)
            return False
        self._unsent.append((_INLINE + body if body else _IN_FILE, kept))
        if len(self._unsent) == 1:
            self._send_next()
        return True

    def close(self) -> None:
        """Ends the connection. Messages that the socket has not taken are lost."""
        if self._is_closed:
            return
        self._is_closed = True
        self._loop.remove_reader(self._peer.fileno())
        self._loop.remove_writer(self._peer.fileno())
        self._peer.close()
        for _, fds in self._unsent:
            close_all(fds)
        self._unsent.clear()

    def _send_next(self) -> None:
        while self._unsent:
            body, fds = self._unsent[0]
            try:
                socket.send_fds(self._peer, [body], fds)
            except (BlockingIOError, InterruptedError):
                self._loop.add_writer(self._peer.fileno(), self._send_next)
                return
            except ConnectionError:
                self._lose()
                return
            except OSError as error:
                self._unsent.popleft()
                close_all(fds)
                self._cut(error)
                continue
            self._unsent.popleft()
            close_all(fds)
        if not self._is_closed:
            self._loop.remove_writer(self._peer.fileno())

    def _receive(self) -> None:
        for _ in range(_MESSAGES_PER_TURN):
            if self._is_closed:
                return
            try:
                body, fds, flags, _ = socket.recv_fds(self._peer, _RECEIVE_BYTES, MAX_FDS + 1)
            except (BlockingIOError, InterruptedError):
                return
            except OSError:
                self._lose()
                return
            if not body:
                close_all(fds)
                self._lose()
                return
            if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
                # Without its descriptors, a message means nothing: the process has no file left.
                close_all(fds)
                self._cut("descriptors are missing")
                continue
            try:
                data = body[1:] if body[:1] == _INLINE else _read_and_close(fds.pop())
            except OSError as error:
                close_all(fds)
                self._cut(error)
                continue
            self._on_message(pickle.loads(data), list(fds))

    def _cut(self, reason: object) -> None:
        logger.error("a message between two processes of the proxy was cut", extra={"error": str(reason)})
        self._on_cut()

    def _lose(self) -> None:
        self.close()
        self._on_lost()


def _file_of(body: bytes) -> int:
    fd = os.memfd_create("tidegate-message")
    try:
        with open(fd, "wb", closefd=False) as file:  # there is no path
            file.write(body)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _read_and_close(fd: int) -> bytes:
    try:
        with mmap.mmap(fd, 0, prot=mmap.PROT_READ) as body:
            return body[:]
    finally:
        os.close(fd)


def close_all(fds: Sequence[int]) -> None:
    for fd in fds:
        with contextlib.suppress(OSError):
            os.close(fd)


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
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.map))


class Place(NamedTuple):
    """Where bytes lie."""

    buffer: SharedBuffer
    start: int


class SharedBuffers:
    """The buffers of the process that fills them."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._free: deque[SharedBuffer] = deque()
        self._unused: deque[SharedBuffer] = deque()
        """Any thread may end the last view of a buffer, and `collect` takes notice."""
        self.size_bytes = 0
        """The memory of all buffers."""

    def allocate(self, size_bytes: int) -> memoryview:
        """Returns a writable view of undefined content. Its buffer is in use until the last view of it is gone.

        Raises `OSError` if the process has no file or memory left."""
        self.collect()
        buffer = self._take(size_bytes)
        if buffer is None:
            buffer = SharedBuffer(next(self._numbers), -(-size_bytes // _ROUND_BYTES) * _ROUND_BYTES)
            self.size_bytes += buffer.size_bytes
        # Every view keeps the lease, and the lease keeps the mapping. A mapping itself cannot tell that it is unused.
        lease = (ctypes.c_char * size_bytes).from_buffer(buffer.map)
        lease.buffer = buffer  # type: ignore[attr-defined]  # for `place_of`
        weakref.finalize(lease, self._unused.append, buffer).atexit = False
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
        buffer = getattr(view.obj, "buffer", None)
        if not view.nbytes or not isinstance(buffer, SharedBuffer):
            return None
        return Place(buffer, _address_of(view) - buffer.address)

    def collect(self) -> None:
        """Takes notice of the buffers whose last view is gone."""
        while self._unused:
            self._free.append(self._unused.popleft())
        while sum(each.size_bytes for each in self._free) > _MAX_FREE_BYTES:
            self.size_bytes -= self._free.popleft().size_bytes

    def _take(self, size_bytes: int) -> SharedBuffer | None:
        """Returns a free buffer that is hardly larger than `size_bytes`, the one that was freed last."""
        for buffer in reversed(self._free):
            if size_bytes <= buffer.size_bytes <= size_bytes + max(_ROUND_BYTES, size_bytes // 8):
                self._free.remove(buffer)
                return buffer
        return None


class BorrowedBuffers:
    """The buffers of another process. A buffer stays mapped while bytes of it are lent, and until the next one is lent.

    `on_unused` is called with a buffer's number when the last view of a loan is gone, in any thread. Nothing else may
    decide that: a socket may keep a view for minutes."""

    def __init__(self, on_unused: Callable[[int], None]) -> None:
        self._on_unused = on_unused
        self._maps: WeakValueDictionary[int, mmap.mmap] = WeakValueDictionary()
        self._last: mmap.mmap | None = None
        """The next read wants the bytes behind the last one as a rule."""

    def view(self, number: int, fd: int, start: int, size_bytes: int) -> memoryview:
        """Returns the lent bytes, read-only. The caller closes `fd`. Raises `OSError`."""
        buffer = self._maps.get(number)
        if buffer is None:
            buffer = self._maps[number] = mmap.mmap(fd, 0)
        self._last = buffer
        lease = (ctypes.c_char * size_bytes).from_buffer(buffer, start)
        weakref.finalize(lease, self._on_unused, number).atexit = False
        return memoryview(lease).cast("B").toreadonly()


_PyBuffer: Final = ctypes.c_void_p * 16
"""Memory for the C structure `Py_buffer`. Its first word is the address, which a memoryview does not have in Python."""
_get_buffer = ctypes.pythonapi.PyObject_GetBuffer
_get_buffer.argtypes = (ctypes.py_object, ctypes.c_void_p, ctypes.c_int)
_release_buffer = ctypes.pythonapi.PyBuffer_Release
_release_buffer.argtypes = (ctypes.c_void_p,)
_release_buffer.restype = None


def _address_of(view: memoryview) -> int:
    described = _PyBuffer()
    _get_buffer(view, ctypes.byref(described), 0)  # raises the error of the view
    try:
        return int(described[0] or 0)
    finally:
        _release_buffer(ctypes.byref(described))
