"""`SocketTransport`: a transport over a plain-text socket that the proxy owns. It can relay bytes without reading them.

The event loop's own transports keep their sockets for themselves, and copy every byte into the process and out again.
This transport reads and writes like them. In addition, `splice` moves bytes from another socket to its own one through
a pipe, so that the bytes stay in the kernel (`splice(2)`). Bytes that the socket does not take wait in the pipe, which
is then an element of the write buffer like any other: it counts, it leaves in its turn, and it ends with the transport.

The protocol decides before every read whether the next bytes need to be seen. If they need not, the kernel is asked to
wake the process only when a large part of them has arrived (SO_RCVLOWAT). That number is never above the number of
bytes that are due, and is set again after every read. A higher one would wait for bytes that nobody sends.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import socket
import weakref
from collections.abc import Iterable
from contextlib import suppress
from functools import partial
from itertools import islice
from typing import Final, Protocol

from protocol.primitives import Buffer

MIN_SPLICE_BYTES: Final = 64 * 1024
"""Below this number, a copy costs less than a splice."""
MAX_TURN_BYTES: Final = 1024 * 1024
"""What one connection may relay while the others wait."""
LOW_WATER_BYTES: Final = 64 * 1024
"""With 512 KiB, the window of the sender is full before the process wakes if the sender writes small pieces: at 60 kB a
partition, that halves the rate (`bench/partition_sizes.py`)."""
MAX_PIPES: Final = 32
"""Each takes two files, and up to 1 MiB of the kernel's memory while a client stalls."""
_SPARE_PIPES: Final = 4
_PIPE_BYTES: Final = 1024 * 1024
_IOV_MAX: Final = 1024
_DROP_BYTES: Final = 256 * 1024
_MAX_DROPPED_BYTES: Final = 8 * 1024 * 1024
"""More than the kernel receives for a socket by default."""
_FLAGS: Final = getattr(os, "SPLICE_F_NONBLOCK", 0) | getattr(os, "SPLICE_F_MOVE", 0)


class RelayingProtocol(Protocol):
    """What a protocol must offer in addition, so that its transport moves bytes without reading them."""

    @property
    def due_bytes(self) -> int:
        """The number of bytes that are known to come. 0: unknown, or so few that they are read like all others."""

    @property
    def opaque_bytes(self) -> int:
        """The number of due bytes that come next and need not be seen. 0: the next bytes must be read."""

    def get_buffer(self, sizehint: int) -> memoryview:
        """Returns the buffer for a read. `sizehint` is the number of opaque bytes, if they must be read after all."""

    def relay(self, fd: int, max_bytes: int) -> int | None:
        """Moves at most `max_bytes` opaque bytes from the socket `fd` to their destination.

        Returns their number, and 0 at the end of the stream. None: they must be read after all, because the destination
        does not take them now. Raises `BlockingIOError` if none has arrived, and `OSError` if the socket fails."""


class Pipe:
    """A pipe of the kernel that has bytes on their way from one socket to another."""

    __slots__ = ("_read_fd", "_write_fd", "size")

    def __init__(self) -> None:
        self.size = 0
        """The bytes in the pipe."""
        self._read_fd, self._write_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        with suppress(OSError):  # the user has many pipes already; a small one works, too
            fcntl.fcntl(self._write_fd, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)

    def fill(self, fd: int, max_bytes: int) -> int:
        moved = os.splice(fd, self._write_fd, max_bytes, flags=_FLAGS)
        self.size += moved
        return moved

    def drain(self, fd: int) -> int:
        moved = os.splice(self._read_fd, fd, self.size, flags=_FLAGS)
        self.size -= moved
        return moved

    def close(self) -> None:
        os.close(self._read_fd)
        os.close(self._write_fd)


class PipePool:
    """The pipes of an event loop. A connection has one only while its peer does not take what is in it."""

    def __init__(self, max_pipes: int = MAX_PIPES, min_splice_bytes: int = MIN_SPLICE_BYTES) -> None:
        self.min_splice_bytes = min_splice_bytes
        self._spare: list[Pipe] = []
        self._may_open = max_pipes if max_pipes and _can_splice() else 0

    def take(self) -> Pipe | None:
        """Returns an empty pipe. None: the limit is reached, or the process has no file left."""
        if self._spare:
            return self._spare.pop()
        if not self._may_open:
            return None
        try:
            pipe = Pipe()
        except OSError:
            return None
        self._may_open -= 1
        return pipe

    def give_back(self, pipe: Pipe) -> None:
        """Takes a pipe back. If it is not empty, its bytes belong to a connection that has ended."""
        if pipe.size or len(self._spare) >= _SPARE_PIPES:
            pipe.close()
            self._may_open += 1
        else:
            self._spare.append(pipe)

    def close(self) -> None:
        """Closes the pipes that no connection has."""
        while self._spare:
            self._spare.pop().close()
            self._may_open += 1


def _can_splice() -> bool:
    """Whether this system lets the process splice. A sandbox may refuse it."""
    try:
        pipe = Pipe()
    except OSError:
        return False
    ours, peer = socket.socketpair()
    with ours, peer:
        try:
            peer.send(b"x")
            pipe.fill(ours.fileno(), 1)
            pipe.drain(ours.fileno())
            return peer.recv(1) == b"x"
        except (OSError, AttributeError):
            return False
        finally:
            pipe.close()


class SocketTransport(asyncio.Transport):
    """Owns `sock`, which must be connected and not block, and calls `protocol` as a transport of the event loop does.

    A write buffer limit of 0 is the default, and then `pause_writing` tells that the socket has not taken all bytes."""

    __slots__ = (
        "_fd",
        "_has_ended",
        "_high_bytes",
        "_is_closing",
        "_is_lost",
        "_is_paused",
        "_is_reading",
        "_loop",
        "_low_bytes",
        "_low_water",
        "_may_read",
        "_pipes",
        "_protocol",
        "_reader",
        "_relaying",
        "_sock",
        "_unsent",
        "_unsent_bytes",
        "sent_bytes",
    )

    def __init__(
        self,
        sock: socket.socket,
        protocol: asyncio.BufferedProtocol,
        pipes: PipePool,
        relaying: RelayingProtocol | None = None,
    ) -> None:
        """`relaying` is `protocol` if it relays bytes that it does not see."""
        super().__init__()
        self._loop = asyncio.get_running_loop()
        self._sock = sock
        self._fd = sock.fileno()
        self._protocol = protocol
        self._relaying = relaying
        self._pipes = pipes
        self._low_water = 1
        self._unsent: list[memoryview | Pipe] = []  # an empty deque takes ten times as much, for each idle connection
        self._unsent_bytes = 0
        self.sent_bytes = 0
        """The bytes that the socket has taken so far, also by splices."""
        self._high_bytes = self._low_bytes = 0
        self._may_read = True
        self._is_reading = self._has_ended = False
        self._is_paused = self._is_closing = self._is_lost = False
        protocol.connection_made(self)
        if self._may_read:
            self.resume_reading()

    def get_extra_info(self, name: str, default: object = None) -> object:
        return self._sock if name == "socket" else default

    def get_protocol(self) -> asyncio.BaseProtocol:
        return self._protocol

    def is_closing(self) -> bool:
        return self._is_closing

    def pause_reading(self) -> None:
        self._may_read = False
        self._stop_reading()

    def resume_reading(self) -> None:
        self._may_read = True
        if not self._is_reading and not self._is_closing and not self._has_ended:
            self._start_reading()

    def _start_reading(self) -> None:
        self._is_reading = True
        reader = partial(self._on_readable)
        self._reader = weakref.ref(reader, self._on_reader_dropped)
        self._loop.add_reader(self._fd, reader)

    def _stop_reading(self) -> None:
        if self._is_reading:
            self._is_reading = False
            self._loop.remove_reader(self._fd)

    def _on_reader_dropped(self, _: object) -> None:
        """When a socket has an error, uvloop calls its reader once more and drops it, although there may be more to
        read before the error."""
        if self._is_reading and not self._loop.is_closed():
            self._loop.call_soon(self._read_on)

    def _read_on(self) -> None:
        if self._is_reading:
            self._stop_reading()
            self._start_reading()

    def _on_readable(self) -> None:
        relaying = self._relaying
        is_open = True
        try:
            if relaying is None or not relaying.due_bytes:
                is_open = self._read(-1) > 0
            if relaying is not None and relaying.due_bytes and self._is_reading:
                is_open = self._relay(relaying)
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            self._lose(error)
            return
        except Exception as error:
            self._lose(error)
            raise  # the event loop reports it
        if not is_open and not self._is_closing:
            self._has_ended = True
            self._stop_reading()
            if not self._protocol.eof_received():
                self.close()

    def _read(self, sizehint: int) -> int:
        count = self._sock.recv_into(self._protocol.get_buffer(sizehint))
        if count:
            self._protocol.buffer_updated(count)
        return count

    def _relay(self, relaying: RelayingProtocol) -> bool:
        """Relays bytes that need not be seen, and reads those between them. Returns False at the end of the stream.

        Goes on while the socket probably has more, up to a limit for the sake of other connections."""
        left_bytes = MAX_TURN_BYTES
        count: int | None = 1
        try:
            while left_bytes > 0 and count and self._is_reading and relaying.due_bytes:
                opaque_bytes = relaying.opaque_bytes
                count = relaying.relay(self._fd, min(opaque_bytes, left_bytes)) if opaque_bytes else None
                if count is None:
                    count = self._read(opaque_bytes or -1)
                left_bytes -= count
        except BlockingIOError:
            pass
        low_water = min(relaying.due_bytes, LOW_WATER_BYTES) or 1
        if low_water != self._low_water and not self._is_lost:
            self._low_water = low_water
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, low_water)
        return count != 0

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._high_bytes = high or 0
        self._low_bytes = low or 0

    def get_write_buffer_size(self) -> int:
        return self._unsent_bytes

    def write(self, data: Buffer) -> None:
        if self._is_closing:
            return
        sent = 0
        if not self._unsent:
            try:
                sent = self._sock.send(data)
            except (BlockingIOError, InterruptedError):
                pass
            except OSError as error:
                self._lose(error)
                return
        self.sent_bytes += sent
        if sent < len(data):
            self._keep([memoryview(data)[sent:]])

    def writelines(self, list_of_data: Iterable[Buffer]) -> None:
        if self._is_closing:
            return
        buffers = list(list_of_data)
        sent = 0
        if not self._unsent:
            try:
                sent = self._sock.sendmsg(buffers[:_IOV_MAX])
            except (BlockingIOError, InterruptedError):
                pass
            except OSError as error:
                self._lose(error)
                return
        self.sent_bytes += sent
        unsent: list[memoryview | Pipe] = []
        for buffer in buffers:
            if sent < len(buffer):
                unsent.append(memoryview(buffer)[sent:])
            sent = max(0, sent - len(buffer))
        if unsent:
            self._keep(unsent)

    def splice(self, fd: int, max_bytes: int) -> int | None:
        """Moves at most `max_bytes` of what has arrived at the socket `fd` to this one, as `relay` describes it."""
        if self._unsent or self._is_closing:
            return None
        pipe = self._pipes.take()
        if pipe is None:
            return None
        try:
            moved = pipe.fill(fd, max_bytes)
            self._drain(pipe)
        finally:
            if not pipe.size or self._is_lost:
                self._pipes.give_back(pipe)
        if pipe.size and not self._is_lost:
            self._keep([pipe])
        return moved

    def _drain(self, pipe: Pipe) -> None:
        try:
            while pipe.size:
                self.sent_bytes += pipe.drain(self._fd)
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            self._lose(error)

    def _keep(self, unsent: Iterable[memoryview | Pipe]) -> None:
        """Adds to the write buffer what the socket did not take."""
        if not self._unsent:
            self._loop.add_writer(self._fd, self._on_writable)
        for each in unsent:
            self._unsent.append(each)
            self._unsent_bytes += each.size if isinstance(each, Pipe) else len(each)
        if self._unsent_bytes > self._high_bytes and not self._is_paused:
            self._is_paused = True
            self._protocol.pause_writing()

    def _on_writable(self) -> None:
        try:
            while self._unsent:
                self._send_some()
        except (BlockingIOError, InterruptedError):
            pass
        except OSError as error:
            self._lose(error)
            return
        if not self._unsent:
            self._loop.remove_writer(self._fd)
            if self._is_closing:
                self._lose(None)
                return
        if self._is_paused and self._unsent_bytes <= self._low_bytes:
            self._is_paused = False
            self._protocol.resume_writing()

    def _send_some(self) -> None:
        """Sends as much of the head of the write buffer as the socket takes. Raises `OSError` if it takes nothing."""
        unsent = self._unsent
        head = unsent[0]
        if isinstance(head, Pipe):
            sent = head.drain(self._fd)
            self._unsent_bytes -= sent
            self.sent_bytes += sent
            if not head.size:
                del unsent[0]
                self._pipes.give_back(head)
            return
        buffers: list[memoryview] = []
        for each in islice(unsent, _IOV_MAX):
            if isinstance(each, Pipe):
                break
            buffers.append(each)
        left = sent = self._sock.sendmsg(buffers)
        self._unsent_bytes -= sent
        self.sent_bytes += sent
        gone = 0
        for buffer in buffers:
            if left < len(buffer):
                unsent[gone] = buffer[left:]
                break
            left -= len(buffer)
            gone += 1
        del unsent[:gone]

    def close(self) -> None:
        if self._is_closing:
            return
        self._is_closing = True
        self._stop_reading()
        if not self._unsent:
            self._lose(None)

    def abort(self) -> None:
        self._lose(None)

    def _lose(self, error: Exception | None) -> None:
        """Ends the connection now. Bytes that wait are lost."""
        if self._is_lost:
            return
        self._is_lost = self._is_closing = True
        self._stop_reading()
        if self._unsent:
            self._loop.remove_writer(self._fd)
            for each in self._unsent:
                if isinstance(each, Pipe):
                    self._pipes.give_back(each)
            self._unsent.clear()
            self._unsent_bytes = 0
        self._loop.call_soon(self._end, error)

    def _end(self, error: Exception | None) -> None:
        try:
            self._protocol.connection_lost(error)
        finally:
            self._drop_input()
            self._sock.close()

    def _drop_input(self) -> None:
        """Ends the stream, and reads what has arrived.

        A socket that is closed with unread bytes resets its connection. The kernel then drops the written bytes that
        have not arrived at the peer yet."""
        left_bytes = 0 if self._has_ended else _MAX_DROPPED_BYTES
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_WR)
            while left_bytes > 0 and (dropped := self._sock.recv(_DROP_BYTES)):
                left_bytes -= len(dropped)
