"""`Channel`: whole messages and file descriptors between two processes of one proxy, over a Unix socket.

The listener has a name in the kernel alone, so no file stays behind. Each side talks to processes of its own user only:
the messages are pickles. A message that is too large for the socket goes in an anonymous file.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import mmap
import os
import pickle
import socket
import struct
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final

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

    def send(self, message: object, fds: Sequence[int] = ()) -> None:
        """Sends a message when the socket takes it. The caller keeps `fds`. Does nothing after the end."""
        if self._is_closed:
            return
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
            return
        self._unsent.append((_INLINE + body if body else _IN_FILE, kept))
        if len(self._unsent) == 1:
            self._send_next()

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
